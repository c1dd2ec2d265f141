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

// n bytes of a tensor, as a tensor of bytes
ggml_tensor kvf_bytes(const ggml_tensor * t, size_t offset, size_t n);

// Copies between the pool and host memory. If the device supports it, they run on a stream of their own, events order them
// against the computation, and the host does not wait. Otherwise a copy is done when its call returns.
//
// A copy waits for all computations submitted before it. Later computations wait for a copy into a block. They wait for a
// copy from a block only if they may write to it (order).
struct kvf_mover {
    // a part of block 0 that is contiguous in the pool and in a record. the same part of block b is b*size bytes further on
    struct piece {
        ggml_backend_buffer_t buf;
        size_t                dev; // offset in the buffer
        size_t                rec; // offset in the record
        size_t                size;
    };

    // a byte range of a tensor of the graph
    struct rows {
        const ggml_tensor * tensor;
        size_t              at, size;
    };

    kvf_mover(const std::vector<piece> & pieces, size_t record_bytes);
    ~kvf_mover();

    kvf_mover(const kvf_mover &)             = delete;
    kvf_mover & operator=(const kvf_mover &) = delete;

    // begin to copy a block to dst or from src, a whole record. one of them is null
    uint64_t copy(llama_context * ctx, int32_t block, void * dst, const void * src);
    // begin to copy parts of tensors of the last graph to dst, packed one after the other
    uint64_t fetch(llama_context * ctx, const std::vector<rows> & tensors, void * dst);

    // call before each batch: it will wait for the copies from blocks that it may overwrite
    void order(llama_context * ctx, const std::function<bool(int32_t block)> & is_free);
    // wait for this copy and all earlier ones
    void wait(uint64_t ticket);
    void wait() { wait(n_begun); }

    static ggml_backend_dev_t device_of(ggml_backend_buffer_t buf);
    // whether copies can run in parallel with the device's computation
    static bool is_async(ggml_backend_dev_t dev);
    // whether the device has a kind of host memory that it copies faster
    static bool has_pinned(ggml_backend_dev_t dev);

    // the number of copies needed to move a block
    size_t n_run() const;
    // seconds that n copies of `size` bytes take
    double time_copies(size_t size, uint32_t n, bool to_device) const;
    // the device to pin host memory for, since its copies are faster then; nullptr: any memory is as fast
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
        ggml_tensor *          window; // spans the whole buffer
        ggml_backend_ptr       stream; // null: copies are synchronous
        ggml_backend_event_ptr ready;  // all submitted batches are done
        std::vector<run>       runs;

