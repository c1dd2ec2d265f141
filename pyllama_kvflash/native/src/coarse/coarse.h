#pragma once

#include "coarse/codes.h"
#include "coarse/weights.h"
#include "guests/gpu.h"
#include "guests/slots.h"

// Attention to positions outside the pool, on the CPU, by the codes of their keys and values. These positions and those in
// the pool are in one softmax.
//
// llama.cpp's own attention reads the pool. Two nodes of the graph after it compute the attention to the codes of all other
// positions, and their share w of all weights. The result becomes (1 - w)*pool + w*codes. Each position counts in exactly
// one of the two; `open` says in which, for each unit of 16. Three nodes before the attention score the units by their
// codes, choose the guests of the layer by these scores, and fetch the rows of new guests.
//
// The work is cut into tasks that do not depend on the number of threads, and so the sums do not, either.

static_assert(kvf_codes::SEGMENT % KVF_TILE == 0, "a tile has one mean");
static_assert(kvf_codes::TILE == KVF_TILE_UNITS, "the units of a tile are contiguous");

// the codes of one layer of a sequence: those of the keys, then those of the values. with MLA, the keys also serve as values
struct kvf_coarse_layer {
    std::vector<kvf_codes> all;

    kvf_codes &       keys() { return all.front(); }
    const kvf_codes & keys() const { return all.front(); }
    const kvf_codes & values() const { return all.back(); }
};

// the codes of all sequences and layers
struct kvf_coarse_codes {
    explicit kvf_coarse_codes(const kvf_fresh & fresh);

    // as in kvf_chooser
    void put(llama_seq_id seq, uint32_t layer, uint32_t first, const void * const * records, uint32_t n);
    void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst);
    void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src);
    // free the host's copy of a layer's codes, when a GPU has them
    void drop(llama_seq_id seq, uint32_t layer) {
        for (auto & its : all[seq][layer].all) {
            its.drop();
        }
    }

    std::vector<kvf_coarse_layer> &       operator[](llama_seq_id seq) { return all[seq]; }
    const std::vector<kvf_coarse_layer> & operator[](llama_seq_id seq) const { return all[seq]; }

private:
    const kvf_fresh &                          fresh;
    std::vector<std::vector<kvf_coarse_layer>> all; // [seq][layer]
};

// for each segment that begins in chunks [first, first + n), the rows that its mean is computed from
std::vector<kvf_gpu_sampled> kvf_sampled(uint32_t n_chunk, uint32_t first, uint32_t n);

struct kvf_coarse_on_cpu : kvf_host_chooser {
    explicit kvf_coarse_on_cpu(kvf_fresh & fresh);

    void put(llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records,
            uint32_t n) override;
    void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) override { codes.get(seq, layer, n, dst); }
    void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) override { codes.set(seq, layer, n, src); }
    void cover(llama_seq_id) override {}

    void build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, int32_t il,
            uint32_t layer) override;
    ggml_tensor * blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float scale, ggml_tensor * cur,
            ggml_tensor * sinks, bool by_head, int32_t il, uint32_t layer) override;
    void          begin(llama_seq_id seq) override;

