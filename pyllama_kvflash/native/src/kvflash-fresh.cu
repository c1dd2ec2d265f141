// The node of kvflash-fresh.h on a GPU, a part of the backend's library: each layer scores all units by its queries, chooses
// and fetches, in one launch, with no word from the host. What changes between two tokens lies in the device's memory, so that
// a CUDA graph may hold the launch.

#include "kvflash-kernels.cuh"

#include <cmath>

static constexpr uint32_t HEADS = 4, COLUMNS = 2 * HEADS; // queries that share a pass over the codes: two digits each
static constexpr uint32_t THREADS = 512, WARPS = THREADS / 32; // of a block of the node
static constexpr float    LOG2E = 1.44269504f, NOWHERE = -1e30f;

//
// the ask
//

static __device__ const int32_t * asker_of(const int32_t * ask, uint32_t i) {
    return ask + kvf_gpu_ask::LEN + i * kvf_gpu_ask::LEN_ASKER;
}

static __device__ const int32_t * seq_of(const kvf_gpu_layer & p, const int32_t * ask, uint32_t seq) {
    return ask + kvf_gpu_ask::LEN + p.ask.n_asker * kvf_gpu_ask::LEN_ASKER + seq * p.ask.seq_size();
}

static __device__ const int32_t * blocks_of(const int32_t * s) { return s + kvf_gpu_ask::LEN_SEQ; }

static __device__ const int32_t * common_of(const kvf_gpu_layer & p, const int32_t * s) { return blocks_of(s) + p.ask.n_block; }

static __device__ const uint32_t * bits_of(const kvf_gpu_layer & p, const int32_t * s) {
    return (const uint32_t *) common_of(p, s) + kvf_gpu_ask::LEN_COMMON * p.ask.n_block;
}

static __device__ bool has_turn(const kvf_gpu_layer & p, const int32_t * s) {
    const int32_t step = s[kvf_gpu_ask::STEP];
    return s[kvf_gpu_ask::N_VISIBLE] > 0 && (step < 0 || (step + p.i) % p.n_turn == 0);
}

//
// score: the logarithm of each unit's part of the attention, by head
//

// a running sum of powers of two, about the largest exponent
struct sum_of_powers {
    float top = NOWHERE, sum = 0;

    __device__ void add(float x, float n = 1) {
        const float most = fmaxf(top, x);
        sum              = sum * exp2f(top - most) + n * exp2f(x - most);
        top              = most;
    }
};

// a logit, of base 2
static __device__ float logit(const kvf_gpu_layer & p, float x) {
    x *= p.scale;
    return LOG2E * (p.cap > 0 ? p.cap * tanhf(x / p.cap) : x);
}

template <typename T> static __device__ T add(T a, T b) { return a + b; }
static __device__ float                   most(float a, float b) { return fmaxf(a, b); }

// of the lanes that differ from this one in the bits from `low` on
template <typename T, typename F> static __device__ T over_lanes(T x, const F & both, int low = 1, int high = 16) {
#pragma unroll
    for (int i = high; i >= low; i /= 2) {
        x = both(x, __shfl_xor_sync(~0u, x, i));
    }
    return x;
}

