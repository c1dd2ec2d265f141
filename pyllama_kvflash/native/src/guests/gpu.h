#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define KVF_BOTH __host__ __device__
#else
#define KVF_BOTH
#endif

struct ggml_tensor;

// The interface between guests/gpu.cpp (in libllama) and guests/fresh.cu (in the library of the GPU's backend). All pointers
// are device addresses, unless stated otherwise.

// the layout of a layer's K rows or V rows in the cache and in a record. the rows of a unit are n_run contiguous runs
struct kvf_gpu_rows {
    static constexpr uint32_t PIECE = 2048; // bytes that a warp copies at once

    char *   data;
    uint64_t size;       // bytes of a run
    uint32_t n_run;      // 1; for transposed V one for each element of a row; 0: there are no rows
    uint64_t stride;     // from run to run in the cache
    uint64_t offs;       // offset of the first unit in a record
    uint64_t stride_rec; // from run to run in a record
};

// the guests of a layer and a sequence
struct kvf_gpu_guests {
    int32_t *            table;   // the unit in each slot [n_slot]; -1: the slot is empty
    const char * const * records; // of all chunks
};

// The ask: the input of the kernels for a ubatch, as 32-bit words. It has LEN words; LEN_ASKER words for each token that
// chooses (an asker); and for each sequence LEN_SEQ words, its guest blocks, its runs of common cells, and a bit for each
// unit, set if the unit is common.
struct kvf_gpu_ask {
    enum { N_ASKER, LEN };
    enum { SEQ, ROW, LEN_ASKER };
    enum { N_UNIT, N_FILL, N_COMMON, LEN_SEQ };
    enum { CELL, FIRST, N, LEN_COMMON }; // a run: its first cell, the position there, and its length

    uint32_t n_asker, n_seq, n_block, n_unit; // the most of each, for which the ask has room

    KVF_BOTH uint32_t seq_size() const { return LEN_SEQ + n_block + LEN_COMMON * n_block + (n_unit + 31) / 32; }
    KVF_BOTH uint32_t size() const { return LEN + LEN_ASKER * n_asker + n_seq * seq_size(); }
};

// a unit or slot, and the key that it is sorted by
struct kvf_pair {
    uint32_t key, what;
};

// a unit to fetch, and its slot
struct kvf_move {
    uint32_t slot, unit;
};

// queries [n_token][n_head][d]. head, row: strides in bytes from head to head, and from token to token
struct kvf_gpu_queries {
    const char * data; // null: there are none
    uint64_t     head, row;
};

struct kvf_gpu_layer {
    uint32_t     n_head, n_head_kv, d, n_chunk, n_slot, n_exchange;
    float        scale, cap;
    kvf_gpu_rows k, v; // v.n_run is 0 if the layer stores no V
    kvf_gpu_ask  ask;

    const kvf_gpu_guests * guests; // of each sequence

    // scratch, shared by all layers
    float *    lse;   // log2 of the sum of each unit's weights [n_asker][n_head][n_unit]
    float *    parts; // top and sum of each part [n_asker][n_head][KVF_GPU_PARTS][2]
    int32_t *  keys;  // the sort keys of units, from their shares [n_seq][n_unit]
    int32_t *  tops;  // the largest key of every 4 units [n_seq][n_unit/4 + 1]
    kvf_move * moves; // the work of kvf_gpu::fetch [n_slot]
    uint32_t * n_moves;
    uint64_t * n_fetched;

    uint32_t * n_arrived; // blocks that wait at the barrier of the grid
    uint32_t * n_met;     // barriers passed so far
};

static constexpr uint32_t KVF_GPU_PARTS = 512; // the most parts of a head

// the type of a layer's keys or values
struct kvf_gpu_type {
    int32_t  type;
    uint32_t d, block, block_size; // elements of a head, elements of a quantisation block, bytes of such a block
};

// the bytes of a row that hold a head, as whole quantisation blocks: returns their offset; n is their number
static inline KVF_BOTH uint32_t piece_of(const kvf_gpu_type & its, uint32_t head, uint32_t & n) {
    const uint32_t first = head * its.d / its.block, last = ((head + 1) * its.d + its.block - 1) / its.block;
    n = (last - first) * its.block_size;
    return first * its.block_size;
}

// the format of the codes of a layer's keys or values, see kvf_codes
struct kvf_gpu_coding {
    uint32_t n_head, d, width, n_bit, n_rot;
};

// the codes of a layer and a sequence, in the layout of kvf_codes
struct kvf_gpu_codes {
    uint8_t *     codes;
    uint16_t *    scales;
    float *       means;
    const float * factors; // kvf_codes::get_factors()
};

// encodes a layer's keys or values from records, as kvf_codes::put() does
struct kvf_gpu_coder : kvf_gpu_type {
    kvf_gpu_coding        coding; // n_head is 0 if there is nothing to encode
    const kvf_gpu_codes * codes;  // of each sequence

