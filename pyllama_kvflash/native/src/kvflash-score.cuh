#pragma once

// how the kernel of kvflash-fresh.cu scores units: the logarithm of each one's part of the attention, by head; then its
// share

#include "kvflash-kernels.cuh"

static constexpr uint32_t HEADS = 4, COLUMNS = 2 * HEADS;      // queries that share a pass over the codes: two digits each
static constexpr uint32_t THREADS = 512, WARPS = THREADS / 32; // of a block of the node
static constexpr uint32_t TILE  = 4;                           // units whose largest share is known, too
static constexpr float    LOG2E = 1.44269504f, NOWHERE = -1e30f;
static constexpr float    DRIFT_RATE = 0.2f; // what a token adds to the mean

// passes over the codes of a head of keys
static __device__ uint32_t n_tile(const kvf_gpu_layer & p) { return (p.n_head / p.n_head_kv + HEADS - 1) / HEADS; }

//
// the ask
//

// what a block knows of the ask: its first words, which it has copied, and where the rest is
struct asked {
    const kvf_gpu_layer & p;
    const int32_t *       words; // shared
    const int32_t *       all;
    bool                  beside; // other nodes run at the same time

    // words to copy: askers, and then the first ones of each sequence
    static KVF_BOTH uint32_t n_word(const kvf_gpu_ask & a) {
        return kvf_gpu_ask::LEN + kvf_gpu_ask::LEN_ASKER * a.n_asker + kvf_gpu_ask::LEN_SEQ * a.n_seq;
    }

    // blocks that take part. beside other nodes not all: more of them would hold these up, and fewer not be done in time.
    // (parts of the device that were best with the 8B shape on an H100, at 16K to 256K)
    __device__ uint32_t n_block() const {
        if (!beside) { return gridDim.x; }
        const float passes = (float) words[kvf_gpu_ask::N_SCORED] * p.n_head_kv * n_tile(p);
        return min(gridDim.x, max(1u, (uint32_t) (gridDim.x * fmaxf(0.185f, sqrtf(passes) / 750))));
    }

    __device__ uint32_t        n_asker() const { return words[kvf_gpu_ask::N_ASKER]; }
    __device__ const int32_t * asker(uint32_t i) const { return words + kvf_gpu_ask::LEN + i * kvf_gpu_ask::LEN_ASKER; }

    __device__ const int32_t * seq(uint32_t i) const { return asker(p.ask.n_asker) + i * kvf_gpu_ask::LEN_SEQ; }

    __device__ bool has_turn(uint32_t i) const {
        const int32_t step = seq(i)[kvf_gpu_ask::STEP];
        return seq(i)[kvf_gpu_ask::N_FILL] > 0 && (step < 0 || (step + p.i) % p.n_turn == 0);
    }

    __device__ const int32_t * blocks(uint32_t i) const {
        return all + kvf_gpu_ask::LEN + p.ask.n_asker * kvf_gpu_ask::LEN_ASKER + i * p.ask.seq_size() + kvf_gpu_ask::LEN_SEQ;
    }
    __device__ const int32_t *  common(uint32_t i) const { return blocks(i) + p.ask.n_block; }
    __device__ const uint32_t * bits(uint32_t i) const {
        return (const uint32_t *) common(i) + kvf_gpu_ask::LEN_COMMON * p.ask.n_block;
    }

    // copy the words, by all threads of a block
    __device__ void read(int32_t * to) const {
        const uint32_t first = kvf_gpu_ask::LEN + kvf_gpu_ask::LEN_ASKER * p.ask.n_asker;
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < n_word(p.ask); i += blockDim.x) {
            const uint32_t at = i - first, seq = at / kvf_gpu_ask::LEN_SEQ;
            to[i] = i < first ? all[i] : all[first + seq * p.ask.seq_size() + at % kvf_gpu_ask::LEN_SEQ];
        }
    }
};

// what a block of the node shares, one after the other
struct places {
    size_t ask, words, table, taken, work; // words of the index; a copy of the guests; a bit a unit; what a phase needs

    KVF_BOTH explicit places(const kvf_gpu_layer & p) {
        ask   = 0;
        words = GGML_PAD(asked::n_word(p.ask) * sizeof(int32_t), 16);
        table = words + 4 * p.form.n_each * sizeof(kvf_gpu_word);
        taken = table + p.n_slot * sizeof(int32_t);
        work  = GGML_PAD(taken + (p.ask.n_unit + 31) / 32 * sizeof(uint32_t), 16);
    }
};

