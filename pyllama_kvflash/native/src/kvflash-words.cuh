#pragma once

// codes as they come to a lane, for products with queries and with weights

#include "kvflash-attend.cuh"

// which value has its sum at a place among those of a query. value_near(): of values as they are, as attend_pool() has them
template <uint32_t N_BIT> static __device__ uint32_t value_of(uint32_t place) {
    const uint32_t first = place / AT_ONCE * AT_ONCE, i = place % AT_ONCE / 16, row = place % 16, in = row / 8 * 2 + i / 2;
    return N_BIT == 4 ? first + row % 8 * 8 + i % 2 * 4 + in
                      : first / (2 * AT_ONCE) * (2 * AT_ONCE) + row % 8 * 16 + first / AT_ONCE % 2 * 4 + i % 2 * 8 + in;
}

static __device__ uint32_t value_near(uint32_t place) {
    const uint32_t i = place / 16, row = place % 16;
    return i / 2 * 32 + row % 8 * 4 + i % 2 * 2 + row / 8;
}

// of a warp: the sums of a lane's values, [first value][i][lane]: rows g and g + 8 of 16, each of columns 2*t and 2*t + 1
static __device__ float4 * values_of(const attend_places & at, uint32_t warp) {
    return &shared<float4>(at.values) + warp * COLS / 4 * at.n_value;
}

// four bytes of each of four words, turned: the bytes that are in the same place
static __device__ void turn(const uint32_t (&w)[4], uint32_t (&res)[4]) {
    const uint32_t x = __byte_perm(w[0], w[1], 0x5140), y = __byte_perm(w[2], w[3], 0x5140);
    const uint32_t z = __byte_perm(w[0], w[1], 0x7362), v = __byte_perm(w[2], w[3], 0x7362);
    res[0] = __byte_perm(x, y, 0x5410);
    res[1] = __byte_perm(x, y, 0x7632);
    res[2] = __byte_perm(z, v, 0x5410);
    res[3] = __byte_perm(z, v, 0x7632);
}

// Sums of values by the weights' bytes, AT_ONCE of them after the others. A lane has a word of four positions of two units:
// rows g are values of its lower half, and rows g + 8 of its upper one. Few loops are unrolled: a layer
// runs each instruction a few times, and waits for every one that is not in the multiprocessor's cache
template <uint32_t N_BIT> struct value_sums {
    static constexpr uint32_t EACH = 4 / N_BIT; // times that the same words are taken

    const uint8_t * codes;   // the lane's
    uint32_t        size, n; // of a unit; pairs of units, each as often as it is taken
    uint4           next[2];

    // codes: of a piece's first unit. what is past a row may be another's
    __device__ value_sums(const kvf_gpu_attend & a, const uint8_t * codes) :
        codes(codes + threadIdx.x % 32 * 16), size(unit_bytes(a.coding[1])), n(a.n_value() / AT_ONCE * PAIRS) {
        read(0);
    }

    __device__ void read(uint32_t i) {
        const uint8_t * from = codes + i / (PAIRS * EACH) * 8 * UNIT * 4 + i % PAIRS * 2 * size;
        next[0]              = read_words(from);
        next[1]              = read_words(from + size);
    }

    // the i-th pair
    __device__ void add(const level_tables<N_BIT> & of, uint32_t i, const uint32_t * weights, int (&res)[4][4]) {
        const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, sub = i / PAIRS % EACH;
        const uint4    words[] = {next[0], next[1]};
        const uint2    b       = {weights[g * LINE + i % PAIRS * 8 + t], weights[g * LINE + i % PAIRS * 8 + 4 + t]};
        if (i + 1 < n) { read(i + 1); }
        uint32_t lv[2][2][4]; // [unit][half]
#pragma unroll
        for (uint32_t u = 0; u < 2; ++u) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint4 &  x      = words[u];
                const uint32_t four[] = {levels_of(of, x.x, sub, half), levels_of(of, x.y, sub, half),
                        levels_of(of, x.z, sub, half), levels_of(of, x.w, sub, half)};
                turn(four, lv[u][half]);
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
            multiply(res[j], lv[0][0][j], lv[0][1][j], lv[1][0][j], lv[1][1][j], b);
        }
    }
};

// words of keys of a pair of units, as a lane has them: of STEPS products
template <uint32_t N_BIT> struct key_words {
    uint4 w[N_BIT];
    uint2 scales;

    __device__ void read(const uint8_t * from, const uint16_t * its) {
        scales = read_scales(its);
#pragma unroll
        for (uint32_t i = 0; i < N_BIT; ++i) {
            w[i] = read_words(from + i * 4 * UNIT * 4);
        }
    }

    // with queries
    __device__ void add(const level_tables<N_BIT> & of, const uint2 * words, int (&one)[4], int (&two)[4]) const {
#pragma unroll
        for (uint32_t i = 0; i < STEPS; ++i) {
            const uint4 & x   = w[i * N_BIT / 4];
            const uint2   b   = words[i * 32];
            const auto    its = [&](uint32_t x, uint32_t half) { return levels_of(of, x, i % 2, half); };
            multiply(one, its(x.x, 0), its(x.y, 0), its(x.x, 1), its(x.y, 1), b);
            multiply(two, its(x.z, 0), its(x.w, 0), its(x.z, 1), its(x.w, 1), b);
        }
    }
};
