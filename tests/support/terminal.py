"""A command on a terminal: what is typed, and what is seen."""

import contextlib
import fcntl
import os
import pty
import re
import subprocess
import termios
import time

from support.commands import SCRIPT


class Terminal:
    """`kvflash` on a terminal. args: a command and its arguments; variables: of its environment."""

    def __init__(self, *args: str, **variables: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [SCRIPT, *args], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, **variables},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (Ctrl-C is for who owns the terminal)
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str, seconds: float = 30) -> None:
        """Read until this comes, and forget what was before."""
        os.set_blocking(self._master, False)
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self._master, 4096).decode("utf-8", "replace")
            except BlockingIOError:
                time.sleep(0.01)
        self.seen = self.seen[found.end() :]

    def press(self, key: str, pattern: str) -> None:
        """Type a key until this comes: Python shows its prompt, and misses a signal until it waits for a line."""
        for _ in range(30):
            self.type(key)
            with contextlib.suppress(AssertionError):
                self.until(pattern, 1)
                return
        self.until(pattern, 1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
