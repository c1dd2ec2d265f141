"""A server that speculates: as many sequences as it has, and the text of one that does not."""

from typing import Any

import numpy as np
import pytest
from support import serving
from support.serving import Asked, alone, check_all, parse_metrics, scheduling

from pyllama_kvflash.errors import NativeError
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_DRAFTER, BUNDLED_MODEL, make_prompt
from pyllama_kvflash.options import Spec
from pyllama_kvflash.serve.scheduler import Scheduler

pytestmark = pytest.mark.native

environment = serving.environment

SPECS = {
    "ngram": Spec(kind="ngram", n_max=4, gate=0),
    "draft": Spec(kind="draft", model=str(BUNDLED_DRAFTER), n_max=4, gate=0),
}
N = 24


@pytest.fixture(scope="module")
def copied() -> list[Any]:
    """Prompts that repeat a line, which the model goes on to copy."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        made = make_prompt(300, lambda s: len(model.tokenize(s, add_special=False)), n_needles=3, seed=4)
        lines = [f"{needle.statement}\n" * 8 for needle in made.needles]
        return [model.tokenize(made.text + line).astype(np.int32) for line in lines]


def counted(scheduler: Scheduler) -> tuple[float, float]:
    """Tokens that were drafted, and those that were right."""
    found = parse_metrics(scheduler.metrics.text())
    return found["drafted_tokens_total"], found["accepted_tokens_total"]


@pytest.mark.parametrize("kind", SPECS)
def test_many_at_once_say_what_each_says_alone(copied: list[Any], kind: str) -> None:
    """More requests than sequences; plain decoding is the control."""
    want = alone(copied, N)
    with scheduling(n_parallel=2, spec=SPECS[kind]) as scheduler:
        asked = [Asked(scheduler, prompt, N) for prompt in copied]
        assert [a.text for a in asked] == want
        assert [a.done.n_answer for a in asked] == [N] * len(copied)
        drafted, accepted = counted(scheduler)
        assert drafted > 0
        assert kind != "ngram" or accepted > N, "most of a copied text is guessed"
        again = Asked(scheduler, copied[0], N)  # its prompt is there already
        assert again.text == want[0]
        assert again.done.n_cached > 0
        check_all(scheduler)


def test_a_drafter_that_fails_ends_one_request(copied: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on, and so does the server."""
    want = alone(copied, N)
    with scheduling(n_parallel=3, spec=SPECS["ngram"]) as scheduler:
        victim = scheduler.kv.sequences[1].decoder.drafts
        guess = type(victim).guess

        def fails(self: Any, *args: Any) -> Any:
            if self is victim:
                msg = "the drafter is gone"
                raise NativeError(msg)
            return guess(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(type(victim), "guess", fails)
            asked = [Asked(scheduler, prompt, N) for prompt in copied]
            assert asked[1].failed.message == "the drafter is gone"
            assert [asked[0].text, asked[2].text] == [want[0], want[2]]
        assert [a.text for a in [Asked(scheduler, prompt, N) for prompt in copied]] == want


#
# lossless decoding, and the meter
#

SMALL: dict[str, Any] = {"pool": 512, "chunk": 16, "n_ubatch": 64, "flash_attn": "off"}


@pytest.fixture(scope="module")
def questions() -> list[Any]:
    """Prompts of a whole pool and more, and the question for a code at their beginning."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        made = [
            make_prompt(900, lambda s: len(model.tokenize(s, add_special=False)), n_needles=3, seed=i) for i in (4, 5)
        ]
        return [model.tokenize(m.text + m.needles[0].question).astype(np.int32) for m in made]


def test_clients_of_a_lossless_server_get_the_full_caches_text(questions: list[Any]) -> None:
    """Each sequence drafts and checks by itself, by turns."""
    want = alone(questions, 8, pool="off", flash_attn="off")
    with scheduling(n_parallel=2, mode="lossless", **SMALL) as scheduler:
        asked = [Asked(scheduler, prompt, 8) for prompt in questions]  # the code, which is no near tie
        assert [a.text for a in asked] == want
        drafted, accepted = counted(scheduler)
        assert drafted >= accepted > 0
        check_all(scheduler)


def test_a_server_counts_what_agrees(questions: list[Any]) -> None:
    with scheduling(n_parallel=2, meter=1.0, opening=0, **SMALL) as scheduler:
        assert all(a.done for a in [Asked(scheduler, prompt, N) for prompt in questions])
        found = parse_metrics(scheduler.metrics.text())
        assert found["checked_tokens_total"] >= found["agreed_tokens_total"] > 0
        assert found["checked_tokens_total"] >= 2 * 16
        assert found["check_seconds_total"] > 0
