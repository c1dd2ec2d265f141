"""A prompt that begins as the text in the context does: what they share is not read again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles, snapshots
from support.changes import ENGINE, crossed
from support.oracles import ON_GPU
from support.rounding import relative_rms
from support.runs import BY_SIXTEEN, GREEDY, MODELS, TOKENS, Open, check_residency, text_of

from pyllama_kvflash import Done, KVFlash, KVSequence, Sampling
from pyllama_kvflash.errors import HostMemoryError, Interrupted, KVFlashError, UsageError
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.needle import BUNDLED_DRAFTER
from pyllama_kvflash.options import Spec
from pyllama_kvflash.pool.pager import Pager
from pyllama_kvflash.text import n_common

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

snap = snapshots.snap
wordless = snapshots.wordless

CHUNK, N_UBATCH = 16, 64
# an answer scores nothing: which of two chunks comes in could be a matter of rounding
SMALL: dict[str, Any] = {**BY_SIXTEEN, "pool": 512, "tau": 1000, "again": 0}
POOLS: list[Any] = [512, "off"]
EXACT = pytest.mark.skipif(ON_GPU, reason="a GPU sums in another order")
ROUNDING = 0.02  # of the tiny models' logits, where a batch begins elsewhere, or a chunk lies in another block


def asked(kv: KVSequence, prompt: Any, n: int = 8, **how: Any) -> Done:
    """The last event of an answer."""
    *_, done = kv.generate(prompt, max_tokens=n, sampling=GREEDY, **how)
    assert isinstance(done, Done)
    return done


def n_read(kv: KVSequence, prompt: Any, n: int = 8) -> int:
    """How many tokens of a prompt are read."""
    return asked(kv, prompt, n).stats.n_prompt


def joined(*parts: Tokens) -> Tokens:
    return np.concatenate(parts).astype(np.int32)


def check_as(kv: KVFlash, cold: KVFlash, limit: float) -> None:
    """The same text, and the same logits but for so much rounding: 0 stands for the same bits."""
    assert np.array_equal(kv.tokens, cold.tokens)
    assert cold.logits().std() > 0.1
    assert relative_rms(kv.logits(), cold.logits()) <= limit
    if kv.n_pool:
        check_residency(kv, CHUNK)


#
# questions about one text
#

DOCUMENT = needles.document(2400, seed=3)
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"prefill": "exact"},
    "through the pool": {"prefill": "pool", "policy": "qk"},
    "full": {"pool": "off"},
    "fresh": {"policy": "fresh"},
    "lossless": {"mode": "lossless"},
    "drafts": {"spec": Spec(kind="ngram", n_max=4)},
    "a drafter": {"spec": Spec(kind="draft", model=str(BUNDLED_DRAFTER))},
    "two sequences": {"n_parallel": 2, "pool": 1024, "policy": "qk"},
}
DAILY = ("exact", "fresh", "a drafter")


@pytest.mark.nightly(ENGINE)
@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("how", ["exact", "through the pool"])
def test_chunks_on_their_way_do_not_matter(opened: Open, how: str) -> None:
    """As on a GPU: a scoring is under way, and chunks are, when the next question comes."""
    check_questions(opened("needle", **WAYS[how], tau=2))


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how in DAILY else [pytest.mark.nightly(ENGINE)]) for how in WAYS]
)
def test_only_the_question_is_read(opened: Open, how: str) -> None:
    check_questions(opened("needle", **WAYS[how]).sequences[-1])


def check_questions(kv: KVSequence) -> None:
    """Each answer is right, as those of a text that is read for each question are."""
    n_text = len(kv.tokenize(DOCUMENT.text))
    held = kv.tokens
    for needle in (*DOCUMENT.needles, DOCUMENT.needles[0]):
        prompt = kv.tokenize(DOCUMENT.text + needle.question)
        common = n_common(held, prompt[:-1])
        assert common >= n_text or not len(held)
        events = list(kv.generate(DOCUMENT.text + needle.question, max_tokens=8, sampling=GREEDY, stop=["\n"]))
        assert needle.answer in text_of(events)
        assert isinstance(events[-1], Done)
        assert events[-1].stats.n_prompt == len(prompt) - common
        held = kv.tokens
        if kv.n_pool:
            kv.check_integrity()


#
# bit for bit
#

TEXT = TOKENS[: 12 * N_UBATCH]  # ends with a batch: the question's batches are those of a fresh prompt
QUESTIONS = [TOKENS[8000:8070], TOKENS[9000:9100]]


@EXACT
@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize(("name", "pool"), crossed(MODELS, POOLS))
def test_a_second_question_is_as_a_first_one(opened: Open, name: str, pool: Any) -> None:
    """The same logits, bit for bit, and the same records. A recurrent state is read again as a whole; a window can go back a bit."""
    kv, cold = opened(name, pool=pool), opened(name, pool=pool)
    asked(kv, joined(TEXT, QUESTIONS[0]), 24)
    prompt = joined(TEXT, QUESTIONS[1])
    assert n_read(kv, prompt, 0) == (len(prompt) if name == "qwen35" else len(QUESTIONS[1]))
    asked(cold, prompt, 0)
    check_as(kv, cold, 0)
    if kv.n_pool:
        for chunk in range(len(prompt) // CHUNK):
            assert np.array_equal(kv.pager.records.get(chunk), cold.pager.records.get(chunk))
        assert np.array_equal(kv.residency().resident, cold.residency().resident)


#
# what is kept
#

N = 1000  # tokens of the text in the context; its answer has 23 more
PROMPTS = {
    "the same": (TOKENS[:N], 1),
    "its beginning": (TOKENS[:700], 1),
    "one token": (TOKENS[:1], 1),
    "another": (TOKENS[5000:5600], 600),
    "one token in common": (joined(TOKENS[:1], TOKENS[5000:5600]), 601),
    "two tokens in common": (joined(TOKENS[:2], TOKENS[5000:5600]), 600),
    "longer": (joined(TOKENS[:N], TOKENS[5000:5100]), 100),
    "other in the middle of a chunk": (joined(TOKENS[:727], TOKENS[5000:5600]), 600),
}


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize(("what", "pool"), crossed(list(PROMPTS), POOLS))
def test_what_is_read(opened: Open, what: str, pool: Any) -> None:
    """All but the common beginning; and the logits are those of a fresh prompt but for rounding."""
    kv, cold = opened(pool=pool), opened(pool=pool)
    prompt, n_new = PROMPTS[what]
    assert n_read(kv, TOKENS[:N], 24) == N
    assert n_read(kv, prompt, 0) == n_new
    asked(cold, prompt, 0)
    check_as(kv, cold, ROUNDING)


@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize(("name", "pool"), crossed(MODELS, POOLS))
def test_going_on_reads_what_is_new(opened: Open, name: str, pool: Any) -> None:
    """Nothing has to go back: so of every model, and after an answer that was not decoded to its end."""
    kv, cold = opened(name, pool=pool), opened(name, pool=pool)
    asked(kv, TOKENS[:N], 24)
    held = kv.tokens
    prompt = joined(held, TOKENS[5000:5050])
    assert len(held) == N + 23
    assert n_read(kv, prompt, 0) == 50
    list(cold.prefill(TOKENS[:N]))
    for token in held[N:]:  # as the answer was decoded
        cold.decode([token])
    list(cold.prefill(prompt[len(held) :]))
    check_as(kv, cold, ROUNDING)


@EXACT
@pytest.mark.usefixtures("wordless")
@pytest.mark.parametrize("pool", POOLS)
def test_a_window_that_is_gone_is_read_again(opened: Open, pool: Any) -> None:
    kv, cold = opened("gemma4", pool=pool), opened("gemma4", pool=pool)
    asked(kv, TOKENS[:N], 24)
    prompt = joined(TOKENS[:500], TOKENS[5000:5100])
    assert n_read(kv, prompt, 0) == 600
    asked(cold, prompt, 0)
    check_as(kv, cold, 0)


@pytest.mark.usefixtures("wordless")
def test_what_was_restored_is_not_read(opened: Open, snap: Path) -> None:
    """From a snapshot: the whole prompt is given, and only the rest is read."""
    kv, other = opened(), opened()
    list(kv.prefill(TOKENS[:960]))
    kv.save(snap)
    other.restore(snap)
    assert n_read(other, TOKENS[:N], 0) == N - 960
    asked(kv, TOKENS[:N], 0)
    check_as(other, kv, ROUNDING)


@pytest.mark.usefixtures("wordless")
def test_a_sequence_that_cannot_go_back_is_read_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason, such as a record that is damaged."""

    def broken(*_: Any) -> None:
        raise KVFlashError("it cannot go back")

    kv, cold = opened(), opened()
    asked(kv, TOKENS[:N])
    with monkeypatch.context() as patch:
        patch.setattr(Pager, "rolled_back", broken)
        assert n_read(kv, TOKENS[:700], 0) == 700
    asked(cold, TOKENS[:700], 0)
    check_as(kv, cold, ROUNDING)


