"""The roles of files in a command: option types that declare what the command does with a file, and a check before it runs."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from pyllama_kvflash.cli.flags import spelled
from pyllama_kvflash.errors import KVFlashError, OutputError, SnapshotError, UsageError
from pyllama_kvflash.files import Uses, is_stream, kind_of, model_parts, standard_stream
from pyllama_kvflash.registry import BY_MODEL
from pyllama_kvflash.scorers.reader import find_scorer_model
from pyllama_kvflash.snapshot.file import Outline

_KEY = "kvflash.uses"


GROUPS = {
    "Server": (
        *("host", "port", "api_prefix", "n_parallel", "n_queue", "api_key", "alias", "max_body", "keep_alive", "grace"),
        *("webui", "strict", "log_format", "prefix_cache_size", "cache_min"),
    ),
    "Model": ("model", "hf_repo", "hf_file", "offline", "template_file"),
    "Prompt": ("prompt", "questions", "prompt_files", "system", "conversation", "restore", "append"),
    "Pool": ("n_ctx", "pool", "coarse", "policy", "prefill", "mode", "settings"),
    "Answer": (
        *("n_predict", "stop", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"),
        *("grammar", "json_schema"),
    ),
    "Drafts": ("spec_kind", "spec_model", "spec_n_max"),
    "Devices": ("n_threads", "n_gpu_layers", "tensor_split", "n_cpu_moe", "rpc", "n_batch", "n_ubatch", "flash_attn"),
    "Memory and disk": ("type_k", "type_v", "host_limit", "disk", "save_snapshot", "prefix_cache"),
    "Output": ("output", "trace", "stats", "as_json", "quiet", "help"),
}
"""Headings of the options in --help, and the parameters below each."""
_EVERYWHERE = ("Model", "Devices", "Memory and disk", "Output")
"""Headings for all commands. The others are for commands with the options of a pool."""


class Role(click.ParamType[str]):
    """The type of every option that names a file or a folder. It declares what the command does with the file or folder."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        """Take the name as it is."""
        return str(value)

    def declare(self, uses: Uses, option: str, value: str) -> None:
        """Add what `value` names to the command's files and folders. Raises UsageError and OutputError."""


class Reads(Role):
    """A file that is read."""

    def declare(self, uses: Uses, option: str, value: str) -> None:
        """Add the file, with the other parts of a split GGUF."""
        uses.read(option, *model_parts(value))


class TextOrFile(Reads):
    """A text, or the name of a file with the text. is_text: returns whether a value is a text."""

    def __init__(self, is_text: Callable[[str], bool]) -> None:
        self._is_text = is_text

    def declare(self, uses: Uses, option: str, value: str) -> None:
        """Add the file, if the value names one."""
        if value and not self._is_text(value):
            super().declare(uses, option, value)


class ReadsSnapshot(Reads):
    """A snapshot that is read, and the other files that hold its records."""

    def declare(self, uses: Uses, option: str, value: str) -> None:
        """Add the snapshot and the other files."""
        super().declare(uses, option, value)
        with suppress(SnapshotError):  # reading it reports that
            uses.read(f"records of {option} {value}", *sorted(Outline.of(Path(value)).needs))


class Prints(Role):
    """A text that is written to a file, a pipe, a device, or stdout for "-"."""

    def declare(self, uses: Uses, option: str, value: str) -> None:
        """Add the file; a pipe, a device or stdout needs no check. Raises UsageError if the path is a folder, or its folder is missing."""
        if value != "-" and not is_stream(Path(value)) and standard_stream(Path(value)) is None:
            _check_place(option, Path(value))
            uses.write(option, value)


class Replaces(Role):
    """A file that is written as a whole, and replaces an old one. updates: an option whose input file it may replace."""

    def __init__(self, updates: str = "") -> None:
        self._updates = updates

    def declare(self, uses: Uses, option: str, value: str) -> None:
        """Add the file, after checking that it can be written."""
        _check_replaceable(option, value)
        uses.write(option, value, updates=self._updates)


