#pragma once

// kvflash: bounded residency for the full-attention KV cache of a llama.cpp context
//
// The KV tensors hold n_pool cells while n_ctx stays the logical bound. Positions map to blocks of the pool in chunks of
// n_chunk consecutive positions: position p of a sequence lives in cell block(p/n_chunk)*n_chunk + p%n_chunk. There is
// no page table: the cell metadata is the mapping, so seq_rm(), clear() and a restored sequence stay consistent.
// The caller decides which chunks are resident, and stores the bytes of the others.
//
// Every call that can fail returns a kvf_status, and sets kvf_error() of the calling thread.
// No exception leaves this API. Two threads must not use one context at the same time.

#include "ggml-backend.h"
#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum kvf_status {
    KVF_OK            = 0,
    KVF_E_ARGUMENT    = -1,  // a value is out of range
    KVF_E_UNSUPPORTED = -2,  // the model or its memory does not support this
    KVF_E_NO_BLOCK    = -3,  // no free block. nothing was changed: drop chunks and call again
    KVF_E_RECORD      = -4,  // the bytes are not a record of this chunk, model and cache
    KVF_E_STATE       = -5,  // the chunk or block is in the wrong state: (not) resident, not free
    KVF_E_MODEL       = -6,  // the file cannot be loaded
    KVF_E_MEMORY      = -7,  // an allocation failed
    KVF_E_BACKEND     = -8,  // the computation failed
    KVF_E_ABORTED     = -9,  // stopped by kvf_interrupt()
    KVF_E_LOST        = -10, // an RPC server is gone, with its weights and KV cache
    KVF_E_LOGITS      = -11, // logits or keys are NaN or infinite (single logits may be -inf)
};

#define KVF_RECORD_MAGIC 0x5246564bu // "KVFR"
#define KVF_RECORD_VERSION 1

#define KVF_FLAG_V_TRANS 1 // V is stored as n_embd_v columns of n_chunk elements (no flash attention)
#define KVF_FLAG_ROT_K 2   // K is Hadamard-rotated (quantised caches)
#define KVF_FLAG_ROT_V 4

// The header of a record, little endian. It is followed by n_chunk cells of 12 bytes (int32 x, y, token), zeros up to
// meta_bytes, and the K rows and V rows of each pooled layer in ascending order, in the raw format of the cache.
// A record depends only on the tokens, the model and the cache types, not on where the chunk was placed.
struct kvf_record {
    uint32_t magic;
    uint16_t version;
    uint16_t head_bytes;   // sizeof(struct kvf_record)
    uint64_t record_bytes; // the whole record
    uint64_t fingerprint;  // the model's, from kvf_pool_params
    uint64_t mask;         // bit i: position chunk*n_chunk + i is in the record
    int32_t  chunk;
    uint32_t n_chunk; // positions in a chunk
    uint32_t n_layer; // pooled layers
    int32_t  type_k;  // enum ggml_type
    int32_t  type_v;
    uint32_t flags;      // KVF_FLAG_*
    uint32_t meta_bytes; // offset of the first K row
    uint32_t reserved;   // 0
};

struct kvf_pool_params {
    uint32_t n_pool;      // cells, a multiple of 256
    uint32_t n_chunk;     // positions in a chunk: 16, 32 or 64
    uint32_t q_tap;       // keep the attention queries of the last max(q_tap, n_seq_max) tokens of each ubatch; 0: keep
                          // none
    uint64_t fingerprint; // the model's, written to every record
    uint32_t q_every;     // keep queries in every q_every-th pooled layer, beginning with layer q_every/2; 1: in all layers
    uint32_t n_exchange;  // the most guests that a layer exchanges per ubatch
    // bits per element in the codes of keys and of values: 2 or 4, or 32 in tests (exact). Codes let tokens attend to
    // positions outside the pool. coarse_k 0: no codes and no guests
    uint32_t coarse_k;
    uint32_t coarse_v;
    // a paned context of the same model, which must outlive this one. On a GPU whose panes are large enough (least_bytes),
    // the codes share the panes' memory, and move to the host while an exact batch is computed. null: the codes have their
    // own memory
    struct llama_context * panes;
};

