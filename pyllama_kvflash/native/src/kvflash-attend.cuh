#pragma once

// how the kernels of kvflash-attend.cu attend to codes: products with these, and the sums of a block

#include "kvflash-choose.cuh"
#include "kvflash-coded.cuh"

static constexpr uint32_t WIDE = 16, N_POS = WIDE * UNIT;    // units and positions of a piece, whose weights have one scale
static constexpr uint32_t N_HEAD = kvf_gpu_attend::HEADS;
static constexpr float    MIDDLE = 63.5f, MOST_BYTE = 127;
static constexpr float    LITTLE = 1.0f / 16384; // of the weights so far: a piece with less has the mean for its values

static_assert(N_HEAD == AT_WARPS && N_POS == 2 * AT);

//
// attend
//

struct attend_memory {
    float top[N_HEAD], sum[N_HEAD]; // so far
    float unit[N_HEAD], middle[N_HEAD];
    float base[N_HEAD], factor[N_HEAD], worth[N_HEAD], more[N_HEAD]; // of a piece
    float parts[3][AT_WARPS][N_HEAD];
    int   bytes[N_HEAD];
};

struct attend_places {
    size_t plain, rotated, words, weights, sums, values, taken, end;

    KVF_BOTH explicit attend_places(const kvf_gpu_attend & a) {
        const uint32_t width = a.coding[0].width, width_v = a.coding[1].width;
        plain   = GGML_PAD(sizeof(attend_memory), 16);
        rotated = plain + sizeof(float) * N_HEAD * width; // plain: [d][N_HEAD]
        words   = rotated + sizeof(float) * N_HEAD * width;
        weights = words + N_HEAD * width; // [column][2][N_HEAD]
        sums    = weights + N_HEAD * N_POS;
        values  = sums + sizeof(int) * N_HEAD * width_v;
        taken   = values + sizeof(float) * N_HEAD * width_v;
        end     = taken + (a.p.ask.n_unit + 31) / 32 * sizeof(uint32_t);
    }
};

struct attend_task {
    uint32_t head, first, n, row, part, n_part; // first: of n queries' heads
    int32_t  pos, asker;
    uint32_t seq, n_unit, n_fill, n_common;
};

static __device__ float query_of(const kvf_gpu_queries & q, uint32_t row, uint32_t head, uint32_t i) {
    return ((const float *) (q.data + row * q.row + head * q.head))[i];
}

// queries as they are, and rotated, as bytes
template <uint32_t N_BIT>
static __device__ void prepare_queries(
        const kvf_gpu_attend & a, const attend_task & task, const kvf_gpu_queries & q, attend_memory & m) {
    const attend_places  at(a);
    const auto &         c       = a.coding[0];
    float * const        plain   = &shared<float>(at.plain);
    float * const        rotated = &shared<float>(at.rotated);
    const kvf_gpu_codes & keys   = a.codes[0][task.seq];
    const uint32_t       warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < N_HEAD * c.width; i += AT) {
        const uint32_t j = i / c.width, e = i % c.width;
        const float    x = j < task.n && e < c.d ? query_of(q, task.row, task.first + j, e) : 0;
        rotated[i]       = x;
        if (e < c.d) { plain[e * N_HEAD + j] = x; }
    }
    if (c.n_rot) { hadamard(rotated, c.width, N_HEAD, c.d / c.n_rot, c.n_rot); }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < N_HEAD * c.width; i += AT) {
        const uint32_t e = i % c.width;
        if (e < c.d) { rotated[i] *= (c.divided ? keys.spread[task.head * c.d + e] : 1) * sign_of(e); }
    }
    hadamard_blocks(rotated, c.d, c.width, N_HEAD);

    float largest = 0; // of a query, by its warp
    for (uint32_t e = lane; e < c.width; e += 32) {
        largest = fmaxf(largest, fabsf(rotated[warp * c.width + e]));
    }
    largest            = over_lanes(largest, most);
    const float factor = largest > 0 ? MOST_BYTE / largest : 0;
    float       sum    = 0;
    for (uint32_t e = lane; e < c.width; e += 32) {
        sum += rintf(rotated[warp * c.width + e] * factor);
    }
    sum = over_lanes(sum, add<float>);
    if (lane == 0) {
        m.unit[warp]   = largest / MOST_BYTE;
        m.middle[warp] = MIDDLE * sum;
        m.top[warp]    = NOWHERE;
        m.sum[warp]    = 0;
        m.more[warp]   = factor;
    }
    __syncthreads();
    uint32_t * const words = &shared<uint32_t>(at.words);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < c.width / 8 * 2 * N_HEAD; i += AT) {
        const uint32_t j = i % N_HEAD, half = i / N_HEAD % 2, column = i / N_HEAD / 2;
        uint32_t       word = 0;
        for (uint32_t b = 0; b < 4; ++b) {
            const float x = rotated[j * c.width + value_at<N_BIT>(column, half * 4 + b)] * m.more[j];
            word |= (uint32_t) (__float2int_rn(x) & 255) << 8 * b;
        }
        words[i] = word;
    }
    __syncthreads();
}

