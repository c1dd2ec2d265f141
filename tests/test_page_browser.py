"""The page in a real browser: what one does on it by keyboard and pointer, on a desktop and on a phone."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("uvicorn")
pytest.importorskip("selenium")

from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys
from support import serving
from support.browser import Page, chromium, needs_browser
from support.changes import SERVE
from support.serving import N_CODE, Running, until

from pyllama_kvflash.native.guests import Guests
from pyllama_kvflash.needle import NeedlePrompt

pytestmark = [pytest.mark.native, needs_browser(), pytest.mark.nightly(SERVE)]

environment = serving.environment
document = serving.document
DESKTOP, PHONE = (1280, 800), (390, 844)
# What a server may send: parts of a stream that end anywhere.
STREAM = """
const bytes = new TextEncoder().encode(arguments[0]);
const real = window.fetch;
window.fetch = (path, options) => path !== "/v1/chat/completions" ? real(path, options) : Promise.resolve(new Response(
  new ReadableStream({
    start(controller) {
      for (let i = 0; i < bytes.length; i += 7) controller.enqueue(bytes.slice(i, i + 7));
      controller.close();
    },
  }), { status: 200 }));
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Its chunks are in the pool for all layers, or out."""
    with Running(policy="qk") as running:
        yield running


@pytest.fixture
def page(driver: Chrome, server: Running) -> Iterator[Page]:
    """The page, opened for the first time. Nothing is wrong in its console when a test ends."""
    found = Page(driver, server.url)
    found.open()
    found.until(lambda: found.text("#status") == "idle")
    yield found
    assert found.errors() == []


def settle(page: Page, **values: str) -> None:
    """Type settings, by the names of their fields."""
    page.one("#settings summary").click()
    for name, value in values.items():
        field = page.one(f"#{name.replace('_', '-')}")
        page.until(field.is_displayed)
        field.send_keys(value)
    page.one("#settings summary").click()


def paste(page: Page, text: str) -> None:
    """Put a long text into the message."""
    page.driver.execute_script("arguments[0].value = arguments[1]", page.one("#ask"), text)


def ask(running: Running, messages: list[dict[str, str]]) -> str:
    """What the API answers."""
    body = {"messages": messages, "max_tokens": N_CODE}
    return str(running.post(body, "/v1/chat/completions").json()["choices"][0]["message"]["content"])


def sequence(running: Running, n_least: int = 1) -> dict[str, Any]:
    """What is said of the sequence with so many tokens."""
    found = running.http.get("/kvflash/pool").json()["sequences"]
    return dict(next(s for s in found if s["n_tokens"] >= n_least))


def read(page: Page, document: NeedlePrompt) -> None:
    """A conversation about a document that the pool does not hold, which the page then shows."""
    settle(page, temperature="0", max_tokens=str(N_CODE))
    paste(page, document.text)
    page.say(document.needles[1].question)
    page.until(lambda: int(page.one("#grid").get_attribute("aria-valuemax")) >= len(document.text) // 400)


#
# the chat
#


def test_a_conversation_by_keyboard_that_survives_a_reload(page: Page, server: Running, document: NeedlePrompt) -> None:
    """The answers are those of the API to the same messages; what was read stays known."""
    first, second = document.needles[1], document.needles[3]
    read(page, document)
    asked = [{"role": "user", "content": document.text + first.question}]
    answer = page.text(".turn.assistant .text")
    assert answer == ask(server, asked)
    assert first.answer in answer
    notes = page.texts(".turn.assistant .note")
    assert f"{N_CODE} of answer, cut off by the token limit" in notes[0]
    assert page.text("#heard-answer") == answer
    assert page.one("#heard-answer").get_attribute("aria-live") == "polite"
    before = [page.text(".turn.user .text"), answer, *notes]

    page.driver.refresh()
    page.until(lambda: page.text("#status") == "idle")
    assert [
        page.text(".turn.user .text"),
        page.text(".turn.assistant .text"),
        *page.texts(".turn.assistant .note"),
    ] == before
    assert page.one("#max-tokens").get_property("value") == str(N_CODE), "settings stay, too"
    page.say(second.question)
    answers = [
        e.get_property("textContent") for e in page.driver.find_elements("css selector", ".turn.assistant .text")
    ]
    assert second.answer in answers[1]
    asked += [{"role": "assistant", "content": answer}, {"role": "user", "content": second.question}]
    assert answers[1] == ask(server, asked)
    known, new = (int(part.split()[0].replace(",", "")) for part in page.texts(".turn .note")[-1].split(", ")[1:3])
    assert known > 2300
    assert new < 100

    page.one("#new").click()
    page.driver.switch_to.alert.dismiss()
    assert len(page.texts(".turn")) == 4
    page.renew()
    assert page.texts(".turn") == []
    page.driver.refresh()
    assert page.texts(".turn") == []


def test_a_system_prompt_comes_first(page: Page) -> None:
    settle(page, system="Be brief.", max_tokens="3")
    page.driver.execute_script("window.sent = []; const real = fetch; window.fetch = (path, options) => {"
                               " if (options?.body) sent.push(options.body); return real(path, options); }")  # fmt: skip
    page.say("Hello")
    sent = json.loads(page.driver.execute_script("return sent[0]"))
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (sent["stream"], sent["max_tokens"], sent["stream_options"]) == (True, 3, {"include_usage": True})
    assert "temperature" not in sent, "the server's, if none is given"


def test_shift_and_enter_begin_a_line(page: Page) -> None:
    settle(page, max_tokens="2")
    page.one("#ask").send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert page.one("#ask").get_property("value") == "one\ntwo"
    page.say("   ")
    assert page.text(".turn.user .text") == "one\ntwo   "


def test_an_answer_is_stopped(page: Page, server: Running) -> None:
    """By the Escape key, and by the button. What came stays, and the server is free."""
    settle(page, max_tokens="3000", temperature="0")
    for stop in (lambda: page.type(Keys.ESCAPE), lambda: page.one("#stop").click()):
        page.renew()
        page.one("#ask").send_keys("On and on.", Keys.ENTER)
        page.until(lambda: "".join(page.texts(".turn.assistant .text")))
        stop()
        page.until(lambda: page.one("#send").is_enabled())
        assert page.texts(".turn.assistant .note") == ["stopped"]
        until(server.idle)
    assert page.text("#alert") == ""
    assert not page.one("#stop").is_displayed()


def test_a_reload_while_it_answers(page: Page, server: Running) -> None:
    """What came of the answer stays. A question of which nothing came is a draft again: two in a row confuse a model."""
    settle(page, max_tokens="3000", temperature="0")
    page.one("#ask").send_keys("On and on.", Keys.ENTER)
    page.until(lambda: "".join(page.texts(".turn.assistant .text")))
    page.driver.refresh()
    page.until(lambda: len(page.texts(".turn")) == 2)
    assert page.texts(".turn.assistant .text")[0]
    assert page.texts(".turn.assistant .note") == ["stopped"]
    until(server.idle)
    page.driver.execute_script("window.fetch = () => new Promise(() => {})")
    page.one("#ask").send_keys("And then?", Keys.ENTER)
    page.until(lambda: len(page.texts(".turn")) == 4)
    page.driver.refresh()
    page.until(lambda: page.one("#ask").get_property("value") == "And then?")
    assert len(page.texts(".turn")) == 2


def test_a_text_file_is_sent_with_the_message(page: Page, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Call me Ishmael. é漢🙂", "utf-8")
    (tmp_path / "old.txt").write_bytes("Æ".encode("utf-16"))
    field = page.one("#file")
    field.send_keys(str(tmp_path / "book.txt"))
    page.until(lambda: page.text("#file-name") == "book.txt, 21 characters")
    field.send_keys(str(tmp_path / "old.txt"))
    page.until(lambda: "old.txt is not a text in UTF-8" in page.text("#alert"))
    page.one("#file-remove").click()
    assert not page.one("#file-chip").is_displayed()
    field.send_keys(str(tmp_path / "book.txt"))
    page.until(lambda: page.one("#file-chip").is_displayed())
    settle(page, max_tokens="2")
    page.say("Who?")
    assert page.text(".turn.user .text") == "Call me Ishmael. é漢🙂\n\nWho?"
    assert not page.one("#file-chip").is_displayed()


def test_what_was_typed_meanwhile_is_kept_beside_words_given_back(driver: Chrome) -> None:
    with Running(template="{{ raise_exception('no such roles') }}") as running:
        page = Page(driver, running.url)
        page.open()
        page.until(lambda: page.text("#status") == "idle")
        page.driver.execute_script("const real = fetch; window.fetch = async (path, options) => {"
                                   " if (options?.body) { document.querySelector('#ask').value = 'next'; } return real(path, options); }")  # fmt: skip
        page.say("first")
        page.until(lambda: page.text("#alert"))
        assert page.one("#ask").get_property("value") == "first\n\nnext"
        page.until(lambda: any("400" in line for line in page.errors()))


def test_any_temperature_may_be_sent_by_the_button(page: Page) -> None:
    settle(page, temperature="0.75", max_tokens="2")
    page.one("#ask").send_keys("Hello")
    page.one("#send").click()
    page.until(lambda: page.texts(".turn .note")[-1:] and "of answer" in page.texts(".turn .note")[-1])


@pytest.mark.parametrize(
    "kept", ["5", "{}", '{"messages": [null, {"role": "user"}, 5]}', '{"messages": [], "settings": null}']
)
def test_what_is_kept_may_be_damaged(page: Page, kept: str) -> None:
    page.driver.execute_script(
        "for (const s of [sessionStorage, localStorage]) s.setItem('kvflash.conversation', arguments[0])", kept
    )
    page.driver.refresh()
    page.until(lambda: page.text("#status") == "idle")
    assert page.texts(".turn") == []
    settle(page, max_tokens="2")
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
    stream = ": prefill 5/10\n\n" + "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
    page.driver.execute_script(STREAM, stream + "data: [DONE]\n\n")
    page.say(evil)
    assert [page.text(f".turn.{who} .text") for who in ("user", "assistant")] == [evil, evil]
    assert page.texts(".turn .note")[-1] == "1,234 tokens of prompt, 1,000 cached, 234 new; 5 of answer"
    thoughts = page.one(".turn details")
    assert not thoughts.get_property("open")
    assert page.text(".turn details div") == "Hm, 漢."
    assert page.driver.find_elements("css selector", ".turn img, .turn b") == []


@pytest.mark.parametrize(("end", "message"), [
    ('data: {"error":{"message":"no memory for this"}}\n\ndata: [DONE]\n\n', "no memory for this"),
    ("", "The connection was lost."),
])  # fmt: skip
def test_a_stream_that_fails_keeps_what_came(page: Page, end: str, message: str) -> None:
    page.driver.execute_script(STREAM, 'data: {"choices":[{"delta":{"content":"Half of"}}]}\n\n' + end)
    page.say("Hello")
    assert page.text("#alert") == message
    assert page.text(".turn.assistant .text") == "Half of"
    assert page.one("#ask").get_property("value") == ""


#
# the pool
#


def shown(page: Page, server: Running, chunk: int) -> bool:
    """Whether the page shows the text of a chunk."""
    where = {"sequence": page.one("#grid").get_attribute("data-sequence"), "chunk": chunk}
    text = server.http.get("/kvflash/chunk", params=where).json()["text"]
    return page.text("#detail-title").startswith(f"Chunk {chunk}:") and page.text("#detail-text") == text


def kind(server: Running, chunk: int) -> str:
    return str(sequence(server, 2300)["kind"][chunk])


def test_chunks_by_keyboard(page: Page, server: Running, document: NeedlePrompt) -> None:
    read(page, document)
    grid, found = page.one("#grid"), sequence(server, 2300)
    last = len(found["state"]) - 1
    page.until(lambda: int(grid.get_attribute("aria-valuemax")) == last)
    columns = int(grid.get_attribute("data-columns"))
    at = 0
    for keys, to in ((Keys.HOME, 0), (Keys.ARROW_RIGHT, 1), (Keys.ARROW_DOWN, 1 + columns), (Keys.ARROW_LEFT, columns),
                     (Keys.ARROW_UP, 0), (Keys.ARROW_LEFT, 0), (Keys.END, last), (Keys.ARROW_RIGHT, last)):  # fmt: skip
        grid.send_keys(keys)
        at = to
        assert int(grid.get_attribute("aria-valuenow")) == at
        assert grid.get_attribute("aria-valuetext").startswith(f"Chunk {at}, ")
        page.until(lambda at=at: shown(page, server, at))
    grid.send_keys(Keys.HOME)
    assert "the beginning" in grid.get_attribute("aria-valuetext")
    out = found["state"].index("0")
    grid.send_keys(Keys.ARROW_RIGHT * out)
    assert "out, in host memory" in grid.get_attribute("aria-valuetext")
    text = server.http.get("/kvflash/chunk", params={"sequence": found["id"], "chunk": out}).json()["text"]
    page.until(lambda: page.text("#heard") == text)
    grid.send_keys(Keys.ENTER)
    page.until(lambda: "in the pool, pinned" in grid.get_attribute("aria-valuetext"))
    assert kind(server, out) == "p"
    grid.send_keys(Keys.SPACE)
    page.until(lambda: "pinned" not in grid.get_attribute("aria-valuetext"))
    assert kind(server, out) == "-"


def test_chunks_by_pointer(page: Page, server: Running, document: NeedlePrompt) -> None:
    """The text under the pointer; a click pins, another one unpins, and so does the button."""
    read(page, document)
    page.point_at_chunk(7)
    page.until(lambda: shown(page, server, 7))
    page.point_at_chunk(18)
    page.until(lambda: shown(page, server, 18))
    for want in "p-p":
        page.click_chunk(18)
        page.until(lambda want=want: kind(server, 18) == want)
        page.until(lambda want=want: page.text("#pin") == ("Unpin" if want == "p" else "Pin"))
    page.one("#pin").click()
    page.until(lambda: kind(server, 18) == "-")
    page.until(lambda: page.text("#pin") == "Pin")


def test_chunks_by_finger(page: Page, server: Running, document: NeedlePrompt) -> None:
    """A finger does not point: the first tap shows the text, the second one pins."""
    read(page, document)
    page.tap_chunk(18)
    page.until(lambda: shown(page, server, 18))
    assert kind(server, 18) == "-"
    page.tap_chunk(18)
    page.until(lambda: kind(server, 18) == "p")
    page.tap_chunk(18)
    page.until(lambda: kind(server, 18) == "-")


def test_what_cannot_be_pinned_is_said(driver: Chrome, document: NeedlePrompt) -> None:
    with Running(pins=((0, 128),)) as running:
        page = Page(driver, running.url)
        page.open()
        read(page, document)
        page.one("#grid").send_keys(Keys.HOME, Keys.ENTER)
        page.until(lambda: "--set pins" in page.text("#pool-alert"))


def colour(page: Page, chunk: int) -> list[int]:
    """Of a square, near its corner."""
    script = """
        const [grid, chunk] = arguments, { columns, cell, left } = grid.dataset;
        const x = +left + (chunk % columns) * cell + 4, y = Math.floor(chunk / columns) * cell + 4;
        const copy = new OffscreenCanvas(grid.width, grid.height).getContext("2d", { willReadFrequently: true });
        copy.drawImage(grid, 0, 0);
        return [...copy.getImageData(x, y, 1, 1).data];"""
    return list(page.driver.execute_script(script, page.one("#grid"), chunk))


def test_squares_look_as_their_chunks_are(page: Page, server: Running, document: NeedlePrompt) -> None:
    read(page, document)
    found = sequence(server, 2300)
    page.one("#grid").send_keys(Keys.HOME)
    out, kept = found["state"].rindex("0"), len(found["state"]) - 1
    hot = next(i for i, (s, k) in enumerate(zip(found["state"], found["kind"], strict=True)) if s == "2" and k == "-")

    def differ() -> bool:
        return colour(page, out)[3] == 0 < min(colour(page, hot)[3], colour(page, kept)[3])

    page.until(differ)
    assert colour(page, hot) != colour(page, kept)


def test_figures_say_what_it_costs(page: Page, document: NeedlePrompt) -> None:
    read(page, document)
    figures = dict(zip(page.texts("#figures dt"), page.texts("#figures dd"), strict=True))
    assert figures["KV on the device"].endswith("MiB")
    assert "chunks of 64 tokens" in figures["In the pool"]
    assert "left" in figures["Moved"]
    assert "to score" in figures["Last choice"]
    assert "--set meter" in figures["Agreement"]
    assert "2,048 tokens on the device, chosen by qk" in page.text("#summary")


@pytest.mark.parametrize("on_device", [False, True])
def test_layers_choose_for_themselves(
    driver: Chrome, document: NeedlePrompt, monkeypatch: pytest.MonkeyPatch, *, on_device: bool
) -> None:
    """The index is said to be where it is: of the host's memory, or as on a GPU, of the device's."""
    info = Guests.info
    monkeypatch.setattr(Guests, "info", lambda its: replace(info(its), device_bytes=on_device << 23))
    with Running(policy="fresh") as running:
        page = Page(driver, running.url)
        page.open()
        read(page, document)
        figures = dict(zip(page.texts("#figures dt"), page.texts("#figures dd"), strict=True))
        assert "Choices" in figures
        assert (", 8.0 MiB of it for the index; " in figures["KV on the device"]) == on_device
        assert (", index " in figures["Host records"]) != on_device
        assert "Last choice" not in figures, "there is none between two tokens"
        found = sequence(running, 2300)
        layers = found["layers"]
        some = next(chunk for chunk, n in enumerate(layers) if n and found["state"][chunk] == "0")
        grid = page.one("#grid")
        grid.send_keys(Keys.HOME, Keys.ARROW_RIGHT * some)
        text = f"in the pool for {layers[some]:g} of 6 layers"
        page.until(lambda: text in grid.get_attribute("aria-valuetext"))  # once the page has asked again


def test_a_full_cache_is_said_to_be_one(driver: Chrome) -> None:
    with Running(pool="off") as running:
        page = Page(driver, running.url)
        page.open()
        page.until(lambda: "There is no pool" in page.text("#summary"))
        assert not page.one("#grid").is_displayed()
        settle(page, max_tokens="2")
        page.say("Hello")
        assert page.text("#alert") == ""
        assert page.errors() == []


def test_nothing_is_asked_while_nobody_looks(page: Page) -> None:
    """A hidden page is still; it looks again as soon as it is seen."""
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
    looks = "return performance.getEntriesByName(location.origin + '/kvflash/pool').length"
    page.driver.execute_script(hide, True)
    page.driver.execute_script("performance.clearResourceTimings()")
    page.driver.execute_async_script("setTimeout(arguments[0], 2500)")
    assert page.driver.execute_script(looks) <= 1, "one that was under way"
    page.driver.execute_script(hide + "document.dispatchEvent(new Event('visibilitychange'))", False)
    page.until(lambda: page.driver.execute_script(looks) > 1)


#
# the key
#


def test_the_key_is_asked_for(driver: Chrome) -> None:
    with Running(key="secret") as running:
        page = Page(driver, running.url)
        page.open()
        dialog = page.one("#key-dialog")
        page.until(dialog.is_displayed)
        assert page.errors() == [], "nothing was asked without one"
        page.type("wrong", Keys.ENTER)
        page.until(lambda: "not the server's key" in page.text("#key-why"))
        page.until(lambda: any("401" in line for line in page.errors()))  # the browser's own word on it
        page.type(Keys.ESCAPE)
        page.until(lambda: page.text("#status") == "no API key")
        page.one("#key-button").click()
        page.type("secret", Keys.ENTER)
        page.until(lambda: page.text("#status") == "idle")
        assert not dialog.is_displayed()
        settle(page, max_tokens="2")
        page.say("Hello")
        assert len(page.texts(".turn")) == 2
        page.driver.refresh()
        page.until(lambda: page.text("#status") == "idle")
        assert not page.one("#key-dialog").is_displayed(), "the tab keeps it"
        assert page.driver.execute_script("return JSON.stringify(localStorage)").find("secret") < 0
        assert page.errors() == []


#
# windows
#


@pytest.mark.parametrize("size", [(844, 390), (320, 200)], ids=["a phone on its side", "four times as large"])
def test_all_of_it_can_be_reached_in_a_low_window(page: Page, size: tuple[int, int]) -> None:
    page.open(*size)
    page.one("#settings summary").click()
    for name in ("#max-tokens", "#send", "#ask", "#new"):
        field = page.one(name)
        page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
        x, y = page.driver.execute_script(
            "const r = arguments[0].getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]", field
        )
        assert 0 <= x <= size[0], name
        assert 0 <= y <= size[1], name


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_the_window(page: Page, document: NeedlePrompt, size: tuple[int, int]) -> None:
    page.open(*size)
    page.until(lambda: page.text("#status") == "idle")
    settle(page, max_tokens="4")
    page.say("x" * 300)
    for view in ("chat", "pool"):
        if size == PHONE:
            page.one(f"[data-shows={view}]").click()
            other = {"chat": "#pool", "pool": "#chat"}[view]
            assert not page.one(other).is_displayed()
        assert page.one(f"#{view}").is_displayed()
        overflow = "return [document.documentElement.scrollWidth - innerWidth, document.documentElement.scrollHeight - innerHeight]"
        assert max(page.driver.execute_script(overflow)) <= 0
        for box in page.driver.find_elements("css selector", "button, input, textarea, canvas"):
            if box.is_displayed() and box.size["width"] > 1:
                assert box.rect["x"] >= 0
                assert box.rect["x"] + box.rect["width"] <= size[0]
    if size == PHONE:
        page.one("[data-shows=chat]").click()
        for name in ("#send", "#add", "#new", "[data-shows=pool]"):
            assert page.one(name).size["height"] >= 40, "for a finger"


def test_everything_has_a_name(page: Page) -> None:
    """For who hears the page. Nothing on it came from elsewhere."""
    page.one("#settings summary").click()
    settle_names = page.driver.find_elements(
        "css selector", "button, input, textarea, canvas[tabindex], [role], dialog, section"
    )
    for element in settle_names:
        if element.is_displayed() and element.get_attribute("role") not in {"status", "alert"}:
            assert element.accessible_name, element.get_attribute("outerHTML")[:200]
    assert page.driver.execute_script("return document.documentElement.lang") == "en"
    names = page.driver.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    origin = page.driver.execute_script("return location.origin")
    assert names
    assert all(name.startswith((origin, "data:")) for name in names)
