// The nodes of kvflash-fresh.h on a GPU, a part of the backend's library: each layer scores all units by its queries, chooses
// and fetches, with no word from the host. What changes between two tokens lies in the device's memory, so that a CUDA graph
// may hold these launches.

#include "kvflash-gpu.h"

#include "ggml-cuda/common.cuh"

#include <cmath>
#include <mutex>

static constexpr uint32_t UNIT = 16, GROUP = 64, HEADS = 8; // HEADS: queries that share a pass over the codes
static constexpr float    LOG2E = 1.44269504f, NOWHERE = -1e30f;

static constexpr int SCORE_THREADS = 256, SCORE_WARPS = SCORE_THREADS / 32, CHOOSE_THREADS = 1024;
static constexpr int NEAR_BLOCKS = 8, MOST_LIST = 1024;

//
// the ask
//

static __device__ const int32_t * asker_of(const kvf_gpu_layer & p, const int32_t * ask, uint32_t i) {
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
// keys, of all types of a cache
//

static __device__ float key_value(int32_t type, const char * row, uint32_t i) {
    const uint32_t b = i / 32, j = i % 32, low = j % 16, bits = j < 16 ? 0 : 4;
    switch (type) {
        case GGML_TYPE_F32: return ((const float *) row)[i];
        case GGML_TYPE_F16: return __half2float(((const half *) row)[i]);
        case GGML_TYPE_BF16: return __uint_as_float((uint32_t) ((const uint16_t *) row)[i] << 16);
        case GGML_TYPE_Q8_0: {
            const auto & x = ((const block_q8_0 *) row)[b];
            return __half2float(x.d) * x.qs[j];
        }
        case GGML_TYPE_Q4_0: {
            const auto & x = ((const block_q4_0 *) row)[b];
            return __half2float(x.d) * ((int) (x.qs[low] >> bits & 15) - 8);
        }
        case GGML_TYPE_Q4_1: {
            const auto & x = ((const block_q4_1 *) row)[b];
            return __low2float(x.dm) * (x.qs[low] >> bits & 15) + __high2float(x.dm);
        }
        case GGML_TYPE_Q5_0: {
            const auto & x  = ((const block_q5_0 *) row)[b];
            const int    hi = x.qh[j / 8] >> j % 8 & 1;
            return __half2float(x.d) * ((int) (x.qs[low] >> bits & 15) + 16 * hi - 16);
        }
        case GGML_TYPE_Q5_1: {
            const auto & x  = ((const block_q5_1 *) row)[b];
            const int    hi = x.qh[j / 8] >> j % 8 & 1;
            return __low2float(x.dm) * ((int) (x.qs[low] >> bits & 15) + 16 * hi) + __high2float(x.dm);
        }
        case GGML_TYPE_IQ4_NL: {
            const auto & x = ((const block_iq4_nl *) row)[b];
            return __half2float(x.d) * kvalues_iq4nl[x.qs[low] >> bits & 15];
        }
    }
    return 0;
}

// n bytes, by n_thread threads
static __device__ void copy_bytes(char * dst, const char * src, uint64_t n, uint32_t thread, uint32_t n_thread) {
    const uint64_t all = (uint64_t) dst | (uint64_t) src | n;
    if (all % 16 == 0) {
#pragma unroll 4
        for (uint64_t i = thread; i < n / 16; i += n_thread) {
            ((uint4 *) dst)[i] = ((const uint4 *) src)[i];
        }
    } else if (all % 4 == 0) {
        for (uint64_t i = thread; i < n / 4; i += n_thread) {
            ((uint32_t *) dst)[i] = ((const uint32_t *) src)[i];
        }
    } else {
        for (uint64_t i = thread; i < n; i += n_thread) {
            dst[i] = src[i];
        }
    }
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
    __device__ float log() const { return sum > 0 ? top + log2f(sum) : NOWHERE; }
};

// a logit, of base 2
static __device__ float logit(const kvf_gpu_layer & p, float x) {
    x *= p.scale;
    return LOG2E * (p.cap > 0 ? p.cap * tanhf(x / p.cap) : x);
}

static __device__ float warp_sum(float x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        x += __shfl_xor_sync(~0u, x, i);
    }
    return x;
}

static __device__ float warp_most(float x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    }
    return x;
}

// which component has these bits of a nibble; -1: none
static __device__ int component(const kvf_gpu_form & f, uint32_t nibble, uint32_t shift) {
    if (nibble < f.n_four) { return shift ? -1 : (int) nibble; }
    nibble -= f.n_four;
    if (nibble < f.n_two / 2) { return shift % 2 ? -1 : (int) (f.n_four + 2 * nibble + shift / 2); }
    nibble -= f.n_two / 2;
    return nibble < f.n_one / 4 ? (int) (f.n_four + f.n_two + 4 * nibble + shift) : -1;
}