template <typename T> static __device__ T & work(const kvf_gpu_layer & p, size_t offset = 0) {
    return shared<T>(places(p).work + offset);
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
static __device__ int32_t                 larger(int32_t a, int32_t b) { return max(a, b); }

// Shares as keys: whole numbers, which are in the same order because no share is negative. One of nothing counts, too. Of
// units that are taken the keys have a sign
static constexpr int32_t LAST = 0x7fffffff, SIGN = ~LAST;

static __device__ int32_t key_of(float share) { return __float_as_int(share) + 1; }

static __device__ int32_t * keys_of(const kvf_gpu_layer & p, uint32_t seq) { return p.keys + (uint64_t) seq * p.ask.n_unit; }
static __device__ int32_t * tops_of(const kvf_gpu_layer & p, uint32_t seq) {
    return p.tops + (uint64_t) seq * (p.ask.n_unit / TILE + 1);
}

// of the lanes that differ from this one in the bits from `low` on
template <typename T, typename F> static __device__ T over_lanes(T x, const F & both, int low = 1, int high = 16) {
#pragma unroll
    for (int i = high; i >= low; i /= 2) {
        x = both(x, __shfl_xor_sync(~0u, x, i));
    }
    return x;
}

// d += a*b. a: 16 positions and 32 codes, of the last 8 positions in the upper nibbles; b: 32 codes and 8 columns. words:
// [8][COLUMNS], the same as b
static __device__ void multiply(const uint32_t (&a)[4], const uint32_t (&b)[2], const uint32_t * words, int (&d)[4]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
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
            d[c] = __dp4a((int) its[2], b1, __dp4a((int) its[0], b0, d[c]));
            d[2 + c] += 16 * __dp4a((int) (its[3] >> 4), b1, __dp4a((int) (its[1] >> 4), b0, 0));
        }
    }
#endif
}

struct score_memory {
    float2   parts[HEADS][WARPS];
    float    base[HEADS], unit[HEADS];
    uint32_t digits[kvf_gpu_word::MOST * COLUMNS]; // of words: of each query the upper ones, then the lower ones
};

static __device__ const kvf_gpu_word * words_of(const kvf_gpu_layer & p) { return &shared<kvf_gpu_word>(places(p).words); }

// what a block scores: queries of one token that share a head of keys
struct score_task {
    uint32_t         asker, head, first, n; // first: of the queries' heads
    uint32_t         split, n_split;        // its part of the positions
    int32_t          pos;
    const float *    drift; // [n][d], null: none is known
    uint32_t         n_unit, n_common;
    const int32_t *  common;
    const uint32_t * bits;
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

// Values of the basis that a thread multiplies: it has a component, and a part of a head's values. They are loaded all at
// once, and before they are needed
struct basis_part {
    static constexpr uint32_t N = 16;

    const float * from;
    uint32_t      step, n, first; // of values: from one to the next, how many, and of the head's the first
    float         kept[N];

    __device__ basis_part(const kvf_gpu_layer & p, const kvf_gpu_index & index, uint32_t head, uint32_t i) {
        const uint32_t row = i / p.form.n_comp, of = n_row(p.form);
        step  = p.form.n_comp;
        first = row * p.d / of;
        n     = row < of ? (row + 1) * p.d / of - first : 0;
        from  = index.basis + ((uint64_t) head * p.d + first) * step + i % p.form.n_comp;
        load(0);
    }

    __device__ void load(uint32_t at) {
#pragma unroll
        for (uint32_t j = 0; j < N; ++j) {
            kept[j] = at + j < n ? from[(uint64_t) (at + j) * step] : 0;
        }
    }

    // with q: [d][HEADS]
    __device__ void multiply(const float * q, float (&sums)[HEADS]) {
#pragma unroll 1
        for (uint32_t at = 0; at < n; at += N) {
            if (at) { load(at); }
#pragma unroll
            for (uint32_t j = 0; j < N; ++j) {
                if (at + j < n) { add_scaled(sums, kept[j], q + (first + at + j) * HEADS); }
            }
        }
    }
};

// steps and means that a thread needs in prepare(), loaded before
struct early {
    static constexpr uint32_t N = 4; // means, of a lane

    float step, mean[N];

    __device__ early(const kvf_gpu_layer & p, const kvf_gpu_index & index, uint32_t head) {
        const uint32_t tid = threadIdx.x;
        step               = tid < HEADS * p.form.n_comp ? index.step[head * p.form.n_comp + tid % p.form.n_comp] : 0;
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) {
            const uint32_t j = i * 32 + tid % 32;
            mean[i]          = tid < 32 * HEADS && j < p.d ? index.mean[head * p.d + j] : 0;
        }
    }
};

