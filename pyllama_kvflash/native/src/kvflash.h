#pragma once

// kvflash: bounded residency for the full-attention KV cache of a llama.cpp context
//
// The KV tensors hold n_pool cells while n_ctx stays the logical bound. Positions map to blocks of the pool in chunks of
// n_chunk consecutive positions: position p of a sequence lives in cell block(p/n_chunk)*n_chunk + p%n_chunk. There is
// no page table: the cell metadata is the mapping, so seq_rm(), clear() and a restored sequence stay consistent.
// The caller decides which chunks are resident, and stores the bytes of the others.
//
// Every call that can fail returns a kvf_status, and sets kvf_error() of the calling thread.
// No exception leaves this API. A context must not be used by two threads at once.

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
    KVF_E_UNSUPPORTED = -2,  // the model, or its memory, cannot do this
    KVF_E_NO_BLOCK    = -3,  // no free block: nothing was changed, drop chunks and call again
    KVF_E_RECORD      = -4,  // the bytes are not a record of this chunk, model and cache
    KVF_E_STATE       = -5,  // the chunk is (not) resident, the block is not free
    KVF_E_MODEL       = -6,  // the file cannot be loaded
    KVF_E_MEMORY      = -7,  // an allocation failed
    KVF_E_BACKEND     = -8,  // the computation failed
    KVF_E_ABORTED     = -9,  // stopped by kvf_interrupt()
    KVF_E_LOST        = -10, // an RPC server is gone, and what it held
    KVF_E_LOGITS      = -11, // logits are NaN or +inf, or none is finite; or keys are not
};

#define KVF_RECORD_MAGIC 0x5246564bu // "KVFR"
#define KVF_RECORD_VERSION 1

#define KVF_FLAG_V_TRANS 1 // V is stored as n_embd_v columns of n_chunk elements (no flash attention)
#define KVF_FLAG_ROT_K 2   // K is Hadamard-rotated (quantised caches)
#define KVF_FLAG_ROT_V 4

// The head of a record, little endian. What follows it: n_chunk cells of 12 bytes (int32 x, y, token), zeros up to
// meta_bytes, then for each pooled layer in ascending order its K rows and its V rows, raw, as they lie in the cache.
// The whole record is a function of the chunk's tokens, the model and the cache types: placement leaves no trace in it.
struct kvf_record {
    uint32_t magic;
    uint16_t version;
    uint16_t head_bytes;   // sizeof(struct kvf_record)
    uint64_t record_bytes; // the whole record
    uint64_t fingerprint;  // of the model, as given in kvf_pool_params
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
    uint32_t q_tap;       // keep the attention queries of the last q_tap tokens of each ubatch, and of at least n_seq_max
                          // tokens; 0: of none
    uint64_t fingerprint; // of the model, written to every record
    uint32_t q_every;     // in every q_every-th pooled layer, of which layer q_every/2 is the first; 1: in all of them
    uint32_t n_exchange;  // guests that a layer exchanges in a ubatch, at most
    // bits of the codes of each key and value, 2 or 4, by which positions outside the pool are attended to; 0: they are not,
    // and there are no guests
    uint32_t coarse_k;
    uint32_t coarse_v;
    // a paned context of the same model. A GPU has its codes in the memory of the panes, if that is large enough
    // (least_bytes), but while an exact batch is computed: then they are on the host. It must outlive this one. null: codes
    // have memory of their own
    struct llama_context * panes;
};

// A paned context computes exactly what a stock one does, bit for bit on the CPU, but holds the rows of a few
// full-attention layers at a time, in n_pane buffers of a device, its panes: the first n_pane - 2 layers stay, the others
// take turns in the last two. All rows of earlier positions are in the records of a pool.
struct kvf_pane_params {
    uint32_t n_pane;      // layers of a device whose rows it holds at once. 1: the computation waits for each; all: nothing
                          // is streamed
    uint32_t q_tap;       // as in kvf_pool_params
    uint32_t q_every;     // as in kvf_pool_params
    uint32_t mass_piece;  // keep the attention of the tap's tokens, summed over pieces of mass_piece positions, a divisor of
                          // 256 (kvf_get_mass); 0: do not
    uint64_t least_bytes; // of the panes of a GPU, for the codes of a pool
};