// A paned context computes the same results as a stock one, bit for bit on the CPU. It holds the rows of only a few
// full-attention layers at a time, in n_pane buffers on each device, the panes. The first n_pane - 2 layers stay in theirs;
// the others take turns in the last two. The rows of all earlier positions are in the records of a pool.
struct kvf_pane_params {
    uint32_t n_pane;      // layers held at once on a device. 1: the computation waits for each layer; all layers: nothing
                          // is streamed
    uint32_t q_tap;       // as in kvf_pool_params
    uint32_t q_every;     // as in kvf_pool_params
    uint32_t mass_piece;  // keep the attention of the tapped tokens (kvf_get_mass), summed over pieces of mass_piece
                          // positions. it divides 256; 0: do not keep it
    uint64_t least_bytes; // the minimum size of a GPU's panes, so that the codes of a pool fit
};

struct kvf_pool_info {
    uint32_t n_pool;
    uint32_t n_chunk;
    uint32_t n_block; // n_pool/n_chunk
    uint32_t n_block_free;
    uint32_t n_kv;    // width of the attention graph, in cells
    uint32_t n_layer; // pooled layers
    uint32_t n_copy;  // copies needed to move a chunk
    uint64_t record_bytes;
    uint32_t meta_bytes;
    uint32_t flags; // KVF_FLAG_*
};

struct kvf_pane_info {
    uint64_t bytes;    // the size of all panes on all devices
    uint64_t n_bytes;  // bytes copied so far, in both directions
    uint32_t n_pane;   // the largest number of panes on a device
    uint32_t n_layer;  // layers that the graph reads
    uint32_t n_stream; // devices that copy while they compute
};

struct kvf_layer {
    int32_t  il;       // layer of the model
    int32_t  type_k;   // enum ggml_type
    int32_t  type_v;   // -1: no V is stored (MLA)
    uint32_t n_embd_k; // elements of a K row
    uint32_t n_embd_v;
    uint32_t n_head; // query heads
    uint32_t n_head_kv;
    uint32_t n_embd_head_k;
    int32_t  device; // the device that holds the layer, an index for ggml_backend_dev_get()
    uint64_t offs_k; // offset of the K rows in a record, in bytes
    uint64_t size_k; // size of all n_chunk rows, in bytes
    uint64_t offs_v;
    uint64_t size_v;
};

struct kvf_kv_bytes {
    uint64_t attn;      // the full-attention KV cache: the pool, or the whole context
    uint64_t swa;       // the sliding-window KV cache
    uint64_t recurrent; // the recurrent state
};

// the message of this thread's last error; "": there was none
LLAMA_API const char * kvf_error(void);

// start the library (once), and collect its log
LLAMA_API void kvf_init(void);
// echo log lines of min_level (enum ggml_log_level) and above to stderr. by default, none are echoed
LLAMA_API void kvf_log_level(int min_level);

// true: decodes return KVF_E_ABORTED until a call with false. safe in a signal handler; stops CPU computations only
LLAMA_API void kvf_interrupt(bool stop);

// on_host: n_on_host patterns (std::regex). tensors with a name that matches any of them stay in host memory
LLAMA_API int kvf_model_load(const char * path, const struct llama_model_params * params, const char * const * on_host,
        uint32_t n_on_host, struct llama_model ** model);

// tensor i of the model: its name (valid as long as the model), its size in bytes, and the index of its device for
// ggml_backend_dev_get(). with no_alloc, the device is the planned one
LLAMA_API int kvf_get_weight(struct llama_model * model, uint32_t i, const char ** name, uint64_t * size, int32_t * device);
LLAMA_API uint32_t kvf_n_weight(struct llama_model * model);