static __device__ float middle(const kvf_gpu_form & f, uint32_t comp) {
    return comp < f.n_four ? 7.5f : comp < f.n_four + f.n_two ? 1.5f : 0.5f;
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

// d += a*b. a: 16 positions and 32 codes; b: 32 codes and 8 heads. words: [4][HEADS] of the first 16 codes, then the others
static __device__ void multiply(const uint32_t (&a)[4], const uint32_t (&b)[2], const uint32_t * words, int (&d)[4]) {
#if __CUDA_ARCH__ >= 800 && !defined(KVF_NO_MMA)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const uint32_t t = threadIdx.x % 4;
    for (uint32_t h = 0; h < HEADS; ++h) {
        const int b0 = words[t * HEADS + h], b1 = words[(4 + t) * HEADS + h];
        int       low  = __dp4a((int) a[2], b1, __dp4a((int) a[0], b0, 0));
        int       high = __dp4a((int) a[3], b1, __dp4a((int) a[1], b0, 0));
        for (int i = 1; i < 4; i *= 2) {
            low += __shfl_xor_sync(~0u, low, i);
            high += __shfl_xor_sync(~0u, high, i);
        }
        if (h / 2 == t) {
            d[h % 2] += low;
            d[h % 2 + 2] += high;
        }
    }
#endif
}

struct score_memory {
    float    parts[SCORE_WARPS][HEADS][2];
    float    base[HEADS], unit[HEADS];
    uint32_t words[2][kvf_gpu_form::MOST * HEADS]; // of the queries, upper and lower digits
};

// sums += x*y
static __device__ void add_scaled(float (&sums)[HEADS], float x, const float * y) {
#pragma unroll
    for (uint32_t i = 0; i < HEADS; i += 4) {
        const float4 four = *(const float4 *) (y + i);
        sums[i] += x * four.x;
        sums[i + 1] += x * four.y;
        sums[i + 2] += x * four.z;
        sums[i + 3] += x * four.w;
    }
}

// q: [d][HEADS]. the queries' components times their steps, as whole numbers of two digits of base 254
static __device__ void prepare(const kvf_gpu_layer & p, const kvf_gpu_index & index, uint32_t head, uint32_t n_h,
        const float * q, float * x, float * part, score_memory & m) {
    const uint32_t n_comp = p.form.n_comp, n_row = max(1u, blockDim.x / n_comp), tid = threadIdx.x;
    const float *  basis = index.basis + (uint64_t) head * p.d * n_comp;

    for (uint32_t i = tid; i < n_row * n_comp; i += blockDim.x) {
        const uint32_t c = i % n_comp, r = i / n_comp;

        float sums[HEADS] = {};
#pragma unroll 8
        for (uint32_t j = r * p.d / n_row; j < (r + 1) * p.d / n_row; ++j) {
            const float b = basis[(uint64_t) j * n_comp + c];
            add_scaled(sums, b, q + j * HEADS);
        }
#pragma unroll
        for (uint32_t h = 0; h < HEADS; ++h) {
            part[h * n_row * n_comp + i] = sums[h];
        }
    }
    __syncthreads();
    for (uint32_t i = tid; i < HEADS * n_comp; i += blockDim.x) {
        const uint32_t h = i / n_comp, c = i % n_comp;

        float sum = 0;
        for (uint32_t r = 0; r < n_row; ++r) {
            sum += part[(h * n_row + r) * n_comp + c];
        }
        x[i] = sum * index.step[head * n_comp + c];
    }
    __syncthreads();

    const uint32_t h = tid / 32, lane = tid % 32;
    if (h < HEADS) {
        float base = 0, most = 0;
        for (uint32_t j = lane; j < p.d; j += 32) {
            base += q[j * HEADS + h] * index.mean[head * p.d + j];
        }
        for (uint32_t c = lane; c < n_comp; c += 32) {
            base -= x[h * n_comp + c] * middle(p.form, c);
            most = fmaxf(most, fabsf(x[h * n_comp + c]));
        }
        base = warp_sum(base);
        most = warp_most(most);
        if (lane == 0) {
            m.base[h] = base;
            m.unit[h] = h < n_h && most > 0 ? most / (127 * 254 + 127) : 1;
        }
    }
    __syncthreads();
    for (uint32_t i = tid; i < p.form.n_each * 4 * HEADS; i += blockDim.x) {
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
        m.words[0][i] = upper;
        m.words[1][i] = lower;
    }
    __syncthreads();
}

// the parts of a block's warps, together
static __device__ void put_parts(const kvf_gpu_layer & p, score_memory & m, uint32_t asker, uint32_t first, uint32_t n_h) {
    __syncthreads();
    const uint32_t h = threadIdx.x;
    if (h >= n_h) { return; }
    sum_of_powers all;
    for (uint32_t w = 0; w < SCORE_WARPS; ++w) {
        if (m.parts[w][h][1] > 0) { all.add(m.parts[w][h][0], m.parts[w][h][1]); }
    }
    float * dst = p.parts + (((uint64_t) asker * p.n_head + first + h) * KVF_GPU_PARTS + blockIdx.x) * 2;
    dst[0]      = all.top;
    dst[1]      = all.sum;
}

// the keys of common cells as they are. q: [d][HEADS]. a warp takes eight positions, four lanes each
static __device__ void score_near(const kvf_gpu_layer & p, const int32_t * s, int32_t pos, uint32_t head, const float * q,
        score_memory & m, uint32_t block) {
    constexpr uint32_t PIECE = 8;

    const uint32_t  warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_piece = p.n_chunk / PIECE;
    const int32_t * common = common_of(p, s);

    sum_of_powers all[HEADS];
    for (uint32_t i = block * SCORE_WARPS + warp; i < s[kvf_gpu_ask::N_COMMON] * n_piece; i += NEAR_BLOCKS * SCORE_WARPS) {
        const int32_t * c  = common + i / n_piece * kvf_gpu_ask::LEN_COMMON;
        const int32_t   j  = i % n_piece * PIECE + lane / 4;
        const bool      is = j < c[kvf_gpu_ask::N] && c[kvf_gpu_ask::FIRST] + j <= pos;
        const char *    row = p.k.data + (uint64_t) (c[kvf_gpu_ask::CELL] + (is ? j : 0)) * p.row_size;

        float sums[HEADS] = {};
#pragma unroll 8
        for (uint32_t e = lane % 4; e < p.d; e += 4) {
            add_scaled(sums, key_value(p.type_k, row, head * p.d + e), q + e * HEADS);
        }
#pragma unroll
        for (uint32_t h = 0; h < HEADS; ++h) {
            float x = sums[h] + __shfl_xor_sync(~0u, sums[h], 1);
            x += __shfl_xor_sync(~0u, x, 2);
            if (is) { all[h].add(logit(p, x)); }
        }
    }
#pragma unroll
    for (uint32_t h = 0; h < HEADS; ++h) {
        const float top = warp_most(all[h].top), sum = warp_sum(all[h].sum * exp2f(all[h].top - top)) / 4;
        if (lane == 0) {
            m.parts[warp][h][0] = top;
            m.parts[warp][h][1] = sum;
        }
    }
}

// A warp takes a group of 64 positions at a time. Lane 4*g + t has four nibbles of positions 4*g + x and 32 + 4*g + x, x = 0
// ... 3, which are two rows of the product of each x; and of what comes out, heads 2*t and 2*t + 1 of the same positions.
// N_EACH: words of a lane, 0: as many as there are
template <uint32_t N_EACH>
static __device__ void score_far(const kvf_gpu_layer & p, const kvf_gpu_index & index, const int32_t * s, uint32_t asker,
        uint32_t head, uint32_t first, uint32_t n_h, uint32_t n_split, score_memory & m) {
    const uint32_t   warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t   n_unit = s[kvf_gpu_ask::N_UNIT], n_group = (n_unit + 3) / 4;
    const uint32_t * bits = bits_of(p, s);

    const float base[2] = {m.base[2 * t], m.base[2 * t + 1]}, unit[2] = {m.unit[2 * t], m.unit[2 * t + 1]};

    // of each word: where its rows begin, shift and mask, and the queries' digits. they stay in registers, if they can
    constexpr uint32_t KEPT = N_EACH ? N_EACH : 1;
    uint32_t           at[KEPT], shift[KEPT], mask[KEPT], digits[KEPT / 2 + 1][2][2];
    const auto         take = [&](uint32_t e, uint32_t to) {
        const uint32_t w = e * 4 + t;
        at[to]           = p.form.quad[w] * 128;
        shift[to]        = p.form.shift[w];
        mask[to]         = p.form.mask[w];
        for (uint32_t i = 0; i < 2; ++i) {
            digits[to / 2][i][e % 2] = m.words[i][w * HEADS + g];
        }
    };
#pragma unroll
    for (uint32_t e = 0; e != N_EACH; ++e) {
        take(e, e);
    }

    sum_of_powers all[2];
    for (uint32_t group = blockIdx.x * SCORE_WARPS + warp; group < n_group; group += n_split * SCORE_WARPS) {
        const uint8_t * codes = index.codes + ((uint64_t) group * p.n_head_kv + head) * p.form.n_nibble * 32 + 4 * g;

        int sums[2][4][4] = {};
#pragma unroll(N_EACH ? N_EACH / 2 : 1)
        for (uint32_t e = 0; e < (N_EACH ? N_EACH : p.form.n_each); e += 2) {
            uint32_t a[4][4]; // [x][register]
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                const uint32_t own = N_EACH ? e + i : 0;
                if (!N_EACH) { take(e + i, 0); }
                uint32_t rows[4];
#pragma unroll
                for (uint32_t r = 0; r < 4; ++r) {
                    rows[r] = *(const uint32_t *) (codes + at[own] + r * 32);
                }
                transpose(rows);
#pragma unroll
                for (uint32_t x = 0; x < 4; ++x) {
                    a[x][2 * i]     = rows[x] >> shift[own] & mask[own];
                    a[x][2 * i + 1] = rows[x] >> (shift[own] + 4) & mask[own];
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
#pragma unroll
                for (uint32_t x = 0; x < 4; ++x) {
                    multiply(a[x], digits[N_EACH ? e / 2 : 0][i], m.words[i] + e * 4 * HEADS, sums[i][x]);
                }
            }
        }

        // positions of the lower nibbles are in units 0 and 1 of the group, the others in 2 and 3
        const uint32_t units[2] = {group * 4 + g / 4, group * 4 + 2 + g / 4};
        bool           far[2];
        for (uint32_t i = 0; i < 2; ++i) {
            far[i] = units[i] < n_unit && !(bits[units[i] / 32] >> units[i] % 32 & 1);
        }
        float top[2] = {NOWHERE, NOWHERE}, logits[2][2][4]; // [head][unit]
#pragma unroll
        for (uint32_t c = 0; c < 2; ++c) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
#pragma unroll
                for (uint32_t x = 0; x < 4; ++x) {
                    const float y   = 254.0f * sums[0][x][2 * i + c] + sums[1][x][2 * i + c];
                    logits[c][i][x] = far[i] ? logit(p, base[c] + unit[c] * y) : NOWHERE;
                    top[c]          = fmaxf(top[c], logits[c][i][x]);
                }
            }
#pragma unroll
            for (int i = 4; i < 32; i *= 2) {
                top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], i));
            }
            float both = 0;
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                float sum = 0;
#pragma unroll
                for (uint32_t x = 0; x < 4; ++x) {
                    sum += far[i] ? exp2f(logits[c][i][x] - top[c]) : 0;
                }
                sum += __shfl_xor_sync(~0u, sum, 4);
                sum += __shfl_xor_sync(~0u, sum, 8);
                both += sum;
                if (g % 4 == 0 && 2 * t + c < n_h && units[i] < n_unit) {
                    p.lse[((uint64_t) asker * p.n_head + first + 2 * t + c) * p.ask.n_unit + units[i]] =
                            sum > 0 ? top[c] + log2f(sum) : NOWHERE;
                }
            }
            both += __shfl_xor_sync(~0u, both, 16);
            if (both > 0) { all[c].add(top[c], both); }
        }
    }
    if (g == 0) {
        for (uint32_t c = 0; c < 2; ++c) {
            m.parts[warp][2 * t + c][0] = all[c].top;
            m.parts[warp][2 * t + c][1] = all[c].sum;
        }
    }
}

