"""Speculative decoding: what is drafted changes how fast an answer comes, and nothing about it.

A run with drafts is held against one without by the logits that each token was chosen by. They differ by rounding, for a
batch is wider: what that comes to is measured, see `noise`, and what a chunk more or less does is ten times as much. From a
token on that is a near tie the text would be another one, so the run with drafts is made to follow the one without.
"""

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from rounding import Chosen, held
from test_engine import CutAtLine, text_of
from test_relevance import plain, shuffled

from pyllama_kvflash import Done, KVFlash, Paged, Reselect, Sampling, Token
from pyllama_kvflash.engine import engine
from pyllama_kvflash.engine import speculation as drafting
from pyllama_kvflash.engine.speculation import Drafts
from pyllama_kvflash.errors import Interrupted, KVFlashError, ModelError, UnsupportedError, UsageError
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import ALL, Context, Model, Sampler, Speculator, devices
from pyllama_kvflash.needle import BUNDLED_DRAFTER, BUNDLED_MODEL, make_prompt
from pyllama_kvflash.options import Spec

pytestmark = pytest.mark.native

# a GPU has other kernels for a wide batch than for a token, which round otherwise
CPU_ONLY = pytest.mark.skipif(any(d.gpu for d in devices()), reason="was not tried with what a GPU rounds by width")

Logits = npt.NDArray[np.float32]
Open = Callable[..., KVFlash]

MODELS = ["qwen3", "qwen35", "gemma4"]
N_MAX = 4
CHUNK = 16
# 32 blocks, 27 of them evictable; an answer begins a chunk every 16 tokens
SMALL: dict[str, Any] = {
    "n_ctx": 2048,
    "pool": 512,
    "chunk": CHUNK,
    "n_batch": 128,
    "n_threads": 1,
    "share": 0,
    "tau": 12,
}
GREEDY = Sampling(temperature=0)
TOKENS = np.random.default_rng(5).integers(0, tiny.N_VOCAB - 2, 4000).astype(np.int32)
PROMPT = TOKENS[:560]  # more than the pool, and than a sliding window


#
# models
#


Make = Callable[[tiny.Writer], None]
Write = Callable[[Path], None]


def dense(w: tiny.Writer) -> None:
    tiny.qwen3(w, n_embd=64, n_ff=64, n_layer=1, n_head=1, n_head_kv=1)


def worded(arch: str, model: Make) -> Write:
    return lambda path: tiny.write_worded(path, arch, model)


def dflash(**values: Any) -> Write:
    return worded("dflash", functools.partial(tiny.dflash, **values))


def filled(arch: str, model: Make, tensor: str, value: float) -> Write:
    """A model with a tensor that is all the same."""

    def make(w: tiny.Writer) -> None:
        model(w)
        np.copyto(tiny.written(w, tensor), value)

    return worded(arch, make)


def resized(arch: str, model: Make, n: int) -> Write:
    """A model with the first tokens of the vocabulary, or more, which it finds likely."""

    def write(path: Path) -> None:
        w = tiny.Writer(path, arch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "N_VOCAB", n)
            model(w)
        tiny.worded(w)
        keys = w._file.kv_data[0]
        for key, more in (("tokens", [f"[PAD{i}]" for i in range(n)]), ("token_type", [5] * n)):
            value = keys[f"tokenizer.ggml.{key}"]
            value.value = (value.value + more[tiny.N_VOCAB :])[:n]
        keys["tokenizer.ggml.mask_token_id"].value = 0
        if n > tiny.N_VOCAB and arch != "dflash":
            tiny.written(w, "output.weight")[-4:] *= 30
        w.close()

    return write


def maskless(path: Path) -> None:
    w = tiny.Writer(path, "dflash")
    tiny.dflash(w)
    tiny.worded(w)
    del w._file.kv_data[0]["tokenizer.ggml.mask_token_id"]
    w.close()


def cut(write: Write, share: float) -> Write:
    """The first part of a file."""

    def write_part(path: Path) -> None:
        write(path)
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])

    return write_part


