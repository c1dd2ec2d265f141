"""Several sequences in one pool: each says what it would say alone, and none takes what another must keep."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.changes import ENGINE

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.oracles import GPU_NOISE, ON_GPU, assert_same
from support.properties import CHECK
from support.rounding import n_flips
from support.runs import LRU, Logits, Open

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import HostMemoryError, UsageError
from pyllama_kvflash.native import Context, Model
from pyllama_kvflash.policy import Blocks, Ledger, Lru, make_room
from pyllama_kvflash.policy.sizing import PoolShape
from pyllama_kvflash.pool.residency import resident

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

N_SEQ = 4
TOKENS = np.random.default_rng(11).integers(0, tiny.N_VOCAB, (N_SEQ, 8000)).astype(np.int32)
SMALL: dict[str, Any] = {**LRU, "n_ctx": 8192, "pool": 4096, "n_parallel": N_SEQ}
TIGHT: dict[str, Any] = {"chunk": 16, "pool": 768, "n_batch": 32}  # 48 blocks: 12 each


def feed(kv: KVFlash, n: int, size: int = 64) -> Logits:
    """n more of a sequence's own tokens, in batches; the last logits of each."""
    end, res = kv.n_tokens + n, []
    while kv.n_tokens < end:
        kv.decode(TOKENS[kv.seq, kv.n_tokens : min(kv.n_tokens + size, end)])
        res.append(kv.logits())
    return np.array(res)


def step(kv: KVFlash, *seqs: int) -> Logits:
    """One more token of each of several sequences at once; their logits, (len(seqs), n_vocab)."""
    kv.decode_each({i: int(TOKENS[i, kv.sequences[i].n_tokens]) for i in seqs})
    return np.array([kv.sequences[i].logits() for i in seqs])


def check(kv: KVFlash) -> None:
    for s in kv.sequences:
        s.check_integrity()
    info = kv.ctx.pool_info()
    assert info.n_block_free == kv.pager.ledger.n_free
    assert sum(len(resident(s.pager.ledger)) for s in kv.sequences) + info.n_block_free == info.n_block


#
# the rule by which blocks are given up
#


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 100)), min_size=1, max_size=60),
    n_seq=st.integers(1, 4),
    extra=st.integers(0, 12),
)
@CHECK
def test_blocks_are_shared_fairly(steps: list[tuple[int, int]], n_seq: int, extra: int) -> None:
    """Any order of batches finds room in a pool of the least size, and nobody gives to one who holds more."""
    n_block = PoolShape(16, 1, 4, 0, n_seq).floor(100) // 16 + extra
    blocks = Blocks(n_block)
    all_ = [Ledger(blocks, 16) for _ in range(n_seq)]
    for i, n in steps:
        ledger = all_[i % n_seq]
        plan = make_room(ledger, ledger.new_chunks(n))
        after = ledger.n_held - len(plan.drops) + ledger.new_chunks(n)
        for j, chunks in ((i % n_seq, plan.drops), *plan.taken):
            assert not all_[j].protected()[list(chunks)].any()
            if all_[j] is not ledger:
                assert all_[j].n_held - len(chunks) >= after - 1, "it gave to one who holds more"
            for chunk in chunks:
                all_[j].drop(chunk)
        ledger.write(n)
        for chunk in ledger.to_store():
            ledger.mark_stored(chunk)
        for each in all_:
            each.check_integrity()
        assert blocks.n_free + sum(each.n_resident for each in all_) == n_block


#
# exact
#


@pytest.mark.parametrize(("name", "cache"), [("qwen3", "q8_0"), ("qwen35", "f16"), ("gemma4", "f16")])
def test_four_at_once_are_what_the_stock_cache_says(opened: Open, name: str, cache: str) -> None:
    """Prompts of different lengths, then one token of each in a batch: bit for bit, and what each says alone."""
    runs = []
    for pool in (4096, "off"):
        kv = opened(name, pool=pool, type_k=cache, type_v=cache)
        prompts = [feed(s, 64 * (3 + i)) for i, s in enumerate(kv.sequences)]  # whole chunks lie alike in both
        runs.append([*prompts, *(step(kv, 0, 1, 2, 3) for _ in range(40))])
    for got, want in zip(*runs, strict=True):
        assert_same(np.atleast_2d(got), np.atleast_2d(want))
    check(opened(name))
    alone = opened(name, pool="off", type_k=cache, type_v=cache, n_parallel=1)
    want = np.concatenate([feed(alone, 64 * 3), feed(alone, 40, size=1)])
    got = np.concatenate([runs[0][0], np.array([each[0] for each in runs[0][N_SEQ:]])])
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < (GPU_NOISE if ON_GPU else 5e-3), (
        "of another sequence"
    )


