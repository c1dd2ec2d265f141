"""A real Chromium without a window, and a server's page in it."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# What a server may send: parts of a stream that end anywhere. What was asked is in window.asked.
STREAM = """
const bytes = new TextEncoder().encode(arguments[0]);
const real = window.real ??= window.fetch;
window.asked = [];
window.fetch = (path, options) => {
  if (path !== "v1/chat/completions") return real(path, options);
  window.asked.push(JSON.parse(options.body));
  return Promise.resolve(new Response(new ReadableStream({
    start(controller) {
      for (let i = 0; i < bytes.length; i += 7) controller.enqueue(bytes.slice(i, i + 7));
      controller.close();
    },
  }), { status: 200 }));
};
"""


def missing() -> str:
    """Why there is no browser to drive; "" if there is one."""
    return ", ".join(f"{name} is not installed" for name in ("chromium", "chromedriver") if shutil.which(name) is None)


@contextmanager
def chromium(folder: Path) -> Iterator[Chrome]:
    """A browser with nothing of the user's. folder: an empty one, for its profile."""
    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(executable_path=str(shutil.which("chromedriver"))))
    try:
        yield driver
    finally:
        driver.quit()


def stream(*deltas: dict[str, Any], reason: str | None = "stop", end: str = "data: [DONE]\n\n", n: int = 5) -> str:
    """What a server sends as one answer. reason: why it ended; None: it did not."""
    usage = {
        "prompt_tokens": 1234,
        "completion_tokens": n,
        "total_tokens": 1234 + n,
        "prompt_tokens_details": {"cached_tokens": 1000},
    }
    events: list[Any] = [{"choices": [{"delta": delta}]} for delta in deltas]
    if reason is not None:
        events += [{"choices": [{"delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events) + end


class Page:
    """The page of a server, as someone uses it."""

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, width: int = 1280, height: int = 800) -> None:
        """Go there afresh, in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": self.url, "storageTypes": "all"})
        self.driver.get(self.url)
        self.driver.execute_script("sessionStorage.clear()")  # which belongs to the tab
        self.driver.get(self.url)
        self.driver.get_log("browser")

    def one(self, name: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, name)

    def texts(self, name: str) -> list[str]:
        """What several elements show, all at one moment."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText.trim())"
        return list(self.driver.execute_script(script, name))

    def text(self, name: str) -> str:
        """What an element holds, seen or not."""
        return str(self.driver.execute_script("return document.querySelector(arguments[0]).textContent", name))

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"it did not come to that: {self.driver.get_log('browser')}"
            time.sleep(0.02)

    def type(self, *keys: str) -> None:
        """Type where the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def say(self, text: str) -> None:
        """Send a message by keyboard, and wait for the answer's end."""
        n = len(self.texts(".turn"))
        self.until(self.one("#ask").is_displayed)
        # as an input method does it: some ChromeDrivers refuse to type what is beyond the BMP
        self.driver.execute_script("document.querySelector('#ask').focus()")
        self.driver.execute_cdp_cmd("Input.insertText", {"text": text})
        self.one("#ask").send_keys(Keys.ENTER)
        self.until(lambda: len(self.texts(".turn")) == n + 2 or self.text("#alert"))
        self.until(lambda: self.one("#send").is_enabled())

    def answers(self, stream: str) -> None:
        """Let this be what the server sends to each question from now on."""
        self.driver.execute_script(STREAM, stream)

    def said(self, text: str, question: str = "Hello", **more: Any) -> None:
        """Ask something that is answered with this text. more: of a stream."""
        self.answers(stream({"content": text}, **more))
        self.say(question)

    def asked(self) -> list[dict[str, Any]]:
        """The bodies of what was asked since the answer was given."""
        return list(self.driver.execute_script("return window.asked"))

    def act(self, name: str) -> None:
        """Press a button of the last message that has it."""
        self.driver.find_elements("xpath", f"//article//button[text()='{name}']")[-1].click()

    def renew(self) -> None:
        """Begin a new conversation."""
        self.one("#new").click()
        self.until(lambda: not self.texts(".turn"))

    def settle(self, **values: str) -> None:
        """Type settings, by the names of their fields."""
        self.one("#settings-open").click()
        for name, value in values.items():
            field = self.one(f"#{name.replace('_', '-')}")
            field.clear()
            field.send_keys(value)
        self.one("#settings .main").click()
        self.until(lambda: not self.one("#settings").is_displayed())

    def answered(self) -> None:
        """Wait for the end of an answer."""
        self.until(lambda: self.one("#send").is_enabled())

    def kept(self) -> list[dict[str, Any]]:
        """The conversations in the browser's database, the oldest first."""
        script = """
            const done = arguments[0], request = indexedDB.open("kvflash", 1);
            request.onsuccess = () => {
              const all = request.result.transaction("conversations").objectStore("conversations").index("listed").getAll();
              all.onsuccess = () => { request.result.close(); done(all.result); };
            };"""
        return list(self.driver.execute_async_script(script))

    def errors(self) -> list[str]:
        """What the console says since it was last asked."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] in {"SEVERE", "WARNING"}]

    def click_chunk(self, chunk: int) -> None:
        """Click on the square of a chunk."""
        self._at(chunk).click().perform()

    def point_at_chunk(self, chunk: int) -> None:
        """Move the pointer to the square of a chunk."""
        self._at(chunk).perform()

    def _at(self, chunk: int) -> ActionChains:
        grid = self.one("#grid")
        return ActionChains(self.driver).move_to_element_with_offset(grid, *self._offset(grid, chunk))

    def _offset(self, grid: Any, chunk: int) -> tuple[int, int]:
        """Where a square is, from the middle of them all, as selenium counts."""
        columns, cell, left = (int(grid.get_attribute(f"data-{name}")) for name in ("columns", "cell", "left"))
        x, y = left + (chunk % columns) * cell + cell // 2, chunk // columns * cell + cell // 2
        size = grid.size
        return x - size["width"] // 2, y - size["height"] // 2


def needs_browser() -> pytest.MarkDecorator:
    """Skips a test where there is no browser."""
    return pytest.mark.skipif(bool(missing()), reason=f"no browser to drive: {missing()}")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def page(driver: Chrome, server: Any) -> Iterator[Page]:
    """The page of a module's server, opened for the first time. Nothing is wrong in its console when a test ends."""
    found = Page(driver, server.url)
    found.open()
    found.until(lambda: found.text("#status") == "idle")
    yield found
    assert found.errors() == []
