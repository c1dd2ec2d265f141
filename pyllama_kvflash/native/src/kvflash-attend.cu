// Attention by codes on a GPU, see kvflash-coarse.h and kvflash-codes.h: what the codes of all positions outside the pool give,
// in one softmax with the pool; and the choice of the pool's guests by it, for the next token. No word from the host.

#include "kvflash-attend.cuh"

// tokens: of the batch, the first one. grid: parts; queries of a token that share a head of keys, N_HEAD at a time; tokens
template <uint32_t BITS_K, uint32_t BITS_V>
static __global__ void __launch_bounds__(AT)
        kvf_attend(const __grid_constant__ kvf_gpu_attend a, const kvf_gpu_queries q, const int32_t * words, uint32_t tokens) {
    using A = kvf_gpu_ask;

    const auto &    p     = a.p;
    const uint32_t  row   = tokens + blockIdx.z;
    const int32_t * token = words + p.ask.size() + row * kvf_gpu_attend::LEN_TOKEN;
    const int32_t   seq   = token[kvf_gpu_attend::SEQ];
    if (seq < 0) { return; }

    const asked     ask   = {p, nullptr, words, false};
    const int32_t * its   = ask.blocks(seq) - A::LEN_SEQ;
    const uint32_t  share = p.n_head / p.n_head_kv, n_tile_of = (share + N_HEAD - 1) / N_HEAD;
    const uint32_t  head = blockIdx.y / n_tile_of, from = blockIdx.y % n_tile_of * N_HEAD;

    const attend_task task = {head, head * share + from, min(N_HEAD, share - from), row, blockIdx.x, gridDim.x,
            token[kvf_gpu_attend::POS], token[kvf_gpu_attend::ASKER], (uint32_t) seq, (uint32_t) its[A::N_UNIT],
            (uint32_t) its[A::N_FILL], (uint32_t) its[A::N_COMMON]};

    const attend_places at(a);
    auto &              m     = shared<attend_memory>();
    const uint32_t      n_far = kvf_gpu_attend::n_far(task.n_part), width = a.coding[1].width;
    for (uint32_t i = threadIdx.x; i < N_HEAD * width; i += AT) {
        shared<float>(at.values + i * sizeof(float)) = 0;
    }
    prepare_queries<BITS_K>(a, task, q, m);
    if (task.part < n_far) {
        uint32_t * const taken = &shared<uint32_t>(at.taken);
        for (uint32_t i = threadIdx.x; i < (task.n_unit + 31) / 32; i += AT) {
            taken[i] = ask.bits(seq)[i];
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < task.n_fill; i += AT) {
            const uint32_t u = p.index[seq].table[i];
            atomicOr(&taken[u / 32], 1u << u % 32);
        }
        __syncthreads();
#pragma unroll 1
        for (uint32_t piece = task.part; piece * WIDE < task.n_unit; piece += n_far) {
            attend_piece<BITS_K, BITS_V>(a, task, piece, m);
        }
    } else {
        attend_pool(a, ask, task, m);
    }
#pragma unroll 1
    for (uint32_t j = 0; j < task.n; ++j) {
        float * to = a.parts + (((uint64_t) blockIdx.z * p.n_head + task.first + j) * task.n_part + task.part) * (2 + width);
        for (uint32_t i = threadIdx.x; i < width; i += AT) {
            to[2 + i] = shared<float>(at.values + (j * width + i) * sizeof(float));
        }
        if (threadIdx.x > 0) { continue; }
        to[0] = m.top[j];
        to[1] = m.sum[j];
        if (a.chooses && task.asker >= 0) {
            const uint64_t part = ((uint64_t) task.asker * p.n_head + task.first + j) * KVF_GPU_PARTS + task.part;
            ((float2 *) p.parts)[part] = {m.top[j], m.sum[j]};
        }
    }
}

//
// mix
//

