"""Lossless decoding: tokens drafted through the pool and checked against everything. The text is the full cache's."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import drafting, lossless, snapshots, tiny, tiny_drafters
from support.changes import ENGINE, crossed
from support.cuts import cut_off, cut_off_at_every_line
from support.drafting import WIDTH, width_noise
from support.lossless import CHUNK, FULL, N_POOL, SMALL, answer, chosen_alike, rows_apart, width_apart
from support.oracles import ON_GPU
from support.rounding import Chosen, held
from support.runs import GREEDY, MODELS, TOKENS, Open, check_residency, out, read, turn

from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.engine.lossless import Lossless
from pyllama_kvflash.errors import UnsupportedError, UsageError
from pyllama_kvflash.native import ALL, LAST, Context
from pyllama_kvflash.options import LOOKAHEAD, RECURRENT_LOOKAHEAD, Options, Spec
from pyllama_kvflash.policy.lookahead import Length, Lookahead
from pyllama_kvflash.pool.exact import ExactReader

pytestmark = [
    pytest.mark.native,
    pytest.mark.sampled(ENGINE),
    pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order"),
]

known = lossless.known
snap = snapshots.snap
wordless = snapshots.wordless

N_UBATCH = 64


def n_streamed(kv: KVFlash) -> int:
    return kv.sequence.reads_exactly.ctx.pane_info().n_bytes


class Batches:
    """Those that an exact pass computes: position, tokens, logits of each token, and how many stand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[int, Any, list[Any], int]] = []
        keep, decode, last = ExactReader.keep, ExactReader.decode, [(np.empty(0, np.int32), LAST)]

        def decoded(
            reader: ExactReader, pool: Context, tokens: Any, start: int, records: Any, outputs: int, **how: Any
        ) -> None:
            last[0] = tokens.copy(), outputs
            decode(reader, pool, tokens, start, records, outputs, **how)

        def kept(reader: ExactReader, pool: Context, start: int, n: int, n_batch: int) -> None:
            tokens, outputs = last[0]
            asked = range(n_batch) if outputs == ALL else ()
            self.found.append((start, tokens, [pool.logits(i) for i in asked], n))
            keep(reader, pool, start, n, n_batch)

        monkeypatch.setattr(ExactReader, "decode", decoded)
        monkeypatch.setattr(ExactReader, "keep", kept)


