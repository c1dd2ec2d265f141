"""The target of a drafter, from its GGUF: the tokenizer, which the drafter shares, and sizes for comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pyllama_kvflash.convert.config import Config
from pyllama_kvflash.convert.hparams import Drafter
from pyllama_kvflash.convert.metadata import Field, read_metadata
from pyllama_kvflash.errors import ModelError, UsageError

_TOKENS = "tokenizer.ggml.tokens"
MASK = "tokenizer.ggml.mask_token_id"


@dataclass(frozen=True, slots=True)
class Target:
    """The metadata of a target's GGUF. tokenizer: its tokenizer.* keys. mrope: whether the target uses M-RoPE."""

    path: Path
    architecture: str
    tokenizer: dict[str, Field]
    n_vocab: int
    n_embd: int
    n_layer: int
    mrope: bool

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the metadata of a GGUF file. Raises UsageError and ModelError."""
        if path.is_dir():
            msg = (
                f"{path} is a folder: give the target's GGUF, from which the tokenizer is copied; convert the target"
                " first, with llama.cpp's convert_hf_to_gguf.py (--vocab-only is enough)"
            )
            raise UsageError(msg)
        try:
            return cls._of(path, read_metadata(path, _wanted))
        except OSError as err:
            msg = f"{path} cannot be read: {err.strerror}"
            raise UsageError(msg) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            msg = f"{path} is not a GGUF model, or is damaged: its metadata cannot be read: download it again"
            raise ModelError(msg) from None

    @classmethod
    def _of(cls, path: Path, found: dict[str, Field]) -> Self:
        arch = found["general.architecture"].value.decode()
        tokenizer = {key: field for key, field in found.items() if key.startswith("tokenizer.")}
        if _TOKENS not in tokenizer:
            msg = f"{path} has no tokenizer: give the target that the drafter was made for"
            raise ModelError(msg)
        sections = found.get(f"{arch}.rope.dimension_sections")
        return cls(
            path,
            arch,
            tokenizer,
            n_vocab=len(tokenizer[_TOKENS].value),
            n_embd=_size(found, f"{arch}.embedding_length"),
            n_layer=_size(found, f"{arch}.block_count"),
            mrope=sections is not None and any(sections.value),
        )

    def check(self, drafter: Drafter, config: Config) -> None:
        """Raise ModelError if a drafter was not made for this target. Sizes that the GGUF lacks are not compared."""
        vocab, hidden = drafter.sizes["vocab"], drafter.sizes["hidden"]
        if vocab.value != self.n_vocab:
            self._differs(config, f"{vocab.key} is {vocab.value}", f"{self.n_vocab} tokens")
        if self.n_embd and hidden.value != self.n_embd:
            self._differs(config, f"{hidden.key} is {hidden.value}", f"embedding_length = {self.n_embd}")
        layers = drafter.keys["target_layers"]
        last = max(layers) if isinstance(layers, list) else 0
        if self.n_layer and last > self.n_layer:
            self._differs(config, f"target_layer_ids go up to {last - 1}", f"layers 0 to {self.n_layer - 1}")

    def _differs(self, config: Config, ours: str, theirs: str) -> None:
        msg = f"{config.path}: {ours}, and {self.path} has {theirs}: give the target that the drafter was made for"
        raise ModelError(msg)


def _wanted(key: str) -> bool:
    sizes = (".embedding_length", ".block_count", ".rope.dimension_sections")
    return key.startswith("tokenizer.") or key == "general.architecture" or key.endswith(sizes)


def _size(found: dict[str, Field], key: str) -> int:
    return int(found[key].value) if key in found else 0