// create a pooled context (pool is given), a paned one (panes), or a stock one (neither): a cell for each logical position
LLAMA_API int kvf_context_new(struct llama_model * model, const struct llama_context_params * params,
        const struct kvf_pool_params * pool, const struct kvf_pane_params * panes, struct llama_context ** ctx);

// the class of the context's memory ("llama_kv_cache", ...)
LLAMA_API const char * kvf_memory_class(struct llama_context * ctx);
LLAMA_API int          kvf_get_kv_bytes(struct llama_context * ctx, struct kvf_kv_bytes * bytes);
// the size of the compute buffers on a device (an index for ggml_backend_dev_get()), in bytes. if the model was loaded with
// no_alloc, their planned size
LLAMA_API int kvf_get_compute_bytes(struct llama_context * ctx, int32_t device, uint64_t * bytes);
// layer i of the attention cache. record offsets are 0 if the context has no pool
LLAMA_API int      kvf_get_layer(struct llama_context * ctx, uint32_t i, struct kvf_layer * layer);
LLAMA_API uint32_t kvf_n_layer(struct llama_context * ctx);

// which tokens of a batch get logits
enum kvf_outputs {
    KVF_OUTPUTS_NONE = 0,
    KVF_OUTPUTS_LAST = 1, // the last token's
    KVF_OUTPUTS_ALL  = 2,
};

// decode n tokens of sequence seq at positions pos, pos + 1, ...; outputs: enum kvf_outputs
// KVF_E_NO_BLOCK: nothing was changed. KVF_E_ABORTED: part of the batch may be in the cache. remove it by kvf_seq_rm(), or
// by kvf_clear() if a recurrent state has advanced
LLAMA_API int kvf_decode(
        struct llama_context * ctx, llama_seq_id seq, llama_pos pos, const llama_token * tokens, int32_t n, int outputs);

// decode n tokens (at most n_ubatch) of several sequences: tokens[i] at position pos[i] of sequence seqs[i]. tokens of one
// sequence must be consecutive. all tokens get logits
LLAMA_API int kvf_decode_each(
        struct llama_context * ctx, const llama_seq_id * seqs, const llama_pos * pos, const llama_token * tokens, int32_t n);

// decode n tokens (at most n_ubatch) of sequence seq in a paned context. they attend to all positions before pos, whose
// rows are read from n_record records of `pool`, one for each chunk. rows before pos must be valid, or come from an
// earlier batch. this batch writes its own rows and the headers of their records. the caller moves the state outside the
// full-attention cache (kvf_partial_*). kvf_wait_exact() tells which records are complete and may be freed. after an error
// (KVF_E_ABORTED, too), rows from pos on are undefined; all others are complete
LLAMA_API int kvf_decode_exact(struct llama_context * ctx, struct llama_context * pool, llama_seq_id seq, llama_pos pos,
        const llama_token * tokens, int32_t n, int outputs, void * const * records, uint32_t n_record, size_t record_size);
// paced: from now on, batches of a paned context leave the device time for the work of other threads. a layer is launched
// only when its rows have arrived, so that the device's queue never fills up. rows are copied in small pieces, so that
// other copies can run in between
LLAMA_API int kvf_pace_exact(struct llama_context * ctx, bool paced);
// wait for all batches of a paned context but the last n (at most 3 are under way). end: the rows of positions [0, end) are
// in the records
LLAMA_API int kvf_wait_exact(struct llama_context * ctx, uint32_t n, llama_pos * end);
LLAMA_API int kvf_get_pane_info(struct llama_context * ctx, struct kvf_pane_info * info);