// q: [d][HEADS]. the queries' components times their steps, as whole numbers of two digits of base 254. x, part: room
static __device__ void prepare(const kvf_gpu_layer & p, const kvf_gpu_index & index, const score_task & task,
        const float * q, const early & its, basis_part & mine, float * x, float * part, score_memory & m) {
    const uint32_t n_comp = p.form.n_comp, n = n_row(p.form), tid = threadIdx.x;

#pragma unroll 1
    for (uint32_t i = tid; i < n * n_comp; i += THREADS) { // once, but where there are more components than threads
        if (i != tid) { mine = basis_part(p, index, task.head, i); }
        float sums[HEADS] = {};
        mine.multiply(q, sums);
#pragma unroll
        for (uint32_t h = 0; h < HEADS; ++h) {
            part[h * n * n_comp + i] = sums[h];
        }
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = tid; i < HEADS * n_comp; i += THREADS) {
        const uint32_t h = i / n_comp, c = i % n_comp;

        float sum = 0;
#pragma unroll 1
        for (uint32_t r = 0; r < n; ++r) {
            sum += part[(h * n + r) * n_comp + c];
        }
        x[i] = sum * (i == tid ? its.step : index.step[task.head * n_comp + c]);
    }
    __syncthreads();

    const uint32_t h = tid / 32, lane = tid % 32;
    if (h < HEADS) {
        float base = 0, top = 0;
#pragma unroll 1
        for (uint32_t j = lane; j < p.d; j += 32) {
            base += q[j * HEADS + h] * (j < 32 * its.N ? its.mean[j / 32] : index.mean[task.head * p.d + j]);
        }
#pragma unroll 1
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
#pragma unroll 1
    for (uint32_t i = tid; i < p.form.n_each * 4 * HEADS; i += THREADS) {
        const uint32_t w = i / HEADS, h = i % HEADS;
        const auto &   word = words_of(p)[w];

        uint32_t upper = 0, lower = 0;
#pragma unroll
        for (uint32_t b = 0; b < 4; ++b) {
            const int c = word.comps[b];
            // codes keep their place in a nibble, by which they are too large
            const int n = c < 0 ? 0 : __float2int_rn(x[h * n_comp + c] / (m.unit[h] * (1 << word.shift)));
            const int u = max(-127, min(127, __float2int_rn(n / 254.0f)));
            upper |= (u & 255) << 8 * b;
            lower |= (max(-127, min(127, n - 254 * u)) & 255) << 8 * b;
        }
        m.digits[w * COLUMNS + 2 * h]     = upper;
        m.digits[w * COLUMNS + 2 * h + 1] = lower;
    }
    __syncthreads();
}

// the product of a key with the query of head lane % HEADS. LANES lanes have its row. q: [d][HEADS]. TYPE: of the cache, -1:
// p.type_k. where it is known, many values are on their way at once
template <int TYPE, uint32_t LANES>
static __device__ float key_product(const kvf_gpu_layer & p, const char * row, uint32_t head, const float * q) {
    const uint32_t lane = threadIdx.x % LANES;

    float sums[HEADS] = {};
#pragma unroll(TYPE < 0 ? 1 : 8)
    for (uint32_t e = lane; e < p.d; e += LANES) {
        add_scaled(sums, key_value(TYPE < 0 ? p.type_k : TYPE, row, head * p.d + e), q + e * HEADS);
    }
    float res = 0;
#pragma unroll
    for (uint32_t h = 0; h < HEADS; ++h) {
        const float sum = over_lanes(sums[h], add<float>, 1, LANES / 2);
        if (lane % HEADS == h) { res = sum; }
    }
    return res;
}

// the keys of common cells as they are. a warp takes two positions, 16 lanes each, of which the first ones add a head each
template <int TYPE>
static __device__ void score_near(const kvf_gpu_layer & p, const score_task & task, const float * q, sum_of_powers & all) {
    constexpr uint32_t PIECE = 2, LANES = 32 / PIECE;

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % LANES, n_piece = p.n_chunk / PIECE;
    // from the last warp on: where there are few groups, the first ones have them
    const uint32_t n_warp = task.n_split * WARPS, first = n_warp - 1 - (task.split * WARPS + warp);
#pragma unroll 1
    for (uint32_t i = first; i < task.n_common * n_piece; i += n_warp) {
        const int32_t * c   = task.common + i / n_piece * kvf_gpu_ask::LEN_COMMON;
        const int32_t   j   = i % n_piece * PIECE + threadIdx.x % 32 / LANES;
        const bool      is  = j < c[kvf_gpu_ask::N] && c[kvf_gpu_ask::FIRST] + j <= task.pos;
        const char *    row = p.k.data + (uint64_t) (c[kvf_gpu_ask::CELL] + (is ? j : 0)) * p.row_size;
        const float     x   = key_product<TYPE, LANES>(p, row, task.head, q);
        if (is && lane < HEADS) { all.add(logit(p, x)); }
    }
}

// A warp takes a group of 64 positions at a time, and then the one that is n_split*WARPS further on. Lane 4*g + t has four
// nibbles of positions 4*g + x and 32 + 4*g + x, x = 0 ... 3, which are two rows of the product of each x; and of what comes
// out, both digits of head t of the same positions. N_EACH: words of a lane, where logits have no cap; 0: as many as there
// are
template <uint32_t N_EACH> struct far_rows {
    static constexpr uint32_t KEPT = N_EACH ? N_EACH : 2;

    const uint8_t *  codes; // of the head, the lane and the next group
    const uint32_t * bits;  // of the next 8 groups
    uint64_t         step;  // of codes
    uint32_t         n_bit; // words
    uint32_t         at[KEPT], mask[KEPT];
    uint4            rows[KEPT];
    uint32_t         common; // units of the group

    __device__ far_rows(const kvf_gpu_layer & p, const kvf_gpu_index & index, const score_task & task) {
        const uint32_t size = p.form.group_size(), group = task.split * WARPS + threadIdx.x / 32; // the first one
        codes = index.codes + ((uint64_t) group * p.n_head_kv + task.head) * size + threadIdx.x % 32 / 4 * sizeof(uint4);
        step  = (uint64_t) task.n_split * WARPS * p.n_head_kv * size;
        bits  = task.bits + group / 8;
        n_bit = task.n_split * WARPS / 8;
#pragma unroll
        for (uint32_t e = 0; e != N_EACH; ++e) {
            take(words_of(p)[e * 4 + threadIdx.x % 4], e);
        }
        if (group * 4 < task.n_unit) { load(); }
    }

    // where a word's rows begin, and their mask, stay in registers, if they can
    __device__ void take(const kvf_gpu_word & word, uint32_t to) {
        at[to]   = word.quad * 128;
        mask[to] = word.mask << word.shift;
    }

    // the rows of a group, if they stay in registers, too
    __device__ void load() {
        common = *bits;
#pragma unroll
        for (uint32_t e = 0; e != N_EACH; ++e) {
            load(e);
        }
    }
    __device__ void load(uint32_t own) { rows[own] = *(const uint4 *) (codes + at[own]); }

    __device__ void go_on() {
        codes += step;
        bits += n_bit;
    }
};

template <uint32_t N_EACH>
static __device__ void score_far(const kvf_gpu_layer & p, const score_task & task, far_rows<N_EACH> & f,
        const score_memory & m, sum_of_powers & all) {
    constexpr uint32_t KEPT = far_rows<N_EACH>::KEPT;

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t each  = N_EACH ? N_EACH : p.form.n_each;
    const float    scale = !N_EACH && p.cap > 0 ? 1 : LOG2E * p.scale; // logits are of base 2
    const float    base = scale * m.base[t], unit = scale * m.unit[t];

    uint32_t   digits[KEPT / 2][2]; // of the queries
    const auto take_digits = [&](uint32_t e, uint32_t to) { digits[to / 2][to % 2] = m.digits[(e * 4 + t) * COLUMNS + g]; };
#pragma unroll
    for (uint32_t e = 0; e != N_EACH; ++e) {
        take_digits(e, e);
    }

    // Powers are of what a logit is above `top`, which is the same for all lanes of a head, and at most ABOVE lower than the
    // largest one so far. What is no candidate is far below it
    constexpr float ABOVE = 64;

    float          top = NOWHERE, sum = 0;
    const uint32_t first = task.split * WARPS + warp, step = 4 * task.n_split * WARPS; // of units
    const uint32_t shift = first % 8 * 4 + g / 4;                                      // in the bits of 8 groups

    // of the four lanes that have a unit's positions one writes of it, and one of the unit that is two further on
    const uint32_t other = g % 2 * 2;
    const bool     has   = g % 4 < 2 && t < task.n;
    float * lse  = p.lse + ((uint64_t) task.asker * p.n_head + task.first + t) * p.ask.n_unit + first * 4 + g / 4 + other;
    int32_t left = task.n_unit - first * 4; // units, from the group on
#pragma unroll 1
    for (; left > 0; left -= step, lse += step) {
        const uint32_t common     = f.common >> shift;
        int            sums[4][4] = {}; // [x]
#pragma unroll(N_EACH ? N_EACH / 2 : 1)
        for (uint32_t e = 0; e < each; e += 2) {
            uint32_t a[4][4]; // [x][register]
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                const uint32_t own = N_EACH ? e + i : i;
                if (!N_EACH) {
                    f.take(words_of(p)[(e + i) * 4 + t], i);
                    f.load(i);
                    take_digits(e + i, i);
                }
                const uint32_t row[] = {f.rows[own].x, f.rows[own].y, f.rows[own].z, f.rows[own].w};
#pragma unroll
                for (uint32_t x = 0; x < 4; ++x) {
                    a[x][2 * i]     = row[x] & f.mask[own];
                    a[x][2 * i + 1] = row[x] & f.mask[own] << 4;
                }
            }
#pragma unroll
            for (uint32_t x = 0; x < 4; ++x) {
                multiply(a[x], digits[N_EACH ? e / 2 : 0], m.digits + e * 4 * COLUMNS, sums[x]);
            }
        }
        f.go_on();
        if (left > (int32_t) step) { f.load(); } // while the rest is computed

        // positions of the lower nibbles are in units 0 and 1 of the group, the others in 2 and 3: 16 times as large
        float logits[2][4], largest = NOWHERE;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const bool  is   = left > (int32_t) (2 * i + g / 4) && !(common >> 2 * i & 1);
            const float from = is ? base : 2 * NOWHERE;
            const int   low  = i && !N_EACH ? 4 : 0; // many words together would exceed an int
            const float one  = i && N_EACH ? unit / 16 : unit;
#pragma unroll
            for (uint32_t x = 0; x < 4; ++x) {
                logits[i][x] = from + one * (float) (254 * (sums[x][2 * i] >> low) + (sums[x][2 * i + 1] >> low));
                if (!N_EACH && p.cap > 0 && is) { logits[i][x] = logit(p, logits[i][x]); }
                largest = fmaxf(largest, logits[i][x]);
            }
        }
        if (__any_sync(~0u, largest > top + ABOVE)) {
            const float most_of_all = over_lanes(fmaxf(top, largest), most, 4, 16);
            sum *= exp2f(top - most_of_all);
            top = most_of_all;
        }
        float parts[2] = {};
#pragma unroll
        for (uint32_t x = 0; x < 4; ++x) {
            parts[0] += exp2f(logits[0][x] - top);
            parts[1] += exp2f(logits[1][x] - top);
        }
        sum += parts[0] + parts[1];

        float part = other ? parts[1] : parts[0];
        part += __shfl_xor_sync(~0u, other ? parts[0] : parts[1], 4);
        part += __shfl_xor_sync(~0u, part, 8);
        if (has && left > (int32_t) (other + g / 4)) { *lse = part > 0 ? top + log2f(part) : NOWHERE; }
    }
    if (sum > 0) { all.add(top, sum); }
}

