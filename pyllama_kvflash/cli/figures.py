"""Lines and a table about a loaded engine, and about the cost of an answer."""

from pathlib import Path

from rich.table import Table

from pyllama_kvflash.cli.memory import about, held_in_ram, memory_line, mib, records_lines
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import counted, number
from pyllama_kvflash.events import Stats
from pyllama_kvflash.native.guests import UNIT

SHORT = 120  # seconds; a longer time is given in minutes
_MOMENT = 10  # a shorter time has a decimal


def duration(seconds: float) -> str:
    """Return a time as text: "4.2 s", "42 s", "3:05", "1:03:05"."""
    if seconds < SHORT:
        return f"{seconds:.{int(seconds < _MOMENT)}f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def heading(kv: KVFlash) -> list[str]:
    """Return two lines about a loaded engine: its model, and its cache."""
    o, s = kv.options, kv.stats()
    each = f", for each of {o.n_parallel} answers at once" if o.n_parallel > 1 else ""
    head = f"{kv.model.description}, a context of {o.n_ctx:,} tokens{each}"
    on_gpu, in_ram = (
        sum(need.kv + need.coarse + need.panes + need.states for need in kv.memory if need.gpu == gpu)
        for gpu in (True, False)
    )
    types = o.type_k if o.type_k == o.type_v else f"{o.type_k}/{o.type_v}"
    if kv.n_pool is None:
        places = [
            *([f"{about(on_gpu)} of the GPU"] if on_gpu else []),
            *([f"{about(in_ram)} of RAM"] if in_ram else []),
        ]
        return [head, f"full cache in {types}: {' and '.join(places)}"]
    room = kv.pager.guests
    rest = f", and {room.form} for all else" if room else ""
    lossless = ", each token checked against the full cache" if o.lossless else ""
    n_records = sum(need.records for need in kv.memory)
    what = f"pool of {kv.n_pool:,} tokens in {types}{rest}{lossless}"
    if on_gpu:
        return [
            head,
            f"{what}: {about(on_gpu)} of the GPU, where the full cache takes {about(s.kv_full_bytes)}; up to {about(n_records + in_ram)} of RAM",
        ]
    fixed, grows = held_in_ram(kv.memory)
    each_1000 = round(1000 * grows / (o.n_parallel * o.n_ctx))
    full = f"the full cache takes {about(s.kv_full_bytes)} at once"
    return [
        head,
        f"{what}: {about(fixed)} of RAM, and {about(each_1000)} for every 1,000 tokens of text; {full}",
    ]


def details(kv: KVFlash) -> list[str]:
    """Return lines that explain the choice of the cache, with the arithmetic of the pool."""
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
    """Return words about the codes of the positions outside the pool; "" without codes."""
    room = kv.pager.guests
    if room is None:
        return ""
    size = kv.options.n_parallel * room.n_bytes(kv.options.n_ctx)
    taken = f"{mib(size)} at the full context, {100 * size / s.kv_full_bytes:.1f} % of the full cache"
    return f", everything outside the pool seen by {room.form} ({taken})"


_ENDED = {
    "length": "cut off at the token limit (-n)",
    "context": "cut off: the context is full (-c)",
    "interrupted": "interrupted",
}
"""Why an answer was cut off, in words, by Done.reason."""


def closing(s: Stats, reason: str) -> str:
    """Return the line after an answer: its tokens, their speed, and memory."""
    parts = [f"read {counted(s.n_prompt, 'token')} in {duration(s.prefill_s)}"] if s.n_prompt else []
    rate = f" at {s.decode_rate:,.1f} tok/s" if s.n_generated > 1 else ""
    parts.append(f"wrote {f'{s.n_generated:,}' if s.n_prompt else counted(s.n_generated, 'token')}{rate}")
    if s.agreement is not None:
        parts.append(f"{100 * s.agreement:.1f} % of {s.checked:,} tokens checked are the full cache's")
    parts += [f"GPU {about(s.gpu_bytes)}"] if s.gpu_bytes else []
    parts.append(f"RAM {about(s.peak_bytes)} at its peak")
    parts += [_ENDED[reason]] if reason in _ENDED and (s.n_generated or reason != "length") else []
    return ", ".join(parts)


