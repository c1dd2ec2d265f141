// copies between the pool and host memory, see pool/impl.h

#include "pool/impl.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <set>
#include <string>

// the largest stride of a 2D copy in CUDA
static constexpr size_t MAX_STRIDE = INT32_MAX;

// ggml assigns plain host memory to no device
ggml_backend_dev_t kvf_mover::device_of(ggml_backend_buffer_t buf) {
    auto * dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buf));
    return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// a separate stream for copies pays off only if each backend instance has a queue of its own, as in ggml-cuda. in Vulkan,
// copies share the queue of the computation. Metal keeps a copy of all the data until it is synchronized
bool kvf_mover::is_async(ggml_backend_dev_t dev) {
    static const std::set<std::string> streaming = {"CUDA", "ROCm", "MUSA"};
    if (!dev || !streaming.count(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)))) { return false; }

    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    return props.caps.async && props.caps.events;
}

bool kvf_mover::has_pinned(ggml_backend_dev_t dev) { return ggml_backend_dev_host_buffer_type(dev); }

//
// parts and runs
//

kvf_mover::kvf_mover(const std::vector<piece> & pieces, size_t record_bytes) : record_bytes(record_bytes) {
    const size_t n_window = 1 + pieces.size();
    windows.reset(ggml_init({n_window * ggml_tensor_overhead(), nullptr, true}));
    if (!windows) { throw std::bad_alloc(); }

    for (const auto & piece : pieces) {
        auto p = std::find_if(parts.begin(), parts.end(), [&](const part & p) { return p.buf == piece.buf; });

        if (p == parts.end()) {
            parts.emplace_back();
            p      = std::prev(parts.end());
            p->buf = piece.buf;

            const size_t size = ggml_backend_buffer_get_size(piece.buf);
            const size_t row  = size >> 31 ? 256 : std::max<size_t>(size, 1); // RPC sends dimensions as 32 bits
            p->window         = ggml_new_tensor_2d(windows.get(), GGML_TYPE_I8, row, size / row);
            if (size > 0) { ggml_backend_tensor_alloc(piece.buf, p->window, ggml_backend_buffer_get_base(piece.buf)); }

            if (auto * dev = device_of(piece.buf); is_async(dev)) {
                p->stream.reset(ggml_backend_dev_init(dev, nullptr));
                p->ready.reset(ggml_backend_event_new(dev));
                if (!p->stream || !p->ready) { p->stream.reset(); }
            }
        }

        // extend a run of equal copies if the stride matches
        auto & runs = p->runs;
        auto   r    = std::find_if(runs.rbegin(), runs.rend(), [&](const run & r) { return r.size == piece.size; });
        bool   fits = r != runs.rend();
        if (fits) {
            const size_t dev = piece.dev - r->dev - (r->n - 1) * r->stride_dev;
            const size_t rec = piece.rec - r->rec - (r->n - 1) * r->stride_rec;

            fits = piece.dev > r->dev && dev <= MAX_STRIDE && dev >= r->size &&
                   (r->n == 1 || (dev == r->stride_dev && rec == r->stride_rec));
            if (fits) {
                r->stride_dev = dev;
                r->stride_rec = rec;
                r->n++;
            }
        }
        if (!fits) { runs.push_back({piece.dev, piece.rec, piece.size, 1, 0, 0}); }
    }
}

kvf_mover::~kvf_mover() {
    for (auto & p : parts) {
        if (p.stream) { ggml_backend_synchronize(p.stream.get()); }
    }
}

size_t kvf_mover::n_run() const {
    size_t res = 0;
    for (const auto & p : parts) {
        res += p.runs.size();
    }
    return res;
}

ggml_backend_dev_t kvf_mover::pinned_for() const {
    for (const auto & p : parts) {
        if (has_pinned(device_of(p.buf))) { return device_of(p.buf); }
    }
    return nullptr;
}

//
// copies
//

void kvf_mover::bind(llama_context * ctx) {
    auto * sched = ctx->get_sched();

    for (auto & p : parts) {
        if (!p.stream || p.compute) { continue; }

        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            auto * backend = ggml_backend_sched_get_backend(sched, i);
            if (ggml_backend_get_device(backend) == device_of(p.buf)) { p.compute = backend; }
        }
        if (!p.compute) { p.stream.reset(); }
    }
}

// make the part's next copies wait for all batches so far
void kvf_mover::start(part & p) {
    if (p.behind >= n_batch) { return; }

    ggml_backend_event_record(p.ready.get(), p.compute);
    ggml_backend_event_wait(p.stream.get(), p.ready.get());
    p.behind = n_batch;
}

kvf_mover::transfer & kvf_mover::begin(llama_context * ctx, int32_t block) {
    bind(ctx);
    flying.push_back({++n_begun, block, false, {}});
    flying.back().done.resize(parts.size());
    return flying.back();
}

// record the end of a transfer on each of its streams
void kvf_mover::finish(transfer & t) {
    for (size_t i = 0; i < parts.size(); ++i) {
        auto & p = parts[i];
        if (!p.stream) { continue; }

        if (p.spare.empty()) {
            p.spare.emplace_back(ggml_backend_event_new(device_of(p.buf)));
            if (!p.spare.back()) { throw std::bad_alloc(); }
        }
        t.done[i] = std::move(p.spare.back());
        p.spare.pop_back();
        ggml_backend_event_record(t.done[i].get(), p.stream.get());
    }
}

