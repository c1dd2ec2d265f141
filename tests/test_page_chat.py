"""The page's chat in a real browser: a conversation as it goes, what stays of it, and all that can be done with it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium")

from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys
from support import browser, serving
from support.browser import Page, needs_browser, stream
from support.changes import SERVE
from support.serving import N_CODE, Running, until

from pyllama_kvflash.needle import NeedlePrompt

pytestmark = [pytest.mark.native, needs_browser(), pytest.mark.nightly(SERVE)]

environment = serving.environment
driver, page = browser.driver, browser.page
document = serving.document
TORN = {
    "stopped": "Torn: it was stopped here.",
    "broken": "Torn: the connection or the server failed here.",
    "length": "Torn: it reached the limit of tokens, or the end of the context.",
}


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
        assert page.texts(".turn.assistant .torn") == [TORN["stopped"]]
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
    assert page.texts(".turn.assistant .torn") == [TORN["stopped"]]
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
    deltas = (
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm, "},
        {"reasoning_content": "漢."},
        {"content": evil},
    )
    page.answers(": prefill 5/10\n\n" + stream(*deltas))
    page.say(evil)
    assert page.texts(".turn .text") == [evil, evil]
    assert page.texts(".turn .note")[-1].endswith("5 of answer · 1,234 of prompt: 1,000 cached, 234 new")
    thoughts = page.one(".turn details")
    assert not thoughts.get_property("open")
    assert page.text(".turn details div") == "Hm, 漢."
    assert page.driver.find_elements("css selector", ".turn img, .turn b") == []


#
# Markdown
#


MARKDOWN = """# A title