// grid: heads; tokens
static __global__ void __launch_bounds__(AT) kvf_mix(const __grid_constant__ kvf_gpu_attend a, const kvf_gpu_queries out,
        const float * sinks, const int32_t * words, uint32_t tokens, uint32_t n_part, uint32_t n_value) {
    const auto &   p = a.p;
    const auto &   c = a.coding[1];
    const uint32_t head = blockIdx.x, row = tokens + blockIdx.y, kv_head = head * p.n_head_kv / p.n_head, tid = threadIdx.x;
    const int32_t  seq = words[p.ask.size() + row * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::SEQ];
    if (seq < 0) { return; }

    const float *  parts = a.parts + ((uint64_t) blockIdx.y * p.n_head + head) * n_part * (2 + c.width);
    const uint32_t n_far = kvf_gpu_attend::n_far(n_part);
    const float    sink  = sinks ? LOG2E * sinks[head] : NOWHERE;

    float top = sink, far = 0, near = 0;
    for (uint32_t i = 0; i < n_part; ++i) {
        top = fmaxf(top, parts[i * (2 + c.width)]);
    }
    for (uint32_t i = 0; i < n_part; ++i) {
        const float * part = parts + i * (2 + c.width);
        (i < n_far ? far : near) += part[1] > 0 ? part[1] * exp2f(part[0] - top) : 0;
    }
    if (far <= 0) { return; } // the pool has all of it
    if (sinks) { near += exp2f(sink - top); }

    float * const x = &shared<float>();
#pragma unroll 1
    for (uint32_t e = tid; e < c.width; e += AT) {
        float sum = 0;
        for (uint32_t i = 0; i < n_far; ++i) {
            const float * part = parts + i * (2 + c.width);
            if (part[1] > 0) { sum += part[2 + e] * exp2f(part[0] - top); }
        }
        x[e] = sum / far;
    }
    hadamard_blocks(x, c.d, c.width, 1);
    const float * spread = a.codes[1][seq].spread + kv_head * c.d;
    for (uint32_t e = tid; e < c.d; e += AT) {
        x[e] *= sign_of(e) * (c.divided ? spread[e] : 1);
    }
    if (c.n_rot) { hadamard(x, c.width, 1, c.d / c.n_rot, c.n_rot); }
    __syncthreads();
    const float share = far / (far + near);
    float *     to    = (float *) (out.data + row * out.row + head * out.head);
    for (uint32_t e = tid; e < n_value; e += AT) {
        to[e] = (1 - share) * to[e] + share * x[e];
    }
}

//
// guests
//

static __global__ void KVF_BOUNDS(THREADS, 80)
        kvf_late(const __grid_constant__ kvf_gpu_layer p, const int32_t * all, uint32_t n_part) {
    const asked ask = {p, &shared<int32_t>(places(p).ask), all, false};
    ask.read(&shared<int32_t>(places(p).ask));
    __syncthreads();

    uint32_t       seq = 0;
    const uint32_t n   = n_choosing(p, ask, 0, seq);
    if (n == 0) { return; }
    meeting meet = {p, gridDim.x, 0};
    exchange(p, ask, n, n_part, false, meet);
}

// grid: layers, from the first one on; sequences
static __global__ void __launch_bounds__(THREADS) kvf_occupy(const kvf_gpu_layer * layers, const int32_t * all) {
    const kvf_gpu_layer & p   = layers[blockIdx.x];
    const uint32_t        seq = blockIdx.y;
    const asked           ask = {p, &shared<int32_t>(places(p).ask), all, false};
    ask.read(&shared<int32_t>(places(p).ask));
    __syncthreads();
    if (ask.seq(seq)[kvf_gpu_ask::N_FILL] <= 0) { return; }
    const uint32_t n_free = read_guests(p, ask, seq);
    if (n_free == 0) { return; }

    auto &           n     = work<uint32_t>(p);
    kvf_move * const moves = &work<kvf_move>(p, 16);
    if (threadIdx.x == 0) { // seldom, and few: the last units that are not there
        const uint32_t * taken  = &shared<uint32_t>(places(p).taken);
        const int32_t *  table  = &shared<int32_t>(places(p).table);
        uint32_t         u      = ask.seq(seq)[kvf_gpu_ask::N_UNIT];
        const uint32_t   n_fill = ask.seq(seq)[kvf_gpu_ask::N_FILL];
        n                       = 0;
        for (uint32_t slot = 0; slot < n_fill; ++slot) {
            if (table[slot] >= 0) { continue; }
            do {
                --u;
            } while (taken[u / 32] >> u % 32 & 1);
            moves[n++] = {slot, u};
        }
    }
    __syncthreads();
    for (uint32_t slot = threadIdx.x; slot < p.n_slot; slot += THREADS) {
        p.index[seq].table[slot] = shared<int32_t>(places(p).table + slot * sizeof(int32_t));
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        p.index[seq].table[moves[i].slot] = moves[i].unit;
    }
    if (threadIdx.x == 0) { atomicAdd((unsigned long long *) p.n_fetched, n); }
    fetch(p, seq, ask.blocks(seq), moves, n, threadIdx.x / 32, WARPS);
}

//
// the nodes
//

template <uint32_t BITS_K> static decltype(&kvf_attend<4, 4>) attend_of(uint32_t bits_v) {
    return bits_v == 4 ? kvf_attend<BITS_K, 4> : kvf_attend<BITS_K, 2>;
}