struct kvf_pool_info {
    uint32_t n_pool;
    uint32_t n_chunk;
    uint32_t n_block; // n_pool/n_chunk
    uint32_t n_block_free;
    uint32_t n_kv;    // width of the attention graph, in cells
    uint32_t n_layer; // pooled layers
    uint32_t n_copy;  // copies that moving a chunk takes
    uint64_t record_bytes;
    uint32_t meta_bytes;
    uint32_t flags; // KVF_FLAG_*
};

struct kvf_pane_info {
    uint64_t bytes;    // of all panes, of all devices
    uint64_t n_bytes;  // copied so far, in both directions
    uint32_t n_pane;   // of the device that has the most
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
    int32_t  device; // whose memory it is in, as ggml_backend_dev_get() counts
    uint64_t offs_k; // of the K rows in a record, bytes
    uint64_t size_k; // bytes of all n_chunk rows
    uint64_t offs_v;
    uint64_t size_v;
};

struct kvf_kv_bytes {
    uint64_t attn;      // the full-attention KV cache: the pool, or the whole context
    uint64_t swa;       // the sliding-window KV cache
    uint64_t recurrent; // the recurrent state
};

// the message of this thread's last error, "" if there was none
LLAMA_API const char * kvf_error(void);

// start the library (once), and collect its log
LLAMA_API void kvf_init(void);
// echo log lines from min_level (enum ggml_log_level) on to stderr; none at first
LLAMA_API void kvf_log_level(int min_level);

// stop: decodes return KVF_E_ABORTED until it is called with false (safe in a signal handler; CPU computations only)
LLAMA_API void kvf_interrupt(bool stop);

// on_host: patterns (std::regex, searched for) of names of tensors that stay in host memory, n_on_host of them
LLAMA_API int kvf_model_load(const char * path, const struct llama_model_params * params, const char * const * on_host,
        uint32_t n_on_host, struct llama_model ** model);

// tensor i of the model: its name (valid as long as the model), its bytes, and the index of its device for
// ggml_backend_dev_get(). in a model loaded with no_alloc: of the device it would be on
LLAMA_API int kvf_get_weight(struct llama_model * model, uint32_t i, const char ** name, uint64_t * size, int32_t * device);
LLAMA_API uint32_t kvf_n_weight(struct llama_model * model);

// with pool: a pooled context; with panes: a paned one; neither: a stock context, with one cell for each logical position
LLAMA_API int kvf_context_new(struct llama_model * model, const struct llama_context_params * params,
        const struct kvf_pool_params * pool, const struct kvf_pane_params * panes, struct llama_context ** ctx);

// the class of the context's memory ("llama_kv_cache", ...)
LLAMA_API const char * kvf_memory_class(struct llama_context * ctx);
LLAMA_API int          kvf_get_kv_bytes(struct llama_context * ctx, struct kvf_kv_bytes * bytes);
// bytes of the compute buffers on a device, by its index for ggml_backend_dev_get(). with a model loaded with no_alloc: the
// bytes they would take
LLAMA_API int kvf_get_compute_bytes(struct llama_context * ctx, int32_t device, uint64_t * bytes);
// layer i of the attention cache, pooled or not (record offsets are 0 if not)
LLAMA_API int      kvf_get_layer(struct llama_context * ctx, uint32_t i, struct kvf_layer * layer);
LLAMA_API uint32_t kvf_n_layer(struct llama_context * ctx);

// which tokens of a batch get logits
enum kvf_outputs {
    KVF_OUTPUTS_NONE = 0,
    KVF_OUTPUTS_LAST = 1, // the last token's
    KVF_OUTPUTS_ALL  = 2,
};

// decode n tokens of sequence seq at positions pos, pos + 1, ...; outputs: enum kvf_outputs
// KVF_E_NO_BLOCK: nothing was changed. KVF_E_ABORTED: a part of the batch may be in the cache: kvf_seq_rm() removes it, or,
// if a recurrent state has advanced, kvf_clear()
LLAMA_API int kvf_decode(
        struct llama_context * ctx, llama_seq_id seq, llama_pos pos, const llama_token * tokens, int32_t n, int outputs);

