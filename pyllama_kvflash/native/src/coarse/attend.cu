// Attention by codes on a GPU, see coarse/coarse.h and coarse/codes.h: the codes of all positions outside the pool are in
// one softmax with the pool. This attention also chooses the guests for the next token, without the host.

#include "coarse/near.cuh"
#include "coarse/prepare.cuh"

// write the final sums of a warp to shared memory
static __device__ void keep_sums(const far_sums & its, attend_memory & m) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (uint32_t j = 0; j < 2 && lane < 4; ++j) {
        const uint32_t q      = 2 * lane + j;
        m.top[warp][q]        = its.top[j];
        m.sum[warp][q]        = its.sum[j];
        m.values_top[warp][q] = its.values_top[j];
        m.about[warp][q]      = its.about[j];
    }
    __syncthreads();
}

// combine the sums of the block's warps, write them to the parts, and find the factor of each warp's values. words: the
// words of tokens in the ask
static __device__ void sum_up(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, uint32_t tokens,
        const int32_t * words, attend_memory & m) {
    for (uint32_t i = threadIdx.x; i < COLS * at.n_warp; i += blockDim.x) {
        const uint32_t q = i % COLS, warp = i / COLS;
        float          top = NOWHERE, sum = 0, about = 0;
        for (uint32_t w = 0; w < at.n_warp; ++w) {
            top = fmaxf(top, m.top[w][q]);
        }
        m.by[warp][q] = exp2f(m.values_top[warp][q] - top);
        if (warp > 0) { continue; }
        for (uint32_t w = 0; w < at.n_warp; ++w) {
            const float factor = exp2f(m.top[w][q] - top);
            sum += m.sum[w][q] * factor;
            about += m.about[w][q] * factor;
        }
        m.all_about[q] = about;
        m.part[q]      = nullptr;
        if (!task.has(q)) { continue; }

        const uint32_t row = task.row_of(q), head = task.head_of(q);
        const uint64_t of_head = (uint64_t) (row - tokens) * a.p.n_head + head;
        const int32_t  asker   = words[row * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::ASKER];
        m.part[q]              = a.parts + (of_head * task.n_part + task.part) * a.part_size();
        *(float2 *) m.part[q]  = {top, sum};
        if (a.chooses && asker >= 0) {
            ((float2 *) a.p.parts)[((uint64_t) asker * a.p.n_head + head) * KVF_GPU_PARTS + task.part] = {top, sum};
        }
    }
    __syncthreads();
}

// add up the values of the block's warps, and write them to the parts. segment: its mean counts for the weights in
// all_about; ~0: there is none
template <uint32_t BITS_V>
static __device__ void put_values(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task,
        uint32_t segment, const attend_memory & m) {
    const auto &  c     = a.coding[1];
    const float * means = segment == ~0u ? nullptr : mean_of(c, m.codes[1], segment * (SEGMENT / UNIT), task.head);
#pragma unroll 1
    for (uint32_t k = threadIdx.x; k < at.n_value / 16 * 32; k += blockDim.x) {
        const uint32_t q = 2 * (k % 4), place = k / 32 * 16 + k % 32 / 4;
        if (!m.part[q] && !m.part[q + 1]) { continue; }
        const uint32_t e = value_of<BITS_V>(place), f = value_of<BITS_V>(place + 8);
        const float    x = means && e < c.width ? means[e] : 0, y = means && f < c.width ? means[f] : 0;
        const float    by[] = {m.all_about[q], m.all_about[q + 1]};
        float4         sum  = {x * by[0], x * by[1], y * by[0], y * by[1]};
#pragma unroll 4
        for (uint32_t w = 0; w < at.n_warp; ++w) {
            const float4 its    = values_of(at, w)[k];
            const float2 its_by = *(const float2 *) &m.by[w][q];
            sum = {sum.x + its.x * its_by.x, sum.y + its.y * its_by.y, sum.z + its.z * its_by.x, sum.w + its.w * its_by.y};
        }
        if (m.part[q]) {
            m.part[q][2 + place]  = sum.x;
            m.part[q][10 + place] = sum.z;
        }
        if (m.part[q + 1]) {
            m.part[q + 1][2 + place]  = sum.y;
            m.part[q + 1][10 + place] = sum.w;
        }
    }
}

