// records: the serialised chunks. kvflash.h has their layout

#include "pool/impl.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <vector>

static_assert(sizeof(kvf_record) == 64, "the record layout is a file format");
static_assert(sizeof(llama_kv_cell_ext) == 12, "the record layout is a file format");

// K rows are aligned to a cache line for every chunk size
static constexpr uint32_t META_ALIGN = 64;

uint32_t llama_kvflash::meta_bytes(const llama_kv_cache & kv) {
    return GGML_PAD(sizeof(kvf_record) + kv.pool_chunk * sizeof(llama_kv_cell_ext), META_ALIGN);
}

int32_t llama_kvflash::device_index(ggml_backend_buffer_type_t buft) {
    const auto * dev = ggml_backend_buft_get_device(buft);
    // the buffer type of pinned host memory names a GPU as its device
    if (!dev || ggml_backend_buft_is_host(buft)) { dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_get(i) == dev) { return i; }
    }

    return -1;
}

kvf_layer_tensors llama_kvflash::tensors(const llama_kv_cache & kv, uint32_t i) {
    return {(int32_t) kv.layers[i].il, kv.layers[i].k, kv.layers[i].v};
}

kvf_layer llama_kvflash::layer(const llama_kv_cache & kv, uint32_t i) {
    kvf_layer res = {};

    uint64_t offs = is_pool(kv) ? meta_bytes(kv) : 0;

    for (uint32_t j = 0; j <= i; ++j) {
        const auto & layer = kv.layers[j];

        res               = {};
        res.il            = layer.il;
        res.type_k        = layer.k->type;
        res.type_v        = layer.v ? (int32_t) layer.v->type : -1;
        res.n_embd_k      = layer.k->ne[0];
        res.n_embd_v      = layer.v ? layer.v->ne[0] : 0;
        res.n_head        = kv.hparams.n_head(layer.il);
        res.n_head_kv     = kv.hparams.n_head_kv(layer.il);
        res.n_embd_head_k = kv.hparams.n_embd_head_k(layer.il);

        if (is_pool(kv)) {
            res.size_k = ggml_row_size(layer.k->type, layer.k->ne[0]) * kv.pool_chunk;
            res.size_v = layer.v ? ggml_row_size(layer.v->type, layer.v->ne[0]) * kv.pool_chunk : 0;
            res.offs_k = offs;
            res.offs_v = offs + res.size_k;

            offs += res.size_k + res.size_v;
        }
    }

    res.device = device_index(ggml_backend_buffer_get_type(kv.layers[i].k->buffer));

    return res;
}

static uint32_t flags(bool v_trans, bool rot_k, bool rot_v) {
    return (v_trans ? KVF_FLAG_V_TRANS : 0) | (rot_k ? KVF_FLAG_ROT_K : 0) | (rot_v ? KVF_FLAG_ROT_V : 0);
}

kvf_pool_info llama_kvflash::info(const llama_kv_cache & kv) {
    kvf_pool_info res = {};
    res.n_pool        = kv.get_size();
    res.n_chunk       = kv.pool_chunk;
    res.n_block       = n_block(kv);
    res.n_kv          = kv.pool_n_kv;
    res.n_layer       = n_layer(kv);
    res.n_copy        = mover(kv).n_run();
    res.record_bytes  = mover(kv).record_bytes;
    res.meta_bytes    = meta_bytes(kv);
    res.flags         = flags(kv.v_trans, kv.attn_rot_k, kv.attn_rot_v);

    for (uint32_t b = 0; b < res.n_block; ++b) {
        res.n_block_free += is_free(kv, b);
    }

    return res;
}

void llama_kvflash::set_n_kv(const llama_kv_cache & kv, uint32_t n_kv) {
    kvf_check(n_kv <= kv.get_size() && n_kv % 256 == 0, "n_kv must be a multiple of 256, and at most n_pool");
    kv.pool_n_kv = std::max(kv.pool_n_kv, n_kv);
}

