// panes: device memory for a few layers of a full-attention cache at a time, see pool/impl.h

#include "pool/impl.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

// patches/0008-sched.patch adds this to the scheduler
GGML_API void kvflash_sched_no_wait(ggml_backend_sched_t sched, bool no_wait);

// the largest stride of a 2D copy in CUDA
static constexpr ptrdiff_t MAX_STRIDE = INT32_MAX;

// bytes of a copy if paced: the inputs of another thread's token then wait for one such copy, not for all rows of a layer
static constexpr size_t PIECE = 2 << 20;

bool kvf_computes(const ggml_tensor * t) {
    return t->op != GGML_OP_NONE && t->op != GGML_OP_VIEW && t->op != GGML_OP_RESHAPE && t->op != GGML_OP_PERMUTE &&
           t->op != GGML_OP_TRANSPOSE;
}

const ggml_tensor * kvf_root(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }

// whether a tensor of a cache holds V rows, by its name: llama.cpp calls the tensors cache_k_l0, cache_v_l0, ...
static bool is_v(const ggml_tensor * t) { return strstr(t->name, "v_l") != nullptr; }

//
// memory
//

ggml_backend_buffer_t kvf_panes::alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    std::vector<ggml_tensor *> ks, vs;
    for (auto * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (!t->view_src) { (is_v(t) ? vs : ks).push_back(t); }
    }

    const size_t align   = ggml_backend_buft_get_alignment(buft);
    const auto   largest = [&](const std::vector<ggml_tensor *> & tensors) {
        size_t res = 0;
        for (const auto * t : tensors) {
            res = std::max(res, ggml_backend_buft_get_alloc_size(buft, t));
        }
        return GGML_PAD(res, align);
    };

    // K and V have separate places in a pane. so unused rows hold whole blocks of the same type from another layer, without
    // NaN
    const size_t size_k = largest(ks), size = size_k + largest(vs);
    const size_t n_pane = std::min<size_t>(params.n_pane, ks.size());

    // all layers without a pane of their own share the last two: one is in use while the other is filled. if layers took
    // turns in all panes, each would be overwritten before its next use
    const size_t n_turn = n_pane == ks.size() ? 0 : std::min<size_t>(n_pane, 2), n_own = n_pane - n_turn;
    const auto   pane_of = [&](size_t i) { return i < n_own ? i : n_own + (i - n_own) % n_turn; };

    const size_t least = ggml_backend_buft_is_host(buft) ? 0 : params.least_bytes; // on the CPU, codes do not share panes
    auto *       buf   = ggml_backend_buft_alloc_buffer(buft, std::max(n_pane * size, least));
    if (!buf) { return nullptr; }

    parts.emplace_back();
    parts.back().buf = buf;
    parts.back().panes.resize(n_pane);

    auto * base = (char *) ggml_backend_buffer_get_base(buf);
    for (size_t i = 0; i < ks.size(); ++i) {
        char * at = base + pane_of(i) * size;
        ggml_backend_tensor_alloc(buf, ks[i], at);
        if (i < vs.size()) { ggml_backend_tensor_alloc(buf, vs[i], at + size_k); }
        places[ks[i]] = {parts.size() - 1, pane_of(i)};
    }
    for (auto * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (t->view_src) { ggml_backend_view_init(t); }
    }

    return buf;
}

kvf_panes::~kvf_panes() {
    for (auto & p : parts) {
        if (p.stream) { ggml_backend_synchronize(p.stream.get()); }
    }
}

uint32_t kvf_panes::n_stream() const {
    return std::count_if(parts.begin(), parts.end(), [](const part & p) { return p.stream != nullptr; });
}

kvf_pane_info kvf_panes::info() const {
    kvf_pane_info res = {};
    res.n_bytes       = n_bytes;
    res.n_layer       = order.size();
    res.n_stream      = n_stream();
    for (const auto & p : parts) {
        res.bytes += ggml_backend_buffer_get_size(p.buf);
        res.n_pane = std::max<uint32_t>(res.n_pane, p.panes.size());
    }
    return res;
}

