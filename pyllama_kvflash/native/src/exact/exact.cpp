// exact batches: a paned context decodes tokens against all earlier positions, and writes the tokens' rows to the records of
// a pool

#include "api/args.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <algorithm>
#include <cstring>

//
// cells, and headers of records
//

void llama_kvflash::place_before(
        llama_kv_cache & kv, const llama_kv_cache & of, llama_seq_id seq, uint32_t pos, void * const * records) {
    auto &         cells   = kv.v_cells[0];
    const uint32_t n_chunk = of.pool_chunk;

    uint32_t n_there = kv.seq_pos_max(seq) + 1;
    if (cells.get_used() != n_there || kv.pool_seq != seq) { // the cells are those of another sequence
        drop_before(kv, kv.pool_seq);
        n_there     = 0;
        kv.pool_seq = seq;
    }
    if (n_there > pos) {
        kv.seq_rm(seq, pos, -1);
        panes(kv)->forget(pos);
    }
    for (uint32_t i = n_there; i < pos; ++i) {
        llama_kv_cell_ext ext;
        memcpy(&ext, (const char *) records[i / n_chunk] + sizeof(kvf_record) + i % n_chunk * sizeof(ext), sizeof(ext));

        cells.pos_set(i, i);
        cells.ext_set(i, ext);
        cells.seq_add(i, seq);
    }
    kv.v_heads[0] = pos;
}

void llama_kvflash::drop_before(llama_kv_cache & kv, llama_seq_id seq) {
    if (kv.pool_seq != seq) { return; }
    kv.v_cells[0].reset();
    panes(kv)->forget(0);
}

void llama_kvflash::write_heads(
        const llama_kv_cache & kv, const llama_kv_cache & of, uint32_t pos, uint32_t n, void * const * records) {
    const auto &   cells   = kv.v_cells[0];
    const uint32_t n_chunk = of.pool_chunk;

    for (uint32_t c = pos / n_chunk; c * n_chunk < pos + n; ++c) {
        auto * dst = (char *) records[c];
        memset(dst, 0, meta_bytes(of));

        uint64_t mask = 0;
        for (uint32_t i = 0; i < n_chunk && c * n_chunk + i < pos + n; ++i) {
            const llama_kv_cell_ext ext = cells.ext_get(c * n_chunk + i);

            mask |= 1ull << i;
            memcpy(dst + sizeof(kvf_record) + i * sizeof(ext), &ext, sizeof(ext));
        }

        const auto rec = head(of, c, mask);
        memcpy(dst, &rec, sizeof(rec));
    }
}

//
// the C API
//

int kvf_decode_exact(llama_context * ctx, llama_context * pool, llama_seq_id seq, llama_pos pos, const llama_token * tokens,
        int32_t n, int outputs, void * const * records, uint32_t n_record, size_t record_size) {
    return kvf_guard([&] {
        auto & kv = kvf_paned(ctx);
        auto * of = pool ? llama_kvflash::get_kv(pool->get_memory()) : nullptr;
        kvf_check(of && llama_kvflash::is_pool(*of), "pool must be a pooled context, whose records have the rows");
        kvf_check(tokens && n > 0 && (uint32_t) n <= llama_n_ubatch(ctx),
                "tokens must not be null; an exact batch must have 1 to n_ubatch tokens");
        kvf_check(pos >= 0 && (uint32_t) pos + n <= kv.get_size(), "the batch does not fit the context");
        kvf_check_seq(ctx, seq);

        const uint32_t n_chunk = llama_kvflash::n_chunk(*of);
        kvf_check(records && n_record == (pos + n + n_chunk - 1) / n_chunk &&
                          std::all_of(records, records + n_record, [](void * r) { return r; }) &&
                          record_size == llama_kvflash::mover(*of).record_bytes,
                "records must have a record of this pool for each chunk");

        auto & panes = *llama_kvflash::panes(kv);
        if (panes.tenant) {
            pool->synchronize(); // the pool may still compute with the codes
            panes.tenant->leave();
        }
        llama_kvflash::place_before(kv, *of, seq, pos, records);
        if (kvf_was_bad(ctx)) { llama_kvflash::scrub(ctx); }
        try {
            panes.begin(ctx, kv, *of, pos, n, records);
            kvf_compute(ctx, seq, pos, tokens, n, outputs);
            panes.finish();
        } catch (...) {
            panes.abandon();
            kv.seq_rm(seq, pos, -1);
            throw;
        }
        llama_kvflash::write_heads(kv, *of, pos, n, records);
    });
}

int kvf_pace_exact(llama_context * ctx, bool paced) {
    return kvf_guard([&] { llama_kvflash::panes(kvf_paned(ctx))->paced = paced; });
}

int kvf_wait_exact(llama_context * ctx, uint32_t n, llama_pos * end) {
    return kvf_guard([&] {
        auto & kv = kvf_paned(ctx);
        kvf_check(end, "end must not be null");
        *end = llama_kvflash::panes(kv)->wait(n);
    });
}

int kvf_get_pane_info(llama_context * ctx, struct kvf_pane_info * info) {
    return kvf_guard([&] {
        const auto & kv = kvf_paned(ctx);
        kvf_check(info, "info must not be null");
        *info = llama_kvflash::panes(kv)->info();
    });
}
