// the partial state, which is not in chunks: a recurrent state, a sliding window

#include "api/args.h"

#include "llama-context.h"
#include "llama-io.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

static constexpr llama_state_seq_flags PARTIAL = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

// a plain cache has no partial state, but llama.cpp would write all its cells
static bool has_partial(llama_context * ctx) { return llama_kvflash::has_partial(ctx->get_memory()); }

ggml_tensor kvf_bytes(const ggml_tensor * t, size_t offset, size_t n) {
    ggml_tensor res = {};
    res.type        = GGML_TYPE_I8;
    res.buffer      = t->view_src ? t->view_src->buffer : t->buffer;
    res.data        = (char *) t->data + offset;
    std::fill_n(res.ne, GGML_MAX_DIMS, 1);
    std::fill_n(res.nb, GGML_MAX_DIMS, n);
    res.ne[0] = n;
    res.nb[0] = 1;
    return res;
}

namespace {

// a byte range of a tensor
struct piece {
    ggml_tensor * tensor;
    size_t        offset, size;

    ggml_tensor view(size_t n) const { return kvf_bytes(tensor, offset, n); }
};

// collects the addresses of a state's tensors, instead of their contents
struct places : llama_io_write_i {
    void write(const void * src, size_t size) override {
        bytes.insert(bytes.end(), (const char *) src, (const char *) src + size);
    }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        pieces.push_back({tensor, offset, size});
    }
    size_t n_bytes() override { return bytes.size(); }

    std::vector<char> bytes;
    std::deque<piece> pieces;
};

// reads a state from these addresses, from device to device
struct copies : llama_io_read_i {
    explicit copies(places & from) : from(from) {}

    void read(void * dst, size_t size) override {
        if (at + size > from.bytes.size()) { throw kvf_failure(KVF_E_BACKEND, "the state is too short"); }
        memcpy(dst, from.bytes.data() + at, size);
        at += size;
    }
    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        for (piece to = {tensor, offset, size}; to.size > 0;) {
            if (from.pieces.empty()) { throw kvf_failure(KVF_E_BACKEND, "the state is too short"); }
            auto &       its = from.pieces.front();
            const size_t n   = std::min(its.size, to.size);
            ggml_tensor  src = its.view(n), dst = to.view(n);
            ggml_backend_tensor_copy(&src, &dst);
            its = {its.tensor, its.offset + n, its.size - n};
            to  = {to.tensor, to.offset + n, to.size - n};
            if (its.size == 0) { from.pieces.pop_front(); }
        }
    }
    size_t n_bytes() override { return at; }

    places & from;
    size_t   at = 0;
};

} // namespace

// forget the attention cache from the position of a new state on
static void forget_from(llama_context * ctx, llama_seq_id seq, llama_pos pos) {
    kvf_forget(ctx, seq, pos);
    if (auto * kv = llama_kvflash::get_kv(ctx->get_memory())) { kv->seq_rm(seq, pos, -1); }
}

int kvf_partial_size(llama_context * ctx, llama_seq_id seq, size_t * size) {
    return kvf_guard([&] {
        kvf_check(ctx && size, "ctx and size must not be null");
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
        kvf_check(ctx && dst, "ctx and dst must not be null");
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
        kvf_check(ctx && src, "ctx and src must not be null");
        kvf_check_seq(ctx, seq);
        kvf_check(pos >= 0, "a position must be from 0 to 2^31 - 1");
        kvf_check(has_partial(ctx) == (size > 0), "this is not a state of this model");
        kvf_take_log();
        if (auto * kv = llama_kvflash::get_window(ctx->get_memory())) {
            llama_kvflash::window_set(ctx, *kv, seq, src, size);
        } else if (has_partial(ctx) &&
                   llama_state_seq_set_data_ext(ctx, (const uint8_t *) src, size, seq, PARTIAL) != size) {
            throw kvf_failure(KVF_E_BACKEND, "the state cannot be restored: " + kvf_take_log());
        }
        forget_from(ctx, seq, pos);
    });
}

int kvf_partial_copy(llama_context * from, llama_context * to, llama_seq_id seq, llama_pos pos) {
    return kvf_guard([&] {
        kvf_check(from && to && pos >= 0, "from and to must not be null; pos must be from 0 to 2^31 - 1");
        kvf_check_seq(from, seq);
        kvf_check_seq(to, seq);
        if (const auto * kv = llama_kvflash::get_window(from->get_memory())) {
            llama_kvflash::window_copy(from, *kv, to, *llama_kvflash::get_window(to->get_memory()), seq);
        } else if (has_partial(from)) {
            from->synchronize();
            to->synchronize();
            places where;
            copies there(where);
            from->get_memory()->state_write(where, seq, PARTIAL);
            to->get_memory()->state_read(there, seq, PARTIAL);
        }
        forget_from(to, seq, pos);
    });
}
