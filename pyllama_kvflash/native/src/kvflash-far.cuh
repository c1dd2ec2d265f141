#pragma once

// attention to the positions outside the pool, by their codes: a warp takes pieces of them, and has sums of its own until the end

#include "kvflash-attend.cuh"

// where a value's sum is among those of a query
template <uint32_t N_BIT> static __device__ uint32_t place_of(uint32_t value) {
    if (N_BIT == 2) {
        const uint32_t word = value / 16, r = value % 16;
        return word / 8 * AT_ONCE + (r % 4 * 2 + r / 8) * 16 + word % 8 + r % 8 / 4 * 8;
    }
    const uint32_t column = value / 8, r = value % 8;
    return column / 16 * AT_ONCE + (r % 4 * 2 + r / 4) * 16 + column % 16;
}

// four bytes of each of four words, turned: the bytes that are in the same place
static __device__ void turn(const uint32_t (&w)[4], uint32_t (&res)[4]) {
    const uint32_t x = __byte_perm(w[0], w[1], 0x5140), y = __byte_perm(w[2], w[3], 0x5140);
    const uint32_t z = __byte_perm(w[0], w[1], 0x7362), v = __byte_perm(w[2], w[3], 0x7362);
    res[0] = __byte_perm(x, y, 0x5410);
    res[1] = __byte_perm(x, y, 0x7632);
    res[2] = __byte_perm(z, v, 0x5410);
    res[3] = __byte_perm(z, v, 0x7632);
}

// Sums of values by the weights' bytes, of AT_ONCE values. codes: of a piece's first unit. res: [value of a column][row, column]
template <uint32_t N_BIT>
static __device__ void value_sums(
        const kvf_gpu_coding & c, const uint8_t * codes, uint32_t first, const uint32_t * weights, int (&res)[8][4]) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, most = c.width * N_BIT / 32 - 1, size = unit_bytes(c);
    const uint32_t word = first * N_BIT / 32 + g;
#pragma unroll 1
    for (uint32_t i = 0; i < PAIRS; ++i) {
        const uint8_t * from = codes + 2 * i * size + t * 16;
        const uint2     b    = {weights[g * LINE + i * 8 + t], weights[g * LINE + i * 8 + 4 + t]};
        uint4           w[2][2]; // [unit][rows g, g + 8]
#pragma unroll
        for (uint32_t u = 0; u < 2; ++u) {
            w[u][0] = *(const uint4 *) (from + u * size + min(word, most) * UNIT * 4);
            if (N_BIT == 4) { w[u][1] = *(const uint4 *) (from + u * size + min(word + 8, most) * UNIT * 4); }
        }
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            uint32_t lv[2][2][4];
#pragma unroll
            for (uint32_t u = 0; u < 2; ++u) {
#pragma unroll
                for (uint32_t r = 0; r < 2; ++r) {
                    const uint4 &  x   = w[u][N_BIT == 4 ? r : 0];
                    const uint32_t sub = N_BIT == 4 ? 0 : r;

                    const uint32_t four[] = {levels_of<N_BIT>(x.x, sub, half), levels_of<N_BIT>(x.y, sub, half),
                            levels_of<N_BIT>(x.z, sub, half), levels_of<N_BIT>(x.w, sub, half)};
                    turn(four, lv[u][r]);
                }
            }
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                multiply(res[half * 4 + j], lv[0][0][j], lv[0][1][j], lv[1][0][j], lv[1][1][j], b);
            }
        }
    }
}