// what runs on the stream beside the backend's own, after what that has so far
static cudaStream_t forked(ggml_backend_cuda_context & ctx, const kvf_events & its) {
    const auto stream = ctx.stream(ctx.device, KVF_BESIDE);
    CUDA_CHECK(cudaEventRecord(its.forked, ctx.stream()));
    CUDA_CHECK(cudaStreamWaitEvent(stream, its.forked, 0));
    return stream;
}

static void attend(const kvf_gpu_attend & a, const ggml_tensor * q, const ggml_tensor * words, uint32_t first,
        uint32_t n_token, cudaStream_t stream) {
    const uint32_t share = a.p.n_head / a.p.n_head_kv;
    const dim3     grid(kvf_gpu_attend::n_part(q->ne[2]), a.p.n_head_kv * ((share + N_HEAD - 1) / N_HEAD), n_token);
    const auto     kernel = a.coding[0].n_bit == 4 ? attend_of<4>(a.coding[1].n_bit) : attend_of<2>(a.coding[1].n_bit);
    launch(kernel, grid, dim3(AT), attend_places(a).end, stream, false, a, queries(q), (const int32_t *) words->data, first);
}

// of many tokens a part at a time, by the next node
void kvf_attend_node(ggml_tensor * dst, void * on) {
    const auto &   a       = userdata<const kvf_gpu_attend>(dst);
    auto &         ctx     = *(ggml_backend_cuda_context *) on;
    const auto &   events  = *(const kvf_events *) a.events;
    const uint32_t n_token = dst->src[1]->ne[2];
    if (n_token > kvf_gpu_attend::MOST_TOKEN) { return; }

    const auto stream = a.beside ? forked(ctx, events) : ctx.stream();
    attend(a, dst->src[1], dst->src[2], 0, n_token, stream);
    if (a.beside) { CUDA_CHECK(cudaEventRecord(events.done, stream)); }
}

void kvf_mix_node(ggml_tensor * dst, void * on) {
    const auto &          a   = userdata<const kvf_gpu_attend>(dst);
    auto &                ctx = *(ggml_backend_cuda_context *) on;
    const uint32_t        n_token = dst->ne[a.by_head ? 1 : 2];
    const bool            many    = n_token > kvf_gpu_attend::MOST_TOKEN;
    const kvf_gpu_queries out = {(const char *) dst->data, dst->nb[a.by_head ? 2 : 1], dst->nb[a.by_head ? 1 : 2]};
    if (a.beside && !many) { CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), ((const kvf_events *) a.events)->done, 0)); }
    for (uint32_t first = 0; first < n_token; first += kvf_gpu_attend::MOST_TOKEN) {
        const uint32_t n = std::min(kvf_gpu_attend::MOST_TOKEN, n_token - first);
        if (many) { attend(a, dst->src[3], dst->src[2], first, n, ctx.stream()); }
        launch(kvf_mix, dim3(a.p.n_head, n), dim3(AT), sizeof(float) * a.coding[1].width, ctx.stream(), false, a, out,
                dst->src[4] ? (const float *) dst->src[4]->data : nullptr, (const int32_t *) dst->src[2]->data, first,
                kvf_gpu_attend::n_part(n_token), (uint32_t) dst->ne[0]);
    }
}

void kvf_late_node(ggml_tensor * dst, void * on) {
    const auto &   a       = userdata<const kvf_gpu_attend>(dst);
    auto &         ctx     = *(ggml_backend_cuda_context *) on;
    const uint32_t n_token = dst->src[1]->ne[a.by_head ? 1 : 2];
    // it ends before what the next layer has beside its attention, on the same stream
    const auto stream = a.late_beside ? forked(ctx, *(const kvf_events *) a.events) : ctx.stream();
    launch(kvf_late, dim3(ggml_cuda_info().devices[ctx.device].nsm), dim3(THREADS), shared_size(a.p), stream, true, a.p,
            (const int32_t *) dst->src[2]->data, kvf_gpu_attend::n_part(n_token));
}

void kvf_occupy_node(ggml_tensor * dst, void * on) {
    const auto & o   = userdata<const kvf_gpu_occupy>(dst);
    auto &       ctx = *(ggml_backend_cuda_context *) on;
    launch(kvf_occupy, dim3(o.n_layer, o.n_seq), dim3(THREADS), o.memory, ctx.stream(), false, o.layers,
            (const int32_t *) dst->src[1]->data);
}

bool kvf_attend_fits(const kvf_gpu_attend & a, const void * on) {
    return kvf_fits(a.p, on) && attend_places(a).end <= kvf_shared_most(on);
}
