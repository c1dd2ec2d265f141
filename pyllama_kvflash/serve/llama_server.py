"""llama-server's endpoints about the server and its vocabulary: /props, /slots, /tokenize and /detokenize."""

from dataclasses import fields
from typing import Any

from pyllama_kvflash import __version__
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import encoded
from pyllama_kvflash.native import order_of
from pyllama_kvflash.serve.protocols.fields import get
from pyllama_kvflash.serve.protocols.fields import text as required
from pyllama_kvflash.serve.protocols.request_error import invalid
from pyllama_kvflash.serve.settings import Settings
from pyllama_kvflash.text import printable

_MOST = 4 << 20  # most characters of a text to tokenize: each takes some 75 bytes of memory

_NO_EMBEDDINGS = "this server has no embeddings: use another server, such as llama-server --embedding"
_NO_RANKING = "this server does not rank documents: use another server, such as llama-server --reranking"
REFUSED = {
    "/embedding": ("POST", _NO_EMBEDDINGS),
    "/embeddings": ("POST", _NO_EMBEDDINGS),
    "/v1/embeddings": ("POST", _NO_EMBEDDINGS),
    "/rerank": ("POST", _NO_RANKING),
    "/v1/rerank": ("POST", _NO_RANKING),
    "/lora-adapters": ("POST", "this server does not load LoRA adapters: merge the adapter into the model file"),
}
"""Refused requests, by path: the method, and the message."""


def tokenize(kv: KVFlash, body: dict[str, Any]) -> dict[str, Any]:
    """Answer POST /tokenize: the tokens of a text. Raises RequestError."""
    text = required(body, "content", "content")
    flags = {"add_special": False, "parse_special": True, "with_pieces": False}
    given = (get(body, name, bool) for name in flags)
    add, parse, pieces = (usual if flag is None else flag for flag, usual in zip(given, flags.values(), strict=True))
    if len(text) > _MOST:
        msg = f"content has {len(text):,} characters: the limit is {_MOST:,}; send it in parts"
        raise invalid(msg, "content", "invalid_value")
    encoded(text, "content")
    found = kv.model.tokenize(text, add_special=add, parse_special=parse).tolist()
    return {"tokens": [{"id": t, "piece": _piece(kv, t)} for t in found] if pieces else found}


def detokenize(kv: KVFlash, body: dict[str, Any]) -> dict[str, Any]:
    """Answer POST /detokenize: the text of tokens, including special tokens. Raises RequestError."""
    tokens, n = body.get("tokens"), kv.model.n_vocab
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < n for t in tokens):
        msg = f"tokens must be an array of token ids, 0 to {n - 1:,}"
        raise invalid(msg, "tokens", "invalid_type")
    data = b"".join(kv.model.piece(t, special=True) for t in tokens)
    return {"content": data.decode("utf-8", "replace")}


def _piece(kv: KVFlash, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are not UTF-8."""
    data = kv.model.piece(token, special=True)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def props(kv: KVFlash, settings: Settings, caps: dict[str, bool]) -> dict[str, Any]:
    """Answer GET /props: the server's settings. caps: for each feature, whether the chat template supports it."""
    s = settings.sampling
    params = {field.name: getattr(s, field.name) for field in fields(s)}
    params |= {"seed": -1 if s.seed is None else s.seed, "samplers": order_of(s.samplers)}
    return {
        "default_generation_settings": {"n_ctx": kv.options.n_ctx, "params": params},
        "total_slots": len(kv.sequences),
        "model_alias": settings.name,
        "model_path": printable(kv.model.path),
        "chat_template": settings.template or kv.model.meta("tokenizer.chat_template") or "",
        "chat_template_caps": caps,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"pyllama_kvflash {__version__}",
        "kvflash": {
            "pool": kv.n_pool,
            "policy": kv.policy,
            "coarse": kv.options.coarse,
            "opening": kv.options.n_opening,
            "mode": kv.options.mode,
            "model": {
                "description": kv.model.description,
                "n_params": kv.model.n_params,
                "n_bytes": kv.model.n_bytes,
                "n_layer": kv.model.n_layer,
                "n_ctx_train": kv.model.n_ctx_train,
            },
        },
    }


def slots(kv: KVFlash, busy: list[bool]) -> list[dict[str, Any]]:
    """Answer GET /slots: the state of the sequences. busy: for each sequence, whether it serves a request."""
    return [
        {
            "id": i,
            "n_ctx": kv.options.n_ctx,
            "speculative": kv.options.spec is not None,
            "is_processing": works,
            "n_tokens": seq.n_tokens,
        }
        for i, (seq, works) in enumerate(zip(kv.sequences, busy, strict=True))
    ]
