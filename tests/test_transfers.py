"""Copies beside the computation: what is read and written by no wait of the host is what a wait would have given.

On the CPU every copy is done when its call returns, so these say little there; on a GPU (bench/device.sh test) they are
races that must not be lost.
"""

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import transfers
from support.changes import LIBRARY
from support.models import NAMES
from support.oracles import CACHES, Run
from support.transfers import CHUNK, POOL

from pyllama_kvflash.native import Model

pytestmark = [pytest.mark.native, pytest.mark.sampled(LIBRARY)]

TYPES = ("f16", "q8_0", "f16-nofa")


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[[str], Model]) -> Model:
    """Each class of memory."""
    return tiny_model(request.param)


@pytest.mark.nightly(LIBRARY)
@pytest.mark.parametrize("cache", TYPES)
def test_a_chunk_may_be_dropped_and_overwritten_while_it_is_read(model: Model, cache: str) -> None:
    """Write-back as the pager does it, against one that waits: the same records, the same logits."""
    transfers.check_a_chunk_may_be_dropped_and_overwritten_while_it_is_read(model, cache)


@pytest.mark.parametrize("cache", TYPES)
def test_a_chunk_is_seen_from_the_next_batch_on(model: Model, cache: str) -> None:
    """Paged in without a wait, against a run that waits."""
    transfers.check_a_chunk_is_seen_from_the_next_batch_on(model, cache)


@pytest.mark.parametrize("cache", TYPES)
def test_chunks_are_exchanged_while_a_batch_is_computed(model: Model, cache: str) -> None:
    """Into blocks that the batch uses (dropped since) and others (dropped before): no batch sees what it must not."""
    with Run(model, CACHES[cache], pool=POOL) as quick, Run(model, CACHES[cache], pool=POOL) as slow:
        for run in (quick, slow):
            run.feed(700)
        n = len(run.resident()) - 2  # the first and the last one stay
        records = {c: r for run in (quick, slow) for c, r in run.out(range(1, n)).items()}
        for run in (quick, slow):
            for c in range(1, n, 2):
                run.ctx.page_in(c, records[c])
        place = quick.ctx.host_buffer(n * quick.ctx.pool_info().record_bytes).reshape(n, -1)
        for c, record in records.items():
            place[c] = record
        come, go = list(range(2, n, 2)), list(range(1, n, 2))
        for _ in range(6):
            for size in (32, 1):
                half = len(come) // 2
                quick.decode(size)
                blocks = {c: quick.ctx.page_in(c, place[c]) for c in come[:half]}
                for c in go:
                    quick.ctx.drop(c)
                blocks |= {c: quick.ctx.page_in(c, place[c]) for c in come[half:]}
                np.testing.assert_array_equal(quick.ctx.logits(), slow.feed(size)[-1])
                for c in go:
                    slow.ctx.drop(c)
                for c in come:
                    slow.ctx.page_in(c, records[c], blocks[c])
                come, go = go, come
            np.testing.assert_array_equal(quick.feed(1), slow.feed(1))
        for c in go:
            np.testing.assert_array_equal(quick.read(c), records[c])


def test_blocks_go_round_without_a_wait(tiny_model: Callable[[str], Model]) -> None:
    """Read, drop, bring in and decode, hundreds of times, with no wait but the last: every record is still what it was."""
    rng = np.random.default_rng(5)
    with Run(tiny_model("qwen3"), CACHES["q8_0"], pool=POOL) as run:
        run.feed(14 * CHUNK)
        place = run.ctx.host_buffer(14 * run.ctx.pool_info().record_bytes).reshape(14, -1)
        for c in range(14):
            run.ctx.begin_read(c, place[c])
        want = {c: run.read(c) for c in range(14)}
        out: list[int] = []
        for _ in range(300):
            c = int(rng.choice([c for c in run.resident() if c < 14 and c not in (0, 13)]))
            run.ctx.begin_read(c, place[c])
            run.ctx.drop(c)
            out.append(c)
            if len(out) > 4:
                back = out.pop(0)
                run.ctx.page_in(back, place[back])
                if rng.random() < 0.5:
                    run.decode(1)
                    run.ctx.attn_seq_rm(run.pos - 1, run.pos)
                    run.pos -= 1
        for c in out:
            run.ctx.page_in(c, place[c])
        for c, record in want.items():
            np.testing.assert_array_equal(place[c], record, f"chunk {c} on the host")
            np.testing.assert_array_equal(run.read(c), record, f"chunk {c} in the pool")


def test_queries_are_those_of_the_token_before_the_next(model: Model) -> None:
    """A tap that is read while the next token is computed."""
    transfers.check_queries_are_those_of_the_token_before_the_next(model)