class Mirror:
    """A stock context that loses the same positions of the same sequences at the same times."""

    def __init__(self, kv: KVFlash, model: Model) -> None:
        self.kv = kv
        self.ctx = Context(model, n_ctx=8192, n_batch=64, n_ubatch=64, n_seq=N_SEQ)
        self.held: list[set[int]] = [set() for _ in range(N_SEQ)]
        self.n_drops = 0

    def forget(self) -> None:
        """What left the pool in the last batch, before which it left."""
        for i, s in enumerate(self.kv.sequences):
            now = resident(s.pager.ledger)
            for chunk in sorted(self.held[i] - now):
                self.ctx.sequence(i).attn_seq_rm(chunk * 16, (chunk + 1) * 16)
                self.n_drops += 1
            self.held[i] = now

    def feed(self, seq: int, pos: int, n: int) -> Logits:
        """A batch of one sequence."""
        self.forget()
        ctx = self.ctx.sequence(seq)
        ctx.decode(TOKENS[seq, pos : pos + n], pos)
        return ctx.logits()

    def step(self, pos: list[int]) -> Logits:
        """A token of each."""
        self.forget()
        self.ctx.decode_each(range(N_SEQ), pos, [TOKENS[i, p : p + 1] for i, p in enumerate(pos)])
        return np.array([self.ctx.sequence(i).logits() for i in range(N_SEQ)])


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4"])
def test_evictions_of_all(opened: Open, tiny_model: Callable[[str], Model], name: str) -> None:
    """The pool holds a fraction of four sequences: what each says is what the stock cache says without the same chunks.

    Rows lie elsewhere there, which changes the order of sums and nothing else.
    """
    kv = opened(name, **TIGHT)
    mirror = Mirror(kv, tiny_model(name))
    got, want = [], []
    for round_ in range(5):
        for s in kv.sequences:
            for _ in range(2 + s.seq):
                pos = s.n_tokens
                got.append(feed(s, 32)[0])
                want.append(mirror.feed(s.seq, pos, 32))
        for _ in range(15 + round_):
            places = [s.n_tokens for s in kv.sequences]
            got.extend(step(kv, 0, 1, 2, 3))
            want.extend(mirror.step(places))
    mirror.ctx.close()
    check(kv)
    assert mirror.n_drops > 60
    a, b = np.array(got), np.array(want)
    assert np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) < 5e-3
    assert n_flips(a, b, tie=0.05 * float(b.std())) <= 0.02 * len(b)


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "gemma4"])
def test_queries_are_each_sequence_s_own(opened: Open, name: str) -> None:
    """The tap of a batch of several: each one's are those that it would have alone."""
    kv, alone = opened(name, policy="qk"), opened(name, policy="qk", n_parallel=1)
    for s in kv.sequences:
        feed(s, 100)
    step(kv, 0, 1, 2, 3)
    for s in kv.sequences:
        alone.clear()
        for part in np.split(TOKENS[s.seq, :101], [64, 100]):
            alone.decode(part)
        for mine, its in zip(s.queries(), alone.queries(), strict=True):
            assert np.abs(mine - its).max() < 0.02 * np.abs(its).max()


#
# fair
#


def test_a_long_one_leaves_the_others_their_share(opened: Open) -> None:
    kv = opened(**TIGHT)
    short = kv.sequences[1:]
    for s in short:
        feed(s, 16 * 12, 32)
    before = [resident(s.pager.ledger) for s in short]
    feed(kv, 3000, 32)
    assert [resident(s.pager.ledger) for s in short] == before, "they hold no more than their share: 12 of 48 blocks"
    assert kv.pager.ledger.n_held == 12
    check(kv)


#
# what cannot be
#


def test_refusals(opened: Open) -> None:
    kv = opened()
    feed(kv.sequences[0], 10)
    feed(kv.sequences[1], 10)
    with pytest.raises(UsageError, match="sequence 0 was not in the last batch"):
        kv.logits()
    with pytest.raises(UsageError, match="there is no sequence 4: `n_parallel` is 4"):
        kv.decode_each({4: 1})
    with pytest.raises(UsageError, match="there is no sequence 4: the context has 4"):
        kv.ctx.sequence(4)
    with pytest.raises(UsageError, match="`n_parallel` is 0, and must be from 1 to 64"):
        opened(n_parallel=0)
    with pytest.raises(UsageError, match="`n_parallel` is 65, and must be from 1 to 64"):
        opened(n_parallel=65)
    with pytest.raises(UsageError, match="`policy` is one scorer, for `n_parallel` = 4 sequences"):
        opened(policy=Lru())
    assert [s.n_tokens for s in kv.sequences] == [10, 10, 0, 0]


def test_host_memory_is_limited_for_all_together(opened: Open) -> None:
    record = opened(**TIGHT).ctx.pool_info().record_bytes
    kv = opened(**TIGHT, host_limit=20 * record)
    for s in kv.sequences:
        feed(s, 16 * 5, 16)
    with pytest.raises(HostMemoryError, match="21 chunk records take"):
        feed(kv, 16, 16)
    assert kv.n_tokens == 80
    kv.sequences[3].clear()
    feed(kv, 16, 16)
    check(kv)
