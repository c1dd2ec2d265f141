// see api/args.h

#include "api/args.h"
#include "guests/fresh.h"

#include "llama-context.h"

#include <algorithm>

llama_kv_cache & kvf_attention(llama_context * ctx) {
    kvf_check(ctx, "ctx must not be null");

    auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    if (!kv) { throw kvf_failure(KVF_E_UNSUPPORTED, "this model has no full-attention KV cache"); }
    return *kv;
}

llama_kv_cache & kvf_pooled(llama_context * ctx) {
    auto & kv = kvf_attention(ctx);
    kvf_check(llama_kvflash::is_pool(kv), "this context has no pool");
    return kv;
}

llama_kv_cache & kvf_paned(llama_context * ctx) {
    kvf_check(ctx, "ctx must not be null");
    auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    kvf_check(kv && llama_kvflash::panes(*kv), "this context has no panes");
    return *kv;
}

void kvf_check_seq(llama_context * ctx, llama_seq_id seq) {
    kvf_check(seq >= 0 && (uint32_t) seq < llama_n_seq_max(ctx), "seq must be from 0 to n_seq_max - 1");
}

void kvf_forget(llama_context * ctx, llama_seq_id seq, llama_pos pos) {
    const uint32_t p     = std::max(pos, 0);
    const auto *   kv    = llama_kvflash::get_kv(ctx->get_memory());
    auto *         fresh = kv ? llama_kvflash::fresh(*kv) : nullptr;
    if (kv && llama_kvflash::panes(*kv)) { llama_kvflash::panes(*kv)->forget(p); }
    if (!fresh) { return; }

    if (p < fresh->of(seq).n) { ctx->synchronize(); } // a GPU still computing would overwrite the tables with its choice
    fresh->truncate(seq, p);
}
