"""What was read, kept in the prefix cache, so that another command need not read it again."""

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

_WORTH = 1024  # newly read tokens that are worth a file
_LONG = 8 << 10  # characters of a text that may take long to read
_SLOW = 10.0  # seconds of reading that are worth a file which nobody asked for

PREFIX_CACHE = params.options(
    click.option("--prefix-cache", "prefix_cache", metavar="DIR|off", type=Manages(), default=None,
                 envvar="KVFLASH_PREFIX_CACHE",
                 help="Folder that keeps what was read, 20 GiB at most (KVFLASH_PREFIX_CACHE_SIZE=SIZE); what begins as a text that is there"
                 " is not read again. off: none.  [default: ~/.cache/kvflash/prefix, for 8 KB or more that took 10 s to"
                 " read; without a GPU --kvflash auto takes a pool then]"),
)  # fmt: skip


def default_folder() -> Path:
    """Return the default folder of the prefix cache. Raises RuntimeError if there is no home."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "kvflash" / "prefix"


class Kept:
    """The prefix cache of a command: of the folder that was asked for, or the default one for long texts that took long to read."""

    def __init__(self, folder: str | None, limit: int, reporter: Reporter) -> None:
        """folder: as it was given; None: it was not, so that expect() decides. limit: bytes of all files. Raises UsageError."""
        self.asked = folder is not None and folder != "off"
        self._may = folder is None
        self._limit, self._reporter = limit, reporter
        self._cache = PrefixCache(folder, limit) if folder and self.asked else None
        self._n_known = 0  # positions that are in a file
        self._unsaved = 0.0  # seconds that all others took
        self._news = ""

    def expect(self, n_characters: int, n_ctx: int) -> bool:
        """Prepare for a text of so many characters. Returns whether the engine should be able to save it: `Options.snapshots`.

        Without a GPU a long text is worth a pool for that, which decodes faster, too (docs/results/cpu.md), but in a context that the automatic
        pool would cover. n_ctx: as it was given. Raises UsageError.
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
            self._reporter.detail(f"{err}; what is read is not kept (--prefix-cache DIR or off)")
            return False
        return not gpus() and not 0 < n_ctx <= HOST_CAP

    def restore(self, kv: KVFlash, tokens: Tokens) -> int:
        """Put the longest known beginning of a text (n,) int32 into the context, if it is longer than what is there. Returns its positions."""
        if self._cache is None or kv.n_pool is None or self._cache.match(kv, tokens) <= n_common(kv.tokens, tokens):
            return 0
        self._n_known = self._cache.restore(kv, tokens)
        return self._n_known

    def took(self, seconds: float) -> None:
        """Count the time that was needed to read what is in the context now."""
        self._unsaved += seconds

    def save(self, kv: KVFlash) -> None:
        """Save the context, if it is worth a file. A failure is a warning."""
        worth = kv.n_tokens - self._n_known >= _WORTH and (self.asked or self._unsaved >= _SLOW)
        if self._cache is None or kv.n_pool is None or not worth:
            return
        try:
            kept = self._cache.save(kv)
        except SnapshotError as err:
            self._reporter.warn(f"the prefix cache was not added to: {err}")
            return
        self._n_known, self._unsaved = kv.n_tokens, 0.0
        if kept and not self.asked:
            self._news = (
                f"what was read is kept in {self._cache.folder}, and need not be read again (--prefix-cache off: never)"
            )

    def say(self) -> None:
        """Say once that a text was kept unasked. save() does not say so: it may be called while a person types."""
        if self._news:
            self._reporter.note(self._news)
        self._news = ""
