"""A loaded model and its tokenizer."""

import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import errors
from pyllama_kvflash.fingerprint import fingerprint
from pyllama_kvflash.native.device import gpus, planned_host
from pyllama_kvflash.native.lib import check, compute, ffi, init, lib, owned
from pyllama_kvflash.native.rope import Rope
from pyllama_kvflash.native.unloadable import why_unloadable

Tokens = npt.NDArray[np.int32]

_DRAFT_HEADS = {"eagle3", "dflash", "gemma4-assistant"}
_MILLION, _BILLION = 10**6, 10**9
_INPUT = {f"{name}.weight" for name in ("token_embd", "position_embd", "token_types", "per_layer_token_embd")}
"""Tensors that llama.cpp always keeps on the host: its LLM_TENSOR_LAYER_INPUT."""
_SPLIT_MODES = {"layer": lib.LLAMA_SPLIT_MODE_LAYER, "none": lib.LLAMA_SPLIT_MODE_NONE}
_SIZE = re.compile(r"[\w.+x-]{1,16}")  # "0.5B", "30B-A3B", "8x7B"


class Weight(NamedTuple):
    """A tensor of a model: its name, its bytes, and its device as an index into devices()."""

    name: str
    size: int
    device: int


class _Progress:
    """Carries a Python callback, and any exception that it raises, through the native loader."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self.report = report
        self.error: BaseException | None = None


@ffi.def_extern(name="kvf_on_progress", error=False)  # type: ignore[untyped-decorator]
def _on_progress(progress: float, user_data: Any) -> bool:
    state: _Progress = ffi.from_handle(user_data)
    try:
        state.report(progress)
    except BaseException as err:  # noqa: BLE001 (raised again by Model.load)
        state.error = err
        return False
    return True


class FIM(NamedTuple):
    """Tokens for filling in the middle. repository, file: the tokens before the name of a repository, and of a file; -1: none."""

    prefix: int
    suffix: int
    middle: int
    repository: int
    file: int


class Model:
    """A GGUF model in memory. It is a context manager.

    Several threads may use its tokenizer, and any may close the model. It is freed once its contexts and all calls under way have ended.
    """

    def __init__(self, handle: Any, path: Path, on_host: Sequence[str] = (), rope: Rope | None = None) -> None:
        self._handle: Any = owned(handle, lib.llama_model_free)
        self._on_host = on_host
        self.rope = rope or Rope()
        self._vocab: Any = owned(lib.llama_model_get_vocab(handle), lambda _: None, self._handle)
        self.path = path
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))
        self.has_tokenizer = bool(lib.llama_vocab_type(self.vocab) != lib.LLAMA_VOCAB_TYPE_NONE)
        self.n_ctx_train = int(lib.llama_model_n_ctx_train(handle))
        self.n_layer = int(lib.llama_model_n_layer(handle))
        self.n_swa = int(lib.llama_model_n_swa(handle))
        self.recurrent = bool(lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle))
        self.n_params = int(lib.llama_model_n_params(handle))
        self.n_bytes = int(lib.llama_model_size(handle))

    @property
    def handle(self) -> Any:
        """The native model. Raises UsageError once it is closed."""
        return self._opened(self._handle)

    @property
    def vocab(self) -> Any:
        """The native vocabulary, which keeps the model alive. Raises UsageError once the model is closed."""
        return self._opened(self._vocab)

    def _opened(self, native: Any) -> Any:
        if native is None:
            msg = f"the model {self.path} is closed: open it again"
            raise errors.UsageError(msg)
        return native

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        n_gpu_layers: int = -1,
        tensor_split: Sequence[float] = (),
        split_mode: str = "layer",
        main_gpu: int = 0,
        on_host: Sequence[str] = (),
        no_alloc: bool = False,
        mtp: bool = False,
        rope: Rope | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Self:
        """Load a GGUF file (the first part of a split one).

        n_gpu_layers: layers to offload; -1: all.
        tensor_split: each device's share of the layers; (): by free memory.
        split_mode: "layer": each GPU has some of the layers; "none": main_gpu has all.
        main_gpu: counted from 0; -1: the CPU, even if there are GPUs.
        on_host: regular expressions for names of tensors that stay in host memory.
        no_alloc: read only the metadata. Such a model cannot decode.
        mtp: also load the heads that predict further tokens.
        rope: RoPE settings of all contexts of the model; None: as it was trained.
        progress: called with 0.0 to 1.0.

        Raises UsageError and ModelError.
        """
        init()
        n_gpu = len(gpus())
        if main_gpu >= max(n_gpu, 1):
            there = f"there {'is' if n_gpu == 1 else 'are'} {n_gpu or 'no'} GPU{'' if n_gpu == 1 else 's'}"
            msg = f"`main_gpu` is {main_gpu}, and {there}: 0 is the first, and -1 the CPU"
            raise errors.UsageError(msg)
        params = lib.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.split_mode = _SPLIT_MODES[split_mode]
        params.main_gpu = main_gpu
        if len(tensor_split) > lib.llama_max_devices():
            msg = (
                f"{len(tensor_split)} shares are given (`tensor_split`), for at most {lib.llama_max_devices()} devices"
            )
            raise errors.UsageError(msg)
        shares = ffi.new("float[]", lib.llama_max_devices())
        shares[0 : len(tensor_split)] = list(tensor_split)
        params.tensor_split = shares if tensor_split else ffi.NULL
        params.no_alloc = no_alloc
        params.load_mtp = mtp
        if no_alloc or (on_host and n_gpu):
            # mapping the file would load the weights; and weights that each batch copies to a GPU must be pinned
            params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        state = _Progress(progress or (lambda _: None))
        keep = ffi.new_handle(state)
        params.progress_callback = lib.kvf_on_progress
        params.progress_callback_user_data = keep
        out = ffi.new("struct llama_model **")
        p_params = ffi.new("struct llama_model_params *", params)
        patterns = [ffi.new("char[]", pattern.encode()) for pattern in on_host]
        try:
            compute(lib.kvf_model_load, os.fsencode(path), p_params, patterns, len(patterns), out)
        except errors.ModelError as err:
            if state.error is not None:
                raise state.error from None
            msg = f"{path} cannot be loaded: {why_unloadable(path) or err}"
            raise errors.ModelError(msg) from None
        return cls(out[0], path, on_host, rope)

    def close(self) -> None:
        """Release the model, which is freed once nothing uses it. Harmless when called again."""
        self._handle = self._vocab = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def fingerprint(self) -> int:
        """64 bits for the model's files and RoPE settings, computed at the first use. Raises ModelError if the files are gone."""
        try:
            own = fingerprint(self.path)
        except OSError as err:
            msg = f"{self.path} cannot be read: {err.strerror}"
            raise errors.ModelError(msg) from None
        return self.rope.mark(own)

    def meta(self, key: str) -> str | None:
        """Return a metadata value of the file as text; None if the file has no such key."""
        size = 256
        while True:
            buf = ffi.new("char[]", size)
            n = lib.llama_model_meta_val_str(self.handle, key.encode(), buf, size)
            if n < size:
                return None if n < 0 else ffi.string(buf).decode("utf-8", "replace")
            size = n + 1

    def weights(self) -> list[Weight]:
        """Return the tensors of the model and their devices; with no_alloc, the devices that loading would choose."""
        name, size, device = ffi.new("const char **"), ffi.new("uint64_t *"), ffi.new("int32_t *")
        res = []
        for i in range(lib.kvf_n_weight(self.handle)):
            check(lib.kvf_get_weight(self.handle, i, name, size, device))
            res.append(Weight(ffi.string(name[0]).decode("utf-8", "replace"), int(size[0]), int(device[0])))
        host = planned_host()
        return res if host is None else self._planned(res, host)

    def takes_long_rope(self, n_ctx: int) -> bool:
        """Return whether a context of n_ctx positions uses the long factors of RoPE, which change the keys."""
        trained = self.meta(f"{self.meta('general.architecture')}.rope.scaling.original_context_length")
        return n_ctx > int(trained or self.n_ctx_train) and any(
            w.name.startswith("rope_factors_long") for w in self.weights()
        )

    def _planned(self, weights: list[Weight], host: int) -> list[Weight]:
        """Return the weights, placed as with a GPU. llama.cpp keeps embeddings on the host, and a copy of tied ones on the GPU."""
        tied = not any(w.name == "output.weight" for w in weights)
        res = []
        for weight in weights:
            embeds = weight.name == "token_embd.weight"
            stays = weight.name in _INPUT or any(re.search(pattern, weight.name) for pattern in self._on_host)
            res += [weight._replace(device=host)] * stays
            res += [weight] * (not stays or (embeds and tied))
        return res

    @property
    def n_reach(self) -> int:
        """The longest context that suits the model: the trained one, or what RoPE is scaled to."""
        return self.rope.reach(self.n_ctx_train)

    @property
    def description(self) -> str:
        """Architecture, size and quantisation in a few words: "qwen2 0.5B Q4_K - Medium". The size is the file's label, else the number
        of parameters. llama.cpp would guess it from the number of layers.
        """
        buf = ffi.new("char[]", 256)
        lib.llama_model_desc(self.handle, buf, 256)
        arch, _, quantised = ffi.string(buf).decode("utf-8", "replace").split(" ", 2)
        label = self.meta("general.size_label") or ""
        n = self.n_params
        counted = f"{n / _BILLION:.3g}B" if n >= _BILLION else f"{n / _MILLION:.3g}M"
        return f"{arch} {label if _SIZE.fullmatch(label) else counted} {quantised}"

    @property
    def refusal(self) -> str | None:
        """The kind of a model that does not generate token by token: "encoder", "encoder-decoder", "diffusion" or "draft head".

        None for a model that does. Some encoders give None, too: only their contexts, which have no memory, show what they are.
        """
        arch = self.meta("general.architecture")
        if arch in _DRAFT_HEADS:
            return "draft head"
        if lib.llama_model_is_diffusion(self.handle):
            return "diffusion"
        if arch == "t5encoder" or self.meta(f"{arch}.attention.causal") == "false":
            return "encoder"
        return "encoder-decoder" if lib.llama_model_has_encoder(self.handle) else None

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> Tokens:
        """Return the token ids (n,) int32 of a text.

        add_special: add BOS and EOS as the model's metadata says.
        parse_special: read special tokens such as `<|im_start|>` in the text. Leave it off for untrusted text.

        Raises UnsupportedError if the model has no tokenizer, and UsageError if the text is not Unicode.
        """
        self._check_tokenizer()
        data = errors.encoded(text, "the text") if isinstance(text, str) else text
        ids = np.empty(len(data) + 8, np.int32)  # every token is at least one byte, except special ones
        n = self._tokenize(data, ids, add_special, parse_special)
        if n < 0:
            ids = np.empty(-n, np.int32)
            n = self._tokenize(data, ids, add_special, parse_special)
        return ids[:n].copy()

    def _tokenize(self, data: bytes, ids: Tokens, add_special: bool, parse_special: bool) -> int:  # noqa: FBT001
        buf = ffi.from_buffer("int32_t[]", ids, require_writable=True)
        n: int = lib.llama_tokenize(self.vocab, data, len(data), buf, len(ids), add_special, parse_special)
        return n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token, possibly only a part of a UTF-8 sequence. special: show special tokens, too."""
        self._check_token(token)
        buf = ffi.new("char[]", 64)
        n = lib.llama_token_to_piece(self.vocab, token, buf, 64, 0, special)
        if n < 0:
            buf = ffi.new("char[]", -n)
            n = lib.llama_token_to_piece(self.vocab, token, buf, -n, 0, special)
        piece: bytes = ffi.buffer(buf, n)[:]
        return piece

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end the generation."""
        return tuple(t for t in range(self.n_vocab) if self.has_tokenizer and lib.llama_vocab_is_eog(self.vocab, t))

    def is_eog(self, token: int) -> bool:
        """Return whether a token ends the generation."""
        self._check_token(token)
        return bool(lib.llama_vocab_is_eog(self.vocab, token))

    @property
    def fim(self) -> "FIM | None":
        """The tokens for filling in the middle; None if the model has none."""
        if not self.has_tokenizer:
            return None
        found = FIM(
            lib.llama_vocab_fim_pre(self.vocab),
            lib.llama_vocab_fim_suf(self.vocab),
            lib.llama_vocab_fim_mid(self.vocab),
            lib.llama_vocab_fim_rep(self.vocab),
            lib.llama_vocab_fim_sep(self.vocab),
        )
        return found if min(found[:3]) >= 0 else None

    def _check_tokenizer(self) -> None:
        if not self.has_tokenizer:
            msg = f"{self.path} has no tokenizer: it can decode token ids, but neither read nor write text"
            raise errors.UnsupportedError(msg)

    def _check_token(self, token: int) -> None:
        if not self.has_tokenizer:
            self._check_tokenizer()
        if not 0 <= token < self.n_vocab:
            raise self._no_token(token)

    def ids(self, tokens: npt.ArrayLike) -> Tokens:
        """Return token ids as (n,) int32. Raises UsageError unless all are in the vocabulary."""
        given = np.asarray(tokens)
        if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
            msg = f"{str(tokens)[:100]!r} is not a list of token ids: give integers, such as [1, 2, 3]"
            raise errors.UsageError(msg)
        wrong = given[(given < 0) | (given >= self.n_vocab)]  # before the cast, which would turn 2**32 into 0
        if len(wrong):
            raise self._no_token(int(wrong[0]))
        return np.ascontiguousarray(given, np.int32)

    def _no_token(self, token: int) -> errors.UsageError:
        return errors.UsageError(f"token {token:,} is not in the vocabulary: ids are 0 to {self.n_vocab - 1:,}")
