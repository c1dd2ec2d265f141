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
from support.alike import FORMS, Conversation, Said
from support.bodies import CHAT, MESSAGE, RESPONSES

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
        pytest.raises(UsageError, match="only an empty message"),
    ):
        ChatTemplate(model, SIMPLE).render([{"role": "assistant", "content": ""}])


#
# one rule for all protocols
#

ASKS, CALLS = Said("user", "What is on the screen?"), Said("assistant", None, calls=True)


def says(text: Any) -> Said:
    return Said("assistant", text)


def result(text: Any, *, picture: bool = False) -> Said:
    return Said("tool", text, picture=picture)


NAMED, HEADLESS = {"continue_final_message": True}, {"add_generation_prompt": False}
UNSEEN = "[image: this model reads text only]"
SAME: dict[str, tuple[list[Said], dict[str, Any], str]] = {
    "a turn": ([ASKS], {}, "<user><begin>"),
    "an empty last message": ([ASKS, says("")], {}, "<user><begin>"),
    "one of no parts": ([ASKS, says([])], {}, "<user><begin>"),
    "one that is null": ([ASKS, says(None)], {}, "<user><begin>"),
    "one of a space": ([ASKS, says(" ")], {}, "<user><begin>"),
    "a text to continue": ([ASKS, says("It shows")], {}, "<user><begin>It shows"),
    "the same by name": ([ASKS, says("It shows")], NAMED, "<user><begin>It shows"),
    "without a new header": ([ASKS, says("It shows")], HEADLESS, "<user><begin>It shows"),
    "a text that has ended": ([ASKS, says("Yes")], {"continue_final_message": False}, "<user><begin>Yes<end><begin>"),
    "no content within": ([Said("user", []), says([]), ASKS], {}, "<none><begin><end><user><begin>"),
    "leading systems": ([Said("system", "A"), Said("developer", "B"), ASKS], {}, "<system>A\n\nB<end><user><begin>"),
    "a later system": ([ASKS, says("Yes"), Said("system", "C"), ASKS], {}, "<user><begin>Yes<end><system>C<end><user><begin>"),
    "a result": ([ASKS, CALLS, result("taken")], {}, "<user><call><tool>taken<end><begin>"),
    "a result of nothing": ([ASKS, CALLS, result(None)], {}, "<user><call><tool><end><begin>"),
    "a result of no parts": ([ASKS, CALLS, result([])], {}, "<user><call><tool><end><begin>"),
    "a picture": ([ASKS, CALLS, result("taken", picture=True)], {}, f"<user><call><tool>taken\n{UNSEEN}<end><begin>"),
    "a picture beside nothing": ([ASKS, CALLS, result("", picture=True)], {}, f"<user><call><tool>{UNSEEN}<end><begin>"),
}  # fmt: skip
"""Conversations, with fields of the request, and the prompt that each protocol makes of them."""
SHORT = {
    "<user>": "<|im_start|>user\nWhat is on the screen?<|im_end|>\n",
    "<none>": "<|im_start|>user\n<|im_end|>\n",
    "<begin>": "<|im_start|>assistant\n",
    "<end>": "<|im_end|>\n",
    "<system>": "<|im_start|>system\n",
    "<call>": "<|im_start|>assistant\n[weather]<|im_end|>\n",
    "<tool>": "<|im_start|>tool\n",
}
WITH_CALLS = SIMPLE.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
)


def prompt(kv: KVFlash, path: str, said: list[Said], more: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    builder = PromptBuilder(Settings("m", Sampling(), template=WITH_CALLS), ResponseStore())
    body = {**FORMS[path](Conversation(None, tuple(said), tools=False)), **more}
    prepared = builder.prepare(kv, json.dumps(body).encode(), ANSWERS[path])
    assert prepared.rendered is not None
    return prepared.rendered.prompt, prepared.warnings


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("name", SAME)
def test_protocols_have_one_rule(name: str, path: str, kv: KVFlash) -> None:
    said, more, short = SAME[name]
    found, warnings = prompt(kv, path, said, more)
    for mark, text in SHORT.items():
        short = short.replace(mark, text)
    assert found == short
    assert any("the model sees only the type" in warning for warning in warnings) == ("picture" in name)


BOTH, NEITHER = ({"continue_final_message": one, "add_generation_prompt": one} for one in (True, False))
REFUSED = {
    "nothing to continue": ([ASKS], NAMED, "the last message is not an assistant's text"),
    "an empty one to continue": ([ASKS, says("")], NAMED, "is not an assistant's text"),
    "both": ([ASKS, says("A")], BOTH, "are both true"),
    "neither": ([ASKS, says("A")], NEITHER, "are both false"),
    "a picture of the user": ([Said("user", [{"type": "image"}])], {}, "text"),
    "nothing said": ([Said("user", None)], {}, "null"),
}


@pytest.mark.parametrize("path", [CHAT, MESSAGE, RESPONSES])
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
@pytest.mark.parametrize("path", FORMS)
def test_what_no_result_is_gets_refused(path: str, value: Any, kv: KVFlash) -> None:
    with pytest.raises(RequestError, match=r"\.(content|output)(\[0\])?\b.* (is|has) .*"):
        prompt(kv, path, [ASKS, CALLS, result(value)], {})


def test_a_call_cannot_follow_a_text(kv: KVFlash) -> None:
    said = [ASKS, says("I will")]
    tools = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
    with pytest.raises(RequestError, match="the answer must call a tool, but it continues the text"):
        prompt(kv, CHAT, said, {**tools, "tool_choice": "required"})
    assert prompt(kv, CHAT, said, tools)[0].endswith("<|im_start|>assistant\nI will")