// products of a position's key with the queries, in levels
template <uint32_t N_BIT>
static __device__ void key_products(const kvf_gpu_attend & a, const uint32_t * from, int (&res)[N_HEAD]) {
    const uint32_t * words  = &shared<uint32_t>(attend_places(a).words);
    const uint32_t   n_each = N_BIT == 2 ? 2 : 1, n = a.coding[0].width / 8;
#pragma unroll 4
    for (uint32_t column = 0; column < n; column += n_each) {
        const uint32_t codes = from[word_of<N_BIT>(column) * UNIT];
#pragma unroll
        for (uint32_t i = 0; i < n_each; ++i) {
            uint32_t lv[2];
            levels_of<N_BIT>(codes, column + i, lv);
#pragma unroll
            for (uint32_t j = 0; j < N_HEAD; ++j) {
                const uint32_t * its = words + (column + i) * 2 * N_HEAD + j;
                res[j]               = __dp4a((int) lv[1], (int) its[N_HEAD], __dp4a((int) lv[0], (int) its[0], res[j]));
            }
        }
    }
}

// sums of the values of a piece by the weights' bytes, in levels, added to those in shared memory. A thread has a column of
// four positions of some units
template <uint32_t N_BIT>
static __device__ void value_sums(const kvf_gpu_attend & a, const attend_task & task, uint32_t piece) {
    const attend_places at(a);
    const auto &        c     = a.coding[1];
    const uint8_t *     codes = a.codes[1][task.seq].codes;
    int * const         sums  = &shared<int>(at.sums);
    const uint8_t *     bytes = &shared<uint8_t>(at.weights);
    const uint32_t      all = c.width / 8 * 4, lanes = min(all, AT), n_row = AT / lanes, tid = threadIdx.x;
    const uint32_t      n_unit = min(WIDE, task.n_unit - piece * WIDE);
#pragma unroll 1
    for (uint32_t i = tid % lanes; i < all && tid < lanes * n_row; i += lanes) {
        const uint32_t four = i % 4, column = i / 4;
        int            own[8][N_HEAD] = {};
#pragma unroll 1
        for (uint32_t u = tid / lanes; u < n_unit; u += n_row) {
            const uint4 w = *(const uint4 *) (codes + slot_of(c, piece * WIDE + u, task.head) * unit_bytes(c) +
                                              (word_of<N_BIT>(column) * UNIT + four * 4) * sizeof(uint32_t));
            uint32_t    lv[4][2];
            levels_of<N_BIT>(w.x, column, lv[0]);
            levels_of<N_BIT>(w.y, column, lv[1]);
            levels_of<N_BIT>(w.z, column, lv[2]);
            levels_of<N_BIT>(w.w, column, lv[3]);
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) { // four positions of a value side by side
                const uint32_t x = __byte_perm(lv[0][half], lv[1][half], 0x5140);
                const uint32_t y = __byte_perm(lv[2][half], lv[3][half], 0x5140);
                const uint32_t z = __byte_perm(lv[0][half], lv[1][half], 0x7362);
                const uint32_t v = __byte_perm(lv[2][half], lv[3][half], 0x7362);

                const uint32_t turned[] = {__byte_perm(x, y, 0x5410), __byte_perm(x, y, 0x7632), __byte_perm(z, v, 0x5410),
                        __byte_perm(z, v, 0x7632)};
#pragma unroll
                for (uint32_t j = 0; j < N_HEAD; ++j) {
                    const int its = *(const int *) (bytes + j * N_POS + u * UNIT + four * 4);
#pragma unroll
                    for (uint32_t e = 0; e < 4; ++e) {
                        own[half * 4 + e][j] = __dp4a((int) turned[e], its, own[half * 4 + e][j]);
                    }
                }
            }
        }
#pragma unroll
        for (uint32_t e = 0; e < 8; ++e) {
#pragma unroll
            for (uint32_t j = 0; j < N_HEAD; ++j) {
                if (own[e][j]) { atomicAdd(&sums[j * c.width + value_at<N_BIT>(column, e)], own[e][j]); }
            }
        }
    }
}

