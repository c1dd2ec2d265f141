#pragma once

#include "kvflash-impl.h"

#include <memory>

struct ggml_tensor;

// the principal components of n values, one a row [n][n], and the variances along them, the largest first. cov: their
// covariance. throws KVF_E_LOGITS if it is not finite
void kvf_principal(uint32_t n, const float * cov, float * variances, float * components);

// The keys of a layer's positions in a few bits, for products with queries. Each head's keys are taken about their mean, and
// in a basis of their principal components. The first n_four of these have 4 bits each, then n_two 2 bits, n_one 1 bit: the
// more they differ, the more bits, as in any transform coding. A component's value is (code - (2^bits - 1)/2) times its
// step.
//
// Products need no unpacking: the 16 values of 4 bits are a table for each query, whose entries are bytes that a shuffle
// instruction looks up ("fast scan": Andre, Kermarrec and Le Scouarnec 2015).
struct kvf_index {
    static constexpr uint32_t GROUP = 64; // positions whose codes lie together: [n_nibble][32], a byte has i and i + 32

    struct form {
        uint32_t n_four, n_two, n_one;

        uint32_t n_comp() const { return n_four + n_two + n_one; }
        uint32_t n_nibble() const { return n_four + n_two / 2 + n_one / 4; }
    };

    static constexpr uint32_t MOST_SAMPLES = 4096; // keys of a head that a basis is made from, at most, evenly spread

    kvf_index(const kvf_layer & layer, const form & f);

    // of the keys in n records
    static void moments(
            const kvf_layer & layer, uint32_t n_chunk, const void * const * records, uint32_t n, float * mean, float * cov);

    // mean: [n_head_kv][d]. basis: [n_head_kv][d][n_comp]. step: [n_head_kv][n_comp]. forgets all codes
    void fit(const float * mean, const float * basis, const float * step);
    // n positions from pos on. keys: [n][n_embd_k]
    void put(uint32_t pos, const float * keys, uint32_t n);

    // bytes of the first n positions, in one piece: means, bases, steps, codes
    static size_t size(const kvf_layer & layer, const form & f, uint32_t n);

    void get(uint32_t n, char * dst) const;
    void set(uint32_t n, const char * src);

    // a query's products with the keys of positions: base + unit*sum, unit > 0
    struct logits {
        std::vector<uint16_t> sums; // whole groups
        float                 base, unit;
    };

    // of the first n positions with n_q (1 or 2) queries of one head of keys
    void products(uint32_t head, const float * const * q, uint32_t n_q, uint32_t n, logits * res) const;

    const uint32_t n_head_kv, d;
    const form     its;

private:
    static uint32_t n_group(uint32_t n) { return (n + GROUP - 1) / GROUP; }

    // where the codes of a group and head begin
    size_t place(uint32_t group, uint32_t head) const { return ((size_t) group * n_head_kv + head) * its.n_nibble() * 32; }

    std::vector<float>   mean, basis, step;
    std::vector<uint8_t> codes; // [group][head][nibble][32]
};

// The queries of a layer of the model, predicted: computed from the input of the layer before, rather than from its output,
// since a layer changes little (InfiniGen: Lee et al., OSDI 2024). They are computed beside the attention of the layer
// before, and what they choose beside its feed-forward network.
struct kvf_ahead {
    ggml_tensor * q     = nullptr; // null: the graph has no such places, or `dev` does not compute all that lies between
    ggml_tensor * begin = nullptr; // the nodes of q come after this one
    ggml_tensor * near  = nullptr; // the input of the network

    std::vector<ggml_tensor *> reads; // what the nodes of q read, weights aside: it has to last until they are done

    kvf_ahead() = default;
    // exact: the queries as they are. il: a layer of the model. layer: the same in the cache
    kvf_ahead(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * exact, int32_t il, uint32_t layer, ggml_backend_dev_t dev);
};

// queries of a layer: as they were predicted, and its own ones
struct kvf_predicted {
    ggml_tensor * q   = nullptr; // null: none were
    ggml_tensor * own = nullptr;
};

// whether a device computes all nodes of the graph from the one after `after` on
bool kvf_computes_since(ggml_backend_dev_t dev, const ggml_cgraph * gf, const ggml_tensor * after);
// move the nodes from `first` on to after a node before them
void kvf_move_nodes(ggml_cgraph * gf, int first, const ggml_tensor * after);

struct kvf_fresh;

// Where the layers of one device choose: on the CPU (kvflash-choice.cpp), or by kernels on a GPU (kvflash-gpu.cpp). A layer
// is given by its number in the cache.
struct kvf_chooser {
    virtual ~kvf_chooser() = default;

