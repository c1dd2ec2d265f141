#pragma once

// the ask as kernels read it, and the shares of the attention that units have, from the sums that kvf_attend finds for each
// head

#include "guests/kernels.cuh"

static constexpr uint32_t THREADS = 512, WARPS = THREADS / 32; // of a block
static constexpr uint32_t TILE  = 4;                           // units whose largest key is in `tops`
static constexpr float    LOG2E = 1.44269504f, NOWHERE = -1e30f;

//
// the ask
//

// the ask: a copy of its askers and of each sequence's first words in shared memory, and all of it in device memory
struct asked {
    const kvf_gpu_layer & p;
    const int32_t *       words; // the copy
    const int32_t *       all;

    // the number of copied words
    static KVF_BOTH uint32_t n_word(const kvf_gpu_ask & a) {
        return kvf_gpu_ask::LEN + kvf_gpu_ask::LEN_ASKER * a.n_asker + kvf_gpu_ask::LEN_SEQ * a.n_seq;
    }

    __device__ uint32_t        n_asker() const { return words[kvf_gpu_ask::N_ASKER]; }
    __device__ const int32_t * asker(uint32_t i) const { return words + kvf_gpu_ask::LEN + i * kvf_gpu_ask::LEN_ASKER; }

    __device__ const int32_t * seq(uint32_t i) const { return asker(p.ask.n_asker) + i * kvf_gpu_ask::LEN_SEQ; }

    __device__ const int32_t * blocks(uint32_t i) const {
        return all + kvf_gpu_ask::LEN + p.ask.n_asker * kvf_gpu_ask::LEN_ASKER + i * p.ask.seq_size() + kvf_gpu_ask::LEN_SEQ;
    }
    __device__ const int32_t *  common(uint32_t i) const { return blocks(i) + p.ask.n_block; }
    __device__ const uint32_t * bits(uint32_t i) const {
        return (const uint32_t *) common(i) + kvf_gpu_ask::LEN_COMMON * p.ask.n_block;
    }

    // copy the words; all threads of a block call this
    __device__ void read(int32_t * to) const {
        const uint32_t first = kvf_gpu_ask::LEN + kvf_gpu_ask::LEN_ASKER * p.ask.n_asker;
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < n_word(p.ask); i += blockDim.x) {
            const uint32_t at = i - first, seq = at / kvf_gpu_ask::LEN_SEQ;
            to[i] = i < first ? all[i] : all[first + seq * p.ask.seq_size() + at % kvf_gpu_ask::LEN_SEQ];
        }
    }
};

// offsets in a block's shared memory: the copy of the ask, a copy of a table of guests, a bit for each unit that the pool
// has, and the scratch of the current phase
struct places {
    size_t ask, table, taken, work;

    KVF_BOTH explicit places(const kvf_gpu_layer & p) {
        ask   = 0;
        table = GGML_PAD(asked::n_word(p.ask) * sizeof(int32_t), 16);
        taken = table + p.n_slot * sizeof(int32_t);
        work  = GGML_PAD(taken + (p.ask.n_unit + 31) / 32 * sizeof(uint32_t), 16);
    }
};

template <typename T> static __device__ T & work(const kvf_gpu_layer & p, size_t offset = 0) {
    return shared<T>(places(p).work + offset);
}

//
// shares
//

// a running sum of powers of two, relative to the largest exponent so far
struct sum_of_powers {
    float top = NOWHERE, sum = 0;

    __device__ void add(float x, float n = 1) {
        const float most = fmaxf(top, x);
        sum              = sum * exp2f(top - most) + n * exp2f(x - most);
        top              = most;
    }
};

template <typename T> static __device__ T add(T a, T b) { return a + b; }
static __device__ float                   most(float a, float b) { return fmaxf(a, b); }
static __device__ int32_t                 larger(int32_t a, int32_t b) { return max(a, b); }

// Shares become integer keys. Since no share is negative, the bits of the floats have the same order; 1 is added, so that
// the key of a share of 0 is above 0. Keys of taken units have the sign bit set
static constexpr int32_t LAST = 0x7fffffff, SIGN = ~LAST;

static __device__ int32_t key_of(float share) { return __float_as_int(share) + 1; }

static __device__ int32_t * keys_of(const kvf_gpu_layer & p, uint32_t seq) { return p.keys + (uint64_t) seq * p.ask.n_unit; }
static __device__ int32_t * tops_of(const kvf_gpu_layer & p, uint32_t seq) {
    return p.tops + (uint64_t) seq * (p.ask.n_unit / TILE + 1);
}

