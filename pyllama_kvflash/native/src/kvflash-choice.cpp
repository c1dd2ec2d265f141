// where layers choose on the CPU, by an index: see kvflash-fresh.h

#include "kvflash-slots.h"
#include "kvflash-weights.h"

#include "llama-graph.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

static_assert(kvf_fresh::UNIT == LANES, "a unit's positions are lanes of a vector");

namespace {

using sequence = kvf_fresh::sequence;

struct cpu_chooser : kvf_host_chooser {
    explicit cpu_chooser(kvf_fresh & fresh) :
        kvf_host_chooser(fresh), own(fresh.sequences.size()), nodes(fresh.layers.size()) {
        for (uint32_t i = 0; i < fresh.layers.size(); ++i) {
            nodes[i] = {this, i, 0.0f};
            n_head   = std::max(n_head, fresh.layers[i].info.n_head);
        }
        for (auto & o : own) {
            for (const auto & l : fresh.layers) {
                o.index.emplace_back(l.info, fresh.its.form);
            }
        }
    }

    void moments(uint32_t layer, const void * const * records, uint32_t n, float * mean, float * cov) override {
        kvf_index::moments(fresh.layers[layer].info, fresh.n_chunk, records, n, mean, cov);
    }

    void fit(llama_seq_id seq, uint32_t layer, const float * mean, const float * basis, const float * step) override {
        own[seq].index[layer].fit(mean, basis, step);
    }

    void put(llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records,
            uint32_t n) override {
        for (uint32_t l = layer; l < layer + n_layer; ++l) {
            if (fresh.layers[l].chooser != this) { continue; }
            const auto &       info = fresh.layers[l].info;
            std::vector<float> keys((size_t) fresh.n_chunk * info.n_embd_k);
            for (uint32_t i = 0; i < n; ++i) {
                kvf_rows_to_float(info, fresh.n_chunk, (const char *) records[i] + info.offs_k, keys.data());
                own[seq].index[l].put((first + i) * fresh.n_chunk, keys.data(), fresh.n_chunk);
            }
        }
    }

    void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) override { own[seq].index[layer].get(n, dst); }
    void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) override { own[seq].index[layer].set(n, src); }
    void cover(llama_seq_id seq) override { own[seq].shares.resize((size_t) n_head * fresh.of(seq).n_unit()); }

    void build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, int32_t il,
            uint32_t layer, const kvf_predicted & before) override;

    // of a sequence
    struct choice {
        std::vector<kvf_index> index;  // of each layer
        std::vector<float>     shares; // of the ubatch: [n_head][n_unit]
    };

    struct node {
        cpu_chooser * owner;
        uint32_t      i;
        float         scale;
    };

    void score(const node & at, const ggml_tensor * q, int ith, int nth);
    void score(const node & at, const sequence & s, choice & o, const ggml_tensor * q, const float * keys, uint32_t first,
            uint32_t n_q);
    void choose_by_shares(llama_seq_id seq, uint32_t layer);

    std::vector<choice> own;
    std::vector<node>   nodes;
    uint32_t            n_head = 0; // the most of a layer
};

} // namespace

std::unique_ptr<kvf_chooser> kvf_cpu_chooser(kvf_fresh & fresh) { return std::make_unique<cpu_chooser>(fresh); }

//
// the nodes
//

void cpu_chooser::build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result *, ggml_tensor * q, float scale, int32_t,
        uint32_t layer, const kvf_predicted & /* before */) {
    auto & at = nodes[layer];
    at.scale  = scale;

    ggml_tensor * args[] = {q};
    ggml_tensor * scored = ggml_custom_4d(
            ctx, GGML_TYPE_F32, 1, 1, 1, 1, args, 1,
            [](ggml_tensor * dst, int ith, int nth, void * data) {
                const auto & at = *(const node *) data;
                at.owner->score(at, dst->src[0], ith, nth);
            },
            GGML_N_TASKS_MAX, &at);
    ggml_format_name(scored, "fresh_score-%u", layer);

    args[0]              = scored;
    ggml_tensor * chosen = ggml_custom_4d(
            ctx, GGML_TYPE_F32, 1, 1, 1, 1, args, 1,
            [](ggml_tensor *, int ith, int, void * data) {
                if (ith > 0) { return; } // every thread calls this, whatever the number of tasks
                const auto & at    = *(const node *) data;
                const auto & fresh = at.owner->fresh;
                at.owner->begin_choice();
                for (size_t i = 0; i < fresh.sequences.size(); ++i) {
                    if (fresh.has_turn(fresh.sequences[i], at.i)) { at.owner->choose_by_shares(i, at.i); }
                }
                at.owner->fetch_chosen(at.i, 0, 1);
            },
            1, &at);
    ggml_format_name(chosen, "fresh_choose-%u", layer);
    ggml_build_forward_expand(gf, chosen);
}

void cpu_chooser::score(const node & at, const ggml_tensor * q, int ith, int nth) {
    static thread_local std::vector<float> keys; // of the common cells, of one head

    const auto &   l     = fresh.layers[at.i];
    const uint32_t group = l.info.n_head / l.info.n_head_kv, d = l.info.n_embd_head_k;
    const uint32_t first = (uint64_t) l.info.n_head * ith / nth, last = (uint64_t) l.info.n_head * (ith + 1) / nth;

    for (size_t seq = 0; seq < own.size(); ++seq) {
        const auto & s = fresh.sequences[seq];
        if (!fresh.has_turn(s, at.i)) { continue; }
        keys.resize(s.cells.size() * d);
        for (uint32_t h = first; h < last;) {
            if (h == first || h % group == 0) {
                for (size_t i = 0; i < s.cells.size(); ++i) {
                    kvf_to_float(l.info, h / group, (const char *) l.k->data + s.cells[i].second * l.k->nb[1],
                            keys.data() + i * d);
                }
            }
            const uint32_t n = h + 1 < last && (h + 1) % group ? 2 : 1; // of one head of keys
            score(at, s, own[seq], q, keys.data(), h, n);
            h += n;
        }
    }
}

