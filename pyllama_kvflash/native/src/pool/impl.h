#pragma once

#include "api/guard.h"

#include "ggml-cpp.h"
#include "llama-kv-cache.h"

#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

class llm_graph_result;
struct kvf_fresh;
struct llama_cparams;
struct kvf_window;
struct kvf_window_cell;
struct kvf_window_place;

// n bytes of a tensor, as a tensor
ggml_tensor kvf_bytes(const ggml_tensor * t, size_t offset, size_t n);

// Copies between the pool and host memory. On a device that can, they run on a stream of their own, ordered against the
// computation by events, and the host does not wait; elsewhere they are done when a call returns.
//
// A copy waits for the computations that were submitted before it. The computations that follow wait for a copy into a
// block, and for one from a block before they may write to it (order).
struct kvf_mover {
    // a part of block 0 that is contiguous in the pool and in a record; block b has its own b*size bytes further on
    struct piece {
        ggml_backend_buffer_t buf;
        size_t                dev; // offset in the buffer
        size_t                rec; // offset in the record
        size_t                size;
    };

    // a part of a tensor of the graph, in bytes
    struct rows {
        const ggml_tensor * tensor;
        size_t              at, size;
    };

    kvf_mover(const std::vector<piece> & pieces, size_t record_bytes);
    ~kvf_mover();

    kvf_mover(const kvf_mover &)             = delete;
    kvf_mover & operator=(const kvf_mover &) = delete;

    // begin to copy a block to dst, or from src: either is null. both point at whole records
    uint64_t copy(llama_context * ctx, int32_t block, void * dst, const void * src);
    // begin to copy parts of tensors of the last graph, one after the other
    uint64_t fetch(llama_context * ctx, const std::vector<rows> & tensors, void * dst);

    // before a batch is computed: it waits for the copies that read what it may overwrite
    void order(llama_context * ctx, const std::function<bool(int32_t block)> & is_free);
    // the caller waits for this copy and all before it
    void wait(uint64_t ticket);
    void wait() { wait(n_begun); }

    static ggml_backend_dev_t device_of(ggml_backend_buffer_t buf);
    // whether copies can run in parallel with the device's computation
    static bool is_async(ggml_backend_dev_t dev);
    // whether the device copies to and from some host memory faster than others
    static bool has_pinned(ggml_backend_dev_t dev);

    // how many copies a block takes
    size_t n_run() const;
    // seconds that n copies of one block of memory of this size take
    double time_copies(size_t size, uint32_t n, bool to_device) const;
    // the device whose host memory is best to copy to and from, nullptr: any memory
    ggml_backend_dev_t pinned_for() const;

    const size_t record_bytes;

private:
    // copies of equal size at constant strides
    struct run {
        size_t dev, rec, size, n, stride_dev, stride_rec;
    };

    // the pooled layers of one buffer
    struct part {
        ggml_backend_buffer_t  buf;
        ggml_tensor *          window; // all of the buffer
        ggml_backend_ptr       stream; // null: copies are synchronous
        ggml_backend_event_ptr ready;  // all that was submitted
        std::vector<run>       runs;

        uint64_t                            behind  = 0; // the stream waits for so many batches
        ggml_backend_t                      compute = nullptr;
        std::vector<ggml_backend_event_ptr> spare;
    };

    struct transfer {
        uint64_t                            ticket;
        int32_t                             block; // -1: a tensor of the graph
        bool                                ordered;
        std::vector<ggml_backend_event_ptr> done; // of each part, null: it is
    };

    void       bind(llama_context * ctx);
    void       start(part & p);
    transfer & begin(llama_context * ctx, int32_t block);
    void       finish(transfer & t);
    void       order(transfer & t);

    ggml_context_ptr     windows;
    std::vector<part>    parts;
    std::deque<transfer> flying;
    uint64_t             n_begun = 0;
    uint64_t             n_batch = 0;
};

// a layer of a cache, v is null where none is stored
struct kvf_layer_tensors {
    int32_t       il;
    ggml_tensor * k;
    ggml_tensor * v;
};

// whether a node computes, where others are views; and what it is a view of
bool                kvf_computes(const ggml_tensor * t);
const ggml_tensor * kvf_root(const ggml_tensor * t);

// The layers of a full-attention cache, a few at a time. Each layer lies in a pane of its device's: the first n_pane - 2 in
// one of their own, the others take turns in the last two. While one is computed, the next one is copied into the other
// pane. The graph is launched in pieces that end where a layer's turn is over (on_node), so that its pane can be given to
// another. Copies and computation wait for each other on the device, and the host for neither: one device computes a batch
// while the next device is at the one before.
//
// While no batch is computed, their memory may have something else: the codes of a pool (coarse/gpu-coarse.cpp).
struct kvf_tenant {
    // a batch begins: what it has is lost
    virtual void leave() = 0;

protected:
    ~kvf_tenant() = default;
};

