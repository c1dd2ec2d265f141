// How long the choice of a layer takes on a GPU (pyllama_kvflash/native/src/kvflash-fresh.cu), with made-up keys of the 8B
// shape: 36 layers as one CUDA graph, between two of which as much memory is read as a layer has weights, so that nothing of
// a choice is in the device's cache. `bench/device.sh node` compiles it here, and carries it there.
//
//   node [EXCHANGED]    guests that a layer exchanges at most, 32 by default: random queries exchange them all

#include "kvflash-fresh.cu"

#include <cstdlib>
#include <random>
#include <vector>

// what the kernels take from the backend's library
const ggml_cuda_device_info & ggml_cuda_info() {
    static const ggml_cuda_device_info res = [] {
        ggml_cuda_device_info info = {};
        cudaDeviceProp        prop;
        CUDA_CHECK(cudaGetDeviceProperties(&prop, 0));
        info.devices[0].nsm = prop.multiProcessorCount;
        return info;
    }();
    return res;
}

void ggml_cuda_set_device(int) {}

[[noreturn]] void ggml_cuda_error(const char * call, const char *, const char * file, int line, const char * what) {
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, what);
    exit(1);
}

extern "C" void ggml_abort(const char * file, int line, const char *, ...) {
    fprintf(stderr, "%s:%d: a check failed\n", file, line);
    exit(1);
}

static constexpr uint32_t N_LAYER = 36, N_HEAD = 32, N_HEAD_KV = 8, D = 128, N_CHUNK = 64, N_COMMON = 6; // common chunks
static constexpr uint32_t N_BLOCK = 64, EACH = N_CHUNK / UNIT, N_SLOT = N_BLOCK * EACH, N_FILL = N_SLOT - N_COMMON * EACH;
static constexpr uint32_t ROW      = N_HEAD_KV * D / QK8_0 * sizeof(block_q8_0),
                          N_RECORD = 1024; // of which chunks have one in turn
static constexpr size_t RECORD = (size_t) N_LAYER * 2 * N_CHUNK * ROW, WEIGHTS = 100 << 20;

template <typename T> static T * on_device(size_t n, const std::vector<T> & values = {}) {
    T * res;
    CUDA_CHECK(cudaMalloc((void **) &res, n * sizeof(T) + 256)); // kernels read four nibbles at a time
    CUDA_CHECK(cudaMemset(res, 0, n * sizeof(T) + 256));
    if (!values.empty()) { CUDA_CHECK(cudaMemcpy(res, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice)); }
    return res;
}

static __global__ void read_weights(const uint4 * x, size_t n, uint32_t * res) {
    uint32_t sum = 0;
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        sum += x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
    }
    if (sum == 1) { *res = sum; } // or nothing would be read
}

// 8 components of 4 bits, 40 of 2 and 16 of 1, as make_words() of kvflash-gpu.cpp has them
static std::vector<kvf_gpu_word> words() {
    std::vector<kvf_gpu_word> res;
    for (uint16_t quad = 0; quad < 8; ++quad) {
        const uint32_t n_bit = quad < 2 ? 4 : quad < 7 ? 2 : 1;
        for (uint16_t shift = 0; shift < 4; shift += n_bit) {
            kvf_gpu_word word = {((1u << n_bit) - 1) * 0x01010101u, {}, quad, shift};
            for (int b = 0; b < 4; ++b) {
                const int nibble = 4 * quad + b;
                word.comps[b]    = n_bit == 4   ? nibble
                                   : n_bit == 2 ? 8 + 2 * (nibble - 8) + shift / 2
                                                : 48 + 4 * (nibble - 28) + shift;
            }
            res.push_back(word);
        }
    }
    return res;
}

