#pragma once

// attention to the positions outside the pool, by their codes. Each warp takes some pieces of the positions, and has its own
// sums until the end

#include "coarse/words.cuh"

// the sums of a warp so far, for the two queries of a lane
struct far_sums {
    float    top[2] = {NOWHERE, NOWHERE}, sum[2] = {};
    float    values_top[2] = {NOWHERE, NOWHERE}; // the logit that the sums of values are relative to
    float    about[2] = {}, base[2] = {};        // of the segment: the weights that count with its mean; products with it
    uint32_t segment = ~0u;
    bool     little  = false; // the last piece had so little weight that its own values were left out
};

static constexpr uint32_t PAIR = 2 * UNIT; // positions

// prefetch the codes and scales of n pairs of units into the L2 cache
static __device__ void fetch_early(
        const kvf_gpu_coding & c, const kvf_gpu_codes & of, uint32_t pair, uint32_t n, uint32_t head) {
    const uint64_t slot = slot_of(c, pair * 2, head);
    fetch_early(of.codes + slot * unit_bytes(c), n * 2 * unit_bytes(c));
    fetch_early(of.scales + slot * UNIT, n * PAIR * sizeof(uint16_t));
}

// the pairs of units that a warp takes
struct far_range {
    uint32_t first, last;
    uint32_t segment; // of the last pair of the block

    __device__ far_range(const attend_places & at, const attend_task & task) {
        const uint32_t n = task.n_far * at.n_warp, n_pair = (task.n_unit + 1) / 2;
        const uint32_t i = task.part * at.n_warp + threadIdx.x / 32;
        first            = n_pair * i / n;
        last             = n_pair * (i + 1) / n;
        segment          = (n_pair * ((task.part + 1) * at.n_warp) / n - 1) * PAIR / SEGMENT;
    }

    // the number of pairs in the piece at i: at most PAIRS, and none beyond the range or the word of `taken` (and so the
    // tile)
    __device__ uint32_t n(uint32_t i) const { return min(min(PAIRS, last - i), 16 - i % 16); }
};

// the first of the positions in a unit whose keys a lane holds
static __device__ uint32_t pos_of(uint32_t g) { return g % 2 * 8 + g / 2 % 2 * 4; }

// the loads ahead of the computation, for a pair of units: words of keys for the next products, and the scales of keys and
// values of the lane's positions
template <uint32_t N_BIT> struct next_pair {
    static constexpr uint32_t TAKE = STEPS * N_BIT * UNIT * 4; // bytes of a unit

    const uint8_t *  from;
    const uint16_t * of_k;
    const uint16_t * of_v;
    key_words<N_BIT> words;
    uint2            k, v;

    __device__ void begin(const kvf_gpu_attend & a, const attend_task & task, const attend_memory & m, uint32_t pair) {
        const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const uint64_t slot = slot_of(a.coding[0], pair * 2, task.head) + g / 4;
        from = m.codes[0].codes + slot * unit_bytes(a.coding[0]) + (pos_of(g) + t * UNIT) * 4;
        of_k = m.codes[0].scales + slot * UNIT + pos_of(g);
        of_v = m.codes[1].scales + slot * UNIT + pos_of(g);
        words.read(from);
        read_scales();
    }

    // all products of a pair. ends: this is the warp's last pair, and its own words are loaded again in place of those of a
    // next one. words past the end of a row are multiplied by zeros
    __device__ void add(
            const kvf_gpu_attend & a, uint32_t pair, bool ends, const uint2 * queries, int (&one)[4], int (&two)[4]) {
        const uint32_t n_step = a.n_step(), size = unit_bytes(a.coding[0]);
        const uint32_t next   = ends ? 0 : 2 * size + past_tile(a, pair) * size - (n_step - STEPS) / STEPS * TAKE;
        uint32_t       step   = 0;
#pragma unroll 1
        do {
            step += STEPS;
            from += step < n_step ? TAKE : next;
            words.add(queries, from, one, two);
            queries += STEPS * 32;
        } while (step < n_step);
    }
    // load the scales of the next pair, when those of this one are used up
    __device__ void next_scales(const kvf_gpu_attend & a, uint32_t pair, bool ends) {
        const uint32_t further = ends ? 0 : PAIR + past_tile(a, pair) * UNIT;
        of_k += further;
        of_v += further;
        read_scales();
    }

private:
    // the number of units of other heads before the next pair: a tile has all units of one head, then those of the next
    static __device__ uint32_t past_tile(const kvf_gpu_attend & a, uint32_t pair) {
        return (pair + 1) % (CODE_TILE / 2) ? 0 : (a.coding[0].n_head - 1) * CODE_TILE;
    }

    __device__ void read_scales() {
        k = ::read_scales(of_k);
        v = ::read_scales(of_v);
    }
};

