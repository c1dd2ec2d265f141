// Encodes the rows of records on a GPU. The codes equal those of kvf_codes bit for bit, because it adds up in the same
// order.

#include "coarse/coded.cuh"

// floats from row to row of a head in shared memory: padded, so that rows begin in different banks
static KVF_BOTH uint32_t stride_of(const kvf_gpu_coding & c) { return c.width + 1; }

// the offset of the raw rows in shared memory, after the floats
static KVF_BOTH size_t rows_at(const kvf_gpu_coding & c) { return GGML_PAD(UNIT * stride_of(c) * sizeof(float), 16); }

size_t kvf_coder_memory(const kvf_gpu_coder & c) { return rows_at(c.coding) + UNIT * piece_room(c); }

// read n rows of a head as floats, with zeros after them, and undo llama.cpp's rotation. at(t): the position of row t,
// counted from the first record
template <typename P>
static __device__ void read_rows(const kvf_gpu_coder & c, uint32_t head, const kvf_gpu_chunks & from, uint32_t n, const P & at) {
    const auto &   k    = c.coding;
    float * const  x    = &shared<float>();
    char * const   rows = &shared<char>(rows_at(k));
    const uint32_t tid = threadIdx.x, d = k.d, stride = stride_of(k);

    uint32_t       n_byte;
    const uint32_t first = piece_of(c, head, n_byte), room = piece_room(c);
    __syncthreads();
    for (uint32_t t = tid / 32; t < n && !c.by_value; t += AT_WARPS) {
        const uint32_t pos = at(t);
        const char *   row = from.records[pos / from.n_chunk] + c.offs + pos % from.n_chunk * c.stride;
        copy_bytes(rows + t * room, row + first, n_byte, tid % 32, 32);
    }
    __syncthreads();
    for (uint32_t i = tid; i < UNIT * k.width; i += AT) { // in the order of memory
        const uint32_t t = c.by_value ? i % UNIT : i / k.width, e = c.by_value ? i / UNIT : i % k.width;
        float          value = 0;
        if (t < n && e < d && c.by_value) {
            const uint32_t pos  = at(t);
            const char *   from_value = from.records[pos / from.n_chunk] + c.offs + (uint64_t) (head * d + e) * c.stride;
            value = key_value(c.type, from_value, pos % from.n_chunk);
        } else if (t < n && e < d) {
            value = key_value(c.type, rows + t * room, head * d + e - first / c.block_size * c.block);
        }
        x[t * stride + e] = value;
    }
    if (k.n_rot) { hadamard(x, stride, UNIT, d / k.n_rot, k.n_rot); }
    __syncthreads();
}

// sum a sample's rows, and their squares -> dst [n_coder][n_value][2]. grid: heads, coders
static __global__ void __launch_bounds__(AT) kvf_sum_rows(const kvf_gpu_coder * coders, const kvf_gpu_chunks from,
        const kvf_gpu_sampled some, double * dst, uint32_t n_value) {
    const kvf_gpu_coder & c    = coders[blockIdx.y];
    const uint32_t        head = blockIdx.x, d = c.coding.d, stride = stride_of(c.coding);
    if (head >= c.coding.n_head) { return; }

    const uint32_t each = some.of_chunk(from.n_chunk), n = some.n(from.n_chunk);
    const float *  x    = &shared<float>();
    double * const sums = dst + ((uint64_t) blockIdx.y * n_value + head * d) * 2;
    for (uint32_t i = threadIdx.x; i < 2 * d; i += AT) {
        sums[i] = 0;
    }
    for (uint32_t first = 0; first < n; first += UNIT) {
        const uint32_t n_here = min(UNIT, n - first);
        read_rows(c, head, from, n_here, [&](uint32_t t) {
            return (some.first + (first + t) / each) * from.n_chunk + (first + t) % each * some.every;
        });
        for (uint32_t e = threadIdx.x; e < d; e += AT) { // each thread always takes the same elements
            double sum = sums[2 * e], square = sums[2 * e + 1];
            for (uint32_t t = 0; t < n_here; ++t) {
                const double value = x[t * stride + e];
                sum += value;
                square += value * value; // a product of two floats is exact in double precision
            }
            sums[2 * e]     = sum;
            sums[2 * e + 1] = square;
        }
    }
}

// compute a segment's means from sums of n rows, divide them by the factors, and rotate them. n 0: copy the means of the
// segment before. grid: heads, coders
static __global__ void __launch_bounds__(AT) kvf_means(const kvf_gpu_coder * coders, uint32_t seq, uint32_t segment,
        const double * from, uint32_t n_value, uint32_t n) {
    const kvf_gpu_coder & c    = coders[blockIdx.y];
    const auto &          k    = c.coding;
    const uint32_t        head = blockIdx.x;
    if (head >= k.n_head) { return; }

    const kvf_gpu_codes to   = c.codes[seq];
    const double *      sums = from + ((uint64_t) blockIdx.y * n_value + head * k.d) * 2;
    float * const       x    = &shared<float>();
    for (uint32_t e = threadIdx.x; e < k.width; e += AT) {
        const bool is = e < k.d && n > 0;
        x[e] = is ? __fmul_rn((float) (sums[2 * e] / n), __fdiv_rn(1, to.factors[head * k.d + e])) : 0;
    }
    hadamard_blocks(x, k.d, stride_of(k), 1);
    const bool    own  = n > 0 || segment == 0;
    float * const mean = mean_of(k, to, segment * (SEGMENT / UNIT), head);
    const float * its  = own ? x : mean_of(k, to, (segment - 1) * (SEGMENT / UNIT), head);
    for (uint32_t e = threadIdx.x; e < k.width; e += AT) {
        mean[e] = its[e];
    }
}

