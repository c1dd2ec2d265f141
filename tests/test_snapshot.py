"""Sequences that are saved and put back: what follows is what would have followed, and what is wrong is said.

Equal means equal bits, unless it is said otherwise. How a file is laid out is tested in test_snapshot_format.py.
"""

import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from rounding import Chosen, held, relative_rms
from snapshots import GREEDY, MORE, SMALL, TOKENS, Case, Other, answer, assert_same, flat, go_on, ids, seen

from pyllama_kvflash import KVFlash, Reselect, Sampling, Token, View, Warn, as_dict
from pyllama_kvflash.bench.demo import ask
from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import Context, Model
from pyllama_kvflash.needle import BUNDLED_DRAFTER, BUNDLED_MODEL, NeedlePrompt, make_prompt
from pyllama_kvflash.options import Spec
from pyllama_kvflash.policy import Schedule, Scores, State
from pyllama_kvflash.pool import pager
from pyllama_kvflash.snapshot.file import SnapshotFile
from pyllama_kvflash.snapshot.layout import record_place

pytestmark = pytest.mark.native

Open = Callable[..., KVFlash]
MODELS = ["qwen3", "qwen35", "gemma4"]
STATEFUL = ["qwen35", "gemma4"]


@pytest.fixture
def wordless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models have no vocabulary."""
    monkeypatch.setattr(Model, "is_eog", lambda *_: False)
    monkeypatch.setattr(Model, "piece", lambda *_: b"")


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    """Another process."""
    with Other() as res:
        yield res


@pytest.fixture
def snap(tmp_path: Path) -> Path:
    """A name for a snapshot."""
    return tmp_path / "text.kvsnap"


def read(kv: KVFlash, end: int) -> KVFlash:
    """TOKENS from where the sequence is up to `end`, as a prompt."""
    for _ in kv.prefill(TOKENS[kv.n_tokens : end]):
        pass
    return kv


def whole(path: Path) -> SnapshotFile:
    """A file whose records were all checked."""
    res = SnapshotFile(path)
    for _ in res.verify():
        pass
    return res


#
# what follows is what would have followed
#


# the evictions of 2,000 tokens are those of 8,192, and quantised caches take long to read
LONG = os.environ.get("KVFLASH_SNAPSHOT_TOKENS", "").split()  # minutes each
CASES = [
    *(Case(name, "f16", "qk", 8192, beside=True) for name in [*MODELS, "needle"]),
    *(Case(name, "f16", "qk", 1500) for name in [*MODELS, "needle"]),
    *(Case(name, "f16", "lru", 8192) for name in MODELS[:2]),
    *(Case(name, "f16", "lru", 1500) for name in ["gemma4", "needle"]),
    *(Case(name, "q8_0", "qk", 1200, beside=True) for name in [*MODELS, "needle"]),
    *(Case(name, "q8_0", "lru", 1300) for name in MODELS[:2]),
    *(
        Case(name, cache, "qk", int(n), beside=True)
        for n in LONG
        for cache in ("f16", "q8_0")
        for name in [*MODELS, "needle"]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("wordless")
def test_what_follows_is_what_would_have_followed(
    opened: Open, other: Other, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after a prompt, after an answer, and in the middle of one, where a plan of a scorer is spread over steps: in
    the same process, and in another.
    """
    monkeypatch.setattr(pager, "FLIGHT_BYTES", 1)  # one chunk a step
    monkeypatch.setattr(Context, "pinned", property(lambda _self: case.beside))
    kv = opened(case.name, **case.options)
    paths, runs = [], []

    def compare() -> None:
        paths.append(tmp_path / f"{len(paths)}.kvsnap")
        size = kv.save(paths[-1])
        assert size == paths[-1].stat().st_size
        assert not whole(paths[-1]).contents.chunks["reserved"].any()
        runs.append(go_on(kv))
        assert kv.restore(paths[-1]) == runs[-1]["numbers"][0]
        assert_same(go_on(kv), runs[-1])
        kv.check_integrity()

    assert read(kv, case.n).n_tokens == case.n
    compare()
    answer(kv, MORE[100:170], 30)
    compare()
    middle = kv.generate(MORE[200:270], max_tokens=300, sampling=GREEDY, append=True)
    n = 0
    while n < 20 or (case.beside and not (kv.pager.landing and kv.pager.todo[1])):
        n += isinstance(next(middle), Token)
    compare()
    middle.close()

    for run in runs:
        assert np.count_nonzero(run["state"] == State.OUT) >= 3
    assert (runs[2]["landing"].size > 0) == (runs[2]["page-ins"].size > 0) == case.beside
    assert [run["numbers"][3] >= 0 for run in runs] == [False, True, True]  # a token that is not decoded yet
    for got, want in zip(other.goes_on(kv.model.path, case, paths, tmp_path / "new.npz"), runs, strict=True):
        assert_same(got, want)


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("where", ["here", "elsewhere", "unsaved"])
@pytest.mark.parametrize(
    ("name", "policy", "beside"),
    [
        *((name, "qk-zmax", True) for name in MODELS),
        *((name, "shares", False) for name in MODELS),
        ("qwen3", "qk", False),
        ("qwen3", "lru", True),
    ],
)
def test_an_answer_goes_on_as_if_it_had_not_been_broken_off(
    opened: Open, snap: Path, name: str, policy: str, beside: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any token: before a scoring, when its queries are being copied, while it is under way, and while its plan is. Where it is
    all at one token, as on a CPU, there is nothing under way between two of them, but some tokens are decoded twice.
    """
    monkeypatch.setattr(pager, "FLIGHT_BYTES", 1)  # one chunk a step
    monkeypatch.setattr(Context, "pinned", property(lambda _self: beside))
    monkeypatch.setattr(Schedule, "_behind", lambda _self: 4)  # as if to score took three tokens

    def anew() -> KVFlash:
        return opened(name, policy=Odd("shares") if policy == "shares" else policy)

    kv = anew()
    events = list(read(kv, 1500).generate(MORE[:70], max_tokens=60, sampling=GREEDY, append=True))
    want, end = ids(events), seen(kv)
    scored = [e.pos for e in events if isinstance(e, Reselect) and e.reason == "decode" and e.pos > 1570]
    assert len(set(scored)) == (0 if policy == "lru" else 3)  # every 16 tokens, or 4 later
    if policy != "qk":  # which may have missed something, or not
        assert (len(scored) > 3) == (policy == "shares" and name != "qwen35"), "was a token decoded again?"
    kv.clear()
    got, phases = answer(read(kv, 1500), MORE[:70], 1), set()
    while len(got) < len(want):
        if selector := kv._selector:
            phases |= {"asked"} if selector._ticket is not None else {"scoring"} if selector._job else set()
        phases |= {"moving"} if kv.pager.in_motion else set()
        if where != "unsaved":
            kv.save(snap)
            if where == "elsewhere":
                kv.close()
                kv = anew()
            kv.restore(snap)
        got += answer(kv, [], min(7 if where == "elsewhere" else 1, len(want) - len(got)))
    assert got == want
    assert_same(seen(kv), end)
    if policy != "lru" and where != "elsewhere":
        assert phases == ({"asked", "scoring", "moving"} if beside else set())


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("under_way", [16, 17, 20], ids=["asked", "scoring", "moving"])
def test_what_was_under_way_on_a_gpu_goes_on_without_one(
    opened: Open, snap: Path, under_way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scoring that was begun beside decode, or a plan that is spread over steps, restored where there is no such thing; and back."""
    monkeypatch.setattr(pager, "FLIGHT_BYTES", 1)  # one chunk a step
    monkeypatch.setattr(Context, "pinned", property(lambda _self: True))
    monkeypatch.setattr(Schedule, "_behind", lambda _self: 4)  # as if to score took three tokens
    kv = opened(policy="qk-zmax")
    answer(read(kv, 1500), MORE[:70], 1 + under_way)
    assert (kv._selector._ticket is not None, kv._selector._job is not None, bool(kv.pager.in_motion)) == (
        under_way == 16, under_way == 17, under_way == 20
    )  # fmt: skip
    kv.save(snap)
    monkeypatch.setattr(Context, "pinned", property(lambda _self: False))
    new = opened(policy="qk-zmax")
    new.restore(snap)
    events = list(new.generate([], max_tokens=40, sampling=GREEDY, append=True))
    positions = [event.pos - 1570 for event in events if isinstance(event, Reselect)]
    assert positions == [*([under_way + 1] if under_way < 20 else []), 32, 48]  # there, all of it is within a token
    assert not new.pager.in_motion
    new.check_integrity()
    new.save(snap)
    kv.restore(snap)
    answer(kv, [], 40)
    kv.check_integrity()


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("name", ["qwen3", "needle"])
def test_the_same_seed_gives_the_same_text_with_the_usual_schedule(opened: Open, snap: Path, name: str) -> None:
    """Every 8 tokens: twice, in another context, and after the prompt was restored. share=0, since that is measured by a clock."""
    sampling, runs = Sampling(temperature=0.8, seed=7), []

    def further(kv: KVFlash) -> None:
        events = list(kv.generate(MORE[:70], max_tokens=100, sampling=sampling, append=True))
        scores = [flat(event) for event in events if isinstance(event, Reselect) and event.reason == "decode"]
        runs.append((ids(events), scores))

    for _ in range(2):
        kv = opened(name, tau=8)
        read(kv, 1500).save(snap)
        further(kv)
    kv.restore(snap)
    further(kv)
    new = opened(name, tau=8)
    new.restore(snap)
    further(new)
    assert len(runs[0][1]) >= 5
    for tokens, scores in runs[1:]:
        assert tokens == runs[0][0]
        assert len(scores) == len(runs[0][1])
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(scores, runs[0][1], strict=True))


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("name", MODELS)
def test_a_restored_sequence_can_be_saved_again(opened: Open, snap: Path, name: str) -> None:
    """Before anything was computed, and after: its first records are still those of the first file."""
    kv, again = opened(name), snap.with_name("again.kvsnap")
    read(kv, 2000).save(snap)
    kv.restore(snap)
    kv.save(again)
    assert again.read_bytes() == snap.read_bytes()
    answer(kv, MORE[:100])
    kv.save(again)
    want = go_on(kv)
    snap.unlink()
    kv.restore(again)
    assert_same(go_on(kv), want)


