"""The drafter: another model reads along, and its attention chooses; and what happens if it cannot."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.changes import SCORERS, SCORING
from support.rewritten import rewritten
from support.runs import GREEDY, Open, check_residency, text_of

from pyllama_kvflash import KVFlash, Reselect, Warn
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import Context
from pyllama_kvflash.native.lib import lib
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt
from pyllama_kvflash.scorers import reader
from pyllama_kvflash.scorers.reader import Reader, find_scorer_model

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {
    "n_ctx": 8192,
    "pool": 768,
    "n_threads": 1,
    "prefill": "pool",
    "share": 0,
    "policy": "drafter",
}


@pytest.fixture(autouse=True)
def no_drafters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None that the user has."""
    monkeypatch.delenv("KVFLASH_DRAFT_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open the needle model with itself as the drafter, unless told otherwise; closed after the test."""
    held: list[KVFlash] = []

    def open_(path: Path = BUNDLED_MODEL, **options: Any) -> KVFlash:
        held.append(KVFlash.from_file(path, **{**SMALL, "scorer_model": str(BUNDLED_MODEL), **options}))
        return held[-1]

    yield open_
    for kv in held:
        kv.close()


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """2,048 tokens with four codes."""
    return needles.document(2048)


@pytest.fixture(scope="module")
def brief() -> NeedlePrompt:
    """1,200 tokens with two codes, where the pool holds 768."""
    return needles.document(1200, n_needles=2)


@pytest.fixture(scope="module")
def long_document() -> NeedlePrompt:
    """3,072 tokens."""
    return needles.document(3072)


def rewrite(path: Path) -> Path:
    """The needle model without every second of its words: it spells them, so texts split otherwise."""
    reader = gguf.GGUFReader(BUNDLED_MODEL)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    tokens = [f"zq{i}x" if i >= 300 and i % 2 else token for i, token in enumerate(tokens)]
    known = set(tokens)
    merges = [m.split(" ") for m in reader.fields["tokenizer.ggml.merges"].contents()]
    replaced = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges if {a, b, a + b} <= known],
    }
    return rewritten(path, replaced)


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The needle model, which splits texts into more tokens."""
    return rewrite(tmp_path_factory.mktemp("draft") / "half.gguf")


def drafter_of(kv: KVFlash) -> Reader:
    assert kv.sequence.selector is not None
    assert isinstance(kv.sequence.selector.scorer, Reader)
    return kv.sequence.selector.scorer


def inner(kv: KVFlash) -> KVFlash:
    """The engine of its drafter."""
    found = drafter_of(kv)._kv
    assert found is not None
    return found


def warnings(events: list[Event]) -> list[str]:
    return [e.text for e in events if isinstance(e, Warn)]


def read(kv: KVFlash, text: str) -> list[Event]:
    return list(kv.prefill(kv.tokenize(text)))


#
# what it is for
#


@pytest.mark.sampled(SCORING)
@pytest.mark.parametrize("policy", ["drafter", "crosstok"])
def test_a_drafter_finds_the_codes(opened: Open, document: NeedlePrompt, policy: str) -> None:
    """A model with the same attention finds what the target's would."""
    kv = opened(policy=policy)
    assert kv.policy == policy
    found = needles.answers(kv, document)
    assert all(found.found(document.needles))
    assert kv.policy == policy, "it is the drafter that found them"
    assert (drafter_of(kv)._retokenizer is not None) == (policy == "crosstok")
    assert kv.stats().summary_bytes == 0
    assert inner(kv).n_pool == 2048
    check_residency(kv)
    inner(kv).check_integrity()


@pytest.mark.nightly(SCORERS)
def test_another_tokenizer_runs_through_the_text(opened: Open, document: NeedlePrompt, other_tokenizer: Path) -> None:
    """End to end: it splits the text otherwise, reads all of it, and its scores are applied."""
    kv = opened(policy="crosstok", scorer_model=str(other_tokenizer))
    events = read(kv, document.text)
    events += list(kv.generate(document.needles[2].question, max_tokens=40, append=True))
    assert warnings(events) == []
    assert kv.policy == "crosstok"
    theirs = inner(kv)
    assert theirs.n_tokens > 1.1 * kv.n_tokens
    assert len([e for e in events if isinstance(e, Reselect)]) > 2
    text = kv.detokenize(kv.tokens[: len(kv.tokens) - 40])
    assert theirs.detokenize(theirs.tokens).startswith(text)
    check_residency(kv)
    theirs.check_integrity()


#
# drafters that cannot
#


