#pragma once

// what attention by codes begins with: products on tensor cores, of which lane 4*g + t has row g and columns 2*t, 2*t + 1;
// and what a block does and knows

#include "guests/choose.cuh"
#include "coarse/coded.cuh"

static constexpr uint32_t COLS  = kvf_gpu_attend::COLUMNS;      // queries of a product
static constexpr uint32_t PAIRS = 4;                            // of units, whose weights a warp has at once
static constexpr uint32_t STEPS = 4;                            // products of keys, of which the words are read together
static constexpr uint32_t MOST_WARPS = AT / 32;                 // of a block
static constexpr uint32_t AT_ONCE    = kvf_gpu_attend::AT_ONCE; // values whose sums a warp has in registers
static constexpr float    MOST_BYTE  = 127;
static constexpr float    LITTLE     = 1.0f / 16384; // of the weights so far: a piece with less has the mean for its values
static constexpr float    LEAD       = 8;            // by how much a logit may pass the largest before it: 2^16 is no half

//
// products
//

// asm that is volatile stays in its order: what is read for the next products is read before these

static __device__ uint4 read_words(const uint8_t * at) {
#ifdef __CUDA_ARCH__
    uint4 res;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(res.x), "=r"(res.y), "=r"(res.z), "=r"(res.w)
                 : "l"(at));
    return res;
#else
    return *(const uint4 *) at;
#endif
}

// four scales
static __device__ uint2 read_scales(const uint16_t * at) {
#ifdef __CUDA_ARCH__
    uint2 res;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(res.x), "=r"(res.y) : "l"(at));
    return res;
#else
    return *(const uint2 *) at;
#endif
}

// have some bytes come to the cache of the device, by a warp
static __device__ void fetch_early(const void * at, uint32_t size) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32 * 128; i < size; i += 32 * 128) {
#ifdef __CUDA_ARCH__
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *) at + i));
#endif
    }
}

// bytes, which are aligned. They are there after landed()
template <uint32_t SIZE> static __device__ void copy_piece(void * dst, const void * src) {
#ifndef __CUDACC__
    kvf_copy_later(dst, src, SIZE);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const uint32_t to = (uint32_t) __cvta_generic_to_shared(dst);
    if (SIZE == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(src) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(src), "n"(SIZE) : "memory");
    }
#else
#pragma unroll
    for (uint32_t i = 0; i < SIZE; i += 4) {
        *(uint32_t *) ((char *) dst + i) = *(const uint32_t *) ((const char *) src + i);
    }
#endif
}

static __device__ void copies_begun() {
#ifndef __CUDACC__
    kvf_copies_begun();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// all copies of a thread, but for those between the last N calls of copies_begun()
template <uint32_t N> static __device__ void landed() {
#ifndef __CUDACC__
    kvf_copied(N);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// products of bytes, 16 rows of 32 by 8 columns of 32, as lanes have them: rows g and g + 8, bytes 4*t and 16 + 4*t of each;
// column g likewise
static __device__ void multiply(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
#ifndef __CUDACC__
    kvf_multiply(d, a0, a1, a2, a3, b);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750 // kvf_attend_warps() lets no older device come here
    const auto quarter = [](int & x, int & y, uint32_t a, uint32_t b) {
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                : "+r"(x), "+r"(y)
                : "r"(a), "r"(b));
    };
    quarter(d[0], d[1], a0, b.x);
    quarter(d[0], d[1], a2, b.y);
    quarter(d[2], d[3], a1, b.x);
    quarter(d[2], d[3], a3, b.y);
#endif
}

// the same of halves, 16 rows of 16 by 8 columns of 16: rows g and g + 8, halves 2*t and 8 + 2*t of each, and those after
// them
static __device__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
#ifndef __CUDACC__
    kvf_multiply(d, a0, a1, a2, a3, b);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    const auto half_of_it = [&](uint32_t a, uint32_t b, uint32_t c) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a), "r"(b), "r"(c));
    };
    half_of_it(a0, a1, b.x);
    half_of_it(a2, a3, b.y);
#endif
}

// a matrix of 8 rows of 8 halves, turned: a lane has columns 2*t and 2*t + 1 of row g
static __device__ uint32_t turned(uint32_t its) {
#ifndef __CUDACC__
    return kvf_turned(its);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    uint32_t res;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(res) : "r"(its));
    return res;
#else
    return its;
#endif
}

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