// decode n tokens (at most n_ubatch) of several sequences: tokens[i] at position pos[i] of sequence seqs[i]. the tokens of
// a sequence are consecutive. all get logits
LLAMA_API int kvf_decode_each(
        struct llama_context * ctx, const llama_seq_id * seqs, const llama_pos * pos, const llama_token * tokens, int32_t n);

// decode n tokens (at most n_ubatch) of sequence seq in a paned context, against all positions before pos. those are read
// from n_record records of `pool`, one for each chunk; the last ones are of the chunks that this batch writes to. their rows
// before pos must be valid, or of a batch before this one; their other rows and their heads are written. the caller moves
// the state that is not in the full-attention cache (kvf_partial_*). the records are complete, and may be freed, once
// kvf_wait_exact() says so. on KVF_E_ABORTED and other errors, the rows from pos on are undefined, and all others complete
LLAMA_API int kvf_decode_exact(struct llama_context * ctx, struct llama_context * pool, llama_seq_id seq, llama_pos pos,
        const llama_token * tokens, int32_t n, int outputs, void * const * records, uint32_t n_record, size_t record_size);
// whether batches of a paned context, from now on, leave room for what another thread launches: a layer is launched only
// when its rows are there, so that the device's queue is never full, and rows are copied in small pieces, between which
// others are
LLAMA_API int kvf_pace_exact(struct llama_context * ctx, bool paced);
// wait for all batches of a paned context but the last n (at most 3 are under way). end: the positions whose rows are in the
// records
LLAMA_API int kvf_wait_exact(struct llama_context * ctx, uint32_t n, llama_pos * end);
LLAMA_API int kvf_get_pane_info(struct llama_context * ctx, struct kvf_pane_info * info);

// wait for the computation
LLAMA_API int kvf_synchronize(struct llama_context * ctx);
// the most likely token of output i of the last batch (-1: the last), the first one of equals; waits for the computation.
// KVF_E_LOGITS: there is none
LLAMA_API int kvf_argmax(struct llama_context * ctx, int32_t i, llama_token * token);
// its probability, by the softmax of all logits, to a part in 10,000
LLAMA_API int kvf_top_probability(struct llama_context * ctx, int32_t i, float * res);

LLAMA_API int kvf_clear(struct llama_context * ctx);
// forget one sequence
LLAMA_API int kvf_clear_seq(struct llama_context * ctx, llama_seq_id seq);
// forget positions [p0, p1) everywhere, p1 < 0: to the end. KVF_E_UNSUPPORTED: a recurrent state cannot go back so far
LLAMA_API int kvf_seq_rm(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);
// forget positions [p0, p1) in the full-attention cache only, pooled or stock: an eviction must equal this
LLAMA_API int kvf_attn_seq_rm(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);

// the calls below need a pooled context, and fail with KVF_E_ARGUMENT on a stock one

LLAMA_API int kvf_get_pool_info(struct llama_context * ctx, struct kvf_pool_info * info);
// for each of the n_block blocks: the chunk it holds (-1: none, it is free), the number of its cells in
// use, and the sequence whose chunk it holds (-1: none)
LLAMA_API int kvf_blocks(
        struct llama_context * ctx, int32_t * chunks, int32_t * n_used, llama_seq_id * seqs, uint32_t n_block);
// the block of a chunk, -1: not resident
LLAMA_API int kvf_block_of(struct llama_context * ctx, llama_seq_id seq, int32_t chunk, int32_t * block);

// Copies run in parallel with the computation where the device can do that, and are ordered against it: a caller who
// decodes, drops and pages in need not wait for any. But host memory must not change until the copy is done, that is, until
// kvf_wait() has returned for its ticket, or for a later one.

// begin to write the record of a resident chunk to dst (record_bytes)
LLAMA_API int kvf_read(
        struct llama_context * ctx, llama_seq_id seq, int32_t chunk, void * dst, size_t size, uint64_t * ticket);
// free the block of a resident chunk. metadata only: the caller has its record, or has called kvf_read() for it
LLAMA_API int kvf_drop(struct llama_context * ctx, llama_seq_id seq, int32_t chunk);
// begin to copy a record into a free block (in/out, -1: the first free one). the chunk is resident from the next computation
// on, which waits for the copy
LLAMA_API int kvf_page_in(
        struct llama_context * ctx, llama_seq_id seq, int32_t chunk, const void * src, size_t size, int32_t * block);
