#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define KVF_BOTH __host__ __device__
#else
#define KVF_BOTH
#endif

struct ggml_tensor;

// The interface between guests/gpu.cpp (in the library llama) and guests/fresh.cu (in the library of a GPU's backend).
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

// the guests of a layer and a sequence
struct kvf_gpu_guests {
    int32_t *            table;   // [n_slot]
    const char * const * records; // of all chunks
};

// the inputs of the kernels for a ubatch, as words: askers first, then each sequence's own
struct kvf_gpu_ask {
    enum { N_ASKER, LEN };
    enum { SEQ, ROW, LEN_ASKER };
    enum { N_UNIT, N_FILL, N_COMMON, LEN_SEQ };
    enum { CELL, FIRST, N, LEN_COMMON };

    uint32_t n_asker, n_seq, n_block, n_unit; // the most of each

    KVF_BOTH uint32_t seq_size() const { return LEN_SEQ + n_block + LEN_COMMON * n_block + (n_unit + 31) / 32; }
    KVF_BOTH uint32_t size() const { return LEN + LEN_ASKER * n_asker + n_seq * seq_size(); }
};

// what may come or go, and by which it is chosen
struct kvf_pair {
    uint32_t key, what;
};

// where a unit goes
struct kvf_move {
    uint32_t slot, unit;
};

// [n_head][d], of each token
struct kvf_gpu_queries {
    const char * data; // null: there are none
    uint64_t     head, row;
};

struct kvf_gpu_layer {
    uint32_t     n_head, n_head_kv, d, n_chunk, n_slot, n_exchange;
    float        scale, cap;
    kvf_gpu_rows k, v; // v.n_run: 0: there is none
    kvf_gpu_ask  ask;

    const kvf_gpu_guests * guests; // of each sequence

    // scratch, of all layers
    float *    lse;   // [n_asker][n_head][n_unit]
    float *    parts; // [n_asker][n_head][KVF_GPU_PARTS][2]
    int32_t *  keys;  // [n_seq][n_unit]: by which units are compared
    int32_t *  tops;  // [n_seq][n_unit/4 and one]: the largest ones
    kvf_move * moves; // [n_slot]: what `fetch` below is to do
    uint32_t * n_moves;
    uint64_t * n_fetched;

    uint32_t * n_arrived; // blocks at the place where they wait for each other
    uint32_t * n_met;     // how often they all were
};

static constexpr uint32_t KVF_GPU_PARTS = 512; // blocks of a head, at most

// the type of a layer's keys, or values
struct kvf_gpu_type {
    int32_t  type;
    uint32_t d, block, block_size; // values of a head; those that are quantised together, and their bytes
};

// bytes of a row that have a head's values, whole blocks of them: from where on, and how many
static inline KVF_BOTH uint32_t piece_of(const kvf_gpu_type & its, uint32_t head, uint32_t & n) {
    const uint32_t first = head * its.d / its.block, last = ((head + 1) * its.d + its.block - 1) / its.block;
    n = (last - first) * its.block_size;
    return first * its.block_size;
}

// how the rows of a layer are coded: its keys, or its values. see kvf_codes
struct kvf_gpu_coding {
    uint32_t n_head, d, width, n_bit, n_rot;
};

// codes of a layer and a sequence, as they lie in kvf_codes
struct kvf_gpu_codes {
    uint8_t *     codes;
    uint16_t *    scales;
    float *       means;
    const float * factors; // kvf_codes::get_factors()
};

// how the codes of a layer's keys, or values, are made of its rows in records: kvf_codes::put()
struct kvf_gpu_coder : kvf_gpu_type {
    kvf_gpu_coding        coding; // n_head: 0: there are none
    const kvf_gpu_codes * codes;  // of each sequence

    bool     by_value;     // the positions of a value are next to each other, rather than the values of a position
    uint64_t offs, stride; // from row to row, or from value to value

    uint32_t n_half; // levels of a sign
    float    step;   // from level to level, of a standard deviation
};

// of some layers: keys and values
struct kvf_gpu_coders {
    const kvf_gpu_coder * at; // the device's
    uint32_t              n, n_head;
    size_t                memory; // that a block shares
};

