// The index of kvflash-fresh.h in a GPU's memory, a part of the backend's library: made of keys in records; and the table of
// functions that kvflash-gpu.cpp calls.

#include "kvflash-kernels.cuh"

#include <mutex>

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

static __device__ const char * row_of(const kvf_gpu_keys & keys, const kvf_gpu_records & records, uint32_t i) {
    return records.at[i / records.n_chunk] + keys.offs + i % records.n_chunk * keys.row_size;
}

// x: [n][n_value]. grid: positions
static __global__ void kvf_decode(const __grid_constant__ kvf_gpu_keys keys, const __grid_constant__ kvf_gpu_records records,
        uint32_t skip, uint32_t every, float * dst) {
    char * const   row = &shared<char>();
    const uint32_t n   = keys.n_head_kv * keys.d;
    copy_bytes(row, row_of(keys, records, skip + blockIdx.x * every), keys.row_size, threadIdx.x, blockDim.x);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        dst[(uint64_t) blockIdx.x * n + i] = key_value(keys.type, row, i);
    }
}

// grid: blocks of 256 values
static __global__ void kvf_mean(const float * x, uint32_t n, uint32_t n_value, float * mean) {
    const uint32_t i = blockIdx.x * 32 + threadIdx.x % 32, part = threadIdx.x / 32;
    auto &         sums = shared<float[32][33]>();

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

static constexpr uint32_t SIDE = 32;

// grid: tiles of rows and of columns of a covariance; heads. 16 x 16 threads, each 2 x 2 values
static __global__ void kvf_cov(const float * x, uint32_t n, uint32_t n_head, uint32_t d, const float * mean, float * cov) {
    auto &a = shared<float[SIDE][SIDE + 1]>(), &b = shared<float[SIDE][SIDE + 1]>(sizeof(a)); // [position][value]

    const uint32_t head = blockIdx.z, tx = threadIdx.x, ty = threadIdx.y, tid = ty * 16 + tx;
    const float *  from = x + head * d;
    mean += head * d;

    float sums[2][2] = {};
    for (uint32_t t0 = 0; t0 < n; t0 += SIDE) {
        for (uint32_t i = tid; i < SIDE * SIDE; i += 256) {
            const uint32_t t = i / SIDE, ia = blockIdx.x * SIDE + i % SIDE, ib = blockIdx.y * SIDE + i % SIDE;
            const float *  key = from + (uint64_t) (t0 + t) * n_head * d;
            a[t][i % SIDE]     = t0 + t < n && ia < d ? key[ia] - mean[ia] : 0;
            b[t][i % SIDE]     = t0 + t < n && ib < d ? key[ib] - mean[ib] : 0;
        }
        __syncthreads();
#pragma unroll
        for (uint32_t t = 0; t < SIDE; ++t) {
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
            const uint32_t ia = blockIdx.x * SIDE + ty + 16 * i, ib = blockIdx.y * SIDE + tx + 16 * j;
            if (ia < d && ib < d) { cov[((uint64_t) head * d + ia) * d + ib] = sums[i][j] / n; }
        }
    }
}

// The codes of whole units from position pos on. grid: units; heads; layers. In shared memory: the rows of a unit, its keys
// [d][UNIT] and their components [n_comp][UNIT]
static __global__ void kvf_encode(const kvf_gpu_keys * layers, const __grid_constant__ kvf_gpu_records records, uint32_t seq,
        uint32_t pos, const __grid_constant__ kvf_gpu_form f) {
    const kvf_gpu_keys layer = layers[blockIdx.z];
    const uint32_t     unit = blockIdx.x, head = blockIdx.y, n_comp = f.n_comp, tid = threadIdx.x, d = layer.d;
    if (head >= layer.n_head_kv) { return; }

    const kvf_gpu_index index = layer.index[seq];
    float * const       keys  = &shared<float>();
    float * const       comps = keys + d * UNIT;
    char * const        rows  = (char *) (comps + n_comp * UNIT);

    uint32_t       n_byte;
    const uint32_t from = piece_of(layer, head, n_byte), room = piece_room(layer);
    for (uint32_t t = tid / 32; t < UNIT; t += blockDim.x / 32) {
        copy_bytes(rows + t * room, row_of(layer, records, unit * UNIT + t) + from, n_byte, tid % 32, 32);
    }
    __syncthreads();
    for (uint32_t i = tid; i < UNIT * d; i += blockDim.x) {
        const uint32_t t = i / d, j = i % d, at = head * d + j - from / layer.block_size * layer.block;
        keys[j * UNIT + t] = key_value(layer.type, rows + t * room, at) - index.mean[head * d + j];
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
    uint8_t *      codes = index.codes + ((uint64_t) group * layer.n_head_kv + head) * f.group_size();
    for (uint32_t i = tid; i < f.n_quad() * UNIT; i += blockDim.x) {
        const uint32_t quad = i / UNIT, t = i % UNIT;

        uint32_t word = 0;
        for (uint32_t b = 0; b < 4; ++b) {
            for (uint32_t low = 0; low < 4; ++low) {
                const int c = f.component(quad * 4 + b, low);
                if (c < 0) { continue; }
                const float mid = middle(f, c), step = index.step[head * n_comp + c];
                const float v = step > 0 ? roundf(comps[c * UNIT + t] / step + mid) : mid;
                word |= (uint32_t) fminf(fmaxf(v, 0), 2 * mid) << (8 * b + shift + low);
            }
        }
        uint32_t * dst = (uint32_t *) (codes + quad * 128 + (first % 32 + t) * 4);
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

static void decode(
        const kvf_gpu_keys & keys, const kvf_gpu_records & records, uint32_t skip, uint32_t every, float * dst, uint32_t n) {
    launch(kvf_decode, dim3(n), dim3(128), GGML_PAD(keys.row_size, 16), stream_on(dst), false, keys, records, skip, every,
            dst);
}

static void moments(const float * x, uint32_t n, uint32_t n_head, uint32_t d, float * mean, float * cov) {
    const auto     stream = stream_on(x);
    const uint32_t n_tile = (d + SIDE - 1) / SIDE, n_value = n_head * d;
    launch(kvf_mean, dim3((n_value + 31) / 32), dim3(1024), sizeof(float[32][33]), stream, false, x, n, n_value, mean);
    launch(kvf_cov, dim3(n_tile, n_tile, n_head), dim3(16, 16), 2 * sizeof(float[SIDE][SIDE + 1]), stream, false, x, n,
            n_head, d, (const float *) mean, cov);
}

static void encode(const kvf_gpu_keys * layers, uint32_t n_layer, const kvf_gpu_keys & most, const kvf_gpu_records & records,
        uint32_t seq, uint32_t pos, const kvf_gpu_form & form) {
    const size_t memory = (most.d + form.n_comp) * UNIT * sizeof(float) + UNIT * piece_room(most);
    launch(kvf_encode, dim3(records.n * records.n_chunk / UNIT, most.n_head_kv, n_layer), dim3(256), memory,
            stream_on(layers), false, layers, records, seq, pos, form);
}

static void sum_rows(const kvf_gpu_coders & coders, const kvf_gpu_chunks & from, const kvf_gpu_sampled & some, double * dst,
        uint32_t n_value) {
    kvf_sum_rows_of(coders, from, some, dst, n_value, stream_on(coders.at));
}

static void encode_rows(const kvf_gpu_coders & coders, const kvf_gpu_chunks & from, uint32_t seq, uint32_t first) {
    kvf_encode_rows_of(coders, from, seq, first, stream_on(coders.at));
}

static void fill(void * dst, int value, size_t stride, size_t width, size_t n) {
    const auto stream = stream_on(dst);
    CUDA_CHECK(cudaMemset2DAsync(dst, stride, value, width, n, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static void fetch_of(const kvf_gpu_layer & l, uint32_t seq, const int32_t * blocks) {
    kvf_fetch_units(l, seq, blocks, stream_on(l.moves));
}

static void * make_events(const void * on) {
    stream_on(on); // sets the device
    auto * res = new kvf_events{};
    for (auto * event : {&res->forked, &res->done}) {
        CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    return res;
}

static void forget_events(void * events) {
    auto * its = (kvf_events *) events;
    CUDA_CHECK(cudaEventDestroy(its->forked));
    CUDA_CHECK(cudaEventDestroy(its->done));
    delete its;
}

static void wait(const void * on) { CUDA_CHECK(cudaStreamSynchronize(stream_on(on))); }

static void idle(const void * on) {
    stream_on(on); // sets the device
    CUDA_CHECK(cudaDeviceSynchronize());
}

bool kvflash_launches(const ggml_tensor * node) {
    return ((const ggml_custom_op_params *) node->op_params)->n_tasks == kvf_gpu::LAUNCHES;
}

void kvflash_launch(ggml_tensor * node, void * on) {
    ((void (*)(ggml_tensor *, void *))((const ggml_custom_op_params *) node->op_params)->fun)(node, on);
}

const kvf_gpu * kvflash_gpu() {
    static const kvf_gpu res = {kvf_choose_node, kvf_attend_node, kvf_mix_node, kvf_late_node, kvf_occupy_node, kvf_fits,
            kvf_attend_warps, kvf_shared_size, kvf_fork, kvf_back, kvf_join, make_events, forget_events, upload,
            download, copy, pinned, decode, moments, encode, sum_rows, encode_rows,
            kvf_coder_memory, fill, fetch_of, wait, idle};
    return &res;
}