    // the index, see the functions of the same names in kvflash.h. threads may do different layers
    virtual void moments(uint32_t layer, const void * const * records, uint32_t n, float * mean, float * cov);
    virtual void fit(llama_seq_id seq, uint32_t layer, const float * mean, const float * basis, const float * step);
    // of those of n_layer layers that are this one's
    virtual void put(llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records,
            uint32_t n)                                                              = 0;
    virtual void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst)       = 0;
    virtual void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) = 0;
    // the index has what was put, and the sequence has more records
    virtual void cover(llama_seq_id seq) = 0;

    // the units in the slots of a layer, -1: none
    virtual std::vector<int32_t> table(llama_seq_id seq, uint32_t layer) = 0;
    // the sequence has another number of slots: the units in the first n slots stay, in all layers
    virtual void keep(llama_seq_id seq, uint32_t n) = 0;
    // set them; fetch: their rows are to be fetched
    virtual void set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetch) = 0;

    // the device that can compute nodes beside others, nullptr: it does one after the other
    virtual ggml_backend_dev_t beside() const { return nullptr; }
    // The nodes of a layer. il: that of the model, which with codes may read the rows of another one. q: [d, n_head,
    // n_tokens]. before: those of the layer before, by which predictions get better
    virtual void build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale,
            int32_t il, uint32_t layer, const kvf_predicted & before) = 0;
    // after the attention of a layer, whose result is cur ([d, n_head, n_tokens], or by_head [d, n_tokens, n_head]): what it
    // is with the positions that are outside the pool. sinks: null: there are none
    virtual ggml_tensor * blend(ggml_context *, ggml_cgraph *, ggml_tensor * /* q */, float /* scale */, ggml_tensor * cur,
            ggml_tensor * /* sinks */, bool /* by_head */, int32_t /* il */, uint32_t /* layer */) {
        return cur;
    }
    // a ubatch with tokens of a sequence begins
    virtual void begin(llama_seq_id) {}
    // nodes of this layer between the two run beside those that come then, up to `join`: what they read lasts until then
    virtual void fork(ggml_context *, ggml_cgraph *, uint32_t /* layer */) {}
    virtual void back(ggml_context *, ggml_cgraph *, uint32_t /* layer */) {}
    virtual void join(ggml_context *, ggml_cgraph *, uint32_t /* layer */, const std::vector<ggml_tensor *> & /* reads */) {}

    // by how much predicted queries missed the logits of a head, at most: the standard deviation, summed over the tokens
    // that showed it
    virtual float missed(llama_seq_id /* seq */, uint32_t /* layer */) { return 0; }

    virtual uint64_t n_fetched() = 0;
    // of the device, without the cache
    virtual uint64_t device_bytes() = 0;
};

// the kernels of a GPU, nullptr: its backend has none
std::unique_ptr<kvf_chooser> kvf_make_gpu_chooser(kvf_fresh & fresh, ggml_backend_buffer_t buf);
std::unique_ptr<kvf_chooser> kvf_cpu_chooser(kvf_fresh & fresh);
// with codes of all positions, on the CPU, or by the kernels of a GPU
std::unique_ptr<kvf_chooser> kvf_coarse_chooser(kvf_fresh & fresh);
std::unique_ptr<kvf_chooser> kvf_gpu_coarse_chooser(kvf_fresh & fresh, ggml_backend_buffer_t buf);

// Guests. The blocks of a pool fall into two kinds: common ones, whose chunk is the same in all layers, and those of guests,
// in which each layer holds chunks of its own choice. For the library the cells of guests are empty, but the tokens of their
// sequence see them (show_guests). Their positions do not matter: RoPE is already in K.
//
// Before a layer's attention, two nodes of the graph score all units of 16 positions in the index by their share of the
// attention, summed over heads. Then they exchange at most n_exchange guests for better ones, whose rows are fetched from
// their records. Shares are estimated from the index, but computed from the keys of common chunks: an attention sink is
// unlike any other key, and few bits do not show its share. Common chunks are never guests.
struct kvf_fresh {
    static constexpr uint32_t UNIT        = 16; // positions of a guest
    static constexpr uint32_t MOST_ASKING = 8;  // tokens of a sequence in a ubatch whose queries choose, evenly spread
    static constexpr uint32_t N_MEASURED  = 12; // tokens that show what predictions miss
    // What may be missed, at most. Of Qwen2.5-Coder-1.5B it picks 5 of 28 layers. One of them, with 1.9, made all the
    // difference to the answers
    static constexpr float MOST_MISSED = 1.25f;

    static constexpr uint32_t AHEAD_ALWAYS = 2; // of params::ahead

    struct params {
        kvf_index::form form;
        uint32_t        n_exchange;
        uint32_t        n_turn; // each layer chooses at every n-th token, in turns
        uint32_t        ahead;  // kvf_pool_setup
        uint32_t        n_ctx;  // of a sequence
        uint32_t        n_seq;
        uint32_t        coarse_k, coarse_v; // bits of codes, 0: there are none
        bool            late;               // layers choose after their attention, for the next token
    };

