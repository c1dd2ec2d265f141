#pragma once

// CUDA as far as guests/fresh.cu uses it, on the CPU: the same source, compiled as C++ with this folder before ggml's own,
// is tested where there is no GPU. Each thread of a block is a fiber. All fibers are of one thread of the system: one runs
// until it waits for others. A block that waits for other blocks (__nanosleep) lets them run, and takes its shared memory
// along.

#define GGML_COMMON_DECL_CUDA
#define GGML_COMMON_IMPL_C
#include "ggml-common.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
    uint32_t x = 1, y = 1, z = 1;
    dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

struct alignas(8) uint2 {
    uint32_t x, y;
};

struct alignas(8) float2 {
    float x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

//
// fibers
//

inline dim3 gridDim, blockDim, blockIdx;

namespace fibers {

constexpr size_t SHARED = 64 << 10, STACK = 32 << 10;

struct copy {
    void *       dst;
    const void * src;
    size_t       size;
};

// one thread of a block after the other, for all launches
struct fiber {
    jmp_buf                 at; // where it goes on
    ucontext_t              context;
    std::unique_ptr<char[]> stack;
    bool                    began = false, done = false;

    std::vector<std::vector<copy>> copies{1}; // of cp.async: groups, the last one not committed
};

// threads that wait for each other
struct meeting {
    uint32_t n = 0, n_here = 0, round = 0;
};

struct warp {
    meeting  here;
    uint64_t values[2][32]; // of a shuffle and of the next one
    uint32_t words[2][32][6];
};

struct block {
    dim3                                at;
    uint32_t                            n = 0, now = 0, n_done = 0; // threads
    std::vector<std::unique_ptr<fiber>> threads;
    std::vector<warp>                   warps;
    meeting                             here;
    uint32_t                            n_counted[2]; // at this meeting and at the next one
    std::unique_ptr<char[]>             shared{new char[SHARED]};
};

inline std::function<void()>               kernel;
inline std::vector<std::unique_ptr<block>> blocks;
inline block *                             now = nullptr;
inline jmp_buf                             outside;

// what the kernel ahead has written: of a kernel that begins early, a block sees it after ggml_cuda_pdl_sync() (tests name it)
struct hidden {
    char *            at;
    std::vector<char> bytes;
};

inline std::vector<hidden> all_hidden;

inline void hide(void * at, size_t size) { all_hidden.push_back({(char *) at, {(char *) at, (char *) at + size}}); }
inline void show() {
    for (const auto & h : all_hidden) {
        memcpy(h.at, h.bytes.data(), h.bytes.size());
    }
}

inline dim3 thread() {
    const uint32_t i = now->now;
    return {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
}

[[noreturn]] inline void go_on(fiber & f) {
    if (f.began) { _longjmp(f.at, 1); }
    f.began = true;
    setcontext(&f.context);
    abort();
}

// another thread of the block goes on: the next one of n, from `first` on
inline void yield(uint32_t first, uint32_t n) {
    const uint32_t from = now->now;
    for (uint32_t i = 1; i < n; ++i) {
        const uint32_t to = first + (from - first + i) % n;
        if (now->threads[to]->done) { continue; }
        if (_setjmp(now->threads[from]->at) == 0) {
            now->now = to;
            go_on(*now->threads[to]);
        }
        return;
    }
    fprintf(stderr, "a thread of a block waits for others that have ended\n");
    abort();
}

inline void wait(meeting & m, uint32_t first, uint32_t n) {
    const uint32_t round = m.round;
    if (++m.n_here == m.n) {
        m.n_here = 0;
        m.round++;
    }
    while (m.round == round) {
        yield(first, n);
    }
}

// of a fiber: a thread of each launch
inline void run() {
    for (;;) {
        kernel();
        fiber & own = *now->threads[now->now];
        own.done    = true;
        if (_setjmp(own.at) != 0) { continue; }
        if (++now->n_done == now->n) { _longjmp(outside, 1); }
        do {
            now->now = (now->now + 1) % now->n;
        } while (now->threads[now->now]->done);
        go_on(*now->threads[now->now]);
    }
}

inline void begin(block & b) {
    b.n   = blockDim.x * blockDim.y * blockDim.z;
    b.now = b.n_done = 0;
    b.here           = {b.n};
    b.warps.assign((b.n + 31) / 32, {});
    for (uint32_t i = 0; i < b.n; ++i) {
        if (i == b.threads.size()) {
            b.threads.push_back(std::make_unique<fiber>());
            auto & f = *b.threads.back();
            f.stack.reset(new char[STACK]);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp   = f.stack.get();
            f.context.uc_stack.ss_size = STACK;
            makecontext(&f.context, run, 0);
        }
        b.threads[i]->done = false;
        GGML_ASSERT(b.threads[i]->copies.size() == 1 && b.threads[i]->copies[0].empty() && "copies that nobody waited for");
        b.warps[i / 32].here.n++;
    }
    memset(b.shared.get(), 0xa5, SHARED); // what a kernel did not write it must not read
    for (const auto & h : all_hidden) {
        memset(h.at, 0xfe, h.bytes.size());
    }
}

// until it waits for other blocks, or has ended
inline void resume(block & b, char * shared) {
    now      = &b;
    blockIdx = b.at;
    memcpy(shared, b.shared.get(), SHARED);
    if (_setjmp(outside) == 0) { go_on(*b.threads[b.now]); }
    memcpy(now->shared.get(), shared, SHARED);
}

// all blocks: one after the other, and those that wait for others by turns
inline void go(dim3 grid, dim3 size, char * shared, bool at_once, std::function<void()> what) {
    gridDim  = grid;
    blockDim = size;
    kernel   = std::move(what);

    size_t n_waiting = 0;
    for (uint32_t i = 0; i < grid.x * grid.y * grid.z; ++i) {
        if (n_waiting == blocks.size()) { blocks.push_back(std::make_unique<block>()); }
        auto & b = *blocks[n_waiting];
        b.at     = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        begin(b);
        resume(b, shared);
        n_waiting += b.n_done < b.n;
        GGML_ASSERT((at_once || !n_waiting) && "a block waits for others, which need not run yet");
    }
    while (n_waiting) {
        size_t n = 0;
        for (size_t i = 0; i < n_waiting; ++i) {
            resume(*blocks[i], shared);
            if (blocks[i]->n_done < blocks[i]->n) { std::swap(blocks[n++], blocks[i]); }
        }
        n_waiting = n;
    }
}

} // namespace fibers

#define threadIdx (fibers::thread())

inline void __syncthreads() { fibers::wait(fibers::now->here, 0, fibers::now->n); }

inline uint32_t __syncthreads_count(bool is) {
    auto &         own   = *fibers::now;
    const uint32_t round = own.here.round % 2;
    if (own.here.n_here == 0) { own.n_counted[round] = 0; }
    own.n_counted[round] += is;
    __syncthreads();
    return own.n_counted[round];
}

inline void __nanosleep(uint32_t) {
    auto & own = *fibers::now;
    if (_setjmp(own.threads[own.now]->at) == 0) { _longjmp(fibers::outside, 1); }
}

inline void __threadfence() {}

template <typename T> inline T kvf_shuffle(T x, uint32_t from) {
    auto &         own   = *fibers::now;
    auto &         w     = own.warps[own.now / 32];
    const uint32_t first = own.now / 32 * 32, round = w.here.round % 2;
    memcpy(&w.values[round][own.now % 32], &x, sizeof(x));
    fibers::wait(w.here, first, w.here.n);
    T res;
    memcpy(&res, &w.values[round][from], sizeof(res));
    return res;
}

inline void __syncwarp() { kvf_shuffle(0, 0); }

inline bool __any_sync(uint32_t, bool is) {
    bool res = false;
    for (uint32_t i = 0; i < 32; ++i) {
        res = kvf_shuffle(is, i) || res;
    }
    return res;
}

template <typename T> inline T __shfl_xor_sync(uint32_t, T x, int with) {
    return kvf_shuffle(x, fibers::now->now % 32 ^ with);
}

template <typename T> inline T __shfl_sync(uint32_t, T x, int lane, int width) {
    return kvf_shuffle(x, fibers::now->now % 32 / width * width + lane);
}

template <typename T> inline T __shfl_up_sync(uint32_t, T x, int by) {
    const int lane = fibers::now->now % 32;
    return kvf_shuffle(x, lane >= by ? lane - by : lane);
}

//
// arithmetic
//

using std::max;
using std::min;

inline float __half2float(half x) { return GGML_FP16_TO_FP32(x.bits); }
inline float __low2float(half2 x) { return __half2float(x.x); }
inline float __high2float(half2 x) { return __half2float(x.y); }
inline half2 __half2half2(half x) { return {x, x}; }
inline int   __float2int_rn(float x) { return (int) nearbyintf(x); }
inline half  __float2half_rn(float x) { return {GGML_FP32_TO_FP16(x)}; }
inline half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
inline half2 __hsub2(half2 a, half2 b) {
    return __floats2half2_rn(__low2float(a) - __low2float(b), __high2float(a) - __high2float(b));
}
inline half2 __hmul2(half2 a, half2 b) {
    return __floats2half2_rn(__low2float(a) * __low2float(b), __high2float(a) * __high2float(b));
}

// with the rounding of each operation
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }

template <typename T, typename F> inline T kvf_bits(F x) {
    T res;
    memcpy(&res, &x, sizeof(res));
    return res;
}

inline int      __float_as_int(float x) { return kvf_bits<int>(x); }
inline float    __uint_as_float(uint32_t x) { return kvf_bits<float>(x); }
inline float    __int_as_float(int x) { return kvf_bits<float>(x); }

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
    const uint64_t both = (uint64_t) y << 32 | x;
    uint32_t       res  = 0;
    for (uint32_t i = 0; i < 4; ++i) {
        res |= (uint32_t) (both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    }
    return res;
}

template <typename T, typename U> inline T atomicAdd(T * at, U x) { return std::exchange(*at, *at + (T) x); }
template <typename T> inline T             atomicOr(T * at, T x) { return std::exchange(*at, *at | x); }

//
// the runtime
//

typedef void * cudaStream_t;
typedef int    cudaError_t;

enum {
    cudaSuccess,
    cudaLaunchAttributeCooperative,
    cudaStreamNonBlocking,
    cudaEventDisableTiming,
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaDevAttrMaxSharedMemoryPerBlockOptin
};

struct cudaLaunchAttribute {
    int id;
    struct {
        int cooperative;
    } val;
};

struct cudaLaunchConfig_t {
    dim3                  gridDim, blockDim;
    size_t                dynamicSmemBytes;
    cudaStream_t          stream;
    cudaLaunchAttribute * attrs;
    unsigned              numAttrs;
};

#define CUDA_CHECK(x) GGML_ASSERT((x) == cudaSuccess)

inline uint4 kvf_shared[fibers::SHARED / sizeof(uint4)];

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t * config, void (*kernel)(P...), A &&... args) {
    GGML_ASSERT(config->dynamicSmemBytes <= fibers::SHARED);
    fibers::go(config->gridDim, config->blockDim, (char *) kvf_shared, config->numAttrs > 0, [&] { kernel(args...); });
    return cudaSuccess;
}

