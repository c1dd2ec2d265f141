// The node of kvflash-fresh.h on a GPU, a part of the backend's library: each layer scores all units by its queries, chooses
// and fetches, in one launch, with no word from the host. What changes between two tokens lies in the device's memory, so
// that a CUDA graph may hold the launch.

#include "kvflash-choose.cuh"

#include <cmath>

// The drift of the layer before, by one token more of each sequence, and what was missed. A block does a head; the last
// blocks do it, which have nothing else to do
static __device__ void learn_drift(const kvf_gpu_layer & p, const kvf_gpu_drift & its, const asked & ask,
        const kvf_gpu_queries & own, const kvf_gpu_queries & predicted) {
    float * const  off    = &work<float>(p); // [d]
    const uint32_t n_comp = p.form.n_comp, tid = threadIdx.x;
#pragma unroll 1
    for (uint32_t i = gridDim.x - 1 - blockIdx.x; i < ask.n_asker() * its.n_head; i += gridDim.x) {
        const int32_t * who  = ask.asker(i / its.n_head);
        const uint32_t  head = i % its.n_head, seq = who[kvf_gpu_ask::SEQ], row = who[kvf_gpu_ask::ROW];
        const int32_t   known = ask.seq(seq)[kvf_gpu_ask::N_DRIFT];
        const uint32_t  at = seq * its.n_head + head, kv_head = head * its.n_head_kv / its.n_head;
        const auto &    index = its.index[seq];
        __syncthreads();
#pragma unroll 1
        for (uint32_t e = tid; e < its.d; e += THREADS) {
            float &     drift = its.data[at * its.d + e];
            const float old   = known ? drift : 0;
            off[e]            = query(own, row, head, e) - query(predicted, row, head, e) - old;
            drift             = old + fmaxf(DRIFT_RATE, 1.0f / (known + 1)) * off[e];
        }
        __syncthreads();
        float sum = 0; // of squares, by the first warp
#pragma unroll 1
        for (uint32_t c = tid; c < n_comp && tid < 32; c += 32) {
            const float * basis = index.basis + (uint64_t) kv_head * its.d * n_comp + c;
            float         x     = 0;
#pragma unroll 8
            for (uint32_t e = 0; e < its.d; ++e) {
                x += off[e] * basis[e * n_comp];
            }
            x *= index.step[kv_head * n_comp + c] * middle(p.form, c) / reach(p.form, c); // the component's deviation
            sum += x * x;
        }
        if (tid < 32) { sum = over_lanes(sum, add<float>); }
        if (tid == 0) { its.missed[at] = known ? (known > 1 ? its.missed[at] : 0) + sqrtf(sum) : 0; }
    }
    __syncthreads();
}

// Its code is read from memory each time, since a layer's weights are as large as the cache of the device: it is kept short. A
// block leaves registers of its multiprocessor to the nodes beside it
template <uint32_t N_EACH, int TYPE>
static __global__ void KVF_BOUNDS(THREADS, 80) kvf_node(const __grid_constant__ kvf_gpu_layer p, const kvf_gpu_queries q,
        const int32_t * all, bool beside, const kvf_gpu_queries own_before, const kvf_gpu_queries before) {
    const asked ask = {p, &shared<int32_t>(places(p).ask), all, beside};
    ask.read(&shared<int32_t>(places(p).ask));
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < 4 * p.form.n_each; i += THREADS) {
        shared<kvf_gpu_word>(places(p).words + i * sizeof(kvf_gpu_word)) = p.words[i];
    }
    __syncthreads();

    if (before.data) { learn_drift(p, p.drift_before, ask, own_before, before); }

    uint32_t       seq    = 0;
    const uint32_t n      = n_choosing(p, ask, 0, seq);
    const uint32_t n_grid = ask.n_block();
    if (n == 0 || blockIdx.x >= n_grid) { return; }

    meeting meet = {p, n_grid, 0};
    score<N_EACH, TYPE>(p, ask, q);
    exchange(p, ask, n, n_split(ask), true, meet);
}

size_t kvf_shared_most(const void * on) {
    cudaPointerAttributes at;
    int                   most = 0;
    CUDA_CHECK(cudaPointerGetAttributes(&at, on));
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, at.device));
    return most;
}

size_t kvf_shared_size(const kvf_gpu_layer & l) { return shared_size(l); }

bool kvf_fits(const kvf_gpu_layer & l, const void * on) { return shared_size(l) <= kvf_shared_most(on); }

template <uint32_t N_EACH> static decltype(&kvf_node<0, -1>) node_of(int32_t type_k) {
    switch (type_k) {
        case GGML_TYPE_F16: return kvf_node<N_EACH, GGML_TYPE_F16>;
        case GGML_TYPE_Q8_0: return kvf_node<N_EACH, GGML_TYPE_Q8_0>;
    }
    return kvf_node<N_EACH, -1>;
}

// the layer is the node's userdata
void kvf_choose_node(ggml_tensor * dst, void * on) {
    const auto & p    = userdata<const kvf_gpu_layer>(dst);
    const auto   node = p.form.n_each == 4 && p.cap <= 0 ? node_of<4>(p.type_k) : node_of<0>(p.type_k); // 4: by default
    auto &       ctx  = *(ggml_backend_cuda_context *) on;
    launch(node, dim3(ggml_cuda_info().devices[ctx.device].nsm), dim3(THREADS), shared_size(p), ctx.stream(), true, p,
            queries(dst->src[1]), (const int32_t *) dst->src[2]->data, ctx.curr_stream_no == KVF_BESIDE, queries(dst->src[3]),
            queries(dst->src[4]));
}

void kvf_fork(ggml_tensor * dst, void * on) {
    auto & ctx = *(ggml_backend_cuda_context *) on;
    auto & its = userdata<kvf_events>(dst);
    CUDA_CHECK(cudaEventRecord(its.forked, ctx.stream()));
    ctx.curr_stream_no = KVF_BESIDE;
    CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), its.forked, 0));
}

void kvf_back(ggml_tensor * dst, void * on) {
    auto & ctx = *(ggml_backend_cuda_context *) on;
    CUDA_CHECK(cudaEventRecord(userdata<kvf_events>(dst).done, ctx.stream()));
    ctx.curr_stream_no = 0;
}

void kvf_join(ggml_tensor * dst, void * on) {
    auto & ctx = *(ggml_backend_cuda_context *) on;
    CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), userdata<kvf_events>(dst).done, 0));
}

static __global__ void kvf_fetch(const __grid_constant__ kvf_gpu_layer p, uint32_t seq, const int32_t * blocks) {
    const uint32_t n_each = blockDim.x / 32;
    fetch(p, seq, blocks, p.moves, *p.n_moves, threadIdx.x / 32 * gridDim.x + blockIdx.x, gridDim.x * n_each);
}

void kvf_fetch_units(const kvf_gpu_layer & l, uint32_t seq, const int32_t * blocks, cudaStream_t stream) {
    launch(kvf_fetch, dim3(64), dim3(256), 0, stream, false, l, seq, blocks);
}
