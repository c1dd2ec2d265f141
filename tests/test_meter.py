"""The meter compares what is decoded through the pool with the full cache. It changes nothing, and what it says is so."""

import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import snapshots
from support.changes import ENGINE, crossed
from support.cuts import cut_off_at_every_line
from support.drafting import WIDTH, width_noise
from support.oracles import ON_GPU
from support.rounding import Chosen, held
from support.runs import BY_SIXTEEN, GREEDY, MODELS, TOKENS, Open, check_residency, plain, read, turn

from pyllama_kvflash import Done, KVFlash, Token, Warn
from pyllama_kvflash.engine.meter import N_CHECKED, Meter
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Checked
from pyllama_kvflash.native import ALL
from pyllama_kvflash.options import Options, Spec
from pyllama_kvflash.pool.sequence import PooledSequence

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order"),
    pytest.mark.sampled(ENGINE),
]

wordless = snapshots.wordless

CHUNK, N_POOL = 16, 256

SMALL: dict[str, Any] = {
    **BY_SIXTEEN,
    "pool": N_POOL,
    "tau": 4,
    "opening": 0,
}
FULL = {**SMALL, "pool": "off"}
ALWAYS = {"meter": 1.0}


def answer(kv: KVFlash, prompt: Any, n: int, **how: Any) -> list[Any]:
    return list(kv.generate(prompt, max_tokens=n, sampling=GREEDY, **how))


def ids(events: list[Any]) -> list[int]:
    return [e.id for e in events if isinstance(e, Token)]


def checks(events: list[Any]) -> list[Checked]:
    return [e for e in events if isinstance(e, Checked)]


#
# it changes nothing
#


