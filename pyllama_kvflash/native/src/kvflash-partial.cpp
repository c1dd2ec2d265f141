// the state that no chunk holds: a recurrent state, a sliding window

#include "kvflash-args.h"

#include "llama-context.h"

static constexpr llama_state_seq_flags PARTIAL = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

// a plain cache has no such state, but upstream would write all of its cells
static bool has_partial(llama_context * ctx) { return llama_kvflash::has_partial(ctx->get_memory()); }

int kvf_partial_size(llama_context * ctx, llama_seq_id seq, size_t * size) {
    return kvf_guard([&] {
        kvf_check(ctx && size, "a context and a place for the result are needed");
        kvf_check_seq(ctx, seq);
        if (const auto * kv = llama_kvflash::get_window(ctx->get_memory())) {
            *size = llama_kvflash::window_size(*kv, seq);
            return;
        }
        *size = has_partial(ctx) ? llama_state_seq_get_size_ext(ctx, seq, PARTIAL) : 0;
    });
}

int kvf_partial_get(llama_context * ctx, llama_seq_id seq, void * dst, size_t size) {
    return kvf_guard([&] {
        kvf_check(ctx && dst, "a context and a place for the state are needed");
        kvf_check_seq(ctx, seq);
        if (const auto * kv = llama_kvflash::get_window(ctx->get_memory())) {
            llama_kvflash::window_get(ctx, *kv, seq, dst, size);
            return;
        }
        kvf_take_log();
        if (has_partial(ctx) && llama_state_seq_get_data_ext(ctx, (uint8_t *) dst, size, seq, PARTIAL) != size) {
            throw kvf_failure(KVF_E_BACKEND, "the state cannot be saved: " + kvf_take_log());
        }
    });
}

int kvf_partial_set(llama_context * ctx, llama_seq_id seq, llama_pos pos, const void * src, size_t size) {
    return kvf_guard([&] {
        kvf_check(ctx && src, "a context and a state are needed");
        kvf_check_seq(ctx, seq);
        kvf_check(pos >= 0, "positions are from 0 to 2^31 - 1");
        kvf_check(has_partial(ctx) == (size > 0), "this is not a state of this model");
        kvf_take_log();
        if (auto * kv = llama_kvflash::get_window(ctx->get_memory())) {
            llama_kvflash::window_set(ctx, *kv, seq, src, size);
        } else if (has_partial(ctx) &&
                   llama_state_seq_set_data_ext(ctx, (const uint8_t *) src, size, seq, PARTIAL) != size) {
            throw kvf_failure(KVF_E_BACKEND, "the state cannot be restored: " + kvf_take_log());
        }
        kvf_forget(ctx, seq, pos);
        if (auto * kv = llama_kvflash::get_kv(ctx->get_memory())) { kv->seq_rm(seq, pos, -1); }
    });
}
