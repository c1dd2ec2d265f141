"""Prompts are what the client sent: as the template itself writes a conversation, whichever protocol said it."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("starlette")
pytest.importorskip("jinja2")

from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.chat.engine import ChatTemplate
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.serve.prompt import PromptBuilder
from pyllama_kvflash.serve.protocols.request_error import RequestError
from pyllama_kvflash.serve.protocols.responses_store import ResponseStore
from pyllama_kvflash.serve.protocols.table import ANSWERS
from pyllama_kvflash.serve.settings import Settings

pytestmark = pytest.mark.native

TEMPLATES = {
    path.stem: path.read_text("utf-8") for path in (Path(__file__).parent / "data" / "templates").glob("*.jinja")
}
SIMPLE = TEMPLATES["simple"]
USER = {"role": "user", "content": "What is on the screen?"}
END = 8888888888


@pytest.fixture(scope="module")
def kv() -> Iterator[KVFlash]:
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=512, pool="off", n_threads=1) as kv:
        yield kv


#
# against the template's own rendering
#

_WORDS = (
    "Hello.",
    "two\nlines",
    "日本 🙂",
    "{{ 7 * 7 }}",
    " spaced ",
    "ends in a newline\n",
    "1. <b>&amp;</b>",
    "x" * 50,
)


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Turns that end with the user, or with the assistant: with a text, with thoughts, or with nothing."""
    system = [{"role": "system", "content": rng.choice(_WORDS)}] if rng.random() < 0.4 else []
    res: list[dict[str, Any]] = [*system]
    for _ in range(rng.randrange(1, 4)):
        res.append({"role": "user", "content": rng.choice(_WORDS)})
        thoughts = {"reasoning_content": rng.choice(_WORDS).strip()} if rng.random() < 0.3 else {}
        res.append({"role": "assistant", "content": rng.choice(_WORDS), **thoughts})
    end = rng.random()
    if end < 0.4:
        res[-1] = {
            "role": "assistant",
            "content": rng.choice(["", " ", "\n"]),
            **rng.choice([{}, {"reasoning_content": ""}]),
        }
    elif end < 0.7:
        res.pop()
    return res


def own(source: str, messages: list[dict[str, Any]]) -> str:
    """The prompt by jinja2: with the header of an answer, or up to the end of the message that is continued."""
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        source
    )  # as transformers
    names = {"bos_token": "", "eos_token": "", "tools": None, "documents": None}
    *before, last = messages
    if last["role"] == "assistant" and last["content"].strip():
        marked = [*before, {**last, "content": f"{last['content']}{END}"}]
        return template.render(**names, messages=marked, add_generation_prompt=False).rpartition(str(END))[0]
    kept = before if last["role"] == "assistant" else messages
    return template.render(**names, messages=kept, add_generation_prompt=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations(name: str, kv: KVFlash) -> None:
    source = TEMPLATES[name].replace("{{ bos_token }}", "")
    template = ChatTemplate(kv.model, source)
    for seed in range(60):
        messages = conversation(random.Random(seed))
        assert template.render(messages) == own(source, messages), (seed, messages)


@pytest.mark.parametrize(
    "last", [{"content": ""}, {"content": " \n"}, {"content": None}, {"content": "", "reasoning_content": ""}]
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_last_message_that_says_nothing_is_none(name: str, last: dict[str, Any], kv: KVFlash) -> None:
    template = ChatTemplate(kv.model, TEMPLATES[name])
    assert template.render([USER, {"role": "assistant", **last}]) == template.render([USER])
    assert template.render([USER, *[{"role": "assistant", **last}] * 2]) == template.render([USER])


def test_thoughts_are_continued_where_the_template_shows_them(kv: KVFlash) -> None:
    thinks = {"role": "assistant", "content": "", "reasoning_content": "The screen"}
    assert ChatTemplate(kv.model, TEMPLATES["strict"]).render([USER, thinks]).endswith("<think>\nThe screen")
    prompt = ChatTemplate(kv.model, SIMPLE).render([USER, thinks])
    assert prompt == ChatTemplate(kv.model, SIMPLE).render([USER]), "it has no place for thoughts"


def test_a_conversation_of_nothing() -> None:
    with (
        Model.load(BUNDLED_MODEL, no_alloc=True) as model,
        pytest.raises(UsageError, match="nothing but an empty message"),
    ):
        ChatTemplate(model, SIMPLE).render([{"role": "assistant", "content": ""}])


#
# one rule for all protocols
#

CALL = {"name": "shot", "arguments": "{}"}
PICTURE = "iVBORw0KGgo="
DATA = f"data:image/png;base64,{PICTURE}"
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"


def say(kind: str, value: Any) -> dict[str, Any]:
    """A message in each protocol. kind: a role, with a content; a call; a tool's result; or given, by protocol."""
    if kind == "result":
        texts = [value] if isinstance(value, str) else value
        blocks = {
            "text": (
                lambda t: {"type": "text", "text": t},
                lambda t: {"type": "text", "text": t},
                lambda t: {"type": "input_text", "text": t},
            ),
            "picture": (
                lambda _: {"type": "image_url", "image_url": {"url": DATA}},
                lambda _: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
                lambda _: {"type": "input_image", "image_url": DATA},
            ),
        }
        parts = [[blocks["picture" if t is PICTURE else "text"][i](t) for t in texts or ()] for i in range(3)]
        chat, anthropic, responses = (p if texts is not None else None for p in parts)
        ollama = {
            "content": "\n".join(t for t in texts or () if t is not PICTURE),
            "images": [t for t in texts or () if t is PICTURE],
        }
        return {
            CHAT: {"role": "tool", "tool_call_id": "c1", "content": chat},
            MESSAGES: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": anthropic}]},
            RESPONSES: {"type": "function_call_output", "call_id": "c1", "output": responses},
            OLLAMA: {"role": "tool", "tool_name": "shot", **ollama},
        }
    if kind == "given":
        return dict(value)
    if kind == "call":
        return {
            CHAT: {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
            },
            MESSAGES: {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "shot", "input": {}}]},
            RESPONSES: {"type": "function_call", "call_id": "c1", **CALL},
            OLLAMA: {"role": "assistant", "tool_calls": [{"function": {"name": "shot", "arguments": {}}}]},
        }
    roles = {CHAT: kind, MESSAGES: "system" if kind == "developer" else kind, RESPONSES: kind, OLLAMA: kind}
    return {path: {"role": role, "content": value} for path, role in roles.items()}


