"""llama-server's own requests: /completion and /infill."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyllama_kvflash.engine.answer import MAX_ANSWER
from pyllama_kvflash.native import MAX_PROBS
from pyllama_kvflash.serve.protocols.answer_fields import SAMPLING, given, usual
from pyllama_kvflash.serve.protocols.fields import Unknown, array, as_object, get, ranged, text
from pyllama_kvflash.serve.protocols.fim import File, infill
from pyllama_kvflash.serve.protocols.known import check_known
from pyllama_kvflash.serve.protocols.openai_request import prompt_of
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, Served
from pyllama_kvflash.serve.protocols.request_error import invalid

_COMMON = SAMPLING | {
    "model", "prompt", "stream", "n_predict", "stop", "json_schema", "n_probs", "id_slot", "cache_prompt", "timings_per_token",
    "return_progress", "response_fields",
}  # fmt: skip
_INFILL = {"input_prefix", "input_suffix", "input_extra"}
_LEFT_OUT = {
    "t_max_prompt_ms": "this server has no time limits",
    "t_max_predict_ms": "this server has no time limits",
    "n_indent": "an answer may have any indentation",
}
"""Fields with which autocompletion ends an answer early. Without them, the answer is only longer."""
_MAX_FIELDS, _MAX_FILES = 100, 1000


def completion(body: dict[str, Any], served: Served) -> ParsedRequest:
    """Check the body of POST /completion. Raises RequestError."""
    fields = given(body)
    parsed = _both(fields, served, _COMMON)
    return replace(parsed, prompt=prompt_of(fields.get("prompt"), served.kv.model.n_vocab))


def infilling(body: dict[str, Any], served: Served) -> ParsedRequest:
    """Check the body of POST /infill. Raises RequestError."""
    fields = given(body)
    parsed = _both(fields, served, _COMMON | _INFILL)
    prefix, suffix = (text(fields, name, name) for name in ("input_prefix", "input_suffix"))
    extra = [_file(f, f"input_extra[{i}]") for i, f in enumerate(array(fields, "input_extra") or ())]
    if len(extra) > _MAX_FILES:
        raise invalid(f"input_extra has {len(extra):,} files: the limit is {_MAX_FILES:,}", "input_extra")
    begun = get(fields, "prompt", str) or ""
    n_answer = max(0, parsed.max_tokens or 0)
    prompt = infill(
        served.kv, prefix, suffix, at="input_prefix", extra=extra, begun=begun, n_answer=min(n_answer, _MAX_FILES)
    )
    return replace(parsed, prompt=prompt)


def _both(fields: Mapping[str, Any], served: Served, known: set[str]) -> ParsedRequest:
    for name, why in _LEFT_OUT.items():
        if fields.get(name):
            served.unknown.leave_out(name, why)
    check_known(fields, known | set(_LEFT_OUT), served.unknown)
    n_predict = ranged(fields, "n_predict", int, -1, MAX_ANSWER)
    parsed = usual(fields, served, None if n_predict == -1 else n_predict)
    n_probs = ranged(fields, "n_probs", int, 0, MAX_PROBS) or None
    return replace(parsed, sampling=replace(parsed.sampling, n_probs=n_probs), extra=_wanted(fields, served.unknown))


def _wanted(fields: Mapping[str, Any], unknown: Unknown) -> tuple[str, ...]:
    """Return the answer's fields that the request wants, as paths such as "timings/prompt_n"; (): all."""
    wanted = array(fields, "response_fields") or []
    if not all(isinstance(name, str) for name in wanted) or len(wanted) > _MAX_FIELDS:
        raise invalid(
            f"response_fields must be an array of up to {_MAX_FIELDS} strings", "response_fields", "invalid_type"
        )
    if wanted and fields.get("stream"):
        unknown.leave_out("response_fields", "a stream has all fields")
    return tuple(wanted)


def _file(value: Any, at: str) -> File:
    file = as_object(value, at, "filename and text")
    return File(get(file, "filename", str, f"{at}.filename") or "", text(file, "text", f"{at}.text"))