kvf_record llama_kvflash::head(const llama_kv_cache & kv, int32_t chunk, uint64_t mask) {
    const auto last = layer(kv, n_layer(kv) - 1);

    kvf_record res   = {};
    res.magic        = KVF_RECORD_MAGIC;
    res.version      = KVF_RECORD_VERSION;
    res.head_bytes   = sizeof(kvf_record);
    res.record_bytes = mover(kv).record_bytes;
    res.fingerprint  = kv.pool_fingerprint;
    res.mask         = mask;
    res.chunk        = chunk;
    res.n_chunk      = kv.pool_chunk;
    res.n_layer      = n_layer(kv);
    res.type_k       = last.type_k;
    res.type_v       = last.type_v;
    res.flags        = flags(kv.v_trans, kv.attn_rot_k, kv.attn_rot_v);
    res.meta_bytes   = meta_bytes(kv);

    return res;
}

void llama_kvflash::blocks(const llama_kv_cache & kv, int32_t * chunks, int32_t * n_used, llama_seq_id * seqs) {
    const auto & cells = kv.v_cells[0];

    for (uint32_t b = 0; b < n_block(kv); ++b) {
        chunks[b] = -1;
        n_used[b] = 0;
        seqs[b]   = -1;

        for (uint32_t i = b * kv.pool_chunk; i < (b + 1) * kv.pool_chunk; ++i) {
            if (!cells.is_empty(i)) {
                chunks[b] = cells.pos_get(i) / (llama_pos) kv.pool_chunk;
                seqs[b]   = cells.seq_get(i);
                n_used[b]++;
            }
        }
    }
}

std::vector<kvf_mover::piece> llama_kvflash::pieces(const llama_kv_cache & kv) {
    std::vector<kvf_mover::piece> res;

    size_t offs = meta_bytes(kv);

    const auto add = [&](const ggml_tensor * t, size_t at, size_t size) {
        const auto * base = (const char *) ggml_backend_buffer_get_base(t->buffer);
        res.push_back({t->buffer, (const char *) t->data - base + at, offs, size});
        offs += size;
    };

    for (const auto & layer : kv.layers) {
        add(layer.k, 0, ggml_row_size(layer.k->type, layer.k->ne[0]) * kv.pool_chunk);

        if (layer.v && kv.v_trans) {
            // transposed V has one row of kv_size elements per channel
            const size_t el = ggml_type_size(layer.v->type);
            for (int64_t i = 0; i < layer.v->ne[0]; ++i) {
                add(layer.v, i * el * kv.get_size(), el * kv.pool_chunk);
            }
        } else if (layer.v) {
            add(layer.v, 0, ggml_row_size(layer.v->type, layer.v->ne[0]) * kv.pool_chunk);
        }
    }

    return res;
}

// does not use the mover's pieces, since tests use this to check them
void llama_kvflash::scribble(llama_context * ctx, const llama_kv_cache & kv, uint8_t byte) {
    ctx->synchronize();
    mover(kv).wait();
    for (uint32_t b = 0; b < n_block(kv); ++b) {
        if (!is_free(kv, b)) { continue; }

        fill(kv, b * kv.pool_chunk, kv.pool_chunk, byte);
    }
}

void llama_kvflash::fill(const llama_kv_cache & kv, size_t cell, size_t n, uint8_t byte) {
    const auto rows = [&](ggml_tensor * t, size_t row, size_t at) {
        const std::vector<uint8_t> bytes(row * n, byte);
        ggml_backend_tensor_set(t, bytes.data(), row * at, bytes.size());
    };
    for (const auto & layer : kv.layers) {
        rows(layer.k, ggml_row_size(layer.k->type, layer.k->ne[0]), cell);
        if (layer.v && !kv.v_trans) { rows(layer.v, ggml_row_size(layer.v->type, layer.v->ne[0]), cell); }
        for (int64_t c = 0; layer.v && kv.v_trans && c < layer.v->ne[0]; ++c) {
            rows(layer.v, ggml_type_size(layer.v->type), c * kv.get_size() + cell);
        }
    }
}

static uint32_t resident_block(const llama_kv_cache & kv, llama_seq_id seq, int32_t chunk) {
    const int32_t block = llama_kvflash::block_of(kv, seq, chunk);
    if (block < 0) { throw kvf_failure(KVF_E_STATE, format("chunk %d is not resident", chunk)); }
    return block;
}