USER_SAYS = ("user", "What is on the screen?")
SAME: dict[str, tuple[list[tuple[str, Any]], dict[str, Any], str]] = {
    "a turn": ([USER_SAYS], {}, "<user><begin>"),
    "an empty last message": ([USER_SAYS, ("assistant", "")], {}, "<user><begin>"),
    "one of no parts": ([USER_SAYS, ("assistant", [])], {}, "<user><begin>"),
    "one that is null": ([USER_SAYS, ("assistant", None)], {}, "<user><begin>"),
    "one of a space": ([USER_SAYS, ("assistant", " ")], {}, "<user><begin>"),
    "a text to continue": ([USER_SAYS, ("assistant", "It shows")], {}, "<user><begin>It shows"),
    "the same by name": (
        [USER_SAYS, ("assistant", "It shows")],
        {"continue_final_message": True},
        "<user><begin>It shows",
    ),
    "without a new header": (
        [USER_SAYS, ("assistant", "It shows")],
        {"add_generation_prompt": False},
        "<user><begin>It shows",
    ),
    "a text that has ended": (
        [USER_SAYS, ("assistant", "Yes")],
        {"continue_final_message": False},
        "<user><begin>Yes<end><begin>",
    ),
    "no content within": ([("user", []), ("assistant", []), USER_SAYS], {}, "<none><begin><end><user><begin>"),
    "leading systems": ([("system", "A"), ("developer", "B"), USER_SAYS], {}, "<system>A\n\nB<end><user><begin>"),
    "a later system": (
        [USER_SAYS, ("assistant", "Yes"), ("system", "C"), USER_SAYS],
        {},
        "<user><begin>Yes<end><system>C<end><user><begin>",
    ),
    "a result": ([USER_SAYS, ("call", None), ("result", "taken")], {}, "<user><call><tool>taken<end><begin>"),
    "a result of nothing": ([USER_SAYS, ("call", None), ("result", None)], {}, "<user><call><tool><end><begin>"),
    "a result of no parts": ([USER_SAYS, ("call", None), ("result", [])], {}, "<user><call><tool><end><begin>"),
    "a picture": (
        [USER_SAYS, ("call", None), ("result", ["taken", PICTURE])],
        {},
        "<user><call><tool>taken\n[image: this model reads text only]<end><begin>",
    ),
    "a picture beside nothing": (
        [USER_SAYS, ("call", None), ("result", ["", PICTURE])],
        {},
        "<user><call><tool>[image: this model reads text only]<end><begin>",
    ),
    "a picture alone": (
        [USER_SAYS, ("call", None), ("result", [PICTURE])],
        {},
        "<user><call><tool>[image: this model reads text only]<end><begin>",
    ),
}
"""Conversations, with fields of the request, and the prompt that each protocol makes of them."""
SHORT = {
    "<user>": "<|im_start|>user\nWhat is on the screen?<|im_end|>\n",
    "<none>": "<|im_start|>user\n<|im_end|>\n",
    "<begin>": "<|im_start|>assistant\n",
    "<end>": "<|im_end|>\n",
    "<system>": "<|im_start|>system\n",
    "<call>": "<|im_start|>assistant\n[shot]<|im_end|>\n",
    "<tool>": "<|im_start|>tool\n",
}
WITH_CALLS = SIMPLE.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
)
MOST = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens", OLLAMA: "options"}


