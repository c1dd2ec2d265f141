"""Turns of a conversation that is read exactly: saved and restored, with drafts, and several at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import drafting, snapshots, tiny, tiny_drafters
from support.drafting import width_noise
from support.oracles import ON_GPU
from support.rounding import Chosen, held
from support.runs import GREEDY, MODELS, TOKENS, Logits, Open, check_residency, read

from pyllama_kvflash import KVFlash, Token
from pyllama_kvflash.engine.speculation import Drafts
from pyllama_kvflash.errors import SnapshotError
from pyllama_kvflash.options import Spec
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = [pytest.mark.native, pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order")]

snap = snapshots.snap
wordless = snapshots.wordless

CHUNK, N_POOL, N_UBATCH = 16, 512, 64

# 32 blocks; a prompt is read in batches of 4 chunks, whether it is cut at a multiple of these or not
SMALL: dict[str, Any] = {
    "n_ctx": 4096,
    "n_threads": 1,
    "pool": N_POOL,
    "chunk": CHUNK,
    "n_batch": N_UBATCH,
    "n_ubatch": N_UBATCH,
    "prefill": "exact",
    "share": 0,
}


def n_streamed(kv: KVFlash) -> int:
    """Bytes that went through the panes so far: 0 if no prompt was read exactly."""
    return kv.sequence.reads_exactly.ctx.pane_info().n_bytes


def answer(kv: KVFlash, prompt: Any, n: int = 24) -> list[int]:
    """A further prompt, and n tokens of an answer."""
    events = kv.generate(prompt, max_tokens=n, sampling=GREEDY, append=True)
    return [e.id for e in events if isinstance(e, Token)]


def assert_same(got: Logits, want: Logits) -> None:
    assert want.std() > 0.1
    assert np.array_equal(got, want), f"{np.abs(got - want).max():.3g} apart"


#
# saved, and restored
#

OTHER_WAY = {
    "exact": r"its prompts were read through the pool, and here they are read exactly \(--kvflash-prefill\)",
    "pool": r"its prompts were read exactly, and here they are read through the pool \(--kvflash-prefill\)",
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


def test_whoever_may_choose_can_use_what_the_chosen_way_has(opened: Open, snap: Path) -> None:
    """`auto` reads exactly where there is memory, and its snapshots are those of `exact`; the number of panes is no matter."""
    kv = opened(prefill="auto", panes=1)
    read(kv, 1000)
    kv.save(snap)
    assert opened(prefill="exact", panes=3).restore(snap) == 1000
    with pytest.raises(SnapshotError, match=OTHER_WAY["pool"]):
        opened(prefill="pool").restore(snap)


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
@pytest.mark.parametrize("panes", [1, 99])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("name", MODELS)
def test_a_warm_turn_is_the_cold_one(opened: Open, snap: Path, name: str, where: str, panes: int) -> None:
    """The rest of the prompt is read exactly: logits, rows and answer are those of a prompt that was read at once."""
    cold, warm = opened(name, panes=panes), opened(name, panes=panes)
    n, end = 12 * N_UBATCH, 17 * N_UBATCH + 9
    read(warm, n)
    warm.save(snap)
    if where == "here":
        read(warm, n + 300)  # the panes, and the state, are of a longer text
        answer(warm, TOKENS[-50:])
    else:
        warm.close()
        warm = opened(name, panes=panes)
    assert warm.restore(snap) == n
    before = n_streamed(warm)
    for kv in (cold, warm):
        read(kv, end)
    assert n_streamed(warm) > before
    assert_same(warm.logits(), cold.logits())
    for chunk in range(end // CHUNK):
        np.testing.assert_array_equal(warm.pager.records.get(chunk), cold.pager.records.get(chunk))
    for kv in (cold, warm):
        check_residency(kv, CHUNK)
    for field in ("state", "score"):
        np.testing.assert_array_equal(getattr(warm.residency(), field), getattr(cold.residency(), field))
    assert answer(warm, []) == answer(cold, [])
    check_residency(warm, CHUNK)


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("name", MODELS)
def test_turns_go_on_warm(opened: Open, tmp_path: Path, name: str) -> None:
    """Three turns through a prefix cache, each by another engine, and in one that was never closed: the same answers."""
    kv, cache = opened(name, snapshots=True), PrefixCache(tmp_path, 1 << 40)
    text = TOKENS[: 10 * N_UBATCH]
    for turn in range(3):
        asked = TOKENS[5000 + 200 * turn :][: 3 * N_UBATCH]
        text = np.concatenate([text, asked]).astype(np.int32)
        new = opened(name, snapshots=True)
        n = cache.restore(new, text)
        assert n == (kv.n_tokens if turn else 0)
        want, got = answer(kv, text[kv.n_tokens :]), answer(new, text[n:])
        assert got == want
        assert np.array_equal(new.tokens, kv.tokens)
        assert_same(new.logits(), kv.logits())
        assert cache.save(new)
        check_residency(new, CHUNK)
        text = new.tokens
        new.close()
    assert (cache.stats.hits, cache.stats.misses) == (2, 1)


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("name", MODELS)
def test_a_part_that_was_read_exactly_is_restored(opened: Open, snap: Path, name: str) -> None:
    """Up to the chunk's end, or the checkpoint, that both texts have: the rest is read as if no more had ever been."""
    kv, cold = opened(name, snapshots=True), opened(name)
    for end in (12 * N_UBATCH + CHUNK, 20 * N_UBATCH):
        read(kv, end)
    kv.save(snap)
    n = kv.restore(snap, np.concatenate([TOKENS[: 12 * N_UBATCH + 7], TOKENS[8000:8100]]))
    assert n == kv.n_tokens == 12 * N_UBATCH
    for one in (kv, cold):
        read(one, 15 * N_UBATCH)
    assert_same(kv.logits(), cold.logits())
    assert answer(kv, []) == answer(cold, [])
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
        return path, Spec(kind="mtp", n_max=2, gate=0)
    if request.param == "eagle3":
        tiny.write("qwen3", path)
        tiny_drafters.eagle3(drafter, n_embd_target=256)
        return path, Spec(kind="eagle3", model=str(drafter), n_max=4, gate=0)
    target = request.param.removeprefix("dflash-")
    drafting.FILES[target](path)
    drafting.FILES["dflash"](drafter)
    return path, Spec(kind="dflash", model=str(drafter), n_max=4, gate=0)