// records of n chunks. records: the device's, of pointers that it can read
struct kvf_gpu_chunks {
    const char * const * records;
    uint32_t             n_chunk, n;
};

// Some rows of chunks first to end, which are counted from the first record on, and belong to one segment. None: its mean is
// that of the segment before
struct kvf_gpu_sampled {
    uint32_t segment, first, end, every;

    KVF_BOTH uint32_t of_chunk(uint32_t n_chunk) const { return (n_chunk + every - 1) / every; }
    KVF_BOTH uint32_t n(uint32_t n_chunk) const { return (end - first) * of_chunk(n_chunk); }
};

// attention by codes. a part is what some blocks of positions give a query: the largest logit, the sum of the weights
// relative to it, and the values by these weights
struct kvf_gpu_attend {
    static constexpr uint32_t COLUMNS = 8;      // queries that share a pass over the codes
    enum { SEQ, POS, ASKER, LEN_TOKEN };        // of each token, after the ask. SEQ: -1: nothing is outside
    static constexpr uint32_t MOST_BLOCK = 528; // which attend
    static constexpr uint32_t MOST_PART = 128, MOST_ROW_PART = 1024; // of a query, and of all tokens
    static constexpr uint32_t MOST_TOKEN = MOST_ROW_PART / 8;        // at once
    static constexpr uint32_t MOST_WHOLE = 16; // tokens of a batch, for which the pool is attended to here
    static constexpr uint32_t AT_ONCE    = 64; // values of a head that are summed at once

    kvf_gpu_layer         p;     // the pool, and how the layer chooses
    uint32_t              share; // queries of a head of keys
    kvf_gpu_coding        coding[2];
    const kvf_gpu_codes * codes[2]; // of keys and of values, of each sequence
    // scratch: [token][n_head][n_part][part_size()], MOST_ROW_PART in all; [pass][pass_size()]; [token][n_word()]: units
    // that the pool has, a bit each
    float *    parts;
    char *     passes;
    uint32_t * taken;
    struct : kvf_gpu_type { // of the pool's keys, and of its values
        uint32_t room;      // of a head's bytes and those around them that are aligned, from row to row in other banks
    } rows[2];
    uint32_t n_warp; // of a block
    bool     chooses, by_head;
    bool     whole;       // the pool is attended to, too, in place of the library's attention
    void *   events;      // see `events` below
    bool     late_beside; // what it chooses is chosen beside the nodes that come then
    void *   after;       // events of such a layer before this one; null: there is none

    // sums of a query, and floats of a part with them
    KVF_BOTH uint32_t n_value() const { // of whole words
        const uint32_t each = AT_ONCE * 4 / coding[1].n_bit;
        return (coding[1].width + each - 1) / each * each;
    }
    KVF_BOTH uint32_t part_size() const { return 2 + n_value(); }

    // A pass is of COLUMNS queries, or fewer, that share a head of keys: those of a token, then those of the next one. bytes
    // of what its blocks need of them, prepared: words of products of n_step() times 32 values of a key; halves for products
    // with the pool's; [COLUMNS]: by what products are multiplied, and what is taken off them before; [segment][COLUMNS]:
    // products with the means of segments
    KVF_BOTH uint32_t n_pass(uint32_t n_token) const { return (n_token * share + COLUMNS - 1) / COLUMNS; } // of a head
    KVF_BOTH uint32_t n_step() const { return (coding[0].width + 127) / 128 * 4; }
    KVF_BOTH uint32_t n_segment() const { return (p.ask.n_unit + 255) / 256; }
    KVF_BOTH uint32_t n_plain() const { return (coding[0].d + 15) / 16 * 32; } // times four halves
    KVF_BOTH uint32_t pass_size() const { return (n_step() * 32 + n_plain() + (2 + n_segment()) * 4) * COLUMNS; }
    KVF_BOTH uint32_t n_word() const { return (p.ask.n_unit + 31) / 32; }

