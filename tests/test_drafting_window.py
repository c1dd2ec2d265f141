"""What a drafter reads of a text, and what it knows of it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import drafting
from support.changes import ENGINE
from support.drafting import DRAFTERS, N_MAX, SMALL, TOKENS, Run, run, same
from support.runs import Open

from pyllama_kvflash.native import Context, Model, Speculator
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt
from pyllama_kvflash.pool import speculation
from pyllama_kvflash.pool.speculation import Drafts

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

files = drafting.files
noise = drafting.noise
opened = drafting.opened


@pytest.mark.nightly(ENGINE)
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

    monkeypatch.setattr(speculation, "Context", Kept)
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

    def seen(self: Speculator, target: Context, tokens: npt.NDArray[np.int32], pos: int) -> None:
        read.append(pos)
        process(self, target, tokens, pos)

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
    monkeypatch.setattr(speculation, "Gate", Pausing)
    for n_pause in (1, 40):
        Pausing.n_pause = n_pause
        (got,) = runs(60, [(0, 300)])
        assert max(b.start - a.start for a, b in itertools.pairwise(got.steps)) > n_pause
