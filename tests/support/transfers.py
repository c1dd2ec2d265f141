"""Copies beside the computation: what is read and written by no wait of the host is what a wait would have given."""

import numpy as np

from pyllama_kvflash.native import Model, split_queries
from support.oracles import CACHES, Run

CHUNK, POOL = 64, 1024


def victims(run: Run, n: int) -> list[int]:
    """The oldest chunks, as many as n more tokens take."""
    need = -(-(run.pos + n) // CHUNK) - -(-run.pos // CHUNK) - run.ctx.pool_info().n_block_free
    return run.resident()[1 : 1 + max(0, need)]


def check_a_chunk_may_be_dropped_and_overwritten_while_it_is_read(model: Model, cache: str) -> None:
    """Write-back as the pager does it, against one that waits: the same records, the same logits."""
    with Run(model, CACHES[cache], pool=POOL) as quick, Run(model, CACHES[cache], pool=POOL) as slow:
        got, want = {}, {}
        place = quick.ctx.host_buffer(64 * quick.ctx.pool_info().record_bytes).reshape(64, -1)
        for step in range(24):
            n = 128 if step < 12 else 1 + 63 * (step % 2)
            full = range(quick.pos // CHUNK, (quick.pos + n) // CHUNK)
            for chunk in victims(quick, n):
                for run in (quick, slow):
                    run.ctx.drop(chunk)
            quick.decode(n)
            slow.decode(n)
            for chunk in full:
                quick.ctx.begin_read(chunk, place[chunk])
                got[chunk] = place[chunk]
                want[chunk] = slow.read(chunk)
        quick.ctx.wait()
        np.testing.assert_array_equal(quick.ctx.logits(), slow.ctx.logits())
        assert len(got) > POOL // CHUNK  # blocks were used again
        for chunk, record in want.items():
            np.testing.assert_array_equal(got[chunk], record, f"chunk {chunk}")


def check_a_chunk_is_seen_from_the_next_batch_on(model: Model, cache: str) -> None:
    """Paged in without a wait, against a run that waits: the same logits, the same records."""
    with Run(model, CACHES[cache], pool=POOL) as quick, Run(model, CACHES[cache], pool=POOL) as slow:
        for run in (quick, slow):
            run.feed(900)
        records = {c: r for run in (quick, slow) for c, r in run.out([2, 3, 5, 7]).items()}
        for some in ([2, 3], [5, 7]):
            for c in some:
                quick.ctx.page_in(c, records[c])
                slow.ctx.page_in(c, records[c])
                slow.ctx.wait()
            assert set(some) <= set(quick.resident())
            np.testing.assert_array_equal(quick.feed(1), slow.feed(1))
        for c, record in records.items():
            np.testing.assert_array_equal(quick.read(c), record)


def check_queries_are_those_of_the_token_before_the_next(model: Model) -> None:
    """A tap that is read while the next token is computed."""
    with Run(model, pool=POOL, q_tap=True) as run:
        run.feed(200)
        for _ in range(20):
            shapes = [(layer.n_head, layer.n_embd_head_k) for layer in run.ctx.layers()]
            into = run.ctx.host_buffer(4 * sum(a * b for a, b in shapes)).view(np.float32)
            want = run.ctx.queries()
            ticket = run.ctx.begin_queries(into)
            run.decode(1)
            run.ctx.wait(ticket)
            for got, expected in zip(split_queries(into, shapes), want, strict=True):
                np.testing.assert_array_equal(got, expected)
