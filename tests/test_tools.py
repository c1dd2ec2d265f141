"""Tools, several answers, and how likely their tokens were, over both protocols, with a model that never heard of tools:
what it says hangs on grammars alone.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support import serving
from support.serving import TOOLS_TEMPLATE, Running, open_needle, parse_metrics, sse, until

from pyllama_kvflash.native import Model
from pyllama_kvflash.serve import prompt
from pyllama_kvflash.serve.job import TokenLogprob
from pyllama_kvflash.serve.protocols import openai_response
from pyllama_kvflash.serve.scheduler import Scheduler
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = pytest.mark.native

environment = serving.environment
server = serving.with_tools

ADD = {
    "name": "add",
    "description": "Add numbers.",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "required": ["a", "b"]},
}
TOOL = {"type": "function", "function": ADD}
OTHER = {"type": "function", "function": {"name": "stop"}}
CLAUDE_TOOL = {"name": "add", "description": "Add.", "input_schema": ADD["parameters"]}
ASKS = [{"role": "user", "content": "What is 1 + 3?"}]
CHAT = {"messages": ASKS, "temperature": 0, "max_tokens": 300, "parallel_tool_calls": False}

ASK = {"messages": ASKS, "temperature": 0, "max_tokens": 300}


def chat(server: Running, **more: Any) -> Any:
    res = server.post({**CHAT, **more}, "/v1/chat/completions")
    assert res.status_code == 200, res.text
    return res.json()


def message(server: Running, **more: Any) -> Any:
    res = server.post({**ASK, **more}, "/v1/messages")
    assert res.status_code == 200, res.text
    return res.json()


def test_streamed_calls_come_in_pieces(server: Running) -> None:
    body = {**CHAT, "tools": [TOOL], "tool_choice": "required", "stream": True}
    events, _ = sse(server.post(body, "/v1/chat/completions").text)
    assert events[-1] == "[DONE]"
    choices = [e["choices"][0] for e in events[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["finish_reason"] == "tool_calls"
    said: dict[int, dict[str, str]] = {}
    for delta in (d for c in choices for d in c["delta"].get("tool_calls", [])):
        found = said.setdefault(delta["index"], {"name": "", "arguments": ""})
        assert ("id" in delta) == (not found["name"]), "the first piece of a call names it"
        found["name"] += delta["function"].get("name", "")
        found["arguments"] += delta["function"]["arguments"]
    assert said
    assert all(c["name"] == "add" and json.loads(c["arguments"])["b"] == 3 for c in said.values())


def test_a_loop_with_a_tool_is_warm(server: Running) -> None:
    first = chat(server, tools=[TOOL], tool_choice="required")
    said = first["choices"][0]["message"]
    assert len(said["tool_calls"]) == 1
    result = {
        "role": "tool",
        "tool_call_id": said["tool_calls"][0]["id"],
        "content": [{"type": "text", "text": "four"}],
    }
    again = chat(server, messages=[*ASKS, said, result], tools=[TOOL], tool_choice="none", max_tokens=4)
    assert "tool_calls" not in again["choices"][0]["message"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


FORM = {"type": "object", "properties": {"sum": {"enum": [4]}}, "required": ["sum"], "additionalProperties": False}
AS_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}


def test_a_call_or_an_answer_of_a_form(server: Running) -> None:
    """With both, it is one of these: llama.cpp's own grammar would leave the tools out."""
    for choice in ("auto", "required"):
        res = chat(server, tools=[TOOL], tool_choice=choice, response_format=AS_FORM)["choices"][0]
        said = res["message"]
        if said.get("tool_calls"):
            assert json.loads(said["tool_calls"][0]["function"]["arguments"])["b"] == 3
            assert res["finish_reason"] == "tool_calls"
        else:
            assert choice == "auto"
            assert json.loads(said["content"]) == {"sum": 4}
    only = {**CHAT, "tools": [TOOL], "response_format": AS_FORM, "tool_choice": "none"}
    res = server.post(only, "/v1/chat/completions").json()["choices"][0]
    assert json.loads(res["message"]["content"]) == {"sum": 4}