@pytest.mark.usefixtures("wordless")
def test_pins_come_back(opened: Open, snap: Path) -> None:
    kv, new = opened(), opened()
    kv.pin(300, 400)
    read(kv, 2000).save(snap)
    new.restore(snap)
    assert_same(seen(new), seen(kv))
    assert new.residency().protected[[4, 5, 6]].all()
    assert_same(go_on(new), go_on(kv))


@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_speculation_goes_on(opened: Open, document: NeedlePrompt, learnt: Path, kind: str) -> None:
    """The drafter never read what was restored, and learns of it: no token is another one, and guesses are right again."""
    spec = Spec(kind=kind, model=str(BUNDLED_DRAFTER) if kind == "draft" else None, gate=0)
    kv, new = opened("needle", spec=spec), opened("needle", spec=spec)
    for _ in kv.prefill(kv.tokenize(document.text)):
        pass
    new.restore(learnt)
    n_drafted = 0
    for needle in document.needles:
        asked = kv.tokenize("\n" + needle.statement.removesuffix(f"{needle.answer}.").strip(), add_special=False)
        # a code and the end of its line: what follows is less certain
        want, got = (list(one.generate(asked, max_tokens=5, sampling=GREEDY, append=True)) for one in (kv, new))
        assert ids(got) == ids(want)
        assert needle.answer in kv.detokenize(ids(got))
        n_drafted += as_dict(got[-1])["stats"]["drafted"]
    assert n_drafted > 0
    new.check_integrity()


