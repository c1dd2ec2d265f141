"""Bodies of requests that went wrong, made of good ones, and what a server may answer to them.

Each is made from a seed and its number alone, so that one that does harm can be made again.
"""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

CHAT, COMPLETION, MESSAGE, COUNT = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
RESPONSES = "/v1/responses"
TOKENIZE, DETOKENIZE, TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
LLAMA, INFILL = "/completion", "/infill"
OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_SHOW = "/api/chat", "/api/generate", "/api/show"
MAX_MESSAGE = 1000  # characters of an error's message


class Request(NamedTuple):
    """Where a body is sent to, and what is wrong with it."""

    path: str
    data: bytes
    how: tuple[str, ...]


#
# good ones
#

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bergen", "Lima"]}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
_TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": _SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
_CUSTOM = [
    {"name": "weather", "description": "It.", "input_schema": _SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "now", "input_schema": {"type": "object"}, "type": "custom"},
]
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lima"}'}}
_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "The weather "}, {"type": "text", "text": "in Lima?"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "clear"},
    {"role": "assistant", "content": "Clear.", "reasoning_content": "So it is."},
    {"role": "user", "content": "Thanks."},
]
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "In Lima?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Lima"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "clear"}]},
]
_OLLAMA_CALL = {"function": {"name": "weather", "arguments": {"city": "Lima"}}}
_OLLAMA_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "In Lima?"},
    {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [_OLLAMA_CALL]},
    {"role": "tool", "tool_name": "weather", "content": "clear"},
]
_OPTIONS = {
    "temperature": 0,
    "top_k": 5,
    "num_predict": 1,
    "num_ctx": 2048,
    "stop": ["x"],
    "seed": 1,
    "repeat_last_n": 8,
}
_FLAT = [{"type": "function", **_TOOLS[0]["function"]}, {"type": "function", "name": "now"}, {"type": "web_search"}]
_ITEMS = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"role": "user", "content": "The weather in Lima?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Lima"}'},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "clear"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Clear.", "annotations": []}], "id": "msg_1"},
    {"role": "user", "content": "Thanks."},
]
_FORM = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": _SCHEMA}}

GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "seed": 1, "model": "m"}),
    (CHAT, {"messages": _TALK, "tools": _TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}),
    (CHAT, {"messages": _TALK[:2], "tools": _TOOLS, "tool_choice": "required", "stream": True}),
    (CHAT, {"messages": _TALK[:2], "tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}),
    (CHAT, {"messages": _TALK[:1], "response_format": _FORM, "top_p": 0.9, "top_k": 5, "min_p": 0.1}),
    (CHAT, {"messages": _TALK[1:2], "logprobs": True, "top_logprobs": 2, "n": 2, "stop": ["\n", "x"], "user": "me"}),
    (CHAT, {"messages": _TALK[1:2], "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}),
    (CHAT, {"messages": _TALK[1:2], "stream": True, "stream_options": {"include_usage": True}, "store": False}),
    (COMPLETION, {"prompt": "The sea", "logprobs": 2, "echo": False, "logit_bias": {"5": 1.5}, "repeat_penalty": 1.1}),
    (COMPLETION, {"prompt": [5, 6, 7], "frequency_penalty": 0.5, "presence_penalty": -0.5, "stream": True}),
    (COMPLETION, {"prompt": "x", "grammar": 'root ::= "a" | [0-9]+', "suffix": None, "best_of": 1}),
    (COMPLETION, {"prompt": "x", "json_schema": _SCHEMA}),
    (COMPLETION, {"prompt": "x", "samplers": ["top_k", "xtc", "temp"], "xtc_probability": 0.5, "min_keep": 1, "mirostat": 0}),
    (COMPLETION, {"prompt": "x", "dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"], "ignore_eos": True, "repeat_last_n": -1}),
    (MESSAGE, {"messages": _BLOCKS, "system": [{"type": "text", "text": "Be brief."}], "tools": _CUSTOM}),
    (MESSAGE, {"messages": _BLOCKS[:1], "tools": _CUSTOM, "tool_choice": {"type": "any"}, "stream": True}),
    (MESSAGE, {"messages": _BLOCKS[:1], "tools": _CUSTOM, "tool_choice": {"type": "tool", "name": "now"}}),
    (MESSAGE, {"messages": [{"role": "user", "content": "Hi"}], "stop_sequences": ["a"], "top_k": 3, "temperature": 1}),
    (MESSAGE, {"messages": _BLOCKS[:1], "thinking": {"type": "disabled"}, "metadata": {"user_id": "me"}}),
    (MESSAGE, {"messages": _BLOCKS[:1], "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}}),
    (COUNT, {"messages": _BLOCKS, "system": "Be brief.", "tools": _CUSTOM, "model": "m"}),
    (RESPONSES, {"input": "Hello", "instructions": "Be brief.", "store": False, "metadata": {"a": "b"}, "top_p": 0.9}),
    (RESPONSES, {"input": _ITEMS, "tools": _FLAT, "tool_choice": "auto", "parallel_tool_calls": True, "stream": True}),
    (RESPONSES, {"input": _ITEMS[:2], "tools": _FLAT, "tool_choice": {"type": "function", "name": "now"}, "stream": True}),
    (RESPONSES, {"input": _ITEMS[:2], "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}}),
    (RESPONSES, {"input": "Hi", "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "truncation": "auto"}),
    (TOKENIZE, {"content": "The sea", "add_special": True, "with_pieces": True, "parse_special": False}),
    (DETOKENIZE, {"tokens": [1, 2, 3]}),
    (TEMPLATE, {"messages": _TALK, "tools": _TOOLS}),
    (LLAMA, {"prompt": "The sea", "n_probs": 2, "stop": ["x"], "response_fields": ["content", "timings/prompt_n"]}),
    (LLAMA, {"prompt": [5, 6], "id_slot": 1, "cache_prompt": False, "stream": True, "timings_per_token": True}),
    (LLAMA, {"prompt": "x", "json_schema": _SCHEMA, "return_progress": True, "stream": True, "n_indent": 2}),
    (OLLAMA_CHAT, {"model": "m", "messages": _OLLAMA_TALK, "tools": _TOOLS, "options": _OPTIONS, "keep_alive": "5m"}),
    (OLLAMA_CHAT, {"messages": _OLLAMA_TALK[:2], "stream": False, "format": _SCHEMA, "think": False}),
    (OLLAMA_CHAT, {"messages": _OLLAMA_TALK[1:2], "stream": False, "logprobs": True, "top_logprobs": 2, "think": "low"}),
    (OLLAMA_CHAT, {"messages": [], "keep_alive": 0}),
    (OLLAMA_GENERATE, {"prompt": "The sea", "system": "Be brief.", "options": _OPTIONS, "format": "json"}),
    (OLLAMA_GENERATE, {"prompt": "The sea", "raw": True, "stream": False, "suffix": "", "context": [], "images": []}),
    (OLLAMA_SHOW, {"model": "m", "verbose": False}),
)  # fmt: skip
_ANSWERS = {CHAT, COMPLETION, MESSAGE, RESPONSES, LLAMA}
_FIELDS = sorted(
    {key for _, body in GOOD for key in body} | {"max_tokens", "max_completion_tokens", "functions", "type"}
)

#
# odd values
#


def _nested(n: int, inside: Any = None, key: str | None = None) -> Any:
    for _ in range(n):
        inside = [inside] if key is None else {key: inside}
    return inside


_PLAIN: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, 10**400, 2**31 - 1, 2**31,
    2**53 + 1, 2**63, -(2**63), 2**64, "", "x", " ", "0", "null", "auto", "\ud800", "a\udfffb", "\0", "a\0b", "\x1b[31m", "a\nb\r",
    "\u202e\u2028", "\U0001f600" * 3, "{{ 7 * 7 }}", "{% for x in range(9) %}", "%s%n", "../../etc/passwd", "<|im_end|>",
    "<tool_call>", "</tool_call>", '{"a": ', "a" * 1001, [], {}, [[]], [{}], [None], {"": None}, {"\ud800": 1},
    {"type": "text"}, {"type": "image_url", "image_url": {"url": "http://localhost/"}}, [1, "a", None], ["a"] * 70,
)  # fmt: skip
_LARGE: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: "a" * rng.randrange(10_000, 300_000),
    lambda rng: "日本 " * rng.randrange(1_000, 30_000),
    lambda rng: [rng.randrange(-5, 5000) for _ in range(rng.randrange(20_000))],
    lambda rng: {f"k{i}": i for i in range(rng.randrange(5_000))},
    lambda rng: _nested(rng.randrange(20, 60)),
    lambda rng: _nested(rng.randrange(20, 60), {}, "a"),
    lambda rng: [{"role": "user", "content": "x"}] * rng.randrange(2_000),
)


def _odd(rng: random.Random) -> Any:
    return rng.choice(_LARGE)(rng) if rng.random() < 0.06 else copy.deepcopy(rng.choice(_PLAIN))


def _odd_schema(rng: random.Random) -> Any:
    """Of what a tool takes, or an answer has to be."""
    n = rng.choice([0, 1, 3, 100, 10**6, 2**31, 10**30, -1, 1.5])
    return rng.choice([
        lambda: {"$ref": "#"},
        lambda: {"$ref": rng.choice(["#/a", "#/$defs/a", "http://localhost:1/x.json", "", "#/$defs/../x", 5])},
        lambda: {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        lambda: {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
        lambda: {"type": "string", "pattern": rng.choice(["^a+$", "^(a|", "^(a*)*$", "^ab+?$", "a|b", "^a|b$", "^(x|y){1,2}?$", "(^|,)x", "\\S", "^[", "^\\", "^a{1,100000}$", "^(?=a)$", 5])},
        lambda: {"type": "string", "minLength": n, "maxLength": rng.choice([n, 0, 10**9, None])},
        lambda: {"type": "string", "format": rng.choice(["date", "uuid", "email", "ipv6", "duration", "nothing", 5])},
        lambda: {"type": "integer", "minimum": n, "maximum": rng.choice([-n, 5, "5", 2**70])},
        lambda: {"type": "array", "items": _odd_schema(rng), "minItems": n, "maxItems": rng.choice([n, 2, None])},
        lambda: {"type": "array", "prefixItems": [_odd(rng)]},
        lambda: {"anyOf": [{"type": "string", "maxLength": 0}, {"type": "string", "format": "date"}]},
        lambda: {"type": "number", "multipleOf": 0.01, "maximum": 10**19},
        lambda: {"patternProperties": {rng.choice(["^x", "a+?", "^a|b$"]): _odd_schema(rng)}, "additionalProperties": False},
        lambda: {"enum": rng.choice([[], [None], [[1]], list(range(3000)), ["\ud800"], ['"\\\n'], "abc", 5])},
        lambda: {"const": _odd(rng)},
        lambda: {"type": rng.choice(["nothing", [], ["string", "null"], ["x"], 5, None, {"type": "string"}])},
        lambda: {rng.choice(["anyOf", "oneOf", "allOf"]): rng.choice([[], [_odd_schema(rng), {}], "x", [5], {}])},
        lambda: {"type": "object", "properties": _odd(rng), "required": rng.choice([["none"], "a", [5], _odd(rng)])},
        lambda: {"type": "object", "properties": {rng.choice(["", "a b", "\n", '"', "\ud800", "a" * 500]): _odd_schema(rng)}},
        lambda: {"type": "object", "additionalProperties": _odd_schema(rng)},
        lambda: _nested(rng.randrange(1, 60), {"type": "integer"}, rng.choice(["items", "not"])),
        lambda: _nested(rng.randrange(1, 60), {}, rng.choice(["additionalProperties", "properties"])),
        lambda: _odd(rng),
    ])()  # fmt: skip


_GRAMMARS = (
    "root ::= a", "root ::= root", 'root ::= root "a" | "b"', "", "::=", 'root ::= "a', "root ::= [", "root ::= [z-a]", "x ::= x",
    'root ::= ("a"*)*', 'root ::= "a"{100000}', 'root ::= "a"{2,1}', "root ::= " + "(" * 500, "\0", 'root ::= "\\uZZZZ"',
    'root ::= [^\\x00-\\x7F]+ "\\U0010FFFF"', 'root ::= ""', "root ::= <5>", "root ::= <[99999999]>", "root ::= !<[5]>",
    'root ::= "a"\n' * 50, 'root ::= "a"{99999999999999999999}',
)  # fmt: skip

#
# what goes wrong
#

Slot = tuple[Any, Any]
"""A container, and a key or an index of it."""


def _slots(value: Any, limit: int = 300) -> list[Slot]:
    """All places in a body, but not in the large parts of it."""
    res: list[Slot] = []
    todo = [value]
    while todo and len(res) < limit:
        at = todo.pop(0)
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        res += [(at, key) for key in keys][:50]
        todo += [at[key] for key in keys][:50]
    return res


def _delete(rng: random.Random, body: Any) -> None:
    at, key = rng.choice(_slots(body))
    del at[key]


def _replace(rng: random.Random, body: Any) -> None:
    at, key = rng.choice(_slots(body))
    at[key] = _odd(rng)


def _field(rng: random.Random, body: Any) -> None:
    body[rng.choice(_FIELDS)] = _odd(rng)


def _double(rng: random.Random, body: Any) -> None:
    at, key = rng.choice(_slots(body))
    if isinstance(at, list):
        at[key:key] = [copy.deepcopy(at[key])] * rng.choice([1, 1, 2, 300])
    else:
        at[f"{key}2"] = copy.deepcopy(at[key])


def _nest(rng: random.Random, body: Any) -> None:
    at, key = rng.choice(_slots(body))
    at[key] = _nested(rng.choice([1, 1, 2, 50]), at[key], rng.choice([None, str(key), "type"]))


def _swap(rng: random.Random, body: Any) -> None:
    (a, i), (b, j) = rng.choice(_slots(body)), rng.choice(_slots(body))
    a[i], b[j] = copy.deepcopy(b[j]), copy.deepcopy(a[i])


def _rename(rng: random.Random, body: Any) -> None:
    at, key = rng.choice([slot for slot in _slots(body) if isinstance(slot[0], dict)])
    at[rng.choice([*_FIELDS, key.upper(), "", "\ud800", "__class__", "a" * 2000])] = at.pop(key)


def _unknown(rng: random.Random, body: Any) -> None:
    at = rng.choice([body, *(slot[0] for slot in _slots(body) if isinstance(slot[0], dict))])
    at[rng.choice(["\0", "\udc80", "temprature", "a\nb", "x" * 500, "constructor", "tool"])] = _odd(rng)


def _role(rng: random.Random, body: Any) -> None:
    messages = body["messages"] if "messages" in body else body["input"]
    for message in rng.sample(messages, min(2, len(messages))):
        message["role"] = rng.choice(
            ["system", "developer", "user", "assistant", "tool", "function", "", "User", 5, None, []]
        )


def _last(rng: random.Random, body: Any) -> None:
    """A last message of the assistant that says little, and whether it is continued."""
    there = body["messages"] if "messages" in body else body["input"]
    text = rng.choice(
        ["", " ", "\n", None, [], [{"type": "text", "text": ""}], [{"type": "output_text", "text": ""}], "The"]
    )
    there.append(
        {
            "role": "assistant",
            "content": text,
            **rng.choice([{}, {"reasoning_content": "Hm."}, {"reasoning_content": ""}]),
        }
    )
    body |= rng.choice(
        [{}, {"continue_final_message": True}, {"continue_final_message": False, "add_generation_prompt": True}]
    )


def _picture(rng: random.Random, body: Any) -> None:
    """A part of a message that is not a text, in a tool's result too."""
    there = body["messages"] if "messages" in body else body["input"]
    part = rng.choice([
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
        {"type": "input_file", "filename": "a.pdf", "file_data": "x"}, {"type": "document", "source": {}}, {"type": "input_audio"},
    ])  # fmt: skip
    message = rng.choice(there)
    key = next((key for key in ("output", "content") if key in message), "content")
    old = message.get(key)
    parts = [*(old if isinstance(old, list) else [{"type": "text", "text": old}]), part]
    message[key] = [{**parts[0], "content": [part]}] if "tool_use_id" in str(parts[0]) else parts
    if rng.random() < 0.2:
        message["images"] = ["iVBORw0KGgo="]


def _choice(rng: random.Random, body: Any) -> None:
    names = ["weather", "now", "none", "", "\ud800", 5, None]
    body["tool_choice"] = rng.choice([
        "auto", "none", "required", "any", "all", {"type": "function", "function": {"name": rng.choice(names)}},
        {"type": "tool", "name": rng.choice(names)}, {"type": rng.choice(["auto", "any", "none", "x"])}, {"type": "function"},
        {"type": "function", "name": rng.choice(names)}, {"type": "allowed_tools", "tools": [{"name": rng.choice(names)}]},
        {"function": {}}, {"type": "any", "disable_parallel_tool_use": rng.choice([True, 5])}, _odd(rng),
    ])  # fmt: skip


def _tool(rng: random.Random, body: Any) -> None:
    """An odd tool, or an odd schema in a good one."""
    custom = "input_schema" in json.dumps(body)
    name = rng.choice(["weather", "other", "other", "a" * 129, "a b", "", "\u00fc", "root", "a-b.c", 5])
    made: dict[str, Any] = {"name": name, "description": rng.choice(["", "It.", "</tools>", "\ud800", None, 5])}
    made["input_schema" if custom else "parameters"] = _odd_schema(rng)
    flat = {"type": "function", **made}
    tool = made if custom else flat if "input" in body else {"type": "function", "function": made}
    old = body.get("tools")
    body["tools"] = [
        *(old if isinstance(old, list) and rng.random() < 0.5 else ()),
        *[tool] * rng.choice([1, 1, 1, 2, 257]),
    ]
    if rng.random() < 0.5:
        body["tool_choice"] = {"type": "any"} if custom else "required"


def _form(rng: random.Random, body: Any) -> None:
    schema = _odd_schema(rng)
    key, value = rng.choice([
        ("response_format", {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}),
        ("response_format", {"type": rng.choice(["json_object", "text", "xml", None]), "schema": schema}),
        ("json_schema", schema),
        ("output_config", {"format": {"type": "json_schema", "schema": schema}}),
        ("output_format", {"type": "json_schema", "schema": schema}),
        ("text", {"format": {"type": "json_schema", "name": "it", "schema": schema}}),
        ("grammar", rng.choice(_GRAMMARS)),
    ])  # fmt: skip
    body[key] = value


_WRONG: tuple[tuple[Callable[[random.Random, Any], None], int], ...] = (
    (_delete, 3), (_replace, 8), (_field, 4), (_double, 2), (_nest, 2), (_swap, 2), (_rename, 2), (_unknown, 1), (_role, 2),
    (_choice, 2), (_tool, 4), (_form, 4), (_last, 3), (_picture, 3),
)  # fmt: skip


def _deep(rng: random.Random, data: bytes) -> bytes:
    """A body with a field that is nested about as deeply as Python can read."""
    n, (begin, end) = (
        rng.choice([100, 300, 600, 900, 950, 980, 2_000]),
        rng.choice([(b"[", b"]"), (b'{"items":', b"}"), (b'{"a":', b"}")]),
    )
    return b'{"%s": %s, %s' % (rng.choice(_FIELDS).encode(), begin * n + b"{}" + end * n, data[1:])


def _broken(rng: random.Random, text: str) -> bytes:
    """A body that is hardly JSON any more."""
    data, at = text.encode("utf-8", "surrogatepass"), rng.randrange(len(text) + 1)
    return rng.choice([
        lambda: data[:at],
        lambda: data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:],
        lambda: data[:at] + rng.choice([b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\0", b"\\u12", b",", b"}", b'"', b"//"]) + data[at:],
        lambda: data + rng.choice([data, b"x", b"\0", b" " * 10_000]),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: text.encode(rng.choice(["utf-16", "utf-32", "utf-16-le"]), "surrogatepass"),
        lambda: data[:-1] + b"," + data[1:],  # every key twice
        lambda: _deep(rng, data),
        lambda: _deep(rng, data),
        lambda: data.replace(b":", b": " + rng.choice([b"[", b'{"a":']) * rng.choice([10, 900, 5_000, 60_000]), 1),
        lambda: data.replace(b"1", rng.choice([b"9" * 5_000, b"1e999", b"-", b"01", b"0x1", b"1E-9999", b"Infinity"])),
        lambda: rng.choice([b"", b"null", b"[]", b"5", b'"a"', b"NaN", b"[" * 100_000, b"{" * 1_000, b'{"a":' * 50_000]),
    ])()  # fmt: skip


_LIMITS = {RESPONSES: "max_output_tokens", LLAMA: "n_predict"}


def _short(path: str, body: dict[str, Any]) -> None:
    """An answer of one token, if there is to be one."""
    if path not in _ANSWERS:
        return
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
    given = [key for key in names if body.get(key) is not None]
    if not given:
        body[_LIMITS.get(path, "max_tokens")] = 1
    for key in given:
        if type(body[key]) is int and 1 < body[key] < 1 << 31:
            body[key] = 1


def body(seed: int, number: int, path: str | None = None) -> Request:
    """One body. path: made of a good one of this path; None: of any."""
    rng = random.Random(f"{seed}/{number}")
    path, good = copy.deepcopy(rng.choice([g for g in GOOD if path in (None, g[0])]))
    how = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        wrong = rng.choices([w for w, _ in _WRONG], [n for _, n in _WRONG])[0]
        try:
            wrong(rng, good)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            continue  # it was not there any more
        how.append(wrong.__name__.strip("_"))
    _short(path, good)
    text = json.dumps(good, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.12:
        return Request(path, _broken(rng, text), (*how, "broken"))
    return Request(path, text.encode("utf-8", "surrogatepass"), tuple(how))


def bodies(n: int, seed: int, path: str | None = None) -> Iterator[Request]:
    """The first of a seed."""
    return (body(seed, i, path) for i in range(n))


#
# what a server may answer
#


def parsed(text: str) -> Any:
    """A text of JSON, which has no NaN and no infinities."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def fault(path: str, status: int, text: str) -> str:
    """What is wrong with an answer; "" if nothing. Raises ValueError for what is not JSON."""
    if status != 200:
        return _not_an_error(path, text) if 400 <= status < 500 else f"status {status}"
    if path in _LINES and "\n" in text:
        return _fault_of_lines(path, text)
    if not text.startswith(("data: ", "event: ", ": ")):
        return "" if isinstance(parsed(text), dict) else "no object"
    events = [parsed(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    failed = next((event for event in events if "error" in event), None)
    if failed is not None:
        kind = failed["error"].get("type")
        return (
            f"the stream fails with {kind}"
            if kind in {"server_error", "api_error"}
            else _not_an_error(path, json.dumps(failed))
        )
    if path == RESPONSES:
        return _fault_of_events(events)
    whole = (
        [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        if path == LLAMA
        else text.endswith("data: [DONE]\n\n") or events[-1] == {"type": "message_stop"}
    )
    return "" if whole else "a stream that does not end"


def _fault_of_events(events: list[dict[str, Any]]) -> str:
    """What is wrong with a stream of the Responses API."""
    if [event["sequence_number"] for event in events] != list(range(len(events))):
        return "events without their numbers"
    last = events[-1]
    if last["type"] == "response.failed":
        code = last["response"]["error"]["code"]
        return f"the stream fails with {code}" if code == "server_error" else ""
    return "" if last["type"] in {"response.completed", "response.incomplete"} else "a stream that does not end"


_LINES = {OLLAMA_CHAT, OLLAMA_GENERATE}


def _fault_of_lines(path: str, text: str) -> str:
    """What is wrong with a stream of JSON lines."""
    found = [parsed(line) for line in text.splitlines()]
    if "error" in found[-1]:
        return _not_an_error(path, json.dumps(found[-1]))
    return (
        "" if [line["done"] for line in found] == [False] * (len(found) - 1) + [True] else "a stream that does not end"
    )


def _not_an_error(path: str, text: str) -> str:
    """Why a text is not an error of the protocol that is spoken at the path."""
    found = parsed(text)
    error = found.get("error") if isinstance(found, dict) else None
    if path.startswith("/api/"):
        return _not_a_message(error) if set(found) == {"error"} else "no error object of Ollama's API"
    if not isinstance(error, dict):
        return "no error object"
    if path in {MESSAGE, COUNT}:
        if set(found) != {"type", "error"} or found["type"] != "error" or set(error) != {"type", "message"}:
            return "no error object of the Anthropic protocol"
    elif set(found) != {"error"} or set(error) != {"message", "type", "param", "code"}:
        return "no error object of the OpenAI protocol"
    elif not isinstance(error["param"], str | None) or len(error["param"] or "") > MAX_MESSAGE:
        return "a param that names no field"
    return _not_a_message(error["message"])


def _not_a_message(message: Any) -> str:
    """Why it is not a sentence for people."""
    if not isinstance(message, str) or not message.strip() or len(message) >= MAX_MESSAGE:
        return f"a message of {len(message)} characters" if isinstance(message, str) else "a message that is no text"
    return f"a message of several lines: {message!r}" if len(message.splitlines()) > 1 else ""
