#pragma once

#include "coarse/coarse.h"
#include "guests/gpu.h"

#include "llama-impl.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

// The guests (guests/gpu.cpp) and the codes (coarse/gpu-coarse.cpp) of layers in a GPU's memory.

using kvf_kernels = const kvf_gpu;

// a zeroed buffer of device memory
struct kvf_gpu_memory {
    kvf_gpu_memory() = default;
    kvf_gpu_memory(ggml_backend_buffer_type_t buft, size_t size) :
        buf(ggml_backend_buft_alloc_buffer(buft, size)), size(size) {
        if (!buf) {
            throw kvf_failure(KVF_E_MEMORY, format("%zu bytes of device memory for codes of all positions are not free: use "
                                                   "`coarse` 2, a smaller `n_ctx`, or a smaller `pool`",
                                                    size));
        }
        ggml_backend_buffer_clear(buf.get(), 0); // unused positions of the last tile must be 0
    }

    char * at(size_t offset = 0) const { return (char *) ggml_backend_buffer_get_base(buf.get()) + offset; }

    ggml_backend_buffer_ptr buf;
    size_t                  size = 0;
};

// gives out consecutive offsets in a buffer
struct kvf_gpu_places {
    size_t take(size_t size) {
        const size_t at = end;
        end += GGML_PAD(size, 256);
        return at;
    }
    size_t end = 0;
};

// the quantities that determine the memory for choices, which kvf_gpu_tables lays out
struct kvf_gpu_shape {
    std::vector<kvf_heads> layers; // of all devices
    uint32_t               n_ctx, n_seq, n_cell, n_chunk;

    static kvf_gpu_shape of(const kvf_fresh & fresh);

    uint32_t       n_block() const { return n_cell / n_chunk; }
    uint32_t       n_slot() const { return n_block() * (n_chunk / kvf_fresh::UNIT); }
    uint32_t       n_record() const { return (n_ctx + n_chunk - 1) / n_chunk; } // of a sequence
    uint32_t       n_table() const { return layers.size() * n_seq; }
    uint32_t       n_query() const; // the most query heads of a layer
    kvf_gpu_ask    ask() const;
    kvf_gpu_attend attend(const kvf_heads & heads) const;
};

// offsets of the buffers, other than codes, for choosing guests (first line) and for making and reading codes (last line)
struct kvf_gpu_tables : kvf_gpu_places {
    explicit kvf_gpu_tables(const kvf_gpu_shape & shape);

    size_t   lse, parts, shares, tops, moves, n_moves, counts, table, records, blocks, guests;
    uint32_t n_sum = 0; // the most elements of a K row or V row
    size_t   codes[2], layers, coders, sums, chunks, attended, passes, taken;
};

struct kvf_gpu_chooser : kvf_chooser, kvf_tenant {
    // dev: null in tests, which use host memory
    kvf_gpu_chooser(kvf_fresh & fresh, kvf_kernels & gpu, ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft);
    ~kvf_gpu_chooser() override;

    void put(llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records,
            uint32_t n) override;
    void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) override;
    void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) override;
    void cover(llama_seq_id seq) override;

    std::vector<int32_t> table(llama_seq_id seq, uint32_t layer) override;
    void                 keep(llama_seq_id seq, uint32_t n) override;
    void                 set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetch) override;

    void build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, int32_t il,
            uint32_t layer) override;
    ggml_tensor * blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float scale, ggml_tensor * cur,
            ggml_tensor * sinks, bool by_head, int32_t il, uint32_t layer) override;

    void     begin(llama_seq_id) override { come_back(); }
    void     leave() override;
    uint64_t n_fetched() override;
    uint64_t device_bytes() override { return fixed.size + coded.size; }

    // the input of the kernels for a ubatch of n_token tokens (kvf_gpu_ask)
    std::vector<int32_t> ask(uint32_t n_token) const;

private:
    void                       lay_out_layers();
    size_t                     place_codes(char * base);
    void                       lay_out_codes();
    void                       lay_out_coders();
    void                       lay_out_attends();
    void                       come_back();
    template <typename F> void each_part(F && copy);
    template <typename F> void each_piece(llama_seq_id seq, uint32_t layer, uint32_t n, F && copy);
    void begin_segments(llama_seq_id seq, uint32_t layer, uint32_t n_layer, const kvf_gpu_chunks & from, uint32_t first);
    void begin_first(llama_seq_id seq, uint32_t layer, uint32_t n_layer, const kvf_gpu_chunks & from,
            const std::vector<kvf_gpu_sampled> & sampled);
    void upload_factors(llama_seq_id seq, uint32_t layer);

    kvf_gpu_coders coders(uint32_t layer, uint32_t n_layer) const;

    // make the ask an input of the graph that is being built. returns false if it already is one
    bool          add_words(ggml_context * ctx, llm_graph_result * res, uint32_t n_token);
    ggml_tensor * add(ggml_context * ctx, ggml_cgraph * gf, const char * name, uint32_t layer,
            void (*launch)(ggml_tensor *, void *), void * userdata, std::vector<ggml_tensor *> args = {});

    bool mine(uint32_t layer) const { return fresh.layers[layer].dev == dev; }
    // the layer of the cache that a layer of the model reads; -1: it reads none on this device
    int32_t read_by(int32_t il) const;

    ggml_backend_dev_t device() const { return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }
    const char *       device_record(const void * record);
    kvf_gpu_guests &   guests(llama_seq_id seq, uint32_t layer) { return all_guests[layer * n_seq + seq]; }
    kvf_gpu_codes &    codes_at(uint32_t kind, uint32_t layer, llama_seq_id seq) { return at[kind][layer * n_seq + seq]; }

    kvf_fresh &                      fresh;
    kvf_kernels &                    gpu;
    const ggml_backend_dev_t         dev;
    const ggml_backend_buffer_type_t buft;
    const uint32_t                   n_seq;
    const kvf_gpu_shape              shape;
    const kvf_gpu_tables             in;

    std::vector<kvf_gpu_layer>             layers;
    std::vector<kvf_gpu_guests>            all_guests; // [layer][sequence], a copy of the device's array
    std::vector<std::vector<const char *>> records;    // of each sequence, as uploaded
    kvf_coarse_codes                       codes;      // only the divisors: the codes themselves are on the device
    std::vector<kvf_gpu_codes>             at[2];      // addresses of the codes of keys and of values [layer][sequence]
    std::vector<kvf_gpu_attend>            attends;    // for each layer of the model
    kvf_gpu_occupy                         all = {};

    kvf_gpu_memory        fixed;            // the buffers of kvf_gpu_tables
    kvf_gpu_memory        coded;            // the codes, unless they lodge
    char *                base   = nullptr; // the memory of the codes
    size_t                at_end = 0;       // its size
    bool                  lodges = false;   // the codes use the memory of panes
    bool                  here   = true;    // the codes are in device memory
    std::shared_ptr<char> away;             // their host memory while they are not
    uint32_t              n_head = 0;       // the most key heads of a layer
    size_t                memory = 0;       // shared memory of a block that encodes

    std::vector<std::unique_ptr<void, void (*)(void *)>> events;
    std::mutex                                           mutex;
    std::unordered_map<const void *, const char *>       seen; // device addresses of the records that are being put

    // while a graph is built: the ask, the last attend node, the last late choice, and that one's layer until another layer
    // waits for it
    ggml_tensor *    words = nullptr, *attend = nullptr, *late = nullptr;
    kvf_gpu_attend * late_of = nullptr;
    ggml_tensor      view    = {}; // a tensor in `fixed`, by which the scheduler finds the device
};
