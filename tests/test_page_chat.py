"""The page's chat in a real browser: a conversation as it goes, and what stays of it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("selenium")

from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys
from support import browser, serving
from support.browser import Page, needs_browser
from support.changes import SERVE
from support.serving import N_CODE, Running, until

from pyllama_kvflash.needle import NeedlePrompt

pytestmark = [pytest.mark.native, needs_browser(), pytest.mark.nightly(SERVE)]

environment = serving.environment
driver, page = browser.driver, browser.page
document = serving.document


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(policy="qk") as running:
        yield running


def ask(running: Running, messages: list[dict[str, str]]) -> str:
    """What the API answers."""
    body = {"messages": messages, "max_tokens": N_CODE}
    return str(running.post(body, "/v1/chat/completions").json()["choices"][0]["message"]["content"])


#
# the chat
#


def answers(page: Page) -> list[str]:
    """The texts of the last conversation's answers, as the model wrote them."""
    return [m["content"] for m in page.kept()[-1]["messages"] if m["role"] == "assistant"]


def test_a_conversation_by_keyboard_that_survives_a_reload(page: Page, server: Running, document: NeedlePrompt) -> None:
    """The answers are those of the API to the same messages; what was read stays known."""
    first, second = document.needles[1], document.needles[3]
    page.settle(temperature="0", max_tokens=str(N_CODE))
    page.driver.execute_script("arguments[0].value = arguments[1]", page.one("#ask"), document.text)
    page.say(first.question)
    asked = [{"role": "user", "content": document.text + first.question}]
    page.until(lambda: len(answers(page)) == 1)
    (answer,) = answers(page)
    assert answer == ask(server, asked)
    assert first.answer in page.texts(".turn.assistant .text")[0]
    notes = page.texts(".turn.assistant .note")
    assert f"{N_CODE} of answer" in notes[0]
    assert "limit of tokens" in page.text(".turn.assistant .torn")
    assert page.text("#heard-answer") == answer
    assert page.one("#heard-answer").get_attribute("aria-live") == "polite"
    before = page.texts(".turn .text") + notes

    page.driver.refresh()
    page.until(lambda: page.text("#status") == "idle")
    assert page.texts(".turn .text") + page.texts(".turn.assistant .note") == before
    assert page.one("#max-tokens").get_property("value") == str(N_CODE), "settings stay, too"
    page.say(second.question)
    page.until(lambda: len(answers(page)) == 2)
    assert second.answer in answers(page)[1]
    asked += [{"role": "assistant", "content": answer}, {"role": "user", "content": second.question}]
    assert answers(page)[1] == ask(server, asked)
    known, new = (int(n.replace(",", "")) for n in re.findall(r"([0-9,]+) (?:cached|new)", page.texts(".note")[-1]))
    assert known > 2300
    assert new < 100

    page.renew()
    page.driver.refresh()
    page.until(lambda: page.text("#status") == "idle")
    assert len(page.texts(".turn")) == 4, "an empty one is not kept"


def test_an_answer_is_stopped(page: Page, server: Running) -> None:
    """By the Escape key, and by the button. What came stays, and the server is free."""
    page.settle(max_tokens="3000", temperature="0")
    for stop in (lambda: page.type(Keys.ESCAPE), lambda: page.one("#stop").click()):
        page.renew()
        page.one("#ask").send_keys("On and on.", Keys.ENTER)
        page.until(lambda: "".join(page.texts(".turn.assistant .text")))
        stop()
        page.until(lambda: page.one("#send").is_enabled())
        assert page.texts(".turn.assistant .torn") == ["Torn: it was stopped here."]
        until(server.idle)
    assert page.text("#alert") == ""
    assert not page.one("#stop").is_displayed()


def test_a_reload_while_it_answers(page: Page, server: Running) -> None:
    """What came of the answer stays. A question of which nothing came is a draft again: two in a row confuse a model."""
    page.settle(max_tokens="3000", temperature="0")
    page.one("#ask").send_keys("On and on.", Keys.ENTER)
    page.until(lambda: "".join(page.texts(".turn.assistant .text")))
    page.driver.refresh()
    page.until(lambda: len(page.texts(".turn")) == 2)
    assert page.texts(".turn.assistant .text")[0]
    assert page.texts(".turn.assistant .torn") == ["Torn: it was stopped here."]
    until(server.idle)
    page.driver.execute_script("window.fetch = () => new Promise(() => {})")
    page.one("#ask").send_keys("And then?", Keys.ENTER)
    page.until(lambda: len(page.texts(".turn")) == 4)
    page.driver.refresh()
    page.until(lambda: page.one("#ask").get_property("value") == "And then?")
    assert len(page.texts(".turn")) == 2


