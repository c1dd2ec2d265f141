#pragma once

// attention to the positions outside the pool, by their codes: a warp takes pieces of them, and has sums of its own until
// the end

#include "kvflash-words.cuh"

// have some bytes come to the cache of the device, by a warp
static __device__ void fetch_early(const void * at, uint32_t size) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32 * 128; i < size; i += 32 * 128) {
#ifdef __CUDA_ARCH__
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *) at + i));
#endif
    }
}

static __device__ void fetch_early(const kvf_gpu_coding & c, const kvf_gpu_codes & of, uint32_t u, uint32_t head) {
    const uint64_t slot = slot_of(c, u, head);
    fetch_early(of.codes + slot * unit_bytes(c), PIECE * unit_bytes(c));
    fetch_early(of.scales + slot * UNIT, N_POS * sizeof(uint16_t));
}

// what a warp has so far
struct far_sums {
    float    top[2] = {NOWHERE, NOWHERE}, sum[2] = {}; // of the lane's queries
    float    values_top[2] = {NOWHERE, NOWHERE};       // relative to which the sums of values are
    float    about[2] = {}, base[2] = {};              // of a segment: weights, and products with its mean
    uint32_t segment = ~0u;
    bool     little  = false; // the weights of the last piece are
};

// the pieces of a warp
struct far_range {
    uint32_t first, last;
    uint32_t segment; // of the block's last one

    __device__ far_range(const attend_places & at, const attend_task & task) {
        const uint32_t n = task.n_far * at.n_warp, n_piece = (task.n_unit + PIECE - 1) / PIECE;
        const uint32_t i = task.part * at.n_warp + threadIdx.x / 32;
        first            = n_piece * i / n;
        last             = n_piece * (i + 1) / n;
        segment          = (n_piece * ((task.part + 1) * at.n_warp) / n - 1) * PIECE * UNIT / SEGMENT;
    }

    // what is needed soon
    __device__ void begin(const kvf_gpu_attend & a, const attend_task & task) const {
        if (first == last) { return; }
#pragma unroll 1
        for (uint32_t kind = 0; kind < 2; ++kind) {
            const auto & c  = a.coding[kind];
            const auto & of = a.codes[kind][task.seq];
            fetch_early(c, of, first * PIECE, task.head);
            fetch_early(mean_of(c, of, first * PIECE, task.head), c.width * sizeof(float));
        }
        fetch_early(a.codes[0][task.seq].spread + task.head * a.p.d, a.p.d * sizeof(float));
    }
};

static __device__ __noinline__ float capped(float x, float cap) { return cap * tanhf(x / cap); }

// over the lanes that have the same queries
template <typename T, typename F> static __device__ T over_rows(T x, const F & f) { return over_lanes(x, f, 4, 16); }

// the sums of values relative to the top, and with a segment's mean
template <uint32_t N_BIT>
static __device__ void add_mean(
        const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, far_sums & its) {
    const auto &   c    = a.coding[1];
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    if (its.segment == ~0u) { return; }
    float factor[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        factor[j]         = exp2f(its.values_top[j] - its.top[j]);
        its.values_top[j] = its.top[j];
    }
    const float *  mean   = mean_of(c, a.codes[1][task.seq], its.segment * (SEGMENT / UNIT), task.head);
    float4 * const values = values_of(at, threadIdx.x / 32) + lane;
#pragma unroll 2
    for (uint32_t i = 0; i < at.n_value / 16; ++i) {
        const uint32_t e = value_of<N_BIT>(i * 16 + g), f = value_of<N_BIT>(i * 16 + g + 8);
        const float    x = e < c.width ? mean[e] : 0, y = f < c.width ? mean[f] : 0;
        float4         all = values[i * 32];
        all.x              = all.x * factor[0] + its.about[0] * x;
        all.y              = all.y * factor[1] + its.about[1] * x;
        all.z              = all.z * factor[0] + its.about[0] * y;
        all.w              = all.w * factor[1] + its.about[1] * y;
        values[i * 32]     = all;
    }
    its.about[0] = its.about[1] = 0;
}

