#pragma once

#include "kvflash-fresh.h"
#include "kvflash-gpu.h"

#include "llama-impl.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>

// Where layers choose by the kernels of a GPU: by an index (kvflash-gpu.cpp), or by codes (kvflash-gpu-coarse.cpp).

using kvf_kernels = const kvf_gpu;

// device memory
struct kvf_gpu_memory {
    kvf_gpu_memory() = default;
    // fewer: what takes less
    kvf_gpu_memory(ggml_backend_buffer_type_t buft, size_t size, const char * what = "the index by which layers choose",
            const char * fewer = "`index` 1") : buf(ggml_backend_buft_alloc_buffer(buft, size)), size(size) {
        if (!buf) {
            throw kvf_failure(
                    KVF_E_MEMORY, format("%zu bytes of device memory for %s are not free: use %s, a smaller `n_ctx`, or a "
                                         "smaller `pool`",
                                          size, what, fewer));
        }
        ggml_backend_buffer_clear(buf.get(), 0); // the last group of the index has unused positions
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

struct kvf_gpu_chooser : kvf_chooser {
    kvf_gpu_chooser(kvf_fresh & fresh, kvf_kernels & gpu, ggml_backend_buffer_t buf);

    kvf_gpu_layer lay_out();
    kvf_gpu_layer of_layer(const kvf_gpu_layer & all, uint32_t i) const;
    kvf_gpu_drift drift(uint32_t i) const;

    void moments(uint32_t layer, const void * const * records, uint32_t n, float * mean, float * cov) override;
    void fit(llama_seq_id seq, uint32_t layer, const float * mean, const float * basis, const float * step) override;
    void put(llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records,
            uint32_t n) override;
    void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) override;
    void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) override;
    void cover(llama_seq_id seq) override;

    std::vector<int32_t> table(llama_seq_id seq, uint32_t layer) override;
    void                 keep(llama_seq_id seq, uint32_t n) override;
    void                 set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetch) override;

    ggml_backend_dev_t beside() const override {
        auto * dev = ggml_backend_buft_get_device(buft);
        return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); // in tests
    }
    void build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, int32_t il,
            uint32_t layer, const kvf_predicted & before) override;
    void fork(ggml_context * ctx, ggml_cgraph * gf, uint32_t layer) override {
        add(ctx, gf, "fork", layer, gpu.fork, events[layer].get());
    }
    void back(ggml_context * ctx, ggml_cgraph * gf, uint32_t layer) override {
        add(ctx, gf, "back", layer, gpu.back, events[layer].get());
    }
    void join(ggml_context * ctx, ggml_cgraph * gf, uint32_t layer, const std::vector<ggml_tensor *> & reads) override {
        auto all = reads;
        all.push_back(words);
        add(ctx, gf, "join", layer, gpu.join, events[layer].get(), all);
    }
    ggml_tensor * add(ggml_context * ctx, ggml_cgraph * gf, const char * name, uint32_t layer,
            void (*launch)(ggml_tensor *, void *), void * userdata, std::vector<ggml_tensor *> args = {});
    // the ask becomes an input of the graph that is being built, if it is not one yet. returns whether it was not
    bool add_words(ggml_context * ctx, llm_graph_result * res, uint32_t n_token);

    float missed(llama_seq_id seq, uint32_t layer) override;

    uint64_t n_fetched() override;
    uint64_t device_bytes() override;

    // the inputs of the kernels for a ubatch
    std::vector<int32_t> ask() const;
    // and words of its tokens after them
    virtual void     add_tokens(std::vector<int32_t> &, uint32_t /* n_token */) const {}
    virtual uint32_t n_token_word() const { return 0; }

    // of a sequence
    struct own {
        kvf_gpu_memory            codes;      // of all layers
        uint32_t                  n_room = 0; // positions
        std::vector<const char *> records;    // that the device knows
    };

    kvf_gpu_index & index(llama_seq_id seq, uint32_t layer) { return indexes[layer * owns.size() + seq]; }
    void            upload_index(llama_seq_id seq, uint32_t layer);
    void            reserve(llama_seq_id seq, uint32_t n, bool anew);
    size_t          codes_size(uint32_t layer, uint32_t n) const;
    // an index but for its codes: its pieces on the device, in the order of kvf_index::get()
    std::array<std::pair<float *, size_t>, 3> parts(llama_seq_id seq, uint32_t layer);
    bool                                      mine(uint32_t layer) const { return fresh.layers[layer].chooser == this; }
    const char *                              device_record(const void * record);

    kvf_gpu_records device_records(const void * const * records, uint32_t n);

    kvf_fresh &                fresh;
    kvf_kernels &              gpu;
    ggml_backend_buffer_type_t buft;

    std::vector<kvf_gpu_layer> layers;
    std::vector<kvf_gpu_keys>  keys;    // of all layers, as the device has them
    std::vector<kvf_gpu_index> indexes; // [layer][sequence], as the device has them
    std::vector<own>           owns;

    kvf_gpu_memory      fixed; // what is always there
    size_t              at_index = 0, at_records = 0, at_blocks = 0, at_keys = 0;
    std::vector<size_t> at_drift;                  // by layer
    uint32_t            n_record = 0, n_value = 0; // of a sequence; of a position's keys, at most
    kvf_gpu_memory      scratch;                   // of keys as floats
    float *             mean  = nullptr;
    float *             cov   = nullptr;
    ggml_tensor         view  = {};      // of the fixed memory, for the scheduler
    ggml_tensor *       words = nullptr; // the ask, in the graph that is being built

    std::vector<std::unique_ptr<void, void (*)(void *)>> events; // by layer
    std::mutex                                           mutex;

    std::unordered_map<const void *, const char *> seen; // where the device has the records that are being put
};

// the kernels for a buffer, null: there are none
kvf_kernels * kvf_kernels_of(ggml_backend_buffer_t buf);