struct kvf_panes {
    explicit kvf_panes(const kvf_pane_params & params) : params(params) {}
    ~kvf_panes();

    kvf_panes(const kvf_panes &)             = delete;
    kvf_panes & operator=(const kvf_panes &) = delete;

    // the buffer of a cache's layers on one device, with their tensors laid over its panes; nullptr: no memory
    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft);

    // the callback of the scheduler (ggml_backend_sched_eval_callback)
    static bool on_node(ggml_tensor * t, bool ask, void * self);

    // a batch at positions [pos, pos + n) begins, whose rows go to and come from records, laid out as `of` has it
    void begin(llama_context * ctx, const llama_kv_cache & kv, const llama_kv_cache & of, uint32_t pos, uint32_t n,
            void * const * records);
    bool paced = false; // see kvf_pace_exact()
    // it is launched: wait() says when its records are whole. throws what went wrong in a callback
    void finish();
    // it is not: all copies have ended
    void abandon();
    // wait for all batches but the last n. returns the positions whose rows are in the records
    uint32_t wait(uint32_t n);
    // how many devices have a stream of copies
    uint32_t n_stream() const;

    // the rows of positions from pos on are not what the records have
    void forget(uint32_t pos);

    kvf_pane_info info() const;

    // the memory on a device, and its bytes; null: there is none
    char * memory(ggml_backend_dev_t dev, size_t & size) const;
    // nothing is computed or copied any more, and a tenant may have the memory until it has to leave
    void vacate();
    // it comes or has left: zeros, since attention multiplies what no row has by 0
    void clear(const char * memory);

    const kvf_pane_params params;
    kvf_tenant *          tenant = nullptr;

private:
    static constexpr size_t MAX_AHEAD = 4; // batches under way: the scheduler has as many copies of its inputs

    struct pane {
        int32_t                holds = -1; // layer
        uint32_t               n     = 0;  // rows that are right, from position 0
        ggml_backend_event_ptr loaded;
    };

    // the panes of one device
    struct part {
        ggml_backend_buffer_t  buf;
        ggml_backend_ptr       stream; // null: copies are synchronous
        ggml_backend_event_ptr computed;
        ggml_backend_event_ptr stored[MAX_AHEAD]; // of each batch under way
        ggml_backend_t         compute = nullptr;
        std::vector<pane>      panes;
    };

    struct layer {
        size_t        part, pane;
        ggml_tensor * k;
        ggml_tensor * v;              // null: none
        size_t        offs_k, offs_v; // in a record
    };

    // nodes of the graph, one after the other, that read or write a layer's rows
    struct turn {
        int32_t             layer;
        const ggml_tensor * last;
        bool                reads, writes;
    };

    void    place_layers(const llama_kv_cache & kv, const llama_kv_cache & of);
    void    place_records();
    void    bind(llama_context * ctx);
    void    settle();
    int32_t touched(const ggml_tensor * t) const;
    void    find_turns();
    void    start();
    void    fill();
    void    store(const turn & turn);
    void    taken();
    void    check(const ggml_tensor * t) const;
    void    load(int32_t layer);
    void    follow(part & p);
    void    ready(int32_t layer);
    void    copy(const layer & l, uint32_t from, uint32_t to, bool in);
    void    copy(part & p, ggml_tensor * t, char * host, size_t at, size_t size, size_t n, size_t stride, size_t stride_host,
               bool in);

    std::vector<part>                                        parts;
    std::vector<layer>                                       layers;
    std::map<const ggml_tensor *, std::pair<size_t, size_t>> places;   // part and pane of each K
    std::map<const ggml_tensor *, int32_t>                   layer_of; // each K and V
    uint64_t                                                 n_bytes = 0;
    bool                                                     bound   = false;
    bool                                                     streams = false; // layers share panes

    // the batch
    bool                   running = false;
    llama_context *        ctx     = nullptr;
    uint32_t               pos = 0, n = 0, n_chunk = 0;
    bool                   v_trans = false;
    void * const *         records = nullptr;
    std::vector<ptrdiff_t> strides; // from each record to the next, 0: they are not copied as one
    std::vector<turn>      order;
    size_t                 n_done = 0;
    std::exception_ptr     failed;

    // the batches
    size_t               n_batch = 0;
    std::deque<uint32_t> ahead;     // where those under way end
    uint32_t             whole = 0; // where the last one that is not ends
};

// pinned host memory
struct kvf_host {
    kvf_host(ggml_backend_dev_t dev, size_t size);
    ~kvf_host();

    kvf_host(const kvf_host &)             = delete;
    kvf_host & operator=(const kvf_host &) = delete;

    // whether both addresses are in the memory of one of these: no copy may span two
    static bool is_one(const void * a, const void * b);