// grid: n_split blocks of units and then NEAR_BLOCKS of common cells; heads of keys, by 8 queries; askers
static __global__ void __launch_bounds__(SCORE_THREADS)
        kvf_score(const __grid_constant__ kvf_gpu_layer p, const char * q, uint64_t q_head, uint64_t q_row, const int32_t * ask) {
    extern __shared__ float memory[];
    __shared__ score_memory m;

    const uint32_t asker = blockIdx.z, n_split = gridDim.x - NEAR_BLOCKS;
    if (asker >= ask[kvf_gpu_ask::N_ASKER]) { return; }

    const int32_t * who = asker_of(p, ask, asker);
    const int32_t * s   = seq_of(p, ask, who[kvf_gpu_ask::SEQ]);
    if (!has_turn(p, s)) { return; }

    const uint32_t n_share = p.n_head / p.n_head_kv, n_tile = (n_share + HEADS - 1) / HEADS;
    const uint32_t head = blockIdx.y / n_tile, at = blockIdx.y % n_tile * HEADS;
    const uint32_t first = head * n_share + at, n_h = min(HEADS, n_share - at);

    float * mine = memory; // [d][HEADS]
    for (uint32_t i = threadIdx.x; i < HEADS * p.d; i += blockDim.x) {
        const uint32_t h = i / p.d, e = i % p.d;
        mine[e * HEADS + h] =
                h < n_h ? *(const float *) (q + (first + h) * q_head + who[kvf_gpu_ask::ROW] * q_row + e * 4) : 0;
    }
    __syncthreads();

    if (blockIdx.x >= n_split) {
        score_near(p, s, who[kvf_gpu_ask::POS], head, mine, m, blockIdx.x - n_split);
    } else {
        const auto & index = p.index[who[kvf_gpu_ask::SEQ]];
        float *      x     = mine + HEADS * p.d;
        prepare(p, index, head, n_h, mine, x, x + HEADS * p.form.n_comp, m);
        if (p.form.n_each == 4) { // keys of 64 or 128 values, by default
            score_far<4>(p, index, s, asker, head, first, n_h, n_split, m);
        } else {
            score_far<0>(p, index, s, asker, head, first, n_h, n_split, m);
        }
    }
    put_parts(p, m, asker, first, n_h);
}

