#pragma once

#include "guests/fresh.h"
#include "guests/gpu.h"

#include "llama-impl.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

// The guests of layers whose memory is a GPU's (guests/gpu.cpp); coarse/gpu-coarse.cpp has their codes.

using kvf_kernels = const kvf_gpu;

// device memory
struct kvf_gpu_memory {
    kvf_gpu_memory() = default;
    kvf_gpu_memory(ggml_backend_buffer_type_t buft, size_t size) :
        buf(ggml_backend_buft_alloc_buffer(buft, size)), size(size) {
        if (!buf) {
            throw kvf_failure(KVF_E_MEMORY, format("%zu bytes of device memory for codes of all positions are not free: use "
                                                   "`coarse` 2, a smaller `n_ctx`, or a smaller `pool`",
                                                    size));
        }
        ggml_backend_buffer_clear(buf.get(), 0); // the last tile of codes has unused positions
    }

    char * at(size_t offset = 0) const { return (char *) ggml_backend_buffer_get_base(buf.get()) + offset; }

    ggml_backend_buffer_ptr buf;
    size_t                  size = 0;
};

// one after the other in a piece of memory
struct kvf_gpu_places {
    size_t take(size_t size) {
        const size_t at = end;
        end += GGML_PAD(size, 256);
        return at;
    }
    size_t end = 0;
};

// what the memory depends on that is needed beside codes
struct kvf_gpu_shape {
    std::vector<kvf_heads> layers; // wherever they are
    uint32_t               n_ctx, n_seq, n_cell, n_chunk;

    static kvf_gpu_shape of(const kvf_fresh & fresh);

    uint32_t       n_block() const { return n_cell / n_chunk; }
    uint32_t       n_slot() const { return n_block() * (n_chunk / kvf_fresh::UNIT); }
    uint32_t       n_record() const { return (n_ctx + n_chunk - 1) / n_chunk; } // of a sequence
    uint32_t       n_table() const { return layers.size() * n_seq; }
    uint32_t       n_query() const; // of the layer that has the most
    kvf_gpu_ask    ask() const;
    kvf_gpu_attend attend(const kvf_heads & heads) const;
};

// where the pieces are by which layers choose
struct kvf_gpu_choice : kvf_gpu_places {
    explicit kvf_gpu_choice(const kvf_gpu_shape & shape);

    size_t lse, parts, shares, tops, moves, n_moves, counts, table, records, blocks, guests;
};

// and those by which codes are made and attended to
struct kvf_gpu_coarse : kvf_gpu_places {
    explicit kvf_gpu_coarse(const kvf_gpu_shape & shape);

    uint32_t n_sum = 0; // values of keys or of value rows of a layer
    size_t   codes[2], layers, coders, sums, chunks, parts, passes, taken;
};

struct kvf_gpu_chooser : kvf_chooser {
    kvf_gpu_chooser(kvf_fresh & fresh, kvf_kernels & gpu, ggml_backend_buffer_t buf);

    kvf_gpu_layer lay_out();
    kvf_gpu_layer of_layer(const kvf_gpu_layer & all, uint32_t i) const;

    void cover(llama_seq_id seq) override;

    std::vector<int32_t> table(llama_seq_id seq, uint32_t layer) override;
    void                 keep(llama_seq_id seq, uint32_t n) override;
    void                 set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetch) override;

    ggml_backend_dev_t device() const {
        auto * dev = ggml_backend_buft_get_device(buft);
        return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); // in tests
    }
    ggml_tensor * add(ggml_context * ctx, ggml_cgraph * gf, const char * name, uint32_t layer,
            void (*launch)(ggml_tensor *, void *), void * userdata, std::vector<ggml_tensor *> args = {});
    // the ask becomes an input of the graph that is being built, if it is not one yet. returns whether it was not
    bool add_words(ggml_context * ctx, llm_graph_result * res, uint32_t n_token);

    uint64_t n_fetched() override;
    uint64_t device_bytes() override { return fixed.size; }

    // the inputs of the kernels for a ubatch
    std::vector<int32_t> ask() const;
    // and words of its tokens after them
    virtual void     add_tokens(std::vector<int32_t> & ask, uint32_t n_token) const = 0;
    virtual uint32_t n_token_word() const                                           = 0;

    kvf_gpu_guests & guests(llama_seq_id seq, uint32_t layer) { return all_guests[layer * n_seq + seq]; }
    bool             mine(uint32_t layer) const { return fresh.layers[layer].chooser == this; }
    const char *     device_record(const void * record);

    kvf_fresh &                fresh;
    kvf_kernels &              gpu;
    ggml_backend_buffer_type_t buft;

    const uint32_t                         n_seq;
    uint32_t                               n_record = 0; // of a sequence
    std::vector<kvf_gpu_layer>             layers;
    std::vector<kvf_gpu_guests>            all_guests; // [layer][sequence], as the device has them
    std::vector<std::vector<const char *>> records;    // of each sequence, that the device knows

    kvf_gpu_memory fixed; // what is always there
    size_t         at_guests = 0, at_records = 0, at_blocks = 0;
    ggml_tensor    view  = {};      // of the fixed memory, for the scheduler
    ggml_tensor *  words = nullptr; // the ask, in the graph that is being built

    std::vector<std::unique_ptr<void, void (*)(void *)>> events;
    std::mutex                                           mutex;

    std::unordered_map<const void *, const char *> seen; // where the device has the records that are being put
};

// the kernels for a buffer, null: there are none
kvf_kernels * kvf_kernels_of(ggml_backend_buffer_t buf);
