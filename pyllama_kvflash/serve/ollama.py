"""Ollama's endpoints about the server and its model. Those that generate answers are in protocols/ollama_*.py."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyllama_kvflash import __version__
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.loading.need import weights_of
from pyllama_kvflash.native import Model, gpus
from pyllama_kvflash.serve.http import JSONResponse, Read
from pyllama_kvflash.serve.protocols.fields import parse_json
from pyllama_kvflash.serve.protocols.ollama_response import moment, tagged
from pyllama_kvflash.serve.settings import Settings
from pyllama_kvflash.text import printable

SPOKEN = "0.12.11"
"""The version of Ollama whose API this server speaks. Some clients refuse old versions."""

_NEVER = "2318-01-01T00:00:00Z"  # expiry of a model that is never unloaded
_ELSEWHERE = "this server has one model, chosen at its start: start another `kvflash serve` for another model"
_EMBEDS = "this server has no embeddings: use a server with an embedding model"
REFUSED = {
    "/api/embed": ("POST", _EMBEDS),
    "/api/embeddings": ("POST", _EMBEDS),
    "/api/pull": ("POST", _ELSEWHERE),
    "/api/push": ("POST", _ELSEWHERE),
    "/api/create": ("POST", _ELSEWHERE),
    "/api/copy": ("POST", _ELSEWHERE),
    "/api/delete": ("DELETE", _ELSEWHERE),
}
"""Refused requests, by path: the method, and the message."""

_TEXTS = ("name", "basename", "size_label", "finetune", "license", "quantized_by")
_NUMBERS = (
    "block_count", "embedding_length", "feed_forward_length", "vocab_size", "expert_count", "expert_used_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
)  # fmt: skip
"""Metadata keys that /api/show returns: texts below `general`, numbers below the architecture's name."""

_THINKS = "enable_thinking", "reasoning_content", "reasoning_effort", "<think>"
"""Signs of a reasoning model: its chat template has at least one of them."""


def routes(ready: Callable[[], KVFlash], read: Read, settings: Settings) -> list[Route]:
    """Return the routes. ready: returns the engine, or raises NotReady."""
    about = _About(ready, read, settings)
    return [
        Route("/api/version", _version),
        Route("/api/tags", about.tags),
        Route("/api/ps", about.running),
        Route("/api/show", about.show, methods=["POST"]),
    ]


async def _version(_request: Request) -> Response:
    return JSONResponse({"version": SPOKEN, "kvflash": __version__})


class _About:
    """The handlers for questions about the model."""

    def __init__(self, ready: Callable[[], KVFlash], read: Read, settings: Settings) -> None:
        self._ready, self._read, self._settings = ready, read, settings

    async def tags(self, _request: Request) -> Response:
        """Return the list of models, which has one entry."""
        return JSONResponse({"models": [self._model(self._ready())]})

    async def running(self, _request: Request) -> Response:
        """Return the models that are loaded."""
        kv, found = self._ready(), gpus()
        on_gpus = sum(size for i, size in weights_of(kv.model).items() if i in found)
        more = {"expires_at": _NEVER, "size_vram": on_gpus, "context_length": kv.options.n_ctx}
        return JSONResponse({"models": [{**self._model(kv), **more}]})

    async def show(self, request: Request) -> Response:
        """Return the model's details. Any name in the request stands for the one model."""
        kv = self._ready()
        parse_json(await self._read(request))
        template = self._settings.template or kv.model.meta("tokenizer.chat_template") or ""
        # tools work with every template
        capabilities = ["completion", "tools", *["thinking"] * any(word in template for word in _THINKS)]
        capabilities += ["insert"] * (kv.model.fim is not None)
        res = {
            "modelfile": f"FROM {printable(kv.model.path.name)}\n",
            "parameters": self._parameters(kv.options.n_ctx),
            "template": template,
            "license": kv.model.meta("general.license") or "",
            "details": _details(kv.model),
            "model_info": _metadata(kv.model, kv.options.n_ctx),
            "capabilities": capabilities,
            "modified_at": _modified(kv.model)[0],
        }
        return JSONResponse(res)

    def _model(self, kv: KVFlash) -> dict[str, Any]:
        """Return the model's entry in a list of models."""
        name, (modified, stamp) = tagged(self._settings.name), _modified(kv.model)
        # Ollama's digest is of the file's contents: reading them would take seconds
        digest = hashlib.sha256(os.fsencode(f"{kv.model.path.name}\0{kv.model.n_bytes}\0{stamp}")).hexdigest()
        return {
            "name": name,
            "model": name,
            "modified_at": modified,
            "size": kv.model.n_bytes,
            "digest": digest,
            "details": _details(kv.model),
        }

    def _parameters(self, n_ctx: int) -> str:
        """Return the default settings of requests, one on each line."""
        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
        values = {"num_ctx": n_ctx, **{name: getattr(self._settings.sampling, name) for name in names}}
        return "\n".join(f"{name:<30} {value}" for name, value in values.items())


def _modified(model: Model) -> tuple[str, int]:
    """Return when the model file was modified, as text and in nanoseconds since 1970; 0 if the file is gone."""
    stamp = 0
    with suppress(OSError):
        stamp = model.path.stat().st_mtime_ns
    return moment(stamp / 1e9), stamp


def _details(model: Model) -> dict[str, Any]:
    family, size, quantised = model.description.split(" ", 2)
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": re.sub(r" - (Small|Medium|Large)$", lambda found: f"_{found[1][0]}", quantised),
    }


def _metadata(model: Model, n_ctx: int) -> dict[str, Any]:
    """Return the file's metadata, but with the server's context length, which clients take as their limit."""
    arch = model.meta("general.architecture") or "unknown"
    res: dict[str, Any] = {"general.architecture": arch, "general.parameter_count": model.n_params}
    texts = [*(f"general.{name}" for name in _TEXTS), "tokenizer.ggml.model", "tokenizer.ggml.pre"]
    res |= {key: value for key in texts if (value := model.meta(key)) is not None}
    numbers = ["general.file_type", "general.quantization_version", *(f"{arch}.{name}" for name in _NUMBERS)]
    numbers += [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos")]
    for key in numbers:
        if (value := model.meta(key)) is not None:
            with suppress(ValueError):
                res[key] = json.loads(value)
    return {**res, f"{arch}.context_length": n_ctx}