// the scales of a piece's values, four for each lane
static __device__ uint2 piece_scales(
        const kvf_gpu_attend & a, const attend_task & task, const attend_memory & m, uint32_t pair, uint32_t n) {
    const uint32_t lane = threadIdx.x % 32, unit = lane / 4;
    if (unit >= 2 * n || pair * 2 + unit >= task.n_unit) { return {0, 0}; }
    return read_scales(m.codes[1].scales + (slot_of(a.coding[1], pair * 2, task.head) + unit) * UNIT + lane % 4 * 4);
}

// cap*tanh(x/cap)
static __device__ float capped(float x, float cap) { return cap - 2 * cap / (exp2f(x * (2 * LOG2E / cap)) + 1); }

// reduce over the lanes that have the same queries
template <typename T, typename F> static __device__ T over_rows(T x, const F & f) { return over_lanes(x, f, 4, 16); }

// end a segment: make the sums of values relative to the top, and add the segment's mean
template <uint32_t N_BIT>
static __device__ void add_mean(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task,
        const attend_memory & m, far_sums & its) {
    const auto &   c    = a.coding[1];
    const uint32_t lane = threadIdx.x % 32, g = lane / 4;
    if (its.segment == ~0u) { return; }
    float factor[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        factor[j]         = exp2f(its.values_top[j] - its.top[j]);
        its.values_top[j] = its.top[j];
    }
    const float *  mean   = mean_of(c, m.codes[1], its.segment * (SEGMENT / UNIT), task.head);
    float4 * const values = values_of(at, threadIdx.x / 32) + lane;
#pragma unroll 4
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

// begin a segment: get the products of the lane's queries with its mean
static __device__ void begin_segment(
        const attend_task & task, const prepared_pass & pass, uint32_t segment, far_sums & its) {
    const uint32_t q = threadIdx.x % 4 * 2;
    its.segment      = segment;
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        its.base[j] = task.has(q + j) ? pass.base[segment * COLS + q + j] : 0;
    }
}

// the sums of a piece for the two queries of a lane
struct piece_sums {
    float sum[2]   = {}; // of this lane's weights
    float total[4] = {}; // of the factors of values, over all lanes; the last two repeat the first two
};

// Raise the largest logits, and scale everything that is relative to them. by: in: how far the lane's logits are above them;
// out: how much they were raised. weights: of n pairs
static __device__ void raise_top(
        float (&by)[2], far_sums & its, piece_sums & piece, uint4 * weights, uint32_t n) {
    float factor[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        const bool first = its.top[j] == NOWHERE;
        by[j]            = over_rows(by[j], most);
        if (!first) { by[j] = ceilf(fmaxf(by[j], 0)); } // by a power of two, which halves are multiplied by exactly
        factor[j]  = first ? 1 : exp2f(-by[j]);
        its.top[j] = first ? by[j] : its.top[j] + by[j];
        its.sum[j] *= factor[j];
        its.about[j] *= factor[j];
        piece.sum[j] *= factor[j];
        piece.total[j] *= factor[j];
    }
    // a lane holds the weights of query g
    const uint32_t g   = threadIdx.x % 32 / 4;
    const float    one = __shfl_sync(~0u, factor[0], g / 2, 32), two = __shfl_sync(~0u, factor[1], g / 2, 32);
    const half2    its_own = __float2half2_rn(g % 2 ? two : one);
    half2 * const  all = (half2 *) weights;
#pragma unroll 1
    for (uint32_t i = 0; i < n * 4; ++i) {
        half2 & x = all[i / 4 * 32 * 4 + i % 4];
        x         = __hmul2(x, its_own);
    }
}