// wait for the computation
LLAMA_API int kvf_synchronize(struct llama_context * ctx);
// the most likely token of output i of the last batch (-1: the last); the lowest id wins a tie. waits for the computation.
// KVF_E_LOGITS: the logits are not finite
LLAMA_API int kvf_argmax(struct llama_context * ctx, int32_t i, llama_token * token);
// the probability of that token by the softmax of all logits, accurate to 1 part in 10,000
LLAMA_API int kvf_top_probability(struct llama_context * ctx, int32_t i, float * res);

LLAMA_API int kvf_clear(struct llama_context * ctx);
// forget one sequence
LLAMA_API int kvf_clear_seq(struct llama_context * ctx, llama_seq_id seq);
// forget positions [p0, p1) everywhere; p1 < 0: to the end. KVF_E_UNSUPPORTED: the memory cannot go back to p0
LLAMA_API int kvf_seq_rm(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);
// forget positions [p0, p1) in the full-attention cache only, pooled or stock: the reference for an eviction
LLAMA_API int kvf_attn_seq_rm(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);

// the calls below need a pooled context, and fail with KVF_E_ARGUMENT on a stock one

LLAMA_API int kvf_get_pool_info(struct llama_context * ctx, struct kvf_pool_info * info);
// for each of the n_block blocks: its chunk (-1: the block is free), the number of its cells in use, and the sequence of its
// chunk (-1: none)
LLAMA_API int kvf_blocks(
        struct llama_context * ctx, int32_t * chunks, int32_t * n_used, llama_seq_id * seqs, uint32_t n_block);
// the block of a chunk; -1: it is not resident
LLAMA_API int kvf_block_of(struct llama_context * ctx, llama_seq_id seq, int32_t chunk, int32_t * block);

// Copies run in parallel with the computation if the device supports that. They are ordered against it, so a caller may
// decode, drop and page in without waiting. But the host memory of a copy must not change until the copy is done: until
// kvf_wait() has returned for its ticket or a later one.

// begin to write the record of a resident chunk to dst (record_bytes)
LLAMA_API int kvf_read(
        struct llama_context * ctx, llama_seq_id seq, int32_t chunk, void * dst, size_t size, uint64_t * ticket);
// free the block of a resident chunk. only metadata change: to keep the chunk, call kvf_read() first
LLAMA_API int kvf_drop(struct llama_context * ctx, llama_seq_id seq, int32_t chunk);
// begin to copy a record into a free block (in/out; -1: the first free one). the next computation waits for the copy, and
// sees the chunk
LLAMA_API int kvf_page_in(
        struct llama_context * ctx, llama_seq_id seq, int32_t chunk, const void * src, size_t size, int32_t * block);
// wait for all copies up to a ticket; 0: for all copies
LLAMA_API int kvf_wait(struct llama_context * ctx, uint64_t ticket);

// host memory that the device copies to and from at the full speed of the bus. *host is NULL if any memory is as fast. any
// thread may allocate it, even during a computation. free it only when no copy uses it
struct kvf_host;
LLAMA_API int    kvf_host_new(struct llama_context * ctx, size_t size, struct kvf_host ** host);
LLAMA_API void * kvf_host_base(struct kvf_host * host);
LLAMA_API void   kvf_host_free(struct kvf_host * host);

// measure the bus: the seconds that n consecutive copies of size bytes take, to the device or from it
LLAMA_API int kvf_time_copies(struct llama_context * ctx, size_t size, uint32_t n, bool to_device, double * seconds);
// for tests: overwrite all free blocks, since no result may depend on them. the bytes must form finite numbers of the cache
// type: without flash attention, masked cells are multiplied by 0, not skipped
LLAMA_API int kvf_scribble(struct llama_context * ctx, uint8_t byte);

//
// relevance: summaries of a record's keys, and their products with queries. These calls use no context, so any thread may
// make them. n_embd_k must be n_head_kv*n_embd_head_k, and n_embd_head_k must be even
//

