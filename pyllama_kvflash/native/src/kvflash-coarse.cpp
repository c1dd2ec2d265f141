// codes, nodes, and results: see kvflash-coarse.h

#include "kvflash-coarse.h"

#include "llama-graph.h"
#include "llama-hparams.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

static constexpr uint32_t UNIT = kvf_fresh::UNIT;
static constexpr uint32_t FEW  = 32; // tokens of a draft: each is computed as if it were alone, to the last bit

namespace {

// whether a graph has the nodes
struct coarse_input : llm_graph_input_i {
    explicit coarse_input(const kvf_fresh & fresh) : fresh(fresh), there(fresh.has_coarse()) {}

    void set_input(const llama_ubatch *) override {}
    bool can_reuse(const llm_graph_params &) override { return there == fresh.has_coarse(); }

    const kvf_fresh & fresh;
    const bool        there;
};

} // namespace

std::unique_ptr<kvf_chooser> kvf_coarse_chooser(kvf_fresh & fresh) { return std::make_unique<kvf_coarse_on_cpu>(fresh); }

static std::vector<kvf_codes> codes_of(const kvf_fresh::layer & l, const kvf_fresh::params & p) {
    std::vector<kvf_codes> res = {kvf_codes(l.info.n_head_kv, l.info.n_embd_head_k, p.coarse_k, l.n_rot)};
    if (l.v) { res.emplace_back(l.info.n_head_kv, l.info.n_embd_v / l.info.n_head_kv, p.coarse_v); }
    return res;
}

size_t kvf_coarse_size(const kvf_fresh::layer & l, const kvf_fresh::params & p, uint32_t n) {
    size_t res = 0;
    for (const auto & its : codes_of(l, p)) {
        const uint32_t n_segment = (n + kvf_codes::SEGMENT - 1) / kvf_codes::SEGMENT;
        res += its.spread_size() + n_segment * its.mean_size() + (n + UNIT - 1) / UNIT * its.unit_size();
    }
    return res;
}

// The bytes of n positions in the order of positions, so that those of fewer are their beginning: what rows are divided by,
// and at a segment's first unit its means
template <typename C, typename S, typename M, typename U>
static void each_part(C & all, uint32_t n, const S & spread, const M & mean, const U & unit) {
    constexpr uint32_t each = kvf_codes::SEGMENT / UNIT;
    for (auto & its : all) {
        spread(its);
    }
    for (uint32_t u = 0; u < (n + UNIT - 1) / UNIT; ++u) {
        for (auto & its : all) {
            if (u % each == 0) { mean(its, u / each); }
        }
        for (auto & its : all) {
            unit(its, u);
        }
    }
}

kvf_coarse_on_cpu::kvf_coarse_on_cpu(kvf_fresh & fresh) :
    kvf_host_chooser(fresh), codes(fresh.sequences.size()), nodes(fresh.n_layer_model()), own(fresh.sequences.size()) {
    for (uint32_t i = 0; i < fresh.layers.size(); ++i) {
        const auto & l = fresh.layers[i];
        n_head         = std::max(n_head, l.info.n_head);
        for (auto & layers : codes) {
            layers.push_back({codes_of(l, fresh.its)});
            width = std::max(width, layers.back().values().width);
        }
    }
}

//
// codes
//

// rows: gives those of chunk i, as floats. spreads: of keys
template <typename F>
static void put_codes(kvf_codes & codes, uint32_t n_chunk, uint32_t first, uint32_t n, bool spreads, const F & rows) {
    const uint32_t     pos = first * n_chunk, n_embd = codes.n_head * codes.d;
    std::vector<float> room((size_t) n_chunk * n_embd);

    auto segments = codes.begun(pos, n * n_chunk);
    for (auto & s : segments) {
        const uint32_t from = s.segment * kvf_codes::SEGMENT / n_chunk - first;
        const uint32_t end = std::min(n, from + kvf_codes::SEGMENT / n_chunk), n_there = (end - from) * n_chunk;
        if (s.segment > 0 && n_there < kvf_codes::OWN_MEAN) { continue; }

        const uint32_t every = std::max(1u, n_there / kvf_codes::OWN_MEAN); // so many tell as much as all
        for (uint32_t c = from; c < end; ++c) {
            rows(c, room.data());
            for (uint32_t t = 0; t < n_chunk; t += every, ++s.n_sum) {
                kvf_add_row(room.data() + (size_t) t * n_embd, n_embd, s.sum.data(), s.square.data());
            }
        }
    }
    codes.begin(segments, spreads);
    for (uint32_t c = 0; c < n; ++c) {
        rows(c, room.data());
        codes.put(pos + c * n_chunk, room.data(), n_chunk);
    }
}