private:
    struct node {
        kvf_coarse_on_cpu * owner;
        uint32_t            layer; // of the cache
        float               scale;
        bool                chooses; // the layer has rows of its own; false: it reads the rows of another layer
        bool                by_head; // the attention's result is [d, n_tokens, n_head]; false: [d, n_head, n_tokens]
    };

    // One node's work for a sequence: the attention of some tokens, cut into tasks. A task has up to KVF_MOST_Q queries of
    // one key head, and one part of the positions. The first parts are tiles of codes, the others are tiles of pool cells.
    struct work {
        const kvf_fresh::sequence * s;
        llama_seq_id                seq;
        uint32_t                    layer;
        bool                        attends;  // also sum up values; false: compute only what the choice needs
        bool                        keeps;    // there is one token, and the choice keeps its weights for the attention
        std::vector<uint32_t>       rows;     // the rows of the tokens in the ubatch
        std::vector<llama_pos>      pos;      // their positions
        std::vector<int32_t>        asking;   // their indices among the tokens that choose; -1: the token does not choose
        uint32_t                    n_cell;   // pool cells: first the common ones, then those of guests
        uint32_t                    n_common; // the number of common cells
        std::vector<int32_t>        cells;    // the indices of all these cells; place() sets them
        std::vector<float>          open;     // for each unit, 0: its rows are in these cells; 1: its codes count
        uint32_t                    group, n_head_kv, n_batch, n_far, n_near, n_part;
        bool few; // each tile is a part, to occupy all threads; false: codes and pool are one part each

        bool     is_far(uint32_t i) const { return i < (few ? n_far : 1); }
        uint32_t n_query() const { return rows.size() * group; }
        uint32_t n_task() const { return n_head_kv * n_batch * n_part; }
    };

    // the prepared queries of a task
    struct queries {
        uint32_t            head = 0, batch = 0, n = 0;
        bool                set = false;
        kvf_aligned<float>  plain;   // [KVF_MOST_Q][width]
        kvf_aligned<float>  rotated; // [n][width]
        std::vector<int8_t> bytes;   // [n][width]
        float               unit[KVF_MOST_Q], middle[KVF_MOST_Q];
    };

    // a query's largest logit, and its sums of weights relative to that: over codes and over the pool
    struct total {
        float top, far, near;
    };

    // a subset of a task's queries
    struct seeing {
        uint32_t n = 0, its[KVF_MOST_Q];

        void add(uint32_t query) { its[n++] = query; }
    };

    // one query's sums over a part of the positions. weights are exp(logit - top)
    struct part {
        float * at; // top, the sum of weights, the weighted sum of values [width]

        float & top() { return at[0]; }
        float & sum() { return at[1]; }
        float * values() { return at + 2; }
    };

    work make_work(llama_seq_id seq, const node & at, bool attends) const;
    void place(work & w) const;
    bool chooses(llama_seq_id seq) const;
    void prepare(const work & w, const ggml_tensor * q_all, uint32_t head, uint32_t batch, queries & res) const;
    void run(const work & w, const node & at, const ggml_tensor * q_all, uint32_t task, queries & q);
    void far(const work & w, const node & at, uint32_t head, uint32_t tile, const queries & q, part * parts);
    void near(const work & w, const node & at, uint32_t head, uint32_t tile, const queries & q, part * parts);
    void weigh_tile(const work & w, const node & at, uint32_t head, uint32_t tile, const queries & q, float * weights,
            float * const * sums, float * tops) const;
    void add_values(const work & w, uint32_t head, uint32_t first, uint32_t n, const seeing & who, const float * weights,
            const float * factors, part * parts) const;

    part  part_of(const work & w, uint32_t head, uint32_t query, uint32_t i);
    total total_of(const work & w, uint32_t head, uint32_t query, float least); // least: a lower bound of total::top

    void compute(const node & at, const ggml_tensor * q, bool attends, int ith, int nth);
    void mix(const node & at, ggml_tensor * dst, int ith, int nth);
    void choose(const node & at);

    size_t shares_at(const work & w, uint32_t head, uint32_t query) const {
        return ((size_t) w.asking[query / w.group] * n_head + head * w.group + query % w.group);
    }

    kvf_coarse_codes  codes;
    std::vector<node> nodes;                 // for each layer of the model
    uint32_t          n_head = 0, width = 0; // the largest of any layer

    // buffers of the node that is being computed
    struct scratch {
        kvf_aligned<float> parts; // [head_kv][query][part][2 + width]
        kvf_aligned<float> sums;  // of each unit's weights, relative to its tile's top [asking][head][n_unit]
        std::vector<float> tops;  // of each tile [asking][head][n_far]

        // with work::keeps, the token's weights, its top and sum over common cells, and the logarithm of its sum of all
        // weights
        kvf_aligned<float> kept; // [head_kv][batch][n_far][KVF_MOST_Q][KVF_TILE]
        std::vector<float> near; // [head][2]
        std::vector<float> all;  // [head]
    };
    std::vector<scratch> own; // for each sequence
};