#
# the text
#


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        (MODELS[0], None),
        *(pytest.param(name, None, marks=pytest.mark.nightly(ENGINE)) for name in MODELS[1:]),
        *(pytest.param(name, seed, marks=pytest.mark.nightly) for name in MODELS for seed in (1, 2, 3)),
    ],
)
def test_the_text_is_the_full_caches(
    opened: Open, known: Callable[..., Chosen], wordless: None, name: str, seed: int | None
) -> None:
    """Token for token, but for what the width of a batch does to logits; and every row is what reading that text makes."""
    sampling = GREEDY if seed is None else Sampling(temperature=1.0, seed=seed)
    chosen = known(name)
    kv, full, plain = opened(name), opened(name, **FULL), opened(name, mode="fast")
    limit = width_apart(opened, name)
    for prompt, how in ((TOKENS[:1000], {}), (TOKENS[1000:1100], {"append": True})):
        chosen.rows.clear()
        want, got = (chosen_alike(chosen, one, prompt, 100, sampling, **how) for one in (full, kv))
        assert got == want
        assert kv.decoder.lossless is not None
        assert kv.decoder.lossless.stats.drafted > 0
        check_residency(kv, CHUNK)
    assert chosen.n_held == 200
    assert np.array_equal(kv.tokens, full.tokens)
    assert rows_apart(kv, plain, 1000 // CHUNK) <= limit


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize(("name", "right"), crossed(MODELS, [3, 0, 99]))
def test_whatever_was_drafted(
    opened: Open, known: Callable[..., Chosen], wordless: None, monkeypatch: pytest.MonkeyPatch, name: str, right: int
) -> None:
    """A draft may be wrong at once, later, or nowhere: its tokens leave no trace."""
    chosen = known(name)
    kv, full, plain = opened(name), opened(name, **FULL), opened(name, mode="fast")
    want = chosen_alike(chosen, full, TOKENS[:700], 90)

    def draft(_: Lossless, token: int, left: int, _sampler: Any) -> Any:
        at, n = kv.n_tokens + 1 - 700, min(7, left)
        assert token == want[at - 1]
        guesses = np.array([*want[at : at + n], *TOKENS[:n]], np.int32)[:n]
        guesses[right:] = (guesses[right:] + 1) % tiny.N_VOCAB
        return guesses, []

    monkeypatch.setattr(Lossless, "draft", draft)
    assert chosen_alike(chosen, kv, TOKENS[:700], 90) == want
    check_residency(kv, CHUNK)
    stats = kv.decoder.lossless.stats if kv.decoder.lossless else None
    assert stats is not None
    n_rounds = -(-89 // (1 + min(right, 7)))
    assert abs(stats.draft_steps + stats.plain_steps - n_rounds) <= 1
    assert rows_apart(kv, plain, 700 // CHUNK) <= width_apart(opened, name)


@pytest.mark.nightly(ENGINE)
def test_rows_of_the_pools_own_decoding_are_told_apart(opened: Open, wordless: None) -> None:
    """The tests above can fail."""
    kv, plain = opened(mode="fast", policy="lru"), opened(mode="fast")
    answer(kv, TOKENS[:700], 90)
    assert rows_apart(kv, plain, 700 // CHUNK) > 3 * width_apart(opened, "qwen3")


@pytest.mark.parametrize(("name", "panes"), crossed(MODELS, [1, 0]))
def test_it_computes_what_llama_cpp_does_of_the_same_batches(
    opened: Open, wordless: None, monkeypatch: pytest.MonkeyPatch, name: str, panes: int
) -> None:
    """Bit for bit, for each token of a draft, whether it stands or not, and after some were taken back."""
    kv, full = opened(name, panes=panes, policy="qk"), opened(name, **FULL, spec=Spec(kind="ngram", n_max=32))
    info = kv.sequence.reads_exactly.ctx.pane_info()
    assert info.n_pane == (1 if panes else len(kv.ctx.layers())), "on a CPU nothing need be streamed"
    batches = Batches(monkeypatch)
    draft = Lossless.draft

    def partly(lossless: Lossless, token: int, left: int, sampler: Any) -> Any:
        guesses, moved = draft(lossless, token, left, sampler)
        right = np.array([*full_text[kv.n_tokens + 1 :]], np.int32)[: len(guesses) // 2]
        guesses[: len(right)] = right
        return guesses, moved

    full_text = [*TOKENS[:700], *answer(opened(name, **FULL), TOKENS[:700], 120)]
    monkeypatch.setattr(Lossless, "draft", partly)
    monkeypatch.setattr(Lookahead, "next", Length(7))  # no clock
    answer(kv, TOKENS[:700], 100)
    n_right = n_wrong = 0
    for start, tokens, logits, n in batches.found:
        full.ctx.decode(tokens, start, ALL if logits else LAST)
        for i, want in enumerate(logits):
            assert np.array_equal(full.ctx.logits(i), want), f"token {start + i} of a batch of {len(tokens)} at {start}"
        if n < len(tokens):
            full.ctx.seq_rm(start + n)
        n_right += n - 1 if logits else 0
        n_wrong += len(tokens) - n
    assert n_right > 10
    assert n_wrong > 10


def test_a_text_that_the_pool_holds_is_decoded_there(
    opened: Open, known: Callable[..., Chosen], wordless: None
) -> None:
    """Until it is longer: everything is seen, so nothing is to be checked."""
    kv, full, chosen = opened(), opened(**FULL), known()
    want, got = (chosen_alike(chosen, one, TOKENS[:200], 40) for one in (full, kv))
    assert got == want
    assert n_streamed(kv) == 0
    chosen.rows.clear()
    want, got = (chosen_alike(chosen, one, TOKENS[300:301], 60, append=True) for one in (full, kv))
    assert got == want
    assert n_streamed(kv) > 0
    assert out(kv)


def test_decode_is_exact_too(opened: Open) -> None:
    """Tokens that are given, in batches of one and more."""
    kv, full = opened(), opened(**FULL)
    for one in (kv, full):
        read(one, 600)
    for n in (1, 1, 5, 64, 30, 1, 20):
        at = kv.n_tokens
        for one in (kv, full):
            one.decode(TOKENS[at : at + n])
        assert np.array_equal(kv.logits(), full.logits()), f"{n} tokens at {at}"
        check_residency(kv, CHUNK)
    assert kv.n_batch == N_UBATCH


@pytest.mark.nightly(ENGINE)
def test_a_state_that_cannot_go_back(opened: Open, known: Callable[..., Chosen], wordless: None) -> None:
    """llama.cpp takes back the states of some architectures only: of the others nothing is drafted."""
    chosen = known()
    kv, full = opened("qwen3next"), opened("qwen3next", **FULL)
    assert (kv.sequence.recurrent, kv.sequence.reads_exactly.ctx.n_rollback) == (True, 0)
    want, got = (chosen_alike(chosen, one, TOKENS[:600], 30) for one in (full, kv))
    assert got == want
    assert kv.decoder.lossless is not None
    assert (kv.decoder.lossless.stats.drafted, kv.decoder.lossless.stats.plain_steps) == (0, 29)
    check_residency(kv, CHUNK)
    with pytest.raises(UnsupportedError, match="cannot roll back over rejected tokens"):
        opened("qwen3next", spec=Spec(kind="ngram"))


#
# with drafters in front of the pool
#


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("kind", ["ngram", "draft", "dflash", "eagle3", "mtp"])
def test_with_drafters(tmp_path: Path, wordless: None, kind: str) -> None:
    path, drafter = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    model: str | None = str(drafter)
    if kind == "mtp":
        tiny_drafters.mtp(path)
        model = None
    elif kind == "eagle3":
        tiny.write("qwen3", path)
        tiny_drafters.eagle3(drafter, n_embd_target=256)
    elif kind == "dflash":
        drafting.FILES["qwen3"](path)
        drafting.FILES["dflash"](drafter)
    else:
        drafting.FILES["qwen3"](path)
        drafting.FILES["qwen3"](drafter)
        model = model if kind == "draft" else None
    spec = Spec(kind=kind, model=model, n_max=2 if kind == "mtp" else 4, gate=0, window=256)
    prompt = np.tile(TOKENS[:150] % (tiny.N_VOCAB - 2), 5)
    chosen, found = [Chosen(width_noise(path, WIDTH, FULL)) for _ in range(2)], []
    for options in (FULL, {**SMALL, "spec": spec}):
        with KVFlash.from_file(path, **options) as kv:
            found.append(chosen_alike(chosen[0], kv, prompt, 70))
            found[-1] += chosen_alike(chosen[1], kv, prompt[:90], 30, append=True)
            if kv.n_pool:
                kv.check_integrity()
    assert found[0] == found[1]
    assert [c.n_held for c in chosen] == [70, 30]


#
# several sequences, snapshots, Ctrl-C
#


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("name", MODELS)
def test_sequences_take_turns(
    opened: Open, known: Callable[..., Chosen], wordless: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They share cells: what one drafts must not be where another's window was.

    Without flash attention, which sums in f16: a window's cells are in another order where two share them.
    """
    monkeypatch.setattr(Lookahead, "next", Length(7))
    plain: dict[str, Any] = {"flash_attn": "off"}
    kv, texts = opened(name, n_parallel=2, pool=2 * N_POOL, **plain), (TOKENS[:700], TOKENS[700:1300])
    chosen = [known(name, **plain) for _ in texts]
    want = [chosen_alike(c, opened(name, **FULL, **plain), text, 120) for c, text in zip(chosen, texts, strict=True)]
    runs = []
    for s, c, text in zip(kv.sequences, chosen, texts, strict=True):
        with held(c):
            runs.append(s.generation(text, max_tokens=120, sampling=GREEDY))
    got: list[list[int]] = [[], []]
    while not all(run.ended for run in runs):
        for i, run in enumerate(runs):
            got[i] += [] if run.ended else turn(run)
    assert got == want
    assert [c.n_held for c in chosen] == [120, 120]
    assert all(run.draft_stats and run.draft_stats.drafted for run in runs)
    with pytest.raises(UsageError, match="decode one sequence at a time"):
        kv.decode_each({0: 1, 1: 1})


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("name", MODELS)
def test_it_goes_on_from_a_snapshot(
    opened: Open, snap: Path, known: Callable[..., Chosen], wordless: None, name: str
) -> None:
    kv, full, chosen = opened(name, snapshots=True), opened(name, **FULL), known(name)
    want = chosen_alike(chosen, full, TOKENS[:700], 60)
    assert chosen_alike(chosen, kv, TOKENS[:700], 25) == want[:25]
    kv.save(snap)
    there = opened(name, snapshots=True)
    there.restore(snap)
    for one in (kv, there):
        with held(chosen, 25):
            assert answer(one, [], 35, append=True) == want[25:]
        check_residency(one, CHUNK)


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("name", MODELS)
def test_cut_off_at_every_line(
    opened: Open, known: Callable[..., Chosen], wordless: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ctrl-C anywhere in an answer: what is left is the beginning of what would have been, and goes on as that."""
    monkeypatch.setattr(Lookahead, "next", Length(3))
    chosen = known(name)
    want = [*TOKENS[:400].tolist(), *chosen_alike(chosen, opened(name, **FULL), TOKENS[:400], 40)]

    def fresh() -> KVFlash:
        kv = opened(name, snapshots=True)
        read(kv, 399)
        return kv

    def act(kv: KVFlash) -> None:
        with held(chosen):
            answer(kv, want[399:400], 6, append=True)

    def check(kv: KVFlash) -> None:
        kv.check_integrity()
        left = [*kv.tokens.tolist(), *([] if kv.sequence.pending is None else [kv.sequence.pending])]
        assert left == want[: len(left)]
        assert len(left) >= 399
        n = len(left)
        with held(chosen, n - 399):
            further = answer(kv, want[n : n + 1], 6, append=True)
        assert further == want[n + 1 : n + 7]
        check_residency(kv, CHUNK)
        kv.clear()
        read(kv, 399)

    _, places = cut_off_at_every_line(fresh, act, check, step=int(os.environ.get("KVFLASH_CUT_STEP", "47")))
    assert len(places) > 20
    assert len({place.partition(":")[0] for place in places}) > 5, "cut off in few files"


def test_what_does_not_stand_is_forgotten(opened: Open, wordless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that was cut off, and then another text at its place, of which a part goes through the pool."""
    kv, full = opened(), opened(**FULL)
    read(kv, 230)
    with monkeypatch.context() as patch:
        cut_off(kv.sequence, "append", "before", patch)
        with pytest.raises(KeyboardInterrupt):
            kv.decode(TOKENS[1000:1060])
    assert kv.n_tokens == 230
    assert kv.sequence.n_exact <= 230
    for one in (kv, full):
        read(one, 240)
        read(one, 700)
    assert np.array_equal(kv.logits(), full.logits())
    check_residency(kv, CHUNK)


#
# options
#


def test_what_cannot_be_asked_for() -> None:
    for prefill in ("pool", "auto"):
        with pytest.raises(UsageError, match=rf"`mode` 'lossless' needs .* is '{prefill}'"):
            Options(mode="lossless", prefill=prefill)


def test_how_far_it_looks() -> None:
    for none in (Options(policy="fresh", coarse="4"), Options(opening=0)):
        assert none.n_lookahead(recurrent=False) == 0
    for some in (Options(), Options(policy="qk"), Options(policy="fresh", opening=32)):
        assert some.n_lookahead(recurrent=False) == LOOKAHEAD
        assert some.n_lookahead(recurrent=True) == 0
    assert Options(mode="lossless", n_ubatch=N_UBATCH).n_lookahead(recurrent=False) == N_UBATCH - 1
    assert Options(mode="lossless").n_lookahead(recurrent=False) == LOOKAHEAD
    assert Options(mode="lossless").n_lookahead(recurrent=True) == RECURRENT_LOOKAHEAD
    assert Options(mode="lossless", n_ubatch=4).n_lookahead(recurrent=False) == 3