// each unit's shares, summed over heads and askers. grid: units; sequences
static __global__ void kvf_add(const __grid_constant__ kvf_gpu_layer p, const int32_t * ask, uint32_t n_part) {
    extern __shared__ float total[]; // [n_asker][n_head]

    const uint32_t  seq = blockIdx.y, u = blockIdx.x * blockDim.x + threadIdx.x;
    const int32_t * s   = seq_of(p, ask, seq);
    const uint32_t  n_unit = s[kvf_gpu_ask::N_UNIT], n_asker = ask[kvf_gpu_ask::N_ASKER];
    if (!has_turn(p, s) || blockIdx.x * blockDim.x >= n_unit) { return; }

    for (uint32_t i = threadIdx.x / 8; i < GGML_PAD(n_asker * p.n_head, 4); i += blockDim.x / 8) { // whole warps
        const bool     is   = i < n_asker * p.n_head;
        const float2 * part = (const float2 *) p.parts + (uint64_t) (is ? i : 0) * KVF_GPU_PARTS;
        float          top  = NOWHERE, sum = 0;
        for (uint32_t j = threadIdx.x % 8; j < n_part; j += 8) {
            top = fmaxf(top, part[j].x);
        }
        for (int j = 4; j > 0; j /= 2) {
            top = fmaxf(top, __shfl_xor_sync(~0u, top, j));
        }
        for (uint32_t j = threadIdx.x % 8; j < n_part; j += 8) {
            sum += part[j].y * exp2f(part[j].x - top);
        }
        for (int j = 4; j > 0; j /= 2) {
            sum += __shfl_xor_sync(~0u, sum, j);
        }
        if (is && threadIdx.x % 8 == 0) { total[i] = sum > 0 ? top + log2f(sum) : 0; }
    }
    __syncthreads();
    if (u >= n_unit) { return; }

    float score = 0;
    for (uint32_t a = 0; a < n_asker; ++a) {
        if (asker_of(p, ask, a)[kvf_gpu_ask::SEQ] != (int32_t) seq) { continue; }
        const float * lse = p.lse + (uint64_t) a * p.n_head * p.ask.n_unit + u;
#pragma unroll 8
        for (uint32_t h = 0; h < p.n_head; ++h) {
            score += exp2f(lse[(uint64_t) h * p.ask.n_unit] - total[a * p.n_head + h]);
        }
    }
    p.score[(uint64_t) seq * p.ask.n_unit + u] = score;
}

//
// choose
//

struct choose_memory {
    uint32_t hist[2048];
    uint32_t warp[32];
    uint32_t n, n_more, bin, above;
    float    least;
    uint32_t key[2][MOST_LIST], what[2][MOST_LIST];   // of what may come, and of what may go
    uint32_t sorted[2][MOST_LIST], by[2][MOST_LIST];  // the same from the first to come and to go: what, and its key
};

