#pragma once

// attention to the rows of the pool, as halves on tensor cores. Where llama.cpp's own attention sums up the values, this
// computes only the sums of weights

#include "coarse/far.cuh"

//
// rows
//

// 16 consecutive cells, the i-th of n_all groups
struct pool_cells {
    uint32_t cell, n; // the first cell; the number of cells that hold a position
    int32_t  pos;     // of the first cell; -1: guests, which all tokens see
    bool     is;      // whether there is an i-th group

    __device__ pool_cells(const kvf_gpu_layer & p, const asked & ask, const attend_task & task, uint32_t i, uint32_t n_all) {
        is = i < n_all;
        if (!is) { return; }
        const uint32_t n_first = p.n_chunk / UNIT, n_common = task.n_common * n_first;
        if (i < n_common) {
            const int32_t * c = ask.common(task.seq) + i / n_first * kvf_gpu_ask::LEN_COMMON;
            const uint32_t  e = i % n_first * UNIT;
            n                 = min(UNIT, max(c[kvf_gpu_ask::N], (int32_t) e) - e);
            cell              = c[kvf_gpu_ask::CELL] + (n ? e : 0);
            pos               = c[kvf_gpu_ask::FIRST] + e;
            return;
        }
        const uint32_t slot = i - n_common;
        cell                = ask.blocks(task.seq)[slot / n_first] * p.n_chunk + slot % n_first * UNIT;
        pos                 = -1;
        n                   = UNIT;
    }
};

// landed() for all threads of a warp
template <uint32_t N> static __device__ void copied() {
    landed<N>();
    __syncwarp();
}

// fill in a pool_rows, by one warp
static __device__ void describe_rows(
        const kvf_gpu_attend & a, const attend_places & places, uint32_t head, bool values, pool_rows & to) {
    const auto &   r = a.rows[values];
    uint32_t       n;
    const uint32_t begin = piece_of(r, head, n), end = begin + n, lane = threadIdx.x % 32;
    const uint64_t stride = (values ? a.p.v.size : a.p.k.size) / UNIT;
    const char *   from   = values ? a.p.v.data : a.p.k.data;
    const uint64_t all    = (uint64_t) from | stride;
    uint32_t       low = begin, high = end, size = 16; // extended to aligned addresses if possible
    if (all % 16 == 0 && GGML_PAD(end, 16) <= stride) {
        low  = begin / 16 * 16;
        high = GGML_PAD(end, 16);
    } else {
        while (size > 1 && (all | begin | end) % size) {
            size /= 2;
        }
        if (size < 4) { size = 1; }
    }
    const uint32_t n_piece = (high - low) / size;
    to.row[lane] = lane / n_piece;
    to.i[lane]   = lane % n_piece;
    if (lane > 0) { return; }
    to.from   = from + low;
    to.stride = stride;
    to.type   = r.type;
    to.n      = high - low;
    to.size   = size;
    to.shift  = begin - low;
    to.first  = head * r.d - begin / r.block_size * r.block;
    to.room   = places.room_of(values);
    to.more   = 32 / n_piece;
    to.rest   = 32 % n_piece;
}

template <uint32_t SIZE>
static __device__ void copy_rows(const pool_rows & rows, uint32_t at, const char * its, uint32_t last) {
    const uint32_t n_piece = rows.n / SIZE, more = rows.more, rest = rows.rest, room = rows.room, stride = rows.stride;
    uint32_t       row = rows.row[threadIdx.x % 32], i = rows.i[threadIdx.x % 32];
#pragma unroll 2
    while (row < UNIT) {
        copy_piece<SIZE>(&shared<char>(at + row * room + i * SIZE), its + (uint64_t) min(row, last) * stride + i * SIZE);
        i += rest;
        row += more + (i >= n_piece);
        i -= i >= n_piece ? n_piece : 0;
    }
}

// begin to copy the rows of 16 cells to `at` in shared memory. for missing cells, the row of the last one is repeated
static __device__ void copy_rows(const pool_rows & rows, uint32_t at, const pool_cells & cells) {
    const char *   its  = rows.from + cells.cell * rows.stride;
    const uint32_t last = max(cells.n, 1u) - 1, n = rows.n;
    __syncwarp();
    switch (rows.size) {
        case 16: return copy_rows<16>(rows, at, its, last);
        case 8: return copy_rows<8>(rows, at, its, last);
        case 4: return copy_rows<4>(rows, at, its, last);
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32; i < UNIT * n; i += 32) {
        shared<char>(at + i / n * rows.room + i % n) = its[min(i / n, last) * rows.stride + i % n];
    }
}

// rows of 16 cells in a warp's shared memory
struct rows_here {
    const pool_rows & its;
    uint32_t          at, room;

