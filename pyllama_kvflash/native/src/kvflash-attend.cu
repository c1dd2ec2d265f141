// Attention by codes on a GPU, see kvflash-coarse.h and kvflash-codes.h: what the codes of all positions outside the pool give,
// in one softmax with the pool; and the choice of the pool's guests by it, for the next token. No word from the host.

#include "kvflash-near.cuh"

// which units the pool has, by one block
static __device__ void read_taken(const kvf_gpu_layer & p, const asked & ask, const attend_task & task, uint32_t * taken) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < (task.n_unit + 31) / 32; i += blockDim.x) {
        taken[i] = ask.bits(task.seq)[i];
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < task.n_fill; i += blockDim.x) {
        const uint32_t u = p.index[task.seq].table[i];
        atomicOr(&taken[u / 32], 1u << u % 32);
    }
    __syncthreads();
}

// the sums of a block's warps become a part of each query
template <uint32_t BITS_V>
static __device__ void put_part(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, bool far,
        uint32_t tokens, const int32_t * words, attend_memory & m) {
    const auto &   p     = a.p;
    const uint32_t width = a.coding[1].width, n = task.end - task.from;
    // of each query, the share of each warp's sums
    for (uint32_t q = threadIdx.x; q < COLS; q += blockDim.x) {
        sum_of_powers all;
        for (uint32_t w = 0; w < at.n_warp; ++w) {
            all.add(m.top[w][q], m.sum[w][q]);
        }
        for (uint32_t w = 0; w < at.n_warp; ++w) {
            m.by[w][0][q] = exp2f(m.top[w][q] - all.top);
        }
        m.unit[q]   = all.top;
        m.middle[q] = all.sum;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t q = task.from + i, row = task.row_of(q), head = task.head_of(q);
        float *        to = a.parts + (((uint64_t) (row - tokens) * p.n_head + head) * task.n_part + task.part) * (2 + width);
        if (far && m.middle[q] > 0) {
            for (uint32_t e = threadIdx.x; e < width; e += blockDim.x) {
                const float * from = &shared<float>(at.values) + q * at.n_value + place_of<BITS_V>(e);
                float         sum  = 0;
#pragma unroll
                for (uint32_t w = 0; w < MOST_WARPS; ++w) {
                    if (w < at.n_warp) { sum += from[w * COLS * at.n_value] * m.by[w][0][q]; }
                }
                to[2 + e] = sum;
            }
        }
        if (threadIdx.x > 0) { continue; }
        to[0] = m.unit[q];
        to[1] = m.middle[q];
        const int32_t asker = words[row * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::ASKER];
        if (a.chooses && asker >= 0) {
            ((float2 *) p.parts)[((uint64_t) asker * p.n_head + head) * KVF_GPU_PARTS + task.part] = {m.unit[q], m.middle[q]};
        }
    }
}

// tokens: of the batch, from the first one on, n of them. grid: parts; queries of a row that share a head of keys, COLS at a
// time; rows, or as many as COLS has room for
template <uint32_t BITS_K, uint32_t BITS_V>
static __global__ void __launch_bounds__(AT, 4) kvf_attend(const __grid_constant__ kvf_gpu_attend a, const kvf_gpu_queries q,
        const int32_t * words, uint32_t tokens, uint32_t n) {
    using A = kvf_gpu_ask;

    const auto &        p      = a.p;
    const asked         ask    = {p, nullptr, words, false};
    const int32_t *     of_row = words + p.ask.size();
    const uint32_t      share = p.n_head / p.n_head_kv, n_tile_of = (share + COLS - 1) / COLS, warp = threadIdx.x / 32;
    const uint32_t      head = blockIdx.y / n_tile_of, first = blockIdx.y % n_tile_of * COLS;
    const uint32_t      n_head = min(COLS, share - first), n_row = a.n_row(), row = tokens + blockIdx.z * n_row;
    const attend_places at(a, blockDim.x / 32);
    auto &              m   = shared<attend_memory>();
    const bool          far = blockIdx.x < kvf_gpu_attend::n_far(gridDim.x);
    const auto          seq_of = [&](uint32_t i) {
        return row + i < tokens + n && i < n_row ? of_row[(row + i) * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::SEQ] : -1;
    };
#pragma unroll 1
    for (uint32_t i = 0; i < n_row;) { // rows of one sequence at a time
        const int32_t  seq  = seq_of(i);
        const uint32_t from = i;
        for (++i; i < n_row && seq_of(i) == seq;) {
            ++i;
        }
        if (seq < 0) { continue; }
        const int32_t *   its  = ask.blocks(seq) - A::LEN_SEQ;
        const attend_task task = {head, head * share + first, n_head, row, from * n_head, i * n_head, blockIdx.x, gridDim.x,
                (uint32_t) seq, (uint32_t) its[A::N_UNIT], (uint32_t) its[A::N_FILL], (uint32_t) its[A::N_COMMON]};

        far_sums sums;
        __syncthreads();
        if (far && blockIdx.x >= far_range::n_block(at, task)) {
            // nothing is left for it
        } else if (far) {
            const far_range range(at, task);
            range.begin(a, task);
            prepare_queries<BITS_K>(a, at, task, q, m);
            read_taken(p, ask, task, &shared<uint32_t>(at.taken));
            attend_far<BITS_K, BITS_V>(a, at, task, of_row, range, m, sums);
        } else {
            plain_queries(a, task, q, &shared<float>(at.values));
            attend_pool(a, at, ask, task, of_row, sums);
        }
        if (threadIdx.x % 32 < 4) {
            for (uint32_t j = 0; j < 2; ++j) {
                m.top[warp][2 * (threadIdx.x % 32) + j] = sums.top[j];
                m.sum[warp][2 * (threadIdx.x % 32) + j] = sums.sum[j];
            }
        }
        __syncthreads();
        put_part<BITS_V>(a, at, task, far, tokens, of_row, m);
    }
}