// bytes j of four words, as a word
static __device__ void transpose(uint32_t (&w)[4]) {
    const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

// d += a*b. a: 16 positions and 32 codes; b: 32 codes and 8 columns. words: [8][COLUMNS], the same as b
static __device__ void multiply(const uint32_t (&a)[4], const uint32_t (&b)[2], const uint32_t * words, int (&d)[4]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    for (uint32_t i = 0; i < 4; ++i) { // what the lane's neighbours have
        uint32_t its[4];
        for (uint32_t j = 0; j < 4; ++j) {
            its[j] = __shfl_sync(~0u, a[j], i, 4);
        }
        for (uint32_t c = 0; c < 2; ++c) {
            const uint32_t * column = words + threadIdx.x % 4 * 2 + c;
            const int        b0 = column[i * COLUMNS], b1 = column[(4 + i) * COLUMNS];
            d[c]     = __dp4a((int) its[2], b1, __dp4a((int) its[0], b0, d[c]));
            d[2 + c] = __dp4a((int) its[3], b1, __dp4a((int) its[1], b0, d[2 + c]));
        }
    }
#endif
}

struct score_memory {
    float    parts[WARPS][HEADS][2];
    float    base[HEADS], unit[HEADS];
    uint32_t words[kvf_gpu_form::MOST * COLUMNS]; // of each query the upper digits, then the lower ones
};

// what a block scores: queries of one token that share a head of keys
struct score_task {
    uint32_t        asker, head, first, n; // first: of the queries' heads
    uint32_t        split, n_split;        // its part of the positions
    const int32_t * who;
    const int32_t * s;
};

// sums += x*y
static __device__ void add_scaled(float (&sums)[HEADS], float x, const float * y) {
    const float4 four = *(const float4 *) y;
    sums[0] += x * four.x;
    sums[1] += x * four.y;
    sums[2] += x * four.z;
    sums[3] += x * four.w;
}

static __device__ uint32_t n_row(const kvf_gpu_form & f) { return max(1u, THREADS / f.n_comp); }

// q: [d][HEADS]. the queries' components times their steps, as whole numbers of two digits of base 254. x, part: room
static __device__ void prepare(const kvf_gpu_layer & p, const kvf_gpu_index & index, const score_task & task, const float * q,
        float * x, float * part, score_memory & m) {
    const uint32_t n_comp = p.form.n_comp, n = n_row(p.form), tid = threadIdx.x;
    const float *  basis = index.basis + (uint64_t) task.head * p.d * n_comp;

    for (uint32_t i = tid; i < n * n_comp; i += THREADS) {
        const uint32_t c = i % n_comp, r = i / n_comp;

        float sums[HEADS] = {};
#pragma unroll 8
        for (uint32_t j = r * p.d / n; j < (r + 1) * p.d / n; ++j) {
            add_scaled(sums, basis[(uint64_t) j * n_comp + c], q + j * HEADS);
        }
#pragma unroll
        for (uint32_t h = 0; h < HEADS; ++h) {
            part[h * n * n_comp + i] = sums[h];
        }
    }
    __syncthreads();
    for (uint32_t i = tid; i < HEADS * n_comp; i += THREADS) {
        const uint32_t h = i / n_comp, c = i % n_comp;

        float sum = 0;
        for (uint32_t r = 0; r < n; ++r) {
            sum += part[(h * n + r) * n_comp + c];
        }
        x[i] = sum * index.step[task.head * n_comp + c];
    }
    __syncthreads();

    const uint32_t h = tid / 32, lane = tid % 32;
    if (h < HEADS) {
        float base = 0, top = 0;
        for (uint32_t j = lane; j < p.d; j += 32) {
            base += q[j * HEADS + h] * index.mean[task.head * p.d + j];
        }
        for (uint32_t c = lane; c < n_comp; c += 32) {
            base -= x[h * n_comp + c] * middle(p.form, c);
            top = fmaxf(top, fabsf(x[h * n_comp + c]));
        }
        base = over_lanes(base, add<float>);
        top  = over_lanes(top, most);
        if (lane == 0) {
            m.base[h] = base;
            m.unit[h] = h < task.n && top > 0 ? top / (127 * 254 + 127) : 1;
        }
    }
    __syncthreads();
    for (uint32_t i = tid; i < p.form.n_each * 4 * HEADS; i += THREADS) {
        const uint32_t w = i / HEADS, h = i % HEADS;

        uint32_t upper = 0, lower = 0;
        for (uint32_t b = 0; b < 4; ++b) {
            const int c = p.form.mask[w] >> 8 * b & 255 ? component(p.form, 4 * p.form.quad[w] + b, p.form.shift[w]) : -1;
            if (c < 0) { continue; }
            const int n = __float2int_rn(x[h * n_comp + c] / m.unit[h]);
            const int u = max(-127, min(127, __float2int_rn(n / 254.0f)));
            upper |= (u & 255) << 8 * b;
            lower |= (max(-127, min(127, n - 254 * u)) & 255) << 8 * b;
        }
        m.words[w * COLUMNS + 2 * h]     = upper;
        m.words[w * COLUMNS + 2 * h + 1] = lower;
    }
    __syncthreads();
}

// the keys of common cells as they are. q: [d][HEADS]. a warp takes eight positions, four lanes each; lane 4*i + h adds head h.
// TYPE: of the cache, -1: p.type_k. where it is known, many values are on their way at once
template <int TYPE>
static __device__ void score_near(const kvf_gpu_layer & p, const score_task & task, const float * q, sum_of_powers & all) {
    constexpr uint32_t PIECE = 8;

    const uint32_t  warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_piece = p.n_chunk / PIECE;
    const int32_t * common = common_of(p, task.s);
    const int32_t   pos    = task.who[kvf_gpu_ask::POS];
    for (uint32_t i = task.split * WARPS + warp; i < task.s[kvf_gpu_ask::N_COMMON] * n_piece; i += task.n_split * WARPS) {
        const int32_t * c   = common + i / n_piece * kvf_gpu_ask::LEN_COMMON;
        const int32_t   j   = i % n_piece * PIECE + lane / 4;
        const bool      is  = j < c[kvf_gpu_ask::N] && c[kvf_gpu_ask::FIRST] + j <= pos;
        const char *    row = p.k.data + (uint64_t) (c[kvf_gpu_ask::CELL] + (is ? j : 0)) * p.row_size;

        float sums[HEADS] = {};
#pragma unroll(TYPE < 0 ? 1 : 16)
        for (uint32_t e = lane % 4; e < p.d; e += 4) {
            add_scaled(sums, key_value(TYPE < 0 ? p.type_k : TYPE, row, task.head * p.d + e), q + e * HEADS);
        }
        float x = 0;
#pragma unroll
        for (uint32_t h = 0; h < HEADS; ++h) {
            const float sum = over_lanes(sums[h], add<float>, 1, 2);
            if (lane % 4 == h) { x = sum; }
        }
        if (is) { all.add(logit(p, x)); }
    }
}

// A warp takes a group of 64 positions at a time. Lane 4*g + t has four nibbles of positions 4*g + x and 32 + 4*g + x, x = 0
// ... 3, which are two rows of the product of each x; and of what comes out, both digits of head t of the same positions.
// N_EACH: words of a lane, 0: as many as there are
template <uint32_t N_EACH>
static __device__ void score_far(const kvf_gpu_layer & p, const kvf_gpu_index & index, const score_task & task,
        const score_memory & m, sum_of_powers & all) {
    const uint32_t   warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t   n_unit = task.s[kvf_gpu_ask::N_UNIT], n_group = (n_unit + 3) / 4, each = N_EACH ? N_EACH : p.form.n_each;
    const uint32_t * bits = bits_of(p, task.s);
    const float      base = m.base[t], unit = m.unit[t];
    float *          lse = p.lse + ((uint64_t) task.asker * p.n_head + task.first + t) * p.ask.n_unit;

    // of each word: where its rows begin, shift and mask, and the queries' digits. they stay in registers, if they can
    constexpr uint32_t KEPT = N_EACH ? N_EACH : 2;
    uint32_t           at[KEPT], shift[KEPT], mask[KEPT], digits[KEPT / 2][2];
    const auto         take = [&](uint32_t e, uint32_t to) {
        const uint32_t w       = e * 4 + t;
        at[to]                 = p.form.quad[w] * 128;
        shift[to]              = p.form.shift[w];
        mask[to]               = p.form.mask[w];
        digits[to / 2][to % 2] = m.words[w * COLUMNS + g];
    };
    const auto load = [&](uint32_t group, uint32_t own, uint32_t (&rows)[4]) {
        const uint64_t  first = ((uint64_t) group * p.n_head_kv + task.head) * p.form.n_nibble * 32;
        const uint8_t * from  = index.codes + first + 4 * g + at[own];
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) {
            rows[r] = *(const uint32_t *) (from + r * 32);
        }
    };

    const uint32_t first = task.split * WARPS + warp, step = task.n_split * WARPS;
    uint32_t       rows[KEPT][4];
#pragma unroll
    for (uint32_t e = 0; e != N_EACH; ++e) {
        take(e, e);
        if (first < n_group) { load(first, e, rows[e]); }
    }
    for (uint32_t group = first; group < n_group; group += step) {
        uint32_t next[KEPT][4]; // read while this one is computed
#pragma unroll
        for (uint32_t e = 0; e != N_EACH; ++e) {
            if (group + step < n_group) { load(group + step, e, next[e]); }
        }
        int sums[4][4] = {}; // [x]
#pragma unroll(N_EACH ? N_EACH / 2 : 1)
        for (uint32_t e = 0; e < each; e += 2) {
            uint32_t a[4][4]; // [x][register]
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                const uint32_t own = N_EACH ? e + i : i;
                if (!N_EACH) {
                    take(e + i, i);
                    load(group, i, rows[i]);
                }
                transpose(rows[own]);
#pragma unroll
                for (uint32_t x = 0; x < 4; ++x) {
                    a[x][2 * i]     = rows[own][x] >> shift[own] & mask[own];
                    a[x][2 * i + 1] = rows[own][x] >> (shift[own] + 4) & mask[own];
                }
            }
#pragma unroll
            for (uint32_t x = 0; x < 4; ++x) {
                multiply(a[x], digits[N_EACH ? e / 2 : 0], m.words + e * 4 * COLUMNS, sums[x]);
            }
        }

        // positions of the lower nibbles are in units 0 and 1 of the group, the others in 2 and 3
        float logits[2][4], top = NOWHERE;
        bool  far[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t u = group * 4 + 2 * i + g / 4;
            far[i]           = u < n_unit && !(bits[u / 32] >> u % 32 & 1);
#pragma unroll
            for (uint32_t x = 0; x < 4; ++x) {
                const float y = (float) (254 * sums[x][2 * i] + sums[x][2 * i + 1]);
                logits[i][x]  = logit(p, base + unit * y);
                if (far[i]) { top = fmaxf(top, logits[i][x]); }
            }
        }
        top = over_lanes(top, most, 4, 16);
        float both = 0;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            float sum = 0;
#pragma unroll
            for (uint32_t x = 0; x < 4; ++x) {
                sum += far[i] ? exp2f(logits[i][x] - top) : 0;
            }
            both += sum;
            sum = over_lanes(sum, add<float>, 4, 8);

            const uint32_t u = group * 4 + 2 * i + g / 4;
            if (g % 4 == 0 && t < task.n && u < n_unit) { lse[u] = sum > 0 ? top + log2f(sum) : NOWHERE; }
        }
        if (both > 0) { all.add(top, both); }