static __device__ void begin_segment(
        const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, uint32_t segment, far_sums & its) {
    const auto &   c    = a.coding[0];
    const float *  mean = mean_of(c, a.codes[0][task.seq], segment * (SEGMENT / UNIT), task.head);
    const uint32_t lane = threadIdx.x % 32;
    its.segment         = segment;
#pragma unroll 1
    for (uint32_t j = task.from; j < task.end; ++j) {
        const float * x    = &shared<float>(at.rotated) + j * c.width;
        float         base = 0;
#pragma unroll 4
        for (uint32_t e = lane; e < c.width; e += 32) {
            base += x[e] * mean[e];
        }
        base = over_lanes(base, add<float>) * (LOG2E * a.p.scale);
        if (lane % 4 == j / 2) { // registers are not indexed
            its.base[0] = j % 2 ? its.base[0] : base;
            its.base[1] = j % 2 ? base : its.base[1];
        }
    }
}

// Products of keys of a piece with queries, as logits, [pair][position][query][lane]: the lane's units are 2*pair + g/4, of
// which it has positions 4*(g%4) on. top: the largest of each query so far
template <uint32_t N_BIT>
static __device__ void piece_logits(const level_tables<N_BIT> & of, const kvf_gpu_attend & a, const attend_places & at,
        const attend_task & task, uint32_t u, const attend_memory & m, const far_sums & its, float * x, float (&top)[2]) {
    const auto &    c    = a.coding[0];
    const auto &    keys = a.codes[0][task.seq];
    const uint32_t  g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n_step = attend_places::n_step(c), size = unit_bytes(c);
    const uint64_t  slot = slot_of(c, u, task.head) + g / 4;
    const float     cap = LOG2E * a.p.cap, unit[] = {m.unit[2 * t], m.unit[2 * t + 1]};
    const int       from[] = {-m.middle[2 * t], -m.middle[2 * t + 1]};
    const auto *    scales = keys.scales + slot * UNIT + g % 4 * 4;
    const uint8_t * codes = keys.codes + slot * size + g % 4 * 16 + t * UNIT * 4; // words past a row meet queries of nothing
    const uint2 *   queries = &shared<uint2>(at.words) + threadIdx.x % 32;
    uint32_t        step    = 0;
    int             one[4] = {from[0], from[1], from[0], from[1]}, two[4] = {from[0], from[1], from[0], from[1]};
    // the next words: of the same pair of units, or of the next one
    const auto go_on = [&] {
        const bool same = step + STEPS < n_step;
        codes += same ? STEPS * N_BIT * UNIT * 4 : 2 * size - (n_step - STEPS) * N_BIT * UNIT * 4;
        scales += same ? 0 : 2 * UNIT;
    };
    const auto add = [&](const key_words<N_BIT> & words) {
        words.add(of, queries + step * 32, one, two);
        step += STEPS;
        if (step < n_step) { return; }

        step = 0;
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
            const int products[] = {one[j], one[2 + j], two[j], two[2 + j]};
            float     y[4];
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                y[e] = products[e] * (half_of(e < 2 ? words.scales.x : words.scales.y, e % 2) * unit[j]) + its.base[j];
                one[2 * (e / 2) + j] = two[2 * (e / 2) + j] = from[j];
            }
            if (u + g / 4 >= task.n_unit) {
#pragma unroll
                for (uint32_t e = 0; e < 4; ++e) {
                    y[e] = NOWHERE;
                }
            }
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                x[(2 * e + j) * 32] = y[e];
                top[j]              = fmaxf(top[j], y[e]);
            }
        }
        u += 2;
        x += 8 * 32;
    };
    key_words<N_BIT> next;
    next.read(codes, scales);
#pragma unroll 1
    for (uint32_t i = PAIRS * (n_step / STEPS); i > 0; --i) {
        const key_words<N_BIT> words = next;
        go_on();
        if (i > 1) { next.read(codes, scales); }
        add(words);
    }
    if (cap <= 0) { return; }
    top[0] = its.top[0];
    top[1] = its.top[1];
