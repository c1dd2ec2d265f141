// making and storing codes, and building the nodes of the graph, see coarse/coarse.h

#include "coarse/coarse.h"

#include "llama-hparams.h"

#include <algorithm>

static constexpr uint32_t UNIT = kvf_fresh::UNIT;

std::unique_ptr<kvf_chooser> kvf_coarse_chooser(kvf_fresh & fresh) { return std::make_unique<kvf_coarse_on_cpu>(fresh); }

static std::vector<kvf_codes> codes_of(const kvf_fresh::layer & l, const kvf_fresh::params & p) {
    std::vector<kvf_codes> res = {kvf_codes(l.info.n_head_kv, l.info.n_embd_head_k, p.coarse_k, l.n_rot)};
    if (l.v) { res.emplace_back(l.info.n_head_kv, l.info.n_embd_v / l.info.n_head_kv, p.coarse_v); }
    return res;
}

size_t kvf_coarse_size(const kvf_fresh::layer & l, const kvf_fresh::params & p, uint32_t n) {
    size_t res = 0;
    for (const auto & its : codes_of(l, p)) {
        res += its.size(n);
    }
    return res;
}

// call copy(bytes, size) for all parts of the codes of n positions: the divisors, then each unit, and before a segment's
// first unit its means. in this order, the bytes of fewer positions are a prefix
template <typename F> static void each_part(std::vector<kvf_codes> & all, uint32_t n, const F & copy) {
    constexpr uint32_t each = kvf_codes::SEGMENT / UNIT;
    for (auto & its : all) {
        copy(its.spread_data(), its.spread_size());
    }
    for (uint32_t u = 0; u < (n + UNIT - 1) / UNIT; ++u) {
        for (auto & its : all) {
            if (u % each == 0) { copy(its.mean(u / each, 0), its.mean_size()); }
        }
        for (auto & its : all) {
            for (uint32_t head = 0; head < its.n_head; ++head) {
                copy(its.scale(u, head), UNIT * sizeof(uint16_t));
                copy(its.unit(u, head), its.unit_bytes());
            }
        }
    }
}

kvf_coarse_on_cpu::kvf_coarse_on_cpu(kvf_fresh & fresh) :
    kvf_host_chooser(fresh), codes(fresh), nodes(fresh.n_layer_model()), own(fresh.sequences.size()) {
    for (uint32_t i = 0; i < fresh.layers.size(); ++i) {
        n_head = std::max(n_head, fresh.layers[i].info.n_head);
        width  = std::max(width, codes[0][i].values().width);
    }
}

//
// codes
//

kvf_coarse_codes::kvf_coarse_codes(const kvf_fresh & fresh) : fresh(fresh), all(fresh.sequences.size()) {
    for (auto & layers : all) {
        for (const auto & l : fresh.layers) {
            layers.push_back({codes_of(l, fresh.its)});
        }
    }
}

std::vector<kvf_gpu_sampled> kvf_sampled(uint32_t n_chunk, uint32_t first, uint32_t n) {
    constexpr uint32_t each = kvf_codes::SEGMENT;

    std::vector<kvf_gpu_sampled> res;
    for (uint32_t s = (first * n_chunk + each - 1) / each; s * each < (first + n) * n_chunk; ++s) {
        const uint32_t from = s * each / n_chunk - first;
        const uint32_t end = std::min(n, from + each / n_chunk), n_there = (end - from) * n_chunk;
        const bool     own = s == 0 || n_there >= kvf_codes::OWN_MEAN;
        // a sample of OWN_MEAN to twice as many rows gives as good a mean as all rows
        res.push_back({s, from, own ? end : from, std::max(1u, n_there / kvf_codes::OWN_MEAN)});
    }
    return res;
}

// make the codes of chunks [first, first + n). rows(i, dst) writes the rows of chunk first + i as floats. spreads: these are
// keys, which have divisors
template <typename F>
static void put_codes(kvf_codes & codes, uint32_t n_chunk, uint32_t first, uint32_t n, bool spreads, const F & rows) {
    const uint32_t     n_embd = codes.n_head * codes.d;
    std::vector<float> room((size_t) n_chunk * n_embd);

    std::vector<kvf_codes::moments> segments;
    for (const auto & its : kvf_sampled(n_chunk, first, n)) {
        auto & s = segments.emplace_back(codes.moments_of(its.segment));
        s.n_sum  = its.n(n_chunk);
        for (uint32_t c = its.first; c < its.end; ++c) {
            rows(c, room.data());
            for (uint32_t t = 0; t < n_chunk; t += its.every) {
                kvf_add_row(room.data() + (size_t) t * n_embd, n_embd, s.sum.data(), s.square.data());
            }
        }
    }
    if (spreads && !segments.empty() && segments[0].segment == 0) { codes.spread_over(segments); }
    codes.begin(segments);
    for (uint32_t c = 0; c < n; ++c) {
        rows(c, room.data());
        codes.put((first + c) * n_chunk, room.data(), n_chunk);
    }
}