#pragma unroll
        for (uint32_t e = 0; e != N_EACH; ++e) {
#pragma unroll
            for (uint32_t r = 0; r < 4; ++r) {
                rows[e][r] = next[e][r];
            }
        }
    }
}

// the sums of a block's lanes, together
static __device__ void put_parts(const kvf_gpu_layer & p, const score_task & task, sum_of_powers all, score_memory & m) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float    top  = over_lanes(all.top, most, 4, 16);
    const float    sum  = over_lanes(all.sum * exp2f(all.top - top), add<float>, 4, 16);
    if (lane < HEADS) {
        m.parts[warp][lane][0] = top;
        m.parts[warp][lane][1] = sum;
    }
    __syncthreads();
    if (threadIdx.x < task.n) {
        sum_of_powers both;
        for (uint32_t w = 0; w < WARPS; ++w) {
            both.add(m.parts[w][threadIdx.x][0], m.parts[w][threadIdx.x][1]);
        }
        const uint64_t at = ((uint64_t) task.asker * p.n_head + task.first + threadIdx.x) * KVF_GPU_PARTS + task.split;
        ((float2 *) p.parts)[at] = {both.top, both.sum};
    }
    __syncthreads();
}

static __device__ uint32_t n_tile(const kvf_gpu_layer & p) { return (p.n_head / p.n_head_kv + HEADS - 1) / HEADS; }