// wait for the copies up to a ticket, 0: all
LLAMA_API int kvf_wait(struct llama_context * ctx, uint64_t ticket);

// host memory that the device copies to and from at the speed of its bus; NULL: any memory is as fast. may be called by
// another thread during a computation. free it when no copy uses it any more
struct kvf_host;
LLAMA_API int    kvf_host_new(struct llama_context * ctx, size_t size, struct kvf_host ** host);
LLAMA_API void * kvf_host_base(struct kvf_host * host);
LLAMA_API void   kvf_host_free(struct kvf_host * host);

// seconds that n copies of size bytes take, one after the other: the speed of the bus. to_device: the direction
LLAMA_API int kvf_time_copies(struct llama_context * ctx, size_t size, uint32_t n, bool to_device, double * seconds);
// overwrite the bytes of all free blocks, for tests: no result may depend on them. they must be finite numbers of the
// cache type: without flash attention a masked cell is multiplied by 0, not skipped
LLAMA_API int kvf_scribble(struct llama_context * ctx, uint8_t byte);

//
// relevance: summaries of the keys of a record, and their products with queries. No context is used: any thread may call
// these. n_embd_k must be n_head_kv*n_embd_head_k, and n_embd_head_k even
//

enum kvf_summary_kind {
    KVF_SUMMARY_CENTROIDS = 0, // n_row centroids: farthest-point seeds, two Lloyd steps, scaled to their rows' mean length
    KVF_SUMMARY_MEAN      = 1, // 1 row
    KVF_SUMMARY_DIRECTION = 2, // 1 row, the mean scaled to length 1
    KVF_SUMMARY_ROWS      = 3, // all n_chunk rows
};

// the number of bf16 values in a slab of n summaries of a layer
LLAMA_API int kvf_summary_size(const struct kvf_layer * layer, uint32_t n, uint32_t n_row, size_t * size);
// summarise the keys of a record in n_layer layers: entry i of a slab of n for each
LLAMA_API int kvf_summarise(const struct kvf_layer * const * layers, uint32_t n_layer, uint32_t n_chunk, const void * record,
        size_t record_size, int kind, uint32_t n_row, uint16_t * const * slabs, uint32_t i, uint32_t n);
// for each of n_head queries [n_head, n_embd_head_k] and the first n entries of a slab, the largest product of the query
// with a row -> dst[head*stride + i]
LLAMA_API int kvf_score(const struct kvf_layer * layer, const uint16_t * slab, uint32_t n, uint32_t n_row, const float * q,
        float * dst, size_t stride);

// the share of attention that each of the first n chunks gets from n_q queries [n_q, n_head, n_embd_head_k], summed over
// heads; of the queries, the largest share counts, in each of n_layer layers. a head's share of a chunk is the sum of
// exp(scale*q*row) over the rows of its summary, each times the number of its keys, divided by that of all n chunks
// -> dst[n_layer, n]. slabs: of each layer, of slab_size entries each
LLAMA_API int kvf_mass(const struct kvf_layer * const * layers, uint32_t n_layer, const uint16_t * const * const * slabs,
        uint32_t slab_size, uint32_t n, uint32_t n_row, const float * const * q, uint32_t n_q, const float * scales,
        float * dst);

// with the keys of n records, for the queries of n_token tokens [n_token, n_head, n_embd_head_k]: the largest product, if
// scale is 0; otherwise the logarithm of the sum of exp(scale*product) -> dst[n_token*n_head, n]. n_edge, with a scale: the
// same also over the first n_edge keys of each chunk, and over the last n_edge -> dst[3, n_token*n_head, n]
LLAMA_API int kvf_score_keys(const struct kvf_layer * layer, uint32_t n_chunk, const void * const * records, uint32_t n,
        size_t record_size, const float * q, uint32_t n_token, float scale, uint32_t n_edge, float * dst);

//
// guests: blocks of a pool in which each layer holds units of 16 positions of its own choice (guests/fresh.h). The choice
// is made in the graph, by the queries of each ubatch, among all positions that have codes. n_embd_k must be
// n_head_kv*n_embd_head_k
//

