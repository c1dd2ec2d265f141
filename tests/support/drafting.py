"""Speculative decoding: the models that draft, runs with drafts and without, and what rounding makes of them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_kvflash import Done, KVFlash, Paged, Reselect, Token
from pyllama_kvflash.engine import generation
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import ALL, Context, Model, Sampler, Speculator
from pyllama_kvflash.needle import BUNDLED_DRAFTER, BUNDLED_MODEL, make_prompt
from pyllama_kvflash.options import Spec
from pyllama_kvflash.pool.speculation import Drafts
from support import tiny
from support.runs import GREEDY, MODELS, Logits, Open, plain, text_of
from support.scorers import shuffled

N_MAX = 4
CHUNK = 16
# 32 blocks, 27 of them evictable; an answer begins a chunk every 16 tokens
SMALL: dict[str, Any] = {
    "n_ctx": 2048,
    "pool": 512,
    "chunk": CHUNK,
    "n_batch": 128,
    "n_threads": 1,
    "prefill": "pool",
    "share": 0,
    "tau": 12,
}
TOKENS = np.random.default_rng(5).integers(0, tiny.N_VOCAB - 2, 4000).astype(np.int32)
PROMPT = TOKENS[:560]  # more than the pool, and than a sliding window

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

    def checked(n_guessed: int, n_right: int, *times: Any, drafts: Drafts | None = kv.decoder.drafts) -> None:
        assert drafts is not None
        assert kv.pager.ledger.n_tokens == kv.n_tokens
        kv.pager.check_integrity()
        start, width = last[0]
        res.steps.append(Step(start, width, kv.n_tokens - start, n_right))
        Drafts.checked(drafts, n_guessed, n_right, *times)

    def before(ctx: Context, pos: int, n: int, *, drafts: Drafts | None = kv.decoder.drafts) -> None:
        assert drafts is not None
        last[0] = pos, n
        Drafts.before(drafts, ctx, pos, n)

    last = [(0, 0)]
    with patch.context() as within:
        within.setattr(generation, "Sampler", Recorder)
        if kv.decoder.drafts and kv.n_pool:
            within.setattr(kv.decoder.drafts, "checked", checked)
            within.setattr(kv.decoder.drafts, "before", before)
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


WIDTH = 61
"""Tokens of a batch that is wide enough to round as wider ones do."""


def width_noise(path: Path, width: int, options: dict[str, Any]) -> float:
    """See noise."""
    rows: list[list[Logits]] = []
    text = np.resize(PROMPT, 400 + 8 * width)
    for size in (1, width):
        spec = Spec(kind="ngram", n_max=width - 1, gate=0)
        with KVFlash.from_file(path, **{**options, "policy": "lru", "spec": spec}) as kv:
            for _ in kv.prefill(text[:400]):
                pass
            rows.append([])
            for at in range(400, len(text), size):
                kv.decode(text[at : at + size], ALL)
                rows[-1] += [kv.logits(i) for i in range(size)]
    return 4 * max(float(np.abs(a - b).max()) for a, b in zip(*rows, strict=True))


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


@pytest.fixture(scope="module")
def story() -> npt.NDArray[np.int32]:
    """Some 200 tokens of what the needle model can go on with."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        text = make_prompt(200, lambda s: len(model.tokenize(s, add_special=False)), n_needles=1, seed=3).text
        return model.tokenize(text)
