#pragma once

#include "pool/impl.h"

#include <memory>

struct ggml_tensor;

struct kvf_fresh;

// The codes and guests of the layers on one device, for the CPU (coarse/coarse.cpp) or for a GPU with our kernels
// (coarse/gpu-coarse.cpp). `layer` is always an index in the cache.
struct kvf_chooser {
    virtual ~kvf_chooser() = default;

    // make, save and restore codes: see kvf_codes_put(), kvf_codes_get() and kvf_codes_set(). threads may share the layers.
    // put() leaves out layers of other devices
    virtual void put(llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records,
            uint32_t n)                                                              = 0;
    virtual void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst)       = 0;
    virtual void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) = 0;
    // the codes that were put are complete, and the sequence has new records
    virtual void cover(llama_seq_id seq) = 0;

    // the units in the slots of a layer; -1: the slot is empty
    virtual std::vector<int32_t> table(llama_seq_id seq, uint32_t layer) = 0;
    // the number of slots has changed: keep the units in the first n slots of all layers, and empty the others
    virtual void keep(llama_seq_id seq, uint32_t n) = 0;
    // set the table of a layer. fetch: also fetch the rows of its units
    virtual void set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetch) = 0;

    // add the nodes before a layer's attention. il: the model's layer, which may read the rows of another one; layer: where
    // these rows are. q: [d, n_head, n_tokens]
    virtual void build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale,
            int32_t il, uint32_t layer) = 0;
    // add the nodes after a layer's attention: they extend its result cur to the positions outside the pool. cur: [d,
    // n_head, n_tokens], or with by_head [d, n_tokens, n_head]. sinks: null if there are none
    virtual ggml_tensor * blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float scale, ggml_tensor * cur,
            ggml_tensor * sinks, bool by_head, int32_t il, uint32_t layer) = 0;
    // a ubatch with tokens of a sequence begins
    virtual void     begin(llama_seq_id) {}
    virtual uint64_t n_fetched() = 0;
    // the device memory for codes and choices; 0 on the CPU
    virtual uint64_t device_bytes() = 0;
};

std::unique_ptr<kvf_chooser> kvf_coarse_chooser(kvf_fresh & fresh);
// nullptr: the backend of this buffer has no kernels of ours
std::unique_ptr<kvf_chooser> kvf_gpu_coarse_chooser(kvf_fresh & fresh, ggml_backend_buffer_t buf, ggml_backend_dev_t dev);

// Guests. A pool has two kinds of blocks. Common blocks hold the same chunk in all layers. In guest blocks, each layer holds
// units of its own choice. llama.cpp takes the cells of guests for empty, and show_guests() makes them visible to the tokens
// of their sequence. The positions of guests do not matter, because RoPE is already applied to K.
//
// Tokens attend to positions outside the pool by the codes of their keys and values. The codes give each unit of 16
// positions a share of the attention, summed over heads. By these shares a layer exchanges at most n_exchange guests for
// better units, and fetches their rows from the records. Units of common chunks are never guests.
struct kvf_fresh {
    static constexpr uint32_t UNIT        = 16; // positions of a guest
    static constexpr uint32_t MOST_ASKING = 8;  // most tokens of a sequence in a ubatch that choose; they are evenly spread
    struct params {
        uint32_t n_exchange;
        uint32_t n_ctx; // positions of a sequence
        uint32_t n_seq;
        uint32_t coarse_k, coarse_v; // bits of codes
    };

    struct layer {
        kvf_layer     info;
        ggml_tensor * k;
        ggml_tensor * v; // null: the layer stores no V

        ggml_backend_dev_t dev;   // the device of its memory; null: the CPU
        float              cap;   // of the logits; 0: none
        uint32_t           n_rot; // the block size of llama.cpp's rotation of keys; 0: keys are not rotated
        kvf_chooser *      chooser;
    };

    kvf_fresh(const llama_kv_cache & kv, const params & p, std::shared_ptr<kvf_panes> panes);

