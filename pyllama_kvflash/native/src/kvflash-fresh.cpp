// guests: each layer chooses its chunks before its attention, see kvflash-fresh.h

#include "kvflash-fresh.h"
#include "kvflash-lanes.h"

#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

static constexpr uint32_t MOST_ASKING = 16; // tokens of a ubatch whose queries choose, evenly spread

static_assert(kvf_fresh::UNIT == LANES, "a unit's positions are lanes of a vector");

kvf_fresh::kvf_fresh(const llama_kv_cache & kv, const kvf_index::form & form, uint32_t n_exchange) :
    n_chunk(llama_kvflash::n_chunk(kv)), form(form), n_exchange(n_exchange), v_trans(llama_kvflash::v_trans(kv)),
    n_cell(kv.get_size()) {
    for (uint32_t i = 0; i < llama_kvflash::n_layer(kv); ++i) {
        const auto info = llama_kvflash::layer(kv, i);
        const auto t    = llama_kvflash::tensors(kv, i);
        layers.push_back({this, i, info, t.k, t.v, 0.0f, 0.0f});
        if ((size_t) info.il >= of_model.size()) { of_model.resize(info.il + 1, -1); }
        of_model[info.il] = i;
    }
}

kvf_fresh::sequence & kvf_fresh::of(llama_seq_id seq) {
    if ((size_t) seq >= sequences.size()) { sequences.resize(seq + 1); }

    auto & s = sequences[seq];
    if (s.index.empty()) {
        for (const auto & l : layers) {
            s.index.emplace_back(l.info, form);
        }
        s.tables.resize(layers.size());
    }
    return s;
}

bool kvf_fresh::is_guest(uint32_t block) const {
    return std::any_of(sequences.begin(), sequences.end(),
            [&](const auto & s) { return std::find(s.blocks.begin(), s.blocks.end(), block) != s.blocks.end(); });
}

void kvf_fresh::truncate(llama_seq_id seq, uint32_t p) {
    auto & s = of(seq);
    if (p >= s.n) { return; }

    s.n = p / n_chunk * n_chunk;
    s.records.resize(s.n / n_chunk);
    for (auto & table : s.tables) {
        for (auto & unit : table) {
            if (unit >= (int32_t) s.n_unit()) { unit = -1; }
        }
    }
}

void kvf_fresh::clear(llama_seq_id seq) {
    truncate(seq, 0);
    auto & s = of(seq);
    s.blocks.clear();
    for (auto & table : s.tables) {
        table.clear();
    }
}

void kvf_fresh::resize(llama_kv_cache & kv, llama_seq_id seq, uint32_t n, const int32_t * blocks) {
    auto & s    = of(seq);
    auto   want = s.blocks;
    want.resize(std::min<size_t>(n, want.size()));
    if (blocks) {
        want.assign(blocks, blocks + n);
        kvf_check(s.blocks.empty(), "only a sequence without guests is told where they are");
        for (const uint32_t b : want) {
            kvf_check(b < llama_kvflash::n_block(kv) && llama_kvflash::is_free(kv, b) &&
                              std::count(want.begin(), want.end(), b) == 1,
                    "a block of guests is not free");
        }
    }
    for (uint32_t b = 0; b < llama_kvflash::n_block(kv) && want.size() < n; ++b) {
        if (llama_kvflash::is_free(kv, b) && std::find(want.begin(), want.end(), b) == want.end()) { want.push_back(b); }
    }
    if (want.size() < n) { throw kvf_failure(KVF_E_NO_BLOCK, format("%u blocks of guests, and not as many are free", n)); }

    s.blocks = std::move(want);
    for (auto & table : s.tables) {
        table.resize(n_slot(s), -1);
    }
    if (!s.blocks.empty()) {
        const uint32_t last = *std::max_element(s.blocks.begin(), s.blocks.end());
        llama_kvflash::set_n_kv(kv, GGML_PAD((last + 1) * n_chunk, 256));
    }
}

void kvf_fresh::place(llama_seq_id seq, uint32_t layer, const int32_t * units) {
    auto & s = of(seq);
    for (uint32_t slot = 0; slot < n_slot(s); ++slot) {
        kvf_check(units[slot] >= -1 && units[slot] < (int32_t) s.n_unit(), "a unit is not in the index");
        s.tables[layer][slot] = -1; // until it is there
        if (units[slot] >= 0) { fetch(layers[layer], s, slot, units[slot]); }
        s.tables[layer][slot] = units[slot];
    }
}

//
// a ubatch
//