FILES: dict[str, Write] = {
    **{name: worded(name, tiny.MODELS[name]) for name in MODELS},
    "draft": worded("qwen3", dense),
    "dflash": dflash(),
    # odd ones
    "wordless": lambda path: tiny.write("qwen3", path),
    "more tokens": resized("qwen3", dense, tiny.N_VOCAB + 8),
    "fewer tokens": resized("qwen3", dense, tiny.N_VOCAB - 8),
    "fewer tokens, dflash": resized("dflash", tiny.dflash, tiny.N_VOCAB - 8),
    "many more tokens": resized("qwen3", dense, 2 * tiny.N_VOCAB),
    "more tokens, dflash": resized("dflash", tiny.dflash, tiny.N_VOCAB + 8),
    "nan": filled("qwen3", dense, "output_norm.weight", np.nan),
    "inf": filled("qwen3", dense, "output.weight", np.inf),
    "nan dflash": filled("dflash", tiny.dflash, "fc.weight", np.nan),
    "narrow": dflash(n_embd=128),
    "wide": dflash(n_embd=512),
    "layer 9": dflash(layers=(1, 9)),
    "layer -1": dflash(layers=(-1, 2)),
    "last layer": dflash(layers=(1, 3)),
    "maskless": maskless,
    "half": cut(worded("qwen3", dense), 0.5),
    "some bytes": cut(worded("qwen3", dense), 0.001),
    "dflash without an end": cut(dflash(), 0.99),
    "empty": Path.touch,
    "text": lambda path: path.write_text("to be a model"),  # type: ignore[dict-item]
    "folder": Path.mkdir,
    "missing": lambda _: None,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The file of a model of FILES or of the bundled ones, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("drafting")

    @functools.cache
    def path(name: str) -> str:
        if name in {"needle", "needle-draft"}:
            return str(BUNDLED_MODEL if name == "needle" else BUNDLED_DRAFTER)
        res = folder / f"{name}.gguf"
        FILES[name](res)
        return str(res)

    return path


@pytest.fixture
def opened(files: Callable[[str], str]) -> Iterator[Open]:
    """Open a model by name, as SMALL says unless told otherwise. spec: of its `model`, the name."""
    with ExitStack() as stack:

        def open_(name: str, spec: dict[str, Any] | None = None, **options: Any) -> KVFlash:
            more = {} if spec is None else {"spec": how(files, **spec)}
            return stack.enter_context(KVFlash.from_file(files(name), **{**SMALL, "policy": "lru", **more, **options}))

        yield open_


def how(files: Callable[[str], str], *, kind: str = "ngram", model: str | None = None, **values: Any) -> Spec:
    return Spec(kind=kind, model=files(model) if model else None, **{"n_max": N_MAX, "gate": 0, **values})


#
# runs
#


@dataclass
class Step:
    """A batch that checked a draft: where it began, its tokens, those that stood, and the guesses among these."""

    start: int
    width: int
    n: int
    n_right: int


@dataclass
class Run:
    """An answer: its tokens, what moved, how it ended, and the logits that each token was chosen by."""

    rows: list[Logits] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [e.id for e in self.events if isinstance(e, Token)]

    @property
    def done(self) -> Done:
        assert isinstance(self.events[-1], Done)
        return self.events[-1]

    @property
    def moves(self) -> list[Event]:
        return [plain(e) for e in self.events if isinstance(e, Paged | Reselect)]


def run(
    kv: KVFlash, patch: pytest.MonkeyPatch, prompt: Any = PROMPT, script: Sequence[int] | None = None, **kwargs: Any
) -> Run:
    """Generate, greedily or what a script says, and look on. After each draft ledger, store and pool must agree."""
    res = Run()

    class Recorder(Sampler):
        def sample(self, ctx: Context, i: int = -1) -> int:
            token = super().sample(ctx, i)
            res.rows.append(ctx.logits(i))
            return token if script is None else script[len(res.rows) - 1]

    def checked(n_guessed: int, n_right: int, seconds: float, *, drafts: Drafts | None = kv._drafts) -> None:
        assert drafts is not None
        assert kv.pager.ledger.n_tokens == kv.n_tokens
        kv.pager.check_integrity()
        start, width = last[0]
        res.steps.append(Step(start, width, kv.n_tokens - start, n_right))
        Drafts.checked(drafts, n_guessed, n_right, seconds)

    def before(pos: int, n: int, *, drafts: Drafts | None = kv._drafts) -> None:
        assert drafts is not None
        last[0] = pos, n
        Drafts.before(drafts, pos, n)

    last = [(0, 0)]
    with patch.context() as within:
        within.setattr(engine, "Sampler", Recorder)
        if kv._drafts and kv.n_pool:
            within.setattr(kv._drafts, "checked", checked)
            within.setattr(kv._drafts, "before", before)
        res.events = list(kv.generate(prompt, sampling=GREEDY, **kwargs))
    if kv.n_pool:
        assert kv.pager.ledger.n_tokens == kv.n_tokens
        kv.check_integrity()
    add_up(res.done)
    return res


def add_up(done: Done) -> None:
    """Every token is of the prompt's last batch, a plain step, or a draft: the right ones and one more."""
    s = done.stats
    produced = s.n_generated + (done.reason == "eos")
    if s.draft_steps + s.plain_steps == 0:
        assert (s.drafted, s.accepted, s.gated_steps) == (0, 0, 0)
    else:
        assert produced == 1 + s.plain_steps + s.draft_steps + s.accepted
    assert 0 <= s.accepted <= s.drafted
    assert s.draft_steps <= s.drafted or s.drafted == 0
    assert s.gated_steps <= s.plain_steps


def same(drafted: Run, control: Run, floor: float) -> None:
    """Each token was chosen by the same logits, and after each the same moved."""
    assert drafted.ids == control.ids
    assert len(drafted.rows) == len(control.rows)
    for i, (a, b) in enumerate(zip(drafted.rows, control.rows, strict=True)):
        assert np.abs(a - b).max() <= floor, f"token {i}"
    assert drafted.moves == control.moves
    assert (drafted.done.reason, text_of(drafted.events)) == (control.done.reason, text_of(control.events))


@pytest.fixture(scope="module")
def noise(files: Callable[[str], str]) -> Callable[..., float]:
    """What the width of a batch does to logits with nothing moved, for a model and a type of cache: four times the most that
    was seen, for it has a tail.
    """

    @functools.cache
    def floor(name: str, cache: str, width: int = N_MAX + 1) -> float:
        return width_noise(Path(files(name)), width, {**SMALL, "type_k": cache, "type_v": cache})

    return floor


def width_noise(path: Path, width: int, options: dict[str, Any]) -> float:
    """See noise."""
    rows: list[list[Logits]] = []
    for size in (1, width):
        spec = Spec(kind="ngram", n_max=width - 1, gate=0)
        with KVFlash.from_file(path, **{**options, "policy": "lru", "spec": spec}) as kv:
            for _ in kv.prefill(PROMPT[:400]):
                pass
            rows.append([])
            for at in range(400, 400 + 8 * width, size):
                kv.decode(PROMPT[at : at + size], ALL)
                rows[-1] += [kv.logits(i) for i in range(size)]
    return 4 * max(float(np.abs(a - b).max()) for a, b in zip(*rows, strict=True))


#
# the same answer
#


N_ANSWER = 64
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "lru": dict,  # a chunk leaves at each border
    "scored": lambda: {"policy": shuffled(1), "type_k": "q8_0", "type_v": "q8_0"},  # others come every 12 tokens
    "resident": lambda: {"pool": 1024},
}
# what was read before, but for some tokens
QUOTED = np.where(
    np.random.default_rng(2).random(N_ANSWER) < 0.1, TOKENS[1000 : 1000 + N_ANSWER], PROMPT[300 : 300 + N_ANSWER]
)