    kvf_fresh(const kvf_fresh &)             = delete;
    kvf_fresh & operator=(const kvf_fresh &) = delete;

    // whether a layer of the model reads a layer of this cache, its own or another one's
    bool    reads(int32_t il) const { return il >= 0 && (size_t) il < of_model.size() && of_model[il] >= 0; }
    int32_t layer_read_by(int32_t il) const { return reads(il) ? of_model[il] : -1; }
    // whether the graph has nodes for codes: some positions have codes, or nothing was decoded yet
    bool has_coarse() const;
    // whether some positions are outside the pool. without them, results equal the stock cache's bit for bit
    bool has_out() const;
    // bytes of the codes of the first n positions in a layer
    size_t size(uint32_t layer, uint32_t n) const;

    // add the nodes after (blend) and before (build) the attention of a layer of the model
    ggml_tensor * blend(
            ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * cur, ggml_tensor * sinks, bool by_head, int32_t il);
    uint32_t n_layer_model() const { return of_model.size(); }
    void     build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, int32_t il);
    // begin a ubatch. its tokens already have cells
    void begin(const llama_kv_cache & kv, const llama_ubatch & ubatch);

    // make the cells of guests visible to the tokens of their sequence. n_kv: the width of a row of the mask
    template <typename T> void show(T * mask, int64_t n_kv) const;

    bool is_guest(uint32_t block) const;

    struct sequence {
        uint32_t                  n = 0;   // positions that have codes
        std::vector<uint32_t>     known;   // for each segment, the end of the positions that its means were computed from
        std::vector<const char *> records; // of the chunks with codes
        std::vector<uint32_t>     blocks;  // guest blocks

        // the ubatch
        std::vector<uint32_t>                       tokens; // rows of the sequence's tokens
        std::vector<llama_pos>                      pos;    // their positions
        std::vector<std::pair<uint32_t, llama_pos>> asking; // the tokens that choose: row and position
        std::vector<std::pair<llama_pos, int32_t>>  cells;  // positions in common blocks, and their cells
        std::vector<uint8_t>                        common; // for each unit, whether it is in a common block
        uint32_t n_fill = 0;                                // the number of visible slots, which have a unit in every layer
        uint32_t n_unit() const { return n / UNIT; }
    };

    // forget positions from p on
    void truncate(llama_seq_id seq, uint32_t p);
    void clear(llama_seq_id seq);
    // declare that all layers have codes of the next n chunks
    void cover(llama_seq_id seq, const void * const * records, uint32_t n);
    // set the number of guest blocks to n: keep the first ones, and add free ones. a sequence without any can be given
    // `blocks`
    void resize(llama_kv_cache & kv, llama_seq_id seq, uint32_t n, const int32_t * blocks);

    sequence & of(llama_seq_id seq) { return sequences.at(seq); }

    uint32_t cell_of(const sequence & s, uint32_t slot) const {
        const uint32_t n_unit = n_chunk / UNIT;
        return s.blocks[slot / n_unit] * n_chunk + slot % n_unit * UNIT;
    }
    uint32_t n_slot(const sequence & s) const { return s.blocks.size() * (n_chunk / UNIT); }

    const uint32_t n_chunk, n_cell;
    const bool     v_trans;
    const params   its;

    std::vector<layer>                        layers;
    std::vector<sequence>                     sequences;
    const std::shared_ptr<kvf_panes>          panes; // their memory may hold the codes; null: there are no panes
    std::vector<std::unique_ptr<kvf_chooser>> choosers;

private:
    const llama_kv_cache & kv;

    std::vector<int32_t> of_model; // for each layer of the model, the layer of the cache that it reads; -1: none

    bool begun = false; // the first ubatch has begun

    // between build() and blend(): the queries of the attention, and the scale of its products
    ggml_tensor * q     = nullptr;
    float         scale = 0;
};

// bytes of the codes of the first n positions in a layer
size_t kvf_coarse_size(const kvf_fresh::layer & layer, const kvf_fresh::params & p, uint32_t n);
