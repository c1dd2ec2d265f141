"""A real Chromium without a window, and a server's page in it."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.interaction import POINTER_TOUCH
from selenium.webdriver.common.actions.pointer_input import PointerInput
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


class Page:
    """The page of a server, as someone uses it."""

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver, self._url = driver, url

    def open(self, width: int = 1280, height: int = 800) -> None:
        """Go there afresh, in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": self._url, "storageTypes": "all"})
        self.driver.get(self._url)
        self.driver.execute_script("sessionStorage.clear()")  # which belongs to the tab
        self.driver.get(self._url)
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

    def renew(self) -> None:
        """Begin a new conversation; the page asks first if there is one."""
        there = bool(self.texts(".turn"))
        self.one("#new").click()
        if there:
            self.driver.switch_to.alert.accept()

    def errors(self) -> list[str]:
        """What the console says since it was last asked."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] in {"SEVERE", "WARNING"}]

    def click_chunk(self, chunk: int) -> None:
        """Click on the square of a chunk."""
        self._at(chunk).click().perform()

    def point_at_chunk(self, chunk: int) -> None:
        """Move the pointer to the square of a chunk."""
        self._at(chunk).perform()

    def tap_chunk(self, chunk: int) -> None:
        """Touch the square of a chunk with a finger."""
        touch = ActionBuilder(self.driver, mouse=PointerInput(POINTER_TOUCH, "finger"))
        grid = self.one("#grid")
        touch.pointer_action.move_to(grid, *self._offset(grid, chunk)).pointer_down().pointer_up()
        touch.perform()

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