PAIRS = pytest.mark.parametrize("pair", ["eagle3", "mtp", *(f"dflash-{name}" for name in MODELS)], indirect=True)


class Heard:
    """What a drafter reads: where each batch began, and its tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[int, list[int]]] = []
        process = Drafts._read

        def heard(drafts: Drafts, tokens: Any, pos: int) -> None:
            self.batches.append((pos, tokens.tolist()))
            process(drafts, tokens, pos)

        monkeypatch.setattr(Drafts, "_read", heard)


@pytest.mark.parametrize("n", [1000, 17 * N_UBATCH, 1100])
@PAIRS
def test_a_drafter_reads_the_end_and_nothing_else_changes(pair: Pair, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Logits, records, what is resident: as without a drafter; the rows of the pool, too, whatever was decoded again."""
    path, spec = pair
    heard = Heard(monkeypatch)
    with (
        KVFlash.from_file(path, **SMALL) as plain,
        KVFlash.from_file(path, **SMALL, spec=spec) as kv,
    ):
        for one in (plain, kv):
            list(one.prefill(PROMPT[:n]))
            one.check_integrity()
        first = (n - 1) // CHUNK * CHUNK - 3 * CHUNK  # the tail is four chunks
        assert heard.batches == [(first, PROMPT[first:n].tolist())]
        assert n_streamed(kv) > 0
        for field in ("state", "score", "protected"):
            np.testing.assert_array_equal(getattr(kv.residency(), field), getattr(plain.residency(), field))
        for chunk in range(n // CHUNK):
            np.testing.assert_array_equal(kv.pager.records.get(chunk), plain.pager.records.get(chunk))
        for chunk in np.flatnonzero(kv.residency().block >= 0):
            np.testing.assert_array_equal(rows(kv, int(chunk)), rows(plain, int(chunk)))
        assert kv.ctx.save_partial() == plain.ctx.save_partial()
        for one in (plain, kv):
            check_residency(one, CHUNK)


def rows(kv: KVFlash, chunk: int) -> Any:
    """The record that the pool's cells would give, of what is written in them."""
    res = np.zeros_like(kv.pager.records.get(0))
    kv.ctx.read(chunk, res)
    return res


@pytest.mark.parametrize("n", [1000, 1100])
@PAIRS
def test_drafts_after_an_exact_prompt_change_no_token(pair: Pair, n: int) -> None:
    """The first token is chosen by the same logits, bit for bit; the others by those that a batch of another width gives."""
    path, spec = pair
    chosen = Chosen(width_noise(path, spec.n_max + 1, SMALL))
    found = []
    for how in ({}, {"spec": spec}):
        with KVFlash.from_file(path, **SMALL, **how) as kv, held(chosen):
            ids, first = [], None
            for event in kv.generate(PROMPT[:n], max_tokens=60, sampling=GREEDY):
                ids += [event.id] if isinstance(event, Token) else []
            ids += answer(kv, PROMPT[:200], 20) if not how else answer(kv, PROMPT[:200], 20)
            kv.check_integrity()
            check_residency(kv, CHUNK)
            found.append((ids, first, kv.stats()))
    assert found[0][0] == found[1][0]
    assert len(found[0][0]) == 80