// how many blocks share a task
static __device__ uint32_t n_split(const kvf_gpu_layer & p, const int32_t * ask) {
    return min(KVF_GPU_PARTS, max(1u, gridDim.x / (ask[kvf_gpu_ask::N_ASKER] * p.n_head_kv * n_tile(p))));
}

static __device__ void score(const kvf_gpu_layer & p, const char * q, uint64_t q_head, uint64_t q_row, const int32_t * ask) {
    auto &         m     = shared<score_memory>();
    float * const  mine  = &shared<float>(sizeof(score_memory)); // [d][HEADS]
    float * const  x     = mine + HEADS * p.d;
    const uint32_t n_of  = n_split(p, ask), n_each = p.n_head_kv * n_tile(p), n_task = ask[kvf_gpu_ask::N_ASKER] * n_each;
    const uint32_t share = p.n_head / p.n_head_kv;

    for (uint32_t i = blockIdx.x / n_of; i < n_task; i += gridDim.x / n_of) {
        const uint32_t  tile = i % n_each, head = tile / n_tile(p), at = tile % n_tile(p) * HEADS;
        const int32_t * who = asker_of(ask, i / n_each);
        const int32_t * s   = seq_of(p, ask, who[kvf_gpu_ask::SEQ]);
        if (!has_turn(p, s)) { continue; }

        const score_task task = {i / n_each, head, head * share + at, min(HEADS, share - at), blockIdx.x % n_of, n_of, who, s};
        for (uint32_t j = threadIdx.x; j < HEADS * p.d; j += THREADS) {
            const uint32_t h = j / p.d, e = j % p.d;
            const char *   from = q + (task.first + h) * q_head + who[kvf_gpu_ask::ROW] * q_row;
            mine[e * HEADS + h] = h < task.n ? ((const float *) from)[e] : 0;
        }
        __syncthreads();

        const auto &  index = p.index[who[kvf_gpu_ask::SEQ]];
        sum_of_powers all;
        switch (p.type_k) {
            case GGML_TYPE_F16: score_near<GGML_TYPE_F16>(p, task, mine, all); break;
            case GGML_TYPE_Q8_0: score_near<GGML_TYPE_Q8_0>(p, task, mine, all); break;
            default: score_near<-1>(p, task, mine, all);
        }
        prepare(p, index, task, mine, x, x + HEADS * p.form.n_comp, m);
        if (p.form.n_each == 4) { // keys of 64 or 128 values, by default
            score_far<4>(p, index, task, m, all);
        } else {
            score_far<0>(p, index, task, m, all);
        }
        put_parts(p, task, all, m);
    }
}

