"""KVFlash.chat(): a conversation in Python, of which each turn reads only what is new."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.changes import ENGINE, SERVE
from support.rewritten import with_template
from support.runs import GREEDY, Open, text_of

from pyllama_kvflash import Done, KVFlash, KVSequence, Token, Warn
from pyllama_kvflash.chat.engine import NO_TEMPLATE
from pyllama_kvflash.errors import UsageError

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"n_ctx": 4096, "pool": 512, "chunk": 16, "n_threads": 1, "share": 0}
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'assistant' }}{% endfor %}"
DOCUMENT = needles.document(1400, seed=3)

Said = list[dict[str, Any]]


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def answer(kv: KVSequence, messages: Said, **how: Any) -> tuple[str, int]:
    """What it says, and how many tokens were read."""
    events = list(kv.chat(messages, **{"max_tokens": 12, "sampling": GREEDY, "stop": ["\n"], **how}))
    done = events[-1]
    assert isinstance(done, Done)
    return text_of(events), done.stats.n_prompt


def check_turns(kv: KVSequence, **how: Any) -> None:
    """A question for each code of a text: only the first one reads the text, and all are answered."""
    messages: Said = []
    for i, needle in enumerate(DOCUMENT.needles):
        messages.append(said("user", needle.question if i else DOCUMENT.text + needle.question))
        text, n_read = answer(kv, messages, **how)
        assert needle.answer in text
        assert n_read > 1300 if i == 0 else n_read < 30
        messages.append(said("assistant", text))


@pytest.fixture
def chatting(tmp_path: Path) -> Iterator[Callable[..., KVFlash]]:
    """Open the bundled model with a template of its own."""
    kvs = []

    def open_(template: str, **options: Any) -> KVFlash:
        kvs.append(KVFlash.from_file(with_template(tmp_path / "chat.gguf", template), **{**SMALL, **options}))
        return kvs[-1]

    yield open_
    for kv in kvs:
        kv.close()


def test_turns_read_what_is_new(chatting: Callable[..., KVFlash]) -> None:
    kv = chatting(TEMPLATE)
    check_turns(kv)
    kv.check_integrity()


@pytest.mark.nightly(SERVE, ENGINE)
def test_each_sequence_has_a_conversation(chatting: Callable[..., KVFlash]) -> None:
    kv = chatting(TEMPLATE, n_parallel=2, pool=1024, policy="qk")
    for sequence in kv.sequences:
        check_turns(sequence)


def test_without_a_template(opened: Open) -> None:
    """Each message is a line, a warning says so, and the line of another role ends the answer. The assistant's own goes on."""
    kv = opened("needle")
    messages = [said("user", "hello"), said("assistant", "I see. The secret code for the")]
    events = list(kv.chat(messages, max_tokens=3, sampling=GREEDY))
    assert [e.text for e in events if isinstance(e, Warn)] == [NO_TEMPLATE]
    assert sum(isinstance(e, Token) for e in events) == 3
    n = len(kv.tokenize("user: hello\nassistant: I see. The secret code for the"))
    want = list(kv.generate(kv.tokens[:n], max_tokens=3, sampling=GREEDY))
    assert text_of(events) == text_of(want)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], r"`messages` is empty: give a list such as \[{"),
        ("hello", "`messages` is a str: give a list"),
        (None, "`messages` is None: give a list"),
        ((said("user", word) for word in ["hello"]), "`messages` is a generator: give a list"),
        (said("user", "hello"), "`messages` is a dict: give a list"),
        (
            [said("user", "hello"), {"role": "user"}],
            r"`messages\[1\]` is .*, without a role and a content: give a list",
        ),
        (["hello"], r"`messages\[0\]` is 'hello', without a role"),
        ([{"role": "user", "content": ["hello"]}], "without a role and a content"),
    ],
)
def test_what_is_not_a_conversation(opened: Open, messages: Any, says: str) -> None:
    kv = opened("needle")
    list(kv.generate("The map is", max_tokens=2))
    held = kv.tokens.tolist()
    with pytest.raises(UsageError, match=says):
        list(kv.chat(messages))
    assert kv.tokens.tolist() == held