// the largest sum of the units that are not common
KVF_CLONES
static uint16_t most_of(const uint16_t * sums, const uint8_t * common, uint32_t n) {
    lanes_h most = {};
    for (uint32_t u = 0; u < n; ++u) {
        if (common[u]) { continue; }

        lanes_h a;
        memcpy(&a, sums + (size_t) u * LANES, sizeof(a));
        most = a > most ? a : most;
    }
    uint16_t res = 0;
    for (uint32_t i = 0; i < LANES; ++i) {
        res = std::max(res, most[i]);
    }
    return res;
}

// sums of exp(base + unit*sum - top) of each unit that is not common, and of all
KVF_CLONES
static float sum_units(const uint16_t * sums, const uint8_t * common, uint32_t n, float base, float unit, float * dst) {
    constexpr float LOG2E = 1.44269504f;

    float all = 0;
    unit *= LOG2E;
    base *= LOG2E;
    for (uint32_t u = 0; u < n; ++u) {
        dst[u] = 0;
        if (common[u]) { continue; }

        lanes_h h;
        memcpy(&h, sums + (size_t) u * LANES, sizeof(h));
        dst[u] = sum_lanes(power_of_two(__builtin_convertvector(h, lanes_f) * unit + base));
        all += dst[u];
    }
    return all;
}

// the same with a cap of the logits. top: of all of them
static float sum_capped(const uint16_t * sums, const uint8_t * common, uint32_t n, const kvf_index::logits & x, float scale,
        float cap, float top, float * dst) {
    float all = 0;
    for (uint32_t u = 0; u < n; ++u) {
        dst[u] = 0;
        for (uint32_t i = 0; i < LANES && !common[u]; ++i) {
            dst[u] += expf(cap * tanhf((x.base + x.unit * sums[u * LANES + i]) * scale / cap) - top);
        }
        all += dst[u];
    }
    return all;
}

// products of n keys [n][d] with a query
KVF_CLONES
static void dots(const float * keys, uint32_t n, uint32_t d, const float * q, float * res) {
    for (uint32_t i = 0; i < n; ++i, keys += d) {
        res[i] = dot_of(keys, q, d);
    }
}

// shares of all units for n_q (1 or 2) query heads from `first` on, which have one head of keys, by the tokens that ask
void cpu_chooser::score(const node & at, const sequence & s, choice & o, const ggml_tensor * q, const float * keys,
        uint32_t first, uint32_t n_q) {
    static thread_local kvf_index::logits  far[2];
    static thread_local std::vector<float> sums, near;

    const auto &   l = fresh.layers[at.i];
    const uint32_t d = l.info.n_embd_head_k, n_unit = s.n_unit(), n_cell = s.cells.size();
    const uint32_t head   = first / (l.info.n_head / l.info.n_head_kv);
    const auto     capped = [&](float x) { return l.cap > 0 ? l.cap * tanhf(x / l.cap) : x; };

    std::fill_n(o.shares.data() + (size_t) first * n_unit, (size_t) n_q * n_unit, 0.0f);
    sums.resize(n_unit);
    near.resize(GGML_PAD(n_cell, LANES));

    for (const auto & [row, pos] : s.asking) {
        const float * its[2];
        for (uint32_t i = 0; i < n_q; ++i) {
            its[i] = (const float *) ((const char *) q->data + (first + i) * q->nb[1] + row * q->nb[2]);
        }
        o.index[at.i].products(head, its, n_q, s.n, far);

        const uint32_t n_near =
                std::upper_bound(s.cells.begin(), s.cells.end(), std::make_pair(pos, INT32_MAX)) - s.cells.begin();
        for (uint32_t i = 0; i < n_q; ++i) {
            const auto &     x      = far[i];
            const uint8_t *  common = s.common.data();
            const uint16_t * of     = x.sums.data();
            float            top    = capped((x.base + x.unit * most_of(of, common, n_unit)) * at.scale);
            dots(keys, n_near, d, its[i], near.data());
            for (uint32_t j = 0; j < n_near; ++j) {
                near[j] = capped(near[j] * at.scale);
                top     = std::max(top, near[j]);
            }
            const float all =
                    l.cap > 0 ? sum_capped(of, common, n_unit, x, at.scale, l.cap, top, sums.data())
                              : sum_units(of, common, n_unit, x.base * at.scale - top, x.unit * at.scale, sums.data());
            std::fill(near.data() + n_near, near.data() + GGML_PAD(n_near, LANES), KVF_NONE);
            kvf_add_times(o.shares.data() + (size_t) (first + i) * n_unit, sums.data(), n_unit,
                    1 / (all + kvf_sum_weights(near.data(), GGML_PAD(n_near, LANES), top)));
        }
    }
}

void cpu_chooser::choose_by_shares(llama_seq_id seq, uint32_t layer) {
    const uint32_t     n_unit = fresh.of(seq).n_unit();
    std::vector<float> score(n_unit);
    for (uint32_t h = 0; h < fresh.layers[layer].info.n_head; ++h) {
        kvf_add_times(score.data(), own[seq].shares.data() + (size_t) h * n_unit, n_unit, 1.0f);
    }
    choose(seq, layer, score);
}