// grid: passes, key heads, parts. Blocks of all passes read the same codes at about the same time, so these are in the L2
// cache. The parts of a multiprocessor are far from each other, so it works on codes and on the pool. The launch covers
// tokens [tokens, tokens + n) of the ubatch
template <uint32_t BITS_K, uint32_t BITS_V>
static __global__ void __launch_bounds__(AT, 4) kvf_attend(
        const __grid_constant__ kvf_gpu_attend a, const int32_t * words, uint32_t tokens, uint32_t n) {
    using A = kvf_gpu_ask;

    const asked         ask    = {a.p, nullptr, words};
    const int32_t *     of_row = words + a.p.ask.size();
    const attend_pass   pass(a, blockIdx.y, blockIdx.x, tokens, n);
    const prepared_pass prepared(a, pass, tokens);
    const attend_places at(a, blockDim.x / 32);
    auto &              m = shared<attend_memory>();
#pragma unroll 1
    for (uint32_t i = 0; i < pass.n_row;) { // rows of one sequence at a time
        const int32_t seq = pass.seq_of(of_row, i);
        attend_task   task(pass);
        task.from = pass.column_of(i);
        for (++i; i < pass.n_row && pass.seq_of(of_row, i) == seq;) {
            ++i;
        }
        if (seq < 0) { continue; }
        const int32_t * its = ask.blocks(seq) - A::LEN_SEQ;
        task.end            = pass.column_of(i);
        task.seq            = seq;
        task.part           = blockIdx.z;
        task.n_part         = gridDim.z;
        task.n_far          = a.n_far(its, gridDim.z);
        task.n_unit         = its[A::N_UNIT];
        task.n_fill         = its[A::N_FILL];
        task.n_common       = its[A::N_COMMON];
        const bool far      = task.part < task.n_far;

        far_sums sums;
        uint32_t segment = ~0u;
        __syncthreads();
        if (threadIdx.x < 2 && far) { m.codes[threadIdx.x] = a.codes[threadIdx.x][seq]; }
        for (uint32_t kind = threadIdx.x / 32; kind < 2 && !far; kind += at.n_warp) {
            describe_rows(a, at, task.head, kind, m.rows[kind]);
        }
        for (uint32_t k = threadIdx.x; (far || a.whole) && k < at.n_warp * COLS / 4 * at.n_value; k += blockDim.x) {
            values_of(at, 0)[k] = {};
        }
        __syncthreads();
        if (far) {
            const far_range range(at, task);
            segment = range.segment;
            attend_far<BITS_K, BITS_V>(a, at, task, of_row, range, prepared, m, sums);
        } else {
            attend_pool(a, at, ask, task, of_row, prepared, m, sums);
        }
        ggml_cuda_pdl_lc(); // blocks of kvf_mix may begin
        keep_sums(sums, m);
        sum_up(a, at, task, tokens, of_row, m);
        if (far || a.whole) { put_values<BITS_V>(a, at, task, segment, m); }
    }
    ggml_cuda_pdl_sync(); // even without work: a kernel that waits for this one relies on kvf_prepare having ended, too
}

//
// mix
//

static constexpr uint32_t MIX = 512; // threads

struct mix_places {
    uint32_t n_value, n_group; // groups of threads: each adds up some of the parts
    size_t   factors, values, near, sums, end;

    KVF_BOTH mix_places(const kvf_gpu_attend & a, uint32_t n_part) {
        n_value = a.n_value();
        n_group = n_value < MIX ? MIX / n_value : 1;
        factors = 16;
        values  = factors + GGML_PAD(n_part, 4) * sizeof(float); // in the order of elements
        near    = values + n_value * sizeof(float);
        sums    = near + n_value * sizeof(float); // [far, near][group][place]
        end     = sums + 2 * n_group * n_value * sizeof(float);
    }
};