class Manages(Role):
    """A folder in which files are created and removed; "off": none."""

    name = "folder"

    def declare(self, uses: Uses, option: str, value: str) -> None:
        """Add the folder."""
        if value != "off":
            uses.manage(option, Path(value).expanduser())


class Declared(Role):
    """A file that the command declares itself, by reads(), writes() or manages(), since it must find the file first."""


class Harmless(Role):
    """A name that needs no check. why: the reason."""

    def __init__(self, why: str) -> None:
        self.why = why


class Command(click.Command):
    """A command that does not run if it would write over a file that it needs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError, which names options as the command line does."""
        with self._spelled():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Compare all files that the options name with one another, then run. Raises UsageError."""
        with self._spelled():
            for param in self.params:
                value = ctx.params.get(param.name or "")
                if isinstance(param.type, Role) and value is not None:
                    name = "/".join(param.opts) if isinstance(param, click.Option) else param.human_readable_name
                    for file in value if isinstance(value, tuple) else (value,):
                        param.type.declare(_uses(ctx), name, file)
            return super().invoke(ctx)

    @contextmanager
    def _spelled(self) -> Iterator[None]:
        try:
            yield
        except KVFlashError as err:
            err.args = (spelled(str(err), self), *err.args[1:])
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups, each with a heading. Options without a group come first."""
        help_ = self.get_help_option(ctx)
        shown = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and isinstance(param, click.Option):
                shown["help" if help_ and param.name == help_.name else param.name] = record
        groups = {title: names for title, names in GROUPS.items() if title in _EVERYWHERE or "settings" in shown}
        grouped = {title: [shown[name] for name in names if name in shown] for title, names in groups.items()}
        known = {name for names in groups.values() for name in names}
        own = [record for name, record in shown.items() if name not in known]
        for title, records in {"Options": own, **grouped}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def reads(name: str, *paths: str | Path) -> None:
    """Declare files that the command in progress reads, though no option names them. Raises UsageError."""
    _uses(click.get_current_context()).read(name, *paths)


def writes(name: str, *paths: str | Path) -> None:
    """Declare files that the command in progress writes, whole or not at all. Raises UsageError."""
    _uses(click.get_current_context()).write(name, *paths)


def manages(name: str, folder: Path) -> None:
    """Declare a folder in which the command in progress creates and removes files. Raises UsageError."""
    _uses(click.get_current_context()).manage(name, folder)


def reads_scorer_model(policy: str, given: str | None, model: Path) -> None:
    """Declare the scorer model that a policy finds by itself. given: the scorer model that an option names, if any. Raises UsageError."""
    if policy not in BY_MODEL or given is not None:
        return
    try:
        found = find_scorer_model(None, model)
    except UsageError:  # opening the model reports it
        return
    reads("the scorer model", *model_parts(found))


def _uses(ctx: click.Context) -> Uses:
    uses: Uses = ctx.meta.setdefault(_KEY, Uses())
    return uses


def _check_place(option: str, path: Path) -> None:
    with suppress(OSError, ValueError):  # opening it reports that
        if path.is_dir():
            msg = f"{option} {path} is a directory: give the name of a file"
            raise UsageError(msg)
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            msg = f"{option} {path}: there is no folder {folder}"
            raise UsageError(msg)


def _check_replaceable(option: str, value: str) -> None:
    path = Path(value)
    if value == "-":
        msg = f"{option} is -, and only a text can go to stdout: give the name of a file"
        raise UsageError(msg)
    if (fd := standard_stream(path)) is not None:
        msg = f"{option} {value} is where {'stdout' if fd == 1 else 'stderr'} goes: give another file"
        raise UsageError(msg)
    with suppress(OSError, ValueError):  # writing reports that
        if path.exists() and not path.is_file():
            msg = f"{option} {value} is {kind_of(path.stat().st_mode)}: give the name of a file"
            raise UsageError(msg)
        folder = Path(os.path.realpath(path)).parent
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            msg = f"{option} {value} cannot be written: {os.strerror(errno.EACCES)} in {folder}"
            raise OutputError(msg)