def body(path: str, said: list[tuple[str, Any]], more: dict[str, Any]) -> bytes:
    messages = [say(*one)[path] for one in said]
    limit = {MOST[path]: {"num_predict": 1} if path == OLLAMA else 1}
    return json.dumps({"input" if path == RESPONSES else "messages": messages, **limit, **more}).encode()


def prompt(kv: KVFlash, path: str, said: list[tuple[str, Any]], more: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    builder = PromptBuilder(Settings("m", Sampling(), template=WITH_CALLS), ResponseStore())
    prepared = builder.prepare(kv, body(path, said, more), ANSWERS[path])
    assert prepared.rendered is not None
    return prepared.rendered.prompt, prepared.warnings


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
@pytest.mark.parametrize("name", SAME)
def test_protocols_have_one_rule(name: str, path: str, kv: KVFlash) -> None:
    said, more, short = SAME[name]
    found, warnings = prompt(kv, path, said, more)
    for mark, text in SHORT.items():
        short = short.replace(mark, text)
    assert found == short
    assert any("the model sees only the type" in warning for warning in warnings) == ("picture" in name)


REFUSED = {
    "nothing to continue": (
        [USER_SAYS],
        {"continue_final_message": True},
        "the last message is not a text of the assistant",
    ),
    "an empty one to continue": (
        [USER_SAYS, ("assistant", "")],
        {"continue_final_message": True},
        "is not a text of the assistant",
    ),
    "both": (
        [USER_SAYS, ("assistant", "A")],
        {"continue_final_message": True, "add_generation_prompt": True},
        "are both true",
    ),
    "neither": (
        [USER_SAYS, ("assistant", "A")],
        {"continue_final_message": False, "add_generation_prompt": False},
        "are both false",
    ),
    "a picture of the user": ([("user", [{"type": "image"}])], {}, "text"),
    "nothing said": ([("user", None)], {}, "null"),
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("name", REFUSED)
def test_protocols_refuse_the_same(name: str, path: str, kv: KVFlash) -> None:
    said, more, says = REFUSED[name]
    with pytest.raises(RequestError, match=says):
        prompt(kv, path, said, more)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": 1},
        0,
        False,
        ["taken"],
        [{"type": "markdown", "text": "taken"}],
        [{"type": ["image"]}],
        [{"type": "text"}],
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
def test_what_no_result_is_gets_refused(path: str, value: Any, kv: KVFlash) -> None:
    given = {
        CHAT: {"role": "tool", "tool_call_id": "c1", "content": value},
        MESSAGES: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": value}]},
        RESPONSES: {"type": "function_call_output", "call_id": "c1", "output": value},
        OLLAMA: {"role": "tool", "tool_name": "shot", "content": value},
    }
    with pytest.raises(RequestError, match=r"\.(content|output)(\[0\])?\b.* (is|has) .*"):
        prompt(kv, path, [USER_SAYS, ("call", None), ("given", given)], {})


def test_a_call_cannot_follow_a_text(kv: KVFlash) -> None:
    said = [USER_SAYS, ("assistant", "I will")]
    tools = {"tools": [{"type": "function", "function": {"name": "shot"}}]}
    with pytest.raises(RequestError, match="the answer must call a tool, and continues the text of the last message"):
        prompt(kv, CHAT, said, {**tools, "tool_choice": "required"})
    assert prompt(kv, CHAT, said, tools)[0].endswith("<|im_start|>assistant\nI will")
