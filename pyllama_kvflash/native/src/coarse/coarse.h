#pragma once

#include "coarse/codes.h"
#include "coarse/weights.h"
#include "guests/gpu.h"
#include "guests/slots.h"

// Attention to positions outside the pool, on the CPU: by codes of their keys and values, in one softmax with what the pool
// has.
//
// llama.cpp's own attention sees the pool. Two nodes of the graph after it compute what the codes of all other positions
// would give, and the share w of all weights that these have; its result becomes (1 - w)*its own + w*that of the codes. Each
// position is in exactly one of the two: `open` says which, by the tables of units of 16. Two nodes before it choose the
// units that a layer has in the pool, by their shares of the attention, which the codes tell, too.
//
// Work is cut into tasks that do not depend on the number of threads, and so are the sums.

static_assert(kvf_codes::SEGMENT % KVF_TILE == 0, "a tile has one mean");
static_assert(kvf_codes::TILE == KVF_TILE_UNITS, "the units of a task lie together");

// the codes of a layer of a sequence: of keys, and of values, unless the keys are these, too (MLA)
struct kvf_coarse_layer {
    std::vector<kvf_codes> all;

    kvf_codes &       keys() { return all.front(); }
    const kvf_codes & keys() const { return all.front(); }
    const kvf_codes & values() const { return all.back(); }
};

// those of all sequences and layers
struct kvf_coarse_codes {
    explicit kvf_coarse_codes(const kvf_fresh & fresh);

    // as those of kvf_chooser
    void put(llama_seq_id seq, uint32_t layer, uint32_t first, const void * const * records, uint32_t n);
    void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst);
    void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src);
    // those of a layer that a GPU has
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

// the rows whose mean is that of each segment that begins in chunks first to first + n
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
        bool                chooses; // the layer is its own, not one whose rows it reads, too
        bool                by_head; // what is mixed is [d, n_tokens, n_head], else [d, n_head, n_tokens]
    };

    // What one node computes for a sequence: the attention of some tokens, by tasks. A task has up to KVF_MOST_Q queries of
    // one head of keys, and a part of the positions: tiles of those in codes, and then tiles of those in the pool.
    struct work {
        const kvf_fresh::sequence * s;
        llama_seq_id                seq;
        uint32_t                    layer;
        bool                        attends;  // with values; else only what is needed to choose
        bool                        keeps;    // one token, whose weights are kept from the choice before its attention
        std::vector<uint32_t>       rows;     // of the tokens, in the ubatch
        std::vector<llama_pos>      pos;      // theirs
        std::vector<int32_t>        asking;   // theirs, among those that choose; -1: it does not
        uint32_t                    n_cell;   // of the pool, first those of s->cells, then the guests'
        uint32_t                    n_common; // of s->cells
        std::vector<int32_t>        cells;    // where they are, by place()
        std::vector<float>          open;     // of each unit: 0, its rows are among these cells, or 1
        uint32_t                    group, n_head_kv, n_batch, n_far, n_near, n_part;
        bool                        few; // each tile is a part, so that all threads have something to do; else there are two

        bool     is_far(uint32_t i) const { return i < (few ? n_far : 1); }
        uint32_t n_query() const { return rows.size() * group; }
        uint32_t n_task() const { return n_head_kv * n_batch * n_part; }
    };

    // queries of a task, prepared
    struct queries {
        uint32_t            head = 0, batch = 0, n = 0;
        bool                set = false;
        kvf_aligned<float>  plain;   // [KVF_MOST_Q][width]
        kvf_aligned<float>  rotated; // [n][width]
        std::vector<int8_t> bytes;   // [n][width]
        float               unit[KVF_MOST_Q], middle[KVF_MOST_Q];
    };

    // sums of weights of a query, relative to the largest of its logits: of codes, and of the pool
    struct total {
        float top, far, near;
    };

    // some of a task's queries
    struct seeing {
        uint32_t n = 0, its[KVF_MOST_Q];

        void add(uint32_t query) { its[n++] = query; }
    };

    // sums of a part, of one query: `top` is what was taken off the logits
    struct part {
        float * at; // top, sum of weights, then [width] of weighted values

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
    total total_of(const work & w, uint32_t head, uint32_t query, float least); // least: of its largest logit

    void compute(const node & at, const ggml_tensor * q, bool attends, int ith, int nth);
    void mix(const node & at, ggml_tensor * dst, int ith, int nth);
    void choose(const node & at);

    size_t shares_at(const work & w, uint32_t head, uint32_t query) const {
        return ((size_t) w.asking[query / w.group] * n_head + head * w.group + query % w.group);
    }

    kvf_coarse_codes  codes;
    std::vector<node> nodes;                 // of each layer of the model
    uint32_t          n_head = 0, width = 0; // the most of a layer

    // of the node that is computed, [seq]
    struct scratch {
        kvf_aligned<float> parts; // [head_kv][query][part][2 + width]
        kvf_aligned<float> sums;  // of each unit's weights, relative to its tile's top: [asking][head][n_unit]
        std::vector<float> tops;  // [asking][head][n_far]
        kvf_aligned<float> kept;  // weights of one token: [head_kv][batch][n_far][KVF_MOST_Q][KVF_TILE]
        std::vector<float> near;  // its top and sum of what is common: [head][2]
        std::vector<float> all;   // the logarithm of the sum of all its weights: [head]
    };
    std::vector<scratch> own;
};