    struct layer {
        kvf_layer     info;
        ggml_tensor * k;
        ggml_tensor * v; // null: none is stored
        float         cap;
        uint32_t      n_rot; // keys are rotated in blocks of so many values; 0: they are not
        kvf_chooser * chooser;
    };

    kvf_fresh(const llama_kv_cache & kv, const params & p);

    kvf_fresh(const kvf_fresh &)             = delete;
    kvf_fresh & operator=(const kvf_fresh &) = delete;

    // whether a layer of the model reads a layer here, its own or another's
    bool    reads(int32_t il) const { return il >= 0 && (size_t) il < of_model.size() && of_model[il] >= 0; }
    int32_t layer_read_by(int32_t il) const { return reads(il) ? of_model[il] : -1; }
    // Layers that choose by their own queries, and make the model wait, though these are predicted: all of them for the
    // first tokens of an answer, and then those whose predictions missed much. Of the next graph
    std::vector<bool> waits;

    // whether positions outside the pool are attended to by their codes
    bool has_coarse() const;
    // whether there are some. else answers are the stock cache's, to the last bit
    bool has_out() const;
    // bytes of the index, or the codes, of the first n positions in a layer
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
        uint32_t                  n = 0;   // positions in the index
        std::vector<const char *> records; // of its chunks
        std::vector<uint32_t>     blocks;

        // of the ubatch
        std::vector<uint32_t>                       tokens;         // its rows
        std::vector<llama_pos>                      pos;            // and their positions
        std::vector<std::pair<uint32_t, llama_pos>> asking;         // those whose queries choose, and their positions
        std::vector<std::pair<llama_pos, int32_t>>  cells;          // positions that all layers hold, and where
        std::vector<uint8_t>                        common;         // of each unit: whether they are among these
        uint32_t                                    n_fill    = 0;  // slots that a layer fills when it chooses
        uint32_t                                    n_visible = 0;  // of these, those that all layers have filled
        uint32_t                                    n_since   = 0;  // ubatches since n_fill grew
        uint32_t                                    n_step    = 0;  // of turns
        uint32_t                                    n_drift   = 0;  // tokens before, one by one, with predicted queries
        llama_pos                                   pos_next  = -1; // that of the next such token
        llama_pos                                   pos_ahead = -1; // the last one before the ubatch
        std::vector<bool>                           waits;          // for own queries: what its first tokens showed
        bool                                        all     = true; // every layer chooses, not only those whose turn it is
        bool                                        changed = true; // `all` is set for the next ubatch

        uint32_t n_unit() const { return n / UNIT; }
    };

    // whether a layer chooses for the ubatch
    bool has_turn(const sequence & s, uint32_t layer) const {
        return s.n_fill > 0 && (s.all || (s.n_step + layer) % its.n_turn == 0);
    }

    // the next token of a sequence goes on from none: its layers wait
    void interrupt(llama_seq_id seq);
    // forget positions from p on
    void truncate(llama_seq_id seq, uint32_t p);
    void clear(llama_seq_id seq);
    // the index of all layers has these chunks, which come after those it has
    void cover(llama_seq_id seq, const void * const * records, uint32_t n);
    // give it n blocks: its first ones, then free ones, or these
    void resize(llama_kv_cache & kv, llama_seq_id seq, uint32_t n, const int32_t * blocks);

    sequence & of(llama_seq_id seq) { return sequences.at(seq); }

    uint32_t cell_of(const sequence & s, uint32_t slot) const {
        const uint32_t n_unit = n_chunk / UNIT;
        return s.blocks[slot / n_unit] * n_chunk + slot % n_unit * UNIT;
    }
    uint32_t n_slot(const sequence & s) const { return s.blocks.size() * (n_chunk / UNIT); }

    // whether layers choose ahead in a ubatch, if its graph allows. none of its tokens is in the cache then
    bool is_ahead(uint32_t n_tokens) const;

    const uint32_t n_chunk, n_cell;
    const bool     v_trans;
    const params   its;

    std::vector<layer>                        layers;
    std::vector<sequence>                     sequences;
    std::vector<std::unique_ptr<kvf_chooser>> choosers;

private:
    // which layers wait, once a ubatch is known
    void set_waits(bool ahead);

    const llama_kv_cache & kv; // whose this is

    std::vector<int32_t> of_model; // the layer that it reads, by layer of the model; -1: none of these

    bool begun = false; // a ubatch has

    ggml_tensor * q     = nullptr; // of the attention that is being built
    float         scale = 0;

    // of the graph that is being built: the queries of its last layer so far
    kvf_predicted before;
    uint32_t      layer_before = 0;
};

// bytes of the codes of the first n positions in a layer
size_t kvf_coarse_size(const kvf_fresh::layer & layer, const kvf_fresh::params & p, uint32_t n);