def broken(kind: str, path: Path, tiny_path: Callable[[str], Path]) -> Path:
    if kind == "no model":
        path.write_bytes(b"Once upon a time")
    elif kind == "half":
        path.write_bytes(BUNDLED_MODEL.read_bytes()[: BUNDLED_MODEL.stat().st_size // 2])
    elif kind == "directory":
        path.mkdir()
    elif kind == "cannot be pooled":
        path.write_bytes(tiny_path("mamba").read_bytes())
    elif kind == "no vocabulary":
        path.write_bytes(tiny_path("qwen3").read_bytes())
    return path


LOADING = pytest.mark.nightly(r"pyllama_kvflash/(loading|native|scorers)/.*")


@pytest.mark.nightly(SCORERS)
@pytest.mark.parametrize(
    ("policy", "kind", "says"),
    [
        ("drafter", "missing", "does not exist"),
        ("drafter", "half", "cannot be loaded"),
        ("drafter", "cannot be pooled", "cannot be pooled"),
        ("crosstok", "no vocabulary", "has no tokenizer"),
        pytest.param("crosstok", "missing", "does not exist", marks=LOADING),
        pytest.param("drafter", "no model", "is not a GGUF model", marks=LOADING),
        pytest.param("drafter", "directory", "is a directory", marks=LOADING),
        pytest.param("drafter", "no vocabulary", "has no tokenizer", marks=LOADING),
    ],
)
def test_qk_takes_over_from_a_drafter_that_cannot(
    opened: Open,
    brief: NeedlePrompt,
    tmp_path: Path,
    tiny_path: Callable[[str], Path],
    policy: str,
    kind: str,
    says: str,
) -> None:
    """One warning, which names the file; the codes are found, and the next run tries the drafter again."""
    path = broken(kind, tmp_path / "draft.gguf", tiny_path)
    kv = opened(policy=policy, scorer_model=str(path))
    assert kv.policy == policy
    events = read(kv, brief.text)
    end = kv.n_tokens
    for needle in brief.needles:
        more = list(kv.generate(needle.question, max_tokens=8, sampling=GREEDY, append=True))
        assert needle.answer in text_of(more)
        events += more
        kv.rollback(end)
    (warning,) = warnings(events)
    assert "\n" not in warning
    assert warning.startswith((f"{policy} cannot score: ", "crosstok cannot score: "))  # told by what it read
    assert says in warning
    assert warning.endswith("; using qk")
    assert kv.policy == "qk"
    check_residency(kv)
    kv.close()

    if path.is_dir():
        path.rmdir()
    path.write_bytes(BUNDLED_MODEL.read_bytes())
    kv = opened(policy=policy, scorer_model=str(path))
    events = read(kv, brief.text)
    assert warnings(events) == []
    assert kv.policy == policy


@pytest.mark.nightly(SCORERS)
def test_a_drafter_that_is_interrupted_ends_the_generation(
    opened: Open, brief: NeedlePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it reads: no warning, no other scorer, and the sequence stands."""
    kv = opened()
    decode, n = Context.decode, 0

    def call(self: Context, *args: Any) -> None:
        nonlocal n
        if self is not kv.ctx:
            n += 1
            if n == 2:
                lib.kvf_interrupt(True)
        decode(self, *args)

    monkeypatch.setattr(Context, "decode", call)
    try:
        events = list(kv.generate(brief.text, max_tokens=4))
    finally:
        lib.kvf_interrupt(False)
    assert events[-1].reason == "interrupted"  # type: ignore[union-attr]
    assert warnings(events) == []
    assert kv.policy == "drafter"
    kv.check_integrity()
    kv.clear()
    needle = brief.needles[0]
    assert needle.answer in text_of(list(kv.generate(brief.text + needle.question, max_tokens=8, sampling=GREEDY)))
    assert kv.policy == "drafter"


#
# where it is found
#


def test_places_of_a_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one given; next to the target, by its name and by the common one; in the named folder; in the cache."""
    monkeypatch.setenv("KVFLASH_DRAFT_DIR", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    target = tmp_path / "models" / "big.Q4.gguf"
    with pytest.raises(UsageError, match="no scorer model is found") as caught:
        find_scorer_model(None, target)
    folders = [tmp_path / "models", tmp_path / "named", tmp_path / "xdg" / "kvflash"]
    places = [folder / name for folder in folders for name in ("big.Q4-draft.gguf", "draft-scorer.gguf")]
    assert [str(caught.value).find(str(place)) > 0 for place in places] == [True] * 6
    for place in reversed(places):  # each one goes before those that are there
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"GGUF")
        assert find_scorer_model(None, target) == place
    assert find_scorer_model("mine.gguf", target) == Path("mine.gguf")

    places[0].unlink()
    places[0].mkdir()  # a folder is no drafter
    assert find_scorer_model(None, target) == places[1]


#
# what it costs
#


class Pushed:
    """Tokens that the contexts of drafters decode."""

    def __init__(self, kv: KVFlash, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        decode = Context.decode

        def call(context: Context, tokens: Any, pos: int, outputs: int = 1) -> None:
            if context is not kv.ctx:
                self.n += len(tokens)
            decode(context, tokens, pos, outputs)

        monkeypatch.setattr(Context, "decode", call)

    def take(self) -> int:
        n, self.n = self.n, 0
        return n


@pytest.mark.nightly(SCORERS)
@pytest.mark.parametrize("policy", ["drafter", "crosstok"])
def test_scoring_again_reads_what_is_new(
    opened: Open, long_document: NeedlePrompt, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Tokens a scoring do not depend on the length of the context."""
    kv = opened(policy=policy, tau=32, replay=0)
    tokens = kv.tokenize(long_document.text)
    pushed = Pushed(kv, monkeypatch)
    each = []
    for end in (1000, 2700):
        list(kv.prefill(tokens[kv.n_tokens : end]))
        pushed.take()
        for at in range(end, end + 280):
            events = kv.decode(tokens[at : at + 1])
            assert warnings(events) == []
            if any(isinstance(e, Reselect) for e in events):
                each.append((end, pushed.take()))
        assert pushed.take() == 0
    counts = [n for _, n in each]
    assert len(counts) >= 15
    assert kv.policy == policy
    if policy == "drafter":  # the four whose queries score are the last ones: none is read twice
        assert set(counts) <= {32, 33}
    assert max(counts) <= 32 + 24  # the last tokens of a text may split otherwise when it goes on
    first, last = ([n for end, n in each if end == e] for e in (1000, 2700))
    assert abs(np.mean(first) - np.mean(last)) < 8


@pytest.mark.nightly(SCORERS)
def test_rollback_of_the_target_rolls_the_drafter_back(
    opened: Open, long_document: NeedlePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = opened(replay=0, tau=1 << 20)
    tokens = kv.tokenize(long_document.text)
    list(kv.prefill(tokens[:2000]))
    theirs = inner(kv)
    assert np.array_equal(theirs.tokens, tokens[:2000])
    pushed = Pushed(kv, monkeypatch)
    kv.rollback(1200)
    other = tokens[::-1].copy()
    for at in range(1200, 1300, 50):
        kv.decode(other[at : at + 50])
    event = kv.reselect()
    assert event is not None
    assert np.array_equal(theirs.tokens, kv.tokens)
    assert pushed.take() == 100
    theirs.check_integrity()

    fresh = opened(replay=0, tau=1 << 20)  # and the scores are those of that text
    list(fresh.prefill(tokens[:1200]))
    for at in range(1200, 1300, 50):
        fresh.decode(other[at : at + 50])
    again = fresh.reselect()
    assert again is not None
    mine, its = (np.array([np.nan if s is None else s for s in e.scores]) for e in (event, again))
    mask = ~np.isnan(mine) & ~np.isnan(its)
    assert np.corrcoef(mine[mask], its[mask])[0, 1] > 0.9

    kv.clear()
    list(kv.prefill(other[:1500]))
    assert np.array_equal(theirs.tokens, other[:1500])


@pytest.mark.nightly(SCORERS)
def test_a_hybrid_drafter_begins_anew(tiny_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state cannot go back: it reads the whole sequence again, and no more than that."""
    monkeypatch.setattr(reader, "same_tokenizer", lambda _a, _b: True)  # these have none
    tokens = np.random.default_rng(1).integers(0, 512, 4000).astype(np.int32)
    options = {**SMALL, "n_ctx": 16384, "scorer_model": str(tiny_path("qwen35")), "tau": 1 << 20, "replay": 0}
    with KVFlash.from_file(tiny_path("qwen3"), **options) as kv:
        events = list(kv.prefill(tokens[:3000]))
        assert warnings(events) == []
        assert kv.policy == "drafter"
        kv.rollback(2000)
        for at in range(3000, 3100, 50):
            kv.decode(tokens[at : at + 50])
        assert kv.reselect() is not None
        assert kv.policy == "drafter"
        assert np.array_equal(inner(kv).tokens, kv.tokens)
        check_residency(kv)