//
// mix
//

struct mix_memory {
    float    factors[kvf_gpu_attend::MOST_PART]; // 0: a part has nothing
    float    far, near;
    uint32_t n; // parts outside the pool, without those at the end that have nothing
};

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
    auto &         m     = shared<mix_memory>();
    float * const  x     = &shared<float>(GGML_PAD(sizeof(m), 16));
    if (tid < 32) { // a lane has two parts at most
        const float sink = sinks ? LOG2E * sinks[head] : NOWHERE;
        float       top = sink, far = 0, near = 0;
#pragma unroll 1
        for (uint32_t i = tid; i < n_part; i += 32) {
            top = fmaxf(top, parts[i * (2 + c.width)]);
        }
        top = over_lanes(top, most);
        uint32_t n = 0;
#pragma unroll 1
        for (uint32_t i = tid; i < n_part; i += 32) {
            const float2 part   = *(const float2 *) (parts + i * (2 + c.width));
            const float  factor = part.y > 0 ? exp2f(part.x - top) : 0;
            m.factors[i]        = factor;
            (i < n_far ? far : near) += part.y * factor;
            if (i < n_far && factor > 0) { n = i + 1; }
        }
        n = over_lanes(n, [](uint32_t a, uint32_t b) { return max(a, b); });
        far  = over_lanes(far, add<float>);
        near = over_lanes(near, add<float>) + (sinks ? exp2f(sink - top) : 0);
        if (tid == 0) {
            m.far  = far;
            m.near = near;
            m.n    = n;
        }
    }
    __syncthreads();
    const float far = m.far, near = m.near;
    if (far <= 0) { return; } // the pool has all of it

#pragma unroll 1
    for (uint32_t e = tid; e < c.width; e += AT) {
        float sum = 0;
#pragma unroll 8
        for (uint32_t i = 0; i < m.n; ++i) {
            if (m.factors[i] > 0) { sum += parts[i * (2 + c.width) + 2 + e] * m.factors[i]; }
        }
        x[e] = sum / far;
    }
    hadamard_blocks(x, c.d, c.width, 1);
    const float * spread = a.codes[1][seq].spread + kv_head * c.d;
#pragma unroll 1
    for (uint32_t e = tid; e < c.d; e += AT) {
        x[e] *= sign_of(e) * (c.divided ? spread[e] : 1);
    }
    if (c.n_rot) { hadamard(x, c.width, 1, c.d / c.n_rot, c.n_rot); }
    __syncthreads();
    const float share = far / (far + near);
    float *     to    = (float *) (out.data + row * out.row + head * out.head);