// the k-th largest of n keys, 0 not being one; or 1 if there are fewer
template <typename F> static __device__ uint32_t kth(const F & key, uint32_t n, uint32_t k, choose_memory & m) {
    uint32_t prefix = 0, mask = 0;
    for (const uint32_t shift : {21, 10, 0}) {
        const uint32_t most = shift ? 2047 : 1023;
        for (uint32_t i = threadIdx.x; i < 2048; i += blockDim.x) {
            m.hist[i] = 0;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
            const uint32_t x = key(i);
            if (x && (x & mask) == prefix) { atomicAdd(&m.hist[x >> shift & most], 1); }
        }
        __syncthreads();
        if (threadIdx.x < 32) { // a lane's 64 bins, from the top
            const uint32_t top = 2048 - 64 * threadIdx.x;
            uint32_t       sum = 0;
            for (uint32_t i = 1; i <= 64; ++i) {
                sum += m.hist[top - i];
            }
            uint32_t before = sum;
            for (int i = 1; i < 32; i *= 2) {
                const uint32_t x = __shfl_up_sync(~0u, before, i);
                if ((int) threadIdx.x >= i) { before += x; }
            }
            if (threadIdx.x == 31 && before < k) { m.above = ~0u; }
            before -= sum;
            for (uint32_t i = 1; i <= 64; ++i) {
                const uint32_t x = m.hist[top - i];
                if (before < k && before + x >= k) {
                    m.bin   = top - i;
                    m.above = before;
                }
                before += x;
            }
        }
        __syncthreads();
        const uint32_t above = m.above, bin = m.bin;
        __syncthreads();
        if (above == ~0u) { return 1; }
        k -= above;
        prefix |= bin << shift;
        mask |= most << shift;
    }
    return max(prefix, 1u);
}

// n: at most MOST_LIST. from the largest key on; of equals the largest first
static __device__ void sort(choose_memory & m, uint32_t list, uint32_t n) {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        const uint32_t key = m.key[list][i], what = m.what[list][i];

        uint32_t rank = 0;
        for (uint32_t j = 0; j < n; ++j) {
            rank += m.key[list][j] > key || (m.key[list][j] == key && m.what[list][j] > what);
        }
        m.sorted[list][rank] = what;
        m.by[list][rank]     = key;
    }
    __syncthreads();
}

// the k (MOST_LIST at most) largest keys, sorted. returns how many there are
template <typename F> static __device__ uint32_t largest(const F & key, uint32_t n, uint32_t k, choose_memory & m, uint32_t list) {
    uint32_t least = 1;
    for (uint32_t pass = 0;; ++pass) {
        if (threadIdx.x == 0) { m.n = 0; }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
            const uint32_t x = key(i);
            if (x < least) { continue; }
            const uint32_t at = atomicAdd(&m.n, 1);
            if (at < MOST_LIST) {
                m.key[list][at]  = x;
                m.what[list][at] = i;
            }
        }
        __syncthreads();
        if (m.n <= MOST_LIST || pass == 1) { break; } // that many equal ones: any of them
        __syncthreads();
        least = kth(key, n, k, m);
    }
    const uint32_t found = min(m.n, (uint32_t) MOST_LIST);
    sort(m, list, found);
    return min(found, k);
}

// a block is a sequence
static __global__ void __launch_bounds__(CHOOSE_THREADS) kvf_choose(const __grid_constant__ kvf_gpu_layer p, const int32_t * ask) {
    extern __shared__ uint32_t taken[]; // a bit a unit
    __shared__ choose_memory   m;

    const uint32_t  seq = blockIdx.x, tid = threadIdx.x;
    const int32_t * s   = seq_of(p, ask, seq);
    if (!has_turn(p, s)) {
        if (tid == 0) { p.n_moves[seq] = 0; }
        return;
    }
    const uint32_t n_unit = s[kvf_gpu_ask::N_UNIT], n_visible = s[kvf_gpu_ask::N_VISIBLE];
    const float *  score = p.score + (uint64_t) seq * p.ask.n_unit;
    int32_t *      table = p.index[seq].table;
    int32_t *      moves = p.moves + (uint64_t) seq * p.n_slot * 2;

    for (uint32_t i = tid; i < (n_unit + 31) / 32; i += blockDim.x) {
        taken[i] = bits_of(p, s)[i];
    }
    if (tid == 0) {
        m.n     = 0;
        m.least = INFINITY;
    }
    __syncthreads();

    float least = INFINITY;
    for (uint32_t slot = tid; slot < p.n_slot; slot += blockDim.x) {
        const int32_t unit = table[slot];
        if (unit < 0) { continue; }
        if (slot >= n_visible || unit >= (int32_t) n_unit || bits_of(p, s)[unit / 32] >> unit % 32 & 1) {
            table[slot] = -1;
            continue;
        }
        atomicOr(&taken[unit / 32], 1u << unit % 32);
        atomicAdd(&m.n, 1);
        least = fminf(least, score[unit]);
    }
    least = -warp_most(-least);
    if (tid % 32 == 0) { atomicMin((int *) &m.least, __float_as_int(least)); } // shares are not negative
    __syncthreads();
    const uint32_t n_free = n_visible - m.n;
    least                 = m.least;
    __syncthreads();

    // 0: not one that may come. a share of nothing counts, too, where a slot is free
    const auto coming = [&](uint32_t u) -> uint32_t {
        if (taken[u / 32] >> u % 32 & 1) { return 0; }
        const float x = score[u];
        return n_free || x > least ? __float_as_uint(x) + 1 : 0;
    };
    if (n_free) { // the best come, in any order
        const uint32_t bound = kth(coming, n_unit, n_free, m);
        int32_t *      slots = p.spare + (uint64_t) seq * 2 * p.n_slot;
        int32_t *      units = slots + p.n_slot;
        if (tid == 0) { m.n = m.n_more = 0; }
        __syncthreads();
        for (uint32_t u = tid; u < n_unit; u += blockDim.x) {
            if (coming(u) > bound) { units[atomicAdd(&m.n, 1)] = u; }
        }
        for (uint32_t slot = tid; slot < n_visible; slot += blockDim.x) {
            if (table[slot] < 0) { slots[atomicAdd(&m.n_more, 1)] = slot; }
        }
        __syncthreads();
        for (uint32_t u = n_unit - 1 - tid; u < n_unit; u -= blockDim.x) { // as many equal ones as there is room for
            if (coming(u) != bound) { continue; }
            const uint32_t at = atomicAdd(&m.n, 1);
            if (at < n_free) { units[at] = u; }
        }
        __syncthreads();
        const uint32_t n = min(m.n, n_free);
        for (uint32_t i = tid; i < n; i += blockDim.x) {
            moves[2 * i]     = slots[i];
            moves[2 * i + 1] = table[slots[i]] = units[i];
        }
        if (tid == 0) {
            p.n_moves[seq] = n;
            atomicAdd((unsigned long long *) p.n_fetched, n);
        }
        return;
    }

    const uint32_t k = min(p.n_exchange, min(p.n_slot, (uint32_t) MOST_LIST)), n_in = largest(coming, n_unit, k, m, 0);
    const uint32_t most  = n_in ? m.by[0][0] : 0;
    const auto     going = [&](uint32_t slot) -> uint32_t {
        const int32_t unit = table[slot];
        if (unit < 0) { return 0; }
        const uint32_t x = __float_as_uint(score[unit]) + 1;
        return x < most ? ~x : 0;
    };
    const uint32_t n_out = n_in ? largest(going, n_visible, k, m, 1) : 0;
    const uint32_t both  = min(n_in, n_out);

    uint32_t n = 0;
    for (uint32_t i = tid; i < GGML_PAD(both, (uint32_t) CHOOSE_THREADS); i += blockDim.x) {
        const bool goes = i < both && m.by[0][i] > ~m.by[1][i];
        if (goes) {
            moves[2 * i]     = m.sorted[1][i];
            moves[2 * i + 1] = table[m.sorted[1][i]] = m.sorted[0][i];
        }
        n += __syncthreads_count(goes);
    }
    if (tid == 0) {
        p.n_moves[seq] = n;
        atomicAdd((unsigned long long *) p.n_fetched, n);
    }
}

