#pragma once

// the layout of codes on a GPU, which is that of kvf_codes, and the rotation of rows

#include "guests/kernels.cuh"

static constexpr uint32_t AT = 128, AT_WARPS = AT / 32;   // threads of a block
static constexpr uint32_t SEGMENT = 4096, CODE_TILE = 64; // as in kvf_codes

static KVF_BOTH uint32_t unit_bytes(const kvf_gpu_coding & c) { return c.width * UNIT * c.n_bit / 8; }

static __device__ uint64_t slot_of(const kvf_gpu_coding & c, uint32_t u, uint32_t head) {
    return ((uint64_t) (u / CODE_TILE) * c.n_head + head) * CODE_TILE + u % CODE_TILE;
}

static __device__ float * mean_of(const kvf_gpu_coding & c, const kvf_gpu_codes & of, uint32_t u, uint32_t head) {
    return of.means + ((uint64_t) (u * UNIT / SEGMENT) * c.n_head + head) * c.width;
}

// unpack the f-th code of each byte of a word: four codes as bytes
template <uint32_t N_BIT> static __device__ uint32_t codes_in(uint32_t word, uint32_t f) {
    return word >> N_BIT * f & 0x01010101u * ((1 << N_BIT) - 1);
}

template <uint32_t N_BIT> static __device__ constexpr float middle_of() { return (1 << (N_BIT - 1)) - 0.5f; }

static __device__ float half_of(uint32_t both, uint32_t i) {
    const __half_raw x = {(uint16_t) (both >> 16 * i)};
    return __half2float(x);
}

// multiply 32*N elements with a Hadamard matrix, by one warp. each lane has every 32nd element in registers: with all steps
// in shared memory, the warp would wait for it 14 times
template <uint32_t N> static __device__ void hadamard_lanes(float * x) {
    const uint32_t lane = threadIdx.x % 32;
    float          own[N];
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        own[i] = x[i * 32 + lane];
    }
#pragma unroll
    for (uint32_t half = 1; half < 32; half *= 2) {
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) {
            const float other = __shfl_xor_sync(~0u, own[i], half);
            own[i]            = lane & half ? other - own[i] : own[i] + other;
        }
    }
#pragma unroll
    for (uint32_t half = 1; half < N; half *= 2) {
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) {
            if (i & half) { continue; }
            const float a = own[i], b = own[i + half];
            own[i]        = a + b;
            own[i + half] = a - b;
        }
    }
    const float norm = __fdiv_rn(1, __fsqrt_rn(32.0f * N)); // rounded as on the CPU
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        x[i * 32 + lane] = own[i] * norm;
    }
}

// the same for any power of two
static __device__ __noinline__ void hadamard_row(float * x, uint32_t size) {
    switch (size) {
        case 32: return hadamard_lanes<1>(x);
        case 64: return hadamard_lanes<2>(x);
        case 128: return hadamard_lanes<4>(x);
        case 256: return hadamard_lanes<8>(x);
        case 512: return hadamard_lanes<16>(x);
    }
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t half = 1; half < size; half *= 2) {
        __syncwarp();
#pragma unroll 1
        for (uint32_t i = lane; i < size / 2; i += 32) {
            float *     at = x + 2 * i - (i & (half - 1));
            const float a = at[0], b = at[half];
            at[0]    = a + b;
            at[half] = a - b;
        }
    }
    __syncwarp();
    const float norm = __fdiv_rn(1, __fsqrt_rn((float) size));
#pragma unroll 1
    for (uint32_t i = lane; i < size; i += 32) {
        x[i] *= norm;
    }
}

// the same for n blocks of `size` elements, by one warp
static __device__ void hadamard_equal(float * x, uint32_t n, uint32_t size) {
#pragma unroll 1
    for (uint32_t i = 0; i < n; ++i) {
        hadamard_row(x + i * size, size);
    }
}

// the same for n_row rows, `stride` apart, by all threads of a block
static __device__ __noinline__ void hadamard(float * x, uint32_t stride, uint32_t n_row, uint32_t n, uint32_t size) {
    __syncthreads();
#pragma unroll 1
    for (uint32_t row = threadIdx.x / 32; row < n_row; row += blockDim.x / 32) {
        hadamard_equal(x + row * stride, n, size);
    }
    __syncthreads();
}

// rotate d elements, in blocks of powers of two, by one warp
static __device__ void hadamard_powers(float * x, uint32_t d) {
#pragma unroll 1
    while (d) {
        uint32_t size = 1;
        while (2 * size <= d) {
            size *= 2;
        }
        hadamard_row(x, size);
        x += size;
        d -= size;
    }
}

// the same for n_row rows, `stride` apart, by all threads of a block
static __device__ void hadamard_blocks(float * x, uint32_t d, uint32_t stride, uint32_t n_row) {
    __syncthreads();
#pragma unroll 1
    for (uint32_t row = threadIdx.x / 32; row < n_row; row += blockDim.x / 32) {
        hadamard_powers(x + row * stride, d);
    }
    __syncthreads();
}