// one token asks
static std::vector<int32_t> asks(const kvf_gpu_ask & shape, uint32_t context) {
    using A = kvf_gpu_ask;

    std::vector<int32_t> res(shape.size(), 0);
    res[A::N_ASKER]      = 1;
    res[A::LEN + A::POS] = context - 1;
    int32_t * s          = res.data() + A::LEN + A::LEN_ASKER * shape.n_asker;
    s[A::N_UNIT]         = shape.n_unit;
    s[A::N_COMMON]       = N_COMMON;
    int32_t * blocks     = s + A::LEN_SEQ;
    int32_t * common     = blocks + shape.n_block;
    auto *    bits       = (uint32_t *) common + A::LEN_COMMON * shape.n_block;
    for (uint32_t b = 0; b < N_BLOCK; ++b) {
        blocks[b] = (b + N_COMMON) % N_BLOCK;
    }
    for (uint32_t b = 0; b < N_COMMON; ++b) {
        common[A::LEN_COMMON * b + A::CELL]  = b * N_CHUNK;
        common[A::LEN_COMMON * b + A::FIRST] = context - N_CHUNK * (N_COMMON - b);
        common[A::LEN_COMMON * b + A::N]     = N_CHUNK;
    }
    for (uint32_t u = shape.n_unit - N_COMMON * EACH; u < shape.n_unit; ++u) {
        bits[u / 32] |= 1u << u % 32;
    }
    return res;
}

struct bench {
    std::mt19937                    rng{1};
    std::normal_distribution<float> normal;
    cudaStream_t                    stream;
    cudaEvent_t                     from, to;
    std::vector<kvf_gpu_layer>      layers{N_LAYER};
    std::vector<ggml_tensor>        nodes{N_LAYER};
    ggml_tensor                     q = {}, ask = {};
    int32_t *                       s;

    explicit bench(uint32_t context, uint32_t n_exchange) {
        CUDA_CHECK(cudaStreamCreate(&stream));
        CUDA_CHECK(cudaEventCreate(&from));
        CUDA_CHECK(cudaEventCreate(&to));

        kvf_gpu_layer l = {};
        l.n_turn = 1, l.n_head = N_HEAD, l.n_head_kv = N_HEAD_KV, l.d = D, l.n_chunk = N_CHUNK, l.n_slot = N_SLOT;
        l.n_exchange = n_exchange, l.type_k = GGML_TYPE_Q8_0, l.row_size = ROW, l.scale = 1 / sqrtf(D);
        const auto its = words();
        l.form         = {8, 40, 16, 64, 32, (uint32_t) its.size() / 4};
        l.words        = on_device(its.size(), its);
        l.ask          = {8, 1, N_BLOCK, context / UNIT};
        l.lse          = on_device<float>((size_t) 8 * N_HEAD * l.ask.n_unit);
        l.parts        = on_device<float>(2 * 8 * N_HEAD * KVF_GPU_PARTS);
        l.keys         = on_device<int32_t>(l.ask.n_unit);
        l.tops         = on_device<int32_t>(l.ask.n_unit / 4 + 1);
        l.n_fetched = on_device<uint64_t>(2), l.n_arrived = (uint32_t *) (l.n_fetched + 1), l.n_met = l.n_arrived + 1;

        static char * pinned = nullptr;
        if (!pinned) { CUDA_CHECK(cudaHostAlloc((void **) &pinned, RECORD * N_RECORD, 0)); }
        std::vector<const char *> records;
        for (uint32_t i = 0; i < context / N_CHUNK; ++i) {
            records.push_back(pinned + i % N_RECORD * RECORD);
        }
        auto * const at_records = on_device(records.size(), records);

        std::vector<uint8_t> codes((size_t) N_HEAD_KV * context * 16);
        for (auto & x : codes) {
            x = rng();
        }
        const auto basis = random(N_HEAD_KV * D * 64, 1 / sqrtf(D)), step = std::vector<float>(N_HEAD_KV * 64, 0.3f);
        for (uint32_t i = 0; i < N_LAYER; ++i) {
            const kvf_gpu_index index = {on_device(codes.size(), codes), on_device<float>(N_HEAD_KV * D),
                    on_device(basis.size(), basis), on_device(step.size(), step),
                    on_device(N_SLOT, std::vector<int32_t>(N_SLOT, -1)), at_records};
            l.i                       = i;
            l.k = {on_device<char>(N_BLOCK * N_CHUNK * ROW), UNIT * ROW, 1, 0, (uint64_t) i * N_CHUNK * ROW, 0};
            l.v = {on_device<char>(N_BLOCK * N_CHUNK * ROW), UNIT * ROW, 1, 0, (uint64_t) (N_LAYER + i) * N_CHUNK * ROW, 0};
            l.index                                                  = on_device(1, std::vector<kvf_gpu_index>{index});
            layers[i]                                                = l;
            ((ggml_custom_op_params *) nodes[i].op_params)->userdata = &layers[i];
            nodes[i].src[1] = &q, nodes[i].src[2] = &ask;
        }
        q.data = on_device<float>(N_HEAD * D), q.nb[1] = D * sizeof(float), q.nb[2] = N_HEAD * D * sizeof(float);
        const auto asking = asks(l.ask, context);
        ask.data          = on_device(asking.size(), asking);
        s                 = (int32_t *) ask.data + kvf_gpu_ask::LEN + kvf_gpu_ask::LEN_ASKER * l.ask.n_asker;
    }

