#pragma once

// what the attention to the pool sums: its keys as they are, for one softmax with the positions outside it

#include "kvflash-far.cuh"

// eight values of a row in shared memory, from i on, of which n are there
static __device__ void read_eight(int32_t type, const char * row, uint32_t i, uint32_t n, float (&res)[8]) {
    if (type == GGML_TYPE_Q8_0 && i % 8 == 0) {
        const auto & b     = ((const block_q8_0 *) row)[i / 32];
        const float  scale = __half2float(b.d);
#pragma unroll
        for (uint32_t e = 0; e < 8; ++e) {
            res[e] = scale * b.qs[i % 32 + e];
        }
        return;
    }
#pragma unroll 1
    for (uint32_t e = 0; e < 8; ++e) {
        const float value = e < n ? key_value(type, row, i + e) : 0;
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) { // registers are not indexed
            if (j == e) { res[j] = value; }
        }
    }
}

// the i-th eight cells of the pool, of which the lane has one: where it is; its position, -1: before all tokens; whether it is
static __device__ uint32_t pool_cell(
        const kvf_gpu_layer & p, const asked & ask, const attend_task & task, uint32_t i, int32_t & pos, bool & is) {
    const uint32_t g = threadIdx.x % 32 / 4, n_first = p.n_chunk / CELLS, n_slot = p.n_chunk / UNIT;
    const uint32_t n_common = task.n_common * n_first;
    is  = true;
    pos = -1;
    if (i < n_common) {
        const int32_t * c = ask.common(task.seq) + i / n_first * kvf_gpu_ask::LEN_COMMON;
        const int32_t   e = i % n_first * CELLS + g;
        is                = e < c[kvf_gpu_ask::N];
        pos               = c[kvf_gpu_ask::FIRST] + e;
        return c[kvf_gpu_ask::CELL] + (is ? e : 0);
    }
    const uint32_t slot = (i - n_common) / (UNIT / CELLS);
    return ask.blocks(task.seq)[slot / n_slot] * p.n_chunk + slot % n_slot * UNIT + (i - n_common) % (UNIT / CELLS) * CELLS + g;
}

// The keys as they are: what is common up to each row's token, and the guests. A warp takes some cells, four lanes each
static __device__ void attend_pool(const kvf_gpu_attend & a, const attend_places & at, const asked & ask,
        const attend_task & task, const int32_t * tokens, far_sums & its) {
    const auto &   p       = a.p;
    const float *  queries = &shared<float>(at.values);
    const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, room = at.row_room(a);
    const uint32_t n_far = kvf_gpu_attend::n_far(task.n_part), n_warp = (task.n_part - n_far) * at.n_warp;
    const uint32_t n_all = (task.n_common * p.n_chunk + task.n_fill * UNIT) / CELLS;
    char * const   row   = &shared<char>(at.rows) + (warp * CELLS + g) * room;

    const kvf_gpu_keys shape = {p.type_k, p.n_head_kv, p.d, a.block, a.block_size, 0, 0, nullptr};
    uint32_t           n_byte;
    const uint32_t     from = piece_of(shape, task.head, n_byte), first = task.head * p.d - from / a.block_size * a.block;
    int32_t            pos[2];
    sum_of_powers      all[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t q = 2 * t + j;
        pos[j]           = task.has(q) ? tokens[task.row_of(q) * kvf_gpu_attend::LEN_TOKEN + kvf_gpu_attend::POS] : -2;
    }
#pragma unroll 1
    for (uint32_t i = (task.part - n_far) * at.n_warp + warp; i < n_all; i += n_warp) {
        int32_t        its_pos;
        bool           is;
        const uint32_t cell = pool_cell(p, ask, task, i, its_pos, is);
        __syncwarp();
        copy_bytes(row, p.k.data + (uint64_t) cell * p.row_size + from, n_byte, t, 4);
        __syncwarp();
        float sums[COLS] = {};
#pragma unroll 1
        for (uint32_t e = t * 8; e < p.d; e += 32) {
            float key[8];
            read_eight(p.type_k, row, first + e, p.d - e, key);
#pragma unroll
            for (uint32_t b = 0; b < 8; ++b) {
#pragma unroll
                for (uint32_t j = 0; j < COLS; j += 4) {
                    const float4 q = *(const float4 *) (queries + plain_at(min(e + b, p.d - 1)) + j);
                    sums[j] += key[b] * q.x;
                    sums[j + 1] += key[b] * q.y;
                    sums[j + 2] += key[b] * q.z;
                    sums[j + 3] += key[b] * q.w;
                }
            }
        }
        float mine[2] = {};
#pragma unroll
        for (uint32_t j = 0; j < COLS; ++j) {
            const float sum = over_lanes(sums[j], add<float>, 1, 2);
            if (t == j / 2) { mine[j % 2] = sum; }
        }
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
            if (is && its_pos <= pos[j]) { all[j].add(logit(p, mine[j])); }
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
        its.top[j] = over_rows(all[j].top, most);
        its.sum[j] = over_rows(all[j].sum * exp2f(all[j].top - its.top[j]), add<float>);
    }
}