    bool     by_value;     // transposed: the positions of an element are adjacent, rather than the elements of a position
    uint64_t offs, stride; // offset in a record; bytes from row to row, or if transposed from element to element

    uint32_t n_half; // levels on each side of 0
    float    step;   // between levels, in standard deviations
};

// the encoders of some layers, of keys and values alternately
struct kvf_gpu_coders {
    const kvf_gpu_coder * at;
    uint32_t              n, n_head;
    size_t                memory; // shared memory of a block
};

// n consecutive chunks, each with a device address of its record
struct kvf_gpu_chunks {
    const char * const * records;
    uint32_t             n_chunk, n;
};

// a sample of a segment's rows: every `every`-th row of chunks [first, end), counted from the first chunk that is being put.
// an empty sample means that the segment takes the mean of the one before
struct kvf_gpu_sampled {
    uint32_t segment, first, end, every;

    KVF_BOTH uint32_t of_chunk(uint32_t n_chunk) const { return (n_chunk + every - 1) / every; }
    KVF_BOTH uint32_t n(uint32_t n_chunk) const { return (end - first) * of_chunk(n_chunk); }
};

// Attention by codes. The positions of a query are divided into parts. The result of a part is its largest logit, the sum of
// its weights relative to that, and the sum of values by these weights.
struct kvf_gpu_attend {
    static constexpr uint32_t COLUMNS = 8;      // queries of a pass
    enum { SEQ, POS, ASKER, LEN_TOKEN };        // words for each token, after the ask. SEQ -1: nothing is outside the pool
    static constexpr uint32_t MOST_BLOCK = 528; // the most blocks of kvf_attend
    static constexpr uint32_t MOST_PART = 128, MOST_ROW_PART = 1024; // parts of a query, and of a head over all tokens
    static constexpr uint32_t MOST_TOKEN = MOST_ROW_PART / 8;        // the most tokens of a launch
    static constexpr uint32_t MOST_WHOLE = 16; // the most tokens of a ubatch for which `whole` may be set
    static constexpr uint32_t AT_ONCE    = 64; // elements of a V row that are summed at once

    kvf_gpu_layer         p;     // the pool, and the buffers for choosing
    uint32_t              share; // query heads of a key head
    kvf_gpu_coding        coding[2];
    const kvf_gpu_codes * codes[2]; // of keys and of values, for each sequence
    // scratch: parts [token][n_head][n_part][part_size()], at most MOST_ROW_PART for each head; passes [pass][pass_size()];
    // and a bit for each unit that the pool has [token][n_word()]
    float *    parts;
    char *     passes;
    uint32_t * taken;
    struct : kvf_gpu_type { // the keys and the values of the pool
        uint32_t room;      // bytes from row to row in shared memory: an aligned head, padded to avoid bank conflicts
    } rows[2];
    uint32_t n_warp; // of a block
    bool     chooses, by_head;
    bool     whole;       // also attend to the pool, in place of llama.cpp's attention
    void *   events;      // see kvf_gpu::events
    bool     late_beside; // the late choice of this layer runs beside the nodes after it
    void *   after;       // events of the earlier layer whose late choice this one waits for; null: there is none

    // floats of a sum of values, and of a part
    KVF_BOTH uint32_t n_value() const { // in whole words of codes
        const uint32_t each = AT_ONCE * 4 / coding[1].n_bit;
        return (coding[1].width + each - 1) / each * each;
    }
    KVF_BOTH uint32_t part_size() const { return 2 + n_value(); }

    // A pass has up to COLUMNS queries that share a key head: those of a token, then those of the next one. pass_size() is
    // the bytes of its prepared queries: bytes for n_step() products of 32 elements; halves for products with the pool's
    // keys; the scale of the products and the number to subtract before, each [COLUMNS]; and products with the means of
    // segments [n_segment()][COLUMNS]
    KVF_BOTH uint32_t n_pass(uint32_t n_token) const { return (n_token * share + COLUMNS - 1) / COLUMNS; } // of a key head
    KVF_BOTH uint32_t n_step() const { return (coding[0].width + 127) / 128 * 4; }
    KVF_BOTH uint32_t n_segment() const { return (p.ask.n_unit + 255) / 256; }
    KVF_BOTH uint32_t n_plain() const { return (coding[0].d + 15) / 16 * 32; } // groups of four halves
    KVF_BOTH uint32_t pass_size() const { return (n_step() * 32 + n_plain() + (2 + n_segment()) * 4) * COLUMNS; }
    KVF_BOTH uint32_t n_word() const { return (p.ask.n_unit + 31) / 32; }

