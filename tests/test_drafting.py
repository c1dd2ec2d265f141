"""Speculative decoding: what is drafted changes how fast an answer comes, and nothing about it.

A run with drafts is held against one without by the logits that each token was chosen by. They differ by rounding, for a
batch is wider: what that comes to is measured, see `noise`, and what a chunk more or less does is ten times as much. From a
token on that is a near tie the text would be another one, so the run with drafts is made to follow the one without.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import drafting
from support.changes import ENGINE
from support.drafting import CHUNK, DRAFTERS, N_ANSWER, N_MAX, PROMPT, SETTINGS, TOKENS, Knowing, Run, add_up, run, same
from support.runs import GREEDY, MODELS, Logits, Open
from support.scorers import shuffled

from pyllama_kvflash import Done, KVFlash
from pyllama_kvflash.native import ALL
from pyllama_kvflash.pool.step import Part, advance, keep

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE), pytest.mark.usefixtures("at_one_token")]

control = drafting.control
files = drafting.files
noise = drafting.noise
opened = drafting.opened
story = drafting.story


#
# the same answer
#


@pytest.mark.parametrize(
    ("name", "setting", "drafter"),
    [
        *(("qwen3", "lru", drafter) for drafter in DRAFTERS),
        *((name, "lru", "draft") for name in MODELS[1:]),
        *((name, "scored", drafter) for name in MODELS[1:] for drafter in ("dflash", "right")),
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
        n_right = {step.n_right for step in steps}
        assert (
            n_right >= {0, 1, N_MAX} if setting == "scored" else n_right == set(range(N_MAX + 1))
        )  # a scoring ends drafts
    if drafter == "right" and setting == "lru":
        assert sum(step.n > 1 and (step.start + step.n) % CHUNK == 0 for step in steps) >= 2, "up to a border"
    if drafter == "right" and setting == "resident":
        border = [CHUNK - step.start % CHUNK for step in steps]
        assert any(0 < b < step.n for b, step in zip(border, steps, strict=True)), "over a border"
        assert any(step.n <= b < step.width for b, step in zip(border, steps, strict=True)), "not over it after all"


def keeping(kv: KVFlash, batch: npt.NDArray[np.int32], n: int) -> None:
    """Decode a batch, of which the first n tokens are accepted."""
    part = Part(kv.sequence, batch, draft=True)
    advance([part], ALL)
    part.accepted = n, None
    keep(part)


@pytest.mark.parametrize(("name", "pool"), [(MODELS[0], 1024), *((name, 512) for name in MODELS[1:])])
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
            keeping(kv, batch, n)
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


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("drafter", ["draft", "dflash", "ngram"])
def test_conversation(opened: Open, noise: Callable[..., float], monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """Going on, going back into a chunk that is out, and beginning anew: each answer as without drafts."""
    kv, control = opened("qwen3", DRAFTERS[drafter]), opened("qwen3")

    def both(prompt: npt.NDArray[np.int32], **kwargs: Any) -> None:
        want = run(control, monkeypatch, prompt, max_tokens=30, **kwargs)
        same(run(kv, monkeypatch, prompt, want.ids, max_tokens=30, **kwargs), want, noise("qwen3", "f16"))
        assert np.array_equal(kv.tokens, control.tokens)
        assert kv.sequence.pending == control.sequence.pending

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
# relevance
#


def apart(one: Sequence[Logits], other: Sequence[Logits]) -> float:
    """The largest difference of queries, as a share of the largest of them."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("name", MODELS)
def test_queries_are_of_the_last_token_that_stands(opened: Open, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In a step, and in all that a scorer is shown: as without drafts, and not those of what was rejected."""
    kv, control, rejected = (opened(name, {}, policy="qk", pool=1024) for _ in range(3))
    for each in (kv, control, rejected):
        list(each.prefill(PROMPT[:200]))
    for n in range(1, N_MAX + 1):
        start = kv.n_tokens
        batch = np.concatenate([TOKENS[start : start + n], TOKENS[3000 : 3000 + N_MAX + 1 - n]])
        keeping(kv, batch, n)
        for at in range(start, start + n):
            control.decode(TOKENS[at : at + 1])
        assert apart(kv.queries(), control.queries()) < 0.02
        if n == 1:
            keeping(rejected, batch, N_MAX + 1)
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
    seldom = stats({"kind": "draft", "model": "needle-draft", "gate": 100})
    assert 0 < seldom.draft_steps < 10
    assert seldom.gated_steps > 40
    sure = stats({"kind": "draft", "model": "needle-draft", "p_min": 0.99})
    assert sure.drafted < always.drafted
    assert sure.acceptance > always.acceptance
