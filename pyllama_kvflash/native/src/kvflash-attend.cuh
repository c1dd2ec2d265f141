#pragma once

// what attention by codes begins with: products of bytes on tensor cores, and queries as such bytes. Lane 4*g + t has what row g
// and columns 2*t, 2*t + 1 of a product have

#include "kvflash-choose.cuh"
#include "kvflash-coded.cuh"

static constexpr uint32_t COLS = kvf_gpu_attend::COLUMNS;      // queries of a product
static constexpr uint32_t PIECE = 8, N_POS = PIECE * UNIT;     // units and positions whose weights have one scale
static constexpr uint32_t PAIRS = PIECE / 2;                   // a product has two units
static constexpr uint32_t LINE = N_POS / 4 + 4;                // words from query to query: in other banks
static constexpr uint32_t LOGITS = PAIRS * 8 * 32;             // of a piece: eight of each lane for a pair of units
static constexpr uint32_t MOST_WARPS = AT / 32;                // of a block
static constexpr uint32_t AT_ONCE = 128, GAP = 4;              // values whose sums a warp has in registers
static constexpr uint32_t CELLS = 8;                           // of the pool that a warp takes at a time
static constexpr float    MIDDLE = 63.5f, MOST_BYTE = 127;
static constexpr float    LITTLE = 1.0f / 16384; // of the weights so far: a piece with less has the mean for its values

//
// products
//

// products of bytes, 16 rows of 32 by 8 columns of 32, as lanes have them: rows g and g + 8, bytes 4*t and 16 + 4*t of each;
// column g likewise
static __device__ void multiply(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
#ifndef __CUDACC__
    kvf_multiply(d, a0, a1, a2, a3, b);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750 // kvf_attend_warps() lets no older device come here
    const auto quarter = [](int & x, int & y, uint32_t a, uint32_t b) {
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};" : "+r"(x), "+r"(y) : "r"(a), "r"(b));
    };
    quarter(d[0], d[1], a0, b.x);
    quarter(d[0], d[1], a2, b.y);
    quarter(d[2], d[3], a1, b.x);
    quarter(d[2], d[3], a3, b.y);
#endif
}

// what a product's columns are: queries of one head of keys, of rows that belong to one sequence. share: columns of a row
struct attend_task {
    uint32_t head, first, share; // of its queries' heads, the first one; how many are in a row
    uint32_t row, from, end;     // the row of column 0; columns that count
    uint32_t part, n_part;
    uint32_t seq, n_unit, n_fill, n_common;

    __device__ uint32_t row_of(uint32_t column) const { return row + column / share; }
    __device__ uint32_t head_of(uint32_t column) const { return first + column % share; }
    __device__ bool     has(uint32_t column) const { return column >= from && column < end; }
};

struct attend_memory {
    float unit[COLS], middle[COLS], factor[COLS];
    float top[MOST_WARPS][COLS], sum[MOST_WARPS][COLS];
    float by[MOST_WARPS][2][COLS];
};

// where the queries' value e is, as they are: four lanes that read values 8 apart do so from other banks
static KVF_BOTH uint32_t plain_at(uint32_t e) { return (e + e / 8) * COLS; }

struct attend_places {
    uint32_t n_warp, n_value; // of a query's sums: from query to query
    size_t   words, rotated, weights, logits, values, rows, taken, end;

    KVF_BOTH attend_places(const kvf_gpu_attend & a, uint32_t n_warp) : n_warp(n_warp) {
        const auto & k = a.coding[0];
        n_value        = GGML_PAD(a.coding[1].width, AT_ONCE) + GAP;
        words          = GGML_PAD(sizeof(attend_memory), 16);
        rotated        = words + n_step(k) * 32 * sizeof(uint2);
        weights        = rotated + sizeof(float) * COLS * k.width;
        logits         = weights + n_warp * COLS * LINE * sizeof(uint32_t);
        values         = logits + n_warp * LOGITS * sizeof(float);
        // or the queries as they are, and rows, where the pool is attended to
        rows             = values + GGML_PAD(plain_at(k.d) * sizeof(float), 16);
        const size_t own = values + n_warp * COLS * n_value * sizeof(float), pool = rows + n_warp * CELLS * row_room(a);
        taken = own > pool ? own : pool;
        end   = taken + (a.p.ask.n_unit + 31) / 32 * sizeof(uint32_t);
    }

    // bytes of a head of a row of the pool, with those of the blocks that it shares with others
    static KVF_BOTH uint32_t row_room(const kvf_gpu_attend & a) {
        return GGML_PAD((a.p.d / a.block + 2) * a.block_size, 16) + 16;
    }

    // products of a position's key
    static KVF_BOTH uint32_t n_step(const kvf_gpu_coding & c) {
        return c.n_bit == 2 ? (c.width + 63) / 64 * 2 : (c.width + 31) / 32;
    }
};

// the column of values that a lane has in a step, and the word in which it is
template <uint32_t N_BIT> static __device__ uint32_t word_in(uint32_t step, uint32_t t) {
    return N_BIT == 2 ? step / 2 * 4 + t : step * 4 + t;
}
template <uint32_t N_BIT> static __device__ uint32_t column_in(uint32_t step, uint32_t t) {
    return N_BIT == 2 ? 2 * word_in<2>(step, t) + step % 2 : step * 4 + t;
}