static constexpr uint32_t ADDED = 64, ADDERS = THREADS / ADDED; // units of a block at a time, and threads of each

// each unit's shares, summed over heads and askers
static __device__ void add_shares(const kvf_gpu_layer & p, const int32_t * ask) {
    auto &         sums    = shared<float[ADDERS][ADDED]>();
    float * const  total   = &shared<float>(sizeof(sums)); // [n_asker][n_head]
    const uint32_t n_asker = ask[kvf_gpu_ask::N_ASKER], n_part = n_split(p, ask), tid = threadIdx.x;

    for (uint32_t i = tid / 8; i < GGML_PAD(n_asker * p.n_head, 4); i += THREADS / 8) { // whole warps
        const bool     is   = i < n_asker * p.n_head;
        const float2 * part = (const float2 *) p.parts + (uint64_t) (is ? i : 0) * KVF_GPU_PARTS;
        float          top  = NOWHERE, sum = 0;
        for (uint32_t j = tid % 8; j < n_part; j += 8) {
            top = fmaxf(top, part[j].x);
        }
        top = over_lanes(top, most, 1, 4);
        for (uint32_t j = tid % 8; j < n_part; j += 8) {
            sum += part[j].y * exp2f(part[j].x - top);
        }
        sum = over_lanes(sum, add<float>, 1, 4);
        if (is && tid % 8 == 0) { total[i] = sum > 0 ? top + log2f(sum) : 0; }
    }
    __syncthreads();

    for (uint32_t seq = 0; seq < p.ask.n_seq; ++seq) {
        const int32_t * s = seq_of(p, ask, seq);
        if (!has_turn(p, s)) { continue; }
        const uint32_t n_unit = s[kvf_gpu_ask::N_UNIT];
        for (uint32_t first = blockIdx.x * ADDED; first < n_unit; first += gridDim.x * ADDED) {
            const uint32_t u = first + tid % ADDED;

            float sum = 0;
            for (uint32_t a = 0; a < n_asker && u < n_unit; ++a) {
                if (asker_of(ask, a)[kvf_gpu_ask::SEQ] != (int32_t) seq) { continue; }
                const float * lse = p.lse + (uint64_t) a * p.n_head * p.ask.n_unit + u;
#pragma unroll 4
                for (uint32_t h = tid / ADDED; h < p.n_head; h += ADDERS) {
                    sum += exp2f(lse[(uint64_t) h * p.ask.n_unit] - total[a * p.n_head + h]);
                }
            }
            sums[tid / ADDED][tid % ADDED] = sum;
            __syncthreads();
            if (tid < ADDED && u < n_unit) {
                for (uint32_t i = 1; i < ADDERS; ++i) {
                    sum += sums[i][tid];
                }
                p.score[(uint64_t) seq * p.ask.n_unit + u] = sum;
            }
            __syncthreads();
        }
    }
}

//
// choose
//