// find the factor of each part, relative to the largest logit of all, and the total weights of codes and of the pool (x and
// y)
static __device__ void mix_factors(const kvf_gpu_attend & a, const float * parts, uint32_t n_part, uint32_t n_far,
        const float * sinks, uint32_t head, float * factors, float2 & total) {
    const uint32_t size = a.part_size();
    const float    sink = sinks ? LOG2E * sinks[head] : NOWHERE;
    float          top = sink, far = 0, near = 0;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < n_part; i += 32) {
        top = fmaxf(top, parts[i * size]);
    }
    top = over_lanes(top, most);
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < n_part; i += 32) {
        const float2 part   = *(const float2 *) (parts + i * size);
        const float  factor = part.y > 0 ? exp2f(part.x - top) : 0;
        factors[i]          = factor;
        (i < n_far ? far : near) += part.y * factor;
    }
    far  = over_lanes(far, add<float>);
    near = over_lanes(near, add<float>) + (sinks ? exp2f(sink - top) : 0);
    if (threadIdx.x == 0) { total = {far, near}; }
}

// the sums of one element in some of the parts. they are loaded before the factors are known
struct mix_read {
    static constexpr uint32_t MOST = 16;

    float x[MOST];

    __device__ mix_read(const float * parts, uint32_t size, uint32_t first, uint32_t each, uint32_t n) {
#pragma unroll
        for (uint32_t i = 0; i < MOST; ++i) {
            const uint32_t part = first + i * each;
            x[i]                = part < n ? parts[part * size] : 0;
        }
    }

    __device__ void add(
            const float * factors, uint32_t first, uint32_t each, uint32_t n, uint32_t n_far, float & far, float & near) {
#pragma unroll
        for (uint32_t i = 0; i < MOST; ++i) {
            const uint32_t part = first + i * each;
            const float    one  = part < n && factors[part] > 0 ? x[i] * factors[part] : 0; // others may be uninitialised
            (part < n_far ? far : near) += one;
        }
    }
};

// add up the sums of the groups, and put them into the order of elements
template <uint32_t BITS_V> static __device__ void mix_values(const mix_places & at, bool near) {
    const float * sums = &shared<float>(at.sums);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < at.n_value * (near ? 2 : 1); i += MIX) {
        const uint32_t kind = i / at.n_value, place = i % at.n_value;
        float          sum = 0;
#pragma unroll 4
        for (uint32_t g = 0; g < at.n_group; ++g) {
            sum += sums[(kind * at.n_group + g) * at.n_value + place];
        }
        (&shared<float>(kind ? at.near : at.values))[kind ? value_near(place) : value_of<BITS_V>(place)] = sum;
    }
    __syncthreads();
}

// extend the result of llama.cpp's attention to the positions outside the pool; with `whole`, write the entire result. grid:
// query heads, tokens
template <uint32_t BITS_V>
static __global__ void __launch_bounds__(MIX) kvf_mix(const __grid_constant__ kvf_gpu_attend a, const kvf_gpu_queries out,
        const float * sinks, const int32_t * words, uint32_t tokens, uint32_t n_part, uint32_t n_value) {
    const auto &   p    = a.p;
    const auto &   c    = a.coding[1];
    const uint32_t head = blockIdx.x, row = tokens + blockIdx.y, kv_head = head * p.n_head_kv / p.n_head, tid = threadIdx.x;
    const asked    ask = {p, nullptr, words};
    const int32_t  seq = words[p.ask.size() + row * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::SEQ];
    const mix_places at(a, n_part);
    if (seq < 0) { return ggml_cuda_pdl_sync(); }

    const float *  parts = a.parts + ((uint64_t) blockIdx.y * p.n_head + head) * n_part * a.part_size();
    const uint32_t n_far = a.n_far(ask.blocks(seq) - kvf_gpu_ask::LEN_SEQ, n_part), n = a.whole ? n_part : n_far;
    const uint32_t group = at.n_group > 1 ? tid / at.n_value : 0, each = at.n_group;
    const float *  factors_back = a.codes[1][seq].factors + kv_head * c.d;
    const float    back         = tid < c.d ? factors_back[tid] : 0; // does not depend on kernels that may still run
    float2 &       total   = shared<float2>();
    float * const  factors = &shared<float>(at.factors);
    float * const  sums    = &shared<float>(at.sums);
    ggml_cuda_pdl_sync();
    mix_read first(parts + 2 + tid % at.n_value, a.part_size(), group, each, group < each ? n : 0);
    if (tid < 32) { mix_factors(a, parts, n_part, n_far, sinks, head, factors, total); }
    __syncthreads();
    const float far = total.x, all = total.x + total.y;
    if (far <= 0 && !a.whole) { return; } // the codes have no weight

#pragma unroll 1
    for (uint32_t place = tid; group < each && place < each * at.n_value; place += MIX) {
        float sum[2] = {};
#pragma unroll 1
        for (uint32_t i = group; i < n; i += mix_read::MOST * each) {
            if (place >= MIX || i > group) { first = {parts + 2 + place % at.n_value, a.part_size(), i, each, n}; }
            first.add(factors, i, each, n, n_far, sum[0], sum[1]);
        }
        sums[place]                     = sum[0];
        sums[each * at.n_value + place] = sum[1];
    }
    __syncthreads();
    mix_values<BITS_V>(at, a.whole);
    float * const x = &shared<float>(at.values);
    if (tid < 32) { hadamard_powers(x, c.d); }
    __syncthreads();
#pragma unroll 1
    for (uint32_t e = tid; e < c.d; e += MIX) {
        x[e] *= e == tid ? back : factors_back[e];
    }
    if (c.n_rot) { hadamard(x, c.width, 1, c.d / c.n_rot, c.n_rot); }
    __syncthreads();
    float * to = (float *) (out.data + row * out.row + head * out.head);
#pragma unroll 1
    for (uint32_t e = tid; e < n_value; e += MIX) {
        const float near = a.whole ? (&shared<float>(at.near))[e] / all : to[e] * (total.y / all);
        to[e]            = far > 0 ? near + x[e] / all : near;
    }
}