Some *words*, `code`, [a link](https://example.com/x), [an evil one](javascript:alert(1)), [ours](/metrics).

![a picture](https://example.com/x.png) <img src=x onerror=alert(1)> <script>alert(1)</script>

| a | b |
|---|--:|
| 1 | 2 |

- one
- two

```python
def f(x: int) -> str:
    return "<b>"
```
"""


def test_markdown_is_shown_and_nothing_in_it_is_obeyed(page: Page) -> None:
    page.said(MARKDOWN)
    assert page.text(".assistant h1") == "A title"
    assert page.texts(".assistant td") == ["1", "2"]
    assert page.texts(".assistant li") == ["one", "two"]
    links = page.driver.execute_script(
        "return [...document.querySelectorAll('.assistant .text a')].map((a) => [a.getAttribute('href'), a.rel])"
    )
    assert [href for href, _ in links] == ["https://example.com/x", None, None, "https://example.com/x.png"]
    assert {rel for _, rel in links} == {"noopener noreferrer"}
    assert page.driver.find_elements("css selector", ".text img, .text script") == []
    assert "<img src=x onerror=alert(1)> <script>alert(1)</script>" in page.text(".assistant .text")
    assert page.text(".code code") == 'def f(x: int) -> str:\n    return "<b>"\n'
    assert page.text(".code .hljs-keyword") == "def"
    assert page.text(".code-head span") == "python"
    assert page.kept()[-1]["messages"][1]["content"] == MARKDOWN


#
# editing, and answers that are torn
#


def test_a_question_is_edited_and_an_answer_made_anew(page: Page) -> None:
    """What was before is replaced, and stays if nothing new comes."""
    page.said("First.")
    page.answers(stream({"content": "Second."}))
    page.act("Regenerate")
    page.until(lambda: page.texts(".assistant .text") == ["Second."])
    page.answered()
    assert [m["content"] for m in page.asked()[0]["messages"]] == ["Hello"]
    page.act("Edit")
    page.type(" there", Keys.ESCAPE)
    assert page.texts(".user .text") == ["Hello"]
    page.answers(stream({"content": "Third."}))
    page.act("Edit")
    page.type(" there", Keys.ENTER)
    page.until(lambda: page.texts(".assistant .text") == ["Third."])
    page.answered()
    assert [m["content"] for m in page.asked()[0]["messages"]] == ["Hello there"]
    assert [m["content"] for m in page.kept()[-1]["messages"]] == ["Hello there", "Third."]
    page.answers(stream(reason=None, end='data: {"error": {"message": "no memory"}}\n\n'))
    page.act("Regenerate")
    page.until(lambda: page.text("#alert") == "no memory")
    page.answered()
    assert page.texts(".assistant .text") == ["Third."]
    assert page.texts(".user .text") == ["Hello there"]


def test_later_turns_go_only_if_the_user_agrees(page: Page) -> None:
    page.said("One.")
    page.said("Two.", "And?")
    first = "(//article//button[text()='Regenerate'])[1]"
    page.driver.find_element("xpath", first).click()
    assert "2 later messages" in page.driver.switch_to.alert.text
    page.driver.switch_to.alert.dismiss()
    assert page.texts(".assistant .text") == ["One.", "Two."]
    page.answers(stream({"content": "New."}))
    page.driver.find_element("xpath", first).click()
    page.driver.switch_to.alert.accept()
    page.until(lambda: page.texts(".assistant .text") == ["New."])
    page.answered()


@pytest.mark.parametrize(("why", "alert", "more"), [
    ("length", "", {"reason": "length"}),
    ("broken", "The connection was lost.", {"reason": None, "end": ""}),
    ("broken", "no memory", {"reason": None, "end": 'data: {"error":{"message":"no memory"}}\n\ndata: [DONE]\n\n'}),
])  # fmt: skip
def test_a_torn_answer_is_marked_and_goes_on(page: Page, why: str, alert: str, more: dict[str, Any]) -> None:
    """With what came before as the beginning of the answer, also after a reload."""
    page.said("Half of", **more)
    assert page.texts(".assistant .torn") == [TORN[why]]
    assert page.text("#alert") == alert
    assert page.one("#ask").get_property("value") == ""
    page.until(lambda: page.kept()[-1]["messages"][1]["torn"] == why)
    page.driver.refresh()
    page.until(lambda: page.texts(".assistant .torn") == [TORN[why]])
    page.answers(stream({"content": " the truth."}))
    page.act("Continue")
    page.until(lambda: page.texts(".assistant .text") == ["Half of the truth."])
    page.answered()
    assert page.asked()[0]["messages"][-1] == {"role": "assistant", "content": "Half of"}
    assert page.texts(".assistant .torn") == [""]
    assert page.texts(".assistant .acts") == ["Copy\nRegenerate"]
    assert page.kept()[-1]["messages"][1]["content"] == "Half of the truth."


#
# the list of conversations
#


def titles(page: Page) -> list[str]:
    return page.texts("#conversations .open")


def test_conversations_are_listed_renamed_and_deleted(page: Page) -> None:
    page.said("One.", "First question")
    page.settle(temperature="0.5", system="Be brief.")
    page.renew()
    page.said("Two.", "Second question")
    page.until(lambda: titles(page) == ["Second question", "First question"])
    assert page.asked()[0]["temperature"] == 0.5, "a new one begins with the settings of the last"
    page.settle(temperature="1")
    page.driver.find_elements("css selector", "#conversations .open")[1].click()
    page.until(lambda: page.texts(".text") == ["First question", "One."])
    assert page.one("#temperature").get_property("value") == "0.5", "each has its own"
    assert page.one("[aria-current]").text == "First question"

    page.one("#conversations [aria-label^=Rename]").click()
    page.type("x", Keys.ESCAPE)
    assert "First question" in titles(page)
    page.one("#conversations [aria-label^=Rename]").click()
    page.type("About <b>one</b>", Keys.ENTER)
    page.until(lambda: titles(page) == ["About <b>one</b>", "Second question"])
    page.said("More.", "And?")
    page.until(lambda: len(page.kept()[-1]["messages"]) == 4)
    assert titles(page)[0] == "About <b>one</b>", "a name stays"
    page.driver.refresh()
    page.until(lambda: len(page.texts(".turn")) == 4)

    page.one("#conversations [aria-label^=Delete]").click()
    page.driver.switch_to.alert.dismiss()
    assert len(titles(page)) == 2
    page.one("#conversations [aria-label^=Delete]").click()
    page.driver.switch_to.alert.accept()
    page.until(lambda: titles(page) == ["Second question"])
    assert page.texts(".text") == ["Second question", "Two."]


def test_conversations_are_exported_and_imported(page: Page, tmp_path: Path) -> None:
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.said("One.", "First: question?", reason="length")
    page.renew()
    page.said("Two.", "Second")
    page.one("#export-all").click()
    there = tmp_path / "kvflash-conversations.json"
    page.until(there.exists)
    assert len(json.loads(there.read_text("utf-8"))["conversations"]) == 2
    page.one("#conversations [aria-label^=Export]").click()
    page.until((tmp_path / "Second.json").exists)
    before = page.kept()
    page.open()
    page.until(lambda: page.text("#status") == "idle")
    assert titles(page) == []
    page.one("#import-file").send_keys(str(there))
    page.until(lambda: titles(page) == ["Second", "First: question?"])
    after = page.kept()
    for old, new in zip(before, after, strict=True):
        assert {**old, "id": "", "rev": 0} == {**new, "id": "", "rev": 0}
    (tmp_path / "no.json").write_text("{")
    page.one("#import-file").send_keys(str(tmp_path / "no.json"))
    page.until(lambda: "not JSON" in page.text("#alert"))
    (tmp_path / "other.json").write_text('{"conversations": [5, {}, null]}')
    page.one("#import-file").send_keys(str(tmp_path / "other.json"))
    page.until(lambda: "no conversations" in page.text("#alert"))


def test_two_tabs_lose_nothing(page: Page) -> None:
    """What one says, the other shows; if both answer at once, one of the two conversations is a copy."""
    page.said("One.", "Shared")
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    second = page.driver.current_window_handle
    page.driver.get(page.url)
    page.until(lambda: page.texts(".text") == ["Shared", "One."])
    page.said("Two.", "From the second")
    page.driver.switch_to.window(first)
    page.until(lambda: page.texts(".text") == ["Shared", "One.", "From the second", "Two."])
    page.driver.execute_script("BroadcastChannel.prototype.postMessage = () => {}")
    page.said("Three.", "Unheard")
    page.driver.switch_to.window(second)
    page.said("Four.", "As well")
    page.until(lambda: len(page.kept()) == 2 and all(len(c["messages"]) == 6 for c in page.kept()))
    assert sorted(c["messages"][4]["content"] for c in page.kept()) == ["As well", "Unheard"]
    assert sorted(c["title"] for c in page.kept()) == ["Shared", "Shared (copy)"]
    page.driver.close()
    page.driver.switch_to.window(first)


#
# settings, the gauge, the model, the theme
#


def test_all_settings_are_sent(page: Page) -> None:
    given = {
        "temperature": "0.7", "top_k": "20", "top_p": "0.8", "min_p": "0.1", "repeat_penalty": "1.1", "presence_penalty": "0.5",
        "frequency_penalty": "-0.5", "seed": "7", "max_tokens": "9",
    }  # fmt: skip
    page.one("#settings-open").click()
    page.one("#settings details summary").click()
    page.one("#samplers").send_keys("top_k; temperature")
    page.one("#settings .main").click()
    page.settle(**given, stop_strings="END\n\\n\\n")
    page.said("Yes.")
    sent = page.asked()[0]
    assert {name: sent[name] for name in given} == {name: float(value) for name, value in given.items()}
    assert sent["stop"] == ["END", "\n\n"]
    assert sent["samplers"] == ["top_k", "temperature"]
    page.one("#settings-open").click()
    page.one("#settings-reset").click()
    page.one("#settings .main").click()
    page.said("Yes.")
    assert page.asked()[0].keys() == {"messages", "stream", "stream_options"}