void kvf_fresh::begin(const llama_kv_cache & kv, const llama_ubatch & ubatch) {
    for (auto & s : sequences) {
        s.tokens.clear();
        s.asking.clear();
        s.n_visible = 0;
    }
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        auto & s = of(ubatch.seq_id[i][0]);
        if (!s.blocks.empty()) { s.tokens.push_back(i); }
    }
    for (size_t seq = 0; seq < sequences.size(); ++seq) {
        auto & s = sequences[seq];
        if (s.tokens.empty()) { continue; }

        s.common.assign(s.n_unit(), 0);
        s.cells.clear();
        llama_kvflash::each_cell(kv, seq, [&](llama_pos pos, int32_t cell) {
            s.cells.emplace_back(pos, cell);
            if (pos < (llama_pos) s.n) { s.common[pos / UNIT] = 1; }
        });
        const uint32_t n_out = std::count(s.common.begin(), s.common.end(), 0);
        s.n_visible          = std::min(n_out, n_slot(s));
        s.shares.resize(
                (size_t) s.n_unit() * std::max_element(layers.begin(), layers.end(), [](const auto & a, const auto & b) {
                    return a.info.n_head < b.info.n_head;
                })->info.n_head);

        const uint32_t n = s.tokens.size(), n_asking = std::min(n, MOST_ASKING);
        for (uint32_t i = 0; i < n_asking; ++i) {
            const uint32_t row = s.tokens[(i + 1) * n / n_asking - 1];
            s.asking.emplace_back(row, ubatch.pos[row]);
        }
    }
}

template <typename T> void kvf_fresh::show(T * mask, int64_t n_kv) const {
    for (const auto & s : sequences) {
        for (const uint32_t i : s.tokens) {
            for (uint32_t slot = 0; slot < s.n_visible; ++slot) {
                std::fill_n(mask + i * n_kv + cell_of(s, slot), UNIT, T(0)); // of both types, what a visible cell has
            }
        }
    }
}

void llama_kvflash::show_guests(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch) {
    auto * fresh = kv.pool_fresh.get();
    if (!fresh) { return; }

    fresh->begin(kv, ubatch);
    if (dst->type == GGML_TYPE_F16) {
        fresh->show((ggml_fp16_t *) dst->data, dst->ne[0]);
    } else {
        fresh->show((float *) dst->data, dst->ne[0]);
    }
}

//
// the nodes
//

void kvf_fresh::build(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float scale, int32_t il) {
    auto & l = layers[of_model[il]];
    l.scale  = scale;

    ggml_tensor * args[] = {q};
    ggml_tensor * scored = ggml_custom_4d(
            ctx, GGML_TYPE_F32, 1, 1, 1, 1, args, 1,
            [](ggml_tensor * dst, int ith, int nth, void * data) {
                const auto & l = *(const layer *) data;
                l.owner->score(l, dst->src[0], ith, nth);
            },
            GGML_N_TASKS_MAX, &l);
    ggml_format_name(scored, "fresh_score-%d", il);

    args[0]              = scored;
    ggml_tensor * chosen = ggml_custom_4d(
            ctx, GGML_TYPE_F32, 1, 1, 1, 1, args, 1,
            [](ggml_tensor *, int ith, int, void * data) {
                if (ith > 0) { return; } // every thread comes here, whatever the number of tasks
                const auto & l = *(const layer *) data;
                for (auto & s : l.owner->sequences) {
                    if (s.n_visible) { l.owner->choose(l, s); }
                }
            },
            1, &l);
    ggml_format_name(chosen, "fresh_choose-%d", il);
    ggml_build_forward_expand(gf, chosen);
}

void kvf_fresh::score(const layer & l, const ggml_tensor * q, int ith, int nth) {
    static thread_local std::vector<float> keys; // of the common cells, of one head

    const uint32_t n_head = l.info.n_head, group = n_head / l.info.n_head_kv, d = l.info.n_embd_head_k;
    const uint32_t first = (uint64_t) n_head * ith / nth, last = (uint64_t) n_head * (ith + 1) / nth;

    for (auto & s : sequences) {
        if (!s.n_visible) { continue; }
        keys.resize(s.cells.size() * d);
        for (uint32_t h = first; h < last;) {
            if (h == first || h % group == 0) {
                for (size_t i = 0; i < s.cells.size(); ++i) {
                    kvf_to_float(l.info, h / group, (const char *) l.k->data + s.cells[i].second * l.k->nb[1],
                            keys.data() + i * d);
                }
            }
            const uint32_t n = h + 1 < last && (h + 1) % group ? 2 : 1; // of one head of keys
            score(l, s, q, keys.data(), h, n);
            h += n;
        }
    }
}