//
// guests
//

static __global__ void KVF_BOUNDS(THREADS, 80)
        kvf_late(const __grid_constant__ kvf_gpu_layer p, const int32_t * all, uint32_t n_part) {
    const asked ask = {p, &shared<int32_t>(places(p).ask), all};
    ask.read(&shared<int32_t>(places(p).ask));
    __syncthreads();

    uint32_t       seq = 0;
    const uint32_t n   = n_choosing(p, ask, 0, seq);
    if (n == 0) { return; }
    meeting meet = {p, gridDim.x, 0};
    exchange(p, ask, n, n_part, meet);
}

// fill free slots. grid: layers, sequences
static __global__ void __launch_bounds__(THREADS) kvf_occupy(const kvf_gpu_layer * layers, const int32_t * all) {
    const kvf_gpu_layer & p   = layers[blockIdx.x];
    const uint32_t        seq = blockIdx.y;
    const asked           ask = {p, &shared<int32_t>(places(p).ask), all};
    ask.read(&shared<int32_t>(places(p).ask));
    __syncthreads();
    if (ask.seq(seq)[kvf_gpu_ask::N_FILL] <= 0) { return; }
    const uint32_t n_free = read_guests(p, ask, seq);
    if (n_free == 0) { return; }

    auto &           n     = work<uint32_t>(p);
    kvf_move * const moves = &work<kvf_move>(p, 16);
    if (threadIdx.x == 0) { // rarely needed, and for few slots: take the last units that the pool does not have
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
        p.guests[seq].table[slot] = shared<int32_t>(places(p).table + slot * sizeof(int32_t));
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        p.guests[seq].table[moves[i].slot] = moves[i].unit;
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

// return a second stream of the backend, which waits for the work submitted to the main one so far
static cudaStream_t forked(ggml_backend_cuda_context & ctx, const kvf_events & its) {
    const auto stream = ctx.stream(ctx.device, KVF_BESIDE);
    CUDA_CHECK(cudaEventRecord(its.forked, ctx.stream()));
    CUDA_CHECK(cudaStreamWaitEvent(stream, its.forked, 0));
    return stream;
}

static void attend(const kvf_gpu_attend & a, const ggml_tensor * q, const ggml_tensor * words, uint32_t first,
        uint32_t n_token, cudaStream_t stream) {
    const uint32_t n_pass = a.n_pass(n_token), n_head = a.p.n_head_kv;
    const auto *   its    = (const int32_t *) words->data;
    const size_t   memory = std::max(2 * COLS * a.coding[0].width * sizeof(float), a.n_word() * sizeof(uint32_t));
    launch(a.coding[0].n_bit == 4 ? kvf_prepare<4> : kvf_prepare<2>,
            dim3((a.n_segment() + SEGMENTS - 1) / SEGMENTS + 1, n_head, n_pass), dim3(PREPARE), memory, stream, false, a, queries(q),
            its, first, n_token);
    const auto kernel = a.coding[0].n_bit == 4 ? attend_of<4>(a.coding[1].n_bit) : attend_of<2>(a.coding[1].n_bit);
    launch_early(kernel, dim3(n_pass, n_head, a.n_part(q->ne[2])), dim3(32 * a.n_warp), attend_places(a, a.n_warp).end, stream, a,
            its, first, n_token);
}

// wait for the late choice of an earlier layer before this layer uses the main stream: both use the same scratch
static void wait_for_late(const kvf_gpu_attend & a, ggml_backend_cuda_context & ctx) {
    if (a.after) { CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), ((const kvf_events *) a.after)->done, 0)); }
}