// have some bytes come to the cache of the device, by a warp
static __device__ __noinline__ void fetch_early(const void * at, uint32_t size) {
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

    // blocks that have some: as few as let no warp have more
    static __device__ uint32_t n_block(const attend_places & at, const attend_task & task) {
        const uint32_t n_piece = (task.n_unit + PIECE - 1) / PIECE, n = kvf_gpu_attend::n_far(task.n_part) * at.n_warp;
        const uint32_t most    = at.n_warp * ((n_piece + n - 1) / n);
        return (n_piece + most - 1) / most;
    }

    __device__ far_range(const attend_places & at, const attend_task & task) {
        const uint64_t n = (uint64_t) n_block(at, task) * at.n_warp, n_piece = (task.n_unit + PIECE - 1) / PIECE;
        const uint32_t i = task.part * at.n_warp + threadIdx.x / 32;
        first = n_piece * i / n;
        last  = n_piece * (i + 1) / n;
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

// over the lanes that have the same queries
template <typename T, typename F> static __device__ T over_rows(T x, const F & f) { return over_lanes(x, f, 4, 16); }

// the sums of values relative to the top, and with a segment's mean
template <uint32_t N_BIT>
static __device__ void add_mean(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, attend_memory & m,
        far_sums & its) {
    const auto &   c    = a.coding[1];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (its.segment == ~0u) { return; }
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        if (lane < 4) {
            m.by[warp][0][2 * lane + j] = exp2f(its.values_top[j] - its.top[j]);
            m.by[warp][1][2 * lane + j] = its.about[j];
        }
        its.values_top[j] = its.top[j];
        its.about[j]      = 0;
    }
    __syncwarp();
    const float * mean   = mean_of(c, a.codes[1][task.seq], its.segment * (SEGMENT / UNIT), task.head);
    float * const values = &shared<float>(at.values) + warp * COLS * at.n_value;
#pragma unroll 2
    for (uint32_t e = lane; e < c.width; e += 32) {
        const float    one = mean[e];
        const uint32_t to  = place_of<N_BIT>(e);
        for (uint32_t j = 0; j < COLS; ++j) {
            values[j * at.n_value + to] = values[j * at.n_value + to] * m.by[warp][0][j] + m.by[warp][1][j] * one;
        }
    }
    __syncwarp();
}

static __device__ void begin_segment(
        const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, uint32_t segment, far_sums & its) {
    const auto &   c    = a.coding[0];
    const float *  mean = mean_of(c, a.codes[0][task.seq], segment * (SEGMENT / UNIT), task.head);
    const uint32_t lane = threadIdx.x % 32;
    its.segment         = segment;
    if (segment == ~0u) { return; }
    float base[COLS] = {};
#pragma unroll 4
    for (uint32_t e = lane; e < c.width; e += 32) {
        const float one = mean[e] * (LOG2E * a.p.scale);
#pragma unroll
        for (uint32_t j = 0; j < COLS; ++j) {
            base[j] += shared<float>(at.rotated + (j * c.width + e) * sizeof(float)) * one;
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < COLS; ++j) {
        base[j] = over_lanes(base[j], add<float>);
        if (lane % 4 == j / 2) { its.base[j % 2] = base[j]; }
    }
}

// Logits of a piece, [pair][position][query][lane]: the lane's units are 2*pair + g/4, of which it has positions 4*(g%4) on.
// top: the largest of each query so far
template <uint32_t N_BIT>
static __device__ void piece_logits(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, uint32_t u,
        const attend_memory & m, const far_sums & its, float * x, float (&top)[2]) {
    const auto &   c = a.coding[0];
    const auto &   keys = a.codes[0][task.seq];
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint64_t slot = slot_of(c, u, task.head) + g / 4;
    const float    cap  = LOG2E * a.p.cap;
#pragma unroll 1
    for (uint32_t i = 0; i < PAIRS; ++i, x += 8 * 32) {
        const uint2 scales = *(const uint2 *) (keys.scales + (slot + 2 * i) * UNIT + g % 4 * 4);
        int         products[4][2];
        key_products<N_BIT>(c, keys.codes + (slot + 2 * i) * unit_bytes(c) + g % 4 * 16, &shared<uint2>(at.words), products);
        const bool  is     = u + 2 * i + g / 4 < task.n_unit;
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
            const float unit = m.unit[2 * t + j], middle = m.middle[2 * t + j];
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                const float scale = half_of(e < 2 ? scales.x : scales.y, e % 2) * unit;
                float       y     = products[e][j] * scale + (its.base[j] - middle * scale);
                if (cap > 0) { y = cap * tanhf(y / cap); }
                y                   = is ? y : NOWHERE;
                x[(2 * e + j) * 32] = y;
                top[j]              = fmaxf(top[j], y);
            }
        }
    }
}

// Logits become weights times the scales of values; of units in the pool none. shares: where those of the lane's queries go, by
// unit. largest: weight of each query; sum: of those outside the pool
static __device__ void piece_weights(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, uint32_t u,
        const float (&top)[2], float * const (&shares)[2], float * x, float (&sum)[2], float (&largest)[2]) {
    const auto &   c      = a.coding[1];
    const uint32_t g      = threadIdx.x % 32 / 4, taken = shared<uint32_t>(at.taken + u / 32 * sizeof(uint32_t)) >> u % 32;
    const auto *   scales = a.codes[1][task.seq].scales + (slot_of(c, u, task.head) + g / 4) * UNIT + g % 4 * 4;
    uint2 next = *(const uint2 *) scales;
#pragma unroll 1
    for (uint32_t i = 0; i < PAIRS; ++i, x += 8 * 32) {
        const uint32_t mine = 2 * i + g / 4;
        const bool     open = !(taken >> mine & 1);
        const uint2    its  = next;
        if (i + 1 < PAIRS) { next = *(const uint2 *) (scales + 2 * (i + 1) * UNIT); }
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
            float unit = 0;
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                float &     to     = x[(2 * e + j) * 32];
                const float weight = exp2f(to - top[j]); // there is a position: the top is one's
                unit += weight;
                to         = open ? weight * half_of(e < 2 ? its.x : its.y, e % 2) : 0;
                largest[j] = fmaxf(largest[j], to);
            }
            sum[j] += open ? unit : 0;
            if (!a.chooses) { continue; }
            unit = over_lanes(unit, add<float>, 4, 8);
            if (shares[j] && g % 4 == 0 && u + mine < task.n_unit) {
                shares[j][u + mine] = unit > 0 ? top[j] + log2f(unit) : NOWHERE;
            }
        }
    }
}

