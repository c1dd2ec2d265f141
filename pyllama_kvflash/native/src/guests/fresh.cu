// The functions of kvf_gpu, which guests/gpu.cpp calls, in the library of the CUDA backend. Everything that changes between
// two tokens is in device memory, so that a CUDA graph can replay the launches of a layer.

#include "guests/choose.cuh"

#include <mutex>

cudaStream_t kvf_stream_on(const void * on) {
    static std::mutex   mutex;
    static cudaStream_t streams[GGML_CUDA_MAX_DEVICES];

    cudaPointerAttributes at;
    CUDA_CHECK(cudaPointerGetAttributes(&at, on));
    ggml_cuda_set_device(at.device);

    const std::lock_guard<std::mutex> lock(mutex);
    if (!streams[at.device]) { CUDA_CHECK(cudaStreamCreateWithFlags(&streams[at.device], cudaStreamNonBlocking)); }
    return streams[at.device];
}

size_t kvf_shared_most(const void * on) {
    cudaPointerAttributes at;
    int                   most = 0;
    CUDA_CHECK(cudaPointerGetAttributes(&at, on));
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, at.device));
    return most;
}

static __global__ void kvf_fetch(const __grid_constant__ kvf_gpu_layer p, uint32_t seq, const int32_t * blocks) {
    const uint32_t n_each = blockDim.x / 32;
    fetch(p, seq, blocks, p.moves, *p.n_moves, threadIdx.x / 32 * gridDim.x + blockIdx.x, gridDim.x * n_each);
}

static void upload(void * dst, const void * src, size_t size) {
    const auto stream = kvf_stream_on(dst);
    CUDA_CHECK(cudaMemcpyAsync(dst, src, size, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static void download(void * dst, const void * src, size_t size) {
    const auto stream = kvf_stream_on(src);
    CUDA_CHECK(cudaMemcpyAsync(dst, src, size, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static const char * pinned(const char * host) {
    void * res = nullptr;
    if (cudaHostGetDevicePointer(&res, (void *) host, 0) != cudaSuccess) {
        (void) cudaGetLastError();
        return nullptr;
    }
    return (const char *) res;
}

static void fill(void * dst, int value, size_t stride, size_t width, size_t n) {
    const auto stream = kvf_stream_on(dst);
    CUDA_CHECK(cudaMemset2DAsync(dst, stride, value, width, n, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static void fetch_units(const kvf_gpu_layer & l, uint32_t seq, const int32_t * blocks) {
    launch(kvf_fetch, dim3(64), dim3(256), 0, kvf_stream_on(l.moves), false, l, seq, blocks);
}

static bool fits(const kvf_gpu_layer & l, const void * on) { return shared_size(l) <= kvf_shared_most(on); }

static void * make_events(const void * on) {
    kvf_stream_on(on); // makes the device current
    auto * res = new kvf_events{};
    for (auto * event : {&res->forked, &res->done}) {
        CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    return res;
}

static void forget_events(void * events) {
    auto * its = (kvf_events *) events;
    CUDA_CHECK(cudaEventDestroy(its->forked));
    CUDA_CHECK(cudaEventDestroy(its->done));
    delete its;
}

static void wait(const void * on) { CUDA_CHECK(cudaStreamSynchronize(kvf_stream_on(on))); }

bool kvflash_launches(const ggml_tensor * node) {
    return ((const ggml_custom_op_params *) node->op_params)->n_tasks == kvf_gpu::LAUNCHES;
}

void kvflash_launch(ggml_tensor * node, void * on) {
    ((void (*)(ggml_tensor *, void *))((const ggml_custom_op_params *) node->op_params)->fun)(node, on);
}

const kvf_gpu * kvflash_gpu() {
    static const kvf_gpu res = {kvf_attend_node, kvf_mix_node, kvf_late_node, kvf_occupy_node, fits, kvf_attend_warps,
            shared_size, make_events, forget_events, upload, download, pinned, kvf_sum_rows_of, kvf_make_means_of, kvf_encode_rows_of,
            kvf_coder_memory, fill, fetch_units, wait};
    return &res;
}