// reduce x over the lanes that differ from this one in bits `low` to `high` of their numbers
template <typename T, typename F> static __device__ T over_lanes(T x, const F & both, int low = 1, int high = 16) {
#pragma unroll
    for (int i = high; i >= low; i /= 2) {
        x = both(x, __shfl_xor_sync(~0u, x, i));
    }
    return x;
}

static constexpr uint32_t ADDED = 128, ADDERS = THREADS / ADDED; // units that a block takes at a time, and threads for each

// Sum the shares of a sequence's units over heads and askers, and write their keys and the largest key of each tile. This
// block is number `rank` of n_block blocks, which divide the units
static __device__ void add_shares(const kvf_gpu_layer & p, const asked & ask, uint32_t seq, uint32_t n_part,
        const uint32_t * taken, uint32_t rank, uint32_t n_block) {
    auto &         sums    = work<float[ADDERS][ADDED]>(p);
    float * const  total   = &work<float>(p, sizeof(sums)); // [n_asker][n_head]
    const uint32_t n_asker = ask.n_asker(), n_unit = ask.seq(seq)[kvf_gpu_ask::N_UNIT];
    const uint32_t tid = threadIdx.x;

    // with one asker, begin to load the first units' sums before the totals are computed
    constexpr uint32_t EARLY = 8;

    float      early[EARLY];
    const auto lse_of   = [&](uint32_t a, uint32_t u) { return p.lse + (uint64_t) a * p.n_head * p.ask.n_unit + u; };
    const bool is_early = n_asker == 1 && p.n_head <= EARLY * ADDERS;
#pragma unroll
    for (uint32_t i = 0; i < EARLY; ++i) {
        const uint32_t u = rank * ADDED + tid % ADDED, h = tid / ADDED + i * ADDERS;
        early[i] = is_early && u < n_unit && h < p.n_head ? lse_of(0, u)[(uint64_t) h * p.ask.n_unit] : NOWHERE;
    }

    __syncthreads();
#pragma unroll 1
    for (uint32_t i = tid / 8; i < GGML_PAD(n_asker * p.n_head, 4); i += THREADS / 8) { // whole warps
        const bool     is   = i < n_asker * p.n_head;
        const float2 * part = (const float2 *) p.parts + (uint64_t) (is ? i : 0) * KVF_GPU_PARTS;
        sum_of_powers  sum;
#pragma unroll 1
        for (uint32_t j = tid % 8; j < n_part; j += 8) {
            const float2 one = part[j];
            sum.add(one.x, one.y);
        }
        const float top = over_lanes(sum.top, most, 1, 4);
        const float all = over_lanes(sum.sum * exp2f(sum.top - top), add<float>, 1, 4);
        if (is && tid % 8 == 0) { total[i] = all > 0 ? top + log2f(all) : 0; }
    }
    __syncthreads();

#pragma unroll 1
    for (uint32_t first = rank * ADDED; first < n_unit; first += n_block * ADDED) {
        const uint32_t u = first + tid % ADDED;

        float sum = 0;
        if (is_early && first == rank * ADDED) {
#pragma unroll
            for (uint32_t i = 0; i < EARLY; ++i) {
                const uint32_t h = min(tid / ADDED + i * ADDERS, p.n_head - 1);
                sum += exp2f(early[i] - total[h]);
            }
        } else {
#pragma unroll 1
            for (uint32_t a = 0; a < n_asker && u < n_unit; ++a) {
                if (ask.asker(a)[kvf_gpu_ask::SEQ] != (int32_t) seq) { continue; }
#pragma unroll 8
                for (uint32_t h = tid / ADDED; h < p.n_head; h += ADDERS) {
                    sum += exp2f(lse_of(a, u)[(uint64_t) h * p.ask.n_unit] - total[a * p.n_head + h]);
                }
            }
        }
        sums[tid / ADDED][tid % ADDED] = sum;
        __syncthreads();
        if (tid < ADDED) { // whole warps
            for (uint32_t i = 1; i < ADDERS; ++i) {
                sum += sums[i][tid];
            }
            const bool    has = u < n_unit && taken[u / 32] >> u % 32 & 1;
            const int32_t key = u < n_unit ? key_of(sum) | (has ? SIGN : 0) : 0, top = over_lanes(key, larger, 1, TILE / 2);
            if (u < n_unit) { keys_of(p, seq)[u] = key; }
            if (u < n_unit && u % TILE == 0) { tops_of(p, seq)[u / TILE] = top; }
        }
        __syncthreads();
    }
}

// the scratch of add_shares(), in bytes
static size_t score_size(const kvf_gpu_layer & p) {
    return sizeof(float[ADDERS][ADDED]) + p.ask.n_asker * p.n_head * sizeof(float);
}