    std::vector<float> random(size_t n, float scale) {
        std::vector<float> res(n);
        for (auto & x : res) {
            x = scale * normal(rng);
        }
        return res;
    }

    void set(int word, int32_t value) { CUDA_CHECK(cudaMemcpy(s + word, &value, sizeof(value), cudaMemcpyHostToDevice)); }

    // milliseconds of a token
    float time(bool choosing, int n_turn, bool any) {
        static const auto * weights = on_device<uint4>(WEIGHTS / sizeof(uint4));
        static auto *       sum     = on_device<uint32_t>(1);

        cudaGraph_t     graph;
        cudaGraphExec_t made;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        // all of it that is used; the backend's library has its destructor
        static auto & context = *(ggml_backend_cuda_context *) calloc(1, sizeof(ggml_backend_cuda_context));
        context.streams[0][0] = stream;
        for (uint32_t i = 0; i < N_LAYER; ++i) {
            layers[i].n_turn = n_turn;
            read_weights<<<1056, 256, 0, stream>>>(weights, WEIGHTS / sizeof(uint4), sum);
            if (choosing) { kvf_choose_node(&nodes[i], &context); }
        }
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&made, graph, 0));

        constexpr int WARM_UP = 10, STEPS = 30;
        float         all = 0;
        set(kvf_gpu_ask::N_FILL, any ? N_FILL : 0);
        for (int i = 0; i < WARM_UP + STEPS; ++i) {
            const auto asked = random(N_HEAD * D, 1);
            CUDA_CHECK(cudaMemcpy(q.data, asked.data(), asked.size() * sizeof(float), cudaMemcpyHostToDevice));
            set(kvf_gpu_ask::STEP, i ? i : -1);
            float ms;
            CUDA_CHECK(cudaEventRecord(from, stream));
            CUDA_CHECK(cudaGraphLaunch(made, stream));
            CUDA_CHECK(cudaEventRecord(to, stream));
            CUDA_CHECK(cudaStreamSynchronize(stream));
            CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
            all += i < WARM_UP ? 0 : ms;
        }
        CUDA_CHECK(cudaGraphExecDestroy(made));
        CUDA_CHECK(cudaGraphDestroy(graph));
        return all / STEPS;
    }
};

int main(int argc, char ** argv) {
    const uint32_t n_exchange = argc > 1 ? atoi(argv[1]) : 32;
    printf("| context | exchanged | µs of a layer that chooses | of one that has no turn | ms a token, turns 1 | 2 | 4 |\n");
    printf("|---:|---:|---:|---:|---:|---:|---:|\n");
    for (const uint32_t context : {8192, 65536, 262144}) {
        bench       b(context, n_exchange);
        const float none = b.time(false, 1, true), idle = b.time(true, 1, false) - none, one = b.time(true, 1, true) - none;
        printf("| %u | %u | %.1f | %.1f | %.2f | %.2f | %.2f |\n", context, n_exchange, 1e3 * one / N_LAYER,
                1e3 * idle / N_LAYER, one, b.time(true, 2, true) - none, b.time(true, 4, true) - none);
    }
    return 0;
}