    __device__ rows_here(const attend_places & places, const pool_rows & its, bool values) :
        its(its), at(places.rows + threadIdx.x / 32 * places.each + COLS * UNIT * sizeof(uint16_t) +
                     values * UNIT * places.room[0]),
        room(places.room_of(values)) {}

    // elements i to i + 3 of a row of n, as halves; 0 beyond n
    template <int32_t TYPE> __device__ uint2 four(uint32_t row, uint32_t i, uint32_t n) const {
        const uint32_t from = at + row * room + its.shift;
        if (TYPE == GGML_TYPE_F16) { return shared<uint2>(from + 2 * i); }
        if (TYPE == GGML_TYPE_Q8_0) {
            const auto &   b     = shared<block_q8_0>(from + i / 32 * sizeof(block_q8_0));
            const auto *   two   = (const uint16_t *) (b.qs + i % 32);
            const uint32_t bytes = (two[0] | (uint32_t) two[1] << 16) ^ 0x80808080;
            const half2    scale = __half2half2(b.d);
            return {scaled(__byte_perm(bytes, 0x64646464, 0x4140), scale),
                    scaled(__byte_perm(bytes, 0x64646464, 0x4342), scale)};
        }
        return any_four(its.type, &shared<char>(from), its.first + i, i < n ? n - i : 0);
    }

    // two quants, given as halves of 1024 + 128 + quant, times the scale
    static __device__ uint32_t scaled(uint32_t bytes, half2 scale) {
        half2    x;
        uint32_t res;
        memcpy(&x, &bytes, sizeof(x));
        x = __hmul2(__hsub2(x, __floats2half2_rn(1152, 1152)), scale);
        memcpy(&res, &x, sizeof(res));
        return res;
    }

    static __device__ __noinline__ uint2 any_four(int32_t type, const char * row, uint32_t i, uint32_t n) {
        float x[4];
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            x[e] = e < n ? key_value(type, row, i + e) : 0;
        }
        return {halves(x[0], x[1]), halves(x[2], x[3])};
    }

    // call f with the TYPE for four(): that of the cache if the head is aligned for it, else GGML_TYPE_COUNT, which reads
    // any type
    template <typename F> __device__ void with_type(uint32_t d, const F & f) const {
        if (d % 16 == 0 && its.first == 0 && its.shift % 8 == 0 && its.type == GGML_TYPE_F16) {
            f(std::integral_constant<int32_t, GGML_TYPE_F16>());
        } else if (d % 16 == 0 && its.first == 0 && its.type == GGML_TYPE_Q8_0) {
            f(std::integral_constant<int32_t, GGML_TYPE_Q8_0>());
        } else {
            f(std::integral_constant<int32_t, GGML_TYPE_COUNT>());
        }
    }
};

//
// attention
//

// copy the queries to shared memory, as halves [16 elements][lane]
static __device__ void read_plain(
        const kvf_gpu_attend & a, const attend_places & at, const attend_task & task, const prepared_pass & pass) {
    for (uint32_t i = threadIdx.x; i < a.n_plain(); i += blockDim.x) {
        (&shared<uint2>(at.queries))[i] = task.has(i % 32 / 4) ? pass.plain[i] : uint2{0, 0};
    }
    __syncthreads();
}

// the base-2 logits of rows g and g + 8, each for queries 2*t and 2*t + 1
static __device__ void cell_logits(const kvf_gpu_layer & p, const rows_here & rows, const uint2 * queries, float (&res)[4]) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    rows.with_type(p.d, [&](auto type) {
#pragma unroll 2
        for (uint32_t i = 0; i < (p.d + 15) / 16; ++i) {
            const uint2 a = rows.four<type>(g, i * 16 + t * 4, p.d), b = rows.four<type>(g + 8, i * 16 + t * 4, p.d);
            multiply(res, a.x, b.x, a.y, b.y, queries[i * 32 + lane]);
        }
    });
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) {
        res[e] *= LOG2E;
        if (p.cap > 0) { res[e] = capped(res[e], LOG2E * p.cap); }
    }
}