template <typename F> cudaError_t cudaFuncSetAttribute(F, int, size_t) { return cudaSuccess; }

struct ggml_cuda_kernel_launch_params {
    dim3         grid, block;
    size_t       memory;
    cudaStream_t stream;

    ggml_cuda_kernel_launch_params(dim3 grid, dim3 block, size_t memory, cudaStream_t stream) :
        grid(grid), block(block), memory(memory), stream(stream) {}
};

template <typename... P, typename... A>
void ggml_cuda_kernel_launch(void (*kernel)(P...), const ggml_cuda_kernel_launch_params & how, A &&... args) {
    const cudaLaunchConfig_t config = {how.grid, how.block, how.memory, how.stream, nullptr, 0};
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<A>(args)...));
    fibers::show();
    fibers::all_hidden.clear();
}

// a kernel is over before the next one begins
inline void ggml_cuda_pdl_sync() { fibers::show(); }
inline void ggml_cuda_pdl_lc() {}

struct cudaPointerAttributes {
    int device;
};

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes * res, const void *) {
    res->device = 0;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int * res, int, int) {
    *res = fibers::SHARED;
    return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void * dst, const void * src, size_t size, int, cudaStream_t) {
    memcpy(dst, src, size);
    return cudaSuccess;
}

inline cudaError_t cudaMemset2DAsync(void * dst, size_t stride, int value, size_t width, size_t n, cudaStream_t) {
    for (size_t i = 0; i < n; ++i) {
        memset((char *) dst + i * stride, value, width);
    }
    return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * res, int) {
    *res = res;
    return cudaSuccess;
}

// an event knows on which stream it was recorded: all that runs is over before the next call
struct kvf_event {
    cudaStream_t on = nullptr;
};
typedef kvf_event * cudaEvent_t;

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t * res, int) {
    *res = new kvf_event;
    return cudaSuccess;
}

inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->on = stream;
    return cudaSuccess;
}

// what waits is on another stream, and for something
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, int) {
    return event->on && event->on != stream ? cudaSuccess : cudaSuccess + 1;
}

inline cudaError_t cudaHostGetDevicePointer(void ** res, void * host, int) {
    *res = host;
    return cudaSuccess;
}

#define GGML_CUDA_MAX_DEVICES 1
#define GGML_CUDA_CC_TURING 750

using __half_raw = half;

struct kvf_devices {
    struct {
        int nsm = 4, cc = 900;
    } devices[1];
};

struct ggml_backend_cuda_context {
    int          device        = 0;
    cudaStream_t streams[1][2] = {{this, &curr_stream_no}};

    int curr_stream_no = 0;

    cudaStream_t stream() { return stream(device, curr_stream_no); }
    cudaStream_t stream(int on, int which) { return streams[on][which]; }
};

inline kvf_devices ggml_cuda_info() { return {}; }
inline void        ggml_cuda_set_device(int) {}