enum kvf_summary_kind {
    KVF_SUMMARY_CENTROIDS = 0, // n_row centroids: farthest-point seeds, two Lloyd steps, scaled to their rows' mean length
    KVF_SUMMARY_MEAN      = 1, // 1 row
    KVF_SUMMARY_DIRECTION = 2, // 1 row, the mean scaled to length 1
    KVF_SUMMARY_ROWS      = 3, // all n_chunk rows
};

// the number of bf16 values in a slab: n summaries of one layer
LLAMA_API int kvf_summary_size(const struct kvf_layer * layer, uint32_t n, uint32_t n_row, size_t * size);
// summarise the keys of a record in n_layer layers. the summary becomes entry i of each layer's slab of n entries
LLAMA_API int kvf_summarise(const struct kvf_layer * const * layers, uint32_t n_layer, uint32_t n_chunk, const void * record,
        size_t record_size, int kind, uint32_t n_row, uint16_t * const * slabs, uint32_t i, uint32_t n);
// score the first n entries of a slab for n_head queries [n_head, n_embd_head_k]: the largest product of the query with a
// row of entry i -> dst[head*stride + i]
LLAMA_API int kvf_score(const struct kvf_layer * layer, const uint16_t * slab, uint32_t n, uint32_t n_row, const float * q,
        float * dst, size_t stride);

// estimate the attention to each of the first n chunks in n_layer layers, from n_q queries [n_q, n_head, n_embd_head_k] ->
// dst[n_layer, n]. a chunk's weight in a head is the sum of n_keys*exp(scale*q*row) over the rows of its summary, where
// n_keys is the number of keys that a row stands for. its share is its weight divided by the weight of all n chunks. shares
// are summed over heads, and the maximum over queries is taken. slabs: those of each layer, with slab_size entries each
LLAMA_API int kvf_mass(const struct kvf_layer * const * layers, uint32_t n_layer, const uint16_t * const * const * slabs,
        uint32_t slab_size, uint32_t n, uint32_t n_row, const float * const * q, uint32_t n_q, const float * scales,
        float * dst);

// score the keys of n records for the queries of n_token tokens [n_token, n_head, n_embd_head_k] -> dst[n_token*n_head, n].
// scale 0: the largest product; otherwise the logarithm of the sum of exp(scale*product). n_edge (needs a scale): also score
// the first n_edge keys of each chunk, and the last n_edge -> dst[3, n_token*n_head, n]
LLAMA_API int kvf_score_keys(const struct kvf_layer * layer, uint32_t n_chunk, const void * const * records, uint32_t n,
        size_t record_size, const float * q, uint32_t n_token, float scale, uint32_t n_edge, float * dst);

//
// guests: in some blocks of a pool, each layer holds units of 16 positions that it chooses itself (guests/fresh.h). The
// graph makes the choice, by the queries of each ubatch, among all positions that have codes. n_embd_k must be
// n_head_kv*n_embd_head_k
//

#define KVF_UNIT 16

struct kvf_codes_info {
    uint64_t bytes;        // host memory of the sequence's codes
    uint64_t device_bytes; // GPU memory of all sequences' codes, and of the buffers for choosing guests
    uint32_t n;            // positions that have codes
    uint32_t n_known;      // n at the start of the last segment of 4,096: its means are computed from them
    uint32_t n_block;      // guest blocks
    uint32_t n_slot;       // guests of a layer
};

// a layer's query heads and key heads, and the elements of a K row and of a V row (0: the K rows also serve as V rows)
struct kvf_heads {
    uint32_t n_query, n_kv, n_embd, n_embd_v;
};

// the GPU memory that n_layer layers need to attend to codes and to choose guests, without the codes, in bytes. n_ctx: the
// positions of each of n_seq sequences. n_pool: cells
LLAMA_API uint64_t kvf_choice_bytes(
        const struct kvf_heads * heads, uint32_t n_layer, uint32_t n_ctx, uint32_t n_seq, uint32_t n_pool, uint32_t n_chunk);

