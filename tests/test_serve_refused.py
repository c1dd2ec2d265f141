"""Requests that are refused: each by a sentence that names the field, in the form of the protocol that it was sent in."""

import json
from typing import Any

import pytest
from support import serving
from support.bodies import CHAT, COMPLETION, DETOKENIZE, INFILL, LLAMA, MESSAGE, RESPONSES, TEMPLATE, TOKENIZE, fault
from support.bodies import OLLAMA_CHAT as OLLAMA
from support.bodies import OLLAMA_GENERATE as GENERATE
from support.serving import Running

from pyllama_kvflash.serve import llama_server, ollama

pytestmark = pytest.mark.native

environment = serving.environment
server = serving.with_tools

SAYS = {"messages": [{"role": "user", "content": "x"}]}
USUAL: dict[str, dict[str, Any]] = {
    CHAT: SAYS, MESSAGE: {**SAYS, "max_tokens": 5}, RESPONSES: {"input": "x"}, OLLAMA: SAYS, GENERATE: {"prompt": "x"},
    COMPLETION: {"prompt": "x"}, LLAMA: {"prompt": "x"},
}  # fmt: skip
"""A good body of each path, to which a case adds what is wrong."""

OBJECT = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "function": {"name": "add"}}
CUSTOM = {"name": "add", "input_schema": OBJECT}
CALLED = {"function": {"name": "a", "arguments": 5}}
STRICT = {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"type": "x"}}}
GRAMMAR = 'root ::= "a"'


def said(role: Any, content: Any = "x", **more: Any) -> dict[str, Any]:
    """A body with one message."""
    return {"messages": [{"role": role, "content": content, **more}]}


def given(*items: Any) -> dict[str, Any]:
    return {"input": list(items)}