def test_single_tokens_go_on(opened: Open, snap: Path) -> None:
    """With decode() as well, the next scoring comes when it would have come."""
    kv = read(opened(), 2000)
    for token in MORE[:10]:
        kv.decode([int(token)])
    kv.save(snap)
    want = forced(kv)
    kv.restore(snap)
    np.testing.assert_array_equal(forced(kv), want)


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("to", [1999, 1984, 1930, 777, 64, 1, 0])
def test_what_was_restored_can_be_rolled_back(opened: Open, saved: Path, to: int) -> None:
    """And goes another way then, as what it is of does."""
    kv, new = read(opened(), 2000), opened()
    new.restore(saved)
    for one in (kv, new):
        one.rollback(to)
        one.check_integrity()
    assert_same(go_on(new), go_on(kv))
    new.check_integrity()


#
# elsewhere
#


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """2,500 tokens with four codes."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        return make_prompt(2500, lambda s: len(model.tokenize(s, add_special=False)), n_needles=4, seed=2)


@pytest.fixture(scope="module")
def learnt(document: NeedlePrompt, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of it."""
    res = tmp_path_factory.mktemp("learnt") / "document.kvsnap"
    with KVFlash.from_file(BUNDLED_MODEL, **SMALL) as kv:
        for _ in kv.prefill(kv.tokenize(document.text)):
            pass
        kv.save(res)
    return res


ELSEWHERE: list[dict[str, Any]] = [
    {"pool": 512, "n_batch": 64},
    {"pool": 768},
    {"pool": 2048},
    {"pool": 4096, "n_ctx": 4096, "snapshots": True},
    {"pool": 1536, "n_parallel": 2},
    {"pool": 1024, "n_parallel": 2},
]


@pytest.mark.parametrize("options", ELSEWHERE, ids=str)
def test_codes_are_found_in_another_pool(
    opened: Open, document: NeedlePrompt, learnt: Path, options: dict[str, Any]
) -> None:
    kv = opened("needle", **options).sequences[-1]
    end = kv.restore(learnt)
    kv.check_integrity()
    for needle in document.needles:
        text, _ = ask(kv, needle.question)
        assert needle.answer in text
        kv.rollback(end)
    kv.check_integrity()


