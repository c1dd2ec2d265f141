"""Checkpoints of recurrent states and sliding windows: where they are, how many, and what the model computes from them."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import snapshots
from support.changes import ENGINE, crossed
from support.oracles import ON_GPU
from support.runs import BY_SIXTEEN, GREEDY, TOKENS, Open, check_residency

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import UnsupportedError
from pyllama_kvflash.pool import checkpoints
from pyllama_kvflash.pool.checkpoints import least

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

wordless = snapshots.wordless
EXACT = pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order")
CHUNK, N_UBATCH = 16, 64
SMALL: dict[str, Any] = {**BY_SIXTEEN, "pool": 2048, "tau": 1000, "again": 0}
STATEFUL = ["qwen35", "gemma4"]
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"pool": 512, "prefill": "exact"},
    "through the pool": {"pool": 2048, "prefill": "pool", "policy": "lru"},
    "full": {"pool": "off"},
    "two sequences": {"pool": "off", "n_parallel": 2},
}


def positions(kv: KVFlash) -> list[int]:
    return list(kv.decoder.checkpoints._states)


def asked(kv: KVFlash, prompt: Any, marks: Any = (), n: int = 0) -> int:
    """Read a prompt in the place of the text, and answer. Returns the tokens that were not read."""
    known = kv.keep_common(prompt)
    run = kv.generation(prompt[known:], max_tokens=n, sampling=GREEDY, marks=marks)
    for _ in run.rest():
        pass
    return known


@EXACT
@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize(
    ("name", "how"), [*crossed(STATEFUL, list(WAYS)), ("mamba", "full"), ("mamba", "two sequences")]
)
def test_going_back_is_as_never_having_gone_on(opened: Open, name: str, how: str) -> None:
    """The same logits, bit for bit, from the same batches, though the window was overwritten and the state had gone on."""
    kv, cold = (opened(name, **WAYS[how]).sequences[-1] for _ in range(2))
    text, branch = TOKENS[:1000], np.concatenate([TOKENS[:450], TOKENS[5000:5200]])
    asked(kv, text, (433, 900), 600)
    assert [pos for pos in positions(kv) if pos < 1000] == [433, 900]
    known = asked(kv, branch, (433,))
    assert known == 433
    if kv.n_pool:
        check_residency(kv, CHUNK)
    asked(cold, branch, (433,))
    assert np.array_equal(kv.tokens, cold.tokens)
    assert cold.logits().std() > 0.01
    assert np.array_equal(kv.logits(), cold.logits())
    for token in TOKENS[7000:7010]:
        kv.decode([token])
        cold.decode([token])
    assert np.array_equal(kv.logits(), cold.logits())


@pytest.mark.parametrize("name", [*STATEFUL, "mamba"])
def test_rollback_goes_to_a_checkpoint(opened: Open, name: str) -> None:
    """And says where one is."""
    kv = opened(name, pool="off")
    asked(kv, TOKENS[:1000], (100, 433))
    with pytest.raises(UnsupportedError, match="or go back to the last checkpoint before it, 433"):
        kv.rollback(450)
    assert kv.n_tokens == 1000
    kv.rollback(433)
    assert (kv.n_tokens, positions(kv)) == (433, [100, 433])
    asked(kv, TOKENS[:1000])
    with pytest.raises(UnsupportedError, match=r"gone|keeps no earlier state") as failed:
        kv.rollback(50)
    assert "checkpoint" not in str(failed.value)


def test_a_window_goes_back_by_itself_as_far_as_it_can(opened: Open) -> None:
    kv = opened("gemma4", pool="off")
    asked(kv, TOKENS[:1000], (900,))
    assert asked(kv, np.concatenate([TOKENS[:980], TOKENS[5000:5100]])) == 980


@pytest.mark.parametrize("name", ["qwen4exp", "deepseek32"])
def test_a_memory_without_a_pool_goes_on(opened: Open, name: str) -> None:
    """A conversation that only grows is not read again."""
    kv = opened(name, pool="off")
    assert [asked(kv, TOKENS[:n]) for n in (200, 300, 400)] == [0, 200, 300]


def test_where_they_are(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first mark and the last one, at others that are a graph apart, and every so many tokens where a batch ends."""
    monkeypatch.setattr(checkpoints, "_EVERY", 500)
    kv = opened("qwen35", pool="off")
    asked(kv, TOKENS[:900], (0, 20, 40, 200, 290, 310, 350))
    assert positions(kv) == [20, 40, 200, 350, 862]
    asked(kv, TOKENS[:1000], (910, 920))
    assert positions(kv)[5:] == [920], "the last one of a text that goes on"


def test_a_turn_is_cut_for_a_snapshot_now_and_then(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a chunk, where a file can be cut: a batch more in each turn would read all of the text once more."""
    monkeypatch.setattr(checkpoints, "_CUT_EVERY", 200)
    kv = opened("qwen35", pool=512, snapshots=True)
    found = []
    for n in (900, 950, 1000, 1200):
        asked(kv, TOKENS[:n])
        found.append(kv.decoder.checkpoints.at_chunks[-1])
    assert found == [896, 896, 896, 1184]


@pytest.mark.nightly(ENGINE)
def test_there_are_few_and_they_are_counted(opened: Open) -> None:
    """The oldest go where they are densest. Beyond the limit there are fewer; at 0 there are none."""
    kv = opened("qwen35", pool="off")
    asked(kv, TOKENS[:3000], range(64, 3000, 64))
    found = positions(kv)
    assert len(found) == 16
    assert found[-2:] == [2880, 2944]
    assert max(np.diff([0, *found])) <= 4 * 64
    size = kv.stats().checkpoint_bytes // 16
    assert size * 16 == kv.stats().checkpoint_bytes > 0
    for limit, n in ((5 * size, 5), (size - 1, 0), (0, 0)):
        other = opened("qwen35", pool="off", checkpoint_limit=limit)
        asked(other, TOKENS[:3000], range(64, 3000, 64))
        assert len(positions(other)) == n
        assert other.stats().checkpoint_bytes == n * size


@pytest.mark.parametrize(
    ("given", "spared", "want"),
    [
        ([5], (), 5),
        ([5, 9], (), 5),
        ([10, 20, 30, 40], (), 10),
        ([10, 50, 60, 70, 80, 90], (), 60),
        ([100, 200, 201], (), 100),
        ([32768, 65536, 66051, 66583, 67072, 67099, 67615], (), 67072),
        ([32768, 65536, 66051, 66583, 67072, 67099, 67615], (67072,), 66051),
        ([64, 65, 66], (64,), 64),
    ],
)
def test_which_is_missed_least(given: list[int], spared: tuple[int, ...], want: int) -> None:
    assert least(given, spared) == want


@pytest.mark.parametrize("n", [16, 65, 100, 128])
def test_those_that_stay_are_denser_near_the_end(n: int) -> None:
    """Of a conversation, each distance back is as likely as its double."""
    kept: list[int] = []
    for turn in range(1, n + 1):
        kept.append(1000 * turn)
        while len(kept) > 6:
            kept.remove(least(kept))
    back = [n - pos / 1000 for pos in kept]
    assert back[-2:] == [1, 0]
    assert back[0] > n / 2
    assert sum(each < n / 3 for each in back) >= 4