// with `whole`, attend to everything; otherwise to the codes, beside llama.cpp's attention to the pool. for many tokens, the
// mix node does this in several launches
void kvf_attend_node(ggml_tensor * dst, void * on) {
    const auto &   a       = userdata<const kvf_gpu_attend>(dst);
    auto &         ctx     = *(ggml_backend_cuda_context *) on;
    const auto &   events  = *(const kvf_events *) a.events;
    const uint32_t n_token = dst->src[1]->ne[2];
    if (n_token > kvf_gpu_attend::MOST_TOKEN) { return; }

    if (a.whole) {
        wait_for_late(a, ctx);
        return attend(a, dst->src[1], dst->src[2], 0, n_token, ctx.stream());
    }
    const auto stream = forked(ctx, events);
    attend(a, dst->src[1], dst->src[2], 0, n_token, stream);
    CUDA_CHECK(cudaEventRecord(events.done, stream));
}

void kvf_mix_node(ggml_tensor * dst, void * on) {
    const auto &          a       = userdata<const kvf_gpu_attend>(dst);
    auto &                ctx     = *(ggml_backend_cuda_context *) on;
    const uint32_t        n_token = dst->ne[a.by_head ? 1 : 2], n_part = a.n_part(n_token);
    const bool            many   = n_token > kvf_gpu_attend::MOST_TOKEN;
    const kvf_gpu_queries out    = {(const char *) dst->data, dst->nb[a.by_head ? 2 : 1], dst->nb[a.by_head ? 1 : 2]};
    const auto            kernel = a.coding[1].n_bit == 4 ? kvf_mix<4> : kvf_mix<2>;
    const ggml_tensor *   words = dst->src[2], *q = dst->src[3], *sinks = dst->src[4];
    if (!many && !a.whole) { CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), ((const kvf_events *) a.events)->done, 0)); }
    if (many) { wait_for_late(a, ctx); }
    for (uint32_t first = 0; first < n_token; first += kvf_gpu_attend::MOST_TOKEN) {
        const uint32_t n = std::min(kvf_gpu_attend::MOST_TOKEN, n_token - first);
        if (many) { attend(a, q, words, first, n, ctx.stream()); }
        launch_early(kernel, dim3(a.p.n_head, n), dim3(MIX), mix_places(a, n_part).end, ctx.stream(), a, out,
                sinks ? (const float *) sinks->data : nullptr, (const int32_t *) words->data, first, n_part,
                (uint32_t) dst->ne[0]);
    }
}

void kvf_late_node(ggml_tensor * dst, void * on) {
    const auto &   a       = userdata<const kvf_gpu_attend>(dst);
    auto &         ctx     = *(ggml_backend_cuda_context *) on;
    const auto &   events  = *(const kvf_events *) a.events;
    const uint32_t n_token = dst->src[1]->ne[a.by_head ? 1 : 2];
    // beside other nodes it has time until the next layer's attention, and with fewer blocks it slows these nodes down less
    const auto     stream = a.late_beside ? forked(ctx, events) : ctx.stream();
    const uint32_t n      = ggml_cuda_info().devices[ctx.device].nsm;
    launch(kvf_late, dim3(a.late_beside ? (n + 7) / 8 : n), dim3(THREADS), shared_size(a.p), stream, true, a.p,
            (const int32_t *) dst->src[2]->data, a.n_part(n_token));
    if (a.late_beside) { CUDA_CHECK(cudaEventRecord(events.done, stream)); }
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
    return res;
}
