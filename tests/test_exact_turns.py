"""Turns of a conversation that is read exactly: saved and restored, with drafts, and several at once."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import drafting, snapshots, tiny, tiny_drafters
from support.changes import ENGINE, crossed
from support.oracles import ON_GPU
from support.rounding import Chosen, held, relative_rms
from support.runs import BY_SIXTEEN, GREEDY, MODELS, TOKENS, Logits, Open, check_residency, read

from pyllama_kvflash import KVFlash, Token
from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.native import Context
from pyllama_kvflash.options import Spec
from pyllama_kvflash.pool import checkpoints
from pyllama_kvflash.pool.speculation import Drafts
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = [
    pytest.mark.native,
    pytest.mark.sampled(ENGINE),
    pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order"),
]

snap = snapshots.snap
wordless = snapshots.wordless

CHUNK, N_POOL, N_UBATCH = 16, 512, 64
WINDOW = 256  # positions that a drafter remembers

# 32 blocks; a prompt is read in batches of 4 chunks, whether it is cut at a multiple of these or not
SMALL: dict[str, Any] = {
    **BY_SIXTEEN,
    "pool": N_POOL,
    "prefill": "exact",
    "tau": 1000,  # an answer scores nothing: which of two chunks comes in could be a matter of rounding
    "again": 0,
}


def n_streamed(kv: KVFlash) -> int:
    """Bytes that went through the panes so far: 0 if no prompt was read exactly."""
    return kv.sequence.reads_exactly.ctx.pane_info().n_bytes


def answer(kv: KVFlash, prompt: Any, n: int = 24) -> list[int]:
    """A further prompt, and n tokens of an answer."""
    events = kv.generate(prompt, max_tokens=n, sampling=GREEDY, append=True)
    return [e.id for e in events if isinstance(e, Token)]


def records(kv: KVFlash) -> npt.NDArray[np.uint8]:
    """All that are whole."""
    return np.stack([kv.pager.records.get(chunk) for chunk in range(kv.n_tokens // CHUNK)])


def check_answers(warm: KVFlash, cold: KVFlash, *prompts: Any) -> None:
    """The first token is chosen by the same logits, the others by such that may differ by rounding: chunks lie in other blocks,
    and sums have another order.
    """
    chosen, firsts = Chosen(0.02, relative_rms), []

    class First(Chosen):
        """Also keeps the first ones as they are."""

        def hold(self, ctx: Context, i: int, key: Hashable) -> None:
            if key == 0:
                firsts.append(ctx.logits(i))
            chosen.hold(ctx, i, key)

    ids = []
    for kv, prompt in zip((cold, warm), prompts * (3 - len(prompts)), strict=True):
        with held(First(0)):
            ids.append(answer(kv, prompt))
    assert_same(firsts[1], firsts[0])
    assert ids[1] == ids[0]
    assert chosen.n_held == len(chosen.rows) == 24
    assert np.array_equal(warm.tokens, cold.tokens)
    check_residency(warm, CHUNK)


def assert_same(got: Logits, want: Logits) -> None:
    assert want.std() > 0.1
    assert np.array_equal(got, want), f"{np.abs(got - want).max():.3g} apart"


#
# saved, and restored
#

OTHER_WAY = {
    "exact": r"its prompts were read through the pool, and here they are read exactly \(`prefill`\)",
    "pool": r"its prompts were read exactly, and here they are read through the pool \(`prefill`\)",
}


@pytest.mark.parametrize("n", [200, 1000])
@pytest.mark.parametrize("how", ["exact", "pool"])
def test_a_snapshot_of_the_other_way_to_read_is_none(opened: Open, snap: Path, how: str, n: int) -> None:
    """Even if the pool held all of it. The sequence is empty then, and goes on."""
    (other,) = OTHER_WAY.keys() - {how}
    saved, kv = opened(prefill=other), opened(prefill=how)
    read(saved, n)
    saved.save(snap)
    read(kv, 300)
    with pytest.raises(SnapshotError, match=OTHER_WAY[how]):
        kv.restore(snap)
    assert kv.n_tokens == 0
    kv.check_integrity()
    again = opened(prefill=other)
    assert again.restore(snap) == n
    check_residency(again, CHUNK)


def test_the_prefix_cache_keeps_the_ways_apart(opened: Open, tmp_path: Path) -> None:
    """Two folders of the same text: each finds its own, and a miss is a miss."""
    exact, pool = opened(), opened(prefill="pool")
    cache = PrefixCache(tmp_path, 1 << 40)
    read(exact, 960)
    first = cache.save(exact)
    assert first
    text = TOKENS[:1100]
    assert (cache.match(exact, text), cache.match(pool, text)) == (960, 0)
    assert cache.restore(pool, text) == pool.n_tokens == 0
    assert (cache.stats.hits, cache.stats.misses) == (0, 1)
    read(pool, 640)
    second = cache.save(pool)
    assert second
    assert second.parent != first.parent
    assert {entry.path for entry in cache.entries()} == {first, second}, "neither takes the place of the other"
    assert (cache.restore(exact, text), cache.restore(pool, text)) == (960, 640)
    for kv in (exact, pool):
        check_residency(kv, CHUNK)
    assert {file.path for file in cache.entries()} == {first, second}
    assert (cache.stats.hits, cache.stats.misses) == (2, 1)


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize(("name", "where", "panes"), crossed(MODELS, ["here", "elsewhere"], [1, 99]))
def test_a_warm_turn_is_the_cold_one(opened: Open, snap: Path, name: str, where: str, panes: int) -> None:
    """The rest of the prompt is read exactly: logits, rows and answer are those of a prompt that was read at once. Without codes:
    their means are of what was there when they were made, so a warm turn's are others.
    """
    how: dict[str, Any] = {"panes": panes, "policy": "qk"}
    cold, warm = opened(name, **how), opened(name, **how)
    n, end = 12 * N_UBATCH, 17 * N_UBATCH + 9
    read(warm, n)
    warm.save(snap)
    if where == "here":
        read(warm, n + 300)  # the panes, and the state, are of a longer text
        answer(warm, TOKENS[-50:])
    else:
        warm.close()
        warm = opened(name, **how)
    assert warm.restore(snap) == n
    before = n_streamed(warm)
    for kv in (cold, warm):
        read(kv, end)
    assert n_streamed(warm) > before
    assert_same(warm.logits(), cold.logits())
    np.testing.assert_array_equal(records(warm), records(cold))
    for kv in (cold, warm):
        check_residency(kv, CHUNK)
    for field in ("resident", "score"):
        np.testing.assert_array_equal(getattr(warm.residency(), field), getattr(cold.residency(), field))
    check_answers(warm, cold, TOKENS[end : end + 5])


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("name", ["qwen35", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("qwen3", "gemma4"))])
def test_turns_go_on_warm(opened: Open, tmp_path: Path, name: str) -> None:
    """Three turns, each saved to a prefix cache, from which another engine takes the next one: it is as if there were one engine."""
    kv, cache = opened(name, snapshots=True), PrefixCache(tmp_path, 1 << 40)
    answer(kv, TOKENS[: 10 * N_UBATCH])
    for turn in range(3):
        assert cache.save(kv)
        pending, asked = kv.sequence.pending, TOKENS[5000 + 200 * turn :][: 3 * N_UBATCH]
        new = opened(name, snapshots=True)
        text = np.array([*kv.tokens, pending, *asked], np.int32)
        n = cache.restore(new, text)
        assert n == kv.n_tokens > 10 * N_UBATCH
        before = n_streamed(new)
        check_answers(new, kv, asked, text[n:])
        assert n_streamed(new) > before
        new.close()
    assert (cache.stats.hits, cache.stats.misses) == (3, 0)


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("name", MODELS)
def test_a_part_that_was_read_exactly_is_restored(
    opened: Open, snap: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the chunk's end, or the checkpoint, that both texts have: the rest is read as if no more had ever been."""
    monkeypatch.setattr(checkpoints, "_CUT_EVERY", 1)  # so that both cut their last batch in the same place
    kv, cold = opened(name, snapshots=True), opened(name, snapshots=True)
    for end in (12 * N_UBATCH + CHUNK, 20 * N_UBATCH):
        read(kv, end)
    kv.save(snap)
    n = kv.restore(snap, np.concatenate([TOKENS[: 12 * N_UBATCH + 7], TOKENS[8000:8100]]))
    assert n == kv.n_tokens == 12 * N_UBATCH
    for one in (kv, cold):
        read(one, 15 * N_UBATCH)
    assert_same(kv.logits(), cold.logits())
    np.testing.assert_array_equal(records(kv), records(cold))
    check_residency(kv, CHUNK)