// one of the queries' numbers of all threads, over the block
template <typename F>
static __device__ void over_block(float (&x)[N_HEAD], float (&room)[AT_WARPS][N_HEAD], const F & f) {
    const uint32_t warp = threadIdx.x / 32;
#pragma unroll
    for (uint32_t j = 0; j < N_HEAD; ++j) {
        x[j] = over_lanes(x[j], f);
        if (threadIdx.x % 32 == 0) { room[warp][j] = x[j]; }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t j = 0; j < N_HEAD; ++j) {
        x[j] = room[0][j];
        for (uint32_t w = 1; w < AT_WARPS; ++w) {
            x[j] = f(x[j], room[w][j]);
        }
    }
}

// a piece of the positions outside the pool
template <uint32_t BITS_K, uint32_t BITS_V>
static __device__ void attend_piece(const kvf_gpu_attend & a, const attend_task & task, uint32_t piece, attend_memory & m) {
    const attend_places  at(a);
    const auto &         p = a.p;
    const auto &         k = a.coding[0], &v = a.coding[1];
    const kvf_gpu_codes &keys = a.codes[0][task.seq], &values = a.codes[1][task.seq];
    const uint32_t       tid = threadIdx.x, warp = tid / 32, lane = tid % 32;

    const float * mean = mean_of(k, keys, piece * WIDE, task.head);
    float         base = 0;
    for (uint32_t e = lane; e < k.width; e += 32) {
        base += shared<float>(at.rotated + (warp * k.width + e) * sizeof(float)) * mean[e];
    }
    base = over_lanes(base, add<float>);
    if (lane == 0) { m.base[warp] = base; }
    __syncthreads();

    float    x[2][N_HEAD], top[N_HEAD], old[N_HEAD];
    uint32_t open[2]; // whether a position is not in the pool
    for (uint32_t j = 0; j < N_HEAD; ++j) {
        top[j] = old[j] = m.top[j];
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t pos = tid + i * AT, u = piece * WIDE + pos / UNIT;
        const bool     is = u < task.n_unit;
        int            products[N_HEAD] = {};
        open[i] = is && !(shared<uint32_t>(at.taken + u / 32 * sizeof(uint32_t)) >> u % 32 & 1);
        if (is) {
            const uint64_t slot = slot_of(k, u, task.head);
            key_products<BITS_K>(
                    a, (const uint32_t *) (keys.codes + slot * unit_bytes(k)) + pos % UNIT, products);
            const float scale = __half2float(((const half *) keys.scales)[slot * UNIT + pos % UNIT]);
#pragma unroll
            for (uint32_t j = 0; j < N_HEAD; ++j) {
                x[i][j] = logit(p, (products[j] - m.middle[j]) * scale * m.unit[j] + m.base[j]);
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < N_HEAD; ++j) {
            if (!is) { x[i][j] = NOWHERE; }
            top[j] = fmaxf(top[j], x[i][j]);
        }
    }
    over_block(top, m.parts[0], most);

    float sum[N_HEAD] = {}, largest[N_HEAD] = {}, weight[2][N_HEAD];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t pos = tid + i * AT, u = piece * WIDE + pos / UNIT;
        const float    scale =
                open[i] ? __half2float(((const half *) values.scales)[slot_of(v, u, task.head) * UNIT + pos % UNIT]) : 0;
#pragma unroll
        for (uint32_t j = 0; j < N_HEAD; ++j) {
            const float e    = x[i][j] > NOWHERE ? exp2f(x[i][j] - top[j]) : 0;
            const float unit = over_lanes(e, add<float>, 1, 8); // of the 16 lanes that have its positions
            if (a.chooses && task.asker >= 0 && lane % UNIT == 0 && u < task.n_unit && j < task.n) {
                p.lse[((uint64_t) task.asker * p.n_head + task.first + j) * p.ask.n_unit + u] =
                        unit > 0 ? top[j] + log2f(unit) : NOWHERE;
            }
            sum[j] += open[i] ? e : 0;
            weight[i][j] = e * scale;
            largest[j]   = fmaxf(largest[j], weight[i][j]);
        }
    }
    over_block(sum, m.parts[1], add<float>);
    over_block(largest, m.parts[2], most);

    bool little = true; // of the weights so far
#pragma unroll
    for (uint32_t j = 0; j < N_HEAD; ++j) {
        little = little && sum[j] <= LITTLE * m.sum[j] * exp2f(old[j] - top[j]);
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const float byte = largest[j] > 0 ? rintf(weight[i][j] * (MOST_BYTE / largest[j])) : 0;
            shared<uint8_t>(at.weights + j * N_POS + tid + i * AT) = (uint8_t) byte;
            if (i == 0) { weight[0][j] = byte; } else { weight[0][j] += byte; }
        }
    }
    for (uint32_t i = tid; i < N_HEAD * v.width; i += AT) {
        shared<int>(at.sums + i * sizeof(int)) = 0;
    }
    float bytes[N_HEAD];
    for (uint32_t j = 0; j < N_HEAD; ++j) {
        bytes[j] = weight[0][j];
    }
    over_block(bytes, m.parts[0], add<float>);
    if (!little) {
        value_sums<BITS_V>(a, task, piece);
        __syncthreads();
    }
    const float * mean_v = mean_of(v, values, piece * WIDE, task.head);
