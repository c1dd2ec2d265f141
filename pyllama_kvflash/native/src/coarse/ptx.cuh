#pragma once

// instructions without a CUDA function: loads that the compiler does not reorder, asynchronous copies, and matrix products
// on tensor cores. Of a product's result, lane 4*g + t holds row g, columns 2*t and 2*t + 1. tests/native/cuda has the same
// functions for tests on the CPU

#include <stdint.h>

// the compiler keeps volatile asm in order, so the words of the next products are loaded before the current products

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

// prefetch some bytes into the L2 cache, by one warp
static __device__ void fetch_early(const void * at, uint32_t size) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32 * 128; i < size; i += 32 * 128) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *) at + i));
    }
}

// begin to copy SIZE bytes, aligned to SIZE, to shared memory. they have arrived after landed()
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

// close a group of copies
static __device__ void copies_begun() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// wait for this thread's copies, except for those in the last N groups
template <uint32_t N> static __device__ void landed() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// d += A*B for bytes: A has 16 rows of 32, B 8 columns of 32. A lane holds bytes 4*t to 4*t + 3, and 16 more, of rows g (a0,
// a2) and g + 8 (a1, a3), and of column g (b)
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

// d += A*B for halves: A has 16 rows of 16, B 8 columns of 16. A lane holds halves 2*t and 2*t + 1, and 8 more, of rows g
// (a0, a2) and g + 8 (a1, a3), and of column g (b)
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

// transpose a matrix of 8 rows of 8 halves, of which a lane holds columns 2*t and 2*t + 1 of row g
static __device__ uint32_t turned(uint32_t its) {
#if __CUDA_ARCH__ >= 750
    uint32_t res;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(res) : "r"(its));
    return res;
#else
    return its;
#endif
}