// 2 to the x, for x <= 0, to a part in 5,000: exponential() with a shorter polynomial, since shares are only compared
static inline __attribute__((always_inline)) lanes_f power_of_two(lanes_f x) {
    const lanes_f t     = x < -126.0f ? lanes_f{} - 126.0f : x;
    const lanes_i whole = __builtin_convertvector(t, lanes_i); // towards zero: what is left is in (-1, 0]
    const lanes_f f     = t - __builtin_convertvector(whole, lanes_f);
    const lanes_f p     = 1 + f * (0.69161f + f * (0.23139f + f * 0.03987f));
    return times_power(p, whole);
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

// the sum of exp(x - top) of n logits. x has room for whole vectors
KVF_CLONES
static float sum_all(float * x, uint32_t n, float top) {
    std::fill(x + n, x + GGML_PAD(n, LANES), -std::numeric_limits<float>::infinity());
    lanes_f all = {};
    for (uint32_t i = 0; i < n; i += LANES) {
        lanes_f a;
        memcpy(&a, x + i, sizeof(a));
        all += exponential(a - top);
    }
    return sum_lanes(all);
}

KVF_CLONES
static void add_scaled(const float * x, uint32_t n, float factor, float * sums) {
    for (uint32_t i = 0; i < n; ++i) {
        sums[i] += factor * x[i];
    }
}

// products of n keys [n][d] with a query
KVF_CLONES
static void dots(const float * keys, uint32_t n, uint32_t d, const float * q, float * res) {
    for (uint32_t i = 0; i < n; ++i, keys += d) {
        lanes_f  sum = {};
        uint32_t j   = 0;
        for (; j + LANES <= d; j += LANES) {
            lanes_f a, b;
            memcpy(&a, keys + j, sizeof(a));
            memcpy(&b, q + j, sizeof(b));
            sum += a * b;
        }
        float all = sum_lanes(sum);
        for (; j < d; ++j) {
            all += keys[j] * q[j];
        }
        res[i] = all;
    }
}

// shares of all units for n_q (1 or 2) query heads from `first` on, which have one head of keys, by the tokens that ask
void kvf_fresh::score(
        const layer & l, sequence & s, const ggml_tensor * q, const float * keys, uint32_t first, uint32_t n_q) {
    static thread_local kvf_index::logits  far[2];
    static thread_local std::vector<float> sums, near;

    const uint32_t d = l.info.n_embd_head_k, n_unit = s.n_unit(), n_cell = s.cells.size();
    const uint32_t head   = first / (l.info.n_head / l.info.n_head_kv);
    const auto     capped = [&](float x) { return l.cap > 0 ? l.cap * tanhf(x / l.cap) : x; };

    std::fill_n(s.shares.data() + (size_t) first * n_unit, (size_t) n_q * n_unit, 0.0f);
    sums.resize(n_unit);
    near.resize(GGML_PAD(n_cell, LANES));

    for (const auto & [row, pos] : s.asking) {
        const float * its[2];
        for (uint32_t i = 0; i < n_q; ++i) {
            its[i] = (const float *) ((const char *) q->data + (first + i) * q->nb[1] + row * q->nb[2]);
        }
        s.index[l.i].products(head, its, n_q, s.n, far);

        const uint32_t n_near =
                std::upper_bound(s.cells.begin(), s.cells.end(), std::make_pair(pos, INT32_MAX)) - s.cells.begin();
        for (uint32_t i = 0; i < n_q; ++i) {
            const auto &     x      = far[i];
            const uint8_t *  common = s.common.data();
            const uint16_t * of     = x.sums.data();
            float            top    = capped((x.base + x.unit * most_of(of, common, n_unit)) * l.scale);
            dots(keys, n_near, d, its[i], near.data());
            for (uint32_t j = 0; j < n_near; ++j) {
                near[j] = capped(near[j] * l.scale);
                top     = std::max(top, near[j]);
            }
            const float all = l.cap > 0
                                      ? sum_capped(of, common, n_unit, x, l.scale, l.cap, top, sums.data())
                                      : sum_units(of, common, n_unit, x.base * l.scale - top, x.unit * l.scale, sums.data());
            add_scaled(sums.data(), n_unit, 1 / (all + sum_all(near.data(), n_near, top)),
                    s.shares.data() + (size_t) (first + i) * n_unit);
        }
    }
}

// fill the slots that are to be seen, and exchange some of the guests for units that are more attended to
void kvf_fresh::choose(const layer & l, sequence & s) {
    static thread_local std::vector<float>    score;
    static thread_local std::vector<uint8_t>  taken;
    static thread_local std::vector<uint32_t> out, in;

    const uint32_t n_unit = s.n_unit();
    auto &         table  = s.tables[l.i];

    score.assign(n_unit, 0.0f);
    for (uint32_t h = 0; h < l.info.n_head; ++h) {
        add_scaled(s.shares.data() + (size_t) h * n_unit, n_unit, 1.0f, score.data());
    }

    taken = s.common;
    in.clear();
    for (uint32_t slot = 0; slot < table.size(); ++slot) {
        auto & unit = table[slot];
        if (slot >= s.n_visible || (unit >= 0 && s.common[unit])) { unit = -1; }
        if (unit >= 0) {
            taken[unit] = 1;
            in.push_back(slot);
        }
    }
    // if none is free, only those count that are better than a guest: a few
    const auto n_free = s.n_visible - in.size();
    float      least  = n_free ? -1 : std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < in.size() && !n_free; ++i) {
        least = std::min(least, score[table[in[i]]]);
    }
    out.clear();
    for (uint32_t u = 0; u < n_unit; ++u) {
        if (!taken[u] && score[u] > least) { out.push_back(u); }
    }

    // the best first; of equals the later one, as it is the nearer
    const auto better = [&](uint32_t a, uint32_t b) { return score[a] != score[b] ? score[a] > score[b] : a > b; };
    const auto n_best = std::min<size_t>(out.size(), n_free + n_exchange);
    std::partial_sort(out.begin(), out.begin() + n_best, out.end(), better);

    size_t next = 0;
    for (uint32_t slot = 0; slot < s.n_visible; ++slot) {
        if (table[slot] >= 0) { continue; }
        fetch(l, s, slot, out[next]);
        table[slot] = out[next++];
    }

    const auto n_go = std::min<size_t>(in.size(), n_best - next);
    std::partial_sort(
            in.begin(), in.begin() + n_go, in.end(), [&](uint32_t a, uint32_t b) { return better(table[b], table[a]); });
    for (size_t i = 0; i < n_go && score[out[next]] > score[table[in[i]]]; ++i, ++next) {
        fetch(l, s, in[i], out[next]);
        table[in[i]] = out[next];
    }
}