def test_a_call_that_is_cut_off(server: Running) -> None:
    """By max_tokens, or by a string of the client's own: nobody should run it."""
    must = {"tools": [TOOL], "tool_choice": "required"}
    assert chat(server, **must, max_tokens=12)["choices"][0]["finish_reason"] == "length"
    res = chat(server, **must, stop=['"b"'])["choices"][0]
    assert res["finish_reason"] == "stop"
    res = message(server, tools=[CLAUDE_TOOL], tool_choice={"type": "any"}, stop_sequences=['"b"'])
    assert (res["stop_reason"], res["stop_sequence"]) == ("stop_sequence", '"b"')


@pytest.mark.parametrize("arguments", ['{"a": 1, "b', "[1]", '"x"', '{"a": NaN}', "", "[" * 500])
def test_arguments_that_are_none_may_be_sent_back(server: Running, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "1", "content": "no"}
    chat(server, messages=[*ASKS, said, told], tools=[TOOL], max_tokens=1)


def prefilled(server: Running) -> float:
    return parse_metrics(server.http.get("/metrics").text)["prefill_tokens_total"]


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(server: Running, stream: bool) -> None:
    """Each is that of its own seed, and the prompt is read once."""
    asked = {"temperature": 1.5, "seed": 7, "max_tokens": 8, "n": 3}
    chat(server, messages=[{"role": "user", "content": "Something else. " * 20}], max_tokens=1)
    before = prefilled(server)
    if stream:
        body = {**CHAT, **asked, "stream": True, "stream_options": {"include_usage": True}}
        events, _ = sse(server.post(body, "/v1/chat/completions").text)
        usage = events[-2]["usage"]
        texts = ["", "", ""]
        for choice in (e["choices"][0] for e in events[:-2]):
            texts[choice["index"]] += choice["delta"].get("content", "")
        ends = [e["choices"][0]["index"] for e in events[:-2] if e["choices"][0]["finish_reason"]]
        assert ends == [0, 1, 2]
    else:
        res = chat(server, **asked)
        usage, texts = res["usage"], [c["message"]["content"] for c in res["choices"]]
        assert [c["index"] for c in res["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert usage["completion_tokens"] <= 24
    assert prefilled(server) - before < 2 * usage["prompt_tokens"], "but for the last token, which gives the logits"
    until(server.idle)
    assert server.health()["queue"] == 0


def test_how_likely_the_tokens_of_a_chat_were(server: Running) -> None:
    choice = chat(server, max_tokens=5, logprobs=True, top_logprobs=2)["choices"][0]
    told = choice["logprobs"]["content"]
    assert len(told) == 5
    for token in told:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["token"] == token["token"], "the most likely one is taken"
        assert bytes(token["bytes"]).decode("utf-8", "replace") == token["token"]
    body = {**CHAT, "max_tokens": 5, "logprobs": True, "stream": True}
    events, _ = sse(server.post(body, "/v1/chat/completions").text)
    streamed = [t for e in events[:-1] for t in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert len(streamed) == 5
    assert all(t["top_logprobs"] == [] for t in streamed)


def test_how_likely_the_tokens_of_a_completion_were(server: Running) -> None:
    choice = server.post({"prompt": "One, two,", "max_tokens": 4, "logprobs": 2}).json()["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(4)]
    assert [max(top.values()) for top in told["top_logprobs"]] == told["token_logprobs"]
    body = {"prompt": "One, two,", "max_tokens": 4, "logprobs": 2, "stream": True}
    events, _ = sse(server.post(body).text)
    parts = [e["choices"][0]["logprobs"] for e in events[:-1] if e["choices"][0]["logprobs"]]
    texts = [t for p in parts for t in p["tokens"]]
    assert [o for p in parts for o in p["text_offset"]] == [len("".join(texts[:i])) for i in range(4)]


def test_parts_of_characters_keep_their_bytes() -> None:
    """Of two tokens that are a part of one, neither takes the other's place, and offsets are those of the text."""
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], "日".encode()[:2], "日".encode()[2:] + b"b", b"c"]
    top = tuple(TokenLogprob(bytes([byte]), -float(i)) for i, byte in enumerate((0xC3, 0xE6, 0x41)))
    told = openai_response._text_logprobs([TokenLogprob(p, -1.0, top) for p in pieces], openai_response._Offsets())
    assert told["tokens"] == ["a", r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xe6\x97", r"bytes:\xa5\x62", "c"]
    assert told["text_offset"] == [0, 1, 1, 2, 2, 4]
    assert told["top_logprobs"][0] == {r"bytes:\xc3": 0.0, r"bytes:\xe6": -1.0, "A": -2.0}


#
# Anthropic's protocol
#


def test_a_message(server: Running) -> None:
    res = message(server, max_tokens=6, system="Be brief.")
    assert res["type"] == "message"
    assert res["role"] == "assistant"
    assert res["stop_reason"] == "max_tokens"
    (block,) = res["content"]
    asked = [{"role": "system", "content": "Be brief."}, *ASKS]
    want = chat(server, messages=asked, max_tokens=6)  # the same prompt
    assert block["type"] == "text"
    assert block["text"]
    usage = res["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == want["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 6


def test_a_tool_in_messages(server: Running) -> None:
    res = message(server, tools=[CLAUDE_TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert res["stop_reason"] == "tool_use"
    (block,) = res["content"]
    assert block["type"] == "tool_use"
    assert block["name"] == "add"
    assert block["input"]["b"] == 3
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "four"}]}
    heard = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
    messages = [*ASKS, {"role": "assistant", "content": [block]}, heard]
    again = message(server, messages=messages, tools=[CLAUDE_TOOL], tool_choice={"type": "none"}, max_tokens=3)
    assert again["content"][0]["type"] == "text"
    assert again["usage"]["cache_read_input_tokens"] > 50


def test_a_streamed_message(server: Running) -> None:
    once = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    asked = {"tools": [CLAUDE_TOOL], "tool_choice": once}
    text = server.post({**ASK, **asked, "stream": True}, "/v1/messages").text
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    kinds = [e["type"] for e in events if e["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == list(range(len(starts)))
    inputs = [
        "".join(e["delta"]["partial_json"] for e in events if e.get("index") == i and "delta" in e)
        for i in range(len(starts))
    ]
    assert all(s["name"] == "add" and json.loads(i)["b"] == 3 for s, i in zip(starts, inputs, strict=True))
    delta = next(e for e in events if e["type"] == "message_delta")
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] > 10


def test_counting_tokens(server: Running) -> None:
    res = server.http.post("/v1/messages/count_tokens", json={"messages": ASKS, "system": "x", "tools": [CLAUDE_TOOL]})
    assert res.status_code == 200
    n = res.json()["input_tokens"]
    usage = message(server, system="x", tools=[CLAUDE_TOOL], tool_choice={"type": "none"}, max_tokens=1)["usage"]
    assert n == usage["input_tokens"] + usage["cache_read_input_tokens"]
    until(server.idle)


def n_tokens(server: Running, **body: Any) -> int:
    res = server.http.post("/v1/messages/count_tokens", json={"messages": ASKS, **body})
    assert res.status_code == 200, res.text
    return int(res.json()["input_tokens"])


def test_what_an_agent_sends(server: Running) -> None:
    """It is refused nothing that says nothing, and pays for nothing that changes from turn to turn."""
    block = {"type": "text", "text": "You are an agent."}
    plain = n_tokens(server, system=[block])
    for cch in ("fa690", "0b3d1ee"):
        bill = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"}
        assert n_tokens(server, system=[bill, block], billing_policy={}, mcp_servers=[]) == plain
    call = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}

    def with_result(**result: Any) -> list[dict[str, Any]]:
        told = {"type": "tool_result", "tool_use_id": "1", **result}
        return [*ASKS, {"role": "assistant", "content": [call]}, {"role": "user", "content": [told]}]

    seen = n_tokens(server, messages=with_result(content="x"))
    assert n_tokens(server, messages=with_result(content=[picture])) > seen
    assert n_tokens(server, messages=with_result(content="x", is_error=True)) > seen
    twice = [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]
    assert n_tokens(server, messages=twice) == n_tokens(server, messages=[{"role": "user", "content": "One.\nTwo."}])
    later = [*ASKS, {"role": "system", "content": "Be brief."}]
    assert n_tokens(server, messages=later) > n_tokens(server)


def test_a_prompt_that_is_only_read(server: Running) -> None:
    text = [{"role": "user", "content": "To be read ahead. " * 30}]
    res = message(server, messages=text, max_tokens=0)
    assert (res["content"], res["usage"]["output_tokens"], res["stop_reason"]) == ([], 0, "max_tokens")
    assert message(server, messages=text, max_tokens=1)["usage"]["cache_read_input_tokens"] > 100


def test_a_message_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted, and refused in the words that clients look for before they shorten it. In pieces, too."""
    with Running(n_ctx=512, pool="off", template=TOOLS_TEMPLATE) as server:
        text = [{"role": "user", "content": "word " * 750}]
        n = n_tokens(server, messages=text)
        assert n > 750
        res = server.post({**ASK, "messages": text}, "/v1/messages")
        assert res.status_code == 400
        assert res.json()["error"]["message"] == f"prompt is too long: {n} tokens > 512 maximum"
        monkeypatch.setattr(prompt, "_PIECE", 256)
        monkeypatch.setattr(prompt, "_SLACK", (1.1, 4))
        assert abs(n_tokens(server, messages=text) - n) < 30
        tokenized: list[int] = []
        tokenize = Model.tokenize

        def tokenize_(own: Model, text: str, **how: Any) -> Any:
            tokenized.append(len(text))
            return tokenize(own, text, **how)

        monkeypatch.setattr(Model, "tokenize", tokenize_)
        res = server.post({**CHAT, "messages": text}, "/v1/chat/completions")
        assert res.status_code == 400
        assert res.json()["error"]["code"] == "context_length_exceeded"
        assert "more than 512 tokens" in res.json()["error"]["message"]
        assert 5 < len(tokenized) < 15
        assert max(tokenized) == 256
        chat(server, messages=[{"role": "user", "content": "word " * (480 * 750 // n)}], max_tokens=1)


def test_errors_of_the_other_protocol() -> None:
    with Running(api_key="k") as running:
        res = running.http.post("/v1/messages", json={}, headers={"Authorization": "", "x-api-key": "wrong"})
        assert res.status_code == 401
        assert res.json()["error"]["type"] == "authentication_error"
        headers = {"Authorization": "", "x-api-key": "k"}
        assert running.http.post("/v1/messages", json={}, headers=headers).status_code == 400
        assert running.http.get("/v1/messages/x").json()["error"]["type"] == "not_found_error"


def test_a_marked_prompt_stays_in_the_cache(tmp_path: Path) -> None:
    """Though little of it is new, it is written, and it goes last."""
    cache = PrefixCache(tmp_path, 1 << 30)
    with Running(Scheduler(open_needle(), n_queue=8, cache=cache), template=TOOLS_TEMPLATE) as running:
        marked = [{"type": "text", "text": "On and on. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        message(running, system=marked, max_tokens=1)
        until(lambda: len(cache.entries()) == 1)
        until(lambda: cache.entries()[0].used > time.time() + 3000)
        chat(running, messages=[{"role": "user", "content": "Else. " * 300}], max_tokens=1)
        assert cache.entries()[0].used > time.time() + 3000
