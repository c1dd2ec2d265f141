"""Run an engine on random tokens, and look at what happened to it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_kvflash import Done, KVFlash, Reselect, Sampling, Token
from pyllama_kvflash.engine import generation
from pyllama_kvflash.engine.generation import Generation
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import LAST, Context, Model, Sampler
from support import tiny
from support.oracles import ON_GPU

Logits = npt.NDArray[np.float32]
Open = Callable[..., KVFlash]

TOKENS = np.random.default_rng(5).integers(0, tiny.N_VOCAB, 20_000).astype(np.int32)
GREEDY = Sampling(temperature=0)
HOST = pytest.mark.skipif(ON_GPU, reason="what is in the host's memory without a GPU")
MODELS = ["qwen3", "qwen35", "gemma4"]

# options of small engines
BY_SIXTEEN: dict[str, Any] = {"n_ctx": 4096, "n_threads": 1, "chunk": 16, "n_batch": 64, "n_ubatch": 64, "share": 0}
_SMALL: dict[str, Any] = {"n_ctx": 16384, "n_batch": 64, "n_threads": 1, "prefill": "pool"}
LRU: dict[str, Any] = {**_SMALL, "pool": 768, "policy": "lru"}  # 12 blocks, 7 of them evictable
SCORED: dict[str, Any] = {**_SMALL, "pool": 1024, "policy": "qk", "share": 0}  # 16 blocks


#
# running
#


def feed(kv: KVFlash, end: int, size: int = 1) -> list[Event]:
    """Decode TOKENS from where the sequence is up to `end`, in batches of `size`; what happened."""
    res: list[Event] = []
    while kv.n_tokens < end:
        res += kv.decode(TOKENS[kv.n_tokens : min(kv.n_tokens + size, end)])
    return res


def logits_of(kv: KVFlash, end: int, size: int = 64) -> Logits:
    """The same; the last logits of each batch."""
    res = []
    while kv.n_tokens < end:
        feed(kv, min(kv.n_tokens + size, end), size)
        res.append(kv.logits())
    return np.array(res)


def read(kv: KVFlash, end: int) -> list[Event]:
    """The same as a prompt; what happened."""
    return list(kv.prefill(TOKENS[kv.n_tokens : end]))


def turn(run: Generation, following: Generation | None = None) -> list[int]:
    """Read a batch of a prompt, or take a step of its answer; the tokens of the answer that came. following: whose turn is next."""
    events = list(run.read()) if run.reading else run.step(following)
    return [e.id for e in events if isinstance(e, Token)]


def spell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is what follows in TOKENS, whatever the logits are; the tiny models have no vocabulary."""
    decode, ends = Context.decode, [0]

    def noted(ctx: Context, tokens: Any, pos: int, outputs: int = LAST) -> None:
        decode(ctx, tokens, pos, outputs)
        ends.append(pos + len(tokens))

    class Spelling(Sampler):
        def sample(self, ctx: Context, i: int = -1) -> int:
            super().sample(ctx, i)  # there are logits
            return int(TOKENS[ends[-1]])

    monkeypatch.setattr(Context, "decode", noted)
    monkeypatch.setattr(generation, "Sampler", Spelling)
    monkeypatch.setattr(Model, "is_eog", lambda *_: False)
    monkeypatch.setattr(Model, "piece", lambda *_, **__: b"")


def place_by_hand(kv: KVFlash, blocks: npt.NDArray[np.int32]) -> None:
    """Make the pool hold these chunks in these blocks, by the calls of the level below."""
    have = kv.ctx.blocks()[0]
    differ = np.flatnonzero(have != blocks)
    for chunk in have[differ]:
        if chunk >= 0:
            kv.ctx.drop(int(chunk))
    for block in differ:
        if blocks[block] >= 0:
            kv.ctx.page_in(int(blocks[block]), kv.pager.records.get(int(blocks[block])), int(block))


#
# looking
#


def text_of(events: list[Any]) -> str:
    return "".join(e.text for e in events if isinstance(e, Token | Done))


def reselects(events: Sequence[Event], reason: str | None = None) -> list[Reselect]:
    return [e for e in events if isinstance(e, Reselect) and reason in {None, e.reason}]


def plain(event: Event) -> Event:
    """Without times, and without the most RAM that the process has had: pinned memory raises it from run to run."""
    names = {"seconds", "score_s", "apply_s", "prefill_s", "decode_s", "reselect_s", "peak_bytes"}
    zero = {f.name: 0 for f in dataclasses.fields(event) if f.name in names}
    if isinstance(event, Done):
        stats = {f.name: 0 for f in dataclasses.fields(event.stats) if f.name in names}
        return dataclasses.replace(event, stats=dataclasses.replace(event.stats, **stats))
    return dataclasses.replace(event, **zero)


def out(kv: KVFlash) -> list[int]:
    """The chunks that are out."""
    return [int(c) for c in np.flatnonzero(~kv.residency().resident)]


def check_residency(kv: KVFlash, chunk: int = 64) -> None:
    kv.check_integrity()
    where = kv.residency()
    n = -(-kv.n_tokens // chunk)
    for field in dataclasses.fields(where):
        assert getattr(where, field.name).shape == (n,), field.name
    types = [str(getattr(where, f.name).dtype) for f in dataclasses.fields(where)]
    assert types == ["bool", "int32", "bool", "bool", "bool", "float64", "float32", "bool"]
    resident = where.resident
    assert np.array_equal(where.block >= 0, resident)
    if kv.policy != "fresh":
        assert np.array_equal(where.layers, kv.ctx.pool_info().n_layer * resident)
    assert len(set(where.block[resident])) == np.count_nonzero(resident)  # no block holds two
    assert np.all(where.block < kv.ctx.pool_info().n_block)
    assert np.array_equal(where.sealed, np.arange(n) < kv.n_tokens // chunk)
    assert np.array_equal(where.stored, where.sealed)
    assert np.all(resident[where.protected])
    assert np.all(where.protected[-4:])
    assert where.protected[0]
    stats = kv.stats()
    assert (stats.chunks, stats.resident) == (n, np.count_nonzero(resident))
    assert [kv.ctx.block_of(c) for c in range(n)] == where.block.tolist()


class Decoded:
    """Counts what a context decodes, and keeps which chunk lay in which block before it did."""

    def __init__(self, kv: KVFlash, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int]] = []  # position, tokens
        self.blocks: list[npt.NDArray[np.int32]] = []
        decode = kv.ctx.decode

        def call(tokens: Any, pos: int, outputs: int) -> None:
            self.calls.append((pos, len(tokens)))
            self.blocks.append(kv.ctx.blocks()[0])
            decode(tokens, pos, outputs)

        monkeypatch.setattr(kv.ctx, "decode", call)

    @property
    def n_tokens(self) -> int:
        return sum(n for _, n in self.calls)
