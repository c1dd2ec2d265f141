#pragma once

// prepares the queries of a pass once for all of its blocks: as bytes and halves for products, and multiplied with the means
// of segments. It also finds the units that the pool has

#include "coarse/attend.cuh"

static constexpr uint32_t PREPARE  = 32 * COLS; // threads: a warp for each query
static constexpr uint32_t SEGMENTS = 4;         // of a block

// set a bit for each unit of a sequence that the pool has: common ones and guests
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

// Write a scaled query as halves, for products with the rows of the pool: [16 elements][lane], four elements each. x: the
// query, not rotated
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

// Write a query as bytes, for products with codes. x: the rotated query
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
    if (lane == 0) { // for base-2 logits
        to.unit[column]   = largest / MOST_BYTE * (LOG2E * a.p.scale);
        to.middle[column] = middle_of<N_BIT>() * sum;
    }
}

// Multiply a query by the factors of its head, and rotate it, by one warp. by: room for the factors
static __device__ void rotate_query(const kvf_gpu_coding & c, const float * factors, float * x, float * by) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll 4
    for (uint32_t e = lane; e < c.d; e += 32) { // these loads overlap the first rotation
        by[e] = factors[e];
    }
    __syncwarp();
    if (c.n_rot) { hadamard_equal(x, c.d / c.n_rot, c.n_rot); }
    for (uint32_t e = lane; e < c.d; e += 32) {
        x[e] *= by[e];
    }
    hadamard_powers(x, c.d);
    __syncwarp();
}

// multiply a rotated query with the means of up to SEGMENTS segments, from `first` on and below n
static __device__ void segment_products(const kvf_gpu_attend & a, const kvf_gpu_codes & codes, uint32_t head, uint32_t first,
        uint32_t n, const float * x, float * to) {
    const uint32_t width = a.coding[0].width, lane = threadIdx.x % 32;
    const float *  means[SEGMENTS];
    float          sums[SEGMENTS] = {};
#pragma unroll
    for (uint32_t i = 0; i < SEGMENTS; ++i) {
        means[i] = mean_of(a.coding[0], codes, min(first + i, n - 1) * (SEGMENT / UNIT), head);
    }
    for (uint32_t e = lane; e < width; e += 32) {
#pragma unroll
        for (uint32_t i = 0; i < SEGMENTS; ++i) {
            sums[i] += means[i][e] * x[e];
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < SEGMENTS; ++i) {
        const float sum = over_lanes(sums[i], add<float>);
        if (lane == 0 && first + i < n) { to[(first + i) * COLS] = sum * (LOG2E * a.p.scale); }
    }
}

// grid: blocks for SEGMENTS segments each, of which the first also writes the queries, and one block for the units; key
// heads; passes
template <uint32_t N_BIT>
static __global__ void __launch_bounds__(PREPARE) kvf_prepare(const __grid_constant__ kvf_gpu_attend a,
        const kvf_gpu_queries q, const int32_t * words, uint32_t tokens, uint32_t n) {
    ggml_cuda_pdl_lc(); // blocks of kvf_attend may begin
    const asked         ask    = {a.p, nullptr, words};
    const int32_t *     of_row = words + a.p.ask.size();
    const attend_pass   pass(a, blockIdx.y, blockIdx.z, tokens, n);
    const prepared_pass to(a, pass, tokens);
    if (blockIdx.x + 1 == gridDim.x) {
        for (uint32_t i = 0; i < pass.n_row && blockIdx.y == 0; ++i) {
            const int32_t seq = pass.seq_of(of_row, i);
            if (seq >= 0 && (i == 0 || pass.seq_of(of_row, i - 1) != seq)) { find_taken(a, ask, seq, to.taken + i * a.n_word()); }
        }
        return;
    }
    const uint32_t column = threadIdx.x / 32, first = blockIdx.x * SEGMENTS;
    if (column >= pass.n) { return; }
    const int32_t seq = pass.seq_of(of_row, pass.row_of(column) - pass.row);
    if (seq < 0) { return; }
    const uint32_t n_unit    = (ask.blocks(seq) - kvf_gpu_ask::LEN_SEQ)[kvf_gpu_ask::N_UNIT];
    const uint32_t n_segment = (n_unit + SEGMENT / UNIT - 1) / (SEGMENT / UNIT);
    if (first > 0 && first >= n_segment) { return; }

    const auto &  c     = a.coding[0];
    const auto    codes = a.codes[0][seq];
    const float * query = (const float *) (q.data + pass.row_of(column) * q.row + pass.head_of(column) * q.head);
    float * const x     = &shared<float>() + column * 2 * c.width;
#pragma unroll 4
    for (uint32_t e = threadIdx.x % 32; e < c.width; e += 32) {
        x[e] = e < c.d ? query[e] : 0;
    }
    __syncwarp();
    for (uint32_t s = first; s < min(first + SEGMENTS, n_segment); ++s) {
        fetch_early(mean_of(c, codes, s * (SEGMENT / UNIT), pass.head), c.width * sizeof(float));
    }
    if (first == 0) { plain_query(a, x, column, to.plain); }
    __syncwarp();
    rotate_query(c, codes.factors + pass.head * c.d, x, x + c.width);
    if (first == 0) { query_words<N_BIT>(a, x, column, to); }
    if (n_segment > 0) { segment_products(a, codes, pass.head, first, n_segment, x, to.base + column); }
}