// Compute the weights of the keys of n pairs of units, and the factors of values: weights times `unit` times the values'
// scales, as halves; 0 for positions in the pool. A lane computes the logits of four positions of unit g/4 for two queries.
// weights [pair][lane]: word i of a lane has query g and positions 4*(t%2) + i and 8 more, of unit t/2. taken: a bit for
// each of 32 units. shares: where to write the sums of units for the lane's queries
template <uint32_t N_BIT>
static __device__ void piece_weights(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, uint32_t u,
        uint32_t n, uint32_t taken, float * const (&shares)[2], const attend_memory & m, float unit, uint32_t last,
        next_pair<N_BIT> & next, uint4 * weights, far_sums & its, piece_sums & piece) {
    constexpr float    ZERO = 12582912; // 1.5*2^23: adding an integer to its bits adds that integer to the float
    constexpr uint32_t ONE  = 0x3c003c00;

    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float    cap           = LOG2E * a.p.cap;
    const float    per_product[] = {m.unit[2 * t], m.unit[2 * t + 1]}, middle[] = {m.middle[2 * t], m.middle[2 * t + 1]};
    const int      zero          = __float_as_int(ZERO);
    const uint2 *  queries       = &shared<uint2>(at.words) + threadIdx.x % 32;
    const bool     second        = threadIdx.x & 8; // lanes 4 and 8 further on have the same unit: they share two queries
    float * const  share         = second ? shares[1] : shares[0];
    const uint32_t u_end         = u + 2 * n;
    uint4 * const  begin         = weights;
    taken >>= u % 32 + g / 4;
#pragma unroll 1
    for (; u < u_end; u += 2, taken >>= 2, weights += 32) {
        const bool ends = u / 2 + 1 == last;
        int one[4] = {zero, zero, zero, zero}, two[4] = {zero, zero, zero, zero};
        next.add(a, u / 2, ends, queries, one, two);
        const bool  is = u + g / 4 < task.n_unit, open = is && !(taken & 1);
        const bool  first = its.top[0] == NOWHERE;
        const float top[] = {first ? 0 : its.top[0], first ? 0 : its.top[1]};
        const float from[] = {its.base[0] - (cap > 0 ? 0 : top[0]), its.base[1] - (cap > 0 ? 0 : top[1])};
        float       y[4][2], now[2] = {NOWHERE, NOWHERE}; // logits relative to the top, and the largest of them
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            const float scale = half_of(e < 2 ? next.k.x : next.k.y, e % 2);
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) {
                const int   x       = e == 0 ? one[j] : e == 1 ? one[2 + j] : e == 2 ? two[j] : two[2 + j];
                const float product = __int_as_float(x) - ZERO - middle[j];
                y[e][j]             = is ? product * (scale * per_product[j]) + from[j] : NOWHERE;
            }
        }
        if (cap > 0) {
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
#pragma unroll
                for (uint32_t j = 0; j < 2; ++j) {
                    if (is) { y[e][j] = capped(y[e][j], cap) - top[j]; }
                }
            }
        }
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            now[0] = fmaxf(now[0], y[e][0]);
            now[1] = fmaxf(now[1], y[e][1]);
        }
        if (__any_sync(~0u, first || now[0] > LEAD || now[1] > LEAD)) {
            raise_top(now, its, piece, begin, (weights - begin) / 32);
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                y[e][0] -= now[0];
                y[e][1] -= now[1];
            }
        }
        float sums[2] = {};
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) {
                y[e][j] = exp2f(y[e][j]);
                sums[j] += y[e][j];
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
            piece.sum[j] += open ? sums[j] : 0;
        }
        if (a.chooses) {
            float its_own = (second ? sums[1] : sums[0]) + __shfl_xor_sync(~0u, second ? sums[0] : sums[1], 8);
            its_own += __shfl_xor_sync(~0u, its_own, 4);
            if (share && g % 2 == 0 && is) {
                share[u + g / 4] = its_own > 0 ? (second ? its.top[1] : its.top[0]) + log2f(its_own) : NOWHERE;
            }
        }
        uint32_t w[4];
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            const float by = open ? half_of(e < 2 ? next.v.x : next.v.y, e % 2) * unit : 0;
            w[e]           = turned(halves(y[e][0] * by, y[e][1] * by));
        }
        next.next_scales(a, u / 2, ends);
        *weights = {w[0], w[1], w[2], w[3]};
        multiply(piece.total, ONE, ONE, ONE, ONE, uint2{w[0], w[1]});
        multiply(piece.total, ONE, ONE, ONE, ONE, uint2{w[2], w[3]});
    }
}

// Attend to a piece: n pairs of units from the i-th on. If it has little weight, its values count as the segment's mean.
// four: the scales of its values
template <uint32_t BITS_K, uint32_t BITS_V>
static __device__ void attend_piece(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, uint32_t i,
        uint32_t n, uint32_t taken, float * const (&shares)[2], const attend_memory & m, const uint2 & four, uint32_t last,
        next_pair<BITS_K> & next, far_sums & its) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint4 * const  weights = &shared<uint4>(at.weights) + warp * PAIRS * 32 + lane;
    const float    scale   = over_lanes(
            fmaxf(fmaxf(half_of(four.x, 0), half_of(four.x, 1)), fmaxf(half_of(four.y, 0), half_of(four.y, 1))), most);
    piece_sums         piece;
    value_sums<BITS_V> all(
            a, m.codes[1].codes + slot_of(a.coding[1], i * 2, task.head) * unit_bytes(a.coding[1]));
    piece_weights<BITS_K>(
            a, at, task, i * 2, n, taken, shares, m, scale > 0 ? 1 / scale : 0, last, next, weights, its, piece);
    bool little = true;
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        const float sum = over_rows(piece.sum[j], add<float>);
        little          = little && (!task.has(2 * (lane % 4) + j) || sum <= LITTLE * its.sum[j]);
        its.sum[j] += sum;
        its.about[j] += sum;
    }
    its.little = !__any_sync(~0u, !little);
    if (its.little) { return; }

    float factor[2], total[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        factor[j]         = exp2f(its.values_top[j] - its.top[j]);
        its.values_top[j] = its.top[j];
        total[j]          = -scale * piece.total[j];
    }
    float4 *       values  = values_of(at, warp) + lane;
    const uint32_t n_group = at.n_value / AT_ONCE;
