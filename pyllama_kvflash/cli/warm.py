"""Options and steps of a run that begins warm: from a snapshot, or from the prefix cache."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.kept import PREFIX_CACHE, Kept
from pyllama_kvflash.cli.memory import mib
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import ReadsSnapshot, Replaces
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import SnapshotError, UsageError, counted
from pyllama_kvflash.native import Tokens

SNAPSHOT = params.options(
    click.option("--save-snapshot", metavar="FILE", type=Replaces(updates="--restore"), default=None,
                 help="At the end, save the whole context to this file, which may be that of --restore."),
    click.option("--restore", metavar="FILE", type=ReadsSnapshot(), default=None,
                 help="Begin with this snapshot, and do not read its part of the prompt again. If it is damaged, or of"
                 " another model, cache or text, the reason is given and the whole prompt is read."),
    click.option("--append", is_flag=True,
                 help="With --restore: the prompt comes after the saved text, instead of beginning with it. If the saved text is a"
                 " conversation, the prompt is its next turn."),
    PREFIX_CACHE,
)  # fmt: skip


class Warm:
    """Restores and saves the context of a run."""

    def __init__(self, options: dict[str, Any], reporter: Reporter, cache_size: int) -> None:
        """Take the values of SNAPSHOT out of options, and set `snapshots` there if one of these values needs it. Raises UsageError.

        cache_size: most bytes of the prefix cache.
        """
        names = ("save_snapshot", "restore", "append", "prefix_cache")
        given = {name: options.pop(name) for name in names}
        self._target, self._source, self._append = given["save_snapshot"], given["restore"], given["append"]
        self._options, self._reporter = options, reporter
        if self._append and not self._source:
            msg = "--append needs the text of --restore FILE: give both, or neither"
            raise UsageError(msg)
        files = self._source or self._target
        self._kept = Kept("off" if files and not given["prefix_cache"] else given["prefix_cache"], cache_size, reporter)
        if self._kept.asked or files:
            options["snapshots"] = True
        if self._target and not Path(self._target).absolute().parent.is_dir():
            msg = f"--save-snapshot {self._target}: there is no folder {Path(self._target).parent}"
            raise UsageError(msg)

    def expect(self, prompt: str) -> None:
        """Let a long prompt use the default prefix cache, unless the full cache was asked for. Raises UsageError."""
        if self._options.get("pool") != "off" and self._kept.expect(len(prompt), self._options["n_ctx"]):
            self._options["snapshots"] = True

    @property
    def appends(self) -> bool:
        """Whether the prompt comes after the saved text."""
        return bool(self._append)

    def begin(self, kv: KVFlash, prompt: Callable[[], Tokens]) -> tuple[Tokens, bool]:
        """Restore the saved beginning of a prompt. Returns the tokens to read, and whether to append them to the context.

        prompt: returns the prompt; with --append, it is called after the saved text is restored. Raises SnapshotError and
        UsageError.
        """
        if self._source and self._append:
            start = time.perf_counter()
            self._restored(kv.restore(self._source), start)
            return prompt(), True
        tokens, start, n = prompt(), time.perf_counter(), 0
        if self._source:
            try:
                n = kv.restore(self._source, tokens)
            except SnapshotError as err:
                self._reporter.warn(f"{err}; the whole prompt is read")
        else:
            n = self._kept.restore(kv, tokens)
        if n:
            self._restored(n, start)
        return tokens[n:], n > 0

    def _restored(self, n: int, start: float) -> None:
        took = time.perf_counter() - start
        self._reporter.note(f"restored {counted(n, 'token')} in {took:.2f} s from {self._source or 'the prefix cache'}")

    def end(self, kv: KVFlash, seconds: float) -> None:
        """Save the snapshot that was asked for, and keep a text that took long to read. seconds: the time that reading it took.

        Raises SnapshotError if --save-snapshot fails; a failure of the prefix cache is a warning.
        """
        if self._target and kv.n_tokens:
            start = time.perf_counter()
            with self._reporter.loading(self._target, "save") as bar:
                size = kv.save(self._target, on_record=lambda i, n: bar(i / n))
            took = time.perf_counter() - start
            self._reporter.note(f"saved {counted(kv.n_tokens, 'token')} to {self._target}: {mib(size)} in {took:.2f} s")
        self._kept.took(seconds)
        self._kept.save(kv)
        self._kept.say()