    void * base = nullptr;

private:
    void take(ggml_backend_dev_t dev, size_t size);

    size_t                  size;
    ggml_backend_buffer_ptr buf; // null: memory of ours, which the backend has pinned
    void (*unpin)(void * ptr) = nullptr;
};

// The pool. A friend of llama_kv_cache whose only state is the set-up of the context being created, and the copies under
// way: everything else is derived from the cells. The hooks in patches/ call the functions of the first two groups.
struct llama_kvflash {
    //
    // set-up
    //

    // while one is alive, the context that this thread creates is pooled ...
    struct scope {
        explicit scope(const kvf_pool_params & params);
        // ... or paned
        explicit scope(std::shared_ptr<kvf_panes> panes);
        ~scope();

        // throw what attach() threw: the library turned it into a null pointer
        void rethrow() const;
    };

    // cells of a full-attention cache of kv_size logical positions
    static uint32_t n_cells(uint32_t kv_size);

    // the buffer of a new cache's layers on a device, nullptr: no memory. those of full attention may have panes
    static ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, llama_swa_type swa_type);

    // the buffer of recurrent states on a device, nullptr: no memory. no_alloc: an empty one, as for a cache then
    static ggml_backend_buffer_t alloc_states(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool no_alloc);
    static size_t                states_size(ggml_context * ctx, ggml_backend_buffer_t buf, bool no_alloc);

    // make the memory that was just created a pool, or a paned one; throw if it cannot be
    static void attach(llama_memory_i * mem, llama_cparams & cparams);

    // throw if the memory is a pool: a whole-context restore re-packs the cells
    static void reject_restore(llama_memory_i * mem);

    //
    // placement
    //

    // the cells of a ubatch: its chunks' own blocks, then the first free ones. empty: not enough free blocks
    static llama_kv_cache::slot_info find_slot(const llama_kv_cache & kv, const llama_ubatch & ubatch);

    static int32_t  block_of(const llama_kv_cache & kv, llama_seq_id seq, int32_t chunk); // -1: not resident
    static uint32_t n_block(const llama_kv_cache & kv);
    static uint32_t n_chunk(const llama_kv_cache & kv) { return kv.pool_chunk; }
    static bool     is_free(const llama_kv_cache & kv, uint32_t block);

    // the full-attention cache of a memory, nullptr if there is no supported one
    static llama_kv_cache * get_kv(llama_memory_i * mem);
    static const char *     class_name(llama_memory_i * mem);

    // whether the sliding-window cache, if there is one, holds the whole window of position pos
    static bool         has_window(llama_memory_i * mem, llama_seq_id seq, llama_pos pos);
    static kvf_kv_bytes kv_bytes(llama_memory_i * mem);

    // the graph of the last ubatch, and what it gave out; nullptr if there is none
    static const llm_graph_result * graph(const llama_context * ctx);
    static void                     exchange_features(llama_context & a, llama_context & b);
    // what the scheduler asks at each node, nullptr: nothing
    static void set_callback(llama_context & ctx, ggml_backend_sched_eval_callback callback, void * data);

    // whether there is state outside the full-attention cache
    static bool has_partial(llama_memory_i * mem);

    // the sliding-window cache, if that is all the state outside the full-attention cache; else nullptr
    static llama_kv_cache * get_window(llama_memory_i * mem);

    static size_t window_size(const llama_kv_cache & kv, llama_seq_id seq);
    static void   window_get(llama_context * ctx, const llama_kv_cache & kv, llama_seq_id seq, void * dst, size_t size);
    static void   window_set(llama_context * ctx, llama_kv_cache & kv, llama_seq_id seq, const void * src, size_t size);
    // the same from the cache of another context, which a device copies by itself
    static void window_copy(
            llama_context * from, const llama_kv_cache & src, llama_context * to, llama_kv_cache & dst, llama_seq_id seq);

    static bool is_pool(const llama_kv_cache & kv) { return kv.pool_chunk > 0; }

    //
    // panes
    //

    static kvf_panes * panes(const llama_kv_cache & kv) { return kv.pool_panes.get(); }

    // have the cells of a paned cache be positions [0, pos) of a sequence, and nothing else
    static void place_before(
            llama_kv_cache & kv, const llama_kv_cache & of, llama_seq_id seq, uint32_t pos, void * const * records);
    // forget all cells of a paned cache if they are this sequence's: one after the other, 64K of them take 9 ms
    static void drop_before(llama_kv_cache & kv, llama_seq_id seq);
    // which positions each token of a batch sees; false: the library has to say it
    static bool set_mask(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch, bool causal);
    // after the mask of a ubatch was made: its tokens see the guests of their sequences, too (guests/fresh.h)
    static void        show_guests(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch);
    static kvf_fresh * fresh(const llama_kv_cache & kv) { return kv.pool_fresh.get(); }
    // positions of a sequence and the cells in which they are, in this order
    static const auto & cells(const llama_kv_cache & kv, llama_seq_id seq) { return kv.v_cells[0].seq_pos_get(seq); }

    // write the heads of the records of positions [pos, pos + n)
    static void write_heads(
            const llama_kv_cache & kv, const llama_kv_cache & of, uint32_t pos, uint32_t n, void * const * records);

    //
    // records
    //

    static uint32_t  meta_bytes(const llama_kv_cache & kv);
    static kvf_layer layer(const llama_kv_cache & kv, uint32_t i);
    static uint32_t  n_layer(const llama_kv_cache & kv) { return kv.layers.size(); }
    // which of them a layer of the model reads, that has rows of its own or another's; -1: none
    static int32_t read_by(const llama_kv_cache & kv, int32_t il) {
        const auto it = kv.map_layer_ids.find(il);
        return it == kv.map_layer_ids.end() ? -1 : it->second;
    }
    // the layers whose queries are kept
    static std::vector<uint32_t> tapped(const llama_kv_cache & kv);
    static kvf_pool_info         info(const llama_kv_cache & kv);
    static kvf_record            head(const llama_kv_cache & kv, int32_t chunk, uint64_t mask);
    static kvf_mover &           mover(const llama_kv_cache & kv) { return *kv.pool_mover; }

    static void blocks(const llama_kv_cache & kv, int32_t * chunks, int32_t * n_used, llama_seq_id * seqs);

    // of the memory of a buffer, as ggml_backend_dev_get() counts, -1: of no device
    static int32_t device_index(ggml_backend_buffer_type_t buft);

    static uint64_t read(llama_context * ctx, const llama_kv_cache & kv, llama_seq_id seq, int32_t chunk, void * dst);
    static void     drop(llama_kv_cache & kv, llama_seq_id seq, int32_t chunk);
    static int32_t  page_in(
             llama_context * ctx, llama_kv_cache & kv, llama_seq_id seq, int32_t chunk, const void * src, int32_t block);
    static void scribble(llama_context * ctx, const llama_kv_cache & kv, uint8_t byte);

    // zero all cells that are in no use: a masked one with NaN would make the sums of all others NaN, too
    static void scrub(llama_context * ctx);

    // the width of the attention graph as it was, when chunks come back to their blocks; it never shrinks
    static void set_n_kv(const llama_kv_cache & kv, uint32_t n_kv);

    static kvf_layer_tensors tensors(const llama_kv_cache & kv, uint32_t i);

    static bool v_trans(const llama_kv_cache & kv) { return kv.v_trans; }
    // keys are rotated in blocks of so many values, as build_input_k_rot() has it; 0: they are not
    static uint32_t n_rot_k(const llama_kv_cache & kv);
    // of the attention's logits, 0: there is none
    static float soft_cap(const llama_kv_cache & kv);

