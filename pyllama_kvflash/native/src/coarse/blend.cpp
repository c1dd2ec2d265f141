// the nodes of the graph: they cut the work into tasks, and combine the results, see coarse/coarse.h

#include "coarse/coarse.h"

#include <algorithm>
#include <cmath>

static constexpr uint32_t UNIT = kvf_fresh::UNIT;
static constexpr uint32_t FEW  = 32; // most tokens of a draft. each of these has bit for bit the result that it has alone

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

bool kvf_coarse_on_cpu::chooses(llama_seq_id seq) const {
    const auto & s = fresh.sequences[seq];
    return s.n_fill > 0 && !s.tokens.empty();
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
    w.keeps     = at.chooses && s.tokens.size() == 1 && chooses(seq);
    w.n_head_kv = info.n_head_kv;
    w.group     = info.n_head / info.n_head_kv;
    for (size_t i = 0, next = 0; i < s.tokens.size(); ++i) {
        const bool asks = next < s.asking.size() && s.asking[next].first == s.tokens[i];
        if (!asks && !attends) { continue; }
        w.rows.push_back(s.tokens[i]);
        w.pos.push_back(s.pos[i]);
        w.asking.push_back(asks ? (int32_t) next++ : -1);
    }
    w.n_common = attends && w.keeps ? 0 : s.cells.size(); // the choice kept their sums, too
    w.n_cell   = w.n_common + (attends ? s.n_fill * UNIT : 0);
    w.n_batch  = (w.n_query() + KVF_MOST_Q - 1) / KVF_MOST_Q;
    w.n_far    = (s.n + KVF_TILE - 1) / KVF_TILE;
    w.n_near   = std::max(1u, (w.n_cell + KVF_TILE - 1) / KVF_TILE);
    w.few      = s.tokens.size() <= FEW;
    w.n_part   = w.few ? w.n_far + w.n_near : 2;
    return w;
}

void kvf_coarse_on_cpu::place(work & w) const {
    const auto & s = *w.s;
    w.open.resize(s.n_unit());
    for (uint32_t u = 0; u < s.n_unit(); ++u) {
        w.open[u] = s.common[u] ? 0.0f : 1.0f;
    }
    w.cells.reserve(w.n_cell);
    for (uint32_t i = 0; i < w.n_common; ++i) {
        w.cells.push_back(s.cells[i].second);
    }
    for (uint32_t slot = 0; slot < s.n_fill && w.attends; ++slot) {
        w.open[tables[w.seq][w.layer][slot]] = 0;
        for (uint32_t i = 0; i < UNIT; ++i) {
            w.cells.push_back(fresh.cell_of(s, slot) + i);
        }
    }
}

kvf_coarse_on_cpu::part kvf_coarse_on_cpu::part_of(const work & w, uint32_t head, uint32_t query, uint32_t i) {
    return {own[w.seq].parts.data() + (((size_t) head * w.n_query() + query) * w.n_part + i) * (2 + width)};
}

kvf_coarse_on_cpu::total kvf_coarse_on_cpu::total_of(const work & w, uint32_t head, uint32_t query, float least) {
    total res = {least, 0, 0};
    for (uint32_t i = 0; i < w.n_part; ++i) {
        res.top = std::max(res.top, part_of(w, head, query, i).top());
    }
    for (uint32_t i = 0; i < w.n_part; ++i) {
        auto p = part_of(w, head, query, i);
        (w.is_far(i) ? res.far : res.near) += p.sum() > 0 ? p.sum() * expf(p.top() - res.top) : 0;
    }
    return res;
}

void kvf_coarse_on_cpu::compute(const node & at, const ggml_tensor * q_all, bool attends, int ith, int nth) {
    static thread_local queries q;
    for (size_t seq = 0; seq < own.size(); ++seq) {
        const auto & s = fresh.sequences[seq];
        if (s.tokens.empty() || s.n == 0 || (!attends && !chooses(seq))) { continue; }
        auto w = make_work(seq, at, attends);
        place(w);
        q.set = false;
        for (uint32_t task = ith; task < w.n_task(); task += nth) { // interleaved, because heads differ in their work
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
    const bool     is_far = w.is_far(i);
    const uint32_t n = is_far ? w.n_far : w.n_near, first = !w.few ? 0 : is_far ? i : i - w.n_far;
    for (uint32_t tile = first; tile < (w.few ? first + 1 : n); ++tile) {
        is_far ? far(w, at, head, tile, q, parts) : near(w, at, head, tile, q, parts);
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

        kvf_lanes          x(v.width);
        std::vector<float> values(v.width);
        for (uint32_t task = n * ith / nth; task < n * (ith + 1) / nth; ++task) {
            const uint32_t head = task / w.n_batch, first = task % w.n_batch * KVF_MOST_Q;
            const uint32_t n_q = std::min(KVF_MOST_Q, w.n_query() - first);
            float          share[KVF_MOST_Q];
            for (uint32_t j = 0; j < n_q; ++j) {
                const uint32_t query = first + j, its = head * w.group + query % w.group;
                const float    sink = sinks ? ((const float *) sinks->data)[its] : KVF_NONE;
                const auto     t    = total_of(w, head, query, sink);
                share[j]            = t.far / (t.far + t.near + expf(sink - t.top));
                std::fill(values.begin(), values.end(), 0.0f);
                for (uint32_t i = 0; i < w.n_part; ++i) {
                    auto p = part_of(w, head, query, i);
                    if (w.is_far(i) && p.sum() > 0) {
                        kvf_add_times(values.data(), p.values(), v.width, expf(p.top() - t.top) / t.far);
                    }
                }
                for (uint32_t i = 0; i < v.width; ++i) {
                    x[i][j] = values[i];
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

void kvf_coarse_on_cpu::choose(const node & at) {
    begin_choice();
    for (size_t seq = 0; seq < own.size(); ++seq) {
        const auto & s = fresh.sequences[seq];
        if (!chooses(seq)) { continue; }
        const auto         w = make_work(seq, at, false);
        std::vector<float> score(s.n_unit());
        for (uint32_t head = 0; head < w.n_head_kv; ++head) {
            for (uint32_t query = 0; query < w.n_query(); ++query) {
                if (w.asking[query / w.group] < 0) { continue; }
                const auto  t   = total_of(w, head, query, KVF_NONE);
                const float all = t.near + t.far;
                if (w.keeps) {
                    auto & o = own[seq];

                    o.all[head * w.group + query]            = t.top + logf(all);
                    o.near[2 * (head * w.group + query)]     = t.top;
                    o.near[2 * (head * w.group + query) + 1] = t.near;
                }
                const size_t i = shares_at(w, head, query);
                for (uint32_t tile = 0; tile < w.n_far; ++tile) {
                    const uint32_t first  = tile * KVF_TILE_UNITS;
                    const float    factor = expf(own[seq].tops[i * w.n_far + tile] - t.top) / all;
                    kvf_add_times(score.data() + first, own[seq].sums.data() + i * s.n_unit() + first,
                            std::min(KVF_TILE_UNITS, s.n_unit() - first), factor);
                }
            }
        }
        kvf_host_chooser::choose(seq, at.layer, score);
    }
}
