"""Keeps texts in the prefix cache once they are read, so that another command need not read them again."""

import os
from pathlib import Path

import click

from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Manages, manages
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.native import Tokens, gpus
from pyllama_kvflash.policy.sizing import HOST_CAP
from pyllama_kvflash.snapshot.cache import PrefixCache
from pyllama_kvflash.text import n_common

_WORTH = 1024  # fewest newly read tokens for which a file is written
_LONG = 8 << 10  # characters of a text that may take long to read
_SLOW = 10.0  # fewest seconds of reading for which a file is written without --prefix-cache

PREFIX_CACHE = params.options(
    click.option("--prefix-cache", "prefix_cache", metavar="DIR|off", type=Manages(), default=None,
                 envvar="KVFLASH_PREFIX_CACHE",
                 help="Folder that keeps texts that were read, 20 GiB at most (KVFLASH_PREFIX_CACHE_SIZE=SIZE). A prompt that begins like"
                 " one of them does not read that beginning again. off: no folder.  [default: ~/.cache/kvflash/prefix, for texts of"
                 " 8 KB or more that took 10 s to read; without a GPU, --kvflash auto then takes a pool]"),
)  # fmt: skip


def default_folder() -> Path:
    """Return the default folder of the prefix cache. Raises RuntimeError if there is no home."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "kvflash" / "prefix"


class Kept:
    """The prefix cache of a command. If no folder was given, the default folder keeps long texts that took long to read."""

    def __init__(self, folder: str | None, limit: int, reporter: Reporter) -> None:
        """folder: the option's value; None: not given, so expect() decides. limit: most bytes of all files. Raises UsageError."""
        self.asked = folder is not None and folder != "off"
        self._may = folder is None
        self._limit, self._reporter = limit, reporter
        self._cache = PrefixCache(folder, limit) if folder and self.asked else None
        self._n_known = 0  # positions that are in a file
        self._unsaved = 0.0  # seconds that it took to read the other positions
        self._news = ""

    def expect(self, n_characters: int, n_ctx: int) -> bool:
        """Prepare for a text of n_characters. Returns whether to set `Options.snapshots`, so that the engine can save the text.

        Without a GPU, a long text is worth a pool unless an automatic pool would cover the context: a pool can be saved, and
        decodes faster (docs/results/cpu.md). n_ctx: the option's value. Raises UsageError.
        """
        if not self._may or n_characters < _LONG:
            return self.asked
        try:
            folder = default_folder()
        except RuntimeError:  # no home
            return False
        manages("--prefix-cache", folder)
        try:
            self._cache = PrefixCache(folder, self._limit)
        except UsageError as err:
            self._reporter.detail(f"{err}; the text is not kept (--prefix-cache DIR or off)")
            return False
        return not gpus() and not 0 < n_ctx <= HOST_CAP

    def restore(self, kv: KVFlash, tokens: Tokens) -> int:
        """Restore the longest cached beginning of a text if the context has a shorter one. tokens: (n,) int32.

        Returns the number of positions restored, which may be 0.
        """
        if self._cache is None or kv.n_pool is None or self._cache.match(kv, tokens) <= n_common(kv.tokens, tokens):
            return 0
        self._n_known = self._cache.restore(kv, tokens)
        return self._n_known

    def took(self, seconds: float) -> None:
        """Count the seconds that were spent reading a text, or a part of it."""
        self._unsaved += seconds

    def save(self, kv: KVFlash) -> None:
        """Save the context if it is worth a file. A failure is only a warning."""
        worth = kv.n_tokens - self._n_known >= _WORTH and (self.asked or self._unsaved >= _SLOW)
        if self._cache is None or kv.n_pool is None or not worth:
            return
        try:
            kept = self._cache.save(kv)
        except SnapshotError as err:
            self._reporter.warn(f"the text was not added to the prefix cache: {err}")
            return
        self._n_known, self._unsaved = kv.n_tokens, 0.0
        if kept and not self.asked:
            self._news = (
                f"the text is kept in {self._cache.folder}, and need not be read again (--prefix-cache off keeps none)"
            )

    def say(self) -> None:
        """Tell the user once that a text was kept without --prefix-cache. save() says nothing, since it may run while a person types."""
        if self._news:
            self._reporter.note(self._news)
        self._news = ""