struct choose_memory {
    uint32_t hist[2048];
    uint32_t n, bin, above, equal;
    float    least;
    uint32_t taken[1]; // a bit a unit
};

// the k-th largest of n keys, of which none is 0; n >= k. above: how many are larger. equal: how many are the same
template <typename F> static __device__ uint32_t kth(const F & key, uint32_t n, uint32_t k, choose_memory & m, uint32_t & above,
        uint32_t & equal) {
    uint32_t prefix = 0, mask = 0;
    above = 0;
    for (const uint32_t shift : {21, 10, 0}) {
        const uint32_t all = shift ? 2047 : 1023;
        for (uint32_t i = threadIdx.x; i < 2048; i += THREADS) {
            m.hist[i] = 0;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
            const uint32_t x = key(i);
            if ((x & mask) == prefix) { atomicAdd(&m.hist[x >> shift & all], 1); }
        }
        __syncthreads();
        if (threadIdx.x < 32) { // a lane's 64 bins, from the top
            const uint32_t top = 2048 - 64 * threadIdx.x;
            uint32_t       sum = 0;
            for (uint32_t i = 1; i <= 64; ++i) {
                sum += m.hist[top - i];
            }
            uint32_t before = above + sum;
            for (int i = 1; i < 32; i *= 2) {
                const uint32_t x = __shfl_up_sync(~0u, before, i);
                if ((int) threadIdx.x >= i) { before += x - above; }
            }
            before -= sum;
            for (uint32_t i = 1; i <= 64; ++i) {
                const uint32_t x = m.hist[top - i];
                if (before < k && before + x >= k) {
                    m.bin   = top - i;
                    m.above = before;
                    m.equal = x;
                }
                before += x;
            }
        }
        __syncthreads();
        above = m.above;
        equal = m.equal;
        prefix |= m.bin << shift;
        mask |= all << shift;
        __syncthreads();
    }
    return prefix;
}

// those of n pairs for which it is true, in no order. returns how many
template <typename F, typename T>
static __device__ uint32_t gather(const F & pair, uint32_t n, kvf_pair * to, const T & is, choose_memory & m) {
    __syncthreads();
    if (threadIdx.x == 0) { m.n = 0; }
    __syncthreads();
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        const kvf_pair x = pair(i);
        if (is(x)) { to[atomicAdd(&m.n, 1)] = x; }
    }
    __syncthreads();
    return m.n;
}

// the k largest keys, 0 not being one, from the largest on; of equals the largest first. room: for 2*n pairs. returns how many
template <typename F>
static __device__ uint32_t largest(const F & key, uint32_t n, uint32_t k, kvf_pair * room, kvf_pair * to, choose_memory & m) {
    constexpr uint32_t FEW = 512; // that are sorted with no choice before

    kvf_pair * list  = room;
    uint32_t   found = gather([&](uint32_t i) { return kvf_pair{key(i), i}; }, n, list, [](const kvf_pair & x) { return x.key > 0; }, m);
    if (found > max(k, FEW)) {
        const auto at = [&](uint32_t i) { return list[i]; };
        uint32_t   above, equal, more, same, least = 0;
        const uint32_t bound = kth([&](uint32_t i) { return list[i].key; }, found, k, m, above, equal);
        kvf_pair * some = room + n;
        if (above + equal > k) { // of equals the largest
            const auto what = [&](uint32_t i) { return some[i].what + 1; };
            equal           = gather(at, found, some, [&](const kvf_pair & x) { return x.key == bound; }, m);
            least           = kth(what, equal, k - above, m, more, same) - 1;
        }
        found = gather(at, found, some, [&](const kvf_pair & x) { return x.key > bound || (x.key == bound && x.what >= least); }, m);
        list  = some;
    }
    for (uint32_t i = threadIdx.x; i < found; i += THREADS) {
        const kvf_pair mine = list[i];
        uint32_t       rank = 0;
        for (uint32_t j = 0; j < found; ++j) {
            const kvf_pair x = list[j];
            rank += x.key > mine.key || (x.key == mine.key && x.what > mine.what);
        }
        if (rank < k) { to[rank] = mine; }
    }
    __syncthreads();
    return min(found, k);
}