@pytest.fixture(scope="module")
def control(files: Callable[[str], str]) -> Callable[..., Run]:
    """A run without drafts, with a setting."""

    @functools.cache
    def control_(name: str, setting: str, *, quoting: bool = False) -> Run:
        options = {**SMALL, "policy": "lru", **SETTINGS[setting]()}
        script = QUOTED.tolist() if quoting else None
        with KVFlash.from_file(files(name), **options) as kv, pytest.MonkeyPatch.context() as patch:
            return run(kv, patch, script=script, max_tokens=N_ANSWER)

    return control_


class Knowing:
    """Has all drafts be of what does follow in a text, but for a share of their tokens. ask: what would it have said?"""

    def __init__(
        self, patch: pytest.MonkeyPatch, text: Sequence[int], wrong: float = 0.0, *, ask: bool = False
    ) -> None:
        self.text = text
        self.n_calls = 0
        self.asked: list[tuple[int, list[int]]] = []  # what it said, by the length of the text
        rng, guess = np.random.default_rng(3), Drafts.guess

        def know(drafts: Drafts, history: Any, token: int, at_most: int) -> npt.NDArray[np.int32]:
            start = len(history) + 1
            self.n_calls += 1
            if ask:
                self.asked.append((len(history), guess(drafts, history, token, at_most).tolist()))
            assert self.text[start - 1] == token
            res = np.array(self.text[start : start + min(at_most, drafts.n_max)], np.int32)
            return np.where(rng.random(len(res)) < wrong, (res + 1) % (tiny.N_VOCAB - 2), res).astype(np.int32)

        patch.setattr(Drafts, "guess", know)
        if not ask:
            patch.setattr(Speculator, "accept", lambda _self, _n: None)  # it knows of no draft


DRAFTERS: dict[str, dict[str, Any]] = {
    "draft": {"kind": "draft", "model": "draft"},
    "dflash": {"kind": "dflash", "model": "dflash"},
    "ngram": {"kind": "ngram"},
    "right": {"kind": "ngram"},
}