// copy a unit's rows of a layer from its record
void kvf_fresh::fetch(const layer & l, const sequence & s, uint32_t slot, uint32_t unit) {
    const uint32_t each = n_chunk / UNIT, part = unit % each, cell = cell_of(s, slot);
    const char *   rec = s.records[unit / each];

    const auto rows = [&](const ggml_tensor * t, size_t at) {
        const size_t size = UNIT * ggml_row_size(t->type, t->ne[0]);
        memcpy((char *) t->data + (size_t) cell / UNIT * size, rec + at + part * size, size);
    };
    rows(l.k, l.info.offs_k);
    if (l.v && !v_trans) { rows(l.v, l.info.offs_v); }
    for (int64_t i = 0; l.v && v_trans && i < l.v->ne[0]; ++i) {
        const size_t el = ggml_type_size(l.v->type);
        memcpy((char *) l.v->data + (i * n_cell + cell) * el, rec + l.info.offs_v + (i * n_chunk + part * UNIT) * el,
                UNIT * el);
    }
    n_fetched++;
}

//
// the C API
//

static kvf_fresh & fresh_of(llama_context * ctx, llama_seq_id seq) {
    kvf_check(ctx, "there is no context");
    auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    kvf_check(kv && llama_kvflash::fresh(*kv), "this context has no guests");
    kvf_check(seq >= 0 && (uint32_t) seq < llama_n_seq_max(ctx), "there is no such sequence");
    return *llama_kvflash::fresh(*kv);
}

static kvf_index & index_of(llama_context * ctx, llama_seq_id seq, uint32_t layer) {
    auto & s = fresh_of(ctx, seq).of(seq);
    kvf_check(layer < s.index.size(), "there is no such layer in the attention cache");
    return s.index[layer];
}

int kvf_index_fit(
        llama_context * ctx, llama_seq_id seq, uint32_t layer, const float * mean, const float * basis, const float * step) {
    return kvf_guard([&] {
        auto & index = index_of(ctx, seq, layer);
        kvf_check(mean && basis && step, "a mean, a basis and steps are needed");
        index.fit(mean, basis, step);
    });
}

