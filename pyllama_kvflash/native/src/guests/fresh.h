#pragma once

#include "pool/impl.h"

#include <memory>

struct ggml_tensor;

struct kvf_fresh;

// The codes and the guests of one device's layers: on the CPU (coarse/coarse.cpp), or by kernels on a GPU
// (coarse/gpu-coarse.cpp). A layer is given by its number in the cache.
struct kvf_chooser {
    virtual ~kvf_chooser() = default;

    // codes, see the functions of the same names in kvflash.h. threads may do different layers
    // of those of n_layer layers that are this one's
    virtual void put(llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records,
            uint32_t n)                                                              = 0;
    virtual void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst)       = 0;
    virtual void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) = 0;
    // the codes have what was put, and the sequence has more records
    virtual void cover(llama_seq_id seq) = 0;

    // the units in the slots of a layer, -1: none
    virtual std::vector<int32_t> table(llama_seq_id seq, uint32_t layer) = 0;
    // the sequence has another number of slots: the units in the first n slots stay, in all layers
    virtual void keep(llama_seq_id seq, uint32_t n) = 0;
    // set them; fetch: their rows are to be fetched
    virtual void set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetch) = 0;

    // The nodes of a layer before its attention. il: that of the model, which may read the rows of another one. q: [d,
    // n_head, n_tokens]
    virtual void build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale,
            int32_t il, uint32_t layer) = 0;
    // after the attention of a layer, whose result is cur ([d, n_head, n_tokens], or by_head [d, n_tokens, n_head]): what it
    // is with the positions that are outside the pool. sinks: null: there are none
    virtual ggml_tensor * blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float scale, ggml_tensor * cur,
            ggml_tensor * sinks, bool by_head, int32_t il, uint32_t layer) = 0;
    // a ubatch with tokens of a sequence begins
    virtual void     begin(llama_seq_id) {}
    virtual uint64_t n_fetched() = 0;
    // of the device, without the cache
    virtual uint64_t device_bytes() = 0;
};

std::unique_ptr<kvf_chooser> kvf_coarse_chooser(kvf_fresh & fresh);
// nullptr: the backend of this memory has no kernels
std::unique_ptr<kvf_chooser> kvf_gpu_coarse_chooser(kvf_fresh & fresh, ggml_backend_buffer_t buf, ggml_backend_dev_t dev);

// Guests. The blocks of a pool fall into two kinds: common ones, whose chunk is the same in all layers, and those of guests,
// in which each layer holds chunks of its own choice. For the library the cells of guests are empty, but the tokens of their
// sequence see them (show_guests). Their positions do not matter: RoPE is already in K.
//
// Positions outside the pool are attended to by the codes of their keys and values. A layer chooses its guests by the shares
// of the attention that these give to units of 16 positions, summed over heads: at most n_exchange are exchanged for better
// ones, whose rows are fetched from their records. Common chunks are never guests.
struct kvf_fresh {
    static constexpr uint32_t UNIT        = 16; // positions of a guest
    static constexpr uint32_t MOST_ASKING = 8;  // tokens of a sequence in a ubatch whose queries choose, evenly spread
    struct params {
        uint32_t n_exchange;
        uint32_t n_ctx; // of a sequence
        uint32_t n_seq;
        uint32_t coarse_k, coarse_v; // bits of codes
    };

    struct layer {
        kvf_layer     info;
        ggml_tensor * k;
        ggml_tensor * v; // null: none is stored

        ggml_backend_dev_t dev; // whose memory it is in; null: the CPU's
        float              cap;
        uint32_t           n_rot; // keys are rotated in blocks of so many values; 0: they are not
        kvf_chooser *      chooser;
    };

    kvf_fresh(const llama_kv_cache & kv, const params & p, std::shared_ptr<kvf_panes> panes);

    kvf_fresh(const kvf_fresh &)             = delete;
    kvf_fresh & operator=(const kvf_fresh &) = delete;

    // whether a layer of the model reads a layer here, its own or another's
    bool    reads(int32_t il) const { return il >= 0 && (size_t) il < of_model.size() && of_model[il] >= 0; }
    int32_t layer_read_by(int32_t il) const { return reads(il) ? of_model[il] : -1; }
    // whether positions outside the pool are attended to by their codes
    bool has_coarse() const;
    // whether there are some. else answers are the stock cache's, to the last bit
    bool has_out() const;
    // bytes of the codes of the first n positions in a layer
    size_t size(uint32_t layer, uint32_t n) const;

    // the nodes of a layer of the model, before and after its attention
    ggml_tensor * blend(
            ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * cur, ggml_tensor * sinks, bool by_head, int32_t il);
    uint32_t n_layer_model() const { return of_model.size(); }
    void     build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, int32_t il);
    // a ubatch begins, whose cells are taken
    void begin(const llama_kv_cache & kv, const llama_ubatch & ubatch);

    // the guests' cells that each of its tokens sees are visible. n_kv: width of a row of the mask
    template <typename T> void show(T * mask, int64_t n_kv) const;

    bool is_guest(uint32_t block) const;

    struct sequence {
        uint32_t                  n = 0;   // positions that have codes
        std::vector<uint32_t>     known;   // how many had when each segment began: its means are made of these
        std::vector<const char *> records; // of its chunks
        std::vector<uint32_t>     blocks;

        // of the ubatch
        std::vector<uint32_t>                       tokens;     // its rows
        std::vector<llama_pos>                      pos;        // and their positions
        std::vector<std::pair<uint32_t, llama_pos>> asking;     // those whose queries choose, and their positions
        std::vector<std::pair<llama_pos, int32_t>>  cells;      // positions that all layers hold, and where
        std::vector<uint8_t>                        common;     // of each unit: whether they are among these
        uint32_t                                    n_fill = 0; // slots that have a unit in all layers, and are visible
        uint32_t                                    n_unit() const { return n / UNIT; }
    };

    // forget positions from p on
    void truncate(llama_seq_id seq, uint32_t p);
    void clear(llama_seq_id seq);
    // all layers have the codes of these chunks, which come after those that have them
    void cover(llama_seq_id seq, const void * const * records, uint32_t n);
    // give it n blocks: its first ones, then free ones, or these
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
    const std::shared_ptr<kvf_panes>          panes; // in whose memory codes may lie; null: there are none
    std::vector<std::unique_ptr<kvf_chooser>> choosers;

private:
    const llama_kv_cache & kv; // whose this is

    std::vector<int32_t> of_model; // the layer that it reads, by layer of the model; -1: none of these

    bool begun = false; // a ubatch has

    ggml_tensor * q     = nullptr; // of the attention that is being built
    float         scale = 0;
};

// bytes of the codes of the first n positions in a layer
size_t kvf_coarse_size(const kvf_fresh::layer & layer, const kvf_fresh::params & p, uint32_t n);