//
// fetch: from records in host memory
//

static constexpr uint32_t PIECES = 8; // of a run, for blocks of their own

static __device__ void fetch_rows(const kvf_gpu_layer & p, const kvf_gpu_rows & r, const char * rec, uint32_t part,
        uint32_t cell, uint32_t piece) {
    if (r.n_run == 1) {
        const uint64_t each = GGML_PAD((r.size + PIECES - 1) / PIECES, 16), from = piece * each;
        if (from >= r.size) { return; }
        copy_bytes(r.data + (uint64_t) cell / UNIT * r.size + from, rec + r.offs + part * r.size + from,
                min(each, r.size - from), threadIdx.x, blockDim.x);
        return;
    }
    // a value's positions are next to each other
    const uint32_t n = r.size / 4; // words
    for (uint32_t i = piece * blockDim.x + threadIdx.x; i < r.n_run * n; i += PIECES * blockDim.x) {
        const uint32_t run = i / n, word = i % n;
        ((uint32_t *) (r.data + run * r.stride + cell / UNIT * r.size))[word] =
                ((const uint32_t *) (rec + r.offs + run * r.stride_rec + part * r.size))[word];
    }
}

static __device__ void fetch(const kvf_gpu_layer & p, uint32_t seq, const int32_t * blocks) {
    const uint32_t  each  = p.n_chunk / UNIT, n_kind = p.v.n_run ? 2 : 1;
    const int32_t * moves = p.moves + (uint64_t) seq * p.n_slot * 2;
    for (uint32_t i = blockIdx.x; i < p.n_moves[seq] * n_kind * PIECES; i += gridDim.x) {
        const uint32_t move = i / (n_kind * PIECES), kind = i / PIECES % n_kind;
        const uint32_t slot = moves[2 * move], unit = moves[2 * move + 1];
        fetch_rows(p, kind ? p.v : p.k, p.index[seq].records[unit / each], unit % each,
                blocks[slot / each] * p.n_chunk + slot % each * UNIT, i % PIECES);
    }
}

// grid: any number; sequences
static __global__ void kvf_fetch(const __grid_constant__ kvf_gpu_layer p, const int32_t * ask) {
    fetch(p, blockIdx.y, blocks_of(seq_of(p, ask, blockIdx.y)));
}

static __global__ void kvf_fetch_of(const __grid_constant__ kvf_gpu_layer p, uint32_t seq, const int32_t * blocks) {
    fetch(p, seq, blocks);
}

static void check_launch() { CUDA_CHECK(cudaGetLastError()); }