// the sums of a block's lanes, together
static __device__ void put_parts(const kvf_gpu_layer & p, const score_task & task, sum_of_powers all, score_memory & m) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float    top = over_lanes(all.top, most, 4, 16);
    const float    sum = over_lanes(all.sum * exp2f(all.top - top), add<float>, 4, 16);
    if (lane < HEADS) { m.parts[lane][warp] = {top, sum}; }
    __syncthreads();
    if (threadIdx.x < HEADS * WARPS) {
        const uint32_t h    = threadIdx.x / WARPS;
        const float2   mine = m.parts[h][threadIdx.x % WARPS];
        const float    both = over_lanes(mine.x, most, 1, WARPS / 2);
        const float    part = over_lanes(mine.y * exp2f(mine.x - both), add<float>, 1, WARPS / 2);
        const uint64_t at   = ((uint64_t) task.asker * p.n_head + task.first + h) * KVF_GPU_PARTS + task.split;
        if (threadIdx.x % WARPS == 0 && h < task.n) { ((float2 *) p.parts)[at] = {both, part}; }
    }
    __syncthreads();
}

// how many blocks share a task
static __device__ uint32_t n_split(const asked & ask) {
    return min(KVF_GPU_PARTS, max(1u, ask.n_block() / (ask.n_asker() * ask.p.n_head_kv * n_tile(ask.p))));
}