void kvf_coarse_on_cpu::put(
        llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records, uint32_t n) {
    for (uint32_t i = layer; i < layer + n_layer; ++i) {
        const auto & info = fresh.layers[i].info;
        auto &       its  = codes[seq][i];
        for (auto & each : its.all) {
            each.reserve(fresh.its.n_ctx);
        }
        put_codes(its.keys(), fresh.n_chunk, first, n, true, [&](uint32_t c, float * to) {
            kvf_rows_to_float(info, fresh.n_chunk, (const char *) records[c] + info.offs_k, to);
            its.keys().turn_back(to, fresh.n_chunk);
        });
        if (its.all.size() == 1) { continue; }
        put_codes(its.all[1], fresh.n_chunk, first, n, false, [&](uint32_t c, float * to) {
            kvf_values_to_float(info, fresh.n_chunk, fresh.v_trans, (const char *) records[c] + info.offs_v, to);
        });
    }
}

void kvf_coarse_on_cpu::get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) {
    each_part(
            codes[seq][layer].all, n,
            [&](const kvf_codes & its) {
                its.get_spread(dst);
                dst += its.spread_size();
            },
            [&](const kvf_codes & its, uint32_t i) {
                its.get_mean(i, dst);
                dst += its.mean_size();
            },
            [&](const kvf_codes & its, uint32_t i) {
                its.get_unit(i, dst);
                dst += its.unit_size();
            });
}

void kvf_coarse_on_cpu::set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) {
    each_part(
            codes[seq][layer].all, n,
            [&](kvf_codes & its) {
                its.set_spread(src);
                src += its.spread_size();
            },
            [&](kvf_codes & its, uint32_t i) {
                its.set_mean(i, src);
                src += its.mean_size();
            },
            [&](kvf_codes & its, uint32_t i) {
                its.set_unit(i, src);
                src += its.unit_size();
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

void kvf_coarse_on_cpu::build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale,
        uint32_t layer, const kvf_predicted &) {
    if (layer == 0) { res->add_input(std::make_unique<coarse_input>(fresh)); }

    if (!fresh.has_coarse()) { return; }

    auto & at = nodes[fresh.layers[layer].info.il];
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
                if (ith == 0) { at.owner->choose(at, true); }
            },
            &at);
    ggml_format_name(args[0], "coarse_choose-%u", layer);
    ggml_build_forward_expand(gf, args[0]);
}

ggml_tensor * kvf_coarse_on_cpu::blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float scale, ggml_tensor * cur,
        ggml_tensor * sinks, bool by_head, int32_t il, uint32_t layer) {
    if (!fresh.has_coarse()) { return cur; }

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
    if (!fresh.its.late || fresh.layers[layer].info.il != il) { return res; }

    args[0] = res;
    args[0] = add_node(
            ctx, nullptr, args, 1,
            [](ggml_tensor *, int ith, int, void * data) {
                const auto & at = *(const node *) data;
                if (ith == 0) { at.owner->choose(at, false); }
            },
            &at);
    ggml_format_name(args[0], "coarse_late-%d", il);
    ggml_build_forward_expand(gf, args[0]);
    return res;
}

//
// tasks
//

void kvf_coarse_on_cpu::begin(llama_seq_id seq) {
    const auto &   s      = fresh.sequences[seq];
    auto &         o      = own[seq];
    const uint32_t n_far  = (s.n + KVF_TILE - 1) / KVF_TILE;
    const uint32_t n_near = (s.cells.size() + (size_t) fresh.n_slot(s) * UNIT + KVF_TILE - 1) / KVF_TILE;
    const size_t   n_part = std::max(std::min<size_t>(FEW, s.tokens.size()) * (n_far + n_near), 2 * s.tokens.size());

    o.parts.resize(n_part * n_head * (2 + width));
    o.sums.resize(s.asking.size() * n_head * s.n_unit());
    o.tops.resize(s.asking.size() * n_head * n_far);
    o.near.resize(2 * n_head);
    o.all.resize(n_head);
    for (const auto & l : fresh.layers) {
        const size_t n_batch = (l.info.n_head / l.info.n_head_kv + KVF_MOST_Q - 1) / KVF_MOST_Q;
        if (s.tokens.size() == 1) {
            o.kept.resize(std::max(o.kept.size(), l.info.n_head_kv * n_batch * n_far * KVF_MOST_Q * KVF_TILE));
        }
    }
}

bool kvf_coarse_on_cpu::chooses_before(llama_seq_id seq, uint32_t layer) const {
    const auto & s = fresh.sequences[seq];
    return s.n_fill > 0 && !s.tokens.empty() && (!fresh.its.late || has_free(seq, layer));
}

