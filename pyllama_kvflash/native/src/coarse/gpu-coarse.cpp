// attention by codes on a GPU (coarse/attend.cu): the memory of the codes, and the nodes of the graph

#include "guests/gpu-chooser.h"

#include "ggml-impl.h"
#include "llama-graph.h"

//
// memory
//

static kvf_gpu_type type_of(const ggml_tensor * t, const kvf_codes & c) {
    return {t->type, c.d, (uint32_t) ggml_blck_size(t->type), (uint32_t) ggml_type_size(t->type)};
}

static kvf_gpu_coding coding_of(const kvf_codes & c) { return {c.n_head, c.d, c.width, c.n_bit, c.n_rot}; }

// place the codes of n positions, in whole tiles, after those that `all` already has. base: where its memory begins
static kvf_gpu_codes placed(kvf_gpu_places & all, const kvf_codes & c, uint32_t n, char * base) {
    const size_t n_unit = (size_t) GGML_PAD((n + kvf_codes::UNIT - 1) / kvf_codes::UNIT, kvf_codes::TILE) * c.n_head;

    kvf_gpu_codes res;
    res.codes   = (uint8_t *) base + all.take(n_unit * c.unit_bytes());
    res.scales  = (uint16_t *) (base + all.take(n_unit * kvf_codes::UNIT * sizeof(uint16_t)));
    res.means   = (float *) (base + all.take(c.n_segment(n) * c.mean_size()));
    res.factors = (float *) (base + all.take(c.spread_size()));
    return res;
}

uint64_t kvf_codes_bytes(const kvf_heads * heads, uint32_t n_bit_k, uint32_t n_bit_v, uint32_t n, bool on_gpu) {
    std::vector<kvf_codes> codes = {{heads->n_kv, heads->n_embd, n_bit_k}};
    if (heads->n_embd_v) { codes.emplace_back(heads->n_kv, heads->n_embd_v, n_bit_v); }
    kvf_gpu_places there;
    uint64_t       here = 0;
    for (const auto & c : codes) {
        here += c.size(n);
        placed(there, c, n, nullptr);
    }
    return on_gpu ? there.end : here;
}

// place the codes of all layers and sequences, each with a whole context, from `base` on. returns their size
size_t kvf_gpu_chooser::place_codes(char * base) {
    kvf_gpu_places all;
    for (uint32_t kind = 0; kind < 2; ++kind) {
        at[kind].assign(layers.size() * n_seq, {});
        for (uint32_t i = 0; i < layers.size(); ++i) {
            const auto & c = kind ? codes[0][i].values() : codes[0][i].keys();
            for (uint32_t seq = 0; seq < n_seq && mine(i); ++seq) {
                auto & to = codes_at(kind, i, seq);
                if (kind && codes[0][i].all.size() == 1) { // the keys also serve as values
                    to = codes_at(0, i, seq);
                    continue;
                }
                to = placed(all, c, fresh.its.n_ctx, base);
            }
        }
    }
    return all.end;
}

// choose the memory for all codes: the panes' if it is large enough, else memory of their own
void kvf_gpu_chooser::lay_out_codes() {
    at_end      = place_codes(nullptr);
    size_t room = 0;
    base        = fresh.panes ? fresh.panes->memory(device(), room) : nullptr;
    lodges      = base && room >= at_end && !fresh.panes->tenant;
    here        = !lodges; // there are no codes yet, and the panes may be in use
    if (!lodges) {
        coded = kvf_gpu_memory(buft, at_end);
        base  = coded.at();
    }
    place_codes(base);
    for (uint32_t kind = 0; kind < 2; ++kind) {
        gpu.upload(fixed.at(in.codes[kind]), at[kind].data(), at[kind].size() * sizeof(at[kind][0]));
    }
}

// call copy(offset, size) for each range of memory that has codes
template <typename F> void kvf_gpu_chooser::each_part(F && copy) {
    for (uint32_t i = 0; i < layers.size(); ++i) {
        for (uint32_t kind = 0; kind < codes[0][i].all.size() && mine(i); ++kind) {
            const auto & c = codes[0][i].all[kind];
            for (uint32_t seq = 0; seq < n_seq; ++seq) {
                const size_t n  = (size_t) GGML_PAD(fresh.sequences[seq].n_unit(), kvf_codes::TILE) * c.n_head;
                const auto & of = codes_at(kind, i, seq);
                if (n == 0) { continue; }
                copy((char *) of.codes - base, n * c.unit_bytes());
                copy((char *) of.scales - base, n * kvf_codes::UNIT * sizeof(uint16_t));
                copy((char *) of.means - base, (char *) of.factors + c.spread_size() - (char *) of.means); // and factors
            }
        }
    }
}