// the bytes of the codes of n positions of a layer, in host memory or in that of a GPU
LLAMA_API uint64_t kvf_codes_bytes(
        const struct kvf_heads * heads, uint32_t n_bit_k, uint32_t n_bit_v, uint32_t n, bool on_gpu);

// for tests: new pools in host memory use these kernels (struct kvf_gpu) from now on; null: the CPU's nodes
LLAMA_API void kvf_set_host_kernels(const void * kernels);

// encode chunks first, first + 1, ... of layers [layer, layer + n_layer) from their records. different threads may encode
// different layers
LLAMA_API int kvf_codes_put(struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first,
        const void * const * records, uint32_t n);
// declare these chunks encoded in all layers: they may become guests. the records must stay where they are until the
// sequence is cut to fewer positions
LLAMA_API int kvf_codes_cover(
        struct llama_context * ctx, llama_seq_id seq, uint32_t first, const void * const * records, uint32_t n);
// forget all codes, and empty the slots of all guests
LLAMA_API int kvf_codes_forget(struct llama_context * ctx, llama_seq_id seq);
LLAMA_API int kvf_codes_info(struct llama_context * ctx, llama_seq_id seq, struct kvf_codes_info * info);
// the number of guests copied from records so far, in all sequences and layers
LLAMA_API int kvf_guests_fetched(struct llama_context * ctx, uint64_t * n);
// the codes of a layer's first n positions as bytes: their size; get them; set them
LLAMA_API int kvf_codes_size(struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, size_t * size);
LLAMA_API int kvf_codes_get(
        struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, void * dst, size_t size);
LLAMA_API int kvf_codes_set(
        struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, const void * src, size_t size);

// set the number of a sequence's guest blocks to n: the first ones stay, and free blocks are added. blocks: the n blocks to
// take, only for a sequence without guest blocks; null: the first free ones. the next ubatch fills the empty slots.
// KVF_E_NO_BLOCK: nothing was changed
LLAMA_API int kvf_set_guests(struct llama_context * ctx, llama_seq_id seq, uint32_t n, const int32_t * blocks);
// a sequence's guest blocks [n_block], and the unit in each slot of each layer [n_layer, n_slot]; -1: the slot is empty
LLAMA_API int kvf_get_guests(
        struct llama_context * ctx, llama_seq_id seq, int32_t * blocks, uint32_t n_block, int32_t * units, size_t n_unit);
// fill the slots with units, copied from their records
LLAMA_API int kvf_place_guests(struct llama_context * ctx, llama_seq_id seq, const int32_t * units, size_t n_unit);

// the calls below work with any context, unless stated otherwise

// the partial state, which is not in chunks: a sliding window with its cell indices (pool/window.cpp), or the recurrent
// state in upstream's "partial only" format
LLAMA_API int kvf_partial_size(struct llama_context * ctx, llama_seq_id seq, size_t * size);
LLAMA_API int kvf_partial_get(struct llama_context * ctx, llama_seq_id seq, void * dst, size_t size);
// restore the partial state of position pos, and forget the attention cache from pos on
LLAMA_API int kvf_partial_set(struct llama_context * ctx, llama_seq_id seq, llama_pos pos, const void * src, size_t size);
// the same with the state of another context, copied from device to device
LLAMA_API int kvf_partial_copy(struct llama_context * from, struct llama_context * to, llama_seq_id seq, llama_pos pos);

// make the attention graph of a pool at least n_kv cells wide. when a sequence is restored to its former blocks, this is
// n_kv of the kvf_pool_info at the time it was saved
LLAMA_API int kvf_set_width(struct llama_context * ctx, uint32_t n_kv);

// begin to read a token's queries from all tapped layers of the last ubatch: [n_head, n_embd_head_k] floats for each layer,
// in the basis of the cached K (after RoPE and rotation). back: 0 is the last token, 1 the one before, ... up to the size of
// the tap. n: the number of floats in dst
LLAMA_API int kvf_q(struct llama_context * ctx, uint32_t back, float * dst, size_t n, uint64_t * ticket);

