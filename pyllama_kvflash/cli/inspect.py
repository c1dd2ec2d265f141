"""`kvflash inspect`: show which layers of a model can be pooled, and the memory that a run takes."""

import json
from dataclasses import replace
from itertools import groupby
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.fetch import model_path
from pyllama_kvflash.cli.flags import spelled
from pyllama_kvflash.cli.memory import mib, place_name, sum_line
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command
from pyllama_kvflash.errors import counted
from pyllama_kvflash.gguf_header import read_parts
from pyllama_kvflash.loading.load import check_file
from pyllama_kvflash.loading.load_plan import pool_size
from pyllama_kvflash.loading.memory import coarse_bytes, device_memory
from pyllama_kvflash.loading.panes import exact_bytes
from pyllama_kvflash.loading.planning import Look, Planned, look
from pyllama_kvflash.native import CACHE_TYPES, row_bytes
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy import PoolSize
from pyllama_kvflash.policy.coarse import CoarseForm
from pyllama_kvflash.text import printable

HELP = """Show a model's architecture, memory class, pooled layers and bytes per token, and the memory that a run with these
options takes on each device.

It loads no weights. Snapshots, the prefix cache and results of benches identify a model by its fingerprint. The memory of a
device's driver (some 660 MiB with CUDA) comes on top.

\b
  kvflash inspect model.gguf
  kvflash inspect model.gguf -c 256K --kvflash 4K -ctk q8_0 -ctv q8_0 -ub 2048
  kvflash inspect model.gguf -c 256K --kvflash off --json
"""


@click.command(cls=Command, help=HELP, short_help="Show what of a model can be pooled, and what it costs.")
@params.MODEL
@params.POOL
@params.CONTEXT
@params.COMPUTE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")  # fmt: skip
def inspect(model_arg: str | None, model: str | None, *, as_json: bool, **values: Any) -> None:
    """Print the facts about a model."""
    path = model_path(model_arg, model, Reporter())
    options = Options(**params.resolve(values))
    check_file(path)
    with look(path, options) as looked:
        found = _find(looked)
        if as_json:
            memory = [need.as_dict() for need in found["memory"]]
            click.echo(json.dumps({**found, "memory": memory}, ensure_ascii=False))
        else:
            Console(highlight=False).print(_table(found, looked.seen.uncoded))


_HOLDS = ("name", "gpu", "remote", "free", "token_bytes", "coarse")
"""Fields of DeviceBytes that are shown for a device that holds KV."""


def _find(looked: Look) -> dict[str, Any]:
    """Return the facts about a model, by their names in JSON. "memory" has the DeviceBytes of each device that holds anything."""
    model, seen = looked.model, looked.seen
    taken = Planned((), PoolSize(None), looked.options) if seen.memory_class == "none" else looked.planned()
    options, coded = taken.options, _coded(looked, taken.options)
    automatic = (
        replace(coded, pool="auto")
        if seen.uncoded is None
        else replace(options, pool="auto", coarse="off", policy="qk")
    )
    devices = device_memory(seen.geometry, automatic)
    auto = pool_size(automatic, devices) if devices else PoolSize(None, ("nothing to pool",))
    exact = exact_bytes(model, seen.geometry, options).values() if seen.refusal is None else ()
    return {
        "model": printable(model.path),
        "fingerprint": f"{model.fingerprint:016x}",
        "n_files": len(read_parts(model.path)),
        "architecture": model.meta("general.architecture"),
        "description": model.description,
        "n_params": model.n_params,
        "n_bytes": model.n_bytes,
        "n_ctx": options.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "memory_class": seen.memory_class,
        "poolable": seen.refusal is None,
        "refusal": seen.refusal,
        "n_layer": model.n_layer,
        "pooled_layers": seen.layers,
        "n_swa": model.n_swa,
        "token_bytes": {name: seen.geometry.token_bytes(row_bytes, t, t) for name, t in CACHE_TYPES.items()},
        "devices": [{name: getattr(device, name) for name in _HOLDS} for device in devices],
        "auto_pool": auto.n_pool if seen.refusal is None else None,
        "auto_note": "; ".join((*auto.notes, *auto.warnings)),
        "pane_bytes": sum(size.panes for size in exact),
        "exact_compute_bytes": sum(size.buffers for size in exact),
        "coarse": "off" if seen.uncoded else coded.coarse,
        "coarse_bytes": 0 if seen.uncoded else sum(coarse_bytes(seen.geometry, coded, taken.size.n_pool).values()),
        "n_pool": taken.size.n_pool,
        "memory": taken.memory,
    }


def _coded(looked: Look, options: Options) -> Options:
    """Return the options that decide the codes: the given ones or, with the full cache, those of an automatic pool."""
    if options.pool != "off" or looked.seen.uncoded or looked.seen.refusal:
        return options
    return looked.planned(pool="auto").options


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return numbers as text, with ranges: 1, 2, 3, 7 as "1-3, 7"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda p: p[1] - p[0])]
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _table(f: dict[str, Any], uncoded: str | None) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    n, n_ctx = len(f["pooled_layers"]), f["n_ctx"]
    rows = [
        ("model", f["model"]),
        ("fingerprint", f"{f['fingerprint']}, of {counted(f['n_files'], 'file')}"),
        ("architecture", f"{f['architecture']}: {f['description']}"),
        ("parameters", f"{f['n_params']:,} in {mib(f['n_bytes'])}"),
        ("context", f"{n_ctx:,} tokens (trained: {f['n_ctx_train']:,})"),
        ("memory", f["memory_class"]),
        ("pool", "yes" if f["poolable"] else f"no: {f['refusal']}"),
        ("pooled layers", f"{n} of {f['n_layer']}: {_ranges(f['pooled_layers'])}" if n else "none"),
        ("sliding window", f"{f['n_swa']:,} tokens, not pooled" if f["n_swa"] else "none"),
    ]
    for name, size in f["token_bytes"].items():
        rows.append((f"{name} cache", f"{size:,} bytes a token, {mib(size * n_ctx)} for the context"))
    if len(f["devices"]) > 1:
        for device in f["devices"]:
            share = f"{device['token_bytes']:,} of the f16 cache's bytes a token, {mib(device['free'])} free"
            rows.append((f"KV on {device['name']}", share))
    if f["poolable"]:
        panes = f"{mib(f['pane_bytes'])} of KV, {mib(f['exact_compute_bytes'])} of buffers for the context"
        rows += [("auto pool", spelled(f["auto_note"])), ("exact pass", panes), ("codes", _codes(f, uncoded))]
    what = "the full cache" if f["n_pool"] is None else f"a pool of {f['n_pool']:,}"
    rows += [(f"{place_name(need)}, with {what}", sum_line(need)) for need in f["memory"]]
    for row in rows:
        table.add_row(*row)
    return table


def _codes(f: dict[str, Any], uncoded: str | None) -> str:
    if (form := CoarseForm.of(f["coarse"])) is None:
        return f"none: {uncoded or '`coarse` is off, or there is no memory for them'}"
    share = 100 * f["coarse_bytes"] / (f["token_bytes"]["f16"] * f["n_ctx"])
    return f"{form}, {mib(f['coarse_bytes'])} for the context ({share:.1f} % of its f16 cache)"
