"""Sequences that are saved and put back: what follows is what would have followed.

Equal means equal bits, unless it is said otherwise. How a file is laid out is tested in test_snapshot_format.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles, snapshots
from support.changes import ENGINE, crossed
from support.runs import MODELS, Open
from support.snapshots import (
    GREEDY,
    MORE,
    STATEFUL,
    TOKENS,
    Case,
    Odd,
    Other,
    answer,
    assert_same,
    go_on,
    ids,
    read,
    seen,
    whole,
    with_policy,
)

from pyllama_kvflash import KVFlash, Reselect, Token, as_dict
from pyllama_kvflash.cli.needles import ask
from pyllama_kvflash.errors import SnapshotError, UsageError
from pyllama_kvflash.native import Context
from pyllama_kvflash.needle import BUNDLED_DRAFTER, BUNDLED_MODEL, NeedlePrompt
from pyllama_kvflash.options import Spec
from pyllama_kvflash.policy import Schedule
from pyllama_kvflash.pool import checkpoints

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

saved = snapshots.saved
snap = snapshots.snap
wordless = snapshots.wordless

SMALL = snapshots.SMALL


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    """Another process."""
    with Other() as res:
        yield res


#
# what follows is what would have followed
#

# the evictions of 2,000 tokens are those of 8,192, and quantised caches take long to read
LONG = os.environ.get("KVFLASH_SNAPSHOT_TOKENS", "").split()  # minutes each
CASES = [
    *(Case(name, "f16", "qk", 8192, beside=True) for name in [*MODELS, "needle"]),
    *(Case(name, "f16", "qk", 1500) for name in [*MODELS, "needle"]),
    *(Case(name, "f16", "fresh", 1500) for name in ["qwen35", "gemma4"]),
    Case("qwen3", "q8_0", "fresh", 1300),
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


def is_daily(case: Case) -> bool:
    """The short texts of all models, and one in a quantised cache."""
    return case.n < 8192 and (case.cache == "f16" or (case.name, case.policy) == ("qwen3", "fresh"))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if is_daily(c) else [pytest.mark.nightly], id=str(c)) for c in CASES]
)
@pytest.mark.usefixtures("wordless")
def test_what_follows_is_what_would_have_followed(
    opened: Open, other: Other, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after a prompt, after an answer, and in the middle of one, where queries are being copied: in the same process, and in
    another.
    """
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
    selector = kv.sequence.selector
    while n < 20 or (case.beside and selector and selector._ticket is None):
        n += isinstance(next(middle), Token)
    compare()
    middle.close()

    for run in runs:
        assert np.count_nonzero(~run["resident"]) >= 3
    assert [run["numbers"][3] >= 0 for run in runs] == [False, True, True]  # a token that is not decoded yet
    for got, want in zip(other.goes_on(kv.model.path, case, paths, tmp_path / "new.npz"), runs, strict=True):
        assert_same(got, want)