    // of a batch of so many
    KVF_BOTH uint32_t n_part(uint32_t n_token) const {
        const uint32_t n_block = MOST_BLOCK / (p.n_head_kv * n_pass(1));
        const uint32_t room    = MOST_ROW_PART / (n_token < MOST_TOKEN ? n_token : MOST_TOKEN);
        const uint32_t n       = n_block < room ? n_block : room;
        return n < 2 ? 2 : n > MOST_PART ? MOST_PART : n;
    }
    // of these, what positions outside the pool have, by their codes: no more than have them done in the same time. its: of
    // a sequence's ask. cells: of the pool that take as long as codes of 128 positions
    KVF_BOTH uint32_t n_far(const int32_t * its, uint32_t n_part) const {
        const uint32_t cells = whole ? 40 : 80, far = (its[kvf_gpu_ask::N_UNIT] + 7) / 8;
        const uint32_t near   = 1 + (its[kvf_gpu_ask::N_COMMON] * p.n_chunk + its[kvf_gpu_ask::N_FILL] * 16) / cells;
        uint32_t       n      = (far * n_part + (far + near) / 2) / (far + near);
        n                     = n < 1 ? 1 : n >= n_part ? n_part - 1 : n;
        const uint32_t n_pair = (its[kvf_gpu_ask::N_UNIT] + 1) / 2, most = n_pair < n_warp ? 1 : n_pair / n_warp;
        return n_pair == 0 ? 0 : n < most ? n : most; // a warp has 32 positions, or more
    }
};

// layers of which slots may be free
struct kvf_gpu_occupy {
    const kvf_gpu_layer * layers; // the device's
    uint32_t              n_layer, n_seq;
    size_t                memory; // that a block shares
};

// the functions, which run on a stream of their own
struct kvf_gpu {
    // of a node of the graph: n_tasks that says so, and what is called in place of its function
    static constexpr int32_t LAUNCHES = -256;

    // dst->src: scratch, q, the ask: the layer attends to its codes. on: the backend's context. what the attention gave,
    // this one, the ask, q, and maybe sinks: the two become one. scratch, this, the ask: the layer chooses for the next
    // token
    void (*attend)(ggml_tensor * dst, void * on);
    void (*mix)(ggml_tensor * dst, void * on);
    void (*choose_late)(ggml_tensor * dst, void * on);
    // slots that are free, or have what is common, get any other units. userdata: the first of n_layer layers
    void (*occupy)(ggml_tensor * dst, void * on);
    bool (*fits)(const kvf_gpu_layer & l, const void * on); // whether a block of the GPU on which this lies has the memory
    uint32_t (*attend_warps)(const kvf_gpu_attend & a, const void * on); // kvf_gpu_attend::n_warp; 0: this GPU cannot
    size_t (*shared_size)(const kvf_gpu_layer & l);                      // bytes that a block shares which chooses

    // what orders nodes that run beside others, for the device on which this lies
    void * (*events)(const void * on);
    void (*forget)(void * events);

    void (*upload)(void * dst, const void * src, size_t size);
    void (*download)(void * dst, const void * src, size_t size);
    const char * (*pinned)(const char * host); // where the device sees this, null: nowhere

    // sums of rows and of squares to dst [n_coder][n_value][2]; a segment's means by such sums of n rows, or those of the
    // segment before; the codes of a sequence's units from `first` on; the memory that a block takes
    void (*sum_rows)(const kvf_gpu_coders & coders, const kvf_gpu_chunks & from, const kvf_gpu_sampled & some, double * dst,
            uint32_t n_value);
    void (*make_means)(const kvf_gpu_coders & coders, uint32_t seq, uint32_t segment, const double * sums, uint32_t n_value,
            uint32_t n);
    void (*encode_rows)(const kvf_gpu_coders & coders, const kvf_gpu_chunks & from, uint32_t seq, uint32_t first);
    size_t (*coder_memory)(const kvf_gpu_coder & coder);
    // fill n rows of `width` bytes with a byte
    void (*fill)(void * dst, int value, size_t stride, size_t width, size_t n);
    // fetch what l.moves says, of one sequence. blocks: its guests'
    void (*fetch)(const kvf_gpu_layer & l, uint32_t seq, const int32_t * blocks);
    void (*wait)(const void * on); // for these functions, on the device where this lies
};

// in the backend's library
extern "C" {
const kvf_gpu * kvflash_gpu(void);

// a custom node whose function launches kernels: whether it is one, and do it
bool kvflash_launches(const struct ggml_tensor * node);
void kvflash_launch(struct ggml_tensor * node, void * on);
}