#pragma unroll 1
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
    const uint32_t share = a.p.n_head / a.p.n_head_kv, n_row = a.n_row();
    const dim3     grid(kvf_gpu_attend::n_part(q->ne[2]), a.p.n_head_kv * ((share + COLS - 1) / COLS), (n_token + n_row - 1) / n_row);
    const auto     kernel = a.coding[0].n_bit == 4 ? attend_of<4>(a.coding[1].n_bit) : attend_of<2>(a.coding[1].n_bit);
    launch(kernel, grid, dim3(32 * a.n_warp), attend_places(a, a.n_warp).end, stream, false, a, queries(q),
            (const int32_t *) words->data, first, n_token);
}

// beside the attention; of many tokens a part at a time, by the next node
void kvf_attend_node(ggml_tensor * dst, void * on) {
    const auto &   a       = userdata<const kvf_gpu_attend>(dst);
    auto &         ctx     = *(ggml_backend_cuda_context *) on;
    const auto &   events  = *(const kvf_events *) a.events;
    const uint32_t n_token = dst->src[1]->ne[2];
    if (n_token > kvf_gpu_attend::MOST_TOKEN) { return; }

    const auto stream = forked(ctx, events);
    attend(a, dst->src[1], dst->src[2], 0, n_token, stream);
    CUDA_CHECK(cudaEventRecord(events.done, stream));
}

void kvf_mix_node(ggml_tensor * dst, void * on) {
    const auto &          a   = userdata<const kvf_gpu_attend>(dst);
    auto &                ctx = *(ggml_backend_cuda_context *) on;
    const uint32_t        n_token = dst->ne[a.by_head ? 1 : 2];
    const bool            many    = n_token > kvf_gpu_attend::MOST_TOKEN;
    const kvf_gpu_queries out = {(const char *) dst->data, dst->nb[a.by_head ? 2 : 1], dst->nb[a.by_head ? 1 : 2]};
    if (!many) { CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), ((const kvf_events *) a.events)->done, 0)); }
    for (uint32_t first = 0; first < n_token; first += kvf_gpu_attend::MOST_TOKEN) {
        const uint32_t n = std::min(kvf_gpu_attend::MOST_TOKEN, n_token - first);
        if (many) { attend(a, dst->src[3], dst->src[2], first, n, ctx.stream()); }
        launch(kvf_mix, dim3(a.p.n_head, n), dim3(AT),
                GGML_PAD(sizeof(mix_memory), 16) + sizeof(float) * a.coding[1].width, ctx.stream(), false, a, out,
                dst->src[4] ? (const float *) dst->src[4]->data : nullptr, (const int32_t *) dst->src[2]->data, first,
                kvf_gpu_attend::n_part(n_token), (uint32_t) dst->ne[0]);
    }
}

void kvf_late_node(ggml_tensor * dst, void * on) {
    const auto &   a       = userdata<const kvf_gpu_attend>(dst);
    auto &         ctx     = *(ggml_backend_cuda_context *) on;
    const uint32_t n_token = dst->src[1]->ne[a.by_head ? 1 : 2];
    // it ends before what the next layer has beside its attention, on the same stream. fewer blocks hold the nodes beside it up
    // less
    const auto     stream = a.late_beside ? forked(ctx, *(const kvf_events *) a.events) : ctx.stream();
    const uint32_t n      = ggml_cuda_info().devices[ctx.device].nsm;
    launch(kvf_late, dim3(a.late_beside ? (n + 3) / 4 : n), dim3(THREADS), shared_size(a.p), stream, true, a.p,
            (const int32_t *) dst->src[2]->data, kvf_gpu_attend::n_part(n_token));
}

void kvf_occupy_node(ggml_tensor * dst, void * on) {
    const auto & o   = userdata<const kvf_gpu_occupy>(dst);
    auto &       ctx = *(ggml_backend_cuda_context *) on;
    launch(kvf_occupy, dim3(o.n_layer, o.n_seq), dim3(THREADS), o.memory, ctx.stream(), false, o.layers,
            (const int32_t *) dst->src[1]->data);
}

uint32_t kvf_attend_warps(const kvf_gpu_attend & a, const void * on) {
    cudaPointerAttributes at;
    CUDA_CHECK(cudaPointerGetAttributes(&at, on));
    if (ggml_cuda_info().devices[at.device].cc < GGML_CUDA_CC_TURING) { return 0; }

    uint32_t     res  = MOST_WARPS;
    const size_t most = kvf_shared_most(on);
    while (res > 0 && attend_places(a, res).end > most) {
        res /= 2;
    }
    return kvf_fits(a.p, on) ? res : 0;
}