static __device__ uint32_t code_of(const kvf_gpu_coder & c, float y) {
    const uint32_t above = fminf(fabsf(y), c.n_half - 1);
    return y < 0 ? c.n_half - 1 - above : c.n_half + above;
}

// encode units, of which `first` is the first one of the first record. grid: units, heads, coders
static __global__ void __launch_bounds__(AT)
        kvf_encode_rows(const kvf_gpu_coder * coders, const kvf_gpu_chunks from, uint32_t seq, uint32_t first) {
    const kvf_gpu_coder & c = coders[blockIdx.z];
    const auto &          k = c.coding;
    const uint32_t        head = blockIdx.y, u = first + blockIdx.x, tid = threadIdx.x, stride = stride_of(k);
    if (head >= k.n_head) { return; }

    const kvf_gpu_codes to   = c.codes[seq];
    const uint64_t      slot = slot_of(k, u, head);
    float * const       x    = &shared<float>();
    read_rows(c, head, from, UNIT, [](uint32_t t) { return blockIdx.x * UNIT + t; });
    for (uint32_t e = tid; e < k.d; e += AT) {
        const float factor = __fdiv_rn(1, to.factors[head * k.d + e]);
        for (uint32_t t = 0; t < UNIT; ++t) {
            x[t * stride + e] = __fmul_rn(x[t * stride + e], factor);
        }
    }
    hadamard_blocks(x, k.d, stride, UNIT);
    const float * mean = mean_of(k, to, u, head);
    for (uint32_t e = tid; e < k.width; e += AT) {
        const float its = mean[e];
        for (uint32_t t = 0; t < UNIT; ++t) {
            x[t * stride + e] = __fsub_rn(x[t * stride + e], its);
        }
    }
    __syncthreads();

    float * const factors = &shared<float>(rows_at(k)); // the rows are not needed any more
    if (tid < UNIT) {
        float power = 0;
#pragma unroll 8
        for (uint32_t e = 0; e < k.width; ++e) {
            const float value = x[tid * stride + e];
            power             = __fadd_rn(power, __fmul_rn(value, value));
        }
        const float one   = __fmul_rn(__fsqrt_rn(__fdiv_rn(power, (float) k.d)), c.step);
        const half  scale = __float2half_rn(fminf(one, 65504));
        ((half *) to.scales)[slot * UNIT + tid] = scale;
        factors[tid] = __half2float(scale) > 0 ? __fdiv_rn(1, __half2float(scale)) : 0;
    }
    __syncthreads();
    const uint32_t n_each = 8 / k.n_bit; // codes in a byte: a word has n_each times four elements
    uint32_t *     dst    = (uint32_t *) (to.codes + slot * unit_bytes(k));
    for (uint32_t i = tid; i < k.width / 4 / n_each * UNIT; i += AT) {
        const uint32_t t = i % UNIT, word = i / UNIT;
        uint32_t       res = 0;
        for (uint32_t e = 0; e < 4 * n_each; ++e) {
            const float y = __fmul_rn(x[t * stride + word * 4 * n_each + e], factors[t]);
            res |= code_of(c, y) << (8 * (e % 4) + e / 4 * k.n_bit);
        }
        dst[i] = res;
    }
}

void kvf_sum_rows_of(const kvf_gpu_coders & c, const kvf_gpu_chunks & from, const kvf_gpu_sampled & some, double * dst,
        uint32_t n_value) {
    launch(kvf_sum_rows, dim3(c.n_head, c.n), dim3(AT), c.memory, kvf_stream_on(c.at), false, c.at, from, some, dst, n_value);
}

void kvf_make_means_of(const kvf_gpu_coders & c, uint32_t seq, uint32_t segment, const double * sums, uint32_t n_value,
        uint32_t n) {
    launch(kvf_means, dim3(c.n_head, c.n), dim3(AT), c.memory, kvf_stream_on(c.at), false, c.at, seq, segment, sums, n_value, n);
}

void kvf_encode_rows_of(const kvf_gpu_coders & c, const kvf_gpu_chunks & from, uint32_t seq, uint32_t first) {
    const dim3 grid(from.n * (from.n_chunk / UNIT), c.n_head, c.n);
    launch(kvf_encode_rows, grid, dim3(AT), c.memory, kvf_stream_on(c.at), false, c.at, from, seq, first);
}
