"""The page in a real browser, beside its chat: the pool by keyboard and pointer, the key, windows of any size."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("selenium")

from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys
from support import browser, serving
from support.browser import Page, needs_browser
from support.changes import SERVE
from support.serving import N_CODE, Running

from pyllama_kvflash.native.guests import Guests
from pyllama_kvflash.needle import NeedlePrompt

pytestmark = [pytest.mark.native, needs_browser(), pytest.mark.nightly(SERVE)]

environment = serving.environment
driver, page = browser.driver, browser.page
document = serving.document
DESKTOP, PHONE = (1280, 800), (375, 740)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Its chunks are in the pool for all layers, or out."""
    with Running(policy="qk") as running:
        yield running


def paste(page: Page, text: str) -> None:
    """Put a long text into the message."""
    page.driver.execute_script("arguments[0].value = arguments[1]", page.one("#ask"), text)


def sequence(running: Running, n_least: int = 1) -> dict[str, Any]:
    """What is said of the sequence with so many tokens."""
    found = running.http.get("/kvflash/pool").json()["sequences"]
    return dict(next(s for s in found if s["n_tokens"] >= n_least))


def read(page: Page, document: NeedlePrompt) -> None:
    """A conversation about a document that the pool does not hold, which the page then shows."""
    page.settle(temperature="0", max_tokens=str(N_CODE))
    paste(page, document.text)
    page.say(document.needles[1].question)
    page.until(lambda: int(page.one("#grid").get_attribute("aria-valuemax")) >= len(document.text) // 400)


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


@pytest.mark.parametrize("on_device", [False, True])
def test_layers_choose_for_themselves(
    driver: Chrome, document: NeedlePrompt, monkeypatch: pytest.MonkeyPatch, *, on_device: bool
) -> None:
    """Codes are of the device's memory; a GPU takes that of the whole context at once."""
    info = Guests.info
    monkeypatch.setattr(
        Guests,
        "info",
        lambda its: replace(info(its), device_bytes=on_device << 23, bytes=0 if on_device else info(its).bytes),
    )
    with Running(policy="fresh") as running:
        page = Page(driver, running.url)
        page.open()
        read(page, document)
        figures = dict(zip(page.texts("#figures dt"), page.texts("#figures dd"), strict=True))
        assert "Choices" in figures
        assert " MiB of it codes of everything; " in figures["KV on the device"]
        assert (", 8.0 MiB of it codes" in figures["KV on the device"]) == on_device
        assert "Last choice" not in figures, "there is none between two tokens"
        found = sequence(running, 2300)
        layers = found["layers"]
        some = next(chunk for chunk, n in enumerate(layers) if n and found["state"][chunk] == "0")
        grid = page.one("#grid")
        grid.send_keys(Keys.HOME, Keys.ARROW_RIGHT * some)
        text = f"in the pool for {layers[some]:g} of 6 layers"
        page.until(lambda: text in grid.get_attribute("aria-valuetext"))  # once the page has asked again


#
# the key
#


def test_the_key_is_asked_for(driver: Chrome) -> None:
    with Running(api_key="secret") as running:
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
        page.settle(max_tokens="2")
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


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_the_window(page: Page, document: NeedlePrompt, size: tuple[int, int]) -> None:
    page.open(*size)
    page.until(lambda: page.text("#status") == "idle")
    page.settle(max_tokens="4")
    page.say("x" * 300)
    page.until(lambda: "of 4,096 tokens" in page.text("#gauge-text"))
    for view in ("chat", "pool"):
        if size == PHONE:
            page.one(f"[data-shows={view}]").click()
            other = {"chat": "#pool", "pool": "#chat"}[view]
            assert not page.one(other).is_displayed()
        assert page.one(f"#{view}").is_displayed()
        overflow = "return [document.documentElement.scrollWidth - innerWidth, document.documentElement.scrollHeight - innerHeight]"
        assert max(page.driver.execute_script(overflow)) <= 0
        for box in page.driver.find_elements("css selector", "button, input, textarea, canvas, meter"):
            if box.is_displayed() and box.size["width"] > 1:
                assert box.rect["x"] >= 0
                assert box.rect["x"] + box.rect["width"] <= size[0]
    if size == PHONE:
        page.one("[data-shows=chat]").click()
        for name in ("#send", "#add", "#new", "#list-open", "#settings-open", "[data-shows=pool]"):
            assert page.one(name).size["height"] >= 40, "for a finger"


def test_everything_has_a_name(page: Page) -> None:
    """For who hears the page. Nothing on it came from elsewhere."""
    page.settle(max_tokens="2")
    page.say("Hello")
    named = (
        "button, input, select, textarea, meter, canvas[tabindex], [tabindex], [role], dialog, section, nav, article"
    )
    for opener, inside in (("", "body"), ("#settings-open", "#settings"), ("#model", "#model-dialog")):
        if opener:
            page.one(opener).click()  # what is behind a dialog has no name meanwhile
        for element in page.one(inside).find_elements("css selector", named):
            if element.is_displayed() and element.get_attribute("role") not in {"status", "alert"}:
                assert element.accessible_name, element.get_attribute("outerHTML")[:200]
        page.type(Keys.ESCAPE)
    assert page.driver.execute_script("return document.documentElement.lang") == "en"
    names = page.driver.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    origin = page.driver.execute_script("return location.origin")
    assert names
    assert all(name.startswith((origin, "data:")) for name in names)