// fill the slots of a sequence that are to be seen, and exchange some of the guests for units that are more attended to
static __device__ void choose(const kvf_gpu_layer & p, const int32_t * s, uint32_t seq) {
    auto &         m      = shared<choose_memory>();
    const uint32_t n_unit = s[kvf_gpu_ask::N_UNIT], n_visible = s[kvf_gpu_ask::N_VISIBLE], tid = threadIdx.x;
    const float *  score  = p.score + (uint64_t) seq * p.ask.n_unit;
    int32_t *      table  = p.index[seq].table;
    int32_t *      moves  = p.moves + (uint64_t) seq * p.n_slot * 2;

    for (uint32_t i = tid; i < (n_unit + 31) / 32; i += THREADS) {
        m.taken[i] = bits_of(p, s)[i];
    }
    if (tid == 0) {
        m.n     = 0;
        m.least = INFINITY;
    }
    __syncthreads();

    float least = INFINITY;
    for (uint32_t slot = tid; slot < p.n_slot; slot += THREADS) {
        const int32_t unit = table[slot];
        if (unit < 0) { continue; }
        if (slot >= n_visible || unit >= (int32_t) n_unit || bits_of(p, s)[unit / 32] >> unit % 32 & 1) {
            table[slot] = -1;
            continue;
        }
        atomicOr(&m.taken[unit / 32], 1u << unit % 32);
        atomicAdd(&m.n, 1);
        least = fminf(least, score[unit]);
    }
    least = -over_lanes(-least, most);
    if (tid % 32 == 0) { atomicMin((int *) &m.least, __float_as_int(least)); } // shares are not negative
    __syncthreads();
    const uint32_t n_free = n_visible - m.n;
    least                 = m.least;

    // a share of nothing counts, too, where a slot is free
    const auto coming = [&](uint32_t u) -> uint32_t {
        const float x = score[u];
        return !(m.taken[u / 32] >> u % 32 & 1) && (n_free || x > least) ? __float_as_uint(x) + 1 : 0;
    };
    kvf_pair * room = p.room + (uint64_t) seq * p.n_room;
    kvf_pair * in   = p.lists + (uint64_t) seq * p.n_slot * 2;
    kvf_pair * out  = in + p.n_slot;

    const uint32_t n_in = largest(coming, n_unit, n_free ? n_free : min(p.n_exchange, p.n_slot), room, in, m);
    const uint32_t top  = n_in ? in[0].key : 0;
    const auto     going = [&](uint32_t slot) -> uint32_t {
        const int32_t unit = table[slot];
        if (n_free) { return unit < 0 ? n_visible - slot : 0; } // the first free slot first
        const uint32_t x = __float_as_uint(score[unit]) + 1;
        return x < top ? ~x : 0;
    };
    const uint32_t n_out = n_in ? largest(going, n_visible, n_in, room, out, m) : 0, n_both = min(n_in, n_out);
    if (tid == 0) { m.n = 0; }
    __syncthreads();
    for (uint32_t i = tid; i < n_both; i += THREADS) {
        if (!n_free && in[i].key <= ~out[i].key) { continue; }
        moves[2 * i]     = out[i].what;
        moves[2 * i + 1] = table[out[i].what] = in[i].what;
        atomicAdd(&m.n, 1);
    }
    __syncthreads();
    if (tid == 0) {
        p.n_moves[seq] = m.n;
        atomicAdd((unsigned long long *) p.n_fetched, m.n);
    }
}

//
// fetch: from records in host memory
//

// a warp copies a piece of a unit's rows
static __device__ void fetch_piece(const kvf_gpu_rows & r, const char * rec, uint32_t part, uint32_t cell, uint64_t from) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t n    = min((uint64_t) kvf_gpu_rows::PIECE, r.size * r.n_run - from);
    if (r.n_run == 1) {
        copy_bytes(r.data + (uint64_t) cell / UNIT * r.size + from, rec + r.offs + part * r.size + from, n, lane, 32);
        return;
    }
    // a value's positions are next to each other
    for (uint64_t i = from / 4 + lane; i < (from + n) / 4; i += 32) {
        const uint64_t run = i / (r.size / 4), word = i % (r.size / 4);
        ((uint32_t *) (r.data + run * r.stride + cell / UNIT * r.size))[word] =
                ((const uint32_t *) (rec + r.offs + run * r.stride_rec + part * r.size))[word];
    }
}