// look up each layer's pane, and its offsets in a record of the pool
void kvf_panes::place_layers(const llama_kv_cache & kv, const llama_kv_cache & of) {
    const char * differs = "the pool is another model's, or has other cache types";
    kvf_check(llama_kvflash::n_layer(kv) == llama_kvflash::n_layer(of) &&
                      llama_kvflash::v_trans(kv) == llama_kvflash::v_trans(of),
            differs);

    streams = false;
    layers.clear();
    layer_of.clear();
    for (uint32_t i = 0; i < llama_kvflash::n_layer(kv); ++i) {
        const auto in_record = llama_kvflash::layer(of, i);
        const auto l         = llama_kvflash::tensors(kv, i);
        kvf_check(in_record.il == l.il && in_record.type_k == (int32_t) l.k->type &&
                          in_record.n_embd_k == (uint32_t) l.k->ne[0] &&
                          in_record.type_v == (l.v ? (int32_t) l.v->type : -1) &&
                          in_record.n_embd_v == (l.v ? (uint32_t) l.v->ne[0] : 0),
                differs);

        const auto & at = places.at(l.k); // part and pane
        streams         = streams || std::any_of(layers.begin(), layers.end(),
                                             [&](const layer & o) { return o.part == at.first && o.pane == at.second; });
        layers.push_back({at.first, at.second, l.k, l.v, in_record.offs_k, in_record.offs_v});
        layer_of[l.k] = i;
        if (l.v) { layer_of[l.v] = i; }
    }
}

// create the streams, at the first batch
void kvf_panes::bind(llama_context * ctx) {
    if (bound) { return; }
    bound = true;

    auto * sched = ctx->get_sched();
    for (auto & p : parts) {
        auto * dev = kvf_mover::device_of(p.buf);
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            auto * backend = ggml_backend_sched_get_backend(sched, i);
            if (ggml_backend_get_device(backend) == dev) { p.compute = backend; }
        }
        if (!p.compute || !kvf_mover::is_async(dev)) { continue; }

        p.stream.reset(ggml_backend_dev_init(dev, nullptr));
        bool       whole = p.stream != nullptr;
        const auto make  = [&](ggml_backend_event_ptr & event) {
            event.reset(ggml_backend_event_new(dev));
            whole = whole && event;
        };
        make(p.computed);
        for (auto & event : p.stored) {
            make(event);
        }
        for (auto & pane : p.panes) {
            make(pane.loaded);
        }
        if (!whole) { p.stream.reset(); }
    }
}

//
// copies
//

// copy n pieces of a tensor, each of `size` bytes, `stride` bytes apart in the tensor and `stride_host` in host memory
void kvf_panes::copy(part & p, ggml_tensor * t, char * host, size_t at, size_t size, size_t n, size_t stride,
        size_t stride_host, bool in) {
    if (p.stream && in) {
        ggml_backend_tensor_set_2d_async(p.stream.get(), t, host, at, size, n, stride, stride_host);
    } else if (p.stream) {
        ggml_backend_tensor_get_2d_async(p.stream.get(), t, host, at, size, n, stride, stride_host);
    } else if (in) {
        ggml_backend_tensor_set_2d(t, host, at, size, n, stride, stride_host);
    } else {
        ggml_backend_tensor_get_2d(t, host, at, size, n, stride, stride_host);
    }
    n_bytes += n * size;
}

// find the records that one copy may span. no device can copy across separately pinned memory
void kvf_panes::place_records() {
    const uint32_t n_record = (pos + n + n_chunk - 1) / n_chunk;
    const bool     pinned   = std::any_of(
            parts.begin(), parts.end(), [](const part & p) { return kvf_mover::has_pinned(kvf_mover::device_of(p.buf)); });

    strides.assign(n_record, 0);
    for (uint32_t i = 0; i + 1 < n_record; ++i) {
        const ptrdiff_t next = (const char *) records[i + 1] - (const char *) records[i];
        if (next > 0 && next <= MAX_STRIDE && (!pinned || kvf_host::is_one(records[i], records[i + 1]))) {
            strides[i] = next;
        }
    }
}