// weights as bytes, [query][position]. returns the sums of these, of the lane's queries
static __device__ void piece_bytes(const float * x, const float (&largest)[2], uint32_t * weights, float (&sums)[2]) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int            all[2] = {};
    float          to[2]; // with 1.5*2^23 added, the last byte of a number is what it was, rounded
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        to[j] = largest[j] > 0 ? MOST_BYTE / largest[j] : 0;
    }
    __syncwarp();
#pragma unroll 2
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
            all[j] = __dp4a((int) word, 0x01010101, all[j]);
        }
    }
    __syncwarp();
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        sums[j] = over_rows(all[j], add<int>);
    }
}

// a piece of the positions outside the pool
template <uint32_t BITS_K, uint32_t BITS_V>
static __device__ void attend_piece(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, uint32_t u,
        float * const (&shares)[2], const attend_memory & m, far_sums & its) {
    const auto &   v = a.coding[1];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float * const  x      = &shared<float>(at.logits) + warp * LOGITS + lane;
    float          top[2] = {its.top[0], its.top[1]}, sum[2] = {}, largest[2] = {}, factor[2];
    piece_logits<BITS_K>(a, at, task, u, m, its, x, top);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        top[j]    = over_rows(top[j], most);
        factor[j] = exp2f(its.top[j] - top[j]);
    }
    piece_weights(a, at, task, u, top, shares, x, sum, largest);
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

    uint32_t * const weights = &shared<uint32_t>(at.weights) + warp * COLS * LINE;
    float            bytes[2], scale[2];
    piece_bytes(x, largest, weights, bytes);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        scale[j]  = largest[j] / MOST_BYTE;
        factor[j] = exp2f(its.values_top[j] - top[j]);
        bytes[j] *= MIDDLE * scale[j];
        its.values_top[j] = top[j];
    }
    float * const values = &shared<float>(at.values) + (warp * COLS + 2 * (lane % 4)) * at.n_value + lane / 4;
    const auto *  codes  = a.codes[1][task.seq].codes + slot_of(v, u, task.head) * unit_bytes(v);
#pragma unroll 1
    for (uint32_t first = 0; first < v.width; first += AT_ONCE) {
        int sums[8][4] = {};
        value_sums<BITS_V>(v, codes, first, weights, sums);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                float & to = values[e % 2 * at.n_value + first + i * 16 + e / 2 * 8];
                to         = to * factor[e % 2] + (sums[i][e] * scale[e % 2] - bytes[e % 2]);
            }
        }
    }
}

// a warp's part of the positions outside the pool
template <uint32_t BITS_K, uint32_t BITS_V>
static __device__ void attend_far(const kvf_gpu_attend & a, const attend_places & at, const attend_task & task,
        const int32_t * tokens, const far_range & range, attend_memory & m, far_sums & its) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    float * shares[2] = {};
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t q = 2 * (lane % 4) + j;
        if (!a.chooses || !task.has(q)) { continue; }
        const int32_t asker = tokens[task.row_of(q) * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::ASKER];
        if (asker >= 0) { shares[j] = a.p.lse + ((uint64_t) asker * a.p.n_head + task.head_of(q)) * a.p.ask.n_unit; }
    }
#pragma unroll 4
    for (uint32_t i = lane; i < COLS * at.n_value; i += 32) {
        shared<float>(at.values + (warp * COLS * at.n_value + i) * sizeof(float)) = 0;
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = range.first; i <= range.last; ++i) {
        const uint32_t segment = i < range.last ? i * PIECE * UNIT / SEGMENT : ~0u;
        if (i + 1 < range.last) {
            fetch_early(a.coding[0], a.codes[0][task.seq], (i + 1) * PIECE, task.head);
            if (!its.little) { fetch_early(a.coding[1], a.codes[1][task.seq], (i + 1) * PIECE, task.head); }
        }
        if (segment != its.segment) {
            add_mean<BITS_V>(a, at, task, m, its);
            begin_segment(a, at, task, segment, its);
        }
        if (i < range.last) { attend_piece<BITS_K, BITS_V>(a, at, task, i * PIECE, shares, m, its); }
    }
}