void kvf_gpu_chooser::leave() {
    if (!here) { return; }
    gpu.wait(base);
    const bool any = std::any_of(fresh.sequences.begin(), fresh.sequences.end(), [](const auto & s) { return s.n > 0; });
    if (any && !away && kvf_mover::has_pinned(device())) {
        auto pinned = std::make_shared<kvf_host>(device(), at_end);
        away        = {pinned, (char *) pinned->base};
    } else if (any && !away) {
        away = {new char[at_end], std::default_delete<char[]>()};
    }
    each_part([&](size_t offset, size_t size) { gpu.download(away.get() + offset, base + offset, size); });
    fresh.panes->clear(base);
    here = false;
}

// bring the codes back into the memory of the panes, because they are needed
void kvf_gpu_chooser::come_back() {
    if (here) { return; }
    fresh.panes->vacate();
    fresh.panes->clear(base); // unused positions must be 0
    each_part([&](size_t offset, size_t size) { gpu.upload(base + offset, away.get() + offset, size); });
    here = true;
}

// set up the encoders of each layer's keys and values
void kvf_gpu_chooser::lay_out_coders() {
    std::vector<kvf_gpu_coder> res(layers.size() * 2);
    for (uint32_t i = 0; i < layers.size(); ++i) {
        const auto & its = codes[0][i];
        for (uint32_t kind = 0; kind < its.all.size() && mine(i); ++kind) {
            const auto & c        = its.all[kind];
            const auto & info     = fresh.layers[i].info;
            const auto * t        = kind ? fresh.layers[i].v : fresh.layers[i].k;
            const bool   by_value = kind && fresh.v_trans;
            auto &       to       = res[i * 2 + kind];
            (kvf_gpu_type &) to   = type_of(t, c);
            to.coding             = coding_of(c);
            to.codes              = (const kvf_gpu_codes *) fixed.at(in.codes[kind]) + i * n_seq;
            to.by_value           = by_value;
            to.offs               = kind ? info.offs_v : info.offs_k;
            to.stride = by_value ? fresh.n_chunk * to.block_size : ggml_row_size(t->type, (size_t) c.n_head * c.d);
            to.n_half = c.n_half();
            to.step   = c.step();
            memory    = std::max(memory, gpu.coder_memory(to));
            n_head    = std::max(n_head, c.n_head);
        }
    }
    gpu.upload(fixed.at(in.coders), res.data(), res.size() * sizeof(res[0]));
}

kvf_gpu_coders kvf_gpu_chooser::coders(uint32_t layer, uint32_t n_layer) const {
    return {(const kvf_gpu_coder *) fixed.at(in.coders) + layer * 2, n_layer * 2, n_head, memory};
}

// the value of kvf_gpu_attend::rows[].room for rows of n_head heads
static uint32_t room_of(const kvf_gpu_type & rows, uint32_t n_head) {
    uint32_t res = 0;
    for (uint32_t head = 0; head < n_head; ++head) {
        uint32_t       n;
        const uint32_t begin = piece_of(rows, head, n);
        res                  = std::max<uint32_t>(res, GGML_PAD(begin + n, 16) - begin / 16 * 16);
    }
    return res % 32 ? res : res + (rows.block == 1 ? 32 : 16);
}

// set up the arguments of each layer's kernels, except for those that a graph sets
void kvf_gpu_chooser::lay_out_attends() {
    uint32_t first = layers.size(), last = 0;
    for (uint32_t i = 0; i < layers.size(); ++i) {
        if (!mine(i)) { continue; }
        first = std::min(first, i), last = i + 1;
        all.memory = std::max(all.memory, gpu.shared_size(layers[i]));
    }
    gpu.upload(fixed.at(in.layers), layers.data(), layers.size() * sizeof(layers[0]));
    all.layers  = (const kvf_gpu_layer *) fixed.at(in.layers) + first;
    all.n_layer = last - first;
    all.n_seq   = n_seq;
    attends.resize(fresh.n_layer_model());
    for (uint32_t il = 0; il < attends.size(); ++il) {
        auto &        a = attends[il];
        const int32_t i = read_by(il);
        if (i < 0) { continue; }
        events.emplace_back(gpu.events(fixed.at()), gpu.forget);
        a.events = events.back().get();
        a.p      = layers[i];
        a.share  = a.p.n_head / a.p.n_head_kv;
        a.parts  = (float *) fixed.at(in.attended);
        a.passes = fixed.at(in.passes);
        a.taken  = (uint32_t *) fixed.at(in.taken);
        for (uint32_t kind = 0; kind < 2; ++kind) {
            const auto * t                = kind && fresh.layers[i].v ? fresh.layers[i].v : fresh.layers[i].k;
            const auto & c                = kind ? codes[0][i].values() : codes[0][i].keys();
            a.coding[kind]                = coding_of(c);
            a.codes[kind]                 = (const kvf_gpu_codes *) fixed.at(in.codes[kind]) + i * n_seq;
            (kvf_gpu_type &) a.rows[kind] = type_of(t, c);
            a.rows[kind].room             = room_of(a.rows[kind], c.n_head);
        }
        a.n_warp = gpu.attend_warps(a, fixed.at());
        if (a.n_warp == 0) {
            throw kvf_failure(KVF_E_UNSUPPORTED,
                    "this GPU cannot attend to codes: it is older than Turing, or its blocks have too little memory");
        }
    }
}