int kvf_index_put(
        llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t first, const void * const * records, uint32_t n) {
    return kvf_guard([&] {
        auto & index = index_of(ctx, seq, layer);
        kvf_check(records, "records are needed");
        const auto &       kv      = *llama_kvflash::get_kv(ctx->get_memory());
        const auto         info    = llama_kvflash::layer(kv, layer);
        const uint32_t     n_chunk = llama_kvflash::n_chunk(kv);
        std::vector<float> keys((size_t) n_chunk * info.n_embd_k);
        for (uint32_t i = 0; i < n; ++i) {
            kvf_rows_to_float(info, n_chunk, (const char *) records[i] + info.offs_k, keys.data());
            index.put((first + i) * n_chunk, keys.data(), n_chunk);
        }
    });
}

int kvf_index_cover(llama_context * ctx, llama_seq_id seq, uint32_t first, const void * const * records, uint32_t n) {
    return kvf_guard([&] {
        auto & fresh = fresh_of(ctx, seq);
        auto & s     = fresh.of(seq);
        kvf_check(records && first * fresh.n_chunk == s.n, "the index goes on with other chunks");
        for (uint32_t i = 0; i < n; ++i) {
            s.records.push_back((const char *) records[i]);
        }
        s.n += n * fresh.n_chunk;
    });
}

int kvf_index_forget(llama_context * ctx, llama_seq_id seq) {
    return kvf_guard([&] { fresh_of(ctx, seq).truncate(seq, 0); });
}

int kvf_index_info(llama_context * ctx, llama_seq_id seq, struct kvf_index_info * info) {
    return kvf_guard([&] {
        auto & fresh = fresh_of(ctx, seq);
        auto & s     = fresh.of(seq);
        kvf_check(info, "room for the result is needed");
        *info = {};
        for (const auto & index : s.index) {
            info->bytes += index.size(s.n);
        }
        info->n         = s.n;
        info->n_block   = s.blocks.size();
        info->n_slot    = s.blocks.size() * (fresh.n_chunk / kvf_fresh::UNIT);
        info->n_fetched = fresh.n_fetched;
    });
}

int kvf_index_size(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, size_t * size) {
    return kvf_guard([&] {
        kvf_check(size, "room for the result is needed");
        *size = index_of(ctx, seq, layer).size(n);
    });
}

int kvf_index_get(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, void * dst, size_t size) {
    return kvf_guard([&] {
        const auto & index = index_of(ctx, seq, layer);
        kvf_check(n <= fresh_of(ctx, seq).of(seq).n, "there are fewer positions in the index");
        kvf_check(dst && size == index.size(n), "room for the index of a layer is needed");
        index.get(n, (char *) dst);
    });
}

int kvf_index_set(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, const void * src, size_t size) {
    return kvf_guard([&] {
        auto & index = index_of(ctx, seq, layer);
        kvf_check(src && size == index.size(n), "this is not the index of such a layer");
        index.set(n, (const char *) src);
    });
}

int kvf_set_guests(llama_context * ctx, llama_seq_id seq, uint32_t n, const int32_t * blocks) {
    return kvf_guard([&] { fresh_of(ctx, seq).resize(*llama_kvflash::get_kv(ctx->get_memory()), seq, n, blocks); });
}

int kvf_get_guests(
        llama_context * ctx, llama_seq_id seq, int32_t * blocks, uint32_t n_block, int32_t * units, size_t n_unit) {
    return kvf_guard([&] {
        const auto & s = fresh_of(ctx, seq).of(seq);
        kvf_check(blocks && units && n_block == s.blocks.size() && n_unit == s.tables.size() * s.tables[0].size(),
                "room for all guests is needed");
        std::copy(s.blocks.begin(), s.blocks.end(), blocks);
        for (const auto & table : s.tables) {
            units = std::copy(table.begin(), table.end(), units);
        }
    });
}

int kvf_place_guests(llama_context * ctx, llama_seq_id seq, const int32_t * units, size_t n_unit) {
    return kvf_guard([&] {
        auto &       fresh = fresh_of(ctx, seq);
        const auto & s     = fresh.of(seq);
        const size_t n     = s.tables[0].size();
        kvf_check(units && n_unit == s.tables.size() * n, "a unit for each slot of each layer is needed");
        for (uint32_t i = 0; i < s.tables.size(); ++i) {
            fresh.place(seq, i, units + i * n);
        }
    });
}
