"""A real model, small enough for every run: SmolLM2-135M-Instruct."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import real
from support.real import THREADS

from kvflash_bench.ruler_texts import SAMPLE, make_text
from pyllama_kvflash import Done, KVFlash, Sampling
from pyllama_kvflash.chat.engine import ChatTemplate

pytestmark = [pytest.mark.native, pytest.mark.slow]

model = real.model


@pytest.fixture
def full(model: Path) -> Iterator[KVFlash]:
    with KVFlash.from_file(model, n_ctx=1024, pool="off", n_threads=THREADS, n_batch=256) as kv:
        yield kv


def answer(kv: KVFlash, prompt: object, n: int) -> str:
    events = list(kv.generate(prompt, max_tokens=n, sampling=Sampling(temperature=0)))
    assert isinstance(events[-1], Done)
    return "".join(e.text for e in events if hasattr(e, "text") and not isinstance(e, Done)) + events[-1].text


def test_a_pool_that_holds_all_says_what_the_full_cache_says(model: Path, full: KVFlash) -> None:
    """Token for token, and its logits bit for bit: nothing left, so nothing may differ."""
    template = ChatTemplate(full.model)
    assert not template.warning, "it has one of its own"
    prompt = template.tokens(full.model, [{"role": "user", "content": "Write three sentences about the sea."}])
    with KVFlash.from_file(model, n_ctx=1024, pool=1024, snapshots=True, n_threads=THREADS, n_batch=256) as kv:
        assert kv.n_pool == 1024
        assert answer(kv, prompt, 48) == answer(full, prompt, 48)
        assert np.array_equal(kv.logits(), full.logits())


def test_its_own_chat_template(full: KVFlash) -> None:
    """ChatML, whose marks are single tokens of its vocabulary."""
    template = ChatTemplate(full.model)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert template.render(messages).endswith("user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = template.tokens(full.model, messages).tolist()
    (begin,) = full.tokenize("<|im_start|>", add_special=False, parse_special=True)
    assert ids.count(begin) == 3, "system, user and assistant"


@pytest.mark.nightly
def test_a_long_text_through_a_small_pool(model: Path) -> None:
    """Bounded on the device, nothing lost on the host, and the same text for the same seed."""
    with KVFlash.from_file(model, n_ctx=2048, pool=768, n_threads=THREADS, share=0) as kv:
        template = ChatTemplate(kv.model)

        def prompt(text: str) -> str:
            return template.render([{"role": "user", "content": text}])

        def count(questions: tuple) -> int:  # type: ignore[type-arg]
            return len(kv.tokenize(prompt(questions[0].text), parse_special=True))

        (question,) = make_text("single_2", 1800, count, SAMPLE.read_text("utf-8"), 1)
        ids = kv.tokenize(prompt(question.text) + question.prefix, add_special=False, parse_special=True)
        said = answer(kv, ids, 24)
        ledger = kv.pager.ledger
        assert ledger.n_resident * 64 <= kv.n_pool < kv.n_tokens
        assert len(kv.pager.records) - kv.n_tokens // 64 in {0, 1}  # of the chunk that is being written
        kv.pager.check_integrity()
        assert question.score(said, question.expected) in {0.0, 1.0}
        assert answer(kv, ids, 24) == said
