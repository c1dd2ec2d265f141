#pragma once

// what attention by codes begins with: what a block does and knows

#include "guests/choose.cuh"
#include "coarse/coded.cuh"
#include "coarse/ptx.cuh"

static constexpr uint32_t COLS  = kvf_gpu_attend::COLUMNS;      // queries of a product
static constexpr uint32_t PAIRS = 4;                            // of units, whose weights a warp has at once
static constexpr uint32_t STEPS = 4;                            // products of keys, of which the words are read together
static constexpr uint32_t MOST_WARPS = AT / 32;                 // of a block
static constexpr uint32_t AT_ONCE    = kvf_gpu_attend::AT_ONCE; // values whose sums a warp has in registers
static constexpr float    MOST_BYTE  = 127;
static constexpr float    LITTLE     = 1.0f / 16384; // of the weights so far: a piece with less has the mean for its values
static constexpr float    LEAD       = 8;            // by how much a logit may pass the largest before it: 2^16 is no half

static __device__ uint32_t halves(float a, float b) {
    const half2 both = __floats2half2_rn(a, b);
    uint32_t    res;
    memcpy(&res, &both, sizeof(res));
    return res;
}

// the queries of a pass, and the tokens that they belong to
struct attend_pass {
    uint32_t head, share; // of keys; its queries of a token
    uint32_t row, n_row;  // tokens
    uint32_t skip, n;     // queries of the first token that are another pass's; its own
    uint32_t index;

    // the i-th of a head. tokens: of the batch, from the first one on, n_token of them
    __device__ attend_pass(const kvf_gpu_attend & a, uint32_t head, uint32_t i, uint32_t tokens, uint32_t n_token) :
        head(head), share(a.share), index(i * a.p.n_head_kv + head) {
        const uint32_t first = i * COLS;
        row                  = tokens + first / share;
        skip                 = first % share;
        n                    = min(COLS, n_token * share - first);
        n_row                = (skip + n + share - 1) / share;
    }

    __device__ uint32_t row_of(uint32_t column) const { return row + (skip + column) / share; }
    __device__ uint32_t head_of(uint32_t column) const { return head * share + (skip + column) % share; }
    // the first one of the i-th token, or the end
    __device__ uint32_t column_of(uint32_t i) const { return i == 0 ? 0 : min(n, i * share - skip); }

    // -1: nothing is outside the pool. words: of tokens
    __device__ int32_t seq_of(const int32_t * words, uint32_t i) const {
        return words[(row + i) * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::SEQ];
    }
};

// what a block does: the columns of tokens that belong to one sequence
struct attend_task : attend_pass {
    uint32_t from, end; // columns that count
    uint32_t part, n_part, n_far;
    uint32_t seq, n_unit, n_fill, n_common;

    __device__ attend_task(const attend_pass & pass) : attend_pass(pass) {}

    __device__ bool has(uint32_t column) const { return column >= from && column < end; }
};

// what kvf_prepare has of a pass
struct prepared_pass {
    uint2 *    words; // [step][column][4]
    uint2 *    plain; // [16 values][column][4]
    float *    unit;  // [column]: by which products are multiplied
    float *    middle;
    float *    base; // [segment][column]
    uint32_t * taken; // of the pass's first token

    __device__ prepared_pass(const kvf_gpu_attend & a, const attend_pass & pass, uint32_t tokens) {
        words  = (uint2 *) (a.passes + (uint64_t) pass.index * a.pass_size());
        plain  = words + a.n_step() * 32;
        unit   = (float *) (plain + a.n_plain());
        middle = unit + COLS;
        base   = middle + COLS;
        taken  = a.taken + (uint64_t) (pass.row - tokens) * a.n_word();
    }
};

// a head's bytes of the rows of some cells: of keys, or of values
struct pool_rows {
    const char * from;
    uint64_t     stride;
    int32_t      type;
    uint32_t     n, size;    // bytes; those that are copied at once, 1: nothing is aligned
    uint32_t     shift;      // where those of the head begin
    uint32_t     first;      // and its first value among these
    uint32_t     room;       // from row to row in shared memory
    uint32_t     more, rest; // from piece to piece of a lane
    uint16_t     row[32], i[32]; // of each lane's first piece: its row, and which one of that
};

// what a block knows. Of each warp, at its end: the largest logit, the sum of the weights, relative to what its sums of
// values are, and the sum of the weights whose values have the mean of a segment, too
struct attend_memory {
    kvf_gpu_codes codes[2]; // of the sequence
    pool_rows     rows[2];
    float         unit[COLS], middle[COLS];
    float         top[MOST_WARPS][COLS], sum[MOST_WARPS][COLS], values_top[MOST_WARPS][COLS], about[MOST_WARPS][COLS];
    float         by[MOST_WARPS][COLS];
    float         all_about[COLS];
    float *       part[COLS]; // where it goes; null: a query does not count
};

// what a block shares. Of codes and of the pool each has its own, in the same place
struct attend_places {
    uint32_t n_warp, n_value, room[2]; // sums of a query; bytes from row to row of the pool: keys, values
    size_t   values, words, weights;
    size_t   queries, rows, each, end; // of the pool: what a warp has, weights first

    KVF_BOTH attend_places(const kvf_gpu_attend & a, uint32_t n_warp) : n_warp(n_warp) {
        n_value = a.n_value();
        room[0] = a.rows[0].room;
        room[1] = a.p.v.n_run > 0 ? a.rows[1].room : 0;
        values  = GGML_PAD(sizeof(attend_memory), 16);
        words   = values + n_warp * COLS * n_value * sizeof(float);
        weights = words + a.n_step() * 32 * sizeof(uint2);
        queries = words;
        rows    = queries + a.n_plain() * sizeof(uint2);
        each    = COLS * UNIT * sizeof(uint16_t) + UNIT * (room[0] + room[1]);

        const size_t of_far = weights + n_warp * PAIRS * 32 * sizeof(uint4), of_pool = rows + n_warp * each;
        end = of_far > of_pool ? of_far : of_pool;
    }

    __device__ uint32_t room_of(bool values) const { return values ? room[1] : room[0]; } // registers are not indexed
};