void kvf_coarse_codes::put(llama_seq_id seq, uint32_t layer, uint32_t first, const void * const * records, uint32_t n) {
    const auto & info = fresh.layers[layer].info;
    auto &       its  = all[seq][layer];
    for (auto & each : its.all) {
        each.reserve(fresh.its.n_ctx);
    }
    put_codes(its.keys(), fresh.n_chunk, first, n, true, [&](uint32_t c, float * to) {
        kvf_rows_to_float(info, fresh.n_chunk, (const char *) records[c] + info.offs_k, to);
        its.keys().turn_back(to, fresh.n_chunk);
    });
    if (its.all.size() == 1) { return; }
    put_codes(its.all[1], fresh.n_chunk, first, n, false, [&](uint32_t c, float * to) {
        kvf_values_to_float(info, fresh.n_chunk, fresh.v_trans, (const char *) records[c] + info.offs_v, to);
    });
}

void kvf_coarse_on_cpu::put(
        llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records, uint32_t n) {
    for (uint32_t i = layer; i < layer + n_layer; ++i) {
        if (fresh.layers[i].chooser == this) { codes.put(seq, i, first, records, n); }
    }
}

void kvf_coarse_codes::get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) {
    each_part(all[seq][layer].all, n, [&](const void * from, size_t size) {
        memcpy(dst, from, size);
        dst += size;
    });
}

void kvf_coarse_codes::set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) {
    for (auto & each : all[seq][layer].all) {
        each.reserve(fresh.its.n_ctx);
        if (n > 0) { each.memory(n); }
    }
    each_part(all[seq][layer].all, n, [&](void * to, size_t size) {
        memcpy(to, src, size);
        src += size;
    });
}

//
// the nodes
//

template <typename F>
static ggml_tensor * add_node(ggml_context * ctx, ggml_tensor * like, ggml_tensor ** args, int n, F f, void * data) {
    const int64_t ne[] = {like ? like->ne[0] : 1, like ? like->ne[1] : 1, like ? like->ne[2] : 1, like ? like->ne[3] : 1};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, ne[0], ne[1], ne[2], ne[3], args, n, f, GGML_N_TASKS_MAX, data);
}

void kvf_coarse_on_cpu::build(
        ggml_context * ctx, ggml_cgraph * gf, llm_graph_result *, ggml_tensor * q, float scale, int32_t il, uint32_t layer) {
    if (fresh.layers[layer].info.il != il) { return; }

    auto & at = nodes[il];
    at        = {this, layer, scale, true, false};

    ggml_tensor * args[] = {q};
    args[0]              = add_node(
            ctx, nullptr, args, 1,
            [](ggml_tensor * dst, int ith, int nth, void * data) {
                const auto & at = *(const node *) data;
                at.owner->compute(at, dst->src[0], false, ith, nth);
            },
            &at);
    ggml_format_name(args[0], "coarse_score-%u", layer);
    args[0] = add_node(
            ctx, nullptr, args, 1,
            [](ggml_tensor *, int ith, int, void * data) {
                const auto & at = *(const node *) data;
                if (ith == 0) { at.owner->choose(at); }
            },
            &at);
    ggml_format_name(args[0], "coarse_choose-%u", layer);
    args[0] = add_node(
            ctx, nullptr, args, 1,
            [](ggml_tensor *, int ith, int nth, void * data) {
                const auto & at = *(const node *) data;
                at.owner->fetch_chosen(at.layer, ith, nth);
            },
            &at);
    ggml_format_name(args[0], "coarse_fetch-%u", layer);
    ggml_build_forward_expand(gf, args[0]);
}

ggml_tensor * kvf_coarse_on_cpu::blend(ggml_context * ctx, ggml_cgraph *, ggml_tensor * q, float scale, ggml_tensor * cur,
        ggml_tensor * sinks, bool by_head, int32_t il, uint32_t layer) {
    auto & at = nodes[il];
    at        = {this, layer, scale, fresh.layers[layer].info.il == il, by_head};

    ggml_tensor * args[] = {q, nullptr, sinks};
    args[1]              = add_node(
            ctx, nullptr, args, 1,
            [](ggml_tensor * dst, int ith, int nth, void * data) {
                const auto & at = *(const node *) data;
                at.owner->compute(at, dst->src[0], true, ith, nth);
            },
            &at);
    ggml_format_name(args[1], "coarse_attend-%d", il);
    args[0]    = cur;
    auto * res = add_node(
            ctx, cur, args, sinks ? 3 : 2,
            [](ggml_tensor * dst, int ith, int nth, void * data) {
                const auto & at = *(const node *) data;
                at.owner->mix(at, dst, ith, nth);
            },
            &at);
    ggml_format_name(res, "coarse_mix-%d", il);
    return res;
}