#
# with drafts
#

PROMPT = np.random.default_rng(3).integers(0, tiny.N_VOCAB - 2, 1100).astype(np.int32)

Pair = tuple[Path, Spec]


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path, wordless: None) -> Pair:
    """A model, and how it drafts, by features of the model's layers."""
    path, drafter = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    if request.param == "mtp":
        tiny_drafters.mtp(path)
        return path, Spec(kind="mtp", n_max=2, gate=0, window=WINDOW)
    if request.param == "eagle3":
        tiny.write("qwen3", path)
        tiny_drafters.eagle3(drafter, n_embd_target=256)
        return path, Spec(kind="eagle3", model=str(drafter), n_max=4, gate=0, window=WINDOW)
    target = request.param.removeprefix("dflash-")
    drafting.FILES[target](path)
    drafting.FILES["dflash"](drafter)
    return path, Spec(kind="dflash", model=str(drafter), n_max=4, gate=0, window=WINDOW)


KINDS = ["eagle3", "mtp", *(f"dflash-{name}" for name in MODELS)]
PAIRS = pytest.mark.parametrize("pair", KINDS, indirect=True)


class Heard:
    """What a drafter reads: where each batch began, and its tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[int, list[int]]] = []
        process = Drafts._read

        def heard(drafts: Drafts, ctx: Context, tokens: Any, pos: int) -> None:
            self.batches.append((pos, tokens.tolist()))
            process(drafts, ctx, tokens, pos)

        monkeypatch.setattr(Drafts, "_read", heard)


def batches(start: int, end: int) -> list[tuple[int, list[int]]]:
    """Those that read PROMPT[start:end], without the ones that end before the drafter's window."""
    places = [(at, min(at + N_UBATCH, end)) for at in range(start, end, N_UBATCH)]
    return [(at, PROMPT[at:to].tolist()) for at, to in places if to > end - WINDOW]


