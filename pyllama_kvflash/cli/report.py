"""Show progress, notes and the closing line on stderr."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from pyllama_kvflash.cli.figures import SHORT, closing, closing_details, details, duration, heading
from pyllama_kvflash.cli.flags import spelled
from pyllama_kvflash.cli.memory import mib
from pyllama_kvflash.cli.pace import Pace
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.events import Checked, Event, Prefill, Stats, Token
from pyllama_kvflash.text import printable

_PLAIN_SECONDS = 5.0  # between two lines of progress where there is no terminal
_BARS = ((100, 40), (80, 20))  # least width of a terminal, and width of its bar; a narrower terminal has text alone
_GAP = "  "


def time_left(seconds: float) -> str:
    """Return the remaining time as text: "42 s left", "3:05 left", "1:03:05 left"."""
    return f"{seconds:.0f} s left" if seconds < SHORT else f"{duration(seconds)} left"


def fitting(parts: Sequence[str], room: int) -> str:
    """Return the first parts as one text: as many as fit into `room` columns, but at least one."""
    line = ""
    for part in parts:
        longer = f"{line}{_GAP}{part}" if line else part
        if line and len(longer) > room:
            break
        line = longer
    return line


class _Info(ProgressColumn):
    """The figures of a task, beside its label and its bar: as many as fit on one line, at any width."""

    def __init__(self, console: Console, bar: int, head: Callable[[Task], list[str]]) -> None:
        super().__init__()
        self._console, self._bar, self._head = console, bar, head

    def render(self, task: Task) -> Text:
        """Return the text."""
        used = len(task.description) + self._bar + 3  # a space after each column
        return Text(fitting([*self._head(task), *task.fields.get("parts", ())], self._console.width - used))


def _nothing(_: Task) -> list[str]:
    return []


def _percent(task: Task) -> list[str]:
    return [f"{task.percentage:>3.0f} %", *_estimate(task)]


def _count(task: Task) -> list[str]:
    return [f"{task.completed:.0f}/{task.total:.0f}", *_estimate(task)]


def _estimate(task: Task) -> list[str]:
    return [time_left(task.time_remaining)] if task.time_remaining else []


class Reporter:
    """Shows progress and notes on stderr. Progress is bars on a terminal; elsewhere, it is an occasional note."""

    _KEPT = "\t"  # control characters that are shown; a line break in a name would begin a line of its own

    def __init__(self, *, quiet: bool | None = None) -> None:
        """quiet: True: only warnings and errors; None: also notes; False: also details."""
        self.quiet, self.verbose = quiet is True, quiet is False
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bars = self.console.is_terminal
        self._last = 0.0
        running = click.get_current_context(silent=True)
        self._command = running.command if running else None  # other threads have no context

    def note(self, text: str) -> None:
        """Show a line of information, unless quiet."""
        if not self.quiet:
            self.console.print(f"kvflash: {self._shown(text)}", markup=False)

    def detail(self, text: str) -> None:
        """Show a line of information if -v is given."""
        if self.verbose:
            self.note(text)

    def opened(self, kv: KVFlash, *warnings: str | None) -> None:
        """Show two lines about a loaded engine and, with -v, its details. warnings: shown in addition to the engine's own."""
        for warning in dict.fromkeys(filter(None, (*kv.warnings, *warnings))):
            self.warn(warning)
        for line in heading(kv):
            self.note(line)
        for line in details(kv):
            self.detail(line)

    def answered(self, stats: Stats, reason: str) -> None:
        """Show a line about the cost of an answer and, with -v, a line with the details."""
        self.note(closing(stats, reason))
        self.detail(closing_details(stats, reason))

    def warn(self, text: str, level: str = "warning") -> None:
        """Show a warning, or an error, even if quiet."""
        click.echo(f"kvflash: {level}: {self._shown(text)}", err=True)

    def _shown(self, text: str) -> str:
        return printable(spelled(text, self._command), self._KEPT)

    @contextmanager
    def loading(self, name: str, verb: str = "load") -> Iterator["LoadBar"]:
        """Show a bar while a model loads or is written."""
        with self._progress(_percent) as progress:
            yield LoadBar(progress, progress.add_task(self._short(f"{verb} {name}"), total=1.0))

    @contextmanager
    def prefilling(self, label: str = "reading") -> Iterator["PrefillBar"]:
        """Show a bar while a prompt is computed."""
        self._last = time.monotonic()  # so that nothing is printed for a short prompt
        with self._progress() as progress:
            yield PrefillBar(self, progress, progress.add_task(self._short(label), total=None), label)

    @contextmanager
    def answering(self, *, hidden: bool) -> Iterator["AnswerLine"]:
        """Show the progress of an answer, from its first token on. hidden: show nothing, since the answer itself is visible."""
        line = AnswerLine(self, self._progress(with_bar=False), hidden=hidden)
        try:
            yield line
        finally:
            line.finish()

    @contextmanager
    def counting(self, label: str, total: int) -> Iterator["CellBar"]:
        """Show a bar for a bench of `total` runs."""
        self._last = 0.0
        with self._progress(_count) as progress:
            yield CellBar(self, progress, progress.add_task(self._short(label), total=total), label)

    def _progress(self, head: Callable[[Task], list[str]] = _nothing, *, with_bar: bool = True) -> Progress:
        """Return a progress line. head: returns the first figures of a task; the task's field "parts" has the rest.

        with_bar: whether the line has a bar, if the terminal is wide enough.
        """
        bar = next((columns for least, columns in _BARS if self.console.width >= least), 0) * with_bar
        columns = [TextColumn("{task.description}", markup=False), _Info(self.console, bar, head)]
        if bar:
            columns.insert(1, BarColumn(bar))
        return Progress(*columns, console=self.console, transient=True, disable=not self.bars)

    def _short(self, label: str) -> str:
        """Return a label, shortened so that half of a narrow terminal is left for the figures."""
        room = max(8, self.console.width // 2)
        label = printable(label)
        return label if len(label) <= room else f"{label[: room - 1]}…"

    def plain(self, text: str, *, at_once: bool = False) -> None:
        """Show a line of progress if there are no bars, at most one every few seconds. at_once: show it however recent the last line is."""
        now = time.monotonic()
        if self.bars or (now - self._last < _PLAIN_SECONDS and not at_once):
            return
        self._last = now
        self.note(text)


class LoadBar:
    """Moves a loading bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def __call__(self, done: float) -> None:
        """Show that the share `done`, 0.0 to 1.0, is loaded."""
        self._progress.update(self._task, completed=done)


class PrefillBar:
    """Moves a prefill bar."""

    def __init__(self, reporter: Reporter, progress: Progress, task: TaskID, label: str) -> None:
        self._reporter, self._progress, self._task, self._label = reporter, progress, task, label
        self._pace = Pace()
        self._is_long = False  # whether it is known to take long

    def finish(self) -> None:
        """Remove the bar, before text is shown."""
        self._progress.stop()

    def __call__(self, ev: Prefill) -> None:
        """Show the progress after a batch."""
        rate = ev.done / ev.seconds if ev.seconds else 0.0
        left = self._pace.left(ev.done, ev.total, ev.seconds)
        parts = (
            f"{ev.done:,}/{ev.total:,} tok",
            *([time_left(left)] if left else []),
            f"{rate:,.0f} tok/s",
            *([f"KV {mib(ev.resident_bytes)}", f"records {mib(ev.host_bytes)}"] if self._reporter.verbose else []),
        )
        self._progress.update(self._task, completed=ev.done, total=ev.total, parts=parts)
        news = not self._is_long and left > _PLAIN_SECONDS
        self._is_long |= news
        self._reporter.plain(_GAP.join((f"{self._label} {parts[0]}", *parts[1:])), at_once=news)


class AnswerLine:
    """A line with the tokens of an answer, their speed, and the meter's figures."""

    def __init__(self, reporter: Reporter, progress: Progress, *, hidden: bool) -> None:
        self._reporter, self._progress, self._hidden = reporter, progress, hidden
        self._task: TaskID | None = None
        self._n = self._checked = self._agreed = 0
        self._began = 0.0

    def __call__(self, event: Event) -> None:
        """Show an answer event. No other bar may be on the screen."""
        if self._hidden:
            return
        if isinstance(event, Checked):
            self._checked, self._agreed = self._checked + event.n, self._agreed + event.agreed
        if not isinstance(event, Token):
            return
        if self._task is None:
            self._began = time.monotonic()
            self._progress.start()
            self._task = self._progress.add_task("answer", total=None)
        self._n += 1
        seconds = time.monotonic() - self._began
        parts = [f"{self._n:,} tok", f"{(self._n - 1) / seconds if seconds else 0:,.1f} tok/s"]
        if self._checked:
            parts.append(f"{100 * self._agreed / self._checked:.1f} % of {self._checked:,} as the full cache")
        self._progress.update(self._task, parts=parts)
        self._reporter.plain(f"answer {_GAP.join(parts)}")

    def finish(self) -> None:
        """Remove the line. Harmless when called again."""
        self._progress.stop()


class CellBar:
    """Moves the bar of a bench. n_done: runs measured so far, including those skipped."""

    def __init__(self, reporter: Reporter, progress: Progress, task: TaskID, label: str) -> None:
        self._reporter, self._progress, self._task, self._label = reporter, progress, task, label
        self.n_done = 0

    def skip(self, n: int) -> None:
        """Count n runs that were measured before."""
        self.n_done += n
        self._progress.update(self._task, completed=self.n_done)
        if n:
            self._reporter.note(f"{n} run{'s were' if n > 1 else ' was'} measured before")

    def done(self) -> None:
        """Count a run that was measured now."""
        self.n_done += 1
        self._progress.update(self._task, completed=self.n_done)

    def prefill(self, name: str) -> Callable[[Prefill], None]:
        """Return a function that shows the prefill progress of the run `name`."""

        def show(ev: Prefill) -> None:
            parts = (name, f"{ev.done:,}/{ev.total:,} tok")
            self._progress.update(self._task, parts=parts)
            total = self._progress.tasks[self._task].total
            self._reporter.plain(f"{self._label} {self.n_done}/{total:.0f}  {_GAP.join(parts)}")

        return show
