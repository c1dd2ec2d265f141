"""Prompts that are read exactly: what the full cache says, bit for bit, and a pool chosen by what the last tokens attend to."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import ENGINE, crossed
from support.cuts import cut_off_at_every_line
from support.oracles import ON_GPU
from support.runs import TOKENS, Logits, Open, check_residency, feed, read, reselects

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import HostMemoryError, NativeError, PoolError, UnsupportedError, UsageError
from pyllama_kvflash.fingerprint import fingerprint
from pyllama_kvflash.loading import memory
from pyllama_kvflash.native import LAST, Context, PoolParams, Record, devices
from pyllama_kvflash.options import Options
from pyllama_kvflash.pool.step import Part, advance_exactly

pytestmark = [
    pytest.mark.native,
    pytest.mark.sampled(ENGINE),
    pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order"),
]

CHUNK, N_POOL, N_UBATCH = 16, 256, 128
SINKS, TAIL = 1, 4

# 16 blocks; one layer on the device at a time
SMALL: dict[str, Any] = {"n_ctx": 4096, "n_threads": 1, "pool": N_POOL, "chunk": CHUNK, "n_batch": CHUNK}
SMALL |= {"n_ubatch": N_UBATCH, "prefill": "exact", "panes": 1, "share": 0}
FULL: dict[str, Any] = {"pool": "off", "n_batch": N_UBATCH}

MODELS = ["qwen3", "qwen35", "gemma4", "deepseek2"]
DENSE = ["qwen3", "deepseek2"]
CACHES: dict[str, dict[str, Any]] = {
    "f16": {"flash_attn": "on"},
    "f16-nofa": {"flash_attn": "off"},
    "q8_0": {"flash_attn": "on", "type_k": "q8_0", "type_v": "q8_0"},
}


def n_streamed(kv: KVFlash) -> int:
    """Bytes that went through the panes so far: 0 if no prompt was read exactly."""
    return kv.sequence.reads_exactly.ctx.pane_info().n_bytes


def prompt(kv: KVFlash, n: int) -> Logits:
    """The logits after the next n of TOKENS, read as a prompt."""
    read(kv, kv.n_tokens + n)
    return kv.logits()


def assert_same(got: Logits, want: Logits) -> None:
    assert np.isfinite(want).all()
    assert want.std() > 0.1
    assert np.array_equal(got, want), f"{np.abs(got - want).max():.3g} apart"


#
# the full cache's logits
#


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize(("name", "cache"), crossed(MODELS, CACHES))
def test_prompts_in_parts(opened: Open, name: str, cache: str) -> None:
    """4 to 6 times the pool; parts of many batches, of one that is cut anywhere, and of a token."""
    kv, full = opened(name, **CACHES[cache]), opened(name, **CACHES[cache], **FULL)
    for n in (1050, 65, 1, 300, CHUNK, 155):
        before = n_streamed(kv)
        assert_same(prompt(kv, n), prompt(full, n))
        assert n_streamed(kv) > before
        check_residency(kv, CHUNK)
    assert len(kv.residency().resident) * CHUNK > 6 * N_POOL


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"panes": 2}),
        ("qwen3", {"panes": 99}),
        ("qwen3", {"panes": 0}),
        ("qwen3", {"chunk": 64, "pool": 768}),
        ("qwen3", {"policy": "lru"}),
        *((name, {"n_batch": N_UBATCH, "pool": 512}) for name in MODELS),
    ],
)
def test_panes_chunks_batches_and_policies(opened: Open, name: str, options: dict[str, Any]) -> None:
    kv, full = opened(name, **options), opened(name, **FULL)
    for n in (1000, 333):
        assert_same(prompt(kv, n), prompt(full, n))
        check_residency(kv, kv.options.chunk)


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_prompt_that_fits_is_read_through_the_pool(opened: Open, name: str) -> None:
    """The first one that does not fit is read exactly, all of it. What is there already went through the pool."""
    kv, full = opened(name), opened(name, **(FULL | {"n_batch": CHUNK, "n_ubatch": CHUNK}))
    for n in (100, 1, 155):
        assert_same(prompt(kv, n), prompt(full, n))
    assert (kv.n_tokens, n_streamed(kv)) == (N_POOL, 0)
    prompt(kv, 1)
    assert n_streamed(kv) > 0
    check_residency(kv, CHUNK)


def step(kv: KVFlash, n: int) -> None:
    """An answer of n tokens, through the pool."""
    feed(kv, kv.n_tokens + n)
    assert np.isfinite(kv.logits()).all()
    check_residency(kv, CHUNK)


@pytest.mark.parametrize("name", MODELS)
def test_answers_and_further_prompts(opened: Open, name: str) -> None:
    """An answer goes through the pool, and a prompt after it is read exactly; a cleared sequence begins anew."""
    kv, full = opened(name), opened(name, **FULL)
    prompt(kv, 1100)
    for n_answer, n_prompt in ((40, 90), (CHUNK - 1, 1), (1, 300)):
        step(kv, n_answer)
        before = n_streamed(kv)
        assert np.isfinite(prompt(kv, n_prompt)).all()
        assert n_streamed(kv) > before
        check_residency(kv, CHUNK)
    kv.clear()
    kv.check_integrity()
    assert_same(prompt(kv, 900), prompt(full, 900))
    check_residency(kv, CHUNK)


@pytest.mark.parametrize("n_kept", [700, 704, 1099])
@pytest.mark.parametrize("name", DENSE)
def test_rollback(opened: Open, name: str, n_kept: int) -> None:
    """What was decoded through the pool is gone, and its rows in the panes, too, whoever reads them next."""
    kv, full = opened(name, panes=99), opened(name, **FULL)
    assert_same(prompt(kv, 1100), prompt(full, 1100))
    step(kv, 30)
    prompt(kv, 200)
    for each in (kv, full):
        each.rollback(n_kept)
        list(each.prefill(TOKENS[3000:3400]))
    assert_same(kv.logits(), full.logits())
    check_residency(kv, CHUNK)


def logits_of_a_large_pool(kv: KVFlash, n: int) -> Logits:
    """What the next n tokens say in a pool that is large enough, into which the records of all chunks are put."""
    held = [kv.pager.records.get(c) for c in range(kv.n_tokens // CHUNK)]
    if kv.n_tokens % CHUNK:
        held.append(np.zeros_like(held[0]))
        kv.ctx.read(kv.n_tokens // CHUNK, held[-1])
    params = PoolParams(n_pool=1024, n_chunk=CHUNK, fingerprint=fingerprint(kv.model.path))
    sizes: dict[str, Any] = {"n_ctx": kv.options.n_ctx, "n_batch": N_UBATCH, "n_ubatch": N_UBATCH}
    with Context(kv.model, flash_attn=kv.options.flash_attn, pool=params, **sizes) as large:
        for c, record in enumerate(held):
            large.page_in(c, record, c)
        for at in range(kv.n_tokens, kv.n_tokens + n, N_UBATCH):
            large.decode(TOKENS[at : min(at + N_UBATCH, kv.n_tokens + n)], at)
        return large.logits()


@pytest.mark.parametrize("n_tail", [1, 10, CHUNK])
@pytest.mark.parametrize("panes", [1, 99])
def test_prompt_after_an_answer_reads_the_rows_that_are_there(opened: Open, n_tail: int, panes: int) -> None:
    kv = opened(panes=panes)
    prompt(kv, 600)
    feed(kv, 640 + n_tail)
    want = logits_of_a_large_pool(kv, 178)
    assert_same(prompt(kv, 178), want)


@pytest.mark.parametrize("n_kept", [0, 300, 304])
def test_other_rows_in_place_of_those_that_were_read(opened: Open, n_kept: int) -> None:
    """They went through the pool, after a rollback, to where the panes have the old ones."""
    kv = opened(panes=99)
    prompt(kv, 350)
    kv.rollback(n_kept)
    for token in TOKENS[1000 : 1000 + 360 - n_kept]:
        kv.decode([token])
    want = logits_of_a_large_pool(kv, 178)
    assert_same(prompt(kv, 178), want)


def by_turns(first: KVFlash, fulls: list[KVFlash], check: Callable[[Logits, Logits], object]) -> None:
    """Two sequences read other tokens, a part of one after a part of the other."""
    for n in (700, 133, 1, 200):
        for kv, full, shift in zip(first.sequences, fulls, (0, 5000), strict=True):
            tokens = TOKENS[shift + kv.n_tokens :][:n]
            list(kv.prefill(tokens))
            list(full.prefill(tokens))
            check(kv.logits(), full.logits())
            kv.check_integrity()


@pytest.mark.parametrize(("name", "panes"), crossed(["qwen3", "qwen35", "deepseek2"], [1, 99]))
def test_two_sequences_by_turns(opened: Open, name: str, panes: int) -> None:
    """They share the panes, and each says what it would alone."""
    first = opened(name, n_parallel=2, pool=2 * N_POOL, panes=panes)
    fulls = [opened(name, **FULL) for _ in range(2)]
    by_turns(first, fulls, assert_same)
    first.decode_each({0: 1, 1: 2})
    first.sequences[1].clear()
    assert np.isfinite(prompt(first, 100)).all()
    fulls[1].clear()
    assert_same(prompt(first.sequences[1], 700), prompt(fulls[1], 700))


def assert_close(got: Logits, want: Logits) -> None:
    """But for rounding; a chunk that is lost makes 0.05."""
    apart = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert apart < 0.02


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "laguna-swa"])
def test_two_windows_of_the_size_of_the_pools(opened: Open, name: str) -> None:
    """The pool's batches are as large as those of the exact pass, and so are its windows."""
    first = opened(name, n_parallel=2, n_batch=N_UBATCH, pool=4 * N_POOL)
    by_turns(first, [opened(name, **FULL) for _ in range(2)], assert_close)


