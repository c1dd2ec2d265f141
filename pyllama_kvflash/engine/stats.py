"""The statistics of a sequence: its memory and page traffic."""

from typing import Any

from pyllama_kvflash.events import Stats
from pyllama_kvflash.loading.load import Loaded
from pyllama_kvflash.loading.need import peak_bytes
from pyllama_kvflash.pool.guests import coarse_bytes
from pyllama_kvflash.pool.sequence import PooledSequence


def stats_of(loaded: Loaded, sequence: PooledSequence, **counts: Any) -> Stats:
    """Return the current statistics of a sequence. counts: the other fields of Stats."""
    kv, pager, selector = sequence.ctx.kv_bytes(), sequence.pager, sequence.selector
    room = pager.guests if pager else None
    guests, exact = room.native.info() if room else None, loaded.exact
    return Stats(
        n_ctx=loaded.options.n_ctx,
        n_pool=loaded.n_pool,
        kv_device_bytes=kv.attn,
        kv_full_bytes=loaded.full_bytes,
        pane_bytes=exact.n_bytes if exact else 0,
        compute_bytes=loaded.ctx.compute_bytes() + (exact.ctx.compute_bytes() if exact else 0),
        other_device_bytes=kv.swa + kv.recurrent,
        host_bytes=sequence.host_bytes,
        disk_bytes=loaded.shared.memory.spilled_bytes if loaded.shared else 0,
        chunks=pager.ledger.n_chunks if pager else 0,
        resident=pager.ledger.n_resident if pager else 0,
        stored=pager.n_stored if pager else 0,
        pages_out=pager.moves.n_out if pager else 0,
        pages_in=pager.moves.n_in if pager else 0,
        reselects=selector.n_done if selector else 0,
        reselect_s=selector.seconds if selector else 0.0,
        summary_bytes=pager.summaries.n_bytes if pager and pager.summaries else 0,
        coarse_bytes=coarse_bytes(loaded.shared.guests) if loaded.shared else 0,
        coarse_tokens=guests.n if guests else 0,
        guest_blocks=guests.n_block if guests else 0,
        guests_fetched=room.native.n_fetched() if room else 0,
        gpu_bytes=sum(need.total for need in loaded.memory if need.gpu),
        peak_bytes=peak_bytes(),
        **{"n_prompt": 0, "n_generated": 0, "prefill_s": 0.0, "decode_s": 0.0, "seed": None, **counts},
    )
