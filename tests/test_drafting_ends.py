"""An answer that ends or is cut off in the middle of a draft: it is the same without drafts."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import drafting
from support.changes import ENGINE
from support.cuts import cut_off_at_every_line
from support.drafting import Knowing, add_up
from support.oracles import ON_GPU
from support.rounding import Chosen, held
from support.runs import GREEDY, Open, text_of

from pyllama_kvflash import Done, KVFlash, Sampling, Token
from pyllama_kvflash.native import Model

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

files = drafting.files
noise = drafting.noise
opened = drafting.opened
story = drafting.story

# a GPU has other kernels for a wide batch than for a token, which round otherwise
CPU_ONLY = pytest.mark.skipif(ON_GPU, reason="was not tried with what a GPU rounds by width")


#
# ends
#


def told(kv: KVFlash, prompt: Any, chosen: Chosen, **kwargs: Any) -> tuple[Any, ...]:
    """All there is to an answer: its tokens, its text, how it ended, and what is in the context then."""
    if not kwargs.get("append"):
        kv.clear()
    with held(chosen):
        events = list(kv.generate(prompt, **{"sampling": GREEDY, **kwargs}))
    done = events[-1]
    assert isinstance(done, Done)
    add_up(done)
    return (
        [e.id for e in events if isinstance(e, Token)],
        text_of(events),
        done.reason,
        kv.tokens.tolist(),
        kv.sequence.pending,
    )


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


@pytest.mark.nightly(ENGINE)
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


@pytest.mark.nightly(ENGINE)
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


@pytest.mark.nightly(ENGINE)
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
    for n in (301, 325, 331, 339):
        pair.story, pair.ids = np.array(whole[:n], np.int32), whole[n:]
        assert pair.check(max_tokens=-1) == "context"
    assert pair.knowing.n_calls >= 4


@CPU_ONLY
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "repeat_penalty": 1.2, "repeat_last_n": 32},
        {"temperature": 0.8, "dry_multiplier": 2.0, "xtc_probability": 0.5},
        {"mirostat": 2},
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


@pytest.mark.nightly(ENGINE)
def test_interrupted_anywhere(
    opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, story: npt.NDArray[np.int32]
) -> None:
    """At some lines of an answer: what is left is the beginning of what would have been, and goes on as that."""
    pair = Pair(opened, noise, monkeypatch, story, pool=256, n_batch=32)
    whole = [*story, *pair.ids]
    pair.knowing.text = whole
    start = len(story) - 1

    def fresh() -> KVFlash:
        pair.kv.clear()
        list(pair.kv.prefill(story[:start]))
        return pair.kv

    def act(kv: KVFlash) -> None:
        with held(pair.chosen):
            list(kv.generate(story[start:], max_tokens=20, sampling=GREEDY, append=True))

    def check(kv: KVFlash) -> None:
        kv.check_integrity()
        left = [*kv.tokens, *([] if kv.sequence.pending is None else [kv.sequence.pending])]
        assert left == whole[: len(left)]
        assert len(left) >= start
        with held(pair.chosen, len(left) + 1 - len(story)):
            events = list(kv.generate(whole[len(left) : len(left) + 1], max_tokens=6, sampling=GREEDY, append=True))
        assert [e.id for e in events if isinstance(e, Token)] == whole[len(left) + 1 : len(left) + 7]
        kv.rollback(start)

    step = int(os.environ.get("KVFLASH_CUT_STEP", "11"))
    _, places = cut_off_at_every_line(fresh, act, check, step=step)
    assert len(places) > 20