@pytest.mark.parametrize(("name", "spec"), crossed(MODELS, [None, Spec(kind="ngram", n_max=4, gate=0)]))
def test_all_else_is_as_without_it(opened: Open, wordless: None, name: str, spec: Spec | None) -> None:
    """Tokens, moves, scores, logits, records and what is in the pool, bit for bit, over two turns."""
    kv, control = opened(name, **ALWAYS, spec=spec), opened(name, spec=spec)
    prompt = np.tile(TOKENS[:150], 5)
    for text, how in ((prompt, {}), (TOKENS[900:930], {"append": True})):
        got, want = (answer(one, text, 60, **how) for one in (kv, control))
        assert len(checks(got)) >= 2
        assert [plain(e) for e in got if not isinstance(e, Checked | Done)] == [plain(e) for e in want[:-1]]
        assert np.array_equal(kv.logits(), control.logits())
        assert all(np.array_equal(a, b) for a, b in zip(kv.queries(), control.queries(), strict=True))
        assert np.array_equal(kv.residency().block, control.residency().block)
        for chunk in range(kv.n_tokens // CHUNK):
            records = [one.pager.records.get(chunk) for one in (kv, control)]
            assert np.array_equal(*records), f"record {chunk}"
        check_residency(kv, CHUNK)


#
# what it says is so
#


@pytest.mark.parametrize("name", MODELS)
def test_it_compares_with_the_full_caches_logits(
    opened: Open, wordless: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After a prompt that was read exactly, they are a full cache's own, bit for bit; and the others are the pool's."""
    kv, full, again = opened(name, **ALWAYS), opened(name, **FULL), opened(name)
    seen: list[Any] = []
    look = PooledSequence.seen_exactly

    def exactly(sequence: PooledSequence, start: int, n: int, state: bytes) -> Any:
        res = look(sequence, start, n, state)
        seen.append((start, n, res))
        return res

    monkeypatch.setattr(PooledSequence, "seen_exactly", exactly)
    events = answer(kv, TOKENS[:700], 40)
    start, n, got = seen[0]
    assert (start, n) == (700, N_CHECKED)
    read(full, 700)
    text = kv.tokens
    full.ctx.decode(text[700 : 700 + n], 700, ALL)
    want = np.array([full.ctx.logits(i) for i in range(n)])
    assert np.array_equal(got, want)

    rows: list[Any] = []
    saw = Meter.saw
    monkeypatch.setattr(Meter, "saw", lambda meter, pos, i: (rows.append(kv.ctx.logits(i)), saw(meter, pos, i)))
    kv.clear()
    answer(kv, TOKENS[:700], 40)
    pool = np.array(rows[1 : 1 + n], np.float64)  # the first one is the prompt's
    found = checks(events)[0]
    assert found.agreed == np.sum(pool.argmax(1) == want.argmax(1))
    p, q = (np.exp(x - x.max(1, keepdims=True)) for x in (want.astype(np.float64), pool))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    assert found.kld == pytest.approx(float(np.mean(np.sum(p * np.log(p / q), axis=1))), rel=1e-5, abs=1e-8)  # in f32
    assert found.kld > 0
    assert again.decoder.meter is None


def test_sequences_of_a_server(opened: Open, wordless: None) -> None:
    """Two answers by turns, and step by step in one batch: each has its own meter, and is what it is without."""
    texts = (TOKENS[:700], TOKENS[700:1300])
    found = []
    for how in ({}, ALWAYS):
        kv = opened(n_parallel=2, pool=2 * N_POOL, **how)
        runs = [s.generation(text, max_tokens=40, sampling=GREEDY) for s, text in zip(kv.sequences, texts, strict=True)]
        got: list[list[int]] = [[], []]
        while not all(run.ended for run in runs):
            for i, run in enumerate(runs):
                got[i] += [] if run.ended else turn(run)
        found.append(got)
        if how:
            assert all(s.decoder.meter and s.decoder.meter.stats.checked >= N_CHECKED for s in kv.sequences)
    assert found[0] == found[1]


#
# a bound
#


@pytest.mark.parametrize("name", [MODELS[0], *(pytest.param(n, marks=pytest.mark.nightly(ENGINE)) for n in MODELS[1:])])
def test_below_the_bound_the_rest_is_the_full_caches(opened: Open, tiny_path: Any, wordless: None, name: str) -> None:
    """Given the text so far; and all of it is read exactly, so that what follows the next prompt is, too."""
    chosen = Chosen(width_noise(tiny_path(name), WIDTH, FULL))
    kv, full = opened(name, min_agreement=1.0, policy="qk"), opened(name, **FULL)
    with held(chosen):
        events = answer(kv, TOKENS[:700], 80)
    warnings = [e.text for e in events if isinstance(e, Warn)]
    assert len(warnings) == 1
    assert "decoding is lossless from here on" in warnings[0]
    text = [*TOKENS[:700].tolist(), *ids(events)]
    n = next(i for i, e in enumerate(events) if isinstance(e, Warn))
    before = 700 + len(ids(events[:n]))
    assert 700 + N_CHECKED <= before < len(text) - 20
    with held(chosen, before - 700):
        want = ids(answer(full, text[:before], len(text) - before))
    assert text[before:] == want
    assert chosen.n_held == len(want)
    assert kv.sequence.n_exact == kv.n_tokens == len(text) - 1
    chosen.rows.clear()
    more = []
    for one in (full, kv):
        with held(chosen):
            more.append(ids(answer(one, TOKENS[:40], 20, append=True)))
    assert more[0] == more[1]
    check_residency(kv, CHUNK)


#
# Ctrl-C, options
#


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ALWAYS, marks=pytest.mark.nightly, id="meter"),
        pytest.param({"min_agreement": 1.0, "meter": 1.0}, id="bound"),
    ],
)
def test_cut_off_at_every_line(opened: Open, wordless: None, options: dict[str, Any]) -> None:
    """Ctrl-C anywhere in an answer: what is left is the beginning of a text, and it goes on."""
    plain = opened()
    read(plain, 399)
    want = [*TOKENS[:400].tolist(), *ids(answer(plain, TOKENS[399:400], 24, append=True))]

    def fresh() -> KVFlash:
        kv = opened(**options)
        read(kv, 399)
        return kv

    def act(kv: KVFlash) -> None:
        answer(kv, want[399:400], 20, append=True)

    def check(kv: KVFlash) -> None:
        kv.check_integrity()
        left = [*kv.tokens.tolist(), *([] if kv.sequence.pending is None else [kv.sequence.pending])]
        same = min(len(left), 400 + N_CHECKED)  # later ones may be the full cache's
        assert left[:same] == want[:same]
        assert ids(answer(kv, TOKENS[:3], 3, append=True))
        check_residency(kv, CHUNK)
        kv.clear()
        assert kv.decoder.lossless is None
        read(kv, 399)

    _, places = cut_off_at_every_line(fresh, act, check, step=int(os.environ.get("KVFLASH_CUT_STEP", "47")))
    assert len(places) > 20
    assert len({place.partition(":")[0] for place in places}) > 5, "cut off in few files"


def test_what_cannot_be_asked_for() -> None:
    for name in ("meter", "min_agreement"):
        for prefill in ("pool", "auto"):
            with pytest.raises(UsageError, match=rf"`{name}` needs .* is '{prefill}'"):
                Options(**{name: 0.5}, prefill=prefill)
        for value in (-0.1, 1.1, float("nan")):
            with pytest.raises(UsageError, match=name):
                Options(**{name: value})
    assert Options(min_agreement=0.9).meter_share == 0.05
    assert Options(min_agreement=0.9, meter=0.2).meter_share == 0.2
    assert Options().meter_share == 0