CASES: dict[str, list[tuple[dict[str, Any], str | None, str]]] = {
    CHAT: [
        ({"messages": None}, "messages", "at least one message"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [1]}, "messages[0]", "an integer: give an object"),
        (said("function"), "messages[0].role", "'function'"),
        (said(["user"]), "messages[0].role", "give one of system"),
        (said("tool"), "messages[0].tool_call_id", "is missing"),
        (said("user", tool_calls=[{}]), "messages[0]", "tool_calls"),
        (said("assistant", tool_calls={}), "messages[0].tool_calls", "an object: give an array"),
        (said("assistant", tool_calls=[{}]), "messages[0].tool_calls[0].function", "null"),
        (said("user", None), "messages[0].content", "is null"),
        ({"response_format": {}}, "response_format.type", "is missing: give one of text"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": [float("inf")]}}}]},
         "tools[0].function.parameters", "has NaN or an infinity, which JSON does not have: give numbers"),
        (said("user", [{"type": "image_url"}]), "messages[0].content[0]", "only text"),
        (said("user", "ab\ud800"), "messages", "messages[0].content is not Unicode text: half of a surrogate pair at character 2"),
        ({"logit_bias": {"\ud83d": 1}}, "logit_bias", "a name in logit_bias is not Unicode text"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "\ud83d!"}}]}, "tools",
         "tools[0].function.description is not Unicode text: half of a surrogate pair at character 0"),
        ({"\udc80": 5}, None, "a name in the body is not Unicode text"),
        ({"seed": "a"}, "seed", "give an integer"),
        ({"temperature": 2.0000000000001}, "temperature", "must be from 0 to 2"),
        ({"temperature": "1"}, "temperature", "a string: give a number"),
        ({"temperature": True}, "temperature", "true or false: give a number"),
        ({"temperature": 10**400}, "temperature", "give a number"),
        ({"temperature": float("nan")}, "temperature", "must be from 0 to 2"),
        ({"top_p": -1}, "top_p", "must be from 0 to 1"),
        ({"top_k": 2**40}, "top_k", "is 1,099,511,627,776, and must be from -1 to 2,147,483,647"),
        ({"top_k": 1.5}, "top_k", "a number: give an integer"),
        ({"top_k": 10**400}, "top_k", "must be from -1"),
        ({"min_p": float("inf")}, "min_p", "must be from 0 to 1"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "must be from -2 to 2"),
        ({"presence_penalty": -3}, "presence_penalty", "must be from -2 to 2"),
        ({"repeat_last_n": -2}, "repeat_last_n", "repeat_last_n is -2, and must be from 0 to 1,048,576"),
        ({"mirostat": 1.5}, "mirostat", "give an integer"),
        ({"samplers": "top_k;best"}, "samplers", "samplers has 'best', which is not a sampler: the names are penalties, "),
        ({"samplers": [1]}, "samplers", "samplers must be a string or an array of names"),
        ({"dry_sequence_breakers": "a"}, "dry_sequence_breakers", "give an array"),
        ({"dry_sequence_breakers": [1]}, "dry_sequence_breakers", "must be an array of up to 32 strings"),
        ({"ignore_eos": 1}, "ignore_eos", "give true or false"),
        ({"ignore_eos": True, "grammar": GRAMMAR}, "grammar", "cannot be combined"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "response_format", "cannot be combined"),
        ({"logit_bias": []}, "logit_bias", "give an object"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a', which is not a token"),
        ({"logit_bias": {"4096": 1}}, "logit_bias", "ids are 0 to 4,095"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5 is 101, and must be from -100 to 100"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "has 1,025 tokens: the limit is 1,024"),
        ({"max_tokens": 0}, "max_tokens", "must be 1 or more"),
        ({"max_tokens": 2**31}, "max_tokens", "is 2,147,483,648, and must be 2,147,483,647 or less"),
        ({"max_completion_tokens": -4}, "max_completion_tokens", "must be 1 or more"),
        ({"stop": 5}, "stop", "must be a string or an array"),
        ({"stop": ["a"] * 65}, "stop", "up to 64"),
        ({"stop": "a" * 1000}, "stop", "more than 500 characters"),
        ({"n": 0}, "n", "must be from 1 to 128"),
        ({"logprobs": 1}, "logprobs", "give true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"top_logprobs": 1}, "top_logprobs", "needs logprobs: true"),
        ({"reasoning_effort": 1}, "reasoning_effort", "give a string"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "give an object"),
        ({"stream": "yes"}, "stream", "give true or false"),
        ({"stream": True, "stream_options": 1}, "stream_options", "an integer"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "an integer: give true or false"),
        ({"response_format": 5}, "response_format", "give an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml': give one of text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "has no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 1}}, "response_format.json_schema", "give an object"),
        ({"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "response_format.schema/type", "schema cannot be used"),
        ({"response_format": {"type": "json_object"}, "grammar": "x"}, "response_format", "give one of them"),
        ({"json_schema": {}, "grammar": "x"}, "grammar", "give one of them"),
        ({"json_schema": {"$ref": "#/x"}}, "json_schema/$ref", "schema cannot be used"),
        ({"grammar": "root ::= a"}, "grammar", "rule 'a' is not defined"),
        ({"tools": 5}, "tools", "give an array"),
        ({"tools": [5]}, "tools[0]", "give an object"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search': give one of function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "give an object with a name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters", "object"),
        ({"tools": [STRICT]}, "tools[0].function.parameters/type", "is not a type"),
        ({"tools": [FUNCTION] * 2}, "tools", "two tools with the name add"),
        ({"tools": [FUNCTION] * 300}, "tools", "the limit is 256"),
        ({"tools": [FUNCTION], "grammar": GRAMMAR}, "grammar", "give one of them"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tools": [FUNCTION], "tool_choice": "often"}, "tool_choice", "auto, none, required"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "which is not in tools"),
        ({"top_a": 0.1}, "top_a", "top_a is not supported by this server: leave it out"),
        ({"num_beams": 2}, "num_beams", "num_beams is not supported by this server: leave it out, or give 1"),
        ({"best_of": True}, "best_of", "best_of is not supported"),
        ({"lora": [{"id": 0}]}, "lora", "lora is not supported"),
        ({"guided_regex": "a+"}, "guided_regex", "guided_regex is not supported"),
    ],
    COMPLETION: [
        ({"prompt": None}, "prompt", "prompt must be"),
        ({"prompt": ""}, "prompt", "prompt must be"),
        ({"prompt": []}, "prompt", "prompt must be"),
        ({"prompt": ["a", "b"]}, "prompt", "a request has one prompt"),
        ({"prompt": [1, 2.5]}, "prompt", "prompt must be"),
        ({"prompt": [True]}, "prompt", "prompt must be"),
        ({"prompt": [-1]}, "prompt", "prompt has token -1, which is not in the vocabulary"),
        ({"prompt": [4096000]}, "prompt", "prompt has token 4,096,000, which is not in the vocabulary: ids are 0 to 4,095"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"echo": True}, "echo", "echo is not supported"),
        ({"best_of": 3}, "best_of", "best_of is not supported"),
        ({"suffix": "y"}, "suffix", "suffix cannot be used: the model has no fill-in-the-middle tokens"),
        ({"prompt": [1], "suffix": "y"}, "suffix", "needs a prompt that is a string"),
        ({"logprobs": 21}, "logprobs", "must be from 0 to 20"),
        ({"ignore_eos": True, "json_schema": {}}, "response_format", "cannot be combined"),
    ],
    LLAMA: [
        ({"prompt": None}, "prompt", "prompt must be"),
        ({"n_predict": -2}, "n_predict", "must be from -1"),
        ({"n_probs": 5000}, "n_probs", "must be from 0"),
        ({"id_slot": 2}, "id_slot", "must be from -1 to 1"),
        ({"cache_prompt": 1}, "cache_prompt", "give true or false"),
        ({"response_fields": [1]}, "response_fields", "must be an array of up to 100 strings"),
        ({"return_tokens": True}, "return_tokens", "is not supported"),
    ],
    INFILL: [
        ({"input_prefix": "x"}, "input_suffix", "is missing"),
        ({"input_prefix": "x", "input_suffix": "y"}, "input_prefix", "the model has no fill-in-the-middle tokens"),
    ],
    TEMPLATE: [({"messages": 5}, "messages", "at least one message")],
    TOKENIZE: [
        ({}, "content", "content is missing: give a string"),
        ({"content": "\ud800"}, "content", "surrogate"),
        ({"content": "a", "add_special": 1}, "add_special", "add_special is an integer: give true or false"),
    ],
    DETOKENIZE: [
        ({}, "tokens", "tokens must be an array"),
        ({"tokens": [1, "a"]}, "tokens", "tokens must be an array"),
        ({"tokens": [True]}, "tokens", "tokens must be an array"),
        ({"tokens": [4096]}, "tokens", "0 to 4,095"),
    ],
    MESSAGE: [
        ({"max_tokens": None}, None, "max_tokens is missing"),
        ({"messages": []}, None, "at least one message"),
        (said("tool"), None, "user, assistant"),
        (said("user", 5), None, "an integer"),
        (said("user", [{"type": "image"}]), None, "text, tool_result"),
        (said("user", [{"type": "tool_result"}]), None, "tool_use_id is missing"),
        (said("assistant", [{"type": "tool_use", "id": "x"}]), None, "name is missing"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, None, "only custom ones"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "tool", "name": "x"}}, None, "which is not in tools"),
        ({"tool_choice": {"type": "any"}}, None, "without tools"),
        ({"stop_sequences": 1}, None, "stop_sequences"),
        ({"cache_control": {"type": "for ever"}}, None, "ephemeral"),
        (said("user", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "9y"}}]), None,
         "messages[0].content[0].cache_control.ttl is '9y': give one of 5m, 1h"),
        ({"thinking": 1}, None, "give an object"),
        ({"temperature": 9}, None, "must be from 0 to 2"),
        ({"mcp_servers": [{"url": "http://x"}]}, None, "mcp_servers is not supported"),
    ],
    RESPONSES: [
        ({"input": None}, "input", "input is missing"),
        ({"input": []}, "input", "input is missing"),
        ({"input": 5}, "input", "input is an integer"),
        (given(5), "input[0]", "input[0] is an integer"),
        (given({"type": 5}), "input[0].type", "input[0].type"),
        (given({"type": "message", "role": "tool", "content": "x"}), "input[0].role", "input[0].role is 'tool'"),
        (given({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}), "input[0].content[0]", "has the type 'input_image'"),
        (given({"type": "function_call", "call_id": "a", "name": "b"}), "input[0].arguments", "input[0].arguments is missing"),
        (given({"type": "function_call_output", "output": "b"}), "input[0].call_id", "input[0].call_id is missing"),
        (given({"type": "item_reference", "id": "msg_1"}), "input[0].id", "input[0].id is 'msg_1', which is not stored"),
        ({"background": True}, "background", "background is not supported"),
        ({"conversation": "conv_1"}, "conversation", "conversation is not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "does not support"),
        ({"include": [5]}, "include", "include must be"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be from 1"),
        ({"truncation": "some"}, "truncation", "truncation is 'some'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "text.format has no schema"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a", "parameters": 5}]}, "tools[1].parameters", "is an integer"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "'required' without tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "tool_choice.type is 'web_search'"),
        ({"input": "x" * 50_000}, None, "context"),
    ],
    OLLAMA: [
        ({"messages": 5}, None, "messages is an integer"),
        (said("bad"), None, "messages[0].role is 'bad'"),
        (said("user", 5), None, "messages[0].content is an integer"),
        (said("assistant", tool_calls=[CALLED]), None, "messages[0].tool_calls[0].function.arguments is an integer"),
        (said("assistant", tool_calls=[{"function": {}}]), None, "tool_calls[0].function.name is missing"),
        ({"tools": [5]}, None, "tools[0] is an integer"),
        ({"think": "hard"}, None, "think is 'hard'"),
        ({"keep_alive": True}, None, "keep_alive is true or false"),
        ({"options": {"temperature": 9}}, None, "temperature is 9"),
        ({"options": {"num_predict": -3}}, None, "options.num_predict is -3"),
        ({"options": {"mirostat": 3}}, None, "mirostat is 3"),
        ({"options": []}, None, "options is an array"),
    ],
    GENERATE: [
        ({"prompt": 5}, None, "prompt is an integer"),
        ({"suffix": "y"}, None, "the model has no fill-in-the-middle tokens"),
        ({"template": "{{ .Prompt }}"}, None, "template is not supported"),
        ({"context": [1]}, None, "send the conversation to /api/chat"),
        ({"images": ["aGk="]}, None, "images is not supported"),
        ({"format": "xml"}, None, "format is 'xml'"),
        ({"format": {"type": "x"}}, None, "the JSON schema cannot be used"),
        ({"prompt": "x " * 5000}, None, "the context 4,096"),
    ],
}  # fmt: skip
"""By path: what is wrong, the field that is named (None: the protocol names none), and words of the sentence."""


@pytest.mark.parametrize("path", CASES)
def test_requests_that_are_refused(server: Running, path: str) -> None:
    for more, param, words in CASES[path]:
        data = json.dumps({**USUAL.get(path, {}), **more})
        res = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
        assert (res.status_code, fault(path, res.status_code, res.text)) == (400, ""), (more, res.text)
        error = res.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert words in message, (more, message)
        assert param is None or error["param"] == param, (more, message)
    assert server.idle()


@pytest.mark.parametrize("path", llama_server.REFUSED | ollama.REFUSED)
def test_what_the_server_does_not_have(server: Running, path: str) -> None:
    method, why = (llama_server.REFUSED | ollama.REFUSED)[path]
    res = server.http.request(method, path, json={"model": "x"})
    assert (res.status_code, fault(path, 400, res.text)) == (501, ""), "the error is of the path's protocol"
    assert why in res.text
