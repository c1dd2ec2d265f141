#pragma once

// what attention by codes begins with: products of bytes on tensor cores, and queries as such bytes. Lane 4*g + t has what
// row g and columns 2*t, 2*t + 1 of a product have

#include "kvflash-choose.cuh"
#include "kvflash-coded.cuh"

static constexpr uint32_t COLS  = kvf_gpu_attend::COLUMNS;      // queries of a product
static constexpr uint32_t PIECE = 8, N_POS = PIECE * UNIT;      // units and positions whose weights have one scale
static constexpr uint32_t PAIRS      = PIECE / 2;               // a product has two units
static constexpr uint32_t LINE       = N_POS / 4 + 4;           // words from query to query: in other banks
static constexpr uint32_t STEPS      = 4;                       // products of keys, of which the words are read together
static constexpr uint32_t LOGITS     = PAIRS * 8 * 32;          // of a piece: eight of each lane for a pair of units
static constexpr uint32_t MOST_WARPS = AT / 32;                 // of a block
static constexpr uint32_t AT_ONCE    = kvf_gpu_attend::AT_ONCE; // values whose sums a warp has in registers
static constexpr float    MIDDLE = 63.5f, MOST_BYTE = 127;
static constexpr float    LITTLE = 1.0f / 16384; // of the weights so far: a piece with less has the mean for its values

//
// products
//

// asm that is volatile stays in its order: what is read for the next products is read before these

static __device__ uint4 read_words(const uint8_t * at) {
#ifdef __CUDA_ARCH__
    uint4 res;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(res.x), "=r"(res.y), "=r"(res.z), "=r"(res.w) : "l"(at));
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

static __device__ uint32_t halves(float a, float b) {
    const half2 both = __floats2half2_rn(a, b);
    uint32_t    res;
    memcpy(&res, &both, sizeof(res));
    return res;
}

// what a product's columns are: queries of one head of keys, of rows that belong to one sequence. share: columns of a row
struct attend_task {
    uint32_t head, first, share; // of its queries' heads, the first one; how many are in a row
    uint32_t row, from, end;     // the row of column 0; columns that count
    uint32_t part, n_part, n_far;
    uint32_t seq, n_unit, n_fill, n_common;

    __device__ uint32_t row_of(uint32_t column) const { return row + column / share; }
    __device__ uint32_t head_of(uint32_t column) const { return first + column % share; }
    __device__ bool     has(uint32_t column) const { return column >= from && column < end; }
};

// of each warp, at its end: the largest logit, the sum of the weights, relative to what its sums of values are, and the sum
// of the weights whose values have the mean of a segment, too
struct attend_memory {
    float   unit[COLS];
    int32_t middle[COLS];
    float   top[MOST_WARPS][COLS], sum[MOST_WARPS][COLS], values_top[MOST_WARPS][COLS], about[MOST_WARPS][COLS];
    float   by[MOST_WARPS][COLS];
    float   all_top[COLS], all_sum[COLS], all_about[COLS];
    float * part[COLS]; // where it goes; null: a query does not count
};

struct attend_places {
    uint32_t n_warp, n_value, room[2]; // sums of a query; bytes from row to row of the pool: keys, values
    size_t   words, rotated, weights, values, rows, taken, end;

    KVF_BOTH attend_places(const kvf_gpu_attend & a, uint32_t n_warp) : n_warp(n_warp) {
        const auto & k = a.coding[0];
        n_value        = a.n_value();
        room[0]        = a.rows[0].room;
        room[1]        = a.p.v.n_run > 0 ? a.rows[1].room : 0;
        words          = GGML_PAD(sizeof(attend_memory), 16);
        rotated        = words + n_step(k) * 32 * sizeof(uint2); // or the queries as halves, where the pool is attended to
        weights        = rotated + sizeof(float) * COLS * GGML_PAD(k.width, 16);
        values         = weights + n_warp * COLS * LINE * sizeof(uint32_t);
        rows           = values + n_warp * COLS * n_value * sizeof(float); // or logits
        const size_t of_pool = UNIT * (room[0] + room[1]), of_far = LOGITS * sizeof(float);
        taken = rows + n_warp * (of_pool > of_far ? of_pool : of_far);
        end   = taken + (a.p.ask.n_unit + 31) / 32 * sizeof(uint32_t);
    }

    // products of a position's key, of which a lane has STEPS at once
    static KVF_BOTH uint32_t n_step(const kvf_gpu_coding & c) { return (c.width + 32 * STEPS - 1) / (32 * STEPS) * STEPS; }
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

// A query rotated, as bytes, by a warp. words: [step][query][t][2]. one that does not count is nothing
template <uint32_t N_BIT>
static __device__ void prepare_query(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task,
        const kvf_gpu_queries & q, uint32_t j, attend_memory & m) {
    const auto &   c      = a.coding[0];
    const float *  spread = a.codes[0][task.seq].spread + task.head * c.d;
    const uint32_t lane   = threadIdx.x % 32;
    float * const  x      = &shared<float>(at.rotated) + j * c.width;
    uint32_t *     words  = &shared<uint32_t>(at.words) + j * 8;
    if (!task.has(j)) {
#pragma unroll 1
        for (uint32_t i = lane; i < at.n_step(c) * 8; i += 32) {
            words[i / 8 * COLS * 8 + i % 8] = 0;
        }
        if (lane == 0) { m.unit[j] = m.middle[j] = 0; }
        return;
    }
#pragma unroll 2
    for (uint32_t e = lane; e < c.width; e += 32) {
        const float one = e < c.d ? query_of(q, task.row_of(j), task.head_of(j), e) : 0;
        x[e]            = c.n_rot || e >= c.d ? one : one * factor_of(c, spread, e);
    }
    if (c.n_rot) {
        hadamard_equal(x, c.d / c.n_rot, c.n_rot);
#pragma unroll 4
        for (uint32_t e = lane; e < c.d; e += 32) {
            x[e] *= factor_of(c, spread, e);
        }
    }
    hadamard_powers(x, c.d);

    __syncwarp();
    float largest = 0, sum = 0;
#pragma unroll 4
    for (uint32_t e = lane; e < c.width; e += 32) {
        largest = fmaxf(largest, fabsf(x[e]));
    }
    largest            = over_lanes(largest, most);
    const float factor = largest > 0 ? MOST_BYTE / largest : 0;
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = lane; i < at.n_step(c) * 8; i += 32) {
        const uint32_t half = i % 2, t = i / 2 % 4, column = column_in<N_BIT>(i / 8, t);
        uint32_t       word = 0;
#pragma unroll
        for (uint32_t b = 0; b < 4 && column < c.width / 8; ++b) {
            const int one = __float2int_rn(x[value_at<N_BIT>(column, half * 4 + b)] * factor);
            word |= (uint32_t) (one & 255) << 8 * b;
            sum += one;
        }
        words[i / 8 * COLS * 8 + i % 8] = word;
    }
    sum = over_lanes(sum, add<float>);
    if (lane == 0) { // logits are of base 2
        m.unit[j]   = largest / MOST_BYTE * (LOG2E * a.p.scale);
        m.middle[j] = __float2int_rn(MIDDLE * sum);
    }
}
