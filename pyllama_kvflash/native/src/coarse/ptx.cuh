#pragma once

// instructions that CUDA has no functions for: loads that stay in their order, copies that are waited for later, and products
// on tensor cores, of which lane 4*g + t has row g and columns 2*t, 2*t + 1. For tests on the CPU, tests/native/cuda has the
// same functions

#include <stdint.h>

// asm that is volatile stays in its order: what is read for the next products is read before these

static __device__ uint4 read_words(const uint8_t * at) {
    uint4 res;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(res.x), "=r"(res.y), "=r"(res.z), "=r"(res.w)
                 : "l"(at));
    return res;
}

// four scales
static __device__ uint2 read_scales(const uint16_t * at) {
    uint2 res;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(res.x), "=r"(res.y) : "l"(at));
    return res;
}

// have some bytes come to the cache of the device, by a warp
static __device__ void fetch_early(const void * at, uint32_t size) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32 * 128; i < size; i += 32 * 128) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *) at + i));
    }
}

// bytes, which are aligned. They are there after landed()
template <uint32_t SIZE> static __device__ void copy_piece(void * dst, const void * src) {
#if __CUDA_ARCH__ >= 800
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
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// all copies of a thread, but for those between the last N calls of copies_begun()
template <uint32_t N> static __device__ void landed() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// products of bytes, 16 rows of 32 by 8 columns of 32, as lanes have them: rows g and g + 8, bytes 4*t and 16 + 4*t of each;
// column g likewise
static __device__ void multiply(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
#elif __CUDA_ARCH__ >= 750 // kvf_attend_warps() lets no older device come here
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
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
#elif __CUDA_ARCH__ >= 750
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
#if __CUDA_ARCH__ >= 750
    uint32_t res;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(res) : "r"(its));
    return res;
#else
    return its;
#endif
}