static __device__ float query(const kvf_gpu_queries & q, uint32_t row, uint32_t head, uint32_t i) {
    return ((const float *) (q.data + row * q.row + head * q.head))[i];
}

// row: of the token that asks. what comes from memory is loaded before it is needed
template <uint32_t N_EACH, int TYPE>
static __device__ void score(const kvf_gpu_layer & p, const kvf_gpu_index & index, const score_task & task,
        const kvf_gpu_queries & q, uint32_t row) {
    auto &        m    = work<score_memory>(p);
    float * const mine = &work<float>(p, sizeof(score_memory)); // [d][HEADS]
    float * const x    = mine + HEADS * p.d;

    far_rows<N_EACH> far(p, index, task);
    basis_part       basis(p, index, task.head, threadIdx.x);
    const early      its(p, index, task.head);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < HEADS * p.d; i += THREADS) {
        const uint32_t h = i / p.d, e = i % p.d;
        mine[e * HEADS + h] = h < task.n ? query(q, row, task.first + h, e) + (task.drift ? task.drift[i] : 0) : 0;
    }
    __syncthreads();
    prepare(p, index, task, mine, its, basis, x, x + HEADS * p.form.n_comp, m);

    sum_of_powers all;
    score_near<TYPE>(p, task, mine, all);
    score_far(p, task, far, m, all);
    put_parts(p, task, all, m);
}

