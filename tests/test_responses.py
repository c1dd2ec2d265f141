"""OpenAI's Responses API: its requests, its answers, its events, and responses that are kept."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import serving
from support.serving import TOOLS_TEMPLATE, Running

from pyllama_kvflash.native import Delta, Rendered, Sampling
from pyllama_kvflash.serve.job import Finished, Reading, Text, Timing
from pyllama_kvflash.serve.protocols import reply as replies
from pyllama_kvflash.serve.protocols import responses_request, responses_response, responses_store
from pyllama_kvflash.serve.protocols.fields import Unknown
from pyllama_kvflash.serve.protocols.protocol import ParsedRequest, PreparedRequest
from pyllama_kvflash.serve.protocols.responses_request import Asked, packed
from pyllama_kvflash.serve.protocols.responses_response import ResponsesReply
from pyllama_kvflash.serve.protocols.responses_store import Kept, ResponseStore, new_id

pytestmark = pytest.mark.native

environment = serving.environment
server = serving.with_tools

PATH = "/v1/responses"
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "required": ["a", "b"]},
}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "", "tools": [ADD]}  # as Codex sends it
QUESTION = "What is the secret code?"


def ask(server: Running, given: Any, **more: Any) -> Any:
    res = server.post({"input": given, "max_output_tokens": 12, **more}, PATH)
    assert res.status_code == 200, res.text
    return res.json()


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def chat(server: Running, messages: list[Any], **more: Any) -> tuple[str, int]:
    """Text and tokens of the prompt of the chat protocol."""
    res = server.post({"messages": messages, "max_tokens": 12, **more}, "/v1/chat/completions").json()
    return str(res["choices"][0]["message"]["content"]), int(res["usage"]["prompt_tokens"])


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type, numbered from 0."""
    res = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if not block.startswith(": "):
            name, data = block.split("\n")
            res.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {res[-1]['type']}"
    assert [e["sequence_number"] for e in res] == list(range(len(res)))
    return res


def check_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each item begins, grows by what its end has, and ends before the next. Returns those at their ends."""
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds[:2] == ["created", "in_progress"]
    res: list[dict[str, Any]] = []
    said = ""
    for kind, e in zip(kinds[2:-1], events[2:-1], strict=True):
        assert e["output_index"] == len(res)
        if kind == "output_item.added":
            assert e["item"]["status"] == "in_progress"
            said = ""
        elif kind == "output_item.done":
            res.append(e["item"])
        elif kind.endswith(".delta"):
            said += e["delta"]
        elif kind.endswith(".done") and "part" not in e:
            assert said == e.get("arguments", e.get("text"))
    return res


#
# texts
#

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}
ASSISTANT = {"role": "assistant", "content": "It is 5."}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 3}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 3}'}}


def parts(message: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"type": "message", "role": message["role"], "content": [{"type": kind, "text": message["content"]}]}


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"input": QUESTION}, [USER]),
        ({"input": [parts(SYSTEM, "input_text") | {"role": "developer"}, parts(USER, "input_text")]}, [SYSTEM, USER]),
        ({"input": [USER, parts(ASSISTANT, "output_text"), USER]}, [USER, ASSISTANT, USER]),
        (
            {"input": [USER, {"type": "reasoning", "id": "rs_1", "summary": []}, ASSISTANT, CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "4"}]}]},
            [USER, {**ASSISTANT, "tool_calls": [CHAT_CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "4"}],
        ),
        ({"input": [SYSTEM, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "instructions": "x"},
         [{"role": "system", "content": "x\n\nBe brief."}, {"role": "user", "content": "a\nb"}]),
    ],
)  # fmt: skip
def test_what_the_chat_protocol_says(server: Running, body: dict[str, Any], messages: list[Any]) -> None:
    text, n_prompt = chat(server, messages)
    response = ask(server, **{"given": None, **body})
    assert (text_of(response), response["usage"]["input_tokens"]) == (text, n_prompt)
    assert text


def test_the_response(server: Running) -> None:
    given = {
        "metadata": {"a": "b", "n": float("nan")},
        "truncation": "disabled",
        "instructions": "Be brief.",
        "user": "me",
    }
    body = json.dumps({"input": QUESTION, "max_output_tokens": 3, "temperature": 0, **given})
    res = server.http.post(PATH, content=body, headers={"Content-Type": "application/json"})
    found = res.json()
    assert found["id"].startswith("resp_")
    assert (found["object"], found["status"], found["error"]) == ("response", "incomplete", None)
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["metadata"] == {"a": "b", "n": None}, "JSON has no such number"
    assert (found["instructions"], found["temperature"], found["max_output_tokens"]) == ("Be brief.", 0, 3)
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    usage = found["usage"]
    assert usage["output_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + 3
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert "KVFlash-Warning" not in res.headers


def test_streamed(server: Running) -> None:
    whole = ask(server, QUESTION)
    events = events_of(server.post({"input": QUESTION, "max_output_tokens": 12, "stream": True}, PATH).text)
    (item,) = check_items(events)
    assert [e["type"] for e in events[2:4]] == ["response.output_item.added", "response.content_part.added"]
    assert [e["type"] for e in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    response = events[-1]["response"]
    assert response["output"] == [item]
    assert text_of(response) == text_of(whole)
    assert {e["response"]["id"] for e in events if "response" in e} == {response["id"]}


def test_an_event_is_one_line_for_everybody(server: Running) -> None:
    """Python's splitlines(), which clients use, knows more line breaks than the protocol."""
    odd = "a\u2028b\u2029c\x85d\x1ce\x0bf"
    res = server.post({"input": "x", "metadata": {"a": odd}, "stream": True, "max_output_tokens": 1}, PATH)
    assert all(line.startswith(("event: ", "data: ", ": ")) for line in res.text.splitlines() if line)
    assert events_of(res.text)[-1]["response"]["metadata"] == {"a": odd}