        uint64_t                            behind  = 0; // number of batches that the stream waits for
        ggml_backend_t                      compute = nullptr;
        std::vector<ggml_backend_event_ptr> spare;
    };

    struct transfer {
        uint64_t                            ticket;
        int32_t                             block; // -1: a tensor of the graph
        bool                                ordered;
        std::vector<ggml_backend_event_ptr> done; // for each part; null: done
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

// a layer of a cache. v is null if the layer stores no V
struct kvf_layer_tensors {
    int32_t       il;
    ggml_tensor * k;
    ggml_tensor * v;
};

// whether a node computes something, rather than being a view; and the tensor behind a view
bool                kvf_computes(const ggml_tensor * t);
const ggml_tensor * kvf_root(const ggml_tensor * t);

// A user of the memory of panes between exact batches: the codes of a pool (coarse/gpu-coarse.cpp).
struct kvf_tenant {
    // give the memory back, because a batch begins
    virtual void leave() = 0;

protected:
    ~kvf_tenant() = default;
};

// Panes hold a few layers of a full-attention cache at a time. The first n_pane - 2 layers of a device have a pane each; the
// others take turns in the last two. While one of them is computed, the next one is copied into the other pane. The graph is
// launched in pieces that end where a layer's turn ends (on_node), so that the next layer can have its pane. Copies and
// computation wait for each other on the device; the host waits for neither. So several devices work at once, each on
// another batch.
struct kvf_panes {
    explicit kvf_panes(const kvf_pane_params & params) : params(params) {}
    ~kvf_panes();

    kvf_panes(const kvf_panes &)             = delete;
    kvf_panes & operator=(const kvf_panes &) = delete;

    // allocate the panes of one device, and place the tensors of its layers in them; nullptr: out of memory
    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft);

    // the scheduler's callback (ggml_backend_sched_eval_callback)
    static bool on_node(ggml_tensor * t, bool ask, void * self);

    // begin a batch at positions [pos, pos + n). rows are read from and written to records in the layout of `of`
    void begin(llama_context * ctx, const llama_kv_cache & kv, const llama_kv_cache & of, uint32_t pos, uint32_t n,
            void * const * records);
    bool paced = false; // see kvf_pace_exact()
    // the batch is launched; wait() tells when its records are complete. rethrows an exception of on_node()
    void finish();
    // the batch failed: wait for its copies to end
    void abandon();
    // wait for all batches but the last n. returns the end of the positions whose rows are in the records
    uint32_t wait(uint32_t n);
    // the number of devices with a stream for copies
    uint32_t n_stream() const;

    // invalidate the rows in the panes from position pos on: the records have changed
    void forget(uint32_t pos);

    kvf_pane_info info() const;

    // the memory of a device's panes and its size; null: the device has no panes
    char * memory(ggml_backend_dev_t dev, size_t & size) const;
    // end all computation and copies. then a tenant may use the memory until leave()
    void vacate();
    // zero the memory when the tenant comes or leaves: attention multiplies unused rows by 0, which keeps NaN
    void clear(const char * memory);

    const kvf_pane_params params;
    kvf_tenant *          tenant = nullptr; // null: none

private:
    static constexpr size_t MAX_AHEAD = 4; // most batches under way: the scheduler has 4 copies of its inputs

    struct pane {
        int32_t                holds = -1; // layer
        uint32_t               n     = 0;  // rows that are valid, from position 0
        ggml_backend_event_ptr loaded;
    };

    // the panes of one device
    struct part {
        ggml_backend_buffer_t  buf;
        ggml_backend_ptr       stream; // null: copies are synchronous
        ggml_backend_event_ptr computed;
        ggml_backend_event_ptr stored[MAX_AHEAD]; // one for each batch under way
        ggml_backend_t         compute = nullptr;
        std::vector<pane>      panes;
    };

    struct layer {
        size_t        part, pane;
        ggml_tensor * k;
        ggml_tensor * v;              // null: the layer stores no V
        size_t        offs_k, offs_v; // in a record
    };

    // consecutive nodes of the graph that read or write a layer's rows
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
    std::vector<ptrdiff_t> strides; // from each record to the next; 0: no single copy may span both
    std::vector<turn>      order;
    size_t                 n_done = 0;
    std::exception_ptr     failed;

    // the batches
    size_t               n_batch = 0;
    std::deque<uint32_t> ahead;     // end positions of the batches under way
    uint32_t             whole = 0; // end position of the last finished batch
};

// pinned host memory
struct kvf_host {
    kvf_host(ggml_backend_dev_t dev, size_t size);
    ~kvf_host();

    kvf_host(const kvf_host &)             = delete;
    kvf_host & operator=(const kvf_host &) = delete;

    // whether both addresses are in one allocation of pinned memory: no copy may span two
    static bool is_one(const void * a, const void * b);

    void * base = nullptr;

private:
    void take(ggml_backend_dev_t dev, size_t size);

    size_t                  size;
    ggml_backend_buffer_ptr buf; // null: allocated here, and only pinned by the backend
    void (*unpin)(void * ptr) = nullptr;
};

// The pool, a friend of llama_kv_cache. Its only state is the set-up of the context being created, and the copies under way;
// everything else is derived from the cells. The hooks in patches/ call the functions of the first two groups.
struct llama_kvflash {
    //
    // set-up
    //

    // while a scope is alive, the context that this thread creates is pooled ...
    struct scope {
        explicit scope(const kvf_pool_params & params);
        // ... or paned
        explicit scope(std::shared_ptr<kvf_panes> panes);
        ~scope();

