#pragma once

// what a pass over the codes needs of its queries, prepared once for all of its blocks: their bytes, as products take them, and
// their products with the means of segments; and which units the pool has

#include "kvflash-attend.cuh"

static constexpr uint32_t PREPARE  = 32 * COLS; // threads: a warp a query
static constexpr uint32_t SEGMENTS = 64;        // blocks that share them, at most

// Those that are common, and the guests. to: a bit each
static __device__ void find_taken(const kvf_gpu_attend & a, const asked & ask, uint32_t seq, uint32_t * to) {
    uint32_t * const taken  = &shared<uint32_t>();
    const int32_t *  table  = a.p.guests[seq].table;
    const uint32_t   n_fill = (ask.blocks(seq) - kvf_gpu_ask::LEN_SEQ)[kvf_gpu_ask::N_FILL];
    for (uint32_t i = threadIdx.x; i < a.n_word(); i += PREPARE) {
        taken[i] = ask.bits(seq)[i];
    }
    __syncthreads();
    for (uint32_t slot = threadIdx.x; slot < n_fill; slot += PREPARE) {
        const int32_t u = table[slot];
        if (u >= 0) { atomicOr(&taken[u / 32], 1u << u % 32); }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.n_word(); i += PREPARE) {
        to[i] = taken[i];
    }
    __syncthreads();
}

// as halves, scaled, of four values a lane that multiplies them: [16 values][lane]
static __device__ void plain_query(const kvf_gpu_attend & a, const float * x, uint32_t column, uint2 * to) {
    const uint32_t d = a.coding[0].d;
    for (uint32_t i = threadIdx.x % 32; i < a.n_plain() / COLS; i += 32) {
        float y[4];
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            y[e] = i * 4 + e < d ? x[i * 4 + e] * a.p.scale : 0;
        }
        to[i / 4 * 32 + column * 4 + i % 4] = {halves(y[0], y[1]), halves(y[2], y[3])};
    }
}

// x: rotated
template <uint32_t N_BIT>
static __device__ void query_words(const kvf_gpu_attend & a, const float * x, uint32_t column, const prepared_pass & to) {
    constexpr uint32_t EACH = 4 / N_BIT; // products with the same words

    const uint32_t lane = threadIdx.x % 32, width = a.coding[0].width;
    float          largest = 0, sum = 0;
    for (uint32_t e = lane; e < width; e += 32) {
        largest = fmaxf(largest, fabsf(x[e]));
    }
    largest            = over_lanes(largest, most);
    const float factor = largest > 0 ? MOST_BYTE / largest : 0;
    uint32_t *  words  = (uint32_t *) to.words + column * 8;
    for (uint32_t i = lane; i < a.n_step() * 8; i += 32) {
        const uint32_t step = i / 8, first = ((step / EACH * 4 + i % 8 / 2) * EACH + step % EACH) * 8 + i % 2 * 4;
        uint32_t       word = 0;
#pragma unroll
        for (uint32_t b = 0; b < 4 && first < width; ++b) {
            const int one = __float2int_rn(x[first + b] * factor);
            word |= (uint32_t) (one & 255) << 8 * b;
            sum += one;
        }
        words[step * COLS * 8 + i % 8] = word;
    }
    sum = over_lanes(sum, add<float>);
    if (lane == 0) { // logits are of base 2
        to.unit[column]   = largest / MOST_BYTE * (LOG2E * a.p.scale);
        to.middle[column] = middle_of<N_BIT>() * sum;
    }
}

// grid: segments are shared by all blocks but the last one, which has units; passes of a token; tokens
template <uint32_t N_BIT>
static __global__ void __launch_bounds__(PREPARE) kvf_prepare(const __grid_constant__ kvf_gpu_attend a,
        const kvf_gpu_queries q, const int32_t * words, uint32_t tokens, uint32_t n) {
    ggml_cuda_pdl_lc(); // blocks of kvf_attend begin
    const asked         ask    = {a.p, nullptr, words};
    const int32_t *     of_row = words + a.p.ask.size();
    const attend_pass   pass(a, tokens, n);
    const prepared_pass to(a, pass, tokens);
    if (blockIdx.x + 1 == gridDim.x) {
        for (uint32_t i = 0; i < pass.n_row && blockIdx.y == 0; ++i) {
            const int32_t seq = pass.seq_of(of_row, i);
            if (seq >= 0 && (i == 0 || pass.seq_of(of_row, i - 1) != seq)) { find_taken(a, ask, seq, to.taken + i * a.n_word()); }
        }
        return;
    }
    const uint32_t column = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (column / pass.share >= pass.n_row) { return; }
    const auto &  c     = a.coding[0];
    const float * query = (const float *) (q.data + pass.row_of(column) * q.row + pass.head_of(column) * q.head);
    float * const x     = &shared<float>() + column * 2 * c.width;
    float * const by    = x + c.width;
#pragma unroll 4
    for (uint32_t e = lane; e < c.width; e += 32) {
        x[e] = e < c.d ? query[e] : 0;
    }
    const int32_t seq = pass.seq_of(of_row, column / pass.share);
    if (seq < 0) { return; }
    const auto    codes   = a.codes[0][seq];
    const float * factors = codes.factors + pass.head * c.d;
    fetch_early(mean_of(c, codes, blockIdx.x * (SEGMENT / UNIT), pass.head), c.width * sizeof(float)); // there is room for it
#pragma unroll 4
    for (uint32_t e = lane; e < c.d; e += 32) {
        by[e] = factors[e];
    }
    __syncwarp();
    if (blockIdx.x == 0) { plain_query(a, x, column, to.plain); }
    __syncwarp();
    if (c.n_rot) { hadamard_equal(x, c.d / c.n_rot, c.n_rot); }
    for (uint32_t e = lane; e < c.d; e += 32) {
        x[e] *= by[e];
    }
    hadamard_powers(x, c.d);
    __syncwarp();
    if (blockIdx.x == 0) { query_words<N_BIT>(a, x, column, to); }

    const uint32_t n_unit = (ask.blocks(seq) - kvf_gpu_ask::LEN_SEQ)[kvf_gpu_ask::N_UNIT], each = SEGMENT / UNIT;
#pragma unroll 1
    for (uint32_t s = blockIdx.x; s * each < n_unit; s += gridDim.x - 1) {
        const float * mean = mean_of(c, codes, s * each, pass.head);
        float         sum  = 0;
        for (uint32_t e = lane; e < c.width; e += 32) {
            sum += mean[e] * x[e];
        }
        sum = over_lanes(sum, add<float>);
        if (lane == 0) { to.base[s * COLS + column] = sum * (LOG2E * a.p.scale); }
    }
}