static __device__ float query_of(const kvf_gpu_queries & q, uint32_t row, uint32_t head, uint32_t i) {
    return ((const float *) (q.data + row * q.row + head * q.head))[i];
}

static __device__ void plain_queries(const kvf_gpu_attend & a, const attend_task & task, const kvf_gpu_queries & q, float * to) {
    const uint32_t d = a.coding[0].d;
#pragma unroll 1
    for (uint32_t j = threadIdx.x / 32; j < COLS; j += blockDim.x / 32) {
#pragma unroll 4
        for (uint32_t e = threadIdx.x % 32; e < d; e += 32) {
            to[plain_at(e) + j] = task.has(j) ? query_of(q, task.row_of(j), task.head_of(j), e) : 0;
        }
    }
    __syncthreads();
}

// queries rotated, as bytes
template <uint32_t N_BIT>
static __device__ void prepare_queries(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task,
        const kvf_gpu_queries & q, attend_memory & m) {
    const auto &  c       = a.coding[0];
    float * const rotated = &shared<float>(at.rotated);
    const float * spread  = a.codes[0][task.seq].spread + task.head * c.d;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t j = warp; j < COLS; j += at.n_warp) {
#pragma unroll 4
        for (uint32_t e = lane; e < c.width; e += 32) {
            rotated[j * c.width + e] = task.has(j) && e < c.d ? query_of(q, task.row_of(j), task.head_of(j), e) : 0;
        }
    }
    if (c.n_rot) { hadamard(rotated, c.width, COLS, c.d / c.n_rot, c.n_rot); }
    __syncthreads();
#pragma unroll 1
    for (uint32_t e = threadIdx.x; e < c.d; e += blockDim.x) {
        const float factor = (c.divided ? spread[e] : 1) * sign_of(e);
        for (uint32_t j = 0; j < COLS; ++j) {
            rotated[j * c.width + e] *= factor;
        }
    }
    hadamard_blocks(rotated, c.d, c.width, COLS);

#pragma unroll 1
    for (uint32_t j = warp; j < COLS; j += at.n_warp) {
        const float * x       = rotated + j * c.width;
        float         largest = 0;
#pragma unroll 4
        for (uint32_t e = lane; e < c.width; e += 32) {
            largest = fmaxf(largest, fabsf(x[e]));
        }
        largest            = over_lanes(largest, most);
        const float factor = largest > 0 ? MOST_BYTE / largest : 0;
        float       sum    = 0;
#pragma unroll 4
        for (uint32_t e = lane; e < c.width; e += 32) {
            sum += rintf(x[e] * factor);
        }
        sum = over_lanes(sum, add<float>);
        if (lane == 0) { // logits are of base 2
            m.unit[j]   = largest / MOST_BYTE * (LOG2E * a.p.scale);
            m.middle[j] = MIDDLE * sum;
            m.factor[j] = factor;
        }
    }
    __syncthreads();
    uint32_t * const words = &shared<uint32_t>(at.words);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < at.n_step(c) * 32 * 2; i += blockDim.x) { // [step][query][t][2]
        const uint32_t half = i % 2, t = i / 2 % 4, j = i / 8 % COLS, column = column_in<N_BIT>(i / 64, t);
        uint32_t       word = 0;
#pragma unroll
        for (uint32_t b = 0; b < 4 && column < c.width / 8; ++b) {
            const float x = rotated[j * c.width + value_at<N_BIT>(column, half * 4 + b)] * m.factor[j];
            word |= (uint32_t) (__float2int_rn(x) & 255) << 8 * b;
        }
        words[i] = word;
    }
    __syncthreads();
}

// Products of the keys of four positions with two queries, in levels. codes: of the lane's unit and positions
template <uint32_t N_BIT>
static __device__ void key_products(const kvf_gpu_coding & c, const uint8_t * codes, const uint2 * words, int (&res)[4][2]) {
    const uint32_t n = attend_places::n_step(c), most = c.width * N_BIT / 32 - 1, t = threadIdx.x % 4;
    int            one[4] = {}, two[4] = {};
    uint4          w = {};
#pragma unroll 4
    for (uint32_t i = 0; i < n; ++i) {
        if (N_BIT == 4 || i % 2 == 0) { w = *(const uint4 *) (codes + min(word_in<N_BIT>(i, t), most) * UNIT * 4); }
        const uint32_t sub = N_BIT == 2 ? i % 2 : 0;
        const uint2    b   = words[i * 32 + threadIdx.x % 32];
        const auto     at  = [&](uint32_t x, uint32_t half) { return levels_of<N_BIT>(x, sub, half); };
        multiply(one, at(w.x, 0), at(w.y, 0), at(w.x, 1), at(w.y, 1), b);
        multiply(two, at(w.z, 0), at(w.w, 0), at(w.z, 1), at(w.w, 1), b);
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        res[0][j] = one[j];
        res[1][j] = one[2 + j];
        res[2][j] = two[j];
        res[3][j] = two[2 + j];
    }
}