//
// codes
//

void kvf_gpu_chooser::put(
        llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records, uint32_t n) {
    const std::lock_guard<std::mutex> lock(mutex);

    come_back();
    std::vector<const char *> at(n);
    std::transform(records, records + n, at.begin(), [&](const void * record) { return device_record(record); });
    gpu.upload(fixed.at(in.chunks), at.data(), n * sizeof(at[0]));
    const kvf_gpu_chunks from = {(const char * const *) fixed.at(in.chunks), fresh.n_chunk, n};
    begin_segments(seq, layer, n_layer, from, first);
    gpu.encode_rows(coders(layer, n_layer), from, seq, first * (fresh.n_chunk / kvf_codes::UNIT));
}

// compute the means of the segments that begin in these chunks, on the GPU. the host only computes the divisors of keys,
// when the first segment begins
void kvf_gpu_chooser::begin_segments(
        llama_seq_id seq, uint32_t layer, uint32_t n_layer, const kvf_gpu_chunks & from, uint32_t first) {
    const auto sampled = kvf_sampled(from.n_chunk, first, from.n);
    const auto its     = coders(layer, n_layer);
    auto *     sums    = (double *) fixed.at(in.sums);
    if (first == 0) { begin_first(seq, layer, n_layer, from, sampled); }
    for (const auto & some : sampled) {
        const uint32_t n = some.n(from.n_chunk);
        if (n > 0) { gpu.sum_rows(its, from, some, sums, in.n_sum); }
        gpu.make_means(its, seq, some.segment, sums, in.n_sum, n);
    }
}

// compute the divisors of keys on the host, from sums that the GPU makes, and upload the factors
void kvf_gpu_chooser::begin_first(llama_seq_id seq, uint32_t layer, uint32_t n_layer, const kvf_gpu_chunks & from,
        const std::vector<kvf_gpu_sampled> & sampled) {
    std::vector<std::vector<kvf_codes::moments>> segments(n_layer); // of each layer's keys
    std::vector<double>                          sums((size_t) n_layer * 2 * in.n_sum * 2);
    for (const auto & some : sampled) {
        const uint32_t n = some.n(from.n_chunk);
        if (n == 0) { continue; }
        gpu.sum_rows(coders(layer, n_layer), from, some, (double *) fixed.at(in.sums), in.n_sum);
        gpu.download(sums.data(), fixed.at(in.sums), sums.size() * sizeof(double));
        for (uint32_t i = 0; i < n_layer; ++i) {
            if (!mine(layer + i)) { continue; }
            auto & s = segments[i].emplace_back(codes[seq][layer + i].keys().moments_of(some.segment));
            s.n_sum  = n;
            for (size_t j = 0; j < s.sum.size(); ++j) {
                s.sum[j]    = sums[((size_t) i * 2 * in.n_sum + j) * 2];
                s.square[j] = sums[((size_t) i * 2 * in.n_sum + j) * 2 + 1];
            }
        }
    }
    for (uint32_t i = 0; i < n_layer; ++i) {
        if (segments[i].empty()) { continue; }
        codes[seq][layer + i].keys().spread_over(segments[i]);
        upload_factors(seq, layer + i);
    }
}

void kvf_gpu_chooser::upload_factors(llama_seq_id seq, uint32_t layer) {
    const auto & its = codes[seq][layer].all;
    for (uint32_t kind = 0; kind < its.size(); ++kind) {
        std::vector<float> factors(its[kind].spread_size() / sizeof(float));
        its[kind].get_factors(factors.data());
        gpu.upload((void *) codes_at(kind, layer, seq).factors, factors.data(), its[kind].spread_size());
    }
}

// call copy(device, host, size) for the codes, scales and means of the first n positions. threads may share the layers
template <typename F> void kvf_gpu_chooser::each_piece(llama_seq_id seq, uint32_t layer, uint32_t n, F && copy) {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        come_back();
    }
    auto & its = codes[seq][layer].all;
    for (uint32_t kind = 0; kind < its.size() && n > 0; ++kind) {
        const auto & c       = codes_at(kind, layer, seq);
        const auto   on_host = its[kind].memory(n);
        void * const there[] = {c.codes, c.scales, c.means};
        for (uint32_t i = 0; i < on_host.size(); ++i) {
            copy(there[i], on_host[i].first, on_host[i].second);
        }
    }
}

