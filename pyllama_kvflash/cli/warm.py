"""Options and steps of a run that begins warm: with a snapshot, or with what the prefix cache has."""

import os
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.report import Reporter, mib
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.snapshot.cache import PrefixCache

CACHE_SIZE = "20GiB"
_WORTH = 1024  # tokens that were read, for which a file is written to the cache


def default_folder() -> Path:
    """Where the prefix cache is, unless told otherwise."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "kvflash" / "prefix"


CACHE = params.options(
    click.option("--prefix-cache", "prefix_cache", metavar="DIR", default=None, envvar="KVFLASH_PREFIX_CACHE",
                 help="Keep what was read in a folder, and begin with the longest prefix of the prompt that it has."),
    click.option("--prefix-cache-size", "prefix_cache_size", metavar="SIZE", type=params.ByteSize(), default=CACHE_SIZE,
                 show_default=True, envvar="KVFLASH_PREFIX_CACHE_SIZE",
                 help="Bytes of that folder; what was used longest ago goes first."),
)  # fmt: skip

SNAPSHOT = params.options(
    click.option("--save-snapshot", metavar="FILE", default=None, help="At the end, write all that is in the context."),
    click.option("--restore", metavar="FILE", default=None,
                 help="Do not read again what of the prompt is in this snapshot; if it is of another model, cache or text,"
                 " or damaged, the reason is given and the whole prompt is read."),
    click.option("--append", is_flag=True,
                 help="With --restore: the prompt comes after what was saved, instead of beginning with it."),
    CACHE,
)  # fmt: skip


class Warm:
    """What a run restores and saves."""

    def __init__(self, options: dict[str, Any], reporter: Reporter) -> None:
        """options: the values of SNAPSHOT, taken out; a pool is kept if any is given. Raises UsageError."""
        names = ("save_snapshot", "restore", "append", "prefix_cache", "prefix_cache_size")
        given = {name: options.pop(name) for name in names}
        self._target, self._source, self._append = given["save_snapshot"], given["restore"], given["append"]
        self._reporter = reporter
        self._n = 0  # positions restored
        if self._append and not self._source:
            msg = "--append says where the prompt goes after --restore FILE: give both, or neither"
            raise UsageError(msg)
        folder = given["prefix_cache"]
        self._cache = PrefixCache(folder, given["prefix_cache_size"]) if folder is not None else None
        if self._cache or self._source or self._target:
            options["snapshots"] = True
        if self._target and not Path(self._target).absolute().parent.is_dir():
            msg = f"--save-snapshot {self._target}: there is no folder {Path(self._target).parent}"
            raise UsageError(msg)

    def begin(self, kv: KVFlash, text: str) -> tuple[Tokens, bool]:
        """The tokens that are to be read, and whether after what is in the context now. Raises SnapshotError and UsageError."""
        tokens = kv.tokenize(text, add_special=not self._append) if text else np.zeros(0, np.int32)
        start = time.perf_counter()
        if self._source:
            self._restore(kv, self._source, tokens)
        elif self._cache:
            self._n = self._cache.restore(kv, tokens)
        if not self._n:
            return tokens, False
        took = time.perf_counter() - start
        self._reporter.note(f"restored {self._n:,} tokens in {took:.2f} s from {self._source or 'the prefix cache'}")
        return (tokens if self._append else tokens[self._n :]), True

    def _restore(self, kv: KVFlash, source: str, tokens: Tokens) -> None:
        if self._append:
            self._n = kv.restore(source)
            return
        try:
            self._n = kv.restore(source, tokens)
        except SnapshotError as err:
            self._reporter.warn(f"{err}; the whole prompt is read")

    def end(self, kv: KVFlash) -> None:
        """Save what is to be saved. Raises SnapshotError for a file that was asked for."""
        if self._target and kv.n_tokens:
            start = time.perf_counter()
            with self._reporter.loading(self._target, "save") as bar:
                size = kv.save(self._target, on_record=lambda i, n: bar(i / n))
            took = time.perf_counter() - start
            self._reporter.note(f"saved {kv.n_tokens:,} tokens to {self._target}: {mib(size)} in {took:.2f} s")
        if self._cache and kv.n_tokens - self._n >= _WORTH:
            try:
                self._cache.save(kv)
            except SnapshotError as err:
                self._reporter.warn(f"the prefix cache was not added to: {err}")