// copy the rows of positions [from, to) between the records and the layer's pane. chunks at a constant stride in host memory
// are one copy
void kvf_panes::copy(const layer & l, uint32_t from, uint32_t to, bool in) {
    auto &       p     = parts[l.part];
    const size_t row_k = ggml_row_size(l.k->type, l.k->ne[0]);
    const size_t row_v = l.v ? ggml_row_size(l.v->type, l.v->ne[0]) : 0;

    while (from < to) {
        const uint32_t chunk = from / n_chunk, first = from % n_chunk;
        const uint32_t m    = std::min(n_chunk - first, to - from); // positions of each chunk
        char *         host = (char *) records[chunk];

        uint32_t        n      = 1;
        const ptrdiff_t stride = strides[chunk];
        const uint32_t  n_most = paced ? std::max<size_t>(1, PIECE / (n_chunk * row_k)) : UINT32_MAX;
        while (m == n_chunk && from + (n + 1) * n_chunk <= to && stride && strides[chunk + n - 1] == stride && n < n_most) {
            n++;
        }

        copy(p, l.k, host + l.offs_k + first * row_k, from * row_k, m * row_k, n, n_chunk * row_k, stride, in);
        if (l.v && !v_trans) {
            copy(p, l.v, host + l.offs_v + first * row_v, from * row_v, m * row_v, n, n_chunk * row_v, stride, in);
        }
        for (uint32_t i = 0; l.v && v_trans && i < n; ++i) {
            const size_t el = ggml_type_size(l.v->type);
            copy(p, l.v, host + i * stride + l.offs_v + first * el, (from + i * n_chunk) * el, m * el, l.v->ne[0],
                    l.v->ne[1] * el, n_chunk * el, in);
        }
        from += n * m;
    }
}

// begin to copy the missing rows before this batch into a layer's pane
void kvf_panes::load(int32_t layer) {
    const auto & l    = layers[layer];
    auto &       p    = parts[l.part];
    auto &       pane = p.panes[l.pane];

    const uint32_t from = pane.holds == layer ? std::min(pane.n, pos) : 0;
    pane.holds          = layer;
    pane.n              = from; // in case this is interrupted
    copy(l, from, pos, true);
    pane.n = pos;
    if (p.stream) { ggml_backend_event_record(pane.loaded.get(), p.stream.get()); }
}

// make later copies wait for all nodes launched so far
void kvf_panes::follow(part & p) {
    if (p.stream) {
        ggml_backend_event_record(p.computed.get(), p.compute);
        ggml_backend_event_wait(p.stream.get(), p.computed.get());
    } else if (p.compute) {
        ggml_backend_synchronize(p.compute);
    }
}

// make the computation wait for the layer's rows
void kvf_panes::ready(int32_t layer) {
    auto & p = parts[layers[layer].part];
    if (p.stream) { ggml_backend_event_wait(p.compute, p.panes[layers[layer].pane].loaded.get()); }
}

//
// a batch
//

void kvf_panes::begin(llama_context * ctx, const llama_kv_cache & kv, const llama_kv_cache & of, uint32_t pos, uint32_t n,
        void * const * records) {
    bind(ctx);
    place_layers(kv, of);

    this->ctx     = ctx;
    this->pos     = pos;
    this->n       = n;
    this->records = records;
    n_chunk       = llama_kvflash::n_chunk(of);
    v_trans       = llama_kvflash::v_trans(kv);
    place_records();
    n_done = 0;
    failed = nullptr;
    if (ahead.empty()) { whole = pos; } // its last value may be for another text
    order.clear();
    running = true;
    llama_kvflash::set_callback(*ctx, streams ? on_node : nullptr, this);
    kvflash_sched_no_wait(ctx->get_sched(), streams);
    if (!streams) { fill(); }
}