kvf_coarse_on_cpu::work kvf_coarse_on_cpu::make_work(llama_seq_id seq, const node & at, bool attends) const {
    const uint32_t layer = at.layer;
    const auto &   s     = fresh.sequences[seq];
    const auto &   info  = fresh.layers[layer].info;

    work w      = {};
    w.s         = &s;
    w.seq       = seq;
    w.layer     = layer;
    w.attends   = attends;
    w.keeps     = at.chooses && s.tokens.size() == 1 && chooses_before(seq, layer);
    w.n_head_kv = info.n_head_kv;
    w.group     = info.n_head / info.n_head_kv;
    for (size_t i = 0, next = 0; i < s.tokens.size(); ++i) {
        const bool asks = next < s.asking.size() && s.asking[next].first == s.tokens[i];
        if (!asks && !attends) { continue; }
        w.rows.push_back(s.tokens[i]);
        w.pos.push_back(s.pos[i]);
        w.asking.push_back(asks ? (int32_t) next++ : -1);
    }
    w.open.resize(s.n_unit());
    for (uint32_t u = 0; u < s.n_unit(); ++u) {
        w.open[u] = s.common[u] ? 0.0f : 1.0f;
    }
    w.n_common = attends && w.keeps ? 0 : s.cells.size(); // they are kept, too
    for (uint32_t i = 0; i < w.n_common; ++i) {
        w.cells.push_back(s.cells[i].second);
    }
    for (uint32_t slot = 0; slot < s.n_visible && attends; ++slot) {
        w.open[tables[seq][layer][slot]] = 0;
        for (uint32_t i = 0; i < UNIT; ++i) {
            w.cells.push_back(fresh.cell_of(s, slot) + i);
        }
    }
    w.n_batch = (w.n_query() + KVF_MOST_Q - 1) / KVF_MOST_Q;
    w.n_far   = (s.n + KVF_TILE - 1) / KVF_TILE;
    w.n_near  = std::max<size_t>(1, (w.cells.size() + KVF_TILE - 1) / KVF_TILE);
    // few tokens: a part of its own for each tile, so that all threads have something to do
    w.n_part = s.tokens.size() <= FEW ? w.n_far + w.n_near : 2;
    return w;
}

kvf_coarse_on_cpu::part kvf_coarse_on_cpu::part_of(const work & w, uint32_t head, uint32_t query, uint32_t i) {
    return {own[w.seq].parts.data() + (((size_t) head * w.n_query() + query) * w.n_part + i) * (2 + width)};
}

void kvf_coarse_on_cpu::compute(const node & at, const ggml_tensor * q_all, bool attends, int ith, int nth) {
    static thread_local queries q;
    for (size_t seq = 0; seq < own.size(); ++seq) {
        const auto & s = fresh.sequences[seq];
        if (s.tokens.empty() || s.n == 0 || (!attends && !chooses_before(seq, at.layer))) { continue; }
        const auto     w = make_work(seq, at, attends);
        const uint64_t n = w.n_task();
        q.set            = false;
        for (uint32_t task = n * ith / nth; task < n * (ith + 1) / nth; ++task) {
            run(w, at, q_all, task, q);
        }
    }
}

void kvf_coarse_on_cpu::run(const work & w, const node & at, const ggml_tensor * q_all, uint32_t task, queries & q) {
    const uint32_t i = task % w.n_part, batch = task / w.n_part % w.n_batch, head = task / w.n_part / w.n_batch;
    if (!q.set || q.head != head || q.batch != batch) { prepare(w, q_all, head, batch, q); }

    part parts[KVF_MOST_Q];
    for (uint32_t j = 0; j < q.n; ++j) {
        parts[j] = part_of(w, head, batch * KVF_MOST_Q + j, i);
        std::fill_n(parts[j].at, 2 + width, 0.0f);
        parts[j].top() = KVF_NONE;
    }
    if (w.n_part > 2 || w.n_far + w.n_near <= 2) {
        if (i < w.n_far) {
            far(w, at, head, i, q, parts);
        } else if (i - w.n_far < w.n_near) {
            near(w, at, head, i - w.n_far, q, parts);
        }
        return;
    }
    for (uint32_t tile = 0; tile < (i ? w.n_near : w.n_far); ++tile) {
        i ? near(w, at, head, tile, q, parts) : far(w, at, head, tile, q, parts);
    }
}

//
// results
//