// the node. dst->src: scratch, q [d, n_head, n_tokens], the ask. its userdata is the layer, a part of the node's launch
static void kvf_choose_node(ggml_tensor * dst, void * on) {
    const auto   stream = (cudaStream_t) on;
    const auto   params = (const ggml_custom_op_params *) dst->op_params;
    const auto & p      = *(const kvf_gpu_layer *) params->userdata;
    const auto * q      = dst->src[1];
    const auto * ask    = (const int32_t *) dst->src[2]->data;

    const uint32_t n_share = p.n_head / p.n_head_kv, n_tile = p.n_head_kv * ((n_share + HEADS - 1) / HEADS);
    const uint32_t n_asker = std::min<int64_t>(q->ne[2], p.ask.n_asker);
    const uint32_t most = KVF_GPU_PARTS - NEAR_BLOCKS, n_group = (p.ask.n_unit + 3) / 4;
    const uint32_t n_sm    = ggml_cuda_info().devices[ggml_cuda_get_device()].nsm;
    // all blocks run at once, two a processor
    const uint32_t room    = 2 * n_sm / (n_tile * n_asker), far = room > 2 * NEAR_BLOCKS ? room - NEAR_BLOCKS : NEAR_BLOCKS;
    const uint32_t n_split = std::min({most, far, (n_group + SCORE_WARPS - 1) / SCORE_WARPS});
    const uint32_t n_row   = std::max(1u, SCORE_THREADS / p.form.n_comp);

    const size_t memory = HEADS * (p.d + p.form.n_comp * (1 + n_row)) * sizeof(float);
    if (memory + sizeof(score_memory) > 48 << 10) {
        CUDA_CHECK(cudaFuncSetAttribute(kvf_score, cudaFuncAttributeMaxDynamicSharedMemorySize, memory));
    }
    kvf_score<<<dim3(n_split + NEAR_BLOCKS, n_tile, n_asker), SCORE_THREADS, memory, stream>>>(
            p, (const char *) q->data, q->nb[1], q->nb[2], ask);
    check_launch();
    kvf_add<<<dim3((p.ask.n_unit + 255) / 256, p.ask.n_seq), 256, p.ask.n_asker * p.n_head * sizeof(float), stream>>>(
            p, ask, n_split + NEAR_BLOCKS);
    check_launch();
    kvf_choose<<<p.ask.n_seq, CHOOSE_THREADS, (p.ask.n_unit + 31) / 32 * 4, stream>>>(p, ask);
    check_launch();
    kvf_fetch<<<dim3(n_sm, p.ask.n_seq), 256, 0, stream>>>(p, ask);
    check_launch();
}

//
// the index
//

// a stream of ours for each device
static cudaStream_t stream_on(const void * on) {
    static std::mutex   mutex;
    static cudaStream_t streams[GGML_CUDA_MAX_DEVICES];

    cudaPointerAttributes at;
    CUDA_CHECK(cudaPointerGetAttributes(&at, on));
    ggml_cuda_set_device(at.device);

    const std::lock_guard<std::mutex> lock(mutex);
    if (!streams[at.device]) { CUDA_CHECK(cudaStreamCreateWithFlags(&streams[at.device], cudaStreamNonBlocking)); }
    return streams[at.device];
}

// x: [n][n_value]. grid: positions
static __global__ void kvf_decode(const __grid_constant__ kvf_gpu_keys keys, uint32_t skip, uint32_t every, float * dst) {
    extern __shared__ uint4 row[];

    const uint32_t at = skip + blockIdx.x * every, n = keys.n_head_kv * keys.d;
    copy_bytes((char *) row, keys.records[at / keys.n_chunk] + keys.offs + at % keys.n_chunk * keys.row_size, keys.row_size,
            threadIdx.x, blockDim.x);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        dst[(uint64_t) blockIdx.x * n + i] = key_value(keys.type, (const char *) row, i);
    }
}

// grid: blocks of 256 values
static __global__ void kvf_mean(const float * x, uint32_t n, uint32_t n_value, float * mean) {
    const uint32_t i = blockIdx.x * 32 + threadIdx.x % 32, part = threadIdx.x / 32;
    __shared__ float sums[32][33];

    float sum = 0;
    for (uint32_t t = part; t < n && i < n_value; t += 32) {
        sum += x[(uint64_t) t * n_value + i];
    }
    sums[part][threadIdx.x % 32] = sum;
    __syncthreads();
    if (part == 0 && i < n_value) {
        for (uint32_t j = 1; j < 32; ++j) {
            sum += sums[j][threadIdx.x];
        }
        mean[i] = sum / n;
    }
}

static constexpr uint32_t TILE = 32;

// grid: tiles of rows and of columns of a covariance; heads. 16 x 16 threads, each 2 x 2 values
static __global__ void kvf_cov(const float * x, uint32_t n, uint32_t n_head, uint32_t d, const float * mean, float * cov) {
    __shared__ float a[TILE][TILE + 1], b[TILE][TILE + 1]; // [position][value]

    const uint32_t head = blockIdx.z, tx = threadIdx.x, ty = threadIdx.y, tid = ty * 16 + tx;
    const float *  from = x + head * d;
    mean += head * d;

    float sums[2][2] = {};
    for (uint32_t t0 = 0; t0 < n; t0 += TILE) {
        for (uint32_t i = tid; i < TILE * TILE; i += 256) {
            const uint32_t t = i / TILE, ia = blockIdx.x * TILE + i % TILE, ib = blockIdx.y * TILE + i % TILE;
            const float *  key = from + (uint64_t) (t0 + t) * n_head * d;
            a[t][i % TILE]     = t0 + t < n && ia < d ? key[ia] - mean[ia] : 0;
            b[t][i % TILE]     = t0 + t < n && ib < d ? key[ib] - mean[ib] : 0;
        }
        __syncthreads();
#pragma unroll
        for (uint32_t t = 0; t < TILE; ++t) {
            for (uint32_t i = 0; i < 2; ++i) {
                for (uint32_t j = 0; j < 2; ++j) {
                    sums[i][j] += a[t][ty + 16 * i] * b[t][tx + 16 * j];
                }
            }
        }
        __syncthreads();
    }
    for (uint32_t i = 0; i < 2; ++i) {
        for (uint32_t j = 0; j < 2; ++j) {
            const uint32_t ia = blockIdx.x * TILE + ty + 16 * i, ib = blockIdx.y * TILE + tx + 16 * j;
            if (ia < d && ib < d) { cov[((uint64_t) head * d + ia) * d + ib] = sums[i][j] / n; }
        }
    }
}