@pytest.mark.parametrize(
    ("name", "setting", "drafter"),
    [
        *(("qwen3", setting, drafter) for setting in ("lru", "scored") for drafter in DRAFTERS),
        *((name, "lru", drafter) for name in MODELS[1:] for drafter in ("draft", "right")),
        *((name, "scored", drafter) for name in MODELS[1:] for drafter in ("dflash", "ngram", "right")),
        *((name, "resident", "right") for name in MODELS),
    ],
)
def test_the_same_as_without(
    opened: Open,
    control: Callable[..., Run],
    noise: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    setting: str,
    drafter: str,
) -> None:
    """With chunks that leave and come back while it drafts, whatever is right: nothing, something, or any number."""
    want = control(name, setting, quoting=drafter == "ngram")
    kv = opened(name, DRAFTERS[drafter], **SETTINGS[setting]())
    if drafter == "right":
        Knowing(monkeypatch, [*PROMPT, *want.ids, *range(N_MAX)], wrong=0.25)
    got = run(kv, monkeypatch, script=want.ids, max_tokens=N_ANSWER)
    floor = noise(name, "q8_0" if setting == "scored" else "f16")
    same(got, want, floor)
    if drafter != "ngram":  # which says what a script does
        assert all(row.max() - row[i] <= floor for row, i in zip(got.rows, got.ids, strict=True)), "no near tie"

    stats, steps = got.done.stats, got.steps
    assert stats.draft_steps >= 8
    assert (stats.pages_out == 0) if setting == "resident" else (stats.pages_out > 5)
    if drafter == "ngram":
        assert stats.accepted > 20
    if setting == "scored":
        assert stats.reselects >= 5
        assert stats.pages_in > 10
    if drafter == "right":
        assert {step.n_right for step in steps} == set(range(N_MAX + 1))
    if drafter == "right" and setting == "lru":
        assert sum(step.n > 1 and (step.start + step.n) % CHUNK == 0 for step in steps) >= 2, "up to a border"
    if drafter == "right" and setting == "resident":
        border = [CHUNK - step.start % CHUNK for step in steps]
        assert any(0 < b < step.n for b, step in zip(border, steps, strict=True)), "over a border"
        assert any(step.n <= b < step.width for b, step in zip(border, steps, strict=True)), "not over it after all"


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_a_drafter_that_is_right_by_itself(
    opened: Open,
    control: Callable[..., Run],
    noise: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The model drafts for itself: it guesses what does follow unless the chunks that are out matter."""
    want = control(name, "lru")
    got = run(opened(name, {"kind": "draft", "model": name}), monkeypatch, script=want.ids, max_tokens=N_ANSWER)
    same(got, want, noise(name, "f16"))
    stats = got.done.stats
    assert stats.accepted > 0.2 * stats.drafted


@pytest.mark.parametrize("pool", [512, 1024])
@pytest.mark.parametrize("name", MODELS)
def test_what_was_rejected_leaves_no_trace(opened: Open, noise: Callable[..., float], name: str, pool: int) -> None:
    """Bit for bit: two runs differ in what was rejected only, for any number of tokens that stand. A third one never saw any."""
    kvs = [opened(name, {}, pool=pool) for _ in range(2)]
    never = opened(name, pool=1024)
    for kv in (*kvs, never):
        for _ in kv.prefill(PROMPT[:500]):
            pass
    rng = np.random.default_rng(0)
    for n in [*range(1, N_MAX + 2), *rng.integers(1, N_MAX + 2, 8)]:
        start = kvs[0].n_tokens
        rows = []
        for kv in kvs:
            batch = rng.integers(0, 500, N_MAX + 1).astype(np.int32)
            batch[:n] = TOKENS[start : start + n]
            kv._advance_some(batch, iter([(int(n), None)]))
            assert kv.n_tokens == start + n
            rows.append(kv.logits())
        assert np.array_equal(rows[0], rows[1])
        if pool < 1024:
            continue  # a batch takes its blocks at once, and here nobody makes it end before
        for at in range(start, start + n):
            never.decode(TOKENS[at : at + 1])
        assert np.abs(rows[0] - never.logits()).max() <= noise(name, "f16")
    for size in (1, 1, 100, 1):
        for kv in kvs:
            kv.decode(TOKENS[kv.n_tokens : kv.n_tokens + size])
        assert np.array_equal(kvs[0].logits(), kvs[1].logits())
    for kv in kvs:
        assert np.array_equal(kv.tokens, TOKENS[: kv.n_tokens])
        kv.check_integrity()
    for chunk in range(500 // CHUNK, kvs[0].n_tokens // CHUNK):
        assert np.array_equal(kvs[0].pager.records.get(chunk), kvs[1].pager.records.get(chunk))


@pytest.mark.parametrize("drafter", ["draft", "dflash", "ngram"])
def test_conversation(opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """Going on, going back into a chunk that is out, and beginning anew: each answer as without drafts."""
    kv, control = opened("qwen3", DRAFTERS[drafter]), opened("qwen3")

    def both(prompt: npt.NDArray[np.int32], **kwargs: Any) -> None:
        want = run(control, monkeypatch, prompt, max_tokens=30, **kwargs)
        same(run(kv, monkeypatch, prompt, want.ids, max_tokens=30, **kwargs), want, noise("qwen3", "f16"))
        assert np.array_equal(kv.tokens, control.tokens)
        assert kv._pending == control._pending

    both(PROMPT)
    both(TOKENS[700:720], append=True)
    for each in (kv, control):
        each.rollback(200)
    both(TOKENS[100:500], append=True)
    for each in (kv, control):
        each.rollback(500)
    both(PROMPT[500:], append=True)
    for each in (kv, control):
        each.clear()
    both(PROMPT[:100], append=True)
    both(PROMPT[100:200])


#
# ends
#


def told(kv: KVFlash, prompt: Any, chosen: Chosen, **kwargs: Any) -> tuple[Any, ...]:
    """All there is to an answer: its tokens, its text, how it ended, and what is in the context then."""
    with held(chosen):
        events = list(kv.generate(prompt, **{"sampling": GREEDY, **kwargs}))
    done = events[-1]
    assert isinstance(done, Done)
    add_up(done)
    return [e.id for e in events if isinstance(e, Token)], text_of(events), done.reason, kv.tokens.tolist(), kv._pending


@pytest.fixture(scope="module")
def story() -> npt.NDArray[np.int32]:
    """Some 200 tokens of what the needle model can go on with."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        text = make_prompt(200, lambda s: len(model.tokenize(s, add_special=False)), n_needles=1, seed=3).text
        return model.tokenize(text)


class Pair:
    """The needle model with drafts that are right, and without. Its answer to the story without an end is `ids`.

    Both choose by the same logits, once these were seen to differ by no more than `floor`.
    """

    n_max = 8

    def __init__(
        self,
        opened: Open,
        noise: Callable[..., float],
        patch: pytest.MonkeyPatch,
        story: npt.NDArray[np.int32],
        **options: Any,
    ) -> None:
        self.control = opened("needle", **options)
        self.kv = opened("needle", {"n_max": self.n_max}, **options)
        self.floor = noise("needle", "f16", self.n_max + 1)
        self.story = story
        n = min(40, options.get("n_ctx", 2048) - len(story))
        self.chosen = Chosen(self.floor)
        self.ids, self.text, *_ = told(self.control, story, self.chosen, max_tokens=n)
        self.knowing = Knowing(patch, [])

    def same(self, prompt: Any, text: Sequence[int] | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """What both answer. text: what drafts are of, None: what the one without drafts has then."""
        chosen = Chosen(self.floor)
        want = told(self.control, prompt, chosen, **kwargs)
        self.knowing.text = text or want[3]
        assert told(self.kv, prompt, chosen, **kwargs) == want
        assert chosen.n_held == len(chosen.rows) >= len(want[0])
        return want

    def check(self, **kwargs: Any) -> str:
        """The same answer and, after it, the same answer to something else. How it ended."""
        reason: str = self.same(self.story, [*self.story, *self.ids], **kwargs)[2]
        if self.control.n_tokens + 30 < self.control.options.n_ctx:
            self.same(" The map is", append=True, max_tokens=12)
        return reason


def test_length_in_the_middle_of_a_draft(
    opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, story: npt.NDArray[np.int32]
) -> None:
    pair = Pair(opened, noise, monkeypatch, story)
    for n in (1, 2, 3, 5, 8, 9, 10, 18):
        assert pair.check(max_tokens=n) == "length"
    assert pair.knowing.n_calls > 20


def test_stop_string_in_the_middle_of_a_draft(
    opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, story: npt.NDArray[np.int32]
) -> None:
    pair = Pair(opened, noise, monkeypatch, story)
    for at in (0, 9, 17, 26):
        assert pair.check(max_tokens=40, stop=[pair.text[at : at + 5]]) == "stop"
    assert pair.knowing.n_calls > 10


@CPU_ONLY
def test_end_of_text_in_the_middle_of_a_draft(
    opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, story: npt.NDArray[np.int32]
) -> None:
    pair = Pair(opened, noise, monkeypatch, story)
    places = [i for i, token in enumerate(pair.ids[:9]) if token not in pair.ids[:i]]
    assert len(places) > 5
    for at in places:
        with monkeypatch.context() as patch:
            patch.setattr(Model, "is_eog", lambda _self, token, last=pair.ids[at]: token == last)
            assert pair.check(max_tokens=20) == "eos"
    assert pair.knowing.n_calls > 10


@pytest.mark.parametrize("pool", ["off", 256])
def test_full_context(
    opened: Open,
    noise: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
    story: npt.NDArray[np.int32],
    pool: int | str,
) -> None:
    pair = Pair(opened, noise, monkeypatch, np.resize(story, 300), n_ctx=340, pool=pool)
    whole = [*pair.story, *pair.ids]
    for n in (301, 322, 325, 330, 331, 332, 339):
        pair.story, pair.ids = np.array(whole[:n], np.int32), whole[n:]
        assert pair.check(max_tokens=-1) == "context"
    assert pair.knowing.n_calls >= 8


@CPU_ONLY
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8},
        {"temperature": 0.8, "repeat_penalty": 1.2, "repeat_last_n": 32},
        {"temperature": 0, "repeat_penalty": 1.3},
    ],
    ids=str,
)
def test_a_seed_gives_the_same_text(
    opened: Open, noise: Callable[..., float], story: npt.NDArray[np.int32], sampling: dict[str, Any]
) -> None:
    """The sampler is asked as often, in the same order, and told of the same tokens."""
    control = opened("needle")
    kv = opened("needle", {"kind": "draft", "model": "needle-draft"})
    for seed in range(2):
        kwargs: dict[str, Any] = {"max_tokens": 40, "sampling": Sampling(seed=seed, **sampling)}
        chosen = Chosen(noise("needle", "f16"))
        want = told(control, story, chosen, **kwargs)
        assert told(kv, story, chosen, **kwargs) == want
        assert chosen.n_held == len(chosen.rows) >= len(want[0])