void kvf_coarse_on_cpu::mix(const node & at, ggml_tensor * dst, int ith, int nth) {
    const auto *   cur   = dst->src[0];
    const auto *   sinks = dst->src[2];
    const auto &   info  = fresh.layers[at.layer].info;
    const uint32_t d     = cur->ne[0];
    const auto     of    = [&](const ggml_tensor * t, uint32_t head, uint32_t row) {
        return (float *) ((char *) t->data + head * t->nb[at.by_head ? 2 : 1] + row * t->nb[at.by_head ? 1 : 2]);
    };

    std::vector<uint8_t> done(cur->ne[at.by_head ? 1 : 2]);
    for (size_t seq = 0; seq < own.size(); ++seq) {
        const auto & s = fresh.sequences[seq];
        if (s.tokens.empty() || s.n == 0) { continue; }
        for (const uint32_t row : s.tokens) {
            done[row] = 1;
        }
        const auto     w = make_work(seq, at, true);
        const auto &   v = codes[seq][at.layer].values();
        const uint64_t n = (uint64_t) w.n_head_kv * w.n_batch;

        kvf_lanes x(v.width);
        for (uint32_t task = n * ith / nth; task < n * (ith + 1) / nth; ++task) {
            const uint32_t head = task / w.n_batch, first = task % w.n_batch * KVF_MOST_Q;
            const uint32_t n_q = std::min(KVF_MOST_Q, w.n_query() - first);
            float          share[KVF_MOST_Q];
            for (uint32_t j = 0; j < n_q; ++j) {
                const uint32_t query = first + j, its = head * w.group + query % w.group;
                float          top = KVF_NONE, far = 0, near = 0;
                for (uint32_t i = 0; i < w.n_part; ++i) {
                    top = std::max(top, part_of(w, head, query, i).top());
                }
                if (sinks) { top = std::max(top, ((const float *) sinks->data)[its]); }
                std::vector<float> values(v.width);
                for (uint32_t i = 0; i < w.n_part; ++i) {
                    auto        p      = part_of(w, head, query, i);
                    const float factor = p.sum() > 0 ? expf(p.top() - top) : 0;
                    (is_far(w, i) ? far : near) += p.sum() * factor;
                    if (is_far(w, i)) { kvf_add_times(values.data(), p.values(), v.width, factor); }
                }
                if (sinks) { near += expf(((const float *) sinks->data)[its] - top); }
                share[j] = far / (far + near);
                for (uint32_t i = 0; i < v.width; ++i) {
                    x[i][j] = far > 0 ? values[i] / far : 0;
                }
            }
            v.rotate_back(head, x.data());
            for (uint32_t j = 0; j < n_q; ++j) {
                const uint32_t query = first + j, its = head * w.group + query % w.group, row = w.rows[query / w.group];
                const float *  a = of(cur, its, row);
                float *        b = of(dst, its, row);
                for (uint32_t i = 0; i < d; ++i) {
                    b[i] = share[j] > 0 ? (1 - share[j]) * a[i] + share[j] * x[i][j] : a[i];
                }
            }
        }
    }
    for (uint32_t row = ith; row < done.size(); row += nth) {
        for (uint32_t head = 0; head < info.n_head && !done[row]; ++head) {
            std::copy_n(of(cur, head, row), d, of(dst, head, row));
        }
    }
}

void kvf_coarse_on_cpu::choose(const node & at, bool before) {
    for (size_t seq = 0; seq < own.size(); ++seq) {
        const auto & s = fresh.sequences[seq];
        if (before ? !chooses_before(seq, at.layer) : s.n_fill == 0 || s.tokens.empty()) { continue; }
        const auto         w = make_work(seq, at, !before);
        std::vector<float> score(s.n_unit());
        for (uint32_t head = 0; head < w.n_head_kv; ++head) {
            for (uint32_t query = 0; query < w.n_query(); ++query) {
                if (w.asking[query / w.group] < 0) { continue; }
                float top = KVF_NONE, sum[2] = {}; // of the pool, and of codes
                for (uint32_t i = 0; i < w.n_part; ++i) {
                    top = std::max(top, part_of(w, head, query, i).top());
                }
                for (uint32_t i = 0; i < w.n_part; ++i) {
                    auto p = part_of(w, head, query, i);
                    sum[is_far(w, i)] += p.sum() > 0 ? p.sum() * expf(p.top() - top) : 0;
                }
                const float all = sum[0] + sum[1];
                if (w.keeps && before) {
                    auto & o = own[seq];

                    o.all[head * w.group + query]            = top + logf(all);
                    o.near[2 * (head * w.group + query)]     = top;
                    o.near[2 * (head * w.group + query) + 1] = sum[0];
                }
                const size_t i = shares_at(w, head, query);
                for (uint32_t tile = 0; tile < w.n_far; ++tile) {
                    const uint32_t first  = tile * KVF_TILE_UNITS;
                    const float    factor = expf(own[seq].tops[i * w.n_far + tile] - top) / all;
                    kvf_add_times(score.data() + first, own[seq].sums.data() + i * s.n_unit() + first,
                            std::min(KVF_TILE_UNITS, s.n_unit() - first), factor);
                }
            }
        }
        kvf_host_chooser::choose(seq, at.layer, score);
    }
}
