#pragma once

// codes of rows as they lie on a GPU (kvf_codes), and their rotation, by all threads of a block

#include "kvflash-kernels.cuh"

static constexpr uint32_t AT = 128, AT_WARPS = AT / 32;   // threads of a block
static constexpr uint32_t SEGMENT = 4096, CODE_TILE = 64; // as in kvf_codes

static KVF_BOTH uint32_t unit_bytes(const kvf_gpu_coding & c) { return c.width * UNIT * c.n_bit / 8; }

static __device__ uint64_t slot_of(const kvf_gpu_coding & c, uint32_t u, uint32_t head) {
    return ((uint64_t) (u / CODE_TILE) * c.n_head + head) * CODE_TILE + u % CODE_TILE;
}

static __device__ const float * mean_of(const kvf_gpu_coding & c, const kvf_gpu_codes & of, uint32_t u, uint32_t head) {
    return of.means + ((uint64_t) (u * UNIT / SEGMENT) * c.n_head + head) * c.width;
}

// Eight values of a position are a column: their codes are the nibbles of a word, or of 2 bits in half of them. A table
// of levels is looked up by bytes of two registers, which takes 3 bits of a code
template <uint32_t N_BIT> static __device__ void levels_of(uint32_t codes, uint32_t column, uint32_t (&res)[2]) {
    if (N_BIT == 2) {
        codes  = codes >> column % 2 * 2 & 0x33333333;
        res[0] = __byte_perm(0x7a512e05, 0, codes);
        res[1] = __byte_perm(0x7a512e05, 0, codes >> 16);
        return;
    }
    const uint32_t which = 0x32103210 | (codes & 0x88888888) >> 1;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t low  = __byte_perm(0x2720170a, 0x3d38332d, codes >> 16 * i);
        const uint32_t high = __byte_perm(0x524c4742, 0x75685f58, codes >> 16 * i);
        res[i]              = __byte_perm(low, high, which >> 16 * i);
    }
}

// which value of a row the i-th of a column is
template <uint32_t N_BIT> static __device__ uint32_t value_at(uint32_t column, uint32_t i) {
    return N_BIT == 2 ? column / 2 * 16 + column % 2 * 4 + i % 2 * 8 + i / 2 : column * 8 + i % 2 * 4 + i / 2;
}

template <uint32_t N_BIT> static __device__ uint32_t word_of(uint32_t column) { return N_BIT == 2 ? column / 2 : column; }

// a sign for each value, as in kvflash-codes.cpp
static __device__ float sign_of(uint32_t i) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull;
    x          = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x          = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (x ^ x >> 31) & 1 ? 1.0f : -1.0f;
}

// n blocks of `size` values, a power of two, by Hadamard's matrix, in rows `stride` apart
static __device__ void hadamard(float * x, uint32_t stride, uint32_t n_row, uint32_t n, uint32_t size) {
#pragma unroll 1
    for (uint32_t half = 1; half < size; half *= 2) {
        __syncthreads();
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < n_row * n * size / 2; i += AT) {
            const uint32_t row = i / (n * size / 2), pair = i % (n * size / 2);
            float *        at = x + row * stride + pair / half * 2 * half + pair % half;
            const float    a = at[0], b = at[half];
            at[0]    = a + b;
            at[half] = a - b;
        }
    }
    __syncthreads();
    const float norm = __fdiv_rn(1, __fsqrt_rn((float) size)); // as the CPU has it
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n_row * n * size; i += AT) {
        x[i / (n * size) * stride + i % (n * size)] *= norm;
    }
    __syncthreads();
}

// rows of d values, by blocks of powers of two
static __device__ void hadamard_blocks(float * x, uint32_t d, uint32_t stride, uint32_t n_row) {
#pragma unroll 1
    for (uint32_t at = 0, rest = d; rest;) {
        uint32_t size = 1;
        while (2 * size <= rest) {
            size *= 2;
        }
        hadamard(x + at, stride, n_row, 1, size);
        at += size;
        rest -= size;
    }
}