def test_two_sequences_of_a_pool_restore_the_same_file(opened: Open, document: NeedlePrompt, learnt: Path) -> None:
    kv = opened("needle", n_parallel=2)
    for sequence in kv.sequences:
        sequence.restore(learnt)
    for needle in document.needles[:2]:
        for sequence in kv.sequences:
            end = sequence.n_tokens
            assert needle.answer in ask(sequence, needle.question)[0]
            sequence.rollback(end)
            sequence.check_integrity()


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pool", [768, 2048])
def test_another_pool_has_the_hottest(opened: Open, snap: Path, name: str, pool: int) -> None:
    """What must be there, and the best of the rest."""
    kv, new = opened(name), opened(name, pool=pool)
    before = read(kv, 2000).residency()
    kv.save(snap)
    assert new.restore(snap) == 2000
    after, heat = new.residency(), new.pager.ledger.heat()
    there = after.state == State.RESIDENT
    assert there.sum() in {pool // 64 - 1, pool // 64}
    assert there[after.protected].all()
    assert heat[there & ~after.protected].min() >= heat[~there].max()
    for name_ in ("score", "sealed", "stored", "protected"):
        np.testing.assert_array_equal(getattr(after, name_), getattr(before, name_))
    new.check_integrity()
    assert len(answer(new, MORE[:70])) == 40
    new.check_integrity()


#
# a part of it
#

COVERING: dict[str, Any] = {"n_ctx": 2048, "pool": 2048, "snapshots": True}


def test_snapshots_keep_a_pool_that_covers_the_context(opened: Open) -> None:
    assert opened(**COVERING).n_pool == 2048


def forced(kv: KVFlash, n: int = 20) -> np.ndarray[Any, Any]:
    """The logits of tokens that are given, one by one."""
    return np.array([kv.logits() for token in MORE[500 : 500 + n] if kv.decode([int(token)]) is not None])


def close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> bool:
    """But for the order of sums: chunks may lie elsewhere."""
    return bool(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 5e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_part_is_restored_for_a_text_that_goes_another_way(opened: Open, snap: Path, name: str) -> None:
    """Up to the last chunk's end, or checkpoint, that both have: as if no more had ever been read."""
    kv, control = (opened(name, **COVERING) for _ in range(2))
    read(kv, 1000)
    read(kv, 1600)
    kv.save(snap)
    text = np.concatenate([TOKENS[:1200], MORE[:200]])
    n = kv.restore(snap, text)
    assert n == (1152 if name == "qwen3" else 960)  # the checkpoints are at 960 and 1536
    assert kv.n_tokens == n
    np.testing.assert_array_equal(kv.tokens, text[:n])
    kv.check_integrity()
    read(control, n)
    for one in (kv, control):
        for _ in one.prefill(text[n:]):
            pass
    assert close(kv.logits(), control.logits())
    assert close(forced(kv), forced(control))
    kv.check_integrity()


def test_the_text_after_a_part_is_that_of_the_part_alone(opened: Open, document: NeedlePrompt, snap: Path) -> None:
    """The codes of what was cut off are unknown, and the others are told alike."""
    kv = opened("needle", pool=4096, n_ctx=4096, snapshots=True)
    text = kv.tokenize(document.text)
    for _ in kv.prefill(text):
        pass
    kv.save(snap)
    prompt = np.concatenate([text[:1300], kv.tokenize(" " + document.needles[0].question, add_special=False)])
    n = kv.restore(snap, prompt)
    assert n == 1280
    chosen = Chosen(0.05, relative_rms)  # it was 0.015: the last batches are of other sizes
    with held(chosen):
        want = answer(kv, prompt, 30, append=False)
    assert kv.restore(snap, prompt) == n
    with held(chosen):
        got = answer(kv, prompt[n:], 30)
    assert got == want
    assert chosen.n_held == 30
    assert document.needles[0].answer in kv.detokenize(got)


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_begins_with_all_of_it_restores_all(opened: Open, snap: Path, name: str) -> None:
    kv = opened(name)
    read(kv, 2000).save(snap)
    want = go_on(kv)
    assert kv.restore(snap, np.concatenate([TOKENS[:2000], MORE])) == 2000
    assert_same(go_on(kv), want)


def test_a_prompt_that_is_all_of_it_leaves_a_token_to_decode(opened: Open, snap: Path) -> None:
    kv = opened(policy="lru")
    read(kv, 1600).save(snap)  # 25 chunks
    assert kv.restore(snap, TOKENS[:1600]) == 1536
    assert kv.restore(snap, TOKENS[:1601]) == 1600
    assert kv.restore(snap, TOKENS[:1500]) == 1472
    assert kv.restore(snap, TOKENS[:65]) == 64
    with pytest.raises(SnapshotError, match="the first 64 are those of this text"):
        kv.restore(snap, TOKENS[:64])
    assert kv.n_tokens == 0
    kv.check_integrity()


def test_a_prompt_restores_no_token_of_an_answer_that_is_not_decoded(opened: Open, snap: Path) -> None:
    kv = opened("needle")
    answer(kv, TOKENS[:300], 10, append=False)
    assert kv._pending is not None
    kv.save(snap)
    kv.restore(snap, [*kv.tokens, 7, 8])
    assert kv._pending is None


def test_a_part_is_saved_up_to_a_chunk_s_end(opened: Open, snap: Path) -> None:
    kv, control = opened(**COVERING), opened(**COVERING)
    read(kv, 1500)
    assert kv.checkpoints == list(range(64, 1500, 64))
    kv.save(snap, 640)
    assert len(whole(snap).contents.tokens) == 640
    assert kv.restore(snap) == 640
    kv.check_integrity()
    assert close(forced(kv), forced(read(control, 640)))


@pytest.mark.parametrize("name", STATEFUL)
def test_a_part_is_saved_up_to_a_checkpoint(opened: Open, snap: Path, name: str) -> None:
    kv, control = opened(name, **COVERING), opened(name, **COVERING)
    for end in (300, 700, 1500):
        read(kv, end)
    assert kv.checkpoints == [256, 640, 1472]
    kv.save(snap, 640)
    assert kv.restore(snap) == 640
    kv.check_integrity()
    assert kv.checkpoints == [256]
    assert close(forced(kv), forced(read(control, 640)))


@pytest.mark.parametrize("name", MODELS)
def test_other_numbers_of_positions_are_refused(opened: Open, snap: Path, name: str) -> None:
    kv = read(opened(name, **COVERING), 700)
    for n in (-64, 100, 699, 701, 768):
        with pytest.raises(UsageError, match=rf"{n} positions cannot be saved of 700: give one of .*640, 700"):
            kv.save(snap, n)
    assert not snap.exists()
    kv.save(snap, 700)
    assert whole(snap).contents.sequence["n_tokens"] == 700


@pytest.mark.parametrize("name", STATEFUL)
def test_without_checkpoints_only_all_can_be_saved(opened: Open, snap: Path, name: str) -> None:
    """And restored: where a state was not kept, nothing is cut."""
    kv = read(opened(name), 700)
    assert kv.checkpoints == []
    with pytest.raises(UsageError, match="640 positions cannot be saved of 700: give one of 700"):
        kv.save(snap, 640)
    kv.save(snap)
    with pytest.raises(SnapshotError, match="of its 700 tokens the first 650 are those of this text"):
        kv.restore(snap, np.concatenate([TOKENS[:650], MORE]))
    assert kv.n_tokens == 0


@pytest.mark.parametrize("name", MODELS)
def test_what_went_on_after_a_restore_can_be_cut_as_well(opened: Open, snap: Path, name: str) -> None:
    """The end of what was restored, in the middle of a chunk, is no place to cut at."""
    kv = opened(name, **COVERING)
    read(kv, 700).save(snap)
    kv.restore(snap)
    read(kv, 1000).save(snap)
    n = kv.restore(snap, np.concatenate([TOKENS[:800], MORE]))
    assert n == (768 if name == "qwen3" else 640)
    kv.check_integrity()
    assert kv.n_tokens == n


@pytest.mark.parametrize("name", STATEFUL)
def test_where_a_restored_text_ended_is_no_checkpoint(opened: Open, snap: Path, name: str) -> None:
    """Unless a chunk ended there."""
    kv = opened(name, **COVERING)
    read(kv, 700).save(snap)
    kv.restore(snap)
    read(kv, 1000)
    assert kv.checkpoints == [640, 960]


def test_rollback_forgets_later_checkpoints(opened: Open) -> None:
    kv = opened("gemma4", **COVERING)
    read(kv, 300)
    read(kv, 700)
    assert kv.checkpoints == [256, 640]
    kv.rollback(600)
    assert kv.checkpoints == [256]
    kv.clear()
    assert kv.checkpoints == []


#
# what cannot be used
#


def usable_afterwards(kv: KVFlash) -> None:
    """The sequence is empty, and reads a text as a new one does."""
    assert kv.n_tokens == 0
    kv.check_integrity()
    read(kv, 300)
    kv.check_integrity()


@pytest.fixture(scope="module")
def saved(tiny_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of 2,000 tokens of qwen3."""
    res = tmp_path_factory.mktemp("saved") / "text.kvsnap"
    with KVFlash.from_file(tiny_path("qwen3"), **SMALL) as kv:
        read(kv, 2000).save(res)
    return res


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "cache types": ({"type_k": "q8_0", "type_v": "q8_0"}, r"its layers or cache types are others \(-ctk, -ctv\)"),
    "chunk": ({"chunk": 32}, r"its chunks have 64 positions, and 32 here \(--kvflash-chunk\)"),
    "flash attention": ({"flash_attn": "off"}, r"its cache is laid out or rotated otherwise: flags \d, and \d here"),
    "context": ({"n_ctx": 1536, "pool": 1024}, "it has 2000 positions, and the context 1536: use a larger -c"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_snapshot_of_another_cache(opened: Open, saved: Path, what: str) -> None:
    options, why = OTHERS[what]
    kv = read(opened(**options), 100)
    with pytest.raises(SnapshotError, match=why) as err:
        kv.restore(saved)
    assert f"{saved} cannot be used: " in str(err.value)
    usable_afterwards(kv)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_snapshot_of_another_architecture(opened: Open, saved: Path, name: str) -> None:
    kv = opened(name)
    with pytest.raises(SnapshotError, match="another model"):
        kv.restore(saved)
    usable_afterwards(kv)


def test_a_snapshot_of_other_weights(saved: Path, tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    data = bytearray(tiny_path("qwen3").read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with KVFlash.from_file(path, **SMALL) as kv:
        with pytest.raises(SnapshotError, match="it is of another model"):
            kv.restore(saved)
        usable_afterwards(kv)


def test_a_snapshot_of_the_same_model_under_another_name(
    saved: Path, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "moved.gguf"
    path.write_bytes(tiny_path("qwen3").read_bytes())
    with KVFlash.from_file(path, **SMALL) as kv:
        assert kv.restore(saved) == 2000


def test_a_snapshot_of_another_text(opened: Open, saved: Path) -> None:
    kv = opened()
    with pytest.raises(SnapshotError, match="of its 2000 tokens the first 0 are those of this text"):
        kv.restore(saved, MORE)
    usable_afterwards(kv)


def test_a_pool_that_has_no_room(opened: Open, saved: Path) -> None:
    """The other sequence holds what a restored one needs at once: it is said, and both go on."""
    first, second = opened(n_parallel=2, pool=1024, n_batch=64, pins=((0, 300),)).sequences
    read(first, 300)
    second.restore(saved)
    first.check_integrity()
    second.check_integrity()
    assert first.n_tokens == 300
    assert second.residency().state[[0, 28, 29, 30, 31]].min() == State.RESIDENT


def test_pins_that_a_smaller_pool_has_no_room_for(opened: Open, snap: Path) -> None:
    kv, new = opened(pool=4096), opened(pool=768)
    kv.pin(0, 1900)
    read(kv, 3000).save(snap)
    with pytest.raises(SnapshotError, match="are protected"):
        new.restore(snap)
    usable_afterwards(new)
    read(new, 2000)
    assert not new.pager.ledger.pins


NO_FILES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "missing": (lambda _: None, SnapshotError, "cannot be read: No such file"),
    "empty": (lambda path: path.touch(), SnapshotError, "it has 0 bytes, fewer than a header"),
    "short": (lambda path: path.write_bytes(b"\x93KVSNAP\n"), SnapshotError, "it has 8 bytes, fewer than a header"),
    "text": (lambda path: path.write_text("a text\n" * 1000), SnapshotError, "does not begin with the magic bytes"),
    "directory": (lambda path: path.mkdir(), UsageError, "is a directory: give the name of a snapshot in it"),
}


@pytest.mark.parametrize("what", NO_FILES)
def test_no_snapshot(opened: Open, snap: Path, what: str) -> None:
    make, error, why = NO_FILES[what]
    make(snap)
    kv = opened()
    with pytest.raises(error, match=why) as err:
        kv.restore(snap)
    assert str(snap) in str(err.value)
    assert "\n" not in str(err.value)
    usable_afterwards(kv)


def test_the_sequence_stays_if_the_file_cannot_be_opened(opened: Open, snap: Path) -> None:
    kv = read(opened(), 300)
    with pytest.raises(SnapshotError):
        kv.restore(snap)
    assert kv.n_tokens in {0, 300}
    kv.check_integrity()


#
# damage that is found when a record is used
#


def damaged(path: Path, chunk: int, to: Path) -> SnapshotFile:
    """A copy in which a bit of a chunk's record is flipped."""
    file = SnapshotFile(path)
    pitch, lead = record_place(file.contents.identity)
    data = bytearray(path.read_bytes())
    data[int(file.header["sections"][-1]["offset"]) + chunk * pitch + lead + 5000] ^= 4
    to.write_bytes(data)
    return SnapshotFile(to)


def chunk_that_is(file: Path, state: State) -> int:
    """In the middle of those of that state."""
    chunks = np.flatnonzero(SnapshotFile(file).contents.chunks["state"] == state)
    return int(chunks[len(chunks) // 2])


@pytest.mark.parametrize("policy", ["qk", "lru"])
def test_a_damaged_record_that_comes_back_at_once(opened: Open, saved: Path, snap: Path, policy: str) -> None:
    chunk = chunk_that_is(saved, State.RESIDENT)
    kv = opened(policy=policy)
    with pytest.raises(SnapshotError, match=f"no whole snapshot: the record of chunk {chunk} was changed"):
        kv.restore(damaged(saved, chunk, snap))
    usable_afterwards(kv)


def first_out(file: Path) -> int:
    """The first chunk that is out."""
    return int(np.flatnonzero(SnapshotFile(file).contents.chunks["state"] == State.OUT)[0])


class Odd:
    """Wants what is furthest back, or what chance says, another one for each text. "shares": and says so much of the attention is its."""

    query = "last"

    def __init__(self, name: str) -> None:
        self.name = name
        self.shares = name == "shares"
        self.summary = "mean" if self.shares else None

    def score(self, view: View) -> Scores:
        n = len(view.candidates)
        return -np.arange(n) if self.name == "oldest" else np.random.default_rng(len(view.tokens)).random(n)


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("policy", ["qk", "oldest"])
def test_a_damaged_record_is_read_anew(opened: Open, saved: Path, snap: Path, policy: str) -> None:
    """Found by a summary, or when it comes in: there is a warning, and the answer of a run that read all of it at once."""
    options = {"policy": Odd("oldest") if policy == "oldest" else policy}
    kv, cold = opened(**options), opened(**options)
    chunk = first_out(saved)
    kv.restore(damaged(saved, chunk, snap))
    events = list(kv.generate(MORE[:100], max_tokens=40, sampling=GREEDY, append=True))
    (warning,) = [event.text for event in events if isinstance(event, Warn)]
    assert f"the record of chunk {chunk} was changed; what was restored is read again" in warning
    assert ids(events) == answer(cold, [*TOKENS[:2000], *MORE[:100]], append=False)
    assert_same(go_on(kv), go_on(cold))
    kv.check_integrity()


@pytest.mark.usefixtures("wordless")
def test_a_damaged_record_is_found_in_the_middle_of_an_answer(opened: Open, saved: Path, snap: Path) -> None:
    """The answer goes on as that of a run which read all of it up to there."""
    kv, cold = (opened(policy=Odd("chance"), prefill_reselect=False) for _ in range(2))

    def run() -> list[Event]:
        return list(kv.generate(MORE[:100], max_tokens=80, sampling=GREEDY, append=True))

    kv.restore(saved)
    never_in = kv.residency().state == State.OUT
    want = run()
    at = next(i for i, e in enumerate(want) if isinstance(e, Reselect) and e.reason == "decode")
    for event in want[:at]:
        if isinstance(event, Reselect):
            never_in[list(event.page_ins)] = False
    first = want[at]
    assert isinstance(first, Reselect)
    chunk = next(c for c in first.page_ins if c < len(never_in) and never_in[c])
    kv.restore(damaged(saved, chunk, snap))
    events = run()
    (at,) = [i for i, e in enumerate(events) if isinstance(e, Warn)]
    got, n = ids(events), len(ids(events[:at]))
    assert len(got) == 80
    assert n > 10
    assert got[:n] == ids(want)[:n]
    text = [*TOKENS[:2000], *MORE[:100], *got[:n]]
    assert got[n:] in (answer(cold, text, 80 - n, append=False), answer(cold, text[:-1], 80 - n + 1, append=False)[1:])
    kv.check_integrity()


@pytest.mark.usefixtures("wordless")
def test_a_prompt_alone_that_was_mended_leaves_no_token_behind(opened: Open, saved: Path, snap: Path) -> None:
    """The last token of the answer before is in the context once."""
    old, kv, cold = (opened(policy=policy) for policy in ("lru", Odd("oldest"), Odd("oldest")))
    old.restore(saved)
    answer(old, MORE[:70], 10)
    old.save(snap)
    text = [*old.tokens, old._pending, *MORE[:100]]
    kv.restore(damaged(snap, first_out(snap), snap.with_name("damaged.kvsnap")))
    events = list(kv.generate(MORE[:100], max_tokens=0, append=True))
    assert [event for event in events if isinstance(event, Warn)]
    assert kv.tokens.tolist() == text
    assert kv._pending is None
    assert answer(kv, MORE[100:120]) == [answer(cold, text, 0, append=False), answer(cold, MORE[100:120])][1]
    np.testing.assert_array_equal(kv.tokens, cold.tokens)


def test_a_damaged_record_that_is_asked_for(opened: Open, saved: Path, snap: Path) -> None:
    """Whoever asks is told, as often as he asks, and what does not need it goes on."""
    kv, chunk = opened(policy="lru"), first_out(saved)
    kv.restore(damaged(saved, chunk, snap))
    for _ in range(2):
        with pytest.raises(SnapshotError, match=f"the record of chunk {chunk} was changed"):
            kv.page_in(chunk)
        kv.check_integrity()
        with pytest.raises(SnapshotError, match=f"the record of chunk {chunk} was changed"):
            kv.pin(64 * chunk, 64 * chunk + 1)
        kv.check_integrity()
    with pytest.raises(SnapshotError, match=f"the record of chunk {chunk} was changed"):
        kv.save(snap.with_name("again.kvsnap"))
    assert [path.name for path in snap.parent.iterdir()] == [snap.name]
    read(kv, 2300)
    kv.check_integrity()


@pytest.mark.parametrize("then", ["clear", "restore", "close"])
def test_a_damaged_record_does_not_matter_to_what_comes_instead(
    opened: Open, saved: Path, snap: Path, then: str
) -> None:
    """Its summary, in a thread, has found it by then."""
    kv = opened(policy="qk")
    kv.restore(damaged(saved, first_out(saved), snap))
    for summary in kv.pager.summarising:
        assert isinstance(summary.exception(), SnapshotError)
    if then == "clear":
        kv.clear()
        usable_afterwards(kv)
    elif then == "restore":
        assert kv.restore(saved) == 2000
        kv.check_integrity()
    else:
        kv.close()


@pytest.mark.usefixtures("wordless")
def test_a_file_that_is_removed_after_it_was_restored(opened: Open, saved: Path, snap: Path) -> None:
    """Its map stays."""
    snap.write_bytes(saved.read_bytes())
    kv, control = opened(), opened()
    kv.restore(snap)
    snap.unlink()
    control.restore(saved)
    assert_same(go_on(kv), go_on(control))


#
# saving
#


def test_an_empty_sequence(opened: Open, snap: Path) -> None:
    kv = opened()
    for n in (None, 0):
        with pytest.raises(UsageError, match="there is nothing to save: the context is empty"):
            kv.save(snap, n)
    assert not snap.exists()


def test_the_full_cache(opened: Open, snap: Path) -> None:
    kv = read(opened(pool="off"), 100)
    for what in (lambda: kv.save(snap), lambda: kv.restore(snap), kv.capture):
        with pytest.raises((UsageError, SnapshotError)) as err:
            what()
        assert "snapshots=True" in str(err.value) or not snap.exists()
    with pytest.raises(UsageError, match=r"open the model with snapshots \(snapshots=True\)"):
        kv.save(snap)
    assert kv.n_tokens == 100


def test_a_file_is_nobody_else_s(opened: Open, snap: Path) -> None:
    read(opened(), 100).save(snap)
    assert snap.stat().st_mode & 0o777 == 0o600
    assert os.listdir(snap.parent) == [snap.name]  # noqa: PTH208 (a name)


def test_progress(opened: Open, snap: Path) -> None:
    kv, told = read(opened(), 300), []
    kv.save(snap, on_record=lambda *done: told.append(done))
    assert told == [(i, 5) for i in range(1, 6)]


@pytest.mark.parametrize(
    "where",
    [
        "missing/text.kvsnap",
        "file/text.kvsnap",
        "folder",
        pytest.param("x" * 300, id="long"),
        pytest.param("a\0b", id="nul"),
    ],
)
def test_a_place_that_cannot_be_written_to(opened: Open, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    kv = read(opened(), 300)
    with pytest.raises((SnapshotError, UsageError)) as err:
        kv.save(tmp_path / where)
    assert "\n" not in str(err.value)
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "folder"}
    kv.save(tmp_path / "text.kvsnap")
    kv.check_integrity()


def test_a_folder_that_may_not_be_written_to(opened: Open, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("nothing is forbidden to root")
    with pytest.raises(SnapshotError, match="cannot be written: Permission denied"):
        read(opened(), 100).save(folder / "text.kvsnap")


def test_a_full_disk(opened: Open, snap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence; nothing is left, what was there stays, and the sequence goes on."""
    kv = read(opened(), 300)
    kv.save(snap)
    before = snap.read_bytes()
    read(kv, 400)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(SnapshotError) as err:
            kv.save(snap)
    assert str(err.value) == f"{snap} cannot be written: No space left on device"
    assert os.listdir(snap.parent) == [snap.name]  # noqa: PTH208
    assert snap.read_bytes() == before
    kv.save(snap)
    assert len(whole(snap).contents.tokens) == 400


def test_a_file_that_may_not_grow(opened: Open, snap: Path) -> None:
    kv = read(opened(), 300)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SnapshotError, match="cannot be written: File too large"):
            kv.save(snap)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(snap.parent.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, ValueError])
def test_a_save_that_is_broken_off(opened: Open, snap: Path, error: type[BaseException]) -> None:
    """By whoever is told of its progress."""
    kv = read(opened(), 300)

    def stop(done: int, of: int) -> None:
        if done == 3:
            raise error

    with pytest.raises(error):
        kv.save(snap, on_record=stop)
    assert list(snap.parent.iterdir()) == []
    kv.rollback(100)
    assert kv.pager.records.memory._held == []
    kv.save(snap)
    whole(snap)


def test_what_a_killed_process_left_does_not_matter(opened: Open, snap: Path) -> None:
    """Of one with the same number, too, as in a container that was started again."""
    for name in (f".{snap.name}.part", f".{snap.name}.{os.getpid()}.part"):
        snap.with_name(name).write_bytes(b"half")
    read(opened(), 300).save(snap)
    whole(snap)


def test_two_at_once_under_one_name(opened: Open, snap: Path) -> None:
    """The last one stands, whole."""
    kv = read(opened(), 1000)
    captures = [kv.capture() for _ in range(2)]
    for future in [capture.begin(snap) for capture in captures]:
        future.result(30)
    whole(snap)


CHANGES: dict[str, Callable[[KVFlash], Any]] = {
    "goes on": lambda kv: [*kv.prefill(MORE[:400])],
    "is rolled back": lambda kv: kv.rollback(900),
    "is cleared": lambda kv: kv.clear(),
    "is another text": lambda kv: [kv.clear(), [*kv.prefill(MORE[:1400])]],
    "is rolled back and goes another way": lambda kv: [kv.rollback(900), [*kv.prefill(MORE[:800])]],
}


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("begun", [True, False], ids=["in a thread", "later"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_capture_is_of_its_moment(opened: Open, snap: Path, change: str, begun: bool) -> None:
    """Whatever the sequence does while, or before, it is written."""
    kv, control = (opened(policy="lru") for _ in range(2))
    for one in (kv, control):
        answer(read(one, 1300), MORE[:70])
    capture = kv.capture()
    held = threading.Event()
    if begun:
        write = capture.write

        class Slow:
            """Waits for the change."""

            def write(self, path: Path) -> int:
                held.wait(30)
                return write(path)

        future = type(capture).begin(Slow(), snap)  # type: ignore[arg-type]
    CHANGES[change](kv)
    kv.check_integrity()
    held.set()
    if begun:
        future.result(30)
    else:
        capture.write(snap)
    whole(snap)
    kv.check_integrity()
    kv.restore(snap)
    assert_same(go_on(kv), go_on(control))


def test_a_thread_writes_while_the_sequence_goes_on(opened: Open, tmp_path: Path) -> None:
    """Over and over, with nothing between the two."""
    kv = opened(policy="lru")
    for i in range(6):
        kv.clear()
        for _ in kv.prefill(np.roll(TOKENS, i)[:1200]):
            pass
        path = tmp_path / f"{i}.kvsnap"
        future = kv.capture().begin(path)
        kv.rollback(500)
        for _ in kv.prefill(MORE[:600]):
            pass
        kv.check_integrity()
        future.result(30)
        assert np.array_equal(whole(path).contents.tokens, np.roll(TOKENS, i)[:1200])
    assert kv.pager.records._holders == []
    kv.pager.records.memory.reserve(0)
    assert kv.pager.records.memory._held == []


# a process that has a sequence, and has a child of its own save it, which it kills after so many seconds, from the
# beginning or from when it writes
SAVES = """
import os, pathlib, signal, sys, time
import snapshots
from pyllama_kvflash import KVFlash
model, out = sys.argv[1:]
options = snapshots.SMALL | {"n_ctx": 4096, "pool": 4096, "policy": "lru", "snapshots": True}
with KVFlash.from_file(model, **options) as kv:
    for _ in kv.prefill(snapshots.TOKENS[:4000]):
        pass
    print(flush=True)
    for line in sys.stdin:
        n_tokens, seconds, since = line.split()
        begun = time.monotonic()
        if not (child := os.fork()):
            kv.save(out, int(n_tokens))
            os._exit(0)
        ended = False
        while since == "writing" and not ended and not any(pathlib.Path(out).parent.glob(".*.part")):
            ended = os.waitpid(child, os.WNOHANG)[0] == child
        if float(seconds) >= 0 and not ended:
            time.sleep(float(seconds))
            os.kill(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
        print(time.monotonic() - begun, flush=True)
"""
N_KILLS = int(os.environ.get("KVFLASH_KILL_ROUNDS", "20"))


def test_killed(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    """At any moment of a save: the file is the old one or the new one, whole, or is not there if there was none."""
    out = tmp_path / "text.kvsnap"
    command = [sys.executable, "-c", SAVES, tiny_path("qwen3"), out]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    rng, left, kept = random.Random(0), 0, 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
        saver.stdout.readline()

        def save(n_tokens: int, seconds: float = -1, since: str = "beginning") -> float:
            assert saver.stdin is not None
            assert saver.stdout is not None
            print(n_tokens, seconds, since, file=saver.stdin, flush=True)
            return float(saver.stdout.readline())

        usual = min(save(4000) for _ in range(3))
        before = 4000
        for i in range(N_KILLS):
            if i % 3 == 0:
                out.unlink()
                before = 0
            n = 3200 if before == 4000 else 4000
            if i % 2:  # however busy the machine is, some are killed in the writing
                save(n, rng.choice([0, 0, 0.1 * usual]), "writing")
            else:
                save(n, rng.uniform(0, 1.1 * usual))
            if out.exists():
                found = len(whole(out).contents.tokens)
                assert found in {before, n}
                kept += found == before
                before = found
            else:
                assert before == 0
            parts = [path for path in tmp_path.iterdir() if path != out]
            assert all(path.name.startswith(f".{out.name}.") and path.suffix == ".part" for path in parts)
            left += len(parts)
            for path in parts:
                path.unlink()
            if not before:
                save(4000)
                before = 4000
    assert left, "all were killed before or after the writing"
    assert kept