uint64_t kvf_mover::copy(llama_context * ctx, int32_t block, void * dst, const void * src) {
    auto & t = begin(ctx, block);

    const auto each = [&](part & p) {
        for (const auto & r : p.runs) {
            const size_t at = r.dev + block * r.size;
            if (p.stream && dst) {
                ggml_backend_tensor_get_2d_async(
                        p.stream.get(), p.window, (char *) dst + r.rec, at, r.size, r.n, r.stride_dev, r.stride_rec);
            } else if (p.stream) {
                ggml_backend_tensor_set_2d_async(
                        p.stream.get(), p.window, (const char *) src + r.rec, at, r.size, r.n, r.stride_dev, r.stride_rec);
            } else if (dst) {
                ggml_backend_tensor_get_2d(p.window, (char *) dst + r.rec, at, r.size, r.n, r.stride_dev, r.stride_rec);
            } else {
                ggml_backend_tensor_set_2d(
                        p.window, (const char *) src + r.rec, at, r.size, r.n, r.stride_dev, r.stride_rec);
            }
        }
    };

    for (auto & p : parts) {
        if (p.stream) {
            start(p);
            each(p);
        }
    }
    finish(t);

    // synchronous copies are not ordered against the computation
    bool synced = false;
    for (auto & p : parts) {
        if (!p.stream) {
            if (!synced) { ctx->synchronize(); }
            synced = true;
            each(p);
        }
    }
    if (src) { order(t); }

    return t.ticket;
}

uint64_t kvf_mover::fetch(llama_context * ctx, const std::vector<rows> & tensors, void * dst) {
    auto & t = begin(ctx, -1);

    for (auto & p : parts) {
        if (p.stream) { start(p); }
    }

    std::vector<std::pair<rows, char *>> rest;

    auto * to = (char *) dst;
    for (const auto & r : tensors) {
        const auto buft = ggml_backend_buffer_get_type(r.tensor->buffer);
        const auto p    = std::find_if(parts.begin(), parts.end(),
                   [&](const part & p) { return p.stream && ggml_backend_buffer_get_type(p.buf) == buft; });
        if (p != parts.end()) {
            ggml_backend_tensor_get_async(p->stream.get(), r.tensor, to, r.at, r.size);
        } else {
            rest.emplace_back(r, to);
        }
        to += r.size;
    }
    finish(t);

    if (!rest.empty()) { ctx->synchronize(); }
    for (const auto & [r, at] : rest) {
        ggml_backend_tensor_get(r.tensor, at, r.at, r.size);
    }

    return t.ticket;
}

//
// order
//

void kvf_mover::order(transfer & t) {
    for (size_t i = 0; i < parts.size() && !t.ordered; ++i) {
        if (t.done[i]) { ggml_backend_event_wait(parts[i].compute, t.done[i].get()); }
    }
    t.ordered = true;
}

void kvf_mover::order(llama_context * ctx, const std::function<bool(int32_t block)> & is_free) {
    bind(ctx);
    for (auto & t : flying) {
        if (!t.ordered && (t.block < 0 || is_free(t.block))) { order(t); }
    }
    n_batch++;
}

void kvf_mover::wait(uint64_t ticket) {
    std::exception_ptr lost; // an RPC server is gone: still wait for the copies of the others
    while (!flying.empty() && flying.front().ticket <= ticket) {
        auto & t = flying.front();
        for (size_t i = 0; i < parts.size(); ++i) {
            if (!t.done[i]) { continue; }
            try {
                ggml_backend_event_synchronize(t.done[i].get());
            } catch (...) { lost = std::current_exception(); }
            parts[i].spare.push_back(std::move(t.done[i]));
        }
        flying.pop_front();
    }
    if (lost) { std::rethrow_exception(lost); }
}

double kvf_mover::time_copies(size_t size, uint32_t n, bool to_device) const {
    auto * dev = pinned_for();
    if (!dev) { dev = device_of(parts.front().buf); }

    auto * host_type = ggml_backend_dev_host_buffer_type(dev);

    const ggml_backend_ptr        stream(ggml_backend_dev_init(dev, nullptr));
    const ggml_backend_buffer_ptr there(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), size));
    const ggml_backend_buffer_ptr here(
            ggml_backend_buft_alloc_buffer(host_type ? host_type : ggml_backend_cpu_buffer_type(), size));
    const ggml_context_ptr window(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    if (!stream || !there || !here || !window) { throw std::bad_alloc(); }

    auto * t    = ggml_new_tensor_1d(window.get(), GGML_TYPE_I8, size);
    auto * data = ggml_backend_buffer_get_base(here.get());
    ggml_backend_tensor_alloc(there.get(), t, ggml_backend_buffer_get_base(there.get()));
    memset(data, 1, size);

    const bool async = is_async(dev);
    const auto go    = [&] {
        if (!async && to_device) {
            ggml_backend_tensor_set(t, data, 0, size);
        } else if (!async) {
            ggml_backend_tensor_get(t, data, 0, size);
        } else if (to_device) {
            ggml_backend_tensor_set_async(stream.get(), t, data, 0, size);
        } else {
            ggml_backend_tensor_get_async(stream.get(), t, data, 0, size);
        }
    };

    go();
    ggml_backend_synchronize(stream.get());
    const int64_t begin = ggml_time_us();
    for (uint32_t i = 0; i < n; ++i) {
        go();
    }
    ggml_backend_synchronize(stream.get());
    return 1e-6 * (ggml_time_us() - begin);
}