def test_a_text_file_is_sent_with_the_message(page: Page, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Call me Ishmael. é漢🙂", "utf-8")
    (tmp_path / "old.txt").write_bytes("Æ".encode("latin-1"))
    field = page.one("#file")
    field.send_keys(str(tmp_path / "book.txt"))
    page.until(lambda: page.texts("#files .file-name") == ["book.txt, 21 characters"])
    field.send_keys(str(tmp_path / "old.txt"))
    page.until(lambda: "old.txt is not a text in UTF-8" in page.text("#alert"))
    page.one("#files button").click()
    assert not page.one("#files").is_displayed()
    field.send_keys(str(tmp_path / "book.txt"))
    page.until(lambda: page.one("#files").is_displayed())
    page.settle(max_tokens="2")
    page.say("Who?")
    assert page.texts(".turn.user .text") == ["Who?"]
    assert page.texts(".turn.user summary") == ["book.txt, 21 characters"]
    page.one(".turn.user summary").click()
    page.until(lambda: page.texts(".turn.user pre") == ["Call me Ishmael. é漢🙂"])
    assert not page.one("#files").is_displayed()


DAMAGE = """
const done = arguments[1], request = indexedDB.open("kvflash", 1);
request.onsuccess = () => {
  const change = request.result.transaction("conversations", "readwrite");
  change.objectStore("conversations").put({ id: "a", changed: 1e15, title: "A", ...JSON.parse(arguments[0]) });
  change.oncomplete = () => { request.result.close(); done(); };
};"""


@pytest.mark.parametrize(
    "kept", ["{}", '{"messages": [null, {"role": "user"}, 5]}', '{"messages": [], "settings": null, "total": "x"}']
)
def test_what_is_kept_may_be_damaged(page: Page, kept: str) -> None:
    page.driver.execute_async_script(DAMAGE, kept)
    page.driver.refresh()
    page.until(lambda: page.text("#status") == "idle")
    assert page.texts(".turn") == []
    page.settle(max_tokens="2")
    page.say("Hello")
    assert len(page.texts(".turn")) == 2


def test_what_the_server_refuses_is_shown_and_the_words_are_given_back(driver: Chrome) -> None:
    with Running(template="{{ raise_exception('no such roles') }}") as running:
        page = Page(driver, running.url)
        page.open()
        page.until(lambda: page.text("#status") == "idle")
        page.say("Hello there")
        page.until(lambda: page.text("#alert"))
        assert page.one("#alert").get_attribute("role") == "alert"
        assert "no such roles" in page.text("#alert")
        assert page.one("#ask").get_property("value") == "Hello there"
        assert page.texts(".turn") == []
        page.until(lambda: any("400" in line for line in page.errors()))  # the browser's own word on it


def test_a_stream_in_any_parts(page: Page) -> None:
    """Progress, thoughts, letters of several bytes, and markup that stays text."""
    evil = "<img src=x onerror=alert(1)><b>é漢🙂"
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm, "},
        {"reasoning_content": "漢."},
        {"content": evil},
    ]
    usage = {
        "prompt_tokens": 1234,
        "completion_tokens": 5,
        "total_tokens": 1239,
        "prompt_tokens_details": {"cached_tokens": 1000},
    }
    events = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": [], "usage": usage}]
    parts = ": prefill 5/10\n\n" + "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
    page.answers(parts + "data: [DONE]\n\n")
    page.say(evil)
    assert page.texts(".turn .text") == [evil, evil]
    assert page.texts(".turn .note")[-1].endswith("5 of answer · 1,234 of prompt: 1,000 cached, 234 new")
    thoughts = page.one(".turn details")
    assert not thoughts.get_property("open")
    assert page.text(".turn details div") == "Hm, 漢."
    assert page.driver.find_elements("css selector", ".turn img, .turn b") == []


@pytest.mark.parametrize(("end", "message"), [
    ('data: {"error":{"message":"no memory for this"}}\n\ndata: [DONE]\n\n', "no memory for this"),
    ("", "The connection was lost."),
])  # fmt: skip
def test_a_stream_that_fails_keeps_what_came(page: Page, end: str, message: str) -> None:
    page.answers('data: {"choices":[{"delta":{"content":"Half of"}}]}\n\n' + end)
    page.say("Hello")
    assert page.text("#alert") == message
    assert page.texts(".turn.assistant .text") == ["Half of"]
    assert page.one("#ask").get_property("value") == ""