#define KVF_UNIT 16

struct kvf_codes_info {
    uint64_t bytes;        // of the sequence's codes, in host memory
    uint64_t device_bytes; // of all sequences' codes and what choosing takes, on GPUs
    uint32_t n;            // positions that have codes
    uint32_t n_known;      // that had codes when the last segment of 4,096 began, whose means are made of them
    uint32_t n_block;      // of guests
    uint32_t n_slot;       // guests of a layer
};

// heads of a layer: of queries and of keys, and the values of a key and of a value row (0: the keys are these rows, too)
struct kvf_heads {
    uint32_t n_query, n_kv, n_embd, n_embd_v;
};

// the bytes of a GPU's memory, beside codes, by which n_layer layers attend to codes and choose guests. n_ctx: positions of
// each of n_seq sequences. n_pool: cells
LLAMA_API uint64_t kvf_choice_bytes(
        const struct kvf_heads * heads, uint32_t n_layer, uint32_t n_ctx, uint32_t n_seq, uint32_t n_pool, uint32_t n_chunk);

// the bytes of the codes of n positions of a layer, in host memory or in that of a GPU
LLAMA_API uint64_t kvf_codes_bytes(
        const struct kvf_heads * heads, uint32_t n_bit_k, uint32_t n_bit_v, uint32_t n, bool on_gpu);

// for tests: pools in host memory that are made from now on have these kernels (struct kvf_gpu), null: the CPU's nodes
LLAMA_API void kvf_set_host_kernels(const void * kernels);

// put chunks first, first + 1, ... of layers [layer, layer + n_layer) into codes, from their records. different threads may
// do different layers
LLAMA_API int kvf_codes_put(struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first,
        const void * const * records, uint32_t n);
// all layers have the codes of these chunks now, so they may become guests. the caller keeps their records where they are
// until the sequence is cut to fewer positions
LLAMA_API int kvf_codes_cover(
        struct llama_context * ctx, llama_seq_id seq, uint32_t first, const void * const * records, uint32_t n);
// forget all codes: the slots of all guests are empty then
LLAMA_API int kvf_codes_forget(struct llama_context * ctx, llama_seq_id seq);
LLAMA_API int kvf_codes_info(struct llama_context * ctx, llama_seq_id seq, struct kvf_codes_info * info);
// guests that were copied from records so far, of all sequences and layers
LLAMA_API int kvf_guests_fetched(struct llama_context * ctx, uint64_t * n);
// the codes of the first n positions of a layer as bytes: how many, out and in
LLAMA_API int kvf_codes_size(struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, size_t * size);
LLAMA_API int kvf_codes_get(
        struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, void * dst, size_t size);
LLAMA_API int kvf_codes_set(
        struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, const void * src, size_t size);

// give a sequence n blocks for guests: it keeps the first ones it has, and gets free ones; if it has none, it gets `blocks`.
// KVF_E_NO_BLOCK: nothing was changed. the next ubatch fills slots without a unit
LLAMA_API int kvf_set_guests(struct llama_context * ctx, llama_seq_id seq, uint32_t n, const int32_t * blocks);
// its blocks of guests [n_block], and the unit in each slot of each layer [n_layer, n_slot], -1: none
LLAMA_API int kvf_get_guests(
        struct llama_context * ctx, llama_seq_id seq, int32_t * blocks, uint32_t n_block, int32_t * units, size_t n_unit);
// put units into the slots, from their records
LLAMA_API int kvf_place_guests(struct llama_context * ctx, llama_seq_id seq, const int32_t * units, size_t n_unit);

// the calls below need a context again

// the state that no chunk holds: a sliding window with the places of its cells (pool/window.cpp), or what is recurrent,
// as upstream's "partial only" sequence state
LLAMA_API int kvf_partial_size(struct llama_context * ctx, llama_seq_id seq, size_t * size);
LLAMA_API int kvf_partial_get(struct llama_context * ctx, llama_seq_id seq, void * dst, size_t size);
// put it back, as of position pos, and forget the attention cache from there on
LLAMA_API int kvf_partial_set(struct llama_context * ctx, llama_seq_id seq, llama_pos pos, const void * src, size_t size);
// the same with that of another context, which devices copy by themselves
LLAMA_API int kvf_partial_copy(struct llama_context * from, struct llama_context * to, llama_seq_id seq, llama_pos pos);