        // rethrow the exception of attach(), which llama.cpp turned into a null pointer
        void rethrow() const;
    };

    // the number of cells of a full-attention cache of kv_size logical positions
    static uint32_t n_cells(uint32_t kv_size);

    // allocate a new cache's layers on a device, in panes if it is a paned full-attention cache; nullptr: out of memory
    static ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, llama_swa_type swa_type);

    // allocate recurrent states on a device; nullptr: out of memory. no_alloc: an empty buffer, as llama.cpp has for caches
    static ggml_backend_buffer_t alloc_states(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool no_alloc);
    static size_t                states_size(ggml_context * ctx, ggml_backend_buffer_t buf, bool no_alloc);

    // turn newly created memory into a pool or a paned cache; throws if that is not supported
    static void attach(llama_memory_i * mem, llama_cparams & cparams);

    // throw if the memory is a pool: restoring a whole context would re-pack the cells
    static void reject_restore(llama_memory_i * mem);

    //
    // placement
    //

    // choose a ubatch's cells: resident chunks have blocks, new ones get the first free blocks. empty: too few are free
    static llama_kv_cache::slot_info find_slot(const llama_kv_cache & kv, const llama_ubatch & ubatch);

    static int32_t  block_of(const llama_kv_cache & kv, llama_seq_id seq, int32_t chunk); // -1: not resident
    static uint32_t n_block(const llama_kv_cache & kv);
    static uint32_t n_chunk(const llama_kv_cache & kv) { return kv.pool_chunk; }
    static bool     is_free(const llama_kv_cache & kv, uint32_t block);

    // the full-attention cache of a memory; nullptr: it has no supported one
    static llama_kv_cache * get_kv(llama_memory_i * mem);
    static const char *     class_name(llama_memory_i * mem);

    // whether the sliding-window cache holds the whole window of position pos; true if there is no such cache
    static bool         has_window(llama_memory_i * mem, llama_seq_id seq, llama_pos pos);
    static kvf_kv_bytes kv_bytes(llama_memory_i * mem);

    // the graph of the last ubatch and its outputs; nullptr: nothing was decoded
    static const llm_graph_result * graph(const llama_context * ctx);
    static void                     exchange_features(llama_context & a, llama_context & b);
    // set the scheduler's callback for each node; nullptr: none
    static void set_callback(llama_context & ctx, ggml_backend_sched_eval_callback callback, void * data);

    // whether there is state outside the full-attention cache
    static bool has_partial(llama_memory_i * mem);

    // the sliding-window cache; nullptr: none, or there is also other state outside the full-attention cache
    static llama_kv_cache * get_window(llama_memory_i * mem);

    static size_t window_size(const llama_kv_cache & kv, llama_seq_id seq);
    static void   window_get(llama_context * ctx, const llama_kv_cache & kv, llama_seq_id seq, void * dst, size_t size);
    static void   window_set(llama_context * ctx, llama_kv_cache & kv, llama_seq_id seq, const void * src, size_t size);
    // copy the window from the cache of another context, without a detour through the host
    static void window_copy(
            llama_context * from, const llama_kv_cache & src, llama_context * to, llama_kv_cache & dst, llama_seq_id seq);

    static bool is_pool(const llama_kv_cache & kv) { return kv.pool_chunk > 0; }

    //
    // panes
    //

    static kvf_panes * panes(const llama_kv_cache & kv) { return kv.pool_panes.get(); }

    // set the cells of a paned cache to positions [0, pos) of a sequence, and nothing else
    static void place_before(
            llama_kv_cache & kv, const llama_kv_cache & of, llama_seq_id seq, uint32_t pos, void * const * records);
    // forget all cells of a paned cache at once, if they are this sequence's. one by one, 64K of them take 9 ms
    static void drop_before(llama_kv_cache & kv, llama_seq_id seq);
    // fill the causal mask of a paned cache; false: llama.cpp must fill it
    static bool set_mask(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch, bool causal);
    // extend the finished mask of a ubatch: its tokens also see the guests of their sequences (guests/fresh.h)
    static void        show_guests(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch);
    static kvf_fresh * fresh(const llama_kv_cache & kv) { return kv.pool_fresh.get(); }
    // pairs of a position of a sequence and its cell, sorted by position
    static const auto & cells(const llama_kv_cache & kv, llama_seq_id seq) { return kv.v_cells[0].seq_pos_get(seq); }

    // write the headers of the records of positions [pos, pos + n)
    static void write_heads(
            const llama_kv_cache & kv, const llama_kv_cache & of, uint32_t pos, uint32_t n, void * const * records);

    //
    // records
    //

    static uint32_t  meta_bytes(const llama_kv_cache & kv);
    static kvf_layer layer(const llama_kv_cache & kv, uint32_t i);
    static uint32_t  n_layer(const llama_kv_cache & kv) { return kv.layers.size(); }
    // the cache layer that a layer of the model reads (models may share cache layers); -1: none
    static int32_t read_by(const llama_kv_cache & kv, int32_t il) {
        const auto it = kv.map_layer_ids.find(il);
        return it == kv.map_layer_ids.end() ? -1 : it->second;
    }
    // the layers whose queries are kept, as cache layers
    static std::vector<uint32_t> tapped(const llama_kv_cache & kv);
    static kvf_pool_info         info(const llama_kv_cache & kv);
    static kvf_record            head(const llama_kv_cache & kv, int32_t chunk, uint64_t mask);
    static kvf_mover &           mover(const llama_kv_cache & kv) { return *kv.pool_mover; }

    static void blocks(const llama_kv_cache & kv, int32_t * chunks, int32_t * n_used, llama_seq_id * seqs);

    // the device of a buffer type, an index for ggml_backend_dev_get(); -1: none
    static int32_t device_index(ggml_backend_buffer_type_t buft);

    static uint64_t read(llama_context * ctx, const llama_kv_cache & kv, llama_seq_id seq, int32_t chunk, void * dst);
    static void     drop(llama_kv_cache & kv, llama_seq_id seq, int32_t chunk);
    static int32_t  page_in(
             llama_context * ctx, llama_kv_cache & kv, llama_seq_id seq, int32_t chunk, const void * src, int32_t block);
    static void scribble(llama_context * ctx, const llama_kv_cache & kv, uint8_t byte);

    // zero all unused cells: a NaN in a masked cell would make the attention of all others NaN, too
    static void scrub(llama_context * ctx);

    // restore the width of the attention graph, when chunks come back to their former blocks. it never shrinks
    static void set_n_kv(const llama_kv_cache & kv, uint32_t n_kv);

    static kvf_layer_tensors tensors(const llama_kv_cache & kv, uint32_t i);

    static bool v_trans(const llama_kv_cache & kv) { return kv.v_trans; }
    // the block size of the rotation of keys, as in build_input_k_rot(); 0: keys are not rotated
    static uint32_t n_rot_k(const llama_kv_cache & kv);
    // the cap of the attention's logits; 0: none
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

// decode a batch of one sequence as kvf_decode() does, without its checks
void kvf_compute(llama_context * ctx, llama_seq_id seq, llama_pos pos, const llama_token * tokens, int32_t n, int outputs);

// whether kvf_interrupt() asks for a stop
bool kvf_stopped();

// convert n K rows of a layer, in the format of a record, to floats [n][n_embd_k]
void kvf_rows_to_float(const kvf_layer & layer, uint32_t n, const void * rows, float * dst);
// the same for n V rows [n][n_embd_v]. v_trans: the source is transposed
void kvf_values_to_float(const kvf_layer & layer, uint32_t n, bool v_trans, const void * rows, float * dst);
// convert the keys of one head in n cells of a cache, [n][n_embd_head_k]. rows: the K rows of all cells
void kvf_heads_to_float(
        const kvf_layer & layer, uint32_t head, const void * rows, const int32_t * cells, uint32_t n, float * dst);
