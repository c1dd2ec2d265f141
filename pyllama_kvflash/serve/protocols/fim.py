"""Fill in the middle (FIM): prompts whose answer goes between a prefix and a suffix, made with the model's own FIM tokens.

The order of the parts follows https://github.com/ggml-org/llama.cpp/pull/9787 and the papers of the models.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.native import Model
from pyllama_kvflash.serve.protocols.request_error import RequestError, invalid


class File(NamedTuple):
    """Another file that the model sees. name: "" if unknown."""

    name: str
    text: str


def infill(
    kv: KVFlash, prefix: str, suffix: str, *, at: str, extra: Sequence[File] = (), begun: str = "", n_answer: int = 0
) -> list[int]:
    """Return the token ids of a prompt whose answer goes between `prefix` and `suffix`.

    at: the request's field to name in the error. extra: other files. The first of their tokens are dropped so that the
    prompt and `n_answer` tokens of the answer fit the context. begun: the beginning of the answer.

    Raises RequestError if the model has no FIM tokens.
    """
    model = kv.model
    fim = model.fim
    if fim is None:
        raise no_fim(at)
    core = [
        fim.prefix,
        *_tokens(model, prefix),
        fim.suffix,
        *_tokens(model, suffix),
        fim.middle,
        *_tokens(model, begun),
    ]
    bos = model.tokenize("").tolist()[:1]
    room = max(0, kv.options.n_ctx - len(core) - len(bos) - n_answer)
    others = [token for file in extra for token in _shown(model, file)]
    if others and fim.repository >= 0:
        others = [fim.repository, *_tokens(model, "project\n"), *others]
    return [*bos, *others[max(0, len(others) - room) :], *core]


def _shown(model: Model, file: File) -> list[int]:
    """Return the tokens of another file, in the form that the model knows."""
    name = file.name or "file"
    if model.fim is not None and model.fim.file >= 0:
        return [model.fim.file, *_tokens(model, f"{name}\n{file.text}")]
    return _tokens(model, f"\n\n--- {name} ---\n\n{file.text}\n")


def _tokens(model: Model, text: str) -> list[int]:
    found: list[int] = model.tokenize(text, add_special=False).tolist()
    return found


def no_fim(at: str) -> RequestError:
    """Return the error for a model without FIM tokens. at: the request's field to name."""
    msg = (
        f"{at} cannot be used: the model has no fill-in-the-middle tokens; use a model with them, such as Qwen2.5-Coder"
    )
    return invalid(msg, at, "unsupported_parameter")