// make the attention graph of a pool at least n_kv cells wide: n_kv of its kvf_pool_info when a sequence was saved. for
// chunks that come back to their former blocks
LLAMA_API int kvf_set_width(struct llama_context * ctx, uint32_t n_kv);

// begin to read the queries of a token of the last ubatch, in all tapped layers: for each [n_head, n_embd_head_k] floats, in
// the basis of the cached K (after RoPE and rotation). back: 0 the last token, 1 the one before, ..., of those that the tap
// keeps. n: floats that dst holds
LLAMA_API int kvf_q(struct llama_context * ctx, uint32_t back, float * dst, size_t n, uint64_t * ticket);

// the attention of one of these tokens, in a paned context with mass_piece: for each tapped layer n_piece shares, summed
// over heads, of positions [0, mass_piece), [mass_piece, 2*mass_piece), ... waits for the computation
LLAMA_API int kvf_get_mass(struct llama_context * ctx, uint32_t back, float * dst, uint32_t n_piece);

// the factor of the products of these queries with keys, in each of n tapped layers
LLAMA_API int kvf_q_scale(struct llama_context * ctx, float * dst, uint32_t n);

// a checksum (XXH3, 16 bytes) of bytes that come in pieces. kvf_checksum_new() returns null if memory is short
struct kvf_checksum;
LLAMA_API struct kvf_checksum * kvf_checksum_new(void);
LLAMA_API void                  kvf_checksum_add(struct kvf_checksum * sum, const void * data, size_t size);
LLAMA_API void                  kvf_checksum_get(const struct kvf_checksum * sum, uint8_t * dst);
LLAMA_API void                  kvf_checksum_free(struct kvf_checksum * sum);

// write a model file in another type, with the library's own quantiser. dst may be left behind if it fails
LLAMA_API int kvf_quantize(const char * src, const char * dst, const struct llama_model_quantize_params * params);

// exchange the results of llama_get_embeddings_layer_inp() and llama_get_embeddings_nextn() of two contexts of a model
LLAMA_API void kvf_exchange_features(struct llama_context * a, struct llama_context * b);

// drafts of the next tokens, by the implementations of llama.cpp's common library

struct kvf_spec;

struct kvf_spec_params {
    const char * type;   // "draft-simple", "draft-dflash", "draft-dspark", "draft-eagle3", "draft-mtp", "ngram-simple"
    int32_t      n_max;  // tokens of a draft
    int32_t      n_gram; // tokens that must occur earlier in the text, for an n-gram
    int32_t      window; // positions that the drafter remembers
    float        p_min;  // a token less likely than this ends the draft
};

// ctx_dft: of the drafter, NULL for n-grams. both contexts outlive the drafts, which are of sequence 0
int     kvf_spec_new(struct llama_context * ctx_tgt, struct llama_context * ctx_dft, const struct kvf_spec_params * params,
            struct kvf_spec ** spec);
void    kvf_spec_free(struct kvf_spec * spec);
int32_t kvf_spec_n_max(const struct kvf_spec * spec);

// whether a context of the target's model keeps the layer outputs that the drafter reads. at first the target does; it is
// not needed for a batch that kvf_spec_process() will not see
int kvf_spec_listen(struct kvf_spec * spec, struct llama_context * ctx, bool on);
// a new sequence, whose first n tokens are decoded
int kvf_spec_begin(struct kvf_spec * spec, const llama_token * tokens, int32_t n);
// ctx, the target or another context of its model, has just decoded this batch. drops the drafter's positions from pos on,
// and those outside its window
int kvf_spec_process(
        struct kvf_spec * spec, struct llama_context * ctx, llama_pos pos, const llama_token * tokens, int32_t n);
// draft the continuation of the first n_keep tokens of the last call's sequence and n further tokens, of which the last is
// not decoded yet. draft: room for n_max tokens; n_draft: how many were drafted
int kvf_spec_draft(struct kvf_spec * spec, int32_t n_keep, const llama_token * tokens, int32_t n, int32_t n_max,
        llama_token * draft, int32_t * n_draft);