@pytest.mark.nightly(ENGINE)
@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize(
    ("how", "where"),
    crossed(
        [
            *((name, "qk-cos", True) for name in MODELS),
            *((name, "shares", False) for name in MODELS),
            ("qwen3", "qk", False),
            ("qwen3", "lru", True),
            ("qwen3", "fresh", False),
        ],
        ["elsewhere", "here", "unsaved"],
    ),
)
def test_an_answer_goes_on_as_if_it_had_not_been_broken_off(
    opened: Open, snap: Path, how: tuple[str, str, bool], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any token: before a scoring, when its queries are being copied, and while it is under way. Where it is all at one token, as on a CPU, there is nothing under way between two of them, but some tokens are decoded twice."""
    name, policy, beside = how
    monkeypatch.setattr(Context, "pinned", property(lambda _self: beside))
    monkeypatch.setattr(Schedule, "_behind", lambda _self: 4)  # as if to score took three tokens

    def anew() -> KVFlash:
        return opened(name, **with_policy(Odd("shares") if policy == "shares" else policy))

    kv = anew()
    events = list(read(kv, 1500).generate(MORE[:70], max_tokens=60, sampling=GREEDY, append=True))
    want, end = ids(events), seen(kv)
    scored = [e.pos for e in events if isinstance(e, Reselect) and e.reason == "decode" and e.pos > 1570]
    assert len(set(scored)) == (0 if policy in {"lru", "fresh"} else 3)  # every 16 tokens, or 4 later
    if policy != "qk":  # which may have missed something, or not
        assert (len(scored) > 3) == (policy == "shares" and name != "qwen35"), "was a token decoded again?"
    kv.clear()
    got, phases = answer(read(kv, 1500), MORE[:70], 1), set()
    while len(got) < len(want):
        if selector := kv.sequence.selector:
            phases |= {"asked"} if selector._ticket is not None else {"scoring"} if selector._job else set()
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
        assert phases == ({"asked", "scoring"} if beside else set())


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("under_way", [16, 17], ids=["asked", "scoring"])
def test_what_was_under_way_on_a_gpu_goes_on_without_one(
    opened: Open, snap: Path, under_way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scoring that was begun beside decode, restored where there is no such thing; and back."""
    monkeypatch.setattr(Context, "pinned", property(lambda _self: True))
    monkeypatch.setattr(Schedule, "_behind", lambda _self: 4)  # as if to score took three tokens
    kv = opened(policy="qk-cos")
    answer(read(kv, 1500), MORE[:70], 1 + under_way)
    selector = kv.sequence.selector
    assert (selector._ticket is not None, selector._job is not None) == (under_way == 16, under_way == 17)
    kv.save(snap)
    monkeypatch.setattr(Context, "pinned", property(lambda _self: False))
    new = opened(policy="qk-cos")
    new.restore(snap)
    events = list(new.generate([], max_tokens=40, sampling=GREEDY, append=True))
    positions = [event.pos - 1570 for event in events if isinstance(event, Reselect)]
    assert positions == [under_way + 1, 32, 48]  # there, all of it is within a token
    new.check_integrity()
    new.save(snap)
    kv.restore(snap)
    answer(kv, [], 40)
    kv.check_integrity()


@pytest.mark.nightly(ENGINE)
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
@pytest.mark.parametrize("policy", ["lru", "fresh"])
@pytest.mark.parametrize("n", [700, 1500], ids=["fits", "is larger"])
def test_an_exact_prompt_lies_where_it_lay(opened: Open, snap: Path, policy: str, n: int) -> None:
    """Although no attention has read the pool by then."""
    kv = opened(prefill="exact", **with_policy(policy))
    read(kv, n).save(snap)
    block = kv.residency().block
    want = go_on(kv)
    kv.restore(snap)
    np.testing.assert_array_equal(kv.residency().block, block)
    want["numbers"][2] = max(256, want["numbers"][2])  # the width, which was 0
    assert_same(go_on(kv), want)


@pytest.mark.nightly(ENGINE)
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


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize(
    "to", [1999, 777, 64, 0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1984, 1930, 1))]
)
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
    return needles.document(2500)


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


@pytest.mark.nightly(ENGINE)
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
@pytest.mark.parametrize(("pool", "name"), crossed([768, 2048], MODELS))
def test_another_pool_has_the_hottest(opened: Open, snap: Path, name: str, pool: int) -> None:
    """What must be there, and the best of the rest."""
    kv, new = opened(name, policy="qk"), opened(name, policy="qk", pool=pool)
    before = read(kv, 2000).residency()
    kv.save(snap)
    assert new.restore(snap) == 2000
    after, heat = new.residency(), new.pager.ledger.heat()
    there = after.resident
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
    assert kv.sequence.pending is not None
    kv.save(snap)
    kv.restore(snap, [*kv.tokens, 7, 8])
    assert kv.sequence.pending is None


def test_a_part_is_saved_up_to_a_chunk_s_end(opened: Open, snap: Path) -> None:
    kv, control = opened(**COVERING), opened(**COVERING)
    read(kv, 1500)
    assert kv.checkpoints == list(range(64, 1500, 64))
    kv.save(snap, 640)
    assert len(whole(snap).contents.tokens) == 640
    assert kv.restore(snap) == 640
    kv.check_integrity()
    assert close(forced(kv), forced(read(control, 640)))


@pytest.fixture
def cut_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at the end of a chunk in each prompt, however short."""
    monkeypatch.setattr(checkpoints, "_CUT_EVERY", 1)


@pytest.mark.usefixtures("cut_always")
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
        with pytest.raises(UsageError, match=rf"{n} of 700 positions cannot be saved: give one of .*640, 700"):
            kv.save(snap, n)
    assert not snap.exists()
    kv.save(snap, 700)
    assert whole(snap).contents.sequence["n_tokens"] == 700


@pytest.mark.parametrize("name", STATEFUL)
def test_without_checkpoints_only_all_can_be_saved(opened: Open, snap: Path, name: str) -> None:
    """And restored: where a state was not kept, nothing is cut."""
    kv = read(opened(name), 700)
    assert kv.checkpoints == []
    with pytest.raises(UsageError, match="640 of 700 positions cannot be saved: give one of 700"):
        kv.save(snap, 640)
    kv.save(snap)
    with pytest.raises(SnapshotError, match="of its 700 tokens the first 650 are those of this text"):
        kv.restore(snap, np.concatenate([TOKENS[:650], MORE]))
    assert kv.n_tokens == 0


@pytest.mark.nightly(ENGINE)
@pytest.mark.usefixtures("cut_always")
@pytest.mark.parametrize("name", STATEFUL)
def test_where_a_restored_text_ended_is_no_checkpoint(opened: Open, snap: Path, name: str) -> None:
    """Unless a chunk ended there."""
    kv = opened(name, **COVERING)
    read(kv, 700).save(snap)
    kv.restore(snap)
    read(kv, 1000)
    assert kv.checkpoints == [640, 960]