// the layer that a node reads or writes; -1: none
int32_t kvf_panes::touched(const ggml_tensor * t) const {
    for (int i = 0; i < GGML_MAX_SRC && t->src[i] && kvf_computes(t); ++i) {
        const auto found = layer_of.find(kvf_root(t->src[i]));
        if (found != layer_of.end()) { return found->second; }
    }
    return -1;
}

// find the order in which the graph uses the layers. names of nodes would not do, because they differ from model to model
void kvf_panes::find_turns() {
    auto * graph = llama_kvflash::graph(ctx)->get_gf();

    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const auto *  t     = ggml_graph_node(graph, i);
        const int32_t layer = touched(t);
        if (layer < 0) { continue; }

        if (order.empty() || order.back().layer != layer) { order.push_back({layer, nullptr, false, false}); }
        auto &     turn   = order.back();
        const bool writes = layer_of.count(kvf_root(t)) > 0;
        turn.last         = t;
        turn.writes |= writes;
        turn.reads |= !writes;
    }
}

// before the first node, load the first layer of each pane
void kvf_panes::start() {
    find_turns();
    for (const auto & turn : order) {
        if (!turn.reads) {
            throw kvf_failure(KVF_E_UNSUPPORTED,
                    "the attention of this model is computed on another device than its KV is on; "
                    "read prompts through the pool");
        }
    }

    std::vector<std::pair<size_t, size_t>> filled;
    for (const auto & turn : order) {
        const auto & l = layers[turn.layer];
        if (std::find(filled.begin(), filled.end(), std::make_pair(l.part, l.pane)) == filled.end()) {
            filled.emplace_back(l.part, l.pane);
            load(turn.layer);
        }
    }
    if (!order.empty()) { ready(order.front().layer); }
}

// if each layer has its own pane, load all missing rows before the computation, which then runs without callbacks
void kvf_panes::fill() {
    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & pane = parts[layers[i].part].panes[layers[i].pane];
        if (pane.holds == (int32_t) i && pane.n >= pos) { continue; }
        load(i);
        ready(i);
    }
}

// copy a layer's new rows to the records
void kvf_panes::store(const turn & turn) {
    const auto & l = layers[turn.layer];
    auto &       p = parts[l.part];
    if (!turn.writes) { return; }

    copy(l, pos, pos + n, false);
    p.panes[l.pane].n = pos + n;
}

// call when the last node of a turn was launched. this queues, after the turn, the copies of its rows to the records and of
// the pane's next layer. the next turn will wait for its layer. the host does not wait (unless paced), so several devices
// compute at once
void kvf_panes::taken() {
    const auto & turn = order[n_done++];
    const auto & l    = layers[turn.layer];
    auto &       p    = parts[l.part];
    if (paced && p.stream) { ggml_backend_event_synchronize(p.panes[l.pane].loaded.get()); }
    follow(p);
    store(turn);

    for (size_t i = n_done; i < order.size(); ++i) {
        const auto & next = layers[order[i].layer];
        if (next.part == l.part && next.pane == l.pane) {
            if (order[i].layer != turn.layer) { load(order[i].layer); }
            break;
        }
    }
    if (n_done < order.size()) { ready(order[n_done].layer); }
}

// throw unless the layer of the next node is in its pane
void kvf_panes::check(const ggml_tensor * t) const {
    const int32_t layer = touched(t);
    if (layer < 0) { return; }

    const auto & pane = parts[layers[layer].part].panes[layers[layer].pane];
    if (n_done == order.size() || order[n_done].layer != layer || pane.holds != layer || pane.n < pos) {
        throw kvf_failure(KVF_E_BACKEND, format("%s is computed out of turn", t->name));
    }
}