// n of the last draft's tokens were right
int kvf_spec_accept(struct kvf_spec * spec, int32_t n);

// sampling under a grammar

// the tokens of a vocabulary by their bytes: made once for all of a model's grammars, some 0.1 s
struct kvf_tokens;
int  kvf_tokens_new(const struct llama_vocab * vocab, struct kvf_tokens ** tokens);
void kvf_tokens_free(struct kvf_tokens * tokens);

struct kvf_grammar;

struct kvf_grammar_params {
    const char *         text;     // GBNF
    const char *         after;    // what the grammar has seen before the answer begins, with special tokens
    bool                 lazy;     // it begins where one of the triggers is found in the answer
    const char * const * patterns; // regular expressions, matched from the answer's start
    size_t               n_patterns;
    const llama_token *  tokens;
    size_t               n_tokens;
    const char *         thinking; // begins what a lazy grammar leaves alone; "": nothing does
    const char * const * thought;  // end it
    size_t               n_thought;
};

// a new grammar, at the start of rule `root`
int kvf_grammar_new(struct kvf_tokens * tokens, const struct llama_vocab * vocab, const struct kvf_grammar_params * params,
        struct kvf_grammar ** grammar);
// a copy in the same state. both share what was computed about the grammar; different threads may use them
int  kvf_grammar_copy(struct kvf_grammar * grammar, struct kvf_grammar ** copy);
void kvf_grammar_free(struct kvf_grammar * grammar);
// the tokens that may follow, as n words of 64 bits; and advance by a token
int kvf_grammar_mask(const struct kvf_grammar * grammar, uint64_t * mask, size_t n);
int kvf_grammar_accept(struct kvf_grammar * grammar, llama_token token);
// sample a token from the logits of token i of the last batch; chain and grammar accept it. chain: null for the likeliest
// token. top_k: the chain only takes the top_k likeliest tokens; 0: it may take any. grammar: allows the token; may be null.
// KVF_E_LOGITS: as for kvf_argmax()
int kvf_sample(struct llama_context * ctx, int32_t i, struct llama_sampler * chain, int32_t top_k,
        struct kvf_grammar * grammar, llama_token * token);

// conversations, by llama.cpp's own templates and parsers. returned texts are freed with kvf_text_free()

struct kvf_chat;
struct kvf_reply;

void kvf_text_free(char * text);

// source: a template; "": the model's own. seconds: its time limit, here and below; KVF_E_UNSUPPORTED: it exceeds a limit
int  kvf_chat_new(const struct llama_model * model, const char * source, double seconds, struct kvf_chat ** chat);
void kvf_chat_free(struct kvf_chat * chat);
// the template's capabilities: {name: bool}
int kvf_chat_caps(const struct kvf_chat * chat, char ** result);
// request: JSON with messages, tools, tool_choice, parallel_tool_calls, json_schema, enable_thinking, chat_template_kwargs,
// add_generation_prompt and continue_final_message (true or false), as llama-server has them. result: JSON with the prompt,
// what its answer keeps to (grammar, lazy, triggers, stop), tokens of it that are text (preserved), and how it is parsed
// (format, parser, generation_prompt)
int kvf_chat_apply(const struct kvf_chat * chat, const char * request, double seconds, char ** result);

// an answer that is parsed while it grows
int  kvf_reply_new(int32_t format, const char * parser, const char * generation_prompt, struct kvf_reply ** reply);
void kvf_reply_free(struct kvf_reply * reply);
// more of its text. deltas: JSON with the additions to its reasoning, content and calls
int kvf_reply_push(struct kvf_reply * reply, const char * text, bool partial, char ** deltas);

// the free memory of a device, and all of it
LLAMA_API int kvf_device_memory(uint32_t device, size_t * n_free, size_t * n_total);

// make the GPUs of an RPC server (host:port) devices of this process
LLAMA_API int kvf_add_rpc(const char * endpoint);
// end all connections to RPC servers: calls that wait for one return KVF_E_LOST
LLAMA_API void kvf_drop_rpc(void);

#ifdef __cplusplus
}
#endif