// Add the values of 16 cells by weights. A lane takes cells t, t + 4, t + 8 and t + 12, of each elements 4*g to 4*g + 3 of
// 32. These are rows g and g + 8 of two products. weights: [query][t][cell]
static __device__ void cell_values(
        uint32_t d, const rows_here & rows, const uint2 * weights, const float (&factor)[2], float4 * values) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint2    b   = weights[lane];
    const auto     add = [&](float4 & to, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
        const float4 old  = to;
        float        d[4] = {old.x * factor[0], old.y * factor[1], old.z * factor[0], old.w * factor[1]};
        multiply(d, a0, a1, a2, a3, b);
        to = {d[0], d[1], d[2], d[3]};
    };
    rows.with_type(d, [&](auto type) {
#pragma unroll 1
        for (uint32_t i = 0; i < (d + 31) / 32; ++i) {
            uint2 x[4];
#pragma unroll
            for (uint32_t c = 0; c < 4; ++c) {
                x[c] = rows.four<type>(4 * c + t, min(i * 32 + g * 4, (d + 3) / 4 * 4 - 4), d);
            }
            add(values[i * 64], __byte_perm(x[0].x, x[1].x, 0x5410), __byte_perm(x[0].x, x[1].x, 0x7632),
                    __byte_perm(x[2].x, x[3].x, 0x5410), __byte_perm(x[2].x, x[3].x, 0x7632));
            add(values[i * 64 + 32], __byte_perm(x[0].y, x[1].y, 0x5410), __byte_perm(x[0].y, x[1].y, 0x7632),
                    __byte_perm(x[2].y, x[3].y, 0x5410), __byte_perm(x[2].y, x[3].y, 0x7632));
        }
    });
}

// Turn the logits of 16 cells into weights. pos: the positions of the lane's queries
static __device__ void cell_weights(const pool_cells & cells, const int32_t (&pos)[2], float (&y)[4], uint16_t * weights,
        float (&factor)[2], far_sums & its) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        float top = its.top[j], sum = 0;
#pragma unroll
        for (uint32_t e = j; e < 4; e += 2) {
            const uint32_t row = g + e / 2 * 8;
            const bool     is  = row < cells.n && (cells.pos < 0 ? pos[j] > -2 : cells.pos + (int32_t) row <= pos[j]);
            if (!is) { y[e] = NOWHERE; }
            top = fmaxf(top, y[e]);
        }
        top       = over_rows(top, most);
        factor[j] = exp2f(its.top[j] - top);
#pragma unroll
        for (uint32_t e = j; e < 4; e += 2) {
            const uint32_t row    = g + e / 2 * 8;
            const float    weight = y[e] > NOWHERE ? exp2f(y[e] - top) : 0;
            sum += weight;
            weights[(2 * t + j) * UNIT + row % 4 * 4 + row / 4] = halves(weight, 0);
        }
        its.sum[j] = its.sum[j] * factor[j] + sum;
        its.top[j] = top;
    }
    __syncwarp();
}

// Attend to the pool: to common cells up to each token's position, and to all guests. A warp takes 16 cells at a time, while
// the rows of the next 16 are being copied
static __device__ void attend_pool(const kvf_gpu_attend & a, const attend_places & at, const asked & ask,
        const attend_task & task, const int32_t * tokens, const prepared_pass & pass, const attend_memory & m, far_sums & its) {
    const auto &    p    = a.p;
    const uint32_t  warp = threadIdx.x / 32, n_warp = (task.n_part - task.n_far) * at.n_warp;
    const uint32_t  first = (task.part - task.n_far) * at.n_warp + warp;
    const uint32_t  n_all = task.n_common * (p.n_chunk / UNIT) + task.n_fill;
    const bool      apart = p.v.n_run > 0; // false: the keys also serve as values
    const rows_here keys(at, m.rows[0], false), values(at, m.rows[apart], apart);
    uint16_t * const weights = &shared<uint16_t>(at.rows + warp * at.each);

    int32_t pos[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t q = 2 * (threadIdx.x % 4) + j;
        pos[j]           = task.has(q) ? tokens[task.row_of(q) * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::POS] : -2;
    }
    // groups of copies alternate between keys and values, even if a group is empty. keys that also serve as values are
    // copied once
    const bool alone = !apart && a.whole;
    const auto begin = [&](const rows_here & rows, const pool_cells & cells, bool is) {
        if (is && cells.is) { copy_rows(rows.its, rows.at, cells); }
        copies_begun();
    };
    pool_cells cells(p, ask, task, n_all, n_all),
            next(p, ask, task, first, n_all); // at first there are no current cells
#pragma unroll 1
    for (uint32_t i = first;; i += n_warp) {
        float y[4] = {}, factor[2];
        if (cells.is) {
            alone ? copied<0>() : copied<1>();
            cell_logits(p, keys, &shared<uint2>(at.queries), y);
        }
        begin(keys, next, !alone || !cells.is);
        if (cells.is) {
            cell_weights(cells, pos, y, weights, factor, its);
            copied<1>();
            if (a.whole) {
                cell_values(a.coding[1].d, values, (const uint2 *) weights, factor, values_of(at, warp) + threadIdx.x % 32);
            }
        }
        begin(values, next, a.whole && (apart || cells.is));
        if (i == first) {
            ggml_cuda_pdl_sync();
            read_plain(a, at, task, pass);
        }
        cells = next;
        if (!cells.is) { break; }
        next = pool_cells(p, ask, task, i + n_warp, n_all);
    }
    copied<0>();
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        its.sum[j]        = over_rows(its.sum[j], add<float>);
        its.values_top[j] = its.top[j];
    }
}