template <uint32_t N_EACH, int TYPE>
static __device__ void score(const kvf_gpu_layer & p, const asked & ask, const kvf_gpu_queries & q) {
    const uint32_t n_of = n_split(ask), n_each = p.n_head_kv * n_tile(p), n_task = ask.n_asker() * n_each;
    const uint32_t n_at_once = ask.n_block() / n_of, share = p.n_head / p.n_head_kv;

#pragma unroll 1
    for (uint32_t i = blockIdx.x / n_of; i < n_task; i += n_at_once) {
        const uint32_t  tile = i % n_each, head = tile / n_tile(p), at = tile % n_tile(p) * HEADS;
        const int32_t * who = ask.asker(i / n_each);
        const uint32_t  seq = who[kvf_gpu_ask::SEQ];
        if (!ask.has_turn(seq)) { continue; }

        const uint32_t first = head * share + at;
        const float *  drift = ask.beside && ask.seq(seq)[kvf_gpu_ask::N_DRIFT]
                                       ? p.drift + ((uint64_t) seq * p.n_head + first) * p.d
                                       : nullptr;

        const score_task task = {i / n_each, head, first, min(HEADS, share - at), blockIdx.x % n_of, n_of,
                who[ask.beside ? kvf_gpu_ask::POS_AHEAD : kvf_gpu_ask::POS], drift,
                (uint32_t) ask.seq(seq)[kvf_gpu_ask::N_UNIT], (uint32_t) ask.seq(seq)[kvf_gpu_ask::N_COMMON],
                ask.common(seq), ask.bits(seq)};
        score<N_EACH, TYPE>(p, p.index[seq], task, q, who[kvf_gpu_ask::ROW]);
    }
}

static constexpr uint32_t ADDED = 128, ADDERS = THREADS / ADDED; // units of a block at a time, and threads of each

// The keys of a sequence's units, by their shares, summed over heads and askers; and the largest of each tile. A block does
// what the others of n_block do not
static __device__ void add_shares(const kvf_gpu_layer & p, const asked & ask, uint32_t seq, uint32_t n_part,
        const uint32_t * taken, uint32_t rank, uint32_t n_block) {
    auto &         sums    = work<float[ADDERS][ADDED]>(p);
    float * const  total   = &work<float>(p, sizeof(sums)); // [n_asker][n_head]
    const uint32_t n_asker = ask.n_asker(), n_unit = ask.seq(seq)[kvf_gpu_ask::N_UNIT];
    const uint32_t tid = threadIdx.x;

    // of the first units, by one asker: on their way while the totals are computed
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

// bytes of the work
static size_t score_size(const kvf_gpu_layer & p) {
    const uint32_t n_row = p.form.n_comp ? std::max(1u, THREADS / p.form.n_comp) : 0;
    const size_t   score = sizeof(score_memory) + HEADS * (p.d + p.form.n_comp * (1 + n_row)) * sizeof(float);
    return std::max(score, sizeof(float[ADDERS][ADDED]) + p.ask.n_asker * p.n_head * sizeof(float));
}