    // the parts of a query, for a ubatch of n_token tokens
    KVF_BOTH uint32_t n_part(uint32_t n_token) const {
        const uint32_t n_block = MOST_BLOCK / (p.n_head_kv * n_pass(1));
        const uint32_t room    = MOST_ROW_PART / (n_token < MOST_TOKEN ? n_token : MOST_TOKEN);
        const uint32_t n       = n_block < room ? n_block : room;
        return n < 2 ? 2 : n > MOST_PART ? MOST_PART : n;
    }
    // the parts for positions outside the pool, so many that they take as long as the parts for the pool. its: the
    // sequence's words of the ask. cells: pool cells that take as long as the codes of 128 positions
    KVF_BOTH uint32_t n_far(const int32_t * its, uint32_t n_part) const {
        const uint32_t cells = whole ? 40 : 80, far = (its[kvf_gpu_ask::N_UNIT] + 7) / 8;
        const uint32_t near   = 1 + (its[kvf_gpu_ask::N_COMMON] * p.n_chunk + its[kvf_gpu_ask::N_FILL] * 16) / cells;
        uint32_t       n      = (far * n_part + (far + near) / 2) / (far + near);
        n                     = n < 1 ? 1 : n >= n_part ? n_part - 1 : n;
        const uint32_t n_pair = (its[kvf_gpu_ask::N_UNIT] + 1) / 2, most = n_pair < n_warp ? 1 : n_pair / n_warp;
        return n_pair == 0 ? 0 : n < most ? n : most; // each warp has a pair of units, or more
    }
};

// the arguments of the occupy node
struct kvf_gpu_occupy {
    const kvf_gpu_layer * layers;
    uint32_t              n_layer, n_seq;
    size_t                memory; // shared memory of a block
};

// The functions of a GPU. Those with `on` work on the device of that address. All but the nodes run on a stream of their
// own.
struct kvf_gpu {
    // n_tasks of a custom node that launches kernels: the backend calls its function with the backend's context
    static constexpr int32_t LAUNCHES = -256;

    // The nodes. on: the backend's context.
    // attend to the codes. dst->src: scratch, q, the ask
    void (*attend)(ggml_tensor * dst, void * on);
    // combine the results of both attentions. dst->src: that of llama.cpp (with `whole`: the mask), attend, the ask, q, and
    // the sinks if there are any
    void (*mix)(ggml_tensor * dst, void * on);
    // choose guests for the next token. dst->src: scratch, mix, the ask
    void (*choose_late)(ggml_tensor * dst, void * on);
    // give slots that are empty, or whose unit has become common, any other unit, in all layers
    void (*occupy)(ggml_tensor * dst, void * on);

    bool (*fits)(const kvf_gpu_layer & l, const void * on); // whether a block has enough shared memory to choose
    uint32_t (*attend_warps)(const kvf_gpu_attend & a, const void * on); // kvf_gpu_attend::n_warp; 0: this GPU cannot attend
    size_t (*shared_size)(const kvf_gpu_layer & l);                      // shared memory of a block that chooses

    // make the events that order nodes of a layer that run beside others; free them
    void * (*events)(const void * on);
    void (*forget)(void * events);

    void (*upload)(void * dst, const void * src, size_t size);
    void (*download)(void * dst, const void * src, size_t size);
    const char * (*pinned)(const char * host); // the device address of pinned host memory; null: it is not pinned

    // sum a sample's rows, and their squares -> dst [n_coder][n_value][2]
    void (*sum_rows)(const kvf_gpu_coders & coders, const kvf_gpu_chunks & from, const kvf_gpu_sampled & some, double * dst,
            uint32_t n_value);
    // compute a segment's means from such sums of n rows; n 0: copy the means of the segment before
    void (*make_means)(const kvf_gpu_coders & coders, uint32_t seq, uint32_t segment, const double * sums, uint32_t n_value,
            uint32_t n);
    // encode a sequence's chunks, whose first unit is `first`
    void (*encode_rows)(const kvf_gpu_coders & coders, const kvf_gpu_chunks & from, uint32_t seq, uint32_t first);
    // the shared memory of a block that encodes
    size_t (*coder_memory)(const kvf_gpu_coder & coder);
    // fill n rows of `width` bytes with a byte
    void (*fill)(void * dst, int value, size_t stride, size_t width, size_t n);
    // fetch the units in l.moves, of one sequence. blocks: its guest blocks
    void (*fetch)(const kvf_gpu_layer & l, uint32_t seq, const int32_t * blocks);
    // wait for the functions above
    void (*wait)(const void * on);
};

// in the backend's library
extern "C" {
const kvf_gpu * kvflash_gpu(void);

// whether a node's function launches kernels (kvf_gpu::LAUNCHES); and call that function
bool kvflash_launches(const struct ggml_tensor * node);
void kvflash_launch(struct ggml_tensor * node, void * on);
}