#
# what the pool holds then
#


def attention(kv: KVFlash, n_query: int) -> npt.NDArray[np.float64]:
    """What each of the last tokens attends to, by its query and all keys of the records: (n_query, n_layer, n_tokens), summed
    over heads.
    """
    n = kv.n_tokens
    held = [kv.pager.records.get(c) for c in range(n // CHUNK)]
    if n % CHUNK:
        held.append(np.zeros_like(held[0]))
        kv.ctx.read(n // CHUNK, held[-1])
    res = []
    for back in reversed(range(n_query)):
        asked = zip(kv.ctx.queries(back), kv.ctx.tapped(), kv.ctx.query_scales(), strict=True)
        for q, layer, scale in asked:
            keys = np.concatenate([rows_of(record, layer) for record in held])[: n - back]
            keys = np.repeat(keys, layer.n_head // keys.shape[1], axis=1)
            e = np.einsum("hd,phd->hp", q.astype(np.float64), keys) * scale
            p = np.exp(e - e.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            res.append(np.pad(p.sum(0), (0, back)))
    return np.array(res).reshape(n_query, -1, n)


def rows_of(record: npt.NDArray[np.uint8], layer: Any) -> npt.NDArray[np.float64]:
    """The keys of a chunk whose cache is f16, (positions, heads, d); its head need not say that they are all written."""
    part = record[layer.offs_k : layer.offs_k + layer.size_k].view(np.float16)
    return part.reshape(CHUNK, -1, layer.n_embd_head_k).astype(np.float64)


def shares(p: npt.NDArray[np.float64], n_head: int) -> npt.NDArray[np.float64]:
    """Each chunk's share of that attention, (n_chunk,): of several queries the largest of each layer counts, and half of what
    lies at a border counts for the chunk beyond it.
    """
    pieces = np.pad(p, ((0, 0), (0, 0), (0, -p.shape[2] % CHUNK))).reshape(*p.shape[:2], -1, 4, CHUNK // 4).sum(4)
    whole = pieces.sum(3).max(0).sum(0)
    first, last = (pieces[..., i].max(0).sum(0) / 2 for i in (0, 3))
    res = whole.copy()
    res[:-1] = np.maximum(res[:-1], first[1:])
    res[1:] = np.maximum(res[1:], last[:-1])
    scores: npt.NDArray[np.float64] = res / n_head
    return scores


@pytest.mark.parametrize(("name", "n"), crossed(MODELS, [1200, 1209, 1215]))
def test_pool_is_chosen_by_what_the_last_tokens_attend_to(opened: Open, name: str, n: int) -> None:
    """Sinks, tail, and of the others those with the largest shares, computed from all keys of the records."""
    kv = opened(name, policy="qk", flash_attn="on")
    events = read(kv, n)
    p = attention(kv, 4)
    n_chunk = -(-n // CHUNK)
    mass = kv.sequence.attended(4)
    by_piece = np.pad(p, ((0, 0), (0, 0), (0, -n % (CHUNK // 4)))).reshape(*p.shape[:2], -1, CHUNK // 4).sum(3)
    assert np.allclose(mass[..., : by_piece.shape[2]], by_piece, atol=5e-3)
    assert np.all(mass[..., by_piece.shape[2] :] == 0)

    want = shares(p, sum(layer.n_head for layer in kv.ctx.tapped()))
    chosen = reselects(events, "question")[-1]
    scores = np.array([np.nan if s is None else s for s in chosen.scores])
    candidates = ~np.isnan(scores)
    where = kv.residency()
    assert np.array_equal(candidates, ~where.protected)
    assert np.flatnonzero(where.protected).tolist() == [*range(SINKS), *range(n_chunk - TAIL, n_chunk)]
    assert np.allclose(scores[candidates], want[candidates], atol=2e-3)

    resident = where.resident
    assert np.all(resident[where.protected])
    assert resident.sum() == N_POOL // CHUNK - 1  # a block is left free for the answer
    assert want[resident & candidates].min() >= want[~resident].max() - 2e-3
    assert want[resident & candidates].min() > np.median(want[candidates])  # the shares differ


@pytest.mark.parametrize("policy", ["qk", "lru", "qk-cos"])
def test_pins_stay(opened: Open, policy: str) -> None:
    """Those that were read, and those of the prompt itself."""
    kv = opened(policy=policy, pins=((100, 101), (900, 950)), pool=2 * N_POOL)
    read(kv, 700)
    kv.pin(300, 310)
    read(kv, 1500)
    where = kv.residency()
    pinned = [100 // CHUNK, 300 // CHUNK, *range(900 // CHUNK, -(-950 // CHUNK))]
    assert np.all(where.protected[pinned])
    assert np.all(where.resident[pinned])
    check_residency(kv, CHUNK)


def test_pool_is_as_good_as_new(opened: Open) -> None:
    """An answer sees rows that are the full cache's: with all chunks back, a token says what it says there, but for rounding."""
    kv, full = opened(pool=2048), opened(**FULL)
    kv.pager.shared.confine(N_POOL)
    prompt(kv, 1000)
    prompt(full, 1000)
    assert np.sum(~kv.residency().resident) > 0
    kv.pager.shared.confine(2048)
    kv.pager.page_in_all()
    for _ in range(3):
        feed(kv, kv.n_tokens + 1)
        feed(full, full.n_tokens + 1)
        assert_close(kv.logits(), full.logits())


#
# what goes wrong
#


@pytest.mark.parametrize("value", ["", "exactly", "Exact", "off", None, 1])
def test_bad_prefill(value: Any) -> None:
    with pytest.raises(UsageError, match="`prefill`"):
        Options(prefill=value)


@pytest.mark.parametrize("value", [-1, (1 << 30) + 1])
def test_bad_panes(value: int) -> None:
    with pytest.raises(UsageError, match=rf"`panes` .*{value:,}"):
        Options(panes=value)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices with a MiB of free memory."""
    found = [replace(d, free=1 << 20) for d in devices()]
    monkeypatch.setattr(memory, "devices", lambda: found)


WORDS = (
    r"an exact pass with 1 panes of 4,096 tokens takes [\d.]+ GiB on \S+, and [\d.]+ GiB are free: use a smaller `n_ctx`, a"
    r" smaller cache type \(`type_k`, `type_v`\), or `prefill` pool"
)


@pytest.mark.usefixtures("no_room")
def test_panes_that_do_not_fit(opened: Open) -> None:
    """One sentence, with the way out; with `auto` a warning, and the pool is read through."""
    with pytest.raises(NativeError, match=rf"^{WORDS}$"):
        opened()
    kv, through = opened(prefill="auto"), opened(prefill="pool")
    assert len(kv.warnings) == 1
    assert kv.warnings[0].startswith("prompts are read through the pool: an exact pass with 1 panes")
    with pytest.raises(UsageError, match="prompts are read through the pool"):
        _ = kv.sequence.reads_exactly
    assert_same(prompt(kv, 600), prompt(through, 600))
    check_residency(kv, CHUNK)


def test_context_that_cannot_be_made(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is in the sentence; with `auto`, in the warning."""

    def refused(*_: object, **__: object) -> None:
        raise UnsupportedError("this cannot be streamed")

    monkeypatch.setattr("pyllama_kvflash.loading.panes.ExactContext", refused)
    words = (
        r"no exact pass over 4,096 tokens in batches of 128 can be made: this cannot be streamed; use a smaller `n_ctx`"
    )
    with pytest.raises(UnsupportedError, match=words):
        opened()
    kv = opened(prefill="auto")
    assert len(kv.warnings) == 1
    assert "this cannot be streamed" in kv.warnings[0]
    prompt(kv, 400)
    check_residency(kv, CHUNK)


def test_prompt_that_does_not_fit_the_context(opened: Open) -> None:
    """Nothing has happened; what fits goes on."""
    kv, full = opened(n_ctx=1024), opened(n_ctx=1024, **FULL)
    prompt(kv, 600)
    prompt(full, 600)
    with pytest.raises(UsageError, match="do not fit the context"):
        list(kv.prefill(TOKENS[600:1025]))
    assert_same(prompt(kv, 424), prompt(full, 424))
    check_residency(kv, CHUNK)


def test_host_memory_that_does_not_suffice(opened: Open) -> None:
    """A prompt whose records would not fit is refused before it begins."""
    kv, full = opened(host_limit=1 << 20), opened(**FULL)
    with pytest.raises(HostMemoryError):
        prompt(kv, 3000)
    kv.check_integrity()
    assert kv.n_tokens == 0
    assert_same(prompt(kv, 300), prompt(full, 300))


def test_pins_that_leave_no_block(opened: Open) -> None:
    kv, full = opened(), opened(**FULL)
    prompt(kv, 500)
    prompt(full, 500)
    kv.pager.ledger.pins |= set(range(100))  # behind the engine, which would not allow it
    with pytest.raises(PoolError):
        prompt(kv, 300)
    kv.pager.ledger.pins.clear()
    n = 900 - kv.n_tokens
    assert_same(prompt(kv, n), prompt_to(full, kv.n_tokens - n, 900))
    check_residency(kv, CHUNK)


def prompt_to(full: KVFlash, cut: int, end: int) -> Logits:
    """The same batches: up to where the other was cut off, then to the end."""
    read(full, cut)
    return prompt(full, end - full.n_tokens)


#
# cut off
#

N_BEGUN = (
    261  # more than the pool holds; a batch of a chunk's size fills the chunk that is begun, and begins the next one
)


class Control:
    """A full cache that reads the same batches: a long one, then as many as are asked for, of a chunk's size."""

    def __init__(self, full: KVFlash) -> None:
        self._full = full
        self._found: dict[int, Logits] = {}

    def at(self, n: int) -> Logits:
        """The logits after n tokens."""
        while n not in self._found:
            read(self._full, self._full.n_tokens + CHUNK if self._full.n_tokens else N_BEGUN)
            self._found[self._full.n_tokens] = self._full.logits()
        return self._found[n]


def a_batch(kv: KVFlash) -> None:
    advance_exactly(Part(kv.sequence, TOKENS[kv.n_tokens : kv.n_tokens + CHUNK]), LAST)


def a_prompt(kv: KVFlash) -> None:
    read(kv, kv.n_tokens + CHUNK)


FILES = (
    "pool/exact.py",
    "native/exact.py",
    "sequence.py",
    "pager.py",
    "moves.py",
    "ledger.py",
    "decoder.py",
    "selector.py",
)


@pytest.mark.nightly(ENGINE)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "act", "files", "stride"),
    [
        pytest.param("qwen3", a_batch, FILES, 1, id="qwen3-batch"),
        pytest.param("qwen3", a_batch, ("context.py", "lib.py"), 1, id="qwen3-calls"),
        pytest.param("qwen3", a_prompt, FILES, 3, id="qwen3-prompt"),
        pytest.param("qwen35", a_batch, FILES, 3, id="qwen35-batch"),
        pytest.param("qwen35", a_prompt, FILES, 13, id="qwen35-prompt"),
        pytest.param("gemma4", a_batch, FILES, 5, id="gemma4-batch"),
        pytest.param("gemma4", a_prompt, FILES, 13, id="gemma4-prompt"),
    ],
)
def test_cut_off_at_every_line(
    opened: Open, name: str, act: Callable[[KVFlash], None], files: tuple[str, ...], stride: int
) -> None:
    """The sequence goes on, before the batch or after it, and says what one says that was never cut off. That of a recurrent
    state, too: the pool's own one is not touched until the batch stands.
    """
    control = Control(opened(name, **FULL))

    def prepare(kv: KVFlash) -> None:
        """To where it began: each time the same lines are run."""
        if kv.n_tokens and name in DENSE:
            kv.rollback(N_BEGUN)
        elif kv.n_tokens:
            kv.clear()
        if not kv.n_tokens:
            read(kv, N_BEGUN)

    def check(kv: KVFlash) -> None:
        assert kv.n_tokens in {N_BEGUN, N_BEGUN + CHUNK}
        kv.check_integrity()
        a_prompt(kv)
        assert_same(kv.logits(), control.at(kv.n_tokens))
        check_residency(kv, CHUNK)

    _, places = cut_off_at_every_line(lambda: opened(name), act, check, prepare=prepare, files=files, step=stride)
    assert len(places) >= 20, "nothing was cut off"


def test_rows_that_are_not_computed_yet_are_numbers(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool gets the whole record of the chunk being written, and a GPU multiplies masked rows by 0: NaN would stay."""
    fresh = Context.host_buffer

    def used(self: Context, size: int) -> Record:
        res = fresh(self, size)
        res[:] = 0xFF  # NaN, as memory of another use may be
        return res

    monkeypatch.setattr(Context, "host_buffer", used)
    kv = opened()
    prompt(kv, 5 * N_POOL + 3)
    kv.decode(TOKENS[:1])
    prompt(kv, CHUNK + 5)
    last = np.empty(kv.pager.records.record_bytes, np.uint8)
    kv.ctx.read(kv.n_tokens // CHUNK, last)
    assert np.isfinite(last[kv.ctx.pool_info().meta_bytes :].view(np.float16)).all()