#
# cut off
#


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_interrupted_in_a_check(
    opened: Open,
    noise: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: type[BaseException],
) -> None:
    """The sampler raises, after any number of tokens: the sequence is as it is without drafts, and goes on as that does."""
    control, kv = opened(name), opened(name, {})
    script = TOKENS[1000:1040].tolist()

    def cut(kv: KVFlash, at: int, prompt: Any, **kwargs: Any) -> tuple[Any, ...]:
        n = 0

        class Cut(Sampler):
            def sample(self, ctx: Context, i: int = -1) -> int:
                nonlocal n
                n += 1
                if n == at:
                    raise error
                return int(script[n - 1])

        events: list[Event] = []
        with monkeypatch.context() as patch:
            patch.setattr(engine, "Sampler", Cut)
            try:
                events.extend(kv.generate(prompt, max_tokens=20, **kwargs))
            except KeyboardInterrupt:
                assert error is KeyboardInterrupt
            else:
                assert isinstance(events[-1], Done)
                assert events[-1].reason == ("interrupted" if at <= 20 else "length")
        ids = [e.id for e in events if isinstance(e, Token)]
        return ids, kv.tokens.tolist(), kv._pending, kv.logits()

    knowing = Knowing(monkeypatch, [], wrong=0.1)
    for at in (1, 2, 4, 5, 6, 11):
        knowing.text = [*PROMPT[:100], *script]
        want, got = (cut(each, at, PROMPT[:100]) for each in (control, kv))
        if error is Interrupted:
            assert got[0] == want[0]
        assert got[1:3] == want[1:3]
        knowing.text = [*want[1], *PROMPT[100:120], *script]
        want, got = (cut(each, 99, PROMPT[100:120], append=True) for each in (control, kv))
        assert got[:3] == want[:3]
        assert np.abs(got[3] - want[3]).max() <= noise(name, "f16")
        kv.check_integrity()
    assert knowing.n_calls > 20


def test_interrupted_anywhere(
    opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, story: npt.NDArray[np.int32]
) -> None:
    """At some lines of an answer: what is left is the beginning of what would have been, and goes on as that."""
    pair = Pair(opened, noise, monkeypatch, story, pool=256, n_batch=32)
    kv, whole = pair.kv, [*story, *pair.ids]
    pair.knowing.text = whole
    start = len(story) - 1
    n_cut = 0
    list(kv.prefill(story[:start]))
    for n in range(1, 4000, int(os.environ.get("KVFLASH_CUT_STEP", "11"))):
        cut = CutAtLine(n)
        sys.settrace(cut)
        try:
            with held(pair.chosen):
                list(kv.generate(story[start:], max_tokens=20, sampling=GREEDY, append=True))
        except KeyboardInterrupt:
            n_cut += 1
        finally:
            sys.settrace(None)
        if cut.where is None:
            break
        kv.check_integrity()
        left = [*kv.tokens, *([] if kv._pending is None else [kv._pending])]
        assert left == whole[: len(left)], cut.where
        assert len(left) >= start
        with held(pair.chosen, len(left) + 1 - len(story)):
            events = list(kv.generate(whole[len(left) : len(left) + 1], max_tokens=6, sampling=GREEDY, append=True))
        assert [e.id for e in events if isinstance(e, Token)] == whole[len(left) + 1 : len(left) + 7]
        kv.rollback(start)
    assert n_cut > 20