static __device__ void fetch(const kvf_gpu_layer & p, uint32_t seq, const int32_t * blocks) {
    const auto      n_piece = [](const kvf_gpu_rows & r) -> uint32_t {
        return (r.size * r.n_run + kvf_gpu_rows::PIECE - 1) / kvf_gpu_rows::PIECE;
    };
    const uint32_t  each = p.n_chunk / UNIT, n_k = n_piece(p.k), n_both = n_k + n_piece(p.v);
    const uint32_t  n_move = p.n_moves[seq], n_warp = gridDim.x * blockDim.x / 32;
    const int32_t * moves = p.moves + (uint64_t) seq * p.n_slot * 2;
    for (uint32_t i = threadIdx.x / 32 * gridDim.x + blockIdx.x; i < n_move * n_both; i += n_warp) {
        const uint32_t slot = moves[i / n_both * 2], unit = moves[i / n_both * 2 + 1], piece = i % n_both;
        const uint32_t cell = blocks[slot / each] * p.n_chunk + slot % each * UNIT;
        const char *   rec  = p.index[seq].records[unit / each];
        if (piece < n_k) {
            fetch_piece(p.k, rec, unit % each, cell, (uint64_t) piece * kvf_gpu_rows::PIECE);
        } else {
            fetch_piece(p.v, rec, unit % each, cell, (uint64_t) (piece - n_k) * kvf_gpu_rows::PIECE);
        }
    }
}

static __global__ void kvf_fetch(const __grid_constant__ kvf_gpu_layer p, uint32_t seq, const int32_t * blocks) {
    fetch(p, seq, blocks);
}

//
// the node
//

// wait until all blocks of the grid are here
static __device__ void meet(const kvf_gpu_layer & p) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const unsigned long long n = gridDim.x, goal = (atomicAdd(p.n_arrived, 1ull) / n + 1) * n;
        while (*(volatile unsigned long long *) p.n_arrived < goal) {
            __nanosleep(20);
        }
        __threadfence();
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS, 1)
        kvf_node(const __grid_constant__ kvf_gpu_layer p, const char * q, uint64_t q_head, uint64_t q_row, const int32_t * ask) {
    bool any = false;
    for (uint32_t seq = 0; seq < p.ask.n_seq; ++seq) {
        any = any || has_turn(p, seq_of(p, ask, seq));
    }
    if (!any) { return; }

    score(p, q, q_head, q_row, ask);
    meet(p);
    add_shares(p, ask);
    meet(p);
    for (uint32_t seq = blockIdx.x; seq < p.ask.n_seq; seq += gridDim.x) {
        const int32_t * s = seq_of(p, ask, seq);
        if (has_turn(p, s)) {
            choose(p, s, seq);
        } else if (threadIdx.x == 0) {
            p.n_moves[seq] = 0;
        }
        __syncthreads();
    }
    meet(p);
    for (uint32_t seq = 0; seq < p.ask.n_seq; ++seq) {
        fetch(p, seq, blocks_of(seq_of(p, ask, seq)));
    }
}

// what a block shares, at most
static size_t shared_size(const kvf_gpu_layer & p) {
    const uint32_t n_row = std::max(1u, THREADS / p.form.n_comp);
    const size_t   score = sizeof(score_memory) + HEADS * (p.d + p.form.n_comp * (1 + n_row)) * sizeof(float);
    const size_t   add = sizeof(float[ADDERS][ADDED]) + p.ask.n_asker * p.n_head * sizeof(float), choose = sizeof(choose_memory) + p.ask.n_unit / 8;
    return GGML_PAD(std::max({score, add, choose}), 16);
}

// dst->src: scratch, q [d, n_head, n_tokens], the ask. the layer is the node's userdata
void kvf_choose_node(ggml_tensor * dst, void * on) {
    const auto * params = (const ggml_custom_op_params *) dst->op_params;
    const auto & p      = *(const kvf_gpu_layer *) params->userdata;
    const auto * q      = dst->src[1];
    launch(kvf_node, dim3(ggml_cuda_info().devices[ggml_cuda_get_device()].nsm), dim3(THREADS), shared_size(p),
            (cudaStream_t) on, true, p, (const char *) q->data, (uint64_t) q->nb[1], (uint64_t) q->nb[2],
            (const int32_t *) dst->src[2]->data);
}

void kvf_fetch_units(const kvf_gpu_layer & l, uint32_t seq, const int32_t * blocks, cudaStream_t stream) {
    launch(kvf_fetch, dim3(64), dim3(256), 0, stream, false, l, seq, blocks);
}