// the codes of positions pos ... pos + n, whole units. grid: units; heads. x of a unit in shared memory, and its components
static __global__ void kvf_encode(const float * x, uint32_t pos, uint32_t n_head, uint32_t d,
        const __grid_constant__ kvf_gpu_form f, const __grid_constant__ kvf_gpu_index index) {
    extern __shared__ float keys[]; // [d][UNIT], and then [n_comp][UNIT]

    const uint32_t unit = blockIdx.x, head = blockIdx.y, n_comp = f.n_comp, tid = threadIdx.x;
    float *        comps = keys + d * UNIT;

    for (uint32_t i = tid; i < UNIT * d; i += blockDim.x) {
        const uint32_t t = i / d, j = i % d;
        keys[j * UNIT + t] = x[((uint64_t) (unit * UNIT + t) * n_head + head) * d + j] - index.mean[head * d + j];
    }
    __syncthreads();
    const float * basis = index.basis + (uint64_t) head * d * n_comp;
    for (uint32_t i = tid; i < n_comp * (UNIT / 4); i += blockDim.x) {
        const uint32_t c = i % n_comp, t = i / n_comp * 4;

        float4 sum = {};
        for (uint32_t j = 0; j < d; ++j) {
            const float  b   = basis[(uint64_t) j * n_comp + c];
            const float4 key = *(const float4 *) (keys + j * UNIT + t);
            sum.x += key.x * b;
            sum.y += key.y * b;
            sum.z += key.z * b;
            sum.w += key.w * b;
        }
        *(float4 *) (comps + c * UNIT + t) = sum;
    }
    __syncthreads();

    // a byte has a position and the one that is 32 further on: another unit, which may be written at the same time
    const uint32_t first = pos + unit * UNIT, group = first / GROUP, shift = first % GROUP < 32 ? 0 : 4;
    uint8_t *      codes = index.codes + ((uint64_t) group * n_head + head) * f.n_nibble * 32;
    for (uint32_t i = tid; i < f.n_nibble * (UNIT / 4); i += blockDim.x) {
        const uint32_t nibble = i / (UNIT / 4), t = i % (UNIT / 4) * 4;

        uint32_t word = 0;
        for (uint32_t b = 0; b < 4; ++b) {
            for (uint32_t low = 0; low < 4; ++low) {
                const int c = component(f, nibble, low);
                if (c < 0) { continue; }
                const float mid = middle(f, c), step = index.step[head * n_comp + c];
                const float v = step > 0 ? roundf(comps[c * UNIT + t + b] / step + mid) : mid;
                word |= (uint32_t) fminf(fmaxf(v, 0), 2 * mid) << (8 * b + shift + low);
            }
        }
        uint32_t * dst = (uint32_t *) (codes + nibble * 32 + first % 32 + t);
        atomicAnd(dst, ~(0x0f0f0f0fu << shift));
        atomicOr(dst, word);
    }
}

static void upload(void * dst, const void * src, size_t size) {
    const auto stream = stream_on(dst);
    CUDA_CHECK(cudaMemcpyAsync(dst, src, size, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static void download(void * dst, const void * src, size_t size) {
    const auto stream = stream_on(src);
    CUDA_CHECK(cudaMemcpyAsync(dst, src, size, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static void copy(void * dst, const void * src, size_t size) {
    const auto stream = stream_on(dst);
    CUDA_CHECK(cudaMemcpyAsync(dst, src, size, cudaMemcpyDeviceToDevice, stream));
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

static void decode(const kvf_gpu_keys & keys, uint32_t skip, uint32_t every, float * dst, uint32_t n) {
    const auto stream = stream_on(dst);
    kvf_decode<<<n, 128, GGML_PAD(keys.row_size, 16), stream>>>(keys, skip, every, dst);
    check_launch();
}

static void moments(const float * x, uint32_t n, uint32_t n_head, uint32_t d, float * mean, float * cov) {
    const auto     stream = stream_on(x);
    const uint32_t n_tile = (d + TILE - 1) / TILE;
    kvf_mean<<<(n_head * d + 31) / 32, 1024, 0, stream>>>(x, n, n_head * d, mean);
    check_launch();
    kvf_cov<<<dim3(n_tile, n_tile, n_head), dim3(16, 16), 0, stream>>>(x, n, n_head, d, mean, cov);
    check_launch();
}

static void encode(const float * x, uint32_t n, uint32_t pos, uint32_t n_head, uint32_t d, const kvf_gpu_form & form,
        const kvf_gpu_index & index) {
    const auto stream = stream_on(x);
    const auto memory = (d + form.n_comp) * UNIT * sizeof(float);
    CUDA_CHECK(cudaFuncSetAttribute(kvf_encode, cudaFuncAttributeMaxDynamicSharedMemorySize, memory));
    kvf_encode<<<dim3(n / UNIT, n_head), 256, memory, stream>>>(x, pos, n_head, d, form, index);
    check_launch();
}

static void fetch_of(const kvf_gpu_layer & l, uint32_t seq, const int32_t * blocks) {
    kvf_fetch_of<<<64, 256, 0, stream_on(l.moves)>>>(l, seq, blocks);
    check_launch();
}

static void wait(const void * on) { CUDA_CHECK(cudaStreamSynchronize(stream_on(on))); }

bool kvflash_launches(const ggml_tensor * node) {
    return ((const ggml_custom_op_params *) node->op_params)->n_tasks == kvf_gpu::LAUNCHES;
}

void kvflash_launch(ggml_tensor * node, void * stream) {
    ((void (*)(ggml_tensor *, void *)) ((const ggml_custom_op_params *) node->op_params)->fun)(node, stream);
}

const kvf_gpu * kvflash_gpu() {
    static const kvf_gpu res = {kvf_choose_node, upload, download, copy, pinned, decode, moments, encode, fetch_of, wait};
    return &res;
}