bool kvf_panes::on_node(ggml_tensor * t, bool ask, void * data) {
    auto & self = *(kvf_panes *) data;
    if (!self.running) { return !ask; }
    if (self.failed) { return ask; } // the computation ends after this node

    try {
        if (kvf_stopped()) { throw kvf_failure(KVF_E_ABORTED, "interrupted"); }
        if (self.order.empty()) { self.start(); }
        const bool last = self.n_done < self.order.size() && t == self.order[self.n_done].last;
        if (ask) {
            self.check(t);
            return last;
        }
        if (last) { self.taken(); }
        return true;
    } catch (...) {
        self.failed = std::current_exception();
        return ask;
    }
}

void kvf_panes::finish() {
    running = false;
    if (failed) { std::rethrow_exception(failed); }
    if (!streams) {
        find_turns();
        for (auto & p : parts) {
            follow(p);
        }
        for (; n_done < order.size(); ++n_done) {
            store(order[n_done]);
        }
    }
    if (n_done != order.size()) { throw kvf_failure(KVF_E_BACKEND, "some layers were not computed"); }

    // a layer that the graph leaves out, such as a head for further tokens, has no rows. its part of a record is zeros, as
    // in a pool
    for (uint32_t i = 0; i < layers.size(); ++i) {
        if (std::any_of(order.begin(), order.end(), [&](const turn & t) { return t.layer == (int32_t) i; })) { continue; }

        const auto & l = layers[i];
        for (uint32_t c = (pos + n_chunk - 1) / n_chunk; c * n_chunk < pos + n; ++c) {
            memset((char *) records[c] + l.offs_k, 0, ggml_row_size(l.k->type, l.k->ne[0]) * n_chunk);
            if (l.v) { memset((char *) records[c] + l.offs_v, 0, ggml_row_size(l.v->type, l.v->ne[0]) * n_chunk); }
        }
    }

    for (auto & p : parts) {
        if (p.stream) { ggml_backend_event_record(p.stored[n_batch % MAX_AHEAD].get(), p.stream.get()); }
    }
    n_batch++;
    ahead.push_back(pos + n);
    records = nullptr;
    wait(MAX_AHEAD - 1);
}

uint32_t kvf_panes::wait(uint32_t n) {
    while (ahead.size() > n) {
        for (auto & p : parts) {
            if (p.stream) { ggml_backend_event_synchronize(p.stored[(n_batch - ahead.size()) % MAX_AHEAD].get()); }
        }
        whole = ahead.front();
        ahead.pop_front();
    }
    return whole;
}

// wait for all computation and copies
void kvf_panes::settle() {
    for (auto & p : parts) {
        if (p.compute) { ggml_backend_synchronize(p.compute); }
        if (p.stream) { ggml_backend_synchronize(p.stream.get()); }
    }
}

void kvf_panes::abandon() {
    running = false;
    failed  = nullptr;
    records = nullptr;
    settle();
    ahead.clear();
    whole = pos;
    forget(pos);
}

char * kvf_panes::memory(ggml_backend_dev_t dev, size_t & size) const {
    for (const auto & p : parts) {
        const bool is_cpu = ggml_backend_buffer_is_host(p.buf) && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
        if (!is_cpu && kvf_mover::device_of(p.buf) != dev) { continue; }
        size = ggml_backend_buffer_get_size(p.buf);
        return (char *) ggml_backend_buffer_get_base(p.buf);
    }
    return nullptr;
}

void kvf_panes::vacate() {
    settle();
    forget(0);
}

void kvf_panes::clear(const char * memory) {
    for (auto & p : parts) {
        if (ggml_backend_buffer_get_base(p.buf) == memory) { ggml_backend_buffer_clear(p.buf, 0); }
    }
}

void kvf_panes::forget(uint32_t pos) {
    for (auto & p : parts) {
        for (auto & pane : p.panes) {
            pane.n = std::min(pane.n, pos);
        }
    }
}
