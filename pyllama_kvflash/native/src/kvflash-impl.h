#pragma once

#include "kvflash.h"

#include "llama-kv-cache.h"

#include <stdexcept>

struct llama_cparams;

// an error of the C API on its way up: a status, and the sentence that goes with it
struct kvf_failure : std::runtime_error {
    kvf_failure(int status, const std::string & what) : std::runtime_error(what), status(status) {}

    int status;
};

// The pool. A friend of llama_kv_cache with no state of its own but the set-up of the context being created: everything
// else is derived from the cells. The hooks in patches/ call the functions of the first two groups.
struct llama_kvflash {
    //
    // set-up
    //

    // while one is alive, the context that this thread creates is pooled
    struct scope {
        explicit scope(const kvf_pool_params & params);
        ~scope();

        // throw what attach() threw: the library turned it into a null pointer
        void rethrow() const;
    };

    // cells of a full-attention cache of kv_size logical positions
    static uint32_t n_cells(uint32_t kv_size);

    // make the memory that was just created a pool, throw if it cannot be one
    static void attach(llama_memory_i * mem, llama_cparams & cparams);

    // throw if the memory is a pool: a whole-context restore re-packs the cells
    static void reject_restore(llama_memory_i * mem);

    //
    // placement
    //

    // the cells of a ubatch: its chunks' own blocks, then the first free ones. empty: not enough free blocks
    static llama_kv_cache::slot_info find_slot(const llama_kv_cache & kv, const llama_ubatch & ubatch);

    static int32_t  block_of(const llama_kv_cache & kv, llama_seq_id seq, int32_t chunk); // -1: not resident
    static uint32_t n_block(const llama_kv_cache & kv);
    static uint32_t n_chunk(const llama_kv_cache & kv) { return kv.pool_chunk; }
    static bool     is_free(const llama_kv_cache & kv, uint32_t block);

    // the full-attention cache of a memory, nullptr if there is no supported one
    static llama_kv_cache * get_kv(llama_memory_i * mem);
    static const char *     class_name(llama_memory_i * mem);

    // whether the sliding-window cache, if there is one, holds the whole window of position pos
    static bool         has_window(llama_memory_i * mem, llama_seq_id seq, llama_pos pos);
    static kvf_kv_bytes kv_bytes(llama_memory_i * mem);

    // whether there is state beside the full-attention cache
    static bool has_partial(llama_memory_i * mem);

    static bool is_pool(const llama_kv_cache & kv) { return kv.pool_chunk > 0; }

    //
    // records
    //

    static uint32_t      meta_bytes(const llama_kv_cache & kv);
    static kvf_layer     layer(const llama_kv_cache & kv, uint32_t i);
    static uint32_t      n_layer(const llama_kv_cache & kv) { return kv.layers.size(); }
    static kvf_pool_info info(const llama_kv_cache & kv);
    static kvf_record    head(const llama_kv_cache & kv, int32_t chunk, uint64_t mask);

    static void blocks(const llama_kv_cache & kv, int32_t * chunks, int32_t * n_used);

    static void    read(const llama_kv_cache & kv, llama_seq_id seq, int32_t chunk, void * dst);
    static void    drop(llama_kv_cache & kv, llama_seq_id seq, int32_t chunk);
    static int32_t page_in(llama_kv_cache & kv, llama_seq_id seq, int32_t chunk, const void * src, int32_t block);
    static void    scribble(const llama_kv_cache & kv, uint8_t byte);

private:
    // copy a block's rows to dst, or from src: either is null. both point at whole records
    static void copy(const llama_kv_cache & kv, uint32_t block, void * dst, const void * src);
};

// summaries of the keys of a chunk, [n_row/16 panels][n_head_kv][n_embd_head_k][16 rows] bf16 for each layer
struct kvf_summary {
    static size_t size(const kvf_layer & layer, uint32_t n, uint32_t n_row);

    static void write(const kvf_layer & layer, uint32_t n_chunk, const void * record, int kind, uint32_t n_row,
            uint16_t * dst, uint32_t i);
    static void score(const kvf_layer & layer, const uint16_t * slab, uint32_t n, int kind, uint32_t n_row, const float * q,
            float * dst, size_t stride);
    static void score_keys(const kvf_layer & layer, uint32_t n_chunk, const void * record, const float * q, uint32_t n_token,
            float * dst, size_t stride);
};