def guesses(kv: KVFlash, n: int) -> list[int]:
    """Of what follows the first n tokens of PROMPT and one more."""
    list(kv.prefill(PROMPT[kv.n_tokens : n]))
    drafts = kv.decoder.drafts
    assert drafts is not None
    drafts.begin(kv.sequence.history)
    return drafts.guess(kv.sequence.history, 7, drafts.n_max).tolist()


def rows(kv: KVFlash, chunk: int) -> Any:
    """What the pool's cells have of a chunk, as a record."""
    res = np.zeros_like(kv.pager.records.get(0))
    kv.ctx.read(chunk, res)
    return res


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize(("pair", "n"), crossed(KINDS, [1000, 17 * N_UBATCH, 1100]), indirect=["pair"])
def test_a_drafter_reads_what_an_exact_pass_computes(pair: Pair, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """And nothing else changes: logits, records, state, and what is in the pool are as without a drafter."""
    path, spec = pair
    heard = Heard(monkeypatch)
    with KVFlash.from_file(path, **SMALL) as plain, KVFlash.from_file(path, **SMALL, spec=spec) as kv:
        for one in (plain, kv):
            list(one.prefill(PROMPT[:n]))
            assert n_streamed(one) > 0
            check_residency(one, CHUNK)
        assert heard.batches == batches(0, n)
        assert_same(kv.logits(), plain.logits())
        for field in ("resident", "score", "protected"):
            np.testing.assert_array_equal(getattr(kv.residency(), field), getattr(plain.residency(), field))
        np.testing.assert_array_equal(records(kv), records(plain))
        for chunk in np.flatnonzero(kv.residency().block >= 0).tolist():
            np.testing.assert_array_equal(rows(kv, chunk), rows(plain, chunk), err_msg=f"chunk {chunk}")


@PAIRS
def test_guesses_after_an_exact_prompt_are_those_of_the_full_cache(pair: Pair) -> None:
    """After a prompt, and after a further one: what a drafter reads of the layers is bit for bit the same."""
    path, spec = pair
    found = []
    for pool in (N_POOL, "off"):
        with KVFlash.from_file(path, **{**SMALL, "pool": pool}, spec=spec) as kv:
            found.append([guesses(kv, n) for n in (1000, 1003, 1100)])
    assert found[0] == found[1]
    assert all(found[0])