private:
    static void fill(const llama_kv_cache & kv, size_t cell, size_t n, uint8_t byte);
    static void attach_panes(llama_memory_i * mem, llama_cparams & cparams);
    static void attach_fresh(llama_kv_cache & kv, llama_cparams & cparams);
    static void tap(llama_kv_cache & kv, llama_cparams & cparams, uint32_t q_tap, uint32_t q_every);

    static kvf_window                    window_head(const llama_kv_cache & kv, llama_seq_id seq);
    static std::vector<kvf_window_place> window_places(
            const llama_kv_cache & kv, const kvf_window & head, const std::vector<kvf_window_cell> & saved);
    static std::vector<kvf_window_cell>  window_cells(const llama_kv_cache & kv, llama_seq_id seq);
    static void                          window_occupy(llama_kv_cache & kv, const kvf_window & head, llama_seq_id seq,
                                     const std::vector<kvf_window_cell> & saved, const std::vector<kvf_window_place> & places);
    static std::vector<kvf_mover::piece> pieces(const llama_kv_cache & kv);
};

// decode a batch of one sequence as kvf_decode() does, but for the checks
void kvf_compute(llama_context * ctx, llama_seq_id seq, llama_pos pos, const llama_token * tokens, int32_t n, int outputs);

// whether kvf_interrupt() asks for a stop
bool kvf_stopped();

// n rows of a layer's keys, as they lie in a record, as floats [n][n_embd_k]
void kvf_rows_to_float(const kvf_layer & layer, uint32_t n, const void * rows, float * dst);
// the same of its values [n][n_embd_v]. v_trans: positions are the rows
void kvf_values_to_float(const kvf_layer & layer, uint32_t n, bool v_trans, const void * rows, float * dst);
// and of n cells of a cache, [n][n_embd_head_k]. rows: of all cells
void kvf_heads_to_float(
        const kvf_layer & layer, uint32_t head, const void * rows, const int32_t * cells, uint32_t n, float * dst);
