"""A picture of the server's page in use: a long text is read, two questions are asked, some chunks are pinned.

python bench/page.py -m model.gguf --text moby-dick.txt                   writes docs/page.png
python bench/page.py -m model.gguf --text book.txt --dark --phone phone.png -o page.png
python bench/page.py -m model.gguf --text GPL-3 --start "TERMS AND" -q "List ..." -q "What ..."    other questions

Needs Chromium with its driver, and selenium and Pillow, from the extra `test`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.processes import server_process

QUESTIONS = (
    "What does the text say of the inn? Answer in some sentences.",
    "Why does the narrator go to sea? Answer in some sentences.",
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip


@contextmanager
def browsing(*, dark: bool) -> Iterator[Chrome]:
    """Run Chromium with nothing of the user's."""
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, f"--user-data-dir={folder}", *(["--force-dark-mode"] if dark else [])]
        for flag in flags:
            options.add_argument(flag)
        driver = Chrome(options, Service(executable_path="/usr/bin/chromedriver"))
        try:
            if dark:
                scheme = {"name": "prefers-color-scheme", "value": "dark"}
                driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def resize(driver: Chrome, width: int, height: int) -> None:
    """Give the window this size."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def until(condition: Callable[[], object], seconds: float = 600) -> None:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("it did not come to that")
        time.sleep(0.1)


def use(driver: Chrome, args: argparse.Namespace) -> None:
    """Ask both questions, and pin some chunks; the second answer is under way when this returns."""

    def of(name: str) -> list[str]:
        return [e.text for e in driver.find_elements(By.CSS_SELECTOR, name)]

    def sends() -> bool:
        return driver.find_element(By.ID, "send").is_enabled()

    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        text = Path(args.text).read_text("utf-8")
        file.write(text[text.find(args.start) :][: args.characters])
        file.flush()
        driver.find_element(By.ID, "file").send_keys(file.name)
        until(lambda: of("#files .file-name"))
    driver.execute_script("arguments[0].value = 200; arguments[0].dispatchEvent(new Event('change'))",
                          driver.find_element(By.ID, "max-tokens"))  # fmt: skip
    ask = driver.find_element(By.ID, "ask")
    ask.send_keys(args.questions[0], Keys.ENTER)
    until(lambda: not sends())
    until(lambda: sys.stderr.write(f"\r{of('#reading-text')[0]:60}") and sends(), 1800)
    grid = driver.find_element(By.ID, "grid")
    for keys in (Keys.END + 22 * Keys.ARROW_LEFT + Keys.ENTER, Keys.HOME + 9 * Keys.ARROW_RIGHT + Keys.ENTER):
        grid.send_keys(keys)
    until(lambda: "Unpin" in of("#pin")[0])
    ask.send_keys(args.questions[1], Keys.ENTER)
    until(lambda: not sends())
    until(lambda: (len(of(".turn .text")) == 4 and len(of(".turn .text")[3]) > 330) or sends())
    time.sleep(1.5)  # a look at the pool


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--text", required=True, help="file to ask about")
    parser.add_argument("-q", "--questions", action="append", help="two questions about it, each with its own -q")
    parser.add_argument("--start", default="Call me Ishmael", help="words at which the part to read begins")
    parser.add_argument("--characters", type=int, default=20000)
    parser.add_argument("--pool", type=int, default=2048)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--phone", help="file for a picture in the size of a phone")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("-o", "--out", default=str(Path(__file__).parent.parent / "docs" / "page.png"))
    args = parser.parse_args()
    args.questions = args.questions or QUESTIONS
    options = [
        "--prefix-cache",
        "off",
        "-c",
        str(args.context),
        "--kvflash",
        str(args.pool),
        "--set",
        "meter=0.1",
        "--temp",
        "0",
    ]
    with server_process(args.model, *options) as server, browsing(dark=args.dark) as driver:
        resize(driver, 1280, 800)
        driver.get(server.url)
        until(lambda: driver.find_element(By.ID, "status").text == "idle")
        try:
            use(driver, args)
        finally:
            driver.save_screenshot(args.out)
            Image.open(args.out).quantize(256).save(args.out, optimize=True)
        if args.phone:
            resize(driver, 375, 740)
            driver.save_screenshot(str(Path(args.phone).with_stem(Path(args.phone).stem + "-chat")))
            driver.find_element(By.CSS_SELECTOR, "[data-shows=pool]").click()
            time.sleep(1.5)
            driver.save_screenshot(args.phone)
        for line in driver.get_log("browser"):
            sys.stderr.write(f"{line['level']}: {line['message']}\n")


if __name__ == "__main__":
    main()