#pragma unroll 1
    for (uint32_t i = 0; i < LOGITS / 32; ++i) {
        float & y = *(x -= 32);
        if (y > NOWHERE) { y = capped(y, cap); }
        top[0] = i % 2 ? fmaxf(top[0], y) : top[0]; // the last one is of the second query
        top[1] = i % 2 ? top[1] : fmaxf(top[1], y);
    }
}

// of values, of the lane's positions in a pair of units
struct value_scales {
    const uint16_t * at;
    uint2            next;

    __device__ value_scales(const kvf_gpu_attend & a, const attend_task & task, uint32_t u) {
        const uint32_t g = threadIdx.x % 32 / 4;
        at               = a.codes[1][task.seq].scales + (slot_of(a.coding[1], u, task.head) + g / 4) * UNIT + g % 4 * 4;
        read();
    }

    __device__ void read() {
        next = read_scales(at);
        at += 2 * UNIT;
    }
};

// Logits become weights times the scales of values; of units in the pool none. shares: where those of the lane's queries go,
// by unit. largest: weight of each query; sum: of those outside the pool
static __device__ void piece_weights(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task,
        uint32_t u, const float (&top)[2], float * const (&shares)[2], value_scales scales, float * x, float (&sum)[2],
        float (&largest)[2]) {
    const uint32_t g      = threadIdx.x % 32 / 4;
    uint32_t       taken  = shared<uint32_t>(at.taken + u / 32 * sizeof(uint32_t)) >> (u % 32 + g / 4);
    const bool     second = threadIdx.x & 8; // lanes 4 and 8 further on have the same unit: two for each query
    float * const  share  = second ? shares[1] : shares[0];
    const auto     add    = [&](const uint2 & of) {
        const bool  open    = !(taken & 1);
        const uint2 its     = {open ? of.x : 0, open ? of.y : 0};
        float       unit[2] = {};
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                float &     to     = x[(2 * e + j) * 32];
                const float weight = exp2f(to - top[j]); // there is a position: the top is one's
                unit[j] += weight;
                to         = weight * half_of(e < 2 ? its.x : its.y, e % 2);
                largest[j] = fmaxf(largest[j], to);
            }
            sum[j] += open ? unit[j] : 0;
        }
        if (a.chooses) {
            float one = (second ? unit[1] : unit[0]) + __shfl_xor_sync(~0u, second ? unit[0] : unit[1], 8);
            one += __shfl_xor_sync(~0u, one, 4);
            if (share && g % 2 == 0 && u + g / 4 < task.n_unit) {
                share[u + g / 4] = one > 0 ? (second ? top[1] : top[0]) + log2f(one) : NOWHERE;
            }
        }
        u += 2;
        taken >>= 2;
        x += 8 * 32;
    };
#pragma unroll 1
    for (uint32_t i = 1; i <= PAIRS; ++i) {
        const uint2 its = scales.next;
        if (i < PAIRS) { scales.read(); }
        add(its);
    }
}

// weights as bytes, [query][position]. returns the sums of these, of the lane's queries
static __device__ void piece_bytes(const float * x, const float (&largest)[2], uint32_t * weights, int (&sums)[2]) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float          to[2]; // with 1.5*2^23 added, the last byte of a number is what it was, rounded
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        to[j]   = largest[j] > 0 ? MOST_BYTE / largest[j] : 0;
        sums[j] = 0;
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = 0; i < PAIRS; ++i, x += 8 * 32) {
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
            uint32_t byte[4];
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                byte[e] = __float_as_uint(x[(2 * e + j) * 32] * to[j] + 12582912.0f);
            }
            const uint32_t word =
                    __byte_perm(__byte_perm(byte[0], byte[1], 0x0040), __byte_perm(byte[2], byte[3], 0x0040), 0x5410);
            weights[(2 * t + j) * LINE + i * 8 + g] = word;
            sums[j]                                 = __dp4a((int) word, 0x01010101, sums[j]);
        }
    }
    __syncwarp();
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        sums[j] = over_rows(sums[j], add<int>);
    }
}