uint64_t llama_kvflash::read(llama_context * ctx, const llama_kv_cache & kv, llama_seq_id seq, int32_t chunk, void * dst) {
    const uint32_t block = resident_block(kv, seq, chunk);

    const auto & cells = kv.v_cells[0];

    memset(dst, 0, meta_bytes(kv));

    uint64_t mask = 0;

    for (uint32_t i = 0; i < kv.pool_chunk; ++i) {
        const uint32_t idx = block * kv.pool_chunk + i;

        if (!cells.is_empty(idx)) {
            const llama_kv_cell_ext ext = cells.ext_get(idx);

            mask |= 1ull << i;
            memcpy((char *) dst + sizeof(kvf_record) + i * sizeof(ext), &ext, sizeof(ext));
        }
    }

    const auto rec = head(kv, chunk, mask);
    memcpy(dst, &rec, sizeof(rec));

    return mover(kv).copy(ctx, block, dst, nullptr);
}

void llama_kvflash::drop(llama_kv_cache & kv, llama_seq_id seq, int32_t chunk) {
    const uint32_t block = resident_block(kv, seq, chunk);

    auto & cells = kv.v_cells[0];

    for (uint32_t i = 0; i < kv.pool_chunk; ++i) {
        const uint32_t idx = block * kv.pool_chunk + i;

        if (!cells.is_empty(idx)) { cells.rm(idx); }
    }
}

// the name of the first wrong field in a record's header; nullptr: it matches the chunk and the cache
static const char * mismatch(const kvf_record & got, const kvf_record & want) {
    if (got.magic != want.magic) { return "magic number"; }
    if (got.version != want.version) { return "version"; }
    if (got.head_bytes != want.head_bytes) { return "header size"; }
    if (got.record_bytes != want.record_bytes) { return "size"; }
    if (got.fingerprint != want.fingerprint) { return "model fingerprint"; }
    if (got.chunk != want.chunk) { return "chunk number"; }
    if (got.n_chunk != want.n_chunk) { return "chunk size"; }
    if (got.n_layer != want.n_layer) { return "layer count"; }
    if (got.type_k != want.type_k) { return "type of K"; }
    if (got.type_v != want.type_v) { return "type of V"; }
    if (got.flags != want.flags) { return "layout or rotation"; }
    if (got.meta_bytes != want.meta_bytes) { return "metadata size"; }
    if (got.reserved != 0) { return "reserved field"; }

    const uint64_t all = want.n_chunk == 64 ? ~0ull : (1ull << want.n_chunk) - 1;
    if (got.mask == 0 || (got.mask & ~all)) { return "mask"; }

    return nullptr;
}

int32_t llama_kvflash::page_in(
        llama_context * ctx, llama_kv_cache & kv, llama_seq_id seq, int32_t chunk, const void * src, int32_t block) {
    kvf_record rec;
    memcpy(&rec, src, sizeof(rec));

    if (const char * field = mismatch(rec, head(kv, chunk, 0))) {
        throw kvf_failure(
                KVF_E_RECORD, format("not a record of chunk %d of this model and cache: the %s differs", chunk, field));
    }
    if (block_of(kv, seq, chunk) >= 0) { throw kvf_failure(KVF_E_STATE, format("chunk %d is already resident", chunk)); }

    for (uint32_t b = 0; b < n_block(kv) && block < 0; ++b) {
        if (is_free(kv, b)) { block = b; }
    }
    if (block < 0) { throw kvf_failure(KVF_E_NO_BLOCK, format("no free block for chunk %d", chunk)); }
    if (block >= (int32_t) n_block(kv)) {
        throw kvf_failure(KVF_E_ARGUMENT, format("block %d is outside the pool of %u blocks", block, n_block(kv)));
    }
    if (!is_free(kv, block)) { throw kvf_failure(KVF_E_STATE, format("block %d is not free", block)); }

    mover(kv).copy(ctx, block, nullptr, src);

    auto & cells = kv.v_cells[0];

    for (uint32_t i = 0; i < kv.pool_chunk; ++i) {
        if (rec.mask & (1ull << i)) {
            const uint32_t idx = block * kv.pool_chunk + i;

            llama_kv_cell_ext ext;
            memcpy(&ext, (const char *) src + sizeof(kvf_record) + i * sizeof(ext), sizeof(ext));

            cells.pos_set(idx, chunk * (llama_pos) kv.pool_chunk + i);
            cells.ext_set(idx, ext);
            cells.seq_add(idx, seq);
        }
    }

    return block;
}