#pragma unroll 1
    for (uint32_t group = 0; group < n_group; ++group) {
        float sums[4][4] = {};
#pragma unroll 1
        for (uint32_t pair = 0; pair < n; ++pair) {
            const bool ends = pair + 1 == n;
            all.add(group, weights[pair * 32], !ends ? 2 * all.size : group + 1 < n_group ? all.back(group, n) : 0, sums);
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k, values += 32) {
            using V          = value_sums<BITS_V>;
            const float by[] = {scale * V::unit(k, 0), scale * V::unit(k, 1)};
            float4      to   = *values;
            to.x             = to.x * factor[0] + (sums[k][0] * by[0] + total[0] * V::mean(k, 0));
            to.y             = to.y * factor[1] + (sums[k][1] * by[0] + total[1] * V::mean(k, 0));
            to.z             = to.z * factor[0] + (sums[k][2] * by[1] + total[0] * V::mean(k, 1));
            to.w             = to.w * factor[1] + (sums[k][3] * by[1] + total[1] * V::mean(k, 1));
            *values          = to;
        }
    }
}

// copy a pass to shared memory, with zeros for columns that the task does not have
static __device__ void read_pass(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task,
        const prepared_pass & pass, attend_memory & m) {
    for (uint32_t i = threadIdx.x; i < a.n_step() * 32; i += blockDim.x) {
        (&shared<uint2>(at.words))[i] = task.has(i % 32 / 4) ? pass.words[i] : uint2{0, 0};
    }
    if (threadIdx.x < COLS) {
        const uint32_t q = threadIdx.x;
        m.unit[q]        = task.has(q) ? pass.unit[q] : 0;
        m.middle[q]      = task.has(q) ? pass.middle[q] : 0;
    }
    __syncthreads();
}

// attend to a warp's range of the positions outside the pool. before ggml_cuda_pdl_sync() it reads only data that were
// complete when kvf_prepare began
template <uint32_t BITS_K, uint32_t BITS_V>
static __device__ void attend_far(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task,
        const int32_t * tokens, const far_range & range, const prepared_pass & pass, attend_memory & m, far_sums & its) {
    const uint32_t   lane  = threadIdx.x % 32;
    const uint32_t * taken = pass.taken + (task.row_of(task.from) - task.row) * a.n_word();

    float * shares[2] = {};
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t q = 2 * (lane % 4) + j;
        if (!a.chooses || !task.has(q)) { continue; }
        const int32_t asker = tokens[task.row_of(q) * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::ASKER];
        if (asker >= 0) { shares[j] = a.p.lse + ((uint64_t) asker * a.p.n_head + task.head_of(q)) * a.p.ask.n_unit; }
    }
    next_pair<BITS_K> next = {};
    uint2             four = {}; // of the next piece
    uint32_t          bits = 0;
    const bool        any  = range.first < range.last;
    if (any) { // begin to load the first pair before everything else
        next.begin(a, task, m, range.first);
        four = piece_scales(a, task, m, range.first, range.n(range.first));
        fetch_early(a.coding[0], m.codes[0], range.first, range.n(range.first), task.head);
        fetch_early(a.coding[1], m.codes[1], range.first, range.n(range.first), task.head);
    }
    ggml_cuda_pdl_sync();
    read_pass(a, at, task, pass, m);
    if (any) { bits = taken[range.first / 16]; }
#pragma unroll 1
    for (uint32_t i = range.first, n = 0;; i += n) {
        // after the last piece, all warps end in the same segment
        const bool     is      = i < range.last;
        const uint32_t segment = is ? i * PAIR / SEGMENT : range.segment;
        if (segment != its.segment) {
            add_mean<BITS_V>(a, at, task, m, its);
            if (is) { begin_segment(task, pass, segment, its); }
        }
        if (!is) { break; }
        n                         = range.n(i);
        const uint2    mine       = four;
        const uint32_t taken_here = bits;
        if (i + n < range.last) {
            const uint32_t n_next = range.n(i + n);
            fetch_early(a.coding[0], m.codes[0], i + n, n_next, task.head);
            if (!its.little) { fetch_early(a.coding[1], m.codes[1], i + n, n_next, task.head); }
            four = piece_scales(a, task, m, i + n, n_next);
            bits = taken[(i + n) / 16];
        }
        attend_piece<BITS_K, BITS_V>(a, at, task, i, n, taken_here, shares, m, mine, range.last, next, its);
    }
}
