"""`kvflash cache`: list, check and empty the prefix cache."""

import time
from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyllama_kvflash.cli import kinds
from pyllama_kvflash.cli.kept import default_folder
from pyllama_kvflash.cli.memory import mib
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Manages
from pyllama_kvflash.errors import SnapshotError, UsageError, counted
from pyllama_kvflash.serve.protocols import responses_store
from pyllama_kvflash.snapshot.cache import Entry, PrefixCache
from pyllama_kvflash.snapshot.file import Outline, SnapshotFile, UnreadableError
from pyllama_kvflash.snapshot.names import read_name
from pyllama_kvflash.text import printable

_ALL = 1 << 62

HELP = """Manage the prefix cache: snapshots of prompts that `run --prefix-cache` and `serve` start from.

\b
  kvflash cache ls
  kvflash cache verify --remove
  kvflash cache rm --to 5GiB
  kvflash cache rm --all
"""

FOLDER = click.option(
    "--prefix-cache",
    "folder",
    metavar="DIR",
    type=Manages(),
    default=None,
    envvar="KVFLASH_PREFIX_CACHE",
    help="Folder of the cache.  [default: ~/.cache/kvflash/prefix]",
)


@click.group("cache", help=HELP, short_help="List, check or empty the prefix cache.")
def cache() -> None:
    """The command `kvflash cache`."""


def _cache(folder: str | None) -> PrefixCache:
    path = Path(folder) if folder is not None else default_folder()
    with suppress(PermissionError):  # PrefixCache says that
        if not path.is_dir():
            msg = f"{path} is not a folder: there is no prefix cache; give it with --prefix-cache"
            raise UsageError(msg)
    return PrefixCache(path, _ALL)


def _warned(found: PrefixCache, reporter: Reporter) -> bool:
    """Warn about sub-folders that cannot be read. Returns whether there are any."""
    unreadable = found.unreadable()
    for sentence in unreadable:
        reporter.warn(sentence)
    return bool(unreadable)


@cache.command("ls", cls=Command, short_help="List the snapshots, the last used first.")
@FOLDER
def ls(folder: str | None) -> int:
    """List the snapshots in the cache, the last used first. A snapshot with a date in the future counts as the oldest. Sizes do
    not include records in other files. A model without a known name is shown by its fingerprint. The exit code is 1 if a folder of
    the cache cannot be read.
    """
    found = _cache(folder)
    table = Table("name", "tokens", "size", "used", "model", box=None, pad_edge=False)
    for entry in found.entries():
        table.add_row(*_row(entry))
    total = sum(entry.size for entry in found.entries())
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{counted(len(found.entries()), 'file')}, {mib(total)} in {printable(found.folder)}", markup=False)
    return 1 if _warned(found, Reporter()) else 0


def _row(entry: Entry) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)) if entry.used else "date ahead"
    try:
        file = Outline.of(entry.path)
    except UnreadableError as err:
        return entry.path.stem[:16], "", mib(entry.size), used, escape(f"cannot be read: {printable(err.reason)}")
    except SnapshotError:
        return entry.path.stem[:16], "damaged", mib(entry.size), used, ""
    model = read_name(entry.path.parent) or f"{file.identity.fields['fingerprint']:016x}"
    return entry.path.stem[:16], f"{len(file.tokens):,}", mib(entry.size), used, escape(model)


@cache.command("verify", cls=Command, short_help="Read every byte, and report what is damaged.")
@FOLDER
@click.option("--remove", is_flag=True, help="Remove damaged snapshots. Those that cannot be read stay.")
def verify(folder: str | None, *, remove: bool) -> int:
    """Check every snapshot against its digests and checksums. The exit code is 1 if a snapshot is damaged, or cannot be read."""
    found, damaged, unread, removed = _cache(folder), 0, 0, list[Path]()
    reporter = Reporter()
    for entry in found.entries():
        if entry.path in removed:
            continue
        try:
            for _ in SnapshotFile(entry.path).verify():
                pass
        except UnreadableError as err:
            unread += 1
            reporter.warn(str(err))
        except SnapshotError as err:
            damaged += 1
            reporter.warn(str(err))
            if remove:
                removed += found.remove(entry.path)
    failed = _warned(found, reporter)
    n = len(found.entries())
    kept = f", {unread} cannot be read" if unread else ""
    gone = f"; {len(removed)} removed, with those that need their records" if removed else ""
    reporter.note(f"{counted(n, 'file')} in {found.folder}, {damaged or 'none'} damaged{kept}{gone}")
    return 1 if damaged or unread or failed else 0


@cache.command("rm", cls=Command, short_help="Remove snapshots.")
@FOLDER
@click.argument("names", nargs=-1)
@click.option(
    "--to",
    "limit",
    metavar="SIZE",
    type=kinds.ByteSize(),
    help="Remove the least recently used snapshots, down to this size.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Remove all snapshots, and the responses that serve has stored. The empty folder stays.",
)
def rm(folder: str | None, names: tuple[str, ...], limit: int | None, *, everything: bool) -> int:
    """Remove snapshots: those with the names that `kvflash cache ls` shows, the least recently used ones, or all. A snapshot
    that continues a removed one, and needs its records, is removed, too.
    """
    if bool(names) + (limit is not None) + everything != 1:
        msg = "say what to remove, in one way: names, --to SIZE, or --all"
        raise UsageError(msg)
    found = _cache(folder)
    if names:
        removed = [path for named in [_named(found, name) for name in names] for path in found.remove(named)]
    else:
        removed = found.empty() if everything else found.evict(limit)
    n = len(removed) + (responses_store.evict(found.folder / responses_store.FOLDER, 0) if everything else 0)
    reporter = Reporter()
    reporter.note(f"{counted(n, 'file')} removed from {found.folder}")
    return 1 if _warned(found, reporter) else 0


def _named(found: PrefixCache, name: str) -> Path:
    paths = [entry.path for entry in found.entries() if name and entry.path.stem.startswith(name)]
    if len(paths) != 1:
        msg = f"{len(paths) or 'no'} snapshots are named {name}: give a name of `kvflash cache ls`"
        raise UsageError(msg)
    return paths[0]
