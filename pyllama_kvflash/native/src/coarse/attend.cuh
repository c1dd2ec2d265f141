#pragma once

// attention by codes: the task of a block, and its shared memory

#include "guests/choose.cuh"
#include "coarse/coded.cuh"
#include "coarse/ptx.cuh"

static constexpr uint32_t COLS  = kvf_gpu_attend::COLUMNS;      // queries of a product
static constexpr uint32_t PAIRS = 4;                            // pairs of units whose weights a warp holds at once
static constexpr uint32_t STEPS = 4;                            // products of keys whose words are loaded together
static constexpr uint32_t MOST_WARPS = AT / 32;                 // of a block
static constexpr uint32_t AT_ONCE    = kvf_gpu_attend::AT_ONCE; // elements whose sums a warp holds in registers
static constexpr float    MOST_BYTE  = 127;
static constexpr float    LITTLE     = 1.0f / 16384; // a piece with a smaller share of the weights counts with the mean value
static constexpr float    LEAD       = 8; // how far a logit may exceed the largest before it: 2^16 would overflow a half

static __device__ uint32_t halves(float a, float b) {
    const half2 both = __floats2half2_rn(a, b);
    uint32_t    res;
    memcpy(&res, &both, sizeof(res));
    return res;
}

// the queries of a pass, and their tokens
struct attend_pass {
    uint32_t head, share; // the key head, and its number of query heads
    uint32_t row, n_row;  // the tokens
    uint32_t skip, n;     // queries of the first token that belong to the pass before; queries of this pass
    uint32_t index;

    // the i-th pass of a key head, for tokens [tokens, tokens + n_token) of the ubatch
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
    // the first column of the i-th token; n if the pass has no more tokens
    __device__ uint32_t column_of(uint32_t i) const { return i == 0 ? 0 : min(n, i * share - skip); }

    // the sequence of the i-th token; -1: it has nothing outside the pool. words: the words of tokens in the ask
    __device__ int32_t seq_of(const int32_t * words, uint32_t i) const {
        return words[(row + i) * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::SEQ];
    }
};

// the task of a block: a part of the positions, for the columns of the tokens of one sequence
struct attend_task : attend_pass {
    uint32_t from, end; // these columns
    uint32_t part, n_part, n_far;
    uint32_t seq, n_unit, n_fill, n_common;

    __device__ attend_task(const attend_pass & pass) : attend_pass(pass) {}

    __device__ bool has(uint32_t column) const { return column >= from && column < end; }
};

// the results of kvf_prepare for a pass
struct prepared_pass {
    uint2 *    words; // [step][column][4]
    uint2 *    plain; // [16 elements][column][4]
    float *    unit;   // the scale of products [column]
    float *    middle; // the number to subtract from products before [column]
    float *    base;   // products with the means of segments [segment][column]
    uint32_t * taken;  // a bit for each unit that the pool has, of the first token's sequence

    __device__ prepared_pass(const kvf_gpu_attend & a, const attend_pass & pass, uint32_t tokens) {
        words  = (uint2 *) (a.passes + (uint64_t) pass.index * a.pass_size());
        plain  = words + a.n_step() * 32;
        unit   = (float *) (plain + a.n_plain());
        middle = unit + COLS;
        base   = middle + COLS;
        taken  = a.taken + (uint64_t) (pass.row - tokens) * a.n_word();
    }
};

// the bytes of one head in rows of the pool, keys or values, and how a warp copies 16 rows
struct pool_rows {
    const char * from;
    uint64_t     stride;
    int32_t      type;
    uint32_t     n, size;    // bytes of a row; bytes of a piece, which is one copy (1: unaligned)
    uint32_t     shift;      // the head's offset in these bytes
    uint32_t     first;      // the index of its first element from there on
    uint32_t     room;       // bytes from row to row in shared memory
    uint32_t     more, rest; // rows and pieces from one piece of a lane to its next
    uint16_t     row[32], i[32]; // the row of each lane's first piece, and the number of the piece in that row
};

// The fixed part of a block's shared memory. At its end, each warp writes its largest logit, the sum of its weights, the
// logit that its sums of values are relative to, and the sum of the weights that also count with the mean value of a segment
struct attend_memory {
    kvf_gpu_codes codes[2]; // of the sequence
    pool_rows     rows[2];
    float         unit[COLS], middle[COLS];
    float         top[MOST_WARPS][COLS], sum[MOST_WARPS][COLS], values_top[MOST_WARPS][COLS], about[MOST_WARPS][COLS];
    float         by[MOST_WARPS][COLS];
    float         all_about[COLS];
    float *       part[COLS]; // where the result goes; null: the task does not have this column
};

// offsets in a block's shared memory. Blocks for codes use `words` and `weights`; blocks for the pool use the same memory as
// `queries` and `rows`
struct attend_places {
    uint32_t n_warp, n_value, room[2]; // n_value: floats of a query's sum; room: bytes of a row, keys and values
    size_t   values, words, weights;
    size_t   queries, rows, each, end; // each: bytes of a warp in `rows`, its weights and then its rows

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

    __device__ uint32_t room_of(bool values) const { return values ? room[1] : room[0]; } // not indexed: that would need memory
};