// the attention of a tapped token in a paned context with mass_piece: for each tapped layer, the shares of the first n_piece
// pieces [0, mass_piece), [mass_piece, 2*mass_piece), ..., summed over heads. waits for the computation
LLAMA_API int kvf_get_mass(struct llama_context * ctx, uint32_t back, float * dst, uint32_t n_piece);

// the scale of the products of queries with keys, for each of n tapped layers
LLAMA_API int kvf_q_scale(struct llama_context * ctx, float * dst, uint32_t n);

// a streaming checksum (XXH3, 16 bytes). kvf_checksum_new() returns null when out of memory
struct kvf_checksum;
LLAMA_API struct kvf_checksum * kvf_checksum_new(void);
LLAMA_API void                  kvf_checksum_add(struct kvf_checksum * sum, const void * data, size_t size);
LLAMA_API void                  kvf_checksum_get(const struct kvf_checksum * sum, uint8_t * dst);
LLAMA_API void                  kvf_checksum_free(struct kvf_checksum * sum);

// convert a model file to another type with llama.cpp's quantiser. after a failure, an incomplete dst may remain
LLAMA_API int kvf_quantize(const char * src, const char * dst, const struct llama_model_quantize_params * params);

// swap the results of llama_get_embeddings_layer_inp() and llama_get_embeddings_nextn() between two contexts of a model
LLAMA_API void kvf_exchange_features(struct llama_context * a, struct llama_context * b);

// speculative drafts, by the implementations in llama.cpp's common library

struct kvf_spec;

struct kvf_spec_params {
    const char * type;   // "draft-simple", "draft-dflash", "draft-dspark", "draft-eagle3", "draft-mtp", "ngram-simple"
    int32_t      n_max;  // most tokens of a draft
    int32_t      n_gram; // length of an n-gram, which must occur earlier in the text
    int32_t      window; // positions that the drafter remembers
    float        p_min;  // a token less likely than this ends the draft
};

// ctx_dft: the drafter's context, NULL for n-grams. both contexts must outlive spec. drafts continue sequence 0
int     kvf_spec_new(struct llama_context * ctx_tgt, struct llama_context * ctx_dft, const struct kvf_spec_params * params,
            struct kvf_spec ** spec);
void    kvf_spec_free(struct kvf_spec * spec);
int32_t kvf_spec_n_max(const struct kvf_spec * spec);

// set whether a context of the target's model keeps the layer outputs that the drafter reads. at first, the target keeps
// them. a batch needs them only if it is given to kvf_spec_process()
int kvf_spec_listen(struct kvf_spec * spec, struct llama_context * ctx, bool on);
// begin a new sequence. its first n tokens have been decoded
int kvf_spec_begin(struct kvf_spec * spec, const llama_token * tokens, int32_t n);
// pass on a batch that ctx (the target or another context of its model) has just decoded. the drafter drops its positions
// from pos on, and those outside its window
int kvf_spec_process(
        struct kvf_spec * spec, struct llama_context * ctx, llama_pos pos, const llama_token * tokens, int32_t n);
// cut the sequence of the last call to n_keep tokens, append n tokens, and draft its continuation. the last token is not
// decoded yet. draft: room for n_max tokens; n_draft: the number of drafted tokens
int kvf_spec_draft(struct kvf_spec * spec, int32_t n_keep, const llama_token * tokens, int32_t n, int32_t n_max,
        llama_token * draft, int32_t * n_draft);
// report that the first n tokens of the last draft were accepted
int kvf_spec_accept(struct kvf_spec * spec, int32_t n);

// sampling under a grammar

// an index of a vocabulary's tokens by their bytes. building it takes some 0.1 s; all grammars of a model share it
struct kvf_tokens;
int  kvf_tokens_new(const struct llama_vocab * vocab, struct kvf_tokens ** tokens);
void kvf_tokens_free(struct kvf_tokens * tokens);