void kvf_gpu_chooser::get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) {
    each_piece(seq, layer, n, [&](void * there, void * here, size_t size) { gpu.download(here, there, size); });
    codes.get(seq, layer, n, dst);
    codes.drop(seq, layer);
}

void kvf_gpu_chooser::set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) {
    codes.set(seq, layer, n, src);
    each_piece(seq, layer, n, [&](void * there, void * here, size_t size) { gpu.upload(there, here, size); });
    if (n > 0) { upload_factors(seq, layer); }
    codes.drop(seq, layer);
}

//
// the graph
//

// whether the device computes all nodes after `after`
static bool computes_since(ggml_backend_dev_t dev, const ggml_cgraph * gf, const ggml_tensor * after) {
    const bool on_cpu = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU; // in tests
    for (int i = gf->n_nodes - 1; i >= 0 && gf->nodes[i] != after; --i) {
        const auto * node = gf->nodes[i];
        if (!ggml_backend_dev_supports_op(dev, node)) { return false; }
        for (const auto * src : node->src) {
            auto *     buf   = src ? src->buffer : nullptr;
            const bool there = !buf || (on_cpu ? ggml_backend_buffer_is_host(buf)
                                               : ggml_backend_buffer_get_type(buf) == ggml_backend_dev_buffer_type(dev));
            if (!there) { return false; }
        }
    }
    return true;
}

void kvf_gpu_chooser::build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale,
        int32_t il, uint32_t layer) {
    const bool chooses = fresh.layers[layer].info.il == il;
    auto &     at      = attends[il];
    if (add_words(ctx, res, q->ne[2])) {
        add(ctx, gf, "occupy", layer, gpu.occupy, &all, {words});
        late_of = nullptr;
    }
    at.p.scale = scale;
    at.chooses = chooses;
    attend     = add(ctx, gf, "attend", il, gpu.attend, &at, {q, words});
}

// whether our kernels also attend to the pool, in place of llama.cpp's attention
static bool is_whole(const kvf_gpu_attend & a, const ggml_tensor * cur) {
    const auto fits = [](int32_t type) { // half precision can represent its values
        return type != GGML_TYPE_F32 && type != GGML_TYPE_BF16;
    };
    return cur->op == GGML_OP_FLASH_ATTN_EXT && cur->ne[2] <= kvf_gpu_attend::MOST_WHOLE && fits(a.rows[0].type) &&
           fits(a.rows[1].type);
}

ggml_tensor * kvf_gpu_chooser::blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float, ggml_tensor * cur,
        ggml_tensor * sinks, bool by_head, int32_t il, uint32_t) {
    auto & at = attends[il];
    at.whole  = fresh.has_out() && is_whole(at, cur);
    if (!at.whole) { ggml_build_forward_expand(gf, cur); }
    if (!computes_since(device(), gf, attend)) {
        throw kvf_failure(KVF_E_UNSUPPORTED, "the attention is computed on another device than that of its KV cache");
    }
    // a late choice may run beside the nodes after it if this device computes all of them, up to a node that waits for it
    at.by_head     = by_head;
    at.late_beside = false; // until such a node is found
    at.after       = nullptr;
    if (late_of) { // this is the first attention after the late choice of another layer
        late_of->late_beside = computes_since(device(), gf, late);
        if (late_of->late_beside) { at.after = late_of->events; }
        late_of = nullptr;
    }

    std::vector<ggml_tensor *> args = {attend, words, q}; // q: its memory must not be reused before this node
    if (sinks) { args.push_back(sinks); }
    const auto    node = (ggml_custom_op_t) gpu.mix;
    ggml_tensor * res;
    if (at.whole) {
        args.insert(args.begin(), cur->src[3]); // the mask, so that it is still filled: that calls kvf_fresh::begin()
        res = ggml_custom_4d(ctx, cur->type, cur->ne[0], cur->ne[1], cur->ne[2], cur->ne[3], args.data(), args.size(), node,
                kvf_gpu::LAUNCHES, &at);
    } else {
        res = ggml_custom_inplace(ctx, cur, args.data(), args.size(), node, kvf_gpu::LAUNCHES, &at);
    }
    ggml_format_name(res, "fresh_mix-%d", il);
    if (at.chooses) {
        late    = add(ctx, gf, "late", il, gpu.choose_late, &at, {res, words});
        late_of = &at;
    }
    return res;
}
