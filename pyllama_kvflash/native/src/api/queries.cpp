// outputs of the last batch: queries, their attention, and features of layers

#include "api/args.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <vector>

// the attention cache of a context with a Q tap: a paned or pooled one
static llama_kv_cache & get_tapped(llama_context * ctx) {
    auto & kv = kvf_attention(ctx);
    return llama_kvflash::panes(kv) ? kv : kvf_pooled(ctx);
}

int kvf_q_scale(llama_context * ctx, float * dst, uint32_t n) {
    return kvf_guard([&] {
        const auto & kv   = get_tapped(ctx);
        const auto * res  = llama_kvflash::graph(ctx);
        const auto   taps = llama_kvflash::tapped(kv);
        kvf_check(dst && n == taps.size(), "dst must have room for one number for each tapped layer");
        for (uint32_t i = 0; i < n; ++i) {
            const int32_t il = llama_kvflash::layer(kv, taps[i]).il;
            if (!res || !res->t_q[il]) {
                throw kvf_failure(KVF_E_STATE, "no queries: nothing was decoded, or the pool has no Q tap");
            }
            dst[i] = res->q_scale[il];
        }
    });
}

int kvf_q(llama_context * ctx, uint32_t back, float * dst, size_t n, uint64_t * ticket) {
    return kvf_guard([&] {
        const auto & kv  = get_tapped(ctx);
        const auto * res = llama_kvflash::graph(ctx);
        kvf_check(dst && ticket, "dst and ticket must not be null");

        std::vector<kvf_mover::rows> tensors;

        size_t n_all = 0;
        for (const uint32_t i : llama_kvflash::tapped(kv)) {
            const auto * q = res ? res->t_q[llama_kvflash::layer(kv, i).il] : nullptr;
            if (!q) { throw kvf_failure(KVF_E_STATE, "no queries: nothing was decoded, or the pool has no Q tap"); }
            kvf_check(q->type == GGML_TYPE_F32, "the queries are not f32");
            kvf_check(back < q->ne[2], "back is too large: the queries of this token were not kept");
            tensors.push_back({q, (q->ne[2] - 1 - back) * q->nb[2], q->nb[2]});
            n_all += q->nb[2] / sizeof(float);
        }
        kvf_check(n == n_all, "dst must have room for n_head*n_embd_head_k floats for each tapped layer");

        if (llama_kvflash::is_pool(kv)) {
            *ticket = llama_kvflash::mover(kv).fetch(ctx, tensors, dst);
            return;
        }
        ctx->synchronize();
        for (const auto & r : tensors) {
            ggml_backend_tensor_get(r.tensor, dst, r.at, r.size);
            dst += r.size / sizeof(float);
        }
        *ticket = 0;
    });
}

int kvf_get_mass(llama_context * ctx, uint32_t back, float * dst, uint32_t n_piece) {
    return kvf_guard([&] {
        const auto & kv  = kvf_paned(ctx);
        const auto * res = llama_kvflash::graph(ctx);
        kvf_check(dst, "dst must not be null");
        ctx->synchronize();

        for (const uint32_t i : llama_kvflash::tapped(kv)) {
            const auto * t = res ? res->t_mass[llama_kvflash::layer(kv, i).il] : nullptr;
            if (!t) { throw kvf_failure(KVF_E_STATE, "no attention: nothing was decoded, or mass_piece is 0"); }
            kvf_check(back < t->ne[1] && n_piece <= t->ne[0], "back or n_piece is too large for the last batch");
            ggml_backend_tensor_get(t, dst, (t->ne[1] - 1 - back) * t->nb[1], n_piece * sizeof(float));
            dst += n_piece;
        }
    });
}

void kvf_exchange_features(llama_context * a, llama_context * b) {
    if (a != b) { llama_kvflash::exchange_features(*a, *b); }
}
