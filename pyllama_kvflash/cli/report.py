"""Show progress, notes and the closing line on stderr."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from pyllama_kvflash.cli.flags import spelled
from pyllama_kvflash.cli.memory import about, memory_line, mib, records_lines
from pyllama_kvflash.cli.pace import Pace
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import counted, number
from pyllama_kvflash.events import Checked, Event, Prefill, Stats, Token
from pyllama_kvflash.native.guests import UNIT
from pyllama_kvflash.text import printable

_PLAIN_SECONDS = 5.0  # between two lines of progress where there is no terminal
_BARS = ((100, 40), (80, 20))  # least columns of a terminal, and those of its bar; a narrower one has text alone
_GAP = "  "
_SHORT = 120  # seconds; a longer time is given in minutes
_MOMENT = 10  # a shorter time has a decimal


def duration(seconds: float) -> str:
    """Return a time: "4.2 s", "42 s", "3:05", "1:03:05"."""
    if seconds < _SHORT:
        return f"{seconds:.{int(seconds < _MOMENT)}f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def time_left(seconds: float) -> str:
    """Return how long something still takes: "42 s left", "3:05 left", "1:03:05 left"."""
    return f"{seconds:.0f} s left" if seconds < _SHORT else f"{duration(seconds)} left"


def fitting(parts: Sequence[str], room: int) -> str:
    """Return as many of the parts, from the first one on, as fit into `room` columns; the first is always there."""
    line = ""
    for part in parts:
        longer = f"{line}{_GAP}{part}" if line else part
        if line and len(longer) > room:
            break
        line = longer
    return line


class _Info(ProgressColumn):
    """What is known of a task, beside its label and its bar: as much as fits on one line, at any width."""

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
    """Progress and notes on stderr: bars on a terminal, an occasional plain line elsewhere, which is a note."""

    _KEPT = "\t"  # no line breaks: the rest of a name would be a line of its own

    def __init__(self, *, quiet: bool | None = None) -> None:
        """quiet: True: no lines but warnings and errors; False: details, too."""
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
        """Show a line of information that was asked for with -v."""
        if self.verbose:
            self.note(text)

    def opened(self, kv: KVFlash, *warnings: str | None) -> None:
        """Say what runs: two lines, and the details if they are asked for. warnings: others than the engine's."""
        for warning in dict.fromkeys(filter(None, (*kv.warnings, *warnings))):
            self.warn(warning)
        for line in heading(kv):
            self.note(line)
        for line in details(kv):
            self.detail(line)

    def answered(self, stats: Stats, reason: str) -> None:
        """Say what an answer took: a line, and another one with the details if they are asked for."""
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
        """Show how an answer comes along, from its first token on. hidden: do not, since the text itself is seen."""
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
        """Return a line of progress. head: what it says first of a task; its field "parts" has the rest. with_bar: if the
        terminal is wide enough.
        """
        bar = next((columns for least, columns in _BARS if self.console.width >= least), 0) * with_bar
        columns = [TextColumn("{task.description}", markup=False), _Info(self.console, bar, head)]
        if bar:
            columns.insert(1, BarColumn(bar))
        return Progress(*columns, console=self.console, transient=True, disable=not self.bars)

    def _short(self, label: str) -> str:
        """Return a label that leaves half of a narrow terminal to what is said of it."""
        room = max(8, self.console.width // 2)
        label = printable(label)
        return label if len(label) <= room else f"{label[: room - 1]}…"

    def plain(self, text: str, *, at_once: bool = False) -> None:
        """Show a line of progress if there are no bars, at most one every few seconds. at_once: not even that long after
        the one before.
        """
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
        """Show that a batch is done."""
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
    """Tokens of an answer, their speed, and what the meter says of them."""

    def __init__(self, reporter: Reporter, progress: Progress, *, hidden: bool) -> None:
        self._reporter, self._progress, self._hidden = reporter, progress, hidden
        self._task: TaskID | None = None
        self._n = self._checked = self._agreed = 0
        self._began = 0.0

    def __call__(self, event: Event) -> None:
        """Show an event, if it is of the answer. No other bar may be moving then."""
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
    """Moves the bar of a bench. n_done: runs that are measured, now or before."""

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
        """Count a run that is measured."""
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


def heading(kv: KVFlash) -> list[str]:
    """Return two lines that say what runs: the model, and its cache."""
    o, s = kv.options, kv.stats()
    each = f", for each of {o.n_parallel} answers at once" if o.n_parallel > 1 else ""
    head = f"{kv.model.description}, a context of {o.n_ctx:,} tokens{each}"
    on_gpu = sum(need.kv + need.coarse + need.panes for need in kv.memory if need.gpu)
    if kv.n_pool is None:
        return [head, f"full cache in {o.type_k}: {about(s.kv_device_bytes)} of {'the GPU' if on_gpu else 'RAM'}"]
    room = kv.pager.guests
    rest = f", and all else by {room.form}" if room else ""
    lossless = ", each token checked against the full cache" if o.lossless else ""
    n_records = sum(need.records for need in kv.memory)
    what = f"pool of {kv.n_pool:,} tokens in {o.type_k}{rest}{lossless}"
    if on_gpu:
        return [
            head,
            f"{what}: {about(on_gpu)} of the GPU, where the full cache takes {about(s.kv_full_bytes)}; up to {about(n_records)} of RAM",
        ]
    grows = sum(need.records + need.coarse for need in kv.memory) / (o.n_parallel * o.n_ctx)
    fixed = sum(need.kv + need.panes for need in kv.memory)
    full = f"the full cache takes {about(s.kv_full_bytes)} at once"
    return [
        head,
        f"{what}: {about(fixed)} of RAM, and {about(round(1000 * grows))} for every 1,000 tokens of text; {full}",
    ]


def details(kv: KVFlash) -> list[str]:
    """Return lines that say why, with the arithmetic of the pool."""
    o, s = kv.options, kv.stats()
    notes = [f"cache {o.type_k}/{o.type_v}, {counted(o.n_threads or 0, 'thread')}", *kv.notes]
    if o.spec:
        by = f" by {Path(o.spec.model).name}" if o.spec.model else ""
        notes.append(
            f"drafts: {o.spec.kind}{by}, up to {counted(kv.n_draft, 'token')}{', always' if not o.spec.gate else ''}"
        )
    memory = memory_line(kv.memory)
    where = "on the device" if any(need.gpu and need.kv for need in kv.memory) else "in RAM"
    if kv.n_pool is None:
        return [*notes, f"full cache, {mib(s.kv_device_bytes)} of KV {where}", memory]
    if o.lossless:
        notes.append("lossless: tokens are drafted through the pool, and checked against everything before them")
    elif kv.decoder.opens_losslessly:
        first = "token of an answer is" if o.n_opening == 1 else f"{o.n_opening} tokens of an answer are"
        notes.append(f"the first {first} lossless")
    if o.min_agreement and not o.lossless:
        notes.append(f"lossless as soon as fewer than {number(100 * o.min_agreement)} % of tokens are the full cache's")
    policy = f"{kv.policy}{_beside(kv, s)}"
    pool = (
        f"pool of {kv.n_pool:,} tokens ({kv.n_pool // o.chunk} blocks of {o.chunk}): {mib(s.kv_device_bytes)} of KV"
        f" {where}, the full cache takes {mib(s.kv_full_bytes)}; policy {policy}, batches of {kv.n_batch:,}"
        f"{', records in memory that the GPU reads' if kv.ctx.pinned else ''}"
    )
    return [*notes, pool, memory, *records_lines(o, kv.memory, s.kv_full_bytes)]


def _beside(kv: KVFlash, s: Stats) -> str:
    """Return what is seen of all positions outside the pool; nothing without codes."""
    room = kv.pager.guests
    if room is None:
        return ""
    size = kv.options.n_parallel * room.n_bytes(kv.options.n_ctx)
    taken = f"{mib(size)} at the full context, {100 * size / s.kv_full_bytes:.1f} % of the full cache"
    return f", everything outside the pool seen by {room.form} ({taken})"


_ENDED = {
    "length": "cut off after as many tokens as asked for (-n)",
    "context": "cut off: the context is full (-c)",
    "interrupted": "interrupted",
}
"""Of reasons for which an answer ends, those that are not its own."""


def closing(s: Stats, reason: str) -> str:
    """Return the line that ends an answer."""
    parts = [f"read {counted(s.n_prompt, 'token')} in {duration(s.prefill_s)}"] if s.n_prompt else []
    rate = f" at {s.decode_rate:,.1f} tok/s" if s.n_generated > 1 else ""
    parts.append(f"wrote {s.n_generated:,}{'' if s.n_prompt else ' tokens'}{rate}")
    if s.agreement is not None:
        parts.append(f"{100 * s.agreement:.1f} % of {s.checked:,} tokens checked are the full cache's")
    parts += [f"GPU {about(s.gpu_bytes)}"] if s.gpu_bytes else []
    parts.append(f"RAM {about(s.peak_bytes)} at its peak")
    parts += [_ENDED[reason]] if reason in _ENDED else []
    return ", ".join(parts)


def closing_details(s: Stats, reason: str) -> str:
    """Return a line with what an answer took, part by part."""
    parts = [
        f"prefill {s.n_prompt:,} tok at {s.prefill_rate:,.0f} tok/s",
        f"decode {s.n_generated:,} tok at {s.decode_rate:,.1f} tok/s",
    ]
    if s.n_pool is None:
        parts.append(f"KV {mib(s.kv_device_bytes)} (full cache)")
    else:
        parts += _held(s) if s.gpu_bytes else [_held_in_ram(s)]
        parts += [f"disk {mib(s.disk_bytes)}"] if s.disk_bytes else []
        parts.append(f"pages {s.pages_out:,} out, {s.pages_in:,} in")
    if s.draft_steps + s.plain_steps:
        parts.append(f"drafts {100 * s.acceptance:.0f} % right")
    if s.agreement is not None:
        parts.append(f"{100 * s.agreement:.1f} % of {s.checked:,} tokens checked are the full cache's")
    parts += [f"checkpoints {mib(s.checkpoint_bytes)}"] if s.checkpoint_bytes else []
    gpu = f"up to {mib(s.gpu_bytes)} of the GPU, " if s.gpu_bytes else ""
    parts.append(f"memory {gpu}{mib(s.peak_bytes)} of RAM at its peak")
    return f"{reason}: " + " · ".join(parts)


def _held(s: Stats) -> list[str]:
    """Return what a pool has on a GPU, and on the host."""
    share = 100 * s.device_kv_bytes / s.kv_full_bytes
    device = mib(s.kv_device_bytes) + _more(s.coarse_bytes, "of codes") + _more(s.pane_bytes, "to read prompts")
    host = mib(s.host_bytes)
    return [f"device KV {device}, full cache {mib(s.kv_full_bytes)} ({share:.1f} %)", f"host {host}"]


def _held_in_ram(s: Stats) -> str:
    """Return what a pool has where there is no GPU: all of it is RAM."""
    n_all = s.device_kv_bytes + s.host_bytes
    parts = (
        _more(s.host_bytes, "of records") + _more(s.coarse_bytes, "of codes") + _more(s.pane_bytes, "to read prompts")
    )
    return f"KV {mib(n_all)} = {mib(s.kv_device_bytes)} of pool{parts}, full cache {mib(s.kv_full_bytes)}"


def _more(n: int, what: str) -> str:
    return f" + {mib(n)} {what}" if n else ""


def stats_table(s: Stats) -> Table:
    """Return all of Stats as a table, for `--stats`."""
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = [
        ("prompt", f"{counted(s.n_prompt, 'token')} in {s.prefill_s:.2f} s = {s.prefill_rate:,.1f} tok/s"),
        (
            "generated",
            f"{counted(s.n_generated, 'token')}, {s.decode_s:.2f} s after the first = {s.decode_rate:,.1f} tok/s",
        ),
        ("context", f"{s.n_ctx:,} tokens"),
        ("pool", "none (full cache)" if s.n_pool is None else f"{s.n_pool:,} tokens"),
        ("device KV", f"{s.kv_device_bytes:,} bytes ({mib(s.kv_device_bytes)})"),
        ("exact pass", f"{s.pane_bytes:,} bytes ({mib(s.pane_bytes)}) of KV" if s.pane_bytes else "none"),
        ("computation", f"{s.compute_bytes:,} bytes ({mib(s.compute_bytes)})"),
        ("full cache", f"{s.kv_full_bytes:,} bytes ({mib(s.kv_full_bytes)})"),
        ("SWA, recurrent", f"{s.other_device_bytes:,} bytes ({mib(s.other_device_bytes)})"),
        ("host records", f"{s.host_bytes:,} bytes ({mib(s.host_bytes)})"),
        ("disk records", f"{s.disk_bytes:,} bytes ({mib(s.disk_bytes)})"),
        *([("checkpoints", f"{s.checkpoint_bytes:,} bytes ({mib(s.checkpoint_bytes)})")] if s.checkpoint_bytes else []),
        ("chunks", f"{s.chunks:,}, {s.resident:,} resident"),
        ("pages", f"{s.stored:,} stored, {s.pages_out:,} dropped, {s.pages_in:,} brought back"),
        ("reselects", f"{s.reselects:,} in {s.reselect_s:.3f} s, {mib(s.summary_bytes)} of key summaries"),
        (
            "memory",
            f"up to {s.gpu_bytes:,} bytes of GPUs, {s.peak_bytes:,} bytes of RAM at the peak ({mib(s.peak_bytes)})",
        ),
        ("seed", "greedy" if s.seed is None else str(s.seed)),
    ]
    if s.coarse_bytes:
        rows.insert(
            -1, ("codes", f"{s.coarse_bytes:,} bytes ({mib(s.coarse_bytes)}), of {counted(s.coarse_tokens, 'token')}")
        )
    if s.guest_blocks:
        guests = f"{s.guest_blocks:,} blocks; layers fetched {s.guests_fetched:,} guests of {UNIT} tokens"
        rows.insert(-1, ("guests", guests))
    if n := s.draft_steps + s.plain_steps:
        right = f"{s.accepted:,} of {s.drafted:,} tokens right ({100 * s.acceptance:.1f} %)"
        steps = f"{s.mean_committed:.2f} tokens a drafted step, {100 * s.gated_steps / n:.1f} % of {n:,} steps gated"
        rows.insert(-1, ("drafts", f"{right}, {steps}"))
    if s.agreement is not None:
        same = f"{s.agreed:,} of {s.checked:,} tokens checked are the full cache's ({100 * s.agreement:.1f} %)"
        rows.insert(-1, ("meter", f"{same}, KLD {s.kld:.4f}, in {s.check_s:.2f} s"))
    for name, value in rows:
        table.add_row(name, value)
    return table
