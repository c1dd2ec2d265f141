#pragma once

// shared by all kernels

#include "guests/gpu.h"

#include "ggml-cuda/common.cuh"

#include <utility>

static constexpr uint32_t UNIT = 16; // as in kvf_fresh

// limit the registers of a thread; for older compilers, only to those that a multiprocessor has for one block
#if CUDART_VERSION >= 12040
#define KVF_BOUNDS(n_thread, n_register) __maxnreg__(n_register)
#else
#define KVF_BOUNDS(n_thread, n_register) __launch_bounds__(n_thread)
#endif

// the shared memory of a block
extern __shared__ uint4 kvf_shared[];

template <typename T> static inline __device__ T & shared(size_t offset = 0) {
    return *(T *) ((char *) kvf_shared + offset);
}

// launch a kernel. at_once: cooperatively, so that all blocks run at the same time
template <typename... P, typename... A>
static void launch(
        void (*kernel)(P...), dim3 grid, dim3 block, size_t memory, cudaStream_t stream, bool at_once, A &&... args) {
    cudaLaunchAttribute at_all = {};
    at_all.id                  = cudaLaunchAttributeCooperative;
    at_all.val.cooperative     = 1;

    cudaLaunchConfig_t config = {};
    config.gridDim            = grid;
    config.blockDim           = block;
    config.dynamicSmemBytes   = memory;
    config.stream             = stream;
    config.attrs              = &at_all;
    config.numAttrs           = at_once ? 1 : 0;
    if (memory > 48 << 10) { CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory)); }
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<A>(args)...));
}

// launch a kernel whose blocks may begin before the kernel ahead has ended; they wait for its end by ggml_cuda_pdl_sync()
// (programmatic dependent launch)
template <typename... P, typename... A>
static void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, size_t memory, cudaStream_t stream, A &&... args) {
    if (memory > 48 << 10) { CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory)); }
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(grid, block, memory, stream), std::forward<A>(args)...);
}

//
// rows of all cache types
//

static inline __device__ float key_value(int32_t type, const char * row, uint32_t i) {
    const uint32_t b = i / 32, j = i % 32, low = j % 16, bits = j < 16 ? 0 : 4;
    switch (type) {
        case GGML_TYPE_F32: return ((const float *) row)[i];
        case GGML_TYPE_F16: return __half2float(((const half *) row)[i]);
        case GGML_TYPE_BF16: return __uint_as_float((uint32_t) ((const uint16_t *) row)[i] << 16);
        case GGML_TYPE_Q8_0: {
            const auto & x = ((const block_q8_0 *) row)[b];
            return __half2float(x.d) * x.qs[j];
        }
        case GGML_TYPE_Q4_0: {
            const auto & x = ((const block_q4_0 *) row)[b];
            return __half2float(x.d) * ((int) (x.qs[low] >> bits & 15) - 8);
        }
        case GGML_TYPE_Q4_1: {
            const auto & x = ((const block_q4_1 *) row)[b];
            return __low2float(x.dm) * (x.qs[low] >> bits & 15) + __high2float(x.dm);
        }
        case GGML_TYPE_Q5_0: {
            const auto & x  = ((const block_q5_0 *) row)[b];
            const int    hi = x.qh[j / 8] >> j % 8 & 1;
            return __half2float(x.d) * ((int) (x.qs[low] >> bits & 15) + 16 * hi - 16);
        }
        case GGML_TYPE_Q5_1: {
            const auto & x  = ((const block_q5_1 *) row)[b];
            const int    hi = x.qh[j / 8] >> j % 8 & 1;
            return __low2float(x.dm) * ((int) (x.qs[low] >> bits & 15) + 16 * hi) + __high2float(x.dm);
        }
        case GGML_TYPE_IQ4_NL: {
            const auto & x = ((const block_iq4_nl *) row)[b];
            return __half2float(x.d) * kvalues_iq4nl[x.qs[low] >> bits & 15];
        }
    }
    return 0;
}

// copy n bytes; n_thread threads share the work, and this is number `thread`
static inline __device__ void copy_bytes(char * dst, const char * src, uint64_t n, uint32_t thread, uint32_t n_thread) {
    const uint64_t all = (uint64_t) dst | (uint64_t) src | n;
    if (all % 16 == 0) {
#pragma unroll 4
        for (uint64_t i = thread; i < n / 16; i += n_thread) {
            ((uint4 *) dst)[i] = ((const uint4 *) src)[i];
        }
    } else if (all % 4 == 0) {
#pragma unroll 4
        for (uint64_t i = thread; i < n / 4; i += n_thread) {
            ((uint32_t *) dst)[i] = ((const uint32_t *) src)[i];
        }
    } else {
        for (uint64_t i = thread; i < n; i += n_thread) {
            dst[i] = src[i];
        }
    }
}

// the shared memory for a piece_of() a row, in bytes
static KVF_BOTH uint32_t piece_room(const kvf_gpu_type & its) {
    return GGML_PAD((its.d / its.block + 2) * its.block_size, 16);
}

template <typename T> static T & userdata(const ggml_tensor * dst) {
    return *(T *) ((const ggml_custom_op_params *) dst->op_params)->userdata;
}

static kvf_gpu_queries queries(const ggml_tensor * q) { // [d, n_head, n_tokens]
    return q ? kvf_gpu_queries{(const char *) q->data, q->nb[1], q->nb[2]} : kvf_gpu_queries{};
}

// the beginning and the end of a layer's work beside other nodes
struct kvf_events {
    cudaEvent_t forked, done;
};

static constexpr int KVF_BESIDE = 1; // the index of the backend's stream for such work

// guests/fresh.cu
size_t       kvf_shared_most(const void * on); // the most shared memory of a block, in bytes
cudaStream_t kvf_stream_on(const void * on);   // our stream on the device of this address, which becomes current

// coarse/attend.cu
void kvf_attend_node(ggml_tensor * dst, void * on);
void kvf_mix_node(ggml_tensor * dst, void * on);
void kvf_late_node(ggml_tensor * dst, void * on);
void kvf_occupy_node(ggml_tensor * dst, void * on);
uint32_t kvf_attend_warps(const kvf_gpu_attend & a, const void * on);

// coarse/encode.cu
void kvf_sum_rows_of(const kvf_gpu_coders & c, const kvf_gpu_chunks & from, const kvf_gpu_sampled & some, double * dst,
        uint32_t n_value);
void kvf_make_means_of(const kvf_gpu_coders & c, uint32_t seq, uint32_t segment, const double * sums, uint32_t n_value,
        uint32_t n);
void kvf_encode_rows_of(const kvf_gpu_coders & c, const kvf_gpu_chunks & from, uint32_t seq, uint32_t first);
size_t kvf_coder_memory(const kvf_gpu_coder & c);
