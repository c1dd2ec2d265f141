#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define KVF_BOTH __host__ __device__
#else
#define KVF_BOTH
#endif

struct ggml_tensor;

// The interface between kvflash-gpu.cpp (in the library llama) and kvflash-fresh.cu (in the library of a GPU's backend).
// All pointers are the device's, unless stated otherwise.

// how a layer's rows lie in its cache and in a record. size: bytes of a unit; a unit's rows of V are n_run pieces
struct kvf_gpu_rows {
    static constexpr uint32_t PIECE = 2048; // bytes that a warp copies at once

    char *   data;
    uint64_t size;       // of a run of a unit
    uint32_t n_run;      // 1, or one of each value where V is transposed
    uint64_t stride;     // from run to run: in the cache
    uint64_t offs;       // in a record: where the first unit begins
    uint64_t stride_rec; // from run to run
};

// of a layer and a sequence
struct kvf_gpu_index {
    uint8_t *            codes; // as in kvf_index
    float *              mean;
    float *              basis;
    float *              step;
    int32_t *            table;   // [n_slot]
    const char * const * records; // of all chunks
};

// the components of keys that a lane of a warp multiplies, four at a time: those of four nibbles, after a shift
struct kvf_gpu_form {
    static constexpr uint32_t MOST = 192;

    uint32_t n_four, n_two, n_one;
    uint32_t n_comp, n_nibble;
    uint32_t n_each;      // words of a lane, of four: an even number
    uint8_t  quad[MOST];  // by word: first nibble, divided by 4
    uint8_t  shift[MOST]; // and the bits of nibbles that come before
    uint32_t mask[MOST];
};

// the inputs of the kernels for a ubatch, as words: askers first, then each sequence's own
struct kvf_gpu_ask {
    enum { N_ASKER, LEN };
    enum { SEQ, ROW, POS, LEN_ASKER };
    enum { N_UNIT, N_VISIBLE, N_COMMON, STEP, LEN_SEQ }; // STEP: -1: all layers choose
    enum { CELL, FIRST, N, LEN_COMMON };

    uint32_t n_asker, n_seq, n_block, n_unit; // the most of each

    KVF_BOTH uint32_t seq_size() const { return LEN_SEQ + n_block + LEN_COMMON * n_block + (n_unit + 31) / 32; }
    KVF_BOTH uint32_t size() const { return LEN + LEN_ASKER * n_asker + n_seq * seq_size(); }
};

// what may come or go, and by which it is chosen
struct kvf_pair {
    uint32_t key, what;
};

struct kvf_gpu_layer {
    uint32_t     i, n_turn;
    uint32_t     n_head, n_head_kv, d, n_chunk, n_slot, n_exchange;
    int32_t      type_k; // ggml_type
    uint64_t     row_size;
    float        scale, cap;
    kvf_gpu_rows k, v; // v.n_run: 0: there is none
    kvf_gpu_form form;
    kvf_gpu_ask  ask;

    const kvf_gpu_index * index; // of each sequence

    // scratch, of all layers
    float *    lse;     // [n_asker][n_head][n_unit]
    float *    parts;   // [n_asker][n_head][KVF_GPU_PARTS][2]
    float *    score;   // [n_seq][n_unit]
    int32_t *  moves;   // [n_seq][n_slot][2]: slot, unit
    int32_t *  n_moves; // [n_seq]
    kvf_pair * room;    // [n_seq][n_room]
    uint32_t   n_room;
    kvf_pair * lists; // [n_seq][2][n_slot]: what comes, what goes
    uint64_t * n_fetched;

    unsigned long long * n_arrived; // blocks of all launches, at the places where they wait for each other
};

static constexpr uint32_t KVF_GPU_PARTS = 512; // blocks of a head, at most

// keys in records: n_chunk positions each, the rows of a layer from offs on
struct kvf_gpu_keys {
    static constexpr uint32_t MOST = 256; // records at once

    int32_t      type;
    uint32_t     n_head_kv, d, n_chunk, n;
    uint64_t     row_size, offs;
    const char * records[MOST];
};

// the functions, which run on a stream of their own
struct kvf_gpu {
    // of a node of the graph: n_tasks that says so, and what is called in place of its function
    static constexpr int32_t LAUNCHES = -256;

    void (*choose)(ggml_tensor * dst, void * stream); // dst->src: scratch, q, the ask

    void (*upload)(void * dst, const void * src, size_t size);
    void (*download)(void * dst, const void * src, size_t size);
    void (*copy)(void * dst, const void * src, size_t size);
    const char * (*pinned)(const char * host); // where the device sees this, null: nowhere

    // every n-th of the keys, from `skip` on, as floats; and how many these are
    void (*decode)(const kvf_gpu_keys & keys, uint32_t skip, uint32_t every, float * dst, uint32_t n);
    // x: [n][n_head_kv][d]. mean: [n_head_kv][d]. cov: [n_head_kv][d][d]
    void (*moments)(const float * x, uint32_t n, uint32_t n_head_kv, uint32_t d, float * mean, float * cov);
    void (*encode)(const float * x, uint32_t n, uint32_t pos, uint32_t n_head_kv, uint32_t d, const kvf_gpu_form & form,
            const kvf_gpu_index & index);
    // fetch what l.moves says, of one sequence. blocks: its guests'
    void (*fetch)(const kvf_gpu_layer & l, uint32_t seq, const int32_t * blocks);
    void (*wait)(const void * on); // for the device on which this lies
};

// in the backend's library
extern "C" {
const kvf_gpu * kvflash_gpu(void);

// a custom node whose function launches kernels: whether it is one, and do it
bool kvflash_launches(const struct ggml_tensor * node);
void kvflash_launch(struct ggml_tensor * node, void * stream);
}