#
# the drafter's window
#


def test_window_of_a_long_prompt(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter has cells for its window, a batch and a draft. It says what one says that has read nothing else, and the same
    beside the full cache.
    """
    made: list[Context] = []
    guess = Drafts.guess

    class Kept(Context):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(drafting, "Context", Kept)
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        document = make_prompt(2500, lambda s: len(model.tokenize(s, add_special=False)), n_needles=2, seed=2)
        tokens = model.tokenize(document.text)

    def said(
        start: int, window: int, pool: int | str, ids: Sequence[int] | None = None
    ) -> tuple[Run, dict[int, list[int]]]:
        res: dict[int, list[int]] = {}

        def keep(drafts: Drafts, history: Any, token: int, at_most: int) -> Any:
            found = guess(drafts, history, token, at_most)
            res[start + len(history)] = found.tolist()
            return found

        spec = {"kind": "draft", "model": "needle-draft", "window": window}
        kv = opened("needle", spec, n_ctx=4096, chunk=64, n_batch=256, pool=pool)
        assert made[-1].n_ctx < window + 256 + N_MAX + 1 + 256  # the library rounds up
        with monkeypatch.context() as patch:
            patch.setattr(Drafts, "guess", keep)
            return run(kv, monkeypatch, tokens[start:2300], script=ids, max_tokens=60), res

    def agree(one: dict[int, list[int]], other: dict[int, list[int]]) -> float:
        """The share of guesses that are the same, at the places where both were asked."""
        pairs = [(a, b) for n in one.keys() & other.keys() for a, b in zip(one[n], other[n], strict=False)]
        assert len(pairs) > 30
        return sum(a == b for a, b in pairs) / len(pairs)

    long, of_window = said(0, 256, 1024)
    assert long.done.stats.pages_out > 10
    assert long.done.stats.acceptance > 0.2
    assert agree(of_window, said(2300 - 256, 4096, "off", long.ids)[1]) > 0.8
    assert agree(said(1700, 512, "off", long.ids)[1], said(1700, 512, 512, long.ids)[1]) > 0.99


class Pausing:
    """A gate that is closed for some steps, after the fifth."""

    margin = 1.0
    n_pause = 0
    n_gated = 0

    def __init__(self, *_: Any) -> None:
        self.n = 0

    @property
    def open(self) -> bool:
        return not self.closed

    @property
    def closed(self) -> bool:
        return 5 <= self.n < 5 + self.n_pause

    def plain(self, _seconds: float) -> None:
        self.n += 1

    def drafted(self, _seconds: float, _committed: int) -> None:
        self.n += 1


@pytest.mark.parametrize("drafter", ["draft", "dflash"])
def test_what_the_drafter_did_not_read(
    opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """A question longer than its window, so that it goes on after a gap; drafting that stops for a while. Of a prompt it reads
    a window, and the rest of a batch, and drafts after all of these.
    """
    process, read = Speculator.process, list[int]()

    def seen(self: Speculator, tokens: npt.NDArray[np.int32], pos: int) -> None:
        read.append(pos)
        process(self, tokens, pos)

    monkeypatch.setattr(Speculator, "process", seen)

    def runs(n: int, spans: Sequence[tuple[int, int]], **options: Any) -> Iterator[Run]:
        kv, control = opened("qwen3", {**DRAFTERS[drafter], "window": 256, **options}), opened("qwen3")
        for start, end in spans:
            want = run(control, monkeypatch, TOKENS[start:end], max_tokens=n, append=True)
            got = run(kv, monkeypatch, TOKENS[start:end], want.ids, max_tokens=n, append=True)
            same(got, want, noise("qwen3", "f16"))
            yield got

    start = 0
    for got in runs(12, [(0, 300), (300, 600), (600, 1050)]):
        assert len(got.steps) >= 8
        end = got.steps[0].start
        assert end - 256 - SMALL["n_batch"] < min(read) <= max(start, end - 256)
        start = end
        read.clear()
    monkeypatch.setattr(drafting, "Gate", Pausing)
    for n_pause in (1, 40):
        Pausing.n_pause = n_pause
        (got,) = runs(60, [(0, 300)])
        assert max(b.start - a.start for a, b in itertools.pairwise(got.steps)) > n_pause


@pytest.mark.parametrize("drafter", ["draft", "dflash"])
def test_the_drafter_knows_what_stands(opened: Open, monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """After drafts of which some was right, and after a rollback, it says what it says to one who reads the text as a prompt."""
    text = TOKENS[:400].tolist()
    other = [*text[:250], *TOKENS[1000:1150].tolist()]
    knowing = Knowing(monkeypatch, text, wrong=0.3, ask=True)
    kv = opened("qwen3", DRAFTERS[drafter], pool=1024)
    run(kv, monkeypatch, text[:300], text[300:], max_tokens=40)
    said = [(text, *each) for each in knowing.asked[3::4]]
    kv.rollback(250)
    knowing.text = other
    knowing.asked.clear()
    run(kv, monkeypatch, other[250:300], other[300:], max_tokens=40, append=True)
    said += [(other, *each) for each in knowing.asked[1::5]]
    n_same = 0
    fresh = opened("qwen3", DRAFTERS[drafter], pool=1024)
    for whole, n, guesses in said:
        fresh.clear()
        list(fresh.prefill(whole[:n]))
        assert guesses
        assert fresh._drafts is not None
        fresh._drafts.begin(fresh._history)
        knowing.text = whole
        fresh._drafts.guess(fresh._history, whole[n], len(guesses))
        n_same += knowing.asked[-1] == (n, guesses)
    assert len(said) >= 6
    assert n_same >= 0.8 * len(said), "there are near ties"


#
# relevance
#


def apart(one: Sequence[Logits], other: Sequence[Logits]) -> float:
    """The largest difference of queries, as a share of the largest of them."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_queries_are_of_the_last_token_that_stands(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In a step, and in all that a scorer is shown: as without drafts, and not those of what was rejected."""
    kv, control, rejected = (opened(name, {}, policy="qk", pool=1024) for _ in range(3))
    for each in (kv, control, rejected):
        list(each.prefill(PROMPT[:200]))
    for n in range(1, N_MAX + 1):
        start = kv.n_tokens
        batch = np.concatenate([TOKENS[start : start + n], TOKENS[3000 : 3000 + N_MAX + 1 - n]])
        kv._advance_some(batch, iter([(n, None)]))
        for at in range(start, start + n):
            control.decode(TOKENS[at : at + 1])
        assert apart(kv.queries(), control.queries()) < 0.02
        if n == 1:
            rejected._advance_some(batch, iter([(N_MAX + 1, None)]))
            assert apart(rejected.queries(), control.queries()) > 0.2

    prompt, script = TOKENS[:300], TOKENS[300:370].tolist()
    scorers = shuffled(1), shuffled(1)
    options: dict[str, Any] = {"pool": 256, "n_batch": 64, "tau": 6}
    run(opened(name, policy=scorers[0], **options), monkeypatch, prompt, script, max_tokens=70)
    Knowing(monkeypatch, TOKENS.tolist(), wrong=0.4)
    got = run(opened(name, {}, policy=scorers[1], **options), monkeypatch, prompt, script, max_tokens=70)
    ends = {step.start + step.n for step in got.steps if step.n < step.width}
    views = list(zip(scorers[0].views, scorers[1].views, strict=True))
    assert ends & {len(seen.tokens) - 1 for _, seen in views}, "some were asked for after a rejection, a step before"
    for want, seen in views:
        assert np.array_equal(seen.tokens, want.tokens)
        for one, other in zip(seen.queries, want.queries, strict=True):
            assert apart(one, other) < 0.02


#
# counts
#


def test_counts(opened: Open, story: npt.NDArray[np.int32]) -> None:
    """Of drafts that pay, that do not, and none; in text of a period, drafts are shorter than they may be."""

    def stats(spec: dict[str, Any] | None, prompt: Any = story, name: str = "needle") -> Any:
        events = list(opened(name, spec).generate(prompt, max_tokens=60, sampling=GREEDY))
        done = events[-1]
        assert isinstance(done, Done)
        add_up(done)
        return done.stats

    none = stats(None)
    assert (none.drafted, none.accepted, none.draft_steps, none.plain_steps, none.gated_steps) == (0, 0, 0, 0, 0)
    always = stats({"kind": "draft", "model": "needle-draft"})
    assert 0 < always.accepted < always.drafted
    assert always.gated_steps == 0
    seldom = stats({"kind": "draft", "model": "needle-draft", "gate": 100, "sustain": 1})
    assert 0 < seldom.draft_steps < 10
    assert seldom.gated_steps > 40
    sure = stats({"kind": "draft", "model": "needle-draft", "p_min": 0.99})
    assert sure.drafted < always.drafted
    assert sure.acceptance > always.acceptance


def test_what_fills_a_batch_up_is_no_guess(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """In text of a period of six tokens, an n-gram finds five that follow, and then comes the first one again."""
    text = np.resize(TOKENS[:6], 300)
    kv = opened("qwen3", {"n_max": 16})
    run(kv, monkeypatch, text[:200], script=text[200:].tolist(), max_tokens=60)


#
# what is wrong with a drafter
#


REFUSED: list[tuple[dict[str, Any], type[KVFlashError], tuple[str, ...]]] = [
    # options
    ({"kind": "eagle9"}, UsageError, ("spec (--spec) is 'eagle9'", "draft, dflash, eagle3, mtp, ngram")),
    ({"kind": "draft"}, UsageError, ("-md/--model-draft",)),
    ({"kind": "dflash"}, UsageError, ("-md/--model-draft",)),
    ({"kind": "ngram", "model": "draft"}, UsageError, ("takes no drafter", "-md/--model-draft")),
    ({"n_max": 0}, UsageError, ("n_max (--draft-max) is 0", "from 1 to 64")),
    ({"n_max": 65}, UsageError, ("n_max (--draft-max) is 65",)),
    ({"p_min": 2}, UsageError, ("p_min (--draft-p-min) is 2",)),
    ({"p_min": np.nan}, UsageError, ("p_min (--draft-p-min) is nan",)),
    ({"window": 0}, UsageError, ("window (--draft-window) is 0",)),
    ({"gate": -1}, UsageError, ("gate (--spec-gate) is -1",)),
    ({"sustain": 0}, UsageError, ("sustain (--spec-sustain) is 0",)),
    # files
    ({"kind": "draft", "model": "missing"}, UsageError, ("missing.gguf does not exist",)),
    ({"kind": "draft", "model": "folder"}, UsageError, ("folder.gguf is a directory",)),
    ({"kind": "draft", "model": "empty"}, ModelError, ("empty.gguf is no GGUF model: it is empty",)),
    ({"kind": "draft", "model": "text"}, ModelError, ("text.gguf is no GGUF model: it begins with",)),
    ({"kind": "draft", "model": "half"}, ModelError, ("half.gguf cannot be loaded",)),
    ({"kind": "draft", "model": "some bytes"}, ModelError, ("some bytes.gguf cannot be loaded",)),
    ({"kind": "dflash", "model": "dflash without an end"}, ModelError, ("an end.gguf cannot be loaded",)),
    # drafters for something else
    ({"kind": "draft", "model": "wordless"}, UnsupportedError, ("wordless.gguf", "same vocabulary")),
    ({"kind": "draft", "model": "needle-draft"}, UnsupportedError, ("same vocabulary",)),
    ({"kind": "draft", "model": "many more tokens"}, UnsupportedError, ("same vocabulary",)),
    ({"kind": "dflash", "model": "more tokens, dflash"}, UnsupportedError, ("has 520 tokens, and the target's 512",)),
    ({"kind": "draft", "model": "qwen35"}, UnsupportedError, ("qwen35.gguf", "has a recurrent state")),
    ({"kind": "draft", "model": "dflash"}, UnsupportedError, ("dflash.gguf", "is of another type")),
    ({"kind": "dflash", "model": "draft"}, UnsupportedError, ("draft.gguf", "names no layers of the target")),
    ({"kind": "eagle3", "model": "draft"}, UnsupportedError, ("draft.gguf", "names no layers of the target")),
    ({"kind": "eagle3", "model": "dflash"}, KVFlashError, ("dflash.gguf", "not eagle3")),
    ({"kind": "mtp", "model": "draft"}, UnsupportedError, ("draft.gguf", "no heads")),
    ({"kind": "mtp"}, UnsupportedError, ("qwen3.gguf", "no heads")),
    ({"kind": "dflash", "model": "narrow"}, UnsupportedError, ("narrow.gguf", "a target 128 wide", "is 256")),
    ({"kind": "dflash", "model": "wide"}, UnsupportedError, ("wide.gguf", "a target 512 wide", "is 256")),
    ({"kind": "dflash", "model": "layer 9"}, UnsupportedError, ("layer 9 of its target, which has 3",)),
    ({"kind": "dflash", "model": "last layer"}, UnsupportedError, ("what the target's last layer gives",)),
    ({"kind": "dflash", "model": "layer -1"}, UnsupportedError, ("layer -1 of its target, which has 3",)),
    ({"kind": "dflash", "model": "maskless"}, UnsupportedError, ("maskless.gguf", "no mask token")),
]


@pytest.mark.parametrize(("spec", "error", "words"), REFUSED, ids=[str(spec) for spec, *_ in REFUSED])
def test_refused(opened: Open, spec: dict[str, Any], error: type[KVFlashError], words: tuple[str, ...]) -> None:
    """In a sentence that names the file or the option, before the first token."""
    with pytest.raises(error) as info:
        opened("qwen3", spec)
    text = str(info.value)
    for word in words:
        assert word in text
    assert "\n" not in text
    assert "ASSERT" not in text


def test_refused_together_with_something_else(opened: Open) -> None:
    with pytest.raises(UsageError, match="n_parallel is 2"):
        opened("qwen3", {}, n_parallel=2, policy="lru")
    for options in ({"n_ubatch": N_MAX + 1}, {"n_batch": N_MAX + 1}):
        with pytest.raises(UsageError, match=rf"{N_MAX} tokens only if n_batch and n_ubatch are {N_MAX + 2} at least"):
            opened("qwen35", {}, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"n_ubatch": N_MAX}),
        ("qwen3", {"n_ubatch": N_MAX + 1}),
        ("qwen3", {"n_batch": N_MAX}),
        ("gemma4", {"n_ubatch": 2}),
        ("qwen35", {"n_ubatch": N_MAX + 2}),
    ],
    ids=str,
)
def test_small_batches(
    opened: Open,
    noise: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
) -> None:
    """There is room for a draft in a graph, or there are none."""
    prompt, script = TOKENS[:300], TOKENS[300:350].tolist()
    small: dict[str, Any] = {"pool": 256, "n_batch": 64, **options}
    want = run(opened(name, policy=shuffled(1), **small), monkeypatch, prompt, script, max_tokens=50)
    Knowing(monkeypatch, TOKENS.tolist(), wrong=0.2)
    got = run(opened(name, {}, policy=shuffled(1), **small), monkeypatch, prompt, script, max_tokens=50)
    assert got.done.stats.reselects > 2
    same(got, want, noise(name, "f16"))
    assert (got.done.stats.accepted > 10) == (options not in ({"n_ubatch": 2}, {"n_ubatch": N_MAX}, {"n_batch": N_MAX}))


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "draft", "model": "nan"},
        {"kind": "draft", "model": "nan", "p_min": 0.5},
        {"kind": "draft", "model": "inf"},
        {"kind": "dflash", "model": "nan dflash"},
        {"kind": "draft", "model": "more tokens"},
        {"kind": "draft", "model": "fewer tokens"},
        {"kind": "dflash", "model": "fewer tokens, dflash"},
    ],
    ids=str,
)
def test_bad_drafters_change_nothing(
    opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    """Guesses that are no numbers or no tokens, and a text of tokens that the drafter does not know."""
    prompt, script = (
        np.array([*TOKENS[:100], 509, 508], np.int32),
        [*TOKENS[100:110].tolist(), 509, *TOKENS[110:120].tolist()],
    )
    want = run(opened("qwen3"), monkeypatch, prompt, script, max_tokens=len(script))
    same(run(opened("qwen3", spec), monkeypatch, prompt, script, max_tokens=len(script)), want, noise("qwen3", "f16"))
