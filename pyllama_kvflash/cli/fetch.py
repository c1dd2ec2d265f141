"""Find the model that a command line names, and its file: on this machine, or on the Hugging Face Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from click.core import ParameterSource
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pyllama_kvflash.cli.memory import mib
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import reads
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.files import model_parts
from pyllama_kvflash.hub import Wanted, fetch, outline
from pyllama_kvflash.needle import BUNDLED_MODEL


def named_model(argument: str | None, option: str | None, *, environment: bool = True) -> str | Wanted | None:
    """Return the model that the argument MODEL.gguf, -m or -hf names; None: no model is named. Raises UsageError.

    The command line takes precedence over the environment. environment: whether a model that only the environment names counts.
    """
    typed = option if _typed("model") else None
    if argument and typed and argument != typed:
        msg = f"two models are given, {argument} and -m {typed}: give one"
        raise UsageError(msg)
    file, wanted = argument or typed, _wanted()
    if file and wanted and _typed("hf_repo"):
        msg = f"two models are given, {file} and -hf {wanted}: give one"
        raise UsageError(msg)
    if file or (wanted and _typed("hf_repo")):
        return file or wanted
    if not environment:
        return None
    if option and wanted:
        msg = f"the environment names two models, {option} and -hf {wanted}: unset one, or give one"
        raise UsageError(msg)
    return option or wanted


def model_path(argument: str | None, option: str | None, reporter: Reporter) -> Path:
    """Return the file of the named model or, with a note, that of the bundled model if none is named. Raises UsageError and ModelError."""
    model = named_model(argument, option)
    if model:
        return located(model, reporter)
    reporter.note(
        f"no model given: using the bundled {BUNDLED_MODEL.stem}, a test model that finds codes in long texts;"
        " give a file, or -hf user/model"
    )
    reads("the bundled model", BUNDLED_MODEL)
    return BUNDLED_MODEL


@contextmanager
def outlined(argument: str | None, option: str | None, reporter: Reporter) -> Iterator[tuple[Path, list[str]]]:
    """Yield the file of a model to inspect, and the words that name the model on a command line.

    For a model on the Hub that was not downloaded, the file is temporary and has only the header. Raises the errors of model_path().
    """
    wanted = named_model(argument, option)
    if not isinstance(wanted, Wanted):
        path = model_path(argument, option, reporter)
        yield path, [str(path)]
        return
    file = ["-hff", wanted.file] if wanted.file else []
    with TemporaryDirectory(prefix="kvflash-") as folder:
        path = outline(wanted, Path(folder), reporter.note)
        reads("the model", *model_parts(path))
        yield path, ["-hf", str(wanted), *file]


def located(model: str | Wanted, reporter: Reporter) -> Path:
    """Return the file of a model that named_model() found, and declare that the command reads it. A model on the Hub is downloaded.

    Raises UsageError and ModelError.
    """
    path = Path(model) if isinstance(model, str) else _fetched(model, reporter)
    reads("the model", *model_parts(path))
    return path


def _fetched(model: Wanted, reporter: Reporter) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=reporter.console, transient=True, disable=not reporter.bars
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(f"download {name}", total=total)
            bars.update(tasks[name], completed=done, total=total)
            of = f" of {mib(total)}" if total else ""
            reporter.plain(f"download {name}: {mib(done)}{of}")

        return fetch(model, None if reporter.quiet else show, reporter.note)


def _wanted() -> Wanted | None:
    meta = click.get_current_context().meta
    repo, file = meta.get("kvflash.hf_repo"), meta.get("kvflash.hf_file")
    if repo:
        return Wanted.parse(repo, file, offline=meta.get("kvflash.offline", False))
    if file and _typed("hf_file"):
        msg = f"-hff {file} needs a repository: add -hf user/model"
        raise UsageError(msg)
    return None


def _typed(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) == ParameterSource.COMMANDLINE
