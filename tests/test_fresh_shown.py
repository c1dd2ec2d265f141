"""What users see of policy fresh: its figures, residency by layers, its trace, page and metrics."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands
from support.changes import ENGINE
from support.commands import NEEDLE_TOKEN_BYTES, POOLED, good, invoke, rows
from support.runs import BY_SIXTEEN, HOST, TOKENS, Open, feed

from kvflash_bench.trace import read_trace
from pyllama_kvflash import KVFlash, Paged
from pyllama_kvflash.cli.figures import stats_table
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import codes_bytes
from pyllama_kvflash.policy.coarse import FORMS, CoarseForm
from pyllama_kvflash.policy.fresh import Heads

pytestmark = pytest.mark.native

environment = commands.environment
long_file = commands.long_file
SMALL = {**BY_SIXTEEN, "pool": 512, "policy": "fresh", "coarse": "4", "prefill": "pool"}
HEADS = Heads(4, 2, 64, 64)


def read(kv: KVFlash, n: int) -> list[Event]:
    return list(kv.prefill(TOKENS[:n]))


def moved(events: Iterable[Event], there: set[int], n_chunks: int) -> set[int]:
    """Return the chunks that all layers hold, as the events tell it: new ones are there until they leave."""
    there = set(there)
    for event in events:
        if isinstance(event, Paged):
            there = there - set(event.drops) | set(event.page_ins)
    return {c for c in there if c < n_chunks}


#
# residency
#


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize(("name", "chunk"), [("qwen3", 16), ("gemma4", 64), ("qwen35", 32)])
def test_residency_counts_the_layers_that_chose_a_chunk(opened: Open, name: str, chunk: int) -> None:
    """A unit of 16 in one layer is a part of its chunk; what all hold is in all of them; and no cell is counted twice."""
    kv = opened(name, chunk=chunk, pool=1024)
    read(kv, 2500)
    feed(kv, 2520)
    seen, n_layer = kv.residency(), kv.ctx.pool_info().n_layer
    room = kv.pager.guests
    assert room is not None
    _, units = room.native.tables()
    want = np.zeros(len(seen.resident))
    for unit in units.flat:
        want[unit * 16 // chunk] += 16 / chunk
    resident = seen.resident
    assert not want[resident].any()
    assert np.array_equal(seen.layers, np.where(resident, n_layer, want))
    assert 0 < want.max() <= n_layer
    assert seen.layers.sum() == n_layer * (kv.pager.ledger.n_resident + kv.stats().guest_blocks)


@pytest.mark.parametrize("prefill", ["pool", "exact"])
def test_events_tell_what_left_all_layers(opened: Open, prefill: str) -> None:
    """As the tail moves on, what it leaves becomes a candidate: that is a move, and is told."""
    kv = opened(prefill=prefill)
    events = read(kv, 1500)
    resident = set(np.flatnonzero(kv.residency().resident).tolist())
    if prefill == "pool":
        assert moved(events, set(range(94)), 94) == resident
    events = feed(kv, 1700)
    there = moved(events, resident | set(range(94, 107)), 107)
    assert there == set(np.flatnonzero(kv.residency().resident).tolist())
    assert sum(len(e.drops) for e in events if isinstance(e, Paged)) >= 12


#
# figures
#


@pytest.mark.parametrize(("name", "coarse"), [("qwen3", "4"), ("qwen3", "2"), ("gemma4", "4,2"), ("qwen35", "4")])
def test_guests_are_counted_as_they_are(opened: Open, name: str, coarse: str) -> None:
    kv = opened(name, coarse=coarse)
    read(kv, 1500)
    stats, room = kv.stats(), kv.pager.guests
    assert room is not None
    assert kv.policy == "fresh"
    assert room.form == CoarseForm.of(coarse)
    assert stats.coarse_bytes >= room.n_bytes(stats.coarse_tokens) > 0
    assert stats.guest_blocks == kv.pager.ledger.n_guests > 0
    assert stats.guests_fetched == room.native.n_fetched() >= room.native.tables()[1].size


def test_codes_alone_are_shown_without_guests(opened: Open) -> None:
    """Made before the last batch of the prompt, of all chunks up to it."""
    kv = opened(policy="lru")
    read(kv, 1500)
    stats = kv.stats()
    assert (stats.guest_blocks, stats.guests_fetched, stats.coarse_tokens) == (0, 0, 1472)
    assert stats_table(stats).row_count == 17


FRESH = ("--kvflash-policy", "fresh", "--kvflash-coarse", "4")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((*FRESH[:-1], "3"), "--kvflash-coarse: '3' is not one of 'auto', 'off', '4', '4,2', '2'; "),
        (
            (*FRESH[:-1], "off"),
            "--kvflash-policy is fresh, whose layers choose by codes, and --kvflash-coarse is off: give policy qk",
        ),
        (
            (*FRESH, "--set", "opening=-2"),
            "--set opening is -2, and must be from -1 to 1,073,741,824: -1",
        ),
    ],
)
@pytest.mark.parametrize("command", ["run", "inspect"])
def test_bad_values_are_one_sentence(command: str, args: tuple[str, ...], says: str) -> None:
    res = invoke(command, *args, *(("-p", "x") if command == "run" else ()))
    assert res.exit_code == commands.USAGE
    assert f"kvflash: error: {says}" in res.stderr.splitlines()[-1]


def test_a_trace_says_what_layers_chose(long_file: Path, tmp_path: Path) -> None:
    """After each batch of the prompt, after the first token that was decoded, and every 16 then; and it changes nothing."""
    trace = tmp_path / "run.jsonl"
    args = ("run", "-f", str(long_file), *POOLED, *FRESH, "-n", "40", "-r", "never", "-s", "3", "--temp", "1")
    plain = good(*args)
    assert good(*args, "--trace", str(trace)).stdout == plain.stdout
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    seen = [line for line in lines if line["event"] == "layers"]
    done = [line["done"] for line in lines if line["event"] == "prefill"]
    n = done[-1]
    at = sorted({line["pos"] for line in seen})
    assert at[-4:] == [n + 1, n + 17, n + 33, n + 39]
    assert at[-5] == n
    assert all(line["n_layer"] == 6 and len(line["layers"]) == -(-line["pos"] // 64) for line in seen)
    assert seen[-1]["layers"][0] == seen[-1]["layers"][-1] == 6
    assert sum(seen[-1]["layers"]) == 6 * 12
    assert any(0 < x < 6 for x in seen[-1]["layers"])
    found = read_trace(trace)
    assert found.residency[-1].tolist() == [np.float32(x / 6) for x in seen[-1]["layers"]]


@pytest.mark.parametrize("policy", ["lru", "qk"])
def test_only_where_layers_choose_does_a_trace_say_so(long_file: Path, tmp_path: Path, policy: str) -> None:
    trace = tmp_path / "run.jsonl"
    good("run", "-f", str(long_file), *POOLED, "--kvflash-policy", policy, "-n", "2", "--trace", str(trace))
    assert '"layers"' not in trace.read_text()


@HOST
@pytest.mark.parametrize("coarse", FORMS)
def test_inspect_says_what_codes_would_take(coarse: str) -> None:
    form = CoarseForm.of(coarse)
    assert form
    want = 6 * codes_bytes(HEADS, form, 8192, on_gpu=False)
    args = ("inspect", "-c", "8K", "--kvflash-coarse", coarse)
    found = json.loads(good(*args, *FRESH[:2], "--json").stdout)
    assert (found["coarse"], found["coarse_bytes"]) == (coarse, want)
    share = 100 * want / (NEEDLE_TOKEN_BYTES * 8192)
    said = f"{form}, {want / 2**20:.1f} MiB for the context ({share:.1f} % of its f16"
    assert rows(good(*args, *FRESH[:2]).stdout)["codes"].startswith(said)
    assert json.loads(good(*args, "--json").stdout)["coarse_bytes"] == want
