"""Options and steps of a run that begins warm: from a snapshot, or from the prefix cache."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.memory import mib
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Manages, ReadsSnapshot, Replaces, manages
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import SnapshotError, UsageError, counted
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.snapshot.cache import PrefixCache

_WORTH = 1024  # newly read tokens that are worth a file in the cache
_LONG = 32 << 10  # characters of a prompt that may take long to read
_SLOW = 10.0  # seconds of reading that are worth a file which nobody asked for


def default_folder() -> Path:
    """Return the default folder of the prefix cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "kvflash" / "prefix"


SNAPSHOT = params.options(
    click.option("--save-snapshot", metavar="FILE", type=Replaces(updates="--restore"), default=None,
                 help="At the end, save the whole context to this file, which may be that of --restore."),
    click.option("--restore", metavar="FILE", type=ReadsSnapshot(), default=None,
                 help="Begin with this snapshot, and do not read its part of the prompt again. If it is damaged, or of"
                 " another model, cache or text, the reason is given and the whole prompt is read."),
    click.option("--append", is_flag=True,
                 help="With --restore: the prompt comes after the saved text, instead of beginning with it: as the next turn, if that"
                 " is a conversation."),
    click.option("--prefix-cache", "prefix_cache", metavar="DIR|off", type=Manages(), default=None,
                 envvar="KVFLASH_PREFIX_CACHE",
                 help="Folder that keeps what was read, 20 GiB at most (--set cache.size); a run begins with the longest"
                 " prefix of its prompt that is there. off: none.  [default: ~/.cache/kvflash/prefix, with a pool, for 32 KB or more that took 10 s to read]"),
    *params.gone("--prefix-cache-size"),
)  # fmt: skip


class Warm:
    """Restores and saves the context of a run."""

    def __init__(self, options: dict[str, Any], reporter: Reporter, cache_size: int) -> None:
        """Take the values of SNAPSHOT out of options. If any is given, a pool is kept. Raises UsageError.

        cache_size: most bytes of the prefix cache.
        """
        names = ("save_snapshot", "restore", "append", "prefix_cache")
        given = {name: options.pop(name) for name in names}
        self._target, self._source, self._append = given["save_snapshot"], given["restore"], given["append"]
        self._reporter = reporter
        self._n = 0  # positions restored
        if self._append and not self._source:
            msg = "--append says where the prompt goes after --restore FILE: give both, or neither"
            raise UsageError(msg)
        folder = given["prefix_cache"]
        self._cache = PrefixCache(folder, cache_size) if folder not in {None, "off"} else None
        self._unasked = folder is None and not self._source and not self._target and options.get("pool") != "off"
        self._cache_size = cache_size
        if self._cache or self._source or self._target:
            options["snapshots"] = True
        if self._target and not Path(self._target).absolute().parent.is_dir():
            msg = f"--save-snapshot {self._target}: there is no folder {Path(self._target).parent}"
            raise UsageError(msg)

    def expect(self, prompt: str) -> None:
        """Have a long prompt begin with what an earlier run has read of it, and be kept in turn, though nobody asked for it, where there is
        a pool. Raises UsageError.
        """
        self._unasked = self._unasked and len(prompt) >= _LONG
        if not self._unasked:
            return
        try:
            folder = default_folder()
        except RuntimeError:  # no home
            self._unasked = False
            return
        manages("--prefix-cache", folder)
        try:
            self._cache = PrefixCache(folder, self._cache_size)
        except UsageError as err:
            self._unasked = False
            self._reporter.warn(f"{err}; what is read is not kept (--prefix-cache DIR or off)")

    @property
    def appends(self) -> bool:
        """Whether the prompt comes after the saved text."""
        return bool(self._append)

    def begin(self, kv: KVFlash, prompt: Callable[[], Tokens]) -> tuple[Tokens, bool]:
        """Restore what there is of a prompt. Return the tokens to read, and whether they come after what is then in the
        context.

        prompt: returns the prompt; with --append it is called when the saved text is restored. Raises SnapshotError and UsageError.
        """
        if self._source and self._append:
            start = time.perf_counter()
            self._n = kv.restore(self._source)
            self._restored(start)
            return prompt(), True
        tokens, start = prompt(), time.perf_counter()
        if self._source:
            try:
                self._n = kv.restore(self._source, tokens)
            except SnapshotError as err:
                self._reporter.warn(f"{err}; the whole prompt is read")
        elif self._cache and kv.n_pool is not None:
            self._n = self._cache.restore(kv, tokens)
        if not self._n:
            return tokens, False
        self._restored(start)
        return tokens[self._n :], True

    def _restored(self, start: float) -> None:
        took = time.perf_counter() - start
        self._reporter.note(
            f"restored {counted(self._n, 'token')} in {took:.2f} s from {self._source or 'the prefix cache'}"
        )

    def end(self, kv: KVFlash, seconds: float) -> None:
        """Save what was asked for, and a text that took long to read. Raises SnapshotError if --save-snapshot fails; a failure of the
        prefix cache is a warning. seconds: that the prompt took.
        """
        if self._target and kv.n_tokens:
            start = time.perf_counter()
            with self._reporter.loading(self._target, "save") as bar:
                size = kv.save(self._target, on_record=lambda i, n: bar(i / n))
            took = time.perf_counter() - start
            self._reporter.note(f"saved {counted(kv.n_tokens, 'token')} to {self._target}: {mib(size)} in {took:.2f} s")
        if (
            self._cache
            and kv.n_pool is not None
            and kv.n_tokens - self._n >= _WORTH
            and not (self._unasked and seconds < _SLOW)
        ):
            try:
                kept = self._cache.save(kv)
            except SnapshotError as err:
                self._reporter.warn(f"the prefix cache was not added to: {err}")
                return
            if kept and self._unasked:
                self._reporter.note(
                    f"what was read is kept in {self._cache.folder}, and need not be read again (--prefix-cache off: never)"
                )