def closing_details(s: Stats, reason: str) -> str:
    """Return a line with all costs of an answer."""
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
    """Return words about a pool's memory on a GPU, and on the host."""
    share = 100 * s.device_kv_bytes / s.kv_full_bytes
    device = mib(s.kv_device_bytes) + _more(s.coarse_bytes, "of codes") + _more(s.pane_bytes, "to read prompts")
    host = mib(s.host_bytes)
    return [f"device KV {device}, full cache {mib(s.kv_full_bytes)} ({share:.1f} %)", f"host {host}"]


def _held_in_ram(s: Stats) -> str:
    """Return words about a pool's memory without a GPU, where all of it is RAM."""
    n_all = s.device_kv_bytes + s.host_bytes
    parts = (
        _more(s.host_bytes, "of records") + _more(s.coarse_bytes, "of codes") + _more(s.pane_bytes, "to read prompts")
    )
    return f"KV {mib(n_all)} = {mib(s.kv_device_bytes)} of pool{parts}, full cache {mib(s.kv_full_bytes)}"


def _more(n: int, what: str) -> str:
    return f" + {mib(n)} {what}" if n else ""


def stats_table(s: Stats) -> Table:
    """Return all of Stats as a table, for `--stats`."""

    def size(n: int) -> str:
        return f"{n:,} bytes ({mib(n)})"

    prompt = f"{counted(s.n_prompt, 'token')} in {s.prefill_s:.2f} s = {s.prefill_rate:,.1f} tok/s"
    after = f"{counted(s.n_generated, 'token')}, {s.decode_s:.2f} s after the first = {s.decode_rate:,.1f} tok/s"
    steps = s.draft_steps + s.plain_steps
    right = f"{s.accepted:,} of {s.drafted:,} tokens right ({100 * s.acceptance:.1f} %)"
    gated = f"{100 * s.gated_steps / max(1, steps):.1f} % of {steps:,} steps gated"
    same = f"{s.agreed:,} of {s.checked:,} tokens checked are the full cache's ({100 * (s.agreement or 0):.1f} %)"
    rows = {
        "prompt": prompt,
        "generated": after,
        "context": f"{s.n_ctx:,} tokens",
        "pool": "none (full cache)" if s.n_pool is None else f"{s.n_pool:,} tokens",
        "device KV": size(s.kv_device_bytes),
        "exact pass": f"{size(s.pane_bytes)} of KV" if s.pane_bytes else "none",
        "computation": size(s.compute_bytes),
        "full cache": size(s.kv_full_bytes),
        "SWA, recurrent": size(s.other_device_bytes),
        "host records": size(s.host_bytes),
        "disk records": size(s.disk_bytes),
        "checkpoints": s.checkpoint_bytes and size(s.checkpoint_bytes),
        "chunks": f"{s.chunks:,}, {s.resident:,} resident",
        "pages": f"{s.stored:,} stored, {s.pages_out:,} dropped, {s.pages_in:,} brought back",
        "reselects": f"{s.reselects:,} in {s.reselect_s:.3f} s, {mib(s.summary_bytes)} of key summaries",
        "memory": f"up to {s.gpu_bytes:,} bytes of GPUs, {s.peak_bytes:,} bytes of RAM at the peak ({mib(s.peak_bytes)})",
        "codes": s.coarse_bytes and f"{size(s.coarse_bytes)}, of {counted(s.coarse_tokens, 'token')}",
        "guests": s.guest_blocks
        and f"{s.guest_blocks:,} blocks; layers fetched {s.guests_fetched:,} guests of {UNIT} tokens",
        "drafts": steps and f"{right}, {s.mean_committed:.2f} tokens a drafted step, {gated}",
        "meter": s.checked and f"{same}, KLD {s.kld:.4f}, in {s.check_s:.2f} s",
        "seed": "greedy" if s.seed is None else str(s.seed),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        if value:
            table.add_row(name, str(value))
    return table