#pragma unroll 1
    for (uint32_t i = tid; i < N_HEAD * v.width; i += AT) {
        const uint32_t j = i / v.width;
        float          its[N_HEAD][4]; // registers are not indexed
        for (uint32_t h = 0; h < N_HEAD; ++h) {
            its[h][0] = exp2f(old[h] - top[h]);
            its[h][1] = bytes[h];
            its[h][2] = little ? 0 : largest[h] / MOST_BYTE;
            its[h][3] = sum[h];
        }
        float & to = shared<float>(at.values + i * sizeof(float));
        to         = to * its[j][0] + (shared<int>(at.sums + i * sizeof(int)) - MIDDLE * its[j][1]) * its[j][2] +
             its[j][3] * mean_v[i % v.width];
    }
    __syncthreads();
    if (tid == 0) {
        for (uint32_t j = 0; j < N_HEAD; ++j) {
            m.sum[j] = m.sum[j] * exp2f(old[j] - top[j]) + sum[j];
            m.top[j] = top[j];
        }
    }
    __syncthreads();
}

// the keys of the pool, as they are: what is common up to the token, and the guests. 16 lanes have a cell
static __device__ void attend_pool(const kvf_gpu_attend & a, const asked & ask, const attend_task & task, attend_memory & m) {
    constexpr uint32_t LANES = 16, EACH = 32 / LANES;

    const auto &   p    = a.p;
    const float *  q    = &shared<float>(attend_places(a).plain);
    const uint32_t lane = threadIdx.x % LANES, n_first = p.n_chunk / EACH, n_slot = p.n_chunk / UNIT;
    const uint32_t n_far = kvf_gpu_attend::n_far(task.n_part), n_warp = (task.n_part - n_far) * AT_WARPS;
    const uint32_t n_common = task.n_common * n_first, n_all = n_common + task.n_fill * (UNIT / EACH);
    const int32_t *common = ask.common(task.seq), *blocks = ask.blocks(task.seq);

    sum_of_powers all; // of head lane % N_HEAD
#pragma unroll 1
    for (uint32_t i = (task.part - n_far) * AT_WARPS + threadIdx.x / 32; i < n_all; i += n_warp) {
        const uint32_t which = threadIdx.x % 32 / LANES;
        bool           is    = true;
        uint32_t       cell;
        if (i < n_common) {
            const int32_t * c = common + i / n_first * kvf_gpu_ask::LEN_COMMON;
            const int32_t   j = i % n_first * EACH + which;
            is                = j < c[kvf_gpu_ask::N] && c[kvf_gpu_ask::FIRST] + j <= task.pos;
            cell              = c[kvf_gpu_ask::CELL] + (is ? j : 0);
        } else {
            const uint32_t slot = (i - n_common) / (UNIT / EACH);
            cell = blocks[slot / n_slot] * p.n_chunk + slot % n_slot * UNIT + (i - n_common) % (UNIT / EACH) * EACH + which;
        }
        const char * row = p.k.data + (uint64_t) cell * p.row_size;
        const float  x   = key_product<-1, LANES>(p, row, task.head, q);
        if (is && lane < HEADS) { all.add(logit(p, x)); }
    }
    const float top = over_lanes(all.top, most, 4, 16), sum = over_lanes(all.sum * exp2f(all.top - top), add<float>, 4, 16);
    const uint32_t warp = threadIdx.x / 32, h = threadIdx.x % 32;
    if (h < N_HEAD) {
        m.parts[0][warp][h] = top;
        m.parts[1][warp][h] = sum;
    }
    __syncthreads();
    if (threadIdx.x < N_HEAD) {
        sum_of_powers its;
        for (uint32_t w = 0; w < AT_WARPS; ++w) {
            its.add(m.parts[0][w][h], m.parts[1][w][h]);
        }
        m.top[h] = its.top;
        m.sum[h] = its.sum;
    }
    __syncthreads();
}