// a piece of the positions outside the pool
template <uint32_t BITS_K, uint32_t BITS_V>
static __device__ void attend_piece(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, uint32_t u,
        float * const (&shares)[2], const attend_memory & m, const level_tables<BITS_K> & of_k,
        const level_tables<BITS_V> & of_v, far_sums & its) {
    const auto &       v    = a.coding[1];
    const uint32_t     warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t * const   weights = &shared<uint32_t>(at.weights) + warp * COLS * LINE;
    float * const      x       = &shared<float>(at.rows) + warp * LOGITS + lane;
    float              top[2] = {its.top[0], its.top[1]}, sum[2] = {}, largest[2] = {}, factor[2], scale[2];
    int                bytes[2];
    const value_scales of_values(a, task, u);
    piece_logits(of_k, a, at, task, u, m, its, x, top);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        top[j]    = over_rows(top[j], most);
        factor[j] = exp2f(its.top[j] - top[j]);
    }
    piece_weights(a, at, task, u, top, shares, of_values, x, sum, largest);
    bool little = true;
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        sum[j]       = over_rows(sum[j], add<float>);
        largest[j]   = over_rows(largest[j], most);
        its.sum[j]   = its.sum[j] * factor[j];
        its.about[j] = its.about[j] * factor[j] + sum[j];
        its.top[j]   = top[j];
        little       = little && (!task.has(2 * (lane % 4) + j) || sum[j] <= LITTLE * its.sum[j]);
        its.sum[j] += sum[j];
    }
    its.little = !__any_sync(~0u, !little);
    if (its.little) { return; }

    value_sums<BITS_V> all(a, a.codes[1][task.seq].codes + slot_of(v, u, task.head) * unit_bytes(v));
    piece_bytes(x, largest, weights, bytes);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        scale[j]          = largest[j] / MOST_BYTE;
        factor[j]         = exp2f(its.values_top[j] - top[j]);
        bytes[j]          = -__float2int_rn(MIDDLE * bytes[j]);
        its.values_top[j] = top[j];
    }
    float4 * values = values_of(at, warp) + lane;
#pragma unroll 1
    for (uint32_t i = 0; i < all.n;) {
        int sums[4][4];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                sums[j][e] = bytes[e % 2];
            }
        }
#pragma unroll 1
        do {
            all.add(of_v, i, weights, sums);
        } while (++i % PAIRS);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j, values += 32) {
            float4 to = *values;
            to.x      = to.x * factor[0] + sums[j][0] * scale[0];
            to.y      = to.y * factor[1] + sums[j][1] * scale[1];
            to.z      = to.z * factor[0] + sums[j][2] * scale[0];
            to.w      = to.w * factor[1] + sums[j][3] * scale[1];
            *values   = to;
        }
    }
}

// a warp's part of the positions outside the pool
template <uint32_t BITS_K, uint32_t BITS_V>
static __device__ void attend_far(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task,
        const int32_t * tokens, const far_range & range, const attend_memory & m, far_sums & its) {
    const uint32_t lane = threadIdx.x % 32;

    const level_tables<BITS_K> of_k;
    const level_tables<BITS_V> of_v;

    float * shares[2] = {};
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t q = 2 * (lane % 4) + j;
        if (!a.chooses || !task.has(q)) { continue; }
        const int32_t asker = tokens[task.row_of(q) * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::ASKER];
        if (asker >= 0) { shares[j] = a.p.lse + ((uint64_t) asker * a.p.n_head + task.head_of(q)) * a.p.ask.n_unit; }
    }
#pragma unroll 1
    for (uint32_t i = range.first;; ++i) {
        // in the end all warps have the same segment
        const bool     is      = i < range.last;
        const uint32_t segment = is ? i * PIECE * UNIT / SEGMENT : range.segment;
        if (segment != its.segment) {
            add_mean<BITS_V>(a, at, task, its);
            if (is) { begin_segment(a, at, task, segment, its); }
        }
        if (!is) { break; }
        if (i + 1 < range.last) {
            fetch_early(a.coding[0], a.codes[0][task.seq], (i + 1) * PIECE, task.head);
            if (!its.little) { fetch_early(a.coding[1], a.codes[1][task.seq], (i + 1) * PIECE, task.head); }
        }
        attend_piece(a, at, task, i * PIECE, shares, m, of_k, of_v, its);
    }
}
