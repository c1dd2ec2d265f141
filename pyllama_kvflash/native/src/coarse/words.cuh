#pragma once

// codes as a lane loads them, and their products with queries and with weights

#include "coarse/attend.cuh"

// the element whose sum is at a place of a query's sums. value_of() is for codes, value_near() for rows of the pool
// (attend_pool())
template <uint32_t N_BIT> static __device__ uint32_t value_of(uint32_t place) {
    const uint32_t group = place / AT_ONCE, i = place % AT_ONCE / 16, g = place % 8, upper = place % 16 / 8;
    return N_BIT == 4 ? (group * 8 + g) * 8 + upper * 4 + i
                      : (group / 2 * 8 + g) * 16 + (2 * (i % 2) + upper) * 4 + group % 2 * 2 + i / 2;
}

static __device__ uint32_t value_near(uint32_t place) {
    const uint32_t i = place / 16, row = place % 16;
    return i / 2 * 32 + row % 8 * 4 + i % 2 * 2 + row / 8;
}

// the sums of values of a warp, [16 elements][lane]: a lane holds elements g and g + 8 of 16, each for queries 2*t and 2*t +
// 1
static __device__ float4 * values_of(const attend_places & at, uint32_t warp) {
    return &shared<float4>(at.values) + warp * COLS / 4 * at.n_value;
}

// Sums of values by weights, AT_ONCE elements at a time. A lane loads words of eight positions: four, and four that are
// eight further on. The codes of two positions in the same place of their words become two halves of a product's rows: one
// code for rows g, the next one for rows g + 8. A code is put into the last bits of the half 1024. That half times unit() is
// the code plus 1024*unit(), so mean() is subtracted, which also has the middle of the levels. Few loops are unrolled,
// because a layer runs each instruction only a few times, and waits for each one that is not in the multiprocessor's cache
template <uint32_t N_BIT> struct value_sums {
    static constexpr uint32_t EACH = 4 / N_BIT; // groups that use the same words
    static constexpr uint32_t MASK = 0x00010001 * ((1 << N_BIT) - 1);

    const uint8_t * from; // the lane's next words
    uint32_t        size; // bytes of a unit
    uint32_t        ones; // two halves of 1024. as a constant, it would cost one more instruction
    uint4           next[2];

    // codes: of the first unit of the piece. words past a row may belong to another one, and are not used
    __device__ value_sums(const kvf_gpu_attend & a, const uint8_t * codes) :
        size(unit_bytes(a.coding[1])), ones(0x64006400 + threadIdx.y) { // threadIdx.y is 0
        const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        from = codes + t / 2 * size + g * UNIT * 4 + t % 2 * 16;
        read();
    }

    __device__ void read() {
        next[0] = read_words(from);
        next[1] = read_words(from + 32);
    }

    // bytes from the last of n pairs of a group to the first pair of the next group
    __device__ int32_t back(uint32_t group, uint32_t n) const {
        return ((group + 1) / EACH - group / EACH) * 8 * UNIT * 4 - (n - 1) * 2 * size;
    }

    // the operand of product i of four, from the halves of two words: its rows g, or with `upper` its rows g + 8
    __device__ uint32_t rows_in(const uint32_t (&x)[2], uint32_t i, uint32_t upper) const {
        const uint32_t its   = N_BIT == 4 ? x[i / 2] >> i % 2 * 8 : x[0] >> i / 2 * 8;
        const uint32_t place = N_BIT == 4 ? upper : i % 2 * 2 + upper;
        return (its & MASK << N_BIT * place) | ones;
    }
    // the factor for a code in these rows, since its bits are not the lowest
    static __device__ float unit(uint32_t i, uint32_t upper) {
        return 1.0f / (1 << N_BIT * (N_BIT == 4 ? upper : i % 2 * 2 + upper));
    }
    // the number to subtract from each code after that
    static __device__ float mean(uint32_t i, uint32_t upper) { return 1024 * unit(i, upper) + middle_of<N_BIT>(); }

    // add a pair of units, and begin to load the words that are `further` bytes ahead
    __device__ void add(uint32_t group, const uint4 & weights, int32_t further, float (&res)[4][4]) {
        const uint4 &  a = next[0], &b = next[1];
        const uint32_t from[4][2] = {{a.x, b.x}, {a.y, b.y}, {a.z, b.z}, {a.w, b.w}};
        uint32_t       x[4][2]; // codes for two products, each of 16 positions in two halves
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            x[i][0] = __byte_perm(from[i][0], from[i][1], N_BIT == 2 && group % 2 ? 0x7632 : 0x5410);
            x[i][1] = N_BIT == 2 ? 0 : __byte_perm(from[i][0], from[i][1], 0x7632);
        }
        this->from += further;
        read();
#pragma unroll
        for (uint32_t k = 0; k < 4; k += 2) {
            const uint2 by = k ? uint2{weights.z, weights.w} : uint2{weights.x, weights.y};
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                multiply(res[i], rows_in(x[k], i, 0), rows_in(x[k], i, 1), rows_in(x[k + 1], i, 0), rows_in(x[k + 1], i, 1), by);
            }
        }
    }
};

// the words of keys of a pair of units that a lane holds, for STEPS products
template <uint32_t N_BIT> struct key_words {
    uint4 w[N_BIT];

    __device__ void read(const uint8_t * from) {
#pragma unroll
        for (uint32_t i = 0; i < N_BIT; ++i) {
            read(from, i);
        }
    }

    __device__ void read(const uint8_t * from, uint32_t i) { w[i] = read_words(from + i * 4 * UNIT * 4); }

    // multiply with queries. each word is replaced by one from `next` when it is used up
    __device__ void add(const uint2 * queries, const uint8_t * next, int (&one)[4], int (&two)[4]) {
#pragma unroll
        for (uint32_t i = 0; i < STEPS; ++i) {
            const uint4    x   = w[i * N_BIT / 4];
            const uint2    b   = queries[i * 32];
            const uint32_t f   = N_BIT == 2 ? i % 2 * 2 : 0;
            const auto     its = [&](uint32_t word, uint32_t half) { return codes_in<N_BIT>(word, f + half); };
            multiply(one, its(x.x, 0), its(x.y, 0), its(x.x, 1), its(x.y, 1), b);
            multiply(two, its(x.z, 0), its(x.w, 0), its(x.z, 1), its(x.w, 1), b);
            if ((i + 1) * N_BIT % 4 == 0) { read(next, i * N_BIT / 4); }
        }
    }
};
