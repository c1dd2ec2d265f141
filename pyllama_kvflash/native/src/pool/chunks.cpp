// the C API for the chunks of a pool: look them up, read, drop and page them in

#include "api/args.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <cstdlib>

static void check_chunk(const llama_kv_cache & kv, int32_t chunk) {
    kvf_check(chunk >= 0 && chunk < INT32_MAX / (int32_t) llama_kvflash::n_chunk(kv), "chunk is out of range");
}

int kvf_get_pool_info(llama_context * ctx, struct kvf_pool_info * info) {
    return kvf_guard([&] {
        const auto & kv = kvf_pooled(ctx);
        kvf_check(info, "info must not be null");
        *info = llama_kvflash::info(kv);
    });
}

int kvf_blocks(llama_context * ctx, int32_t * chunks, int32_t * n_used, llama_seq_id * seqs, uint32_t n_block) {
    return kvf_guard([&] {
        const auto & kv = kvf_pooled(ctx);
        kvf_check(chunks && n_used && seqs && n_block == llama_kvflash::n_block(kv), "arrays must hold n_block values");
        llama_kvflash::blocks(kv, chunks, n_used, seqs);
    });
}

int kvf_block_of(llama_context * ctx, llama_seq_id seq, int32_t chunk, int32_t * block) {
    return kvf_guard([&] {
        const auto & kv = kvf_pooled(ctx);
        kvf_check_seq(ctx, seq);
        check_chunk(kv, chunk);
        kvf_check(block, "block must not be null");
        *block = llama_kvflash::block_of(kv, seq, chunk);
    });
}

int kvf_read(llama_context * ctx, llama_seq_id seq, int32_t chunk, void * dst, size_t size, uint64_t * ticket) {
    return kvf_guard([&] {
        const auto & kv = kvf_pooled(ctx);
        kvf_check_seq(ctx, seq);
        check_chunk(kv, chunk);
        kvf_check(dst && size == llama_kvflash::mover(kv).record_bytes, "dst needs record_bytes of room");
        kvf_check(ticket, "ticket must not be null");
        *ticket = llama_kvflash::read(ctx, kv, seq, chunk, dst);
    });
}

int kvf_drop(llama_context * ctx, llama_seq_id seq, int32_t chunk) {
    return kvf_guard([&] {
        auto & kv = kvf_pooled(ctx);
        kvf_check_seq(ctx, seq);
        check_chunk(kv, chunk);
        llama_kvflash::drop(kv, seq, chunk);
    });
}

int kvf_page_in(llama_context * ctx, llama_seq_id seq, int32_t chunk, const void * src, size_t size, int32_t * block) {
    return kvf_guard([&] {
        auto & kv = kvf_pooled(ctx);
        kvf_check_seq(ctx, seq);
        check_chunk(kv, chunk);
        kvf_check(src && block && *block >= -1, "src and block must not be null; *block is a block number or -1");
        const size_t want = llama_kvflash::mover(kv).record_bytes;
        if (size != want) {
            throw kvf_failure(KVF_E_RECORD, format("a record of this cache has %zu bytes, not %zu", want, size));
        }
        *block = llama_kvflash::page_in(ctx, kv, seq, chunk, src, *block);
    });
}

int kvf_wait(llama_context * ctx, uint64_t ticket) {
    return kvf_guard([&] {
        auto & mover = llama_kvflash::mover(kvf_pooled(ctx));
        if (ticket) {
            mover.wait(ticket);
        } else {
            mover.wait();
        }
    });
}

int kvf_scribble(llama_context * ctx, uint8_t byte) {
    return kvf_guard([&] { llama_kvflash::scribble(ctx, kvf_pooled(ctx), byte); });
}

int kvf_set_width(llama_context * ctx, uint32_t n_kv) {
    return kvf_guard([&] { llama_kvflash::set_n_kv(kvf_pooled(ctx), n_kv); });
}

//
// host memory
//

int kvf_host_new(llama_context * ctx, size_t size, kvf_host ** host) {
    return kvf_guard([&] {
        auto * dev = llama_kvflash::mover(kvf_pooled(ctx)).pinned_for();
        kvf_check(host && size > 0, "host must not be null; size must be above 0");

        const bool pin = dev && ggml_backend_dev_host_buffer_type(dev) && !getenv("GGML_CUDA_NO_PINNED");
        *host          = pin ? new kvf_host(dev, size) : nullptr;
    });
}

void * kvf_host_base(kvf_host * host) { return host ? host->base : nullptr; }

void kvf_host_free(kvf_host * host) { delete host; }

int kvf_time_copies(llama_context * ctx, size_t size, uint32_t n, bool to_device, double * seconds) {
    return kvf_guard([&] {
        kvf_check(size > 0 && n > 0 && seconds, "seconds must not be null; size and n must be above 0");
        *seconds = llama_kvflash::mover(kvf_pooled(ctx)).time_copies(size, n, to_device);
    });
}