@pytest.mark.usefixtures("wordless")
def test_ctrl_c_while_it_goes_back_is_not_swallowed(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same prompt can be asked again."""

    def stopped(*_: Any) -> None:
        raise Interrupted("stopped")

    kv, cold = opened(), opened()
    asked(kv, TOKENS[:N])
    with monkeypatch.context() as patch:
        patch.setattr(Pager, "rolled_back", stopped)
        with pytest.raises(Interrupted):
            asked(kv, TOKENS[:700], 0)
    asked(kv, TOKENS[:700], 0)
    asked(cold, TOKENS[:700], 0)
    check_as(kv, cold, ROUNDING)


#
# a prompt that is refused
#

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "the prompt is empty"),
    (np.tile(TOKENS[:N], 5), {}, "do not fit the context"),
    ([*TOKENS[:500].tolist(), 512], {}, "token 512 is not in the vocabulary: ids are 0 to 511"),
    (np.array([*TOKENS[:500], 2**32]), {}, "token 4,294,967,296 is not in the vocabulary"),
    ([2**64], {}, r"'\[18446744073709551616\]' is not a list of token ids: give integers"),
    ([1.5, 2.0], {}, r"'\[1.5, 2.0\]' is not a list of token ids: give integers, such as"),
    (None, {}, "'None' is not a list of token ids: give integers"),
    ([TOKENS[:3], TOKENS[:3]], {}, "is not a list of token ids"),
    ([*TOKENS[:500].tolist(), -1], {}, "token -1 is not in the vocabulary"),
    (TOKENS[:500], {"max_tokens": -2}, "max_tokens"),
    (TOKENS[:500], {"stop": ["\ud800"]}, "stop"),
    (TOKENS[:500], {"sampling": Sampling(logit_bias=((5000, 1.0),))}, "logit_bias is for token 5,000"),
]


@pytest.mark.usefixtures("wordless")
def test_a_refused_prompt_leaves_the_text(opened: Open) -> None:
    kv, control = opened(), opened()
    for one in (kv, control):
        asked(one, TOKENS[:N])
    for prompt, how, says in REFUSED:
        with pytest.raises(UsageError, match=says):
            list(kv.generate(prompt, **how))
        assert kv.sequence.pending == control.sequence.pending
    for one in (kv, control):
        asked(one, [], append=True)
    check_as(kv, control, 0)


def test_tokens_beyond_the_vocabulary_are_refused_by_every_call(opened: Open, tmp_path: Path) -> None:
    """2**32 is no other token's number, in whatever type."""
    kv = opened()
    kv.decode(TOKENS[:64])
    kv.save(tmp_path / "text.kvsnap")
    wrong = np.array([2**32 + 5])
    calls = {
        "decode": lambda: kv.decode(wrong),
        "decode_each": lambda: kv.decode_each({0: 2**32 + 5}),
        "prefill": lambda: list(kv.prefill(wrong)),
        "restore": lambda: kv.restore(tmp_path / "text.kvsnap", wrong),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match=r"^token 4,294,967,301 is not in the vocabulary: ids are 0 to 511$"):
            print(name, call())
    assert np.array_equal(kv.tokens, TOKENS[:64])


@pytest.mark.usefixtures("wordless")
def test_a_prompt_beyond_the_host_limit_leaves_the_text(opened: Open) -> None:
    kv = opened(host_limit=1 << 20)
    n_most = kv.pager.shared.memory.record_bytes
    n_fit = (1 << 20) // n_most * CHUNK
    asked(kv, TOKENS[: n_fit // 2])
    held, holder = kv.tokens, kv.sequence.holder
    prompt = joined(TOKENS[: n_fit // 4], TOKENS[5000 : 5000 + n_fit])
    for append in (False, True):
        with pytest.raises(HostMemoryError):
            list(kv.generate(prompt, append=append))
        assert np.array_equal(kv.tokens, held)
        assert kv.sequence.holder is holder, "whoever had it can go on"
    fits = joined(TOKENS[: n_fit // 4], TOKENS[5000 : 5000 + n_fit // 2])
    assert n_read(kv, fits, 0) == n_fit // 2