struct kvf_grammar;

struct kvf_grammar_params {
    const char *         text;     // GBNF
    const char *         after;    // text that the grammar accepts before the answer begins, with special tokens
    bool                 lazy;     // the grammar begins at a trigger in the answer: a pattern or a token
    const char * const * patterns; // regular expressions, searched in the last 512 bytes of the answer. ^ is its start
    size_t               n_patterns;
    const llama_token *  tokens;
    size_t               n_tokens;
    const char *         thinking; // start tag of reasoning, which a lazy grammar ignores; "": the model has none
    const char * const * thought;  // end tags of reasoning
    size_t               n_thought;
};

// a new grammar, at the start of rule `root`
int kvf_grammar_new(struct kvf_tokens * tokens, const struct llama_vocab * vocab, const struct kvf_grammar_params * params,
        struct kvf_grammar ** grammar);
// a copy in the same state. both share the computed tables; different threads may use them
int  kvf_grammar_copy(struct kvf_grammar * grammar, struct kvf_grammar ** copy);
void kvf_grammar_free(struct kvf_grammar * grammar);
// the tokens that may follow, as n words of 64 bits; and advance by a token
int kvf_grammar_mask(const struct kvf_grammar * grammar, uint64_t * mask, size_t n);
int kvf_grammar_accept(struct kvf_grammar * grammar, llama_token token);
// sample a token from output i of the last batch; chain and grammar then accept it. chain: null takes the likeliest token.
// top_k: the chain considers only the top_k likeliest tokens; 0: all. grammar: the token must match it; may be null.
// KVF_E_LOGITS: as for kvf_argmax()
int kvf_sample(struct llama_context * ctx, int32_t i, struct llama_sampler * chain, int32_t top_k,
        struct kvf_grammar * grammar, llama_token * token);

// conversations, by llama.cpp's own templates and parsers. returned texts are freed with kvf_text_free()

struct kvf_chat;
struct kvf_reply;

void kvf_text_free(char * text);

// source: a template; "": the model's own. seconds: its time limit, here and below. KVF_E_UNSUPPORTED: it exceeds a limit
int  kvf_chat_new(const struct llama_model * model, const char * source, double seconds, struct kvf_chat ** chat);
void kvf_chat_free(struct kvf_chat * chat);
// the template's capabilities: {name: bool}
int kvf_chat_caps(const struct kvf_chat * chat, char ** result);
// request: JSON with messages, tools, tool_choice, parallel_tool_calls, json_schema, enable_thinking, chat_template_kwargs,
// add_generation_prompt and continue_final_message (true or false), in llama-server's format. result: JSON with the prompt,
// the constraints on the answer (grammar, lazy, triggers, stop), the special tokens to keep as text (preserved), and the
// parameters of its parser (format, parser, generation_prompt)
int kvf_chat_apply(const struct kvf_chat * chat, const char * request, double seconds, char ** result);

// an incremental parser of an answer
int  kvf_reply_new(int32_t format, const char * parser, const char * generation_prompt, struct kvf_reply ** reply);
void kvf_reply_free(struct kvf_reply * reply);
// append text to the answer. deltas: JSON with the additions to its reasoning, content and tool calls
int kvf_reply_push(struct kvf_reply * reply, const char * text, bool partial, char ** deltas);

// the free and the total memory of a device, in bytes
LLAMA_API int kvf_device_memory(uint32_t device, size_t * n_free, size_t * n_total);

// add the GPUs of an RPC server (host:port) to the devices of this process
LLAMA_API int kvf_add_rpc(const char * endpoint);
// close all connections to RPC servers: calls that wait for a server return KVF_E_LOST
LLAMA_API void kvf_drop_rpc(void);

#ifdef __cplusplus
}
#endif
