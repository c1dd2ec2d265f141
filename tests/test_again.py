"""Tokens that are decoded again: chunks that have much of a token's attention came in after it, and so it was decoded without them.

Equal logits mean equal bits, unless it is said otherwise. When chunks are scored, and which come in, is tested in test_relevance_when.py.
"""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.again import PLACES, Hot, Shares, before, once, rounds
from support.changes import ENGINE, SCORING
from support.runs import (
    SCORED,
    TOKENS,
    Decoded,
    Open,
    check_residency,
    feed,
    out,
    place_by_hand,
    read,
    reselects,
    spell,
)
from support.scorers import registered

from pyllama_kvflash import Token
from pyllama_kvflash.engine import decoder
from pyllama_kvflash.options import Spec

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL: dict[str, Any] = {**SCORED, "tau": 1}  # 16 blocks; scored after every token


#
# what it is
#


@pytest.mark.usefixtures("at_one_token")
@pytest.mark.nightly(SCORING)
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
@pytest.mark.parametrize("place", PLACES)
def test_a_token_is_decoded_again_with_what_it_missed(
    opened: Open, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    """Its logits are those of a run in which the chunks were there before it, and the first time leaves nothing behind."""
    at = PLACES[place]
    kv, control, missed = (before(opened, at, once(at, 1, 2, 3), name, again=again) for again in (0.03, 0, 0))
    seen = Decoded(kv, monkeypatch)
    events = kv.decode(TOKENS[at - 1 : at])
    assert seen.calls == [(at - 1, 1)] * 2
    assert rounds(events) == [(at, (3, 2, 1), pytest.approx(0.9)), (at, (), 0)]
    assert kv.n_tokens == at
    assert np.array_equal(kv.tokens, TOKENS[:at])
    assert kv.sequence.pending is None
    assert {1, 2, 3} <= set(seen.blocks[-1]) - set(seen.blocks[0])

    place_by_hand(control, seen.blocks[-1])
    control.ctx.decode(TOKENS[at - 1 : at], at - 1, 1)
    want = control.ctx.logits()
    if name == "gemma4":  # the sliding window may lie in other cells, and sums run in another order
        assert np.abs(kv.logits() - want).max() < 0.02
    else:
        assert np.array_equal(kv.logits(), want)
    missed.decode(TOKENS[at - 1 : at])
    assert np.abs(missed.logits() - want).max() > 0.05, "what is resident does not matter"
    check_residency(kv)
    feed(kv, at + 70)
    check_residency(kv)


@pytest.mark.parametrize("place", ["in a chunk", "fills a chunk"])
def test_it_is_as_if_the_chunks_had_been_brought_in_by_hand(opened: Open, place: str) -> None:
    """By public calls, before the token: the same logits, and the same record of the chunk that it fills."""
    at = PLACES[place]
    kv, control = before(opened, at, once(at, 1, 2, 3)), before(opened, at, Shares())
    (first, _) = reselects(kv.decode(TOKENS[at - 1 : at]))
    for chunk in first.drops:
        control.page_out(chunk)
    for chunk in first.page_ins:
        control.page_in(chunk)
    control.decode(TOKENS[at - 1 : at])
    assert np.array_equal(kv.logits(), control.logits())
    for one in (kv, control):
        one.check_integrity()
        feed(one, 1408)
        one.pager.wait_stored()
    mine, want = (one.pager.records.get((at - 1) // 64) for one in (kv, control))
    layers = kv.ctx.layers()
    for layer in layers:
        for begin, size in ((layer.offs_k, layer.size_k), (layer.offs_v, layer.size_v)):
            rows = [r[begin : begin + size].reshape(64, -1)[: (at - 1) % 64 + 1] for r in (mine, want)]
            assert np.array_equal(*rows)
    assert kv.pager.summaries is not None
    assert len(kv.pager.summaries) == 22


def test_at_most_three_rounds(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time something else is missed. The last scoring still changes the pool, for the next token."""
    kv = before(opened, 1300, Shares(lambda n, nth: {1 + nth: 0.9} if n == 1300 else {}))
    seen = Decoded(kv, monkeypatch)
    events = kv.decode(TOKENS[1299:1300])
    assert decoder._ROUNDS == 3
    assert seen.calls == [(1299, 1)] * 4
    assert rounds(events) == [(1300, (1 + i,), 0.9) for i in range(4)]
    assert 4 not in seen.blocks[-1]
    assert not {1, 2, 3, 4} & set(out(kv))
    check_residency(kv)
    seen.calls.clear()
    feed(kv, 1310)
    assert seen.calls == [(pos, 1) for pos in range(1300, 1310)]
    check_residency(kv)


@pytest.mark.parametrize(("again", "n"), [(0.74, 2), (0.75, 1), (0.76, 1), (1, 1), (1e-9, 2)])
def test_what_is_missed_is_the_sum_of_what_comes_in(
    opened: Open, monkeypatch: pytest.MonkeyPatch, again: float, n: int
) -> None:
    """Of the shares of the token itself; and a token is decoded again if that is more than `again`."""
    kv = before(opened, 1300, Shares(lambda at, _: {1: 0.5, 3: 0.25, 15: 0.125} if at >= 1300 else {}), again=again)
    seen = Decoded(kv, monkeypatch)
    first, *others = rounds(kv.decode(TOKENS[1299:1300]))
    assert first == (1300, (1, 3), 0.75)  # 15 is in
    assert others == [(1300, (), 0)] * (n - 1)
    assert len(seen.calls) == n


#
# when it is not
#


class Silent(Shares):
    """The same, but nobody says that these are shares."""

    shares = False


class Slow(Shares):
    """Asks for no summaries: what else it does may take its time."""

    summary = None


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        ({"again": 0}, Shares, "qwen3"),
        ({}, Silent, "qwen3"),
        ({}, Slow, "qwen3"),
        ({}, Shares, "qwen35"),
        ({"spec": Spec(kind="ngram", n_max=3)}, Shares, "qwen3"),
    ],
    ids=["never", "no shares", "beside decode", "recurrent", "spec"],
)
def test_nothing_is_decoded_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kind: type[Shares], name: str
) -> None:
    """What was missed comes in all the same, and is there for the next token."""
    kv = before(opened, 1300, kind(lambda n, _: {1: 0.9} if n >= 1300 else {}), name, **options)
    seen = Decoded(kv, monkeypatch)
    events = feed(kv, 1305)
    assert [pos for pos, _ in seen.calls] == list(range(1299, 1304 + 1))
    (came,) = [e for e in reselects(events) if e.page_ins]
    assert came.page_ins == (1,)
    assert came.missed == (0 if kind is Silent else 0.9)
    assert 1 not in out(kv)
    check_residency(kv)


def test_tokens_of_several_sequences_are_not_decoded_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is decoded alone is, and the others do not notice."""
    made: list[Shares] = []

    def make() -> Shares:
        made.append(once(1300, 1))
        return made[-1]

    registered(monkeypatch, mine=make)
    kv = opened(policy="mine", n_parallel=2, pool=2048)
    first, second = kv.sequences
    for one in (first, second):
        read(one, 1250)
        feed(one, 1299)
        one.page_out(1)
    events = kv.decode_each({0: int(TOKENS[1299]), 1: int(TOKENS[1299])})
    assert [[(e.page_ins, e.missed) for e in reselects(each)] for each in events.values()] == [[((1,), 0.9)]] * 2
    for one in (first, second):
        assert len([view for view in made[one.seq].views if len(view.tokens) == 1300]) == 1
        one.check_integrity()
    where = second.residency()
    made[0].hot = lambda n, _: {2: 0.9} if n >= 1301 else {}
    first.page_out(2)
    calls = Decoded(first, monkeypatch).calls
    assert [ins for _, ins, _ in rounds(first.decode(TOKENS[1300:1301]))] == [(2,), ()]
    assert calls == [(1300, 1)] * 2
    now = second.residency()
    assert all(
        np.array_equal(getattr(now, n), getattr(where, n), equal_nan=True) for n in ("resident", "block", "score")
    )
    for one in (first, second):
        feed(one, 1350)
        check_residency(one)


#
# the end of a prompt
#


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "qwen35"])
def test_the_last_token_of_a_prompt_may_be_decoded_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After its end was run again on what the question chose: the last token may ask for more."""
    hot: Hot = lambda n, nth: {1: 0.9, **({2: 0.9} if nth else {})} if n == 1300 else {}  # noqa: E731
    kv, control = opened(name, policy=Shares(hot)), opened(name, policy=Shares(hot), again=0)
    seen = Decoded(kv, monkeypatch)
    events = read(kv, 1300)
    chosen = [(e.reason, e.page_ins) for e in reselects(events)]
    last = [call for call in seen.calls if call[0] >= 1236]
    read(control, 1300)
    if name == "qwen35":
        assert chosen[0] == ("question", (1,))
        assert last == [(1236, 64)] * 2
        assert np.array_equal(kv.logits(), control.logits())
        return
    assert chosen == [("question", (1,)), ("decode", (2,)), ("decode", ())]
    assert last == [(1236, 64), (1236, 64), (1299, 1)]
    assert (kv.n_tokens, kv.sequence.pending) == (1300, None)
    control.rollback(1299)
    place_by_hand(control, seen.blocks[-1])
    control.ctx.decode(TOKENS[1299:1300], 1299, 1)
    assert np.abs(kv.logits() - control.ctx.logits()).max() < (0.02 if name == "gemma4" else 1e-9)
    check_residency(kv)
    feed(kv, 1400)
    check_residency(kv)


def test_a_prompt_whose_last_token_was_taken_back_goes_on(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before it is decoded again: it is what comes next."""
    spell(monkeypatch)
    policy = Shares(lambda n, nth: {1 + nth: 0.9} if n == 1300 else {})
    kv = opened(policy=policy)
    decode = kv.ctx.decode

    def cut(tokens: Any, pos: int, outputs: int) -> None:
        if (pos, len(tokens)) == (1299, 1):
            raise KeyboardInterrupt
        decode(tokens, pos, outputs)

    with monkeypatch.context() as patch:
        patch.setattr(kv.ctx, "decode", cut)
        with pytest.raises(KeyboardInterrupt):
            list(kv.generate(TOKENS[:1300], max_tokens=5))
    assert (kv.n_tokens, kv.sequence.pending) == (1299, int(TOKENS[1299]))
    kv.check_integrity()
    events = list(kv.generate([], max_tokens=5, append=True))
    assert [e.id for e in events if isinstance(e, Token)] == TOKENS[1300:1305].tolist()
    assert np.array_equal(kv.tokens, TOKENS[:1304])
    check_residency(kv)
