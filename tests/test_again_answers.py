"""Answers with tokens that are decoded again: what is told of them, and where they are cut off."""

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.again import PLACES, Restless, Shares
from support.changes import ENGINE, SCORING
from support.cuts import cut_off_at_every_line
from support.runs import GREEDY, SCORED, TOKENS, Decoded, Open, check_residency, feed, plain, read, reselects, spell
from support.scorers import Scores

from pyllama_kvflash import Done, KVFlash, Paged, Reselect, Sampling, View
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import NeedlePrompt

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL: dict[str, Any] = {**SCORED, "tau": 1}  # 16 blocks; scored after every token


#
# answers
#


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """2,048 tokens with four codes."""
    return needles.document(2048)


@pytest.mark.nightly(SCORING)
@pytest.mark.parametrize("name", ["needle", "qwen3", "gemma4"])
def test_the_same_seed_gives_the_same_text(
    opened: Open, document: NeedlePrompt, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a run of its own, and after another one: with all that happens, and where."""
    if name != "needle":
        monkeypatch.setattr(Model, "is_eog", lambda *_: False)
        monkeypatch.setattr(Model, "piece", lambda *_, **__: b"")
    prompt = document.text + document.needles[1].question if name == "needle" else TOKENS[:1500]
    sampling, runs = Sampling(temperature=0.8, seed=7), []
    policy = "qk" if name == "needle" else None
    kvs = [opened(name, policy=policy or Restless(), tau=2, again=1e-3) for _ in range(2)]
    for kv in (*kvs, kvs[0]):
        kv.clear()
        with monkeypatch.context() as patch:
            seen = Decoded(kv, patch)
            runs.append([plain(e) for e in kv.generate(prompt, max_tokens=100, sampling=sampling)])
        again = [a for a, b in itertools.pairwise(seen.calls) if a == b and a[1] == 1]
        assert len(again) > 10, "nothing was decoded again"
        kv.check_integrity()
    for other in runs[1:]:
        assert [type(e) for e in other] == [type(e) for e in runs[0]]
        assert other[:-1] == runs[0][:-1]
        assert isinstance(other[-1], Done)


def moved(resident: set[int], events: list[Event]) -> set[int]:
    """What is resident, by what the events tell."""
    for event in events:
        if isinstance(event, Paged | Reselect):
            resident = resident - set(event.drops) | set(event.page_ins)
    return resident


def resident_in(kv: KVFlash) -> set[int]:
    return set(np.flatnonzero(kv.residency().resident).tolist())


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_events_tell_all_that_moved(opened: Open, name: str) -> None:
    """Where every chunk is can be told from them alone, at any token: those that begin a chunk and those that fill one, too."""
    kv = opened(name, policy=Restless(), chunk=16, pool=256, n_batch=16)
    read(kv, 600)
    resident = resident_in(kv)
    n_again = 0
    for end in range(601, 760):
        events = kv.decode(TOKENS[end - 1 : end])
        resident = moved(resident | {(end - 1) // 16}, events)
        n_again += len(reselects(events)) > 1
        assert resident == resident_in(kv), end
        check_residency(kv, 16)
    assert n_again > 100


@pytest.mark.nightly(ENGINE)
def test_the_pool_and_the_records_stay_whole(opened: Open) -> None:
    """Through chunks that begin and fill up, in batches in between, with pins, and after going back."""
    rng = np.random.default_rng(3)
    kv = opened(policy=Restless(), chunk=16, pool=512, n_batch=16)
    read(kv, 1000)
    kv.pin(100, 130)
    n_again = 0
    while kv.n_tokens < 1800:
        for _ in range(int(rng.integers(1, 20))):
            n_again += len(reselects(feed(kv, kv.n_tokens + 1))) > 1
        feed(kv, kv.n_tokens + 16, int(rng.choice([1, 7, 16])))
        if rng.random() < 0.2:
            kv.rollback(kv.n_tokens - int(rng.integers(1, 60)))
        check_residency(kv, 16)
        assert np.array_equal(kv.tokens, TOKENS[: kv.n_tokens])
    assert n_again > 100
    assert len(kv.pager.summaries or ()) == kv.n_tokens // 16


#
# wherever it is cut off
#


class Missing(Shares):
    """What is out is hot, the next n_left times that a text is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.kv: KVFlash | None = None
        self.n_left = 0

    def of(self, view: View) -> Scores:
        res = super().of(view)
        self.views.clear()
        if self.kv is not None and self.n_left:
            self.n_left -= 1
            res[np.flatnonzero(~self.kv.pager.ledger.resident)[:2]] = 0.4
        return res


STEPS = r"pyllama_kvflash/(engine|pool)/.*"


@pytest.mark.nightly(STEPS)
@pytest.mark.parametrize(
    ("name", "at", "step"),
    [
        pytest.param(name, at, step, id=f"{name}-{place}")
        for name, steps in {"qwen3": (1, 3, 3), "gemma4": (5, 5, 5)}.items()
        for at, place, step in zip((325, 336, 337), PLACES, steps, strict=True)
    ],
)
def test_cut_off_at_every_line_of_a_token_that_is_decoded_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch, name: str, step: int, at: int
) -> None:
    """Ctrl-C anywhere in an answer of one token: what was to be decoded is in the context or comes next, once."""
    spell(monkeypatch)
    scorer = Missing()

    def fresh() -> KVFlash:
        scorer.kv = None
        kv = opened(name, policy=scorer, pool=256, chunk=16, n_batch=16)
        read(kv, at - 1)
        return kv

    def prepare(kv: KVFlash) -> None:
        kv.rollback(at - 1)
        kv.sequence.pending = int(TOKENS[at - 1])
        scorer.kv, scorer.n_left = kv, 1

    def act(kv: KVFlash) -> None:
        list(kv.generate([], max_tokens=1, sampling=GREEDY, append=True))

    def check(kv: KVFlash) -> None:
        kv.check_integrity()
        left = [*kv.tokens.tolist(), *([] if kv.sequence.pending is None else [kv.sequence.pending])]
        assert left in (TOKENS[:at].tolist(), TOKENS[: at + 1].tolist()), f"{len(left)} of {at} are left"
        scorer.n_left = 1
        if kv.sequence.pending is None:
            feed(kv, kv.n_tokens + 1)
        else:
            list(kv.generate([], max_tokens=1, append=True))
        assert np.array_equal(kv.tokens, TOKENS[: kv.n_tokens])
        kv.check_integrity()

    _, places = cut_off_at_every_line(fresh, act, check, prepare=prepare, step=step)
    assert len(places) >= 300 // step, "nothing was cut off"
    assert sum(where.endswith((" take_back", " again")) for where in places) >= 10 // step