#
# tools
#


def test_a_call_and_back(server: Running) -> None:
    tools = [{"type": "web_search"}, ADD, NAMESPACE]
    body = {"input": "What is 1 + 3?", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    res = server.post({**body, "stream": True, "max_output_tokens": 300}, PATH)
    assert "tools[0] ('web_search') is left out" in res.headers["KVFlash-Warning"]
    assert "tools[2] ('namespace' 'agents') is left out" in res.headers["KVFlash-Warning"]
    events = events_of(res.text)
    items = check_items(events)
    response = events[-1]["response"]
    assert (response["status"], response["tools"]) == ("completed", tools)
    assert items == response["output"]
    call = items[0]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "add", "completed")
    assert json.loads(call["arguments"])["b"] == 3
    given = [*items, *({"type": "function_call_output", "call_id": c["call_id"], "output": "4"} for c in items)]
    after = server.post({"input": given, "previous_response_id": None, "tools": [ADD], "max_output_tokens": 4}, PATH)
    assert after.status_code == 200, after.text


def test_a_schema(server: Running) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "it", "strict": True, "schema": schema}
    assert json.loads(text_of(ask(server, "Hi", text={"format": form}, max_output_tokens=100))) == {"n": 7}


#
# conversations that are continued
#


def test_continued(server: Running) -> None:
    first = ask(server, QUESTION, instructions="Be brief.")
    then = ask(server, "And then?", previous_response_id=first["id"])
    said = {"role": "assistant", "content": text_of(first)}
    assert text_of(then) == chat(server, [USER, said, {"role": "user", "content": "And then?"}])[0], "no instructions"
    assert server.http.get(f"{PATH}/{first['id']}").json() == first
    again = ask(
        server,
        [USER, {"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "And then?"}],
    )
    assert text_of(again) == text_of(then)
    assert server.http.delete(f"{PATH}/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    for res in (server.http.get(f"{PATH}/{first['id']}"), server.http.delete(f"{PATH}/{first['id']}")):
        assert res.status_code == 404
        assert (res.json()["error"]["param"], res.json()["error"]["code"]) == (None, "not_found")
    third = ask(server, "And?", previous_response_id=then["id"])
    assert third["previous_response_id"] == then["id"], "it has the whole conversation"


def test_not_kept(server: Running) -> None:
    found = ask(server, QUESTION, store=False)
    assert found["store"] is False
    for name in (found["id"], "resp_" + "0" * 32, "../../etc/passwd"):
        res = server.post({"input": "x", "previous_response_id": name}, PATH)
        assert res.status_code == 400
        assert res.json()["error"]["code"] == "previous_response_not_found"


def test_a_session_stays_warm(server: Running) -> None:
    """Of each turn only what is new is read: its input, the turn's frame, and at most the last token of the answer."""
    name, n_before = None, 0
    for turn in range(8):
        found = ask(
            server, f"Question {turn}: where is it?", previous_response_id=name, tools=[ADD], max_output_tokens=8
        )
        usage = found["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        if turn:
            assert cached >= n_before - 1, turn
        name, n_before = found["id"], usage["input_tokens"] + usage["output_tokens"]


def test_files(tmp_path: Path) -> None:
    """They outlive the server."""
    folder = tmp_path / "responses"
    store = ResponseStore(folder)
    kept = Kept([USER], {"id": new_id(), "output": [{"id": "x", **ASSISTANT}]})
    store.keep(kept)
    store.close()
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    later = ResponseStore(folder)
    assert later.get(kept.response["id"]) == kept
    path.write_text("{")
    assert later.get(kept.response["id"]) is None, "it is damaged"
    path.write_text(json.dumps({"items": [], "response": kept.response}))
    assert later.delete(kept.response["id"])
    assert not list(folder.iterdir())
    later.close()


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_store, "MAX_BYTES", 1000)
    names = [new_id() for _ in range(3)]
    for folder in (None, tmp_path):
        store = ResponseStore(folder)
        for name in names:
            store.keep(Kept([{"role": "user", "content": "x" * 300}], {"id": name, "output": []}))
        store.keep(Kept([], {"id": new_id(), "output": ["x" * 1000]}))
        store.close()
        assert [store.get(name) is not None for name in names] == [folder is not None, True, True]
    assert responses_store.evict(tmp_path, 2) == 1
    assert not (tmp_path / f"{names[0]}.json").exists()
    os.utime(tmp_path / f"{names[2]}.json", (0, 4e9))  # in 2096: the clock was changed since
    assert responses_store.evict(tmp_path, 1) == 1
    assert (tmp_path / f"{names[1]}.json").exists()
    assert responses_store.evict(tmp_path, 0) == 1


#
# refused, and left out
#


def test_left_out(server: Running) -> None:
    """What a client sends that this server does not have: the rest is answered, and a header says what is left out."""
    given = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
        {"role": "user", "content": "x", "phase": "a", "other": 1},
    ]
    res = server.post(
        {"input": given, "truncation": "auto", "text": {"verbosity": "low"}, "max_output_tokens": 1}, PATH
    )
    assert res.status_code == 200
    for words in (
        "input[0] (of the type 'web_search_call')",
        "truncation 'auto'",
        "text.verbosity",
        "'input[2].other'",
    ):
        assert words in res.headers["KVFlash-Warning"]
    with Running(template=TOOLS_TEMPLATE, strict=True) as strict:
        res = strict.post({"input": "x", "tools": [NAMESPACE]}, PATH)
        assert res.status_code == 400
        assert "tools[0] ('namespace' 'agents') cannot be used" in res.text
        assert strict.post({"input": "x", "tools": [ADD], "max_output_tokens": 1}, PATH).status_code == 200


#
# reasoning, and answers that fail
#


class Parser:
    """Gives what a model with reasoning and tools would say, piece by piece."""

    calls: list[dict[str, str]]

    def __init__(self, *_: object) -> None:
        self.calls = []

    def push(self, text: str) -> list[Delta]:
        return [Delta(reasoning=text[1:]) if text.startswith("r") else Delta(text[1:])]

    def end(self, _done: Finished) -> list[Delta]:
        return []


def reply(
    monkeypatch: pytest.MonkeyPatch, store: ResponseStore | None = None, *, sealed: bool = False
) -> ResponsesReply:
    monkeypatch.setattr(replies, "AnswerParser", Parser)
    asked = Asked({}, [USER], store, sealed)
    parsed = ParsedRequest(sampling=Sampling(), extra=asked)
    return ResponsesReply(
        "m", PreparedRequest(parsed, serving.np.zeros(1, "int32"), Sampling(), (), Rendered(prompt=""))
    )


def test_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    made = reply(monkeypatch, store, sealed=True)
    stream = made.first()
    for n, text in enumerate(("rSo ", "rit is.", "cFour", "c.")):
        stream += made.text(Text(text, timing=Timing(n_answer=n + 1)))
    stream += made.end(Finished("eos", 10, 3, 5, 1.0)) + made.last()
    events = events_of(stream.decode())
    reasoning, message = check_items(events)
    assert [e["type"] for e in events].count("response.reasoning_text.delta") == 2
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "So it is."}]
    assert reasoning["encrypted_content"] == packed("So it is.")
    assert message["content"][0]["text"] == "Four."
    response = made.whole()
    assert response == events[-1]["response"]
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 3
    kept = store.get(response["id"])
    assert kept is not None
    assert kept.conversation == [USER, reasoning, message]
    store.close()


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_long_prompt_has_events(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Codex gives up a stream that has comments alone for five minutes."""
    monkeypatch.setattr(responses_response, "_EVENT_SECONDS", 30.0 - seconds)  # so that they are over at once
    made = reply(monkeypatch)
    stream = made.first() + made.reading(Reading(512, 4096)) + made.alive()
    assert b": prefill 512/4096\n\n" in stream
    kinds = [event["type"] for event in events_of(stream.decode())]
    more = ["response.in_progress"] * 2 if seconds else []
    assert kinds == ["response.created", "response.in_progress", *more]


@pytest.mark.parametrize(
    ("item", "thought"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a b"}], "summary": [{"type": "summary_text", "text": "x"}]}, "a b"),
        ({"summary": [], "encrypted_content": packed("a b")}, "a b"),
        ({"summary": [{"type": "summary_text", "text": "a b"}], "encrypted_content": "gAAAA"}, "a b"),
        ({"summary": [{"type": "summary_text", "text": "a b"}], "encrypted_content": "kvflash:%%%"}, "a b"),
    ],
)  # fmt: skip
def test_reasoning_comes_back(item: dict[str, Any], thought: str) -> None:
    """The model sees it again, in whichever form the client keeps it."""
    given = [USER, {"type": "reasoning", "id": "rs_1", **item}, ASSISTANT, USER]
    messages = responses_request._messages(None, [], given, Unknown())
    assert messages[1] == {**ASSISTANT, "reasoning_content": thought}
