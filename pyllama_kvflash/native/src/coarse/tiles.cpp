// the tasks: attention to tiles of codes and of pool cells, see coarse/coarse.h

#include "coarse/coarse.h"

#include <algorithm>
#include <cmath>

static constexpr uint32_t UNIT   = kvf_fresh::UNIT;
static constexpr float    UNSEEN = 1.0f / 32; // at most this share of a query's attention may use mean values

void kvf_coarse_on_cpu::prepare(
        const work & w, const ggml_tensor * q_all, uint32_t head, uint32_t batch, queries & res) const {
    const auto &   codes_k = codes[w.seq][w.layer].keys();
    const uint32_t d = codes_k.d, width = codes_k.width, first = batch * KVF_MOST_Q;

    res.set   = true;
    res.head  = head;
    res.batch = batch;
    res.n     = std::min(KVF_MOST_Q, w.n_query() - first);
    res.plain.assign((size_t) KVF_MOST_Q * width, 0.0f);
    res.rotated.resize((size_t) res.n * width);
    res.bytes.resize((size_t) res.n * width);

    kvf_lanes x(width);
    for (uint32_t j = 0; j < res.n; ++j) {
        const uint32_t query = first + j, row = w.rows[query / w.group];
        const auto * from = (const float *) ((const char *) q_all->data + (head * w.group + query % w.group) * q_all->nb[1] +
                                             row * q_all->nb[2]);
        std::copy_n(from, d, res.plain.data() + (size_t) j * width);
        for (uint32_t i = 0; i < d; ++i) {
            x[i][j] = from[i];
        }
    }
    codes_k.rotate_query(head, x.data());
    for (uint32_t j = 0; j < res.n; ++j) {
        float *  rotated = res.rotated.data() + (size_t) j * width;
        int8_t * bytes   = res.bytes.data() + (size_t) j * width;
        for (uint32_t i = 0; i < width; ++i) {
            rotated[i] = x[i][j];
        }
        res.unit[j] = kvf_query_bytes(rotated, width, bytes);
        int32_t sum = 0;
        for (uint32_t i = 0; i < width; ++i) {
            sum += bytes[i];
        }
        res.middle[j] = codes_k.middle() * sum;
    }
}

// compute the weights of a tile's positions [q.n][KVF_TILE], relative to the top of each query, and the sums of its units
void kvf_coarse_on_cpu::weigh_tile(const work & w, const node & at, uint32_t head, uint32_t tile, const queries & q,
        float * weights, float * const * sums, float * tops) const {
    static thread_local kvf_aligned<int32_t> products(KVF_TILE_UNITS * KVF_MOST_Q * LANES);
    static thread_local kvf_aligned<float>   scales(KVF_TILE);

    const auto &   k     = codes[w.seq][w.layer].keys();
    const uint32_t first = tile * KVF_TILE_UNITS, n_unit = std::min(KVF_TILE_UNITS, w.s->n_unit() - first);
    const uint32_t segment = tile * KVF_TILE / kvf_codes::SEGMENT;
    const float    cap     = fresh.layers[w.layer].cap;

    if (!k.is_exact()) {
        k.key_products(head, first, n_unit, q.bytes.data(), q.n, products.data());
        kvf_scales_of(k.scale(first, head), n_unit * UNIT, scales.data());
    }
    for (uint32_t j = 0; j < q.n; ++j) {
        const float * rotated = q.rotated.data() + (size_t) j * k.width;
        float *       x       = weights + (size_t) j * KVF_TILE;
        const float   base    = kvf_dot(rotated, k.mean(segment, head), k.width) * at.scale;
        if (k.is_exact()) {
            k.exact_products(head, first, n_unit, rotated, x);
            tops[j] = kvf_plain_logits(x, n_unit, at.scale, base, cap);
        } else {
            tops[j] = kvf_logits(products.data() + (size_t) j * LANES, q.n, scales.data(), n_unit, q.middle[j],
                    q.unit[j] * at.scale, base, cap, x);
        }
        kvf_weigh(x, n_unit, tops[j], sums[j]);
    }
}

void kvf_coarse_on_cpu::far(const work & w, const node & at, uint32_t head, uint32_t tile, const queries & q, part * parts) {
    static thread_local kvf_aligned<float> room(KVF_MOST_Q * KVF_TILE), unused(KVF_MOST_Q * KVF_TILE_UNITS);

    auto &         o     = own[w.seq];
    const auto &   v     = codes[w.seq][w.layer].values();
    const uint32_t first = tile * KVF_TILE_UNITS, n_unit = std::min(KVF_TILE_UNITS, w.s->n_unit() - first);
    const uint32_t first_q = q.batch * KVF_MOST_Q;

    float *sums[KVF_MOST_Q], tops[KVF_MOST_Q], factors[KVF_MOST_Q];
    for (uint32_t j = 0; j < q.n; ++j) {
        const bool asks = w.asking[(first_q + j) / w.group] >= 0;
        sums[j]         = asks ? o.sums.data() + shares_at(w, head, first_q + j) * w.s->n_unit() + first
                               : unused.data() + (size_t) j * KVF_TILE_UNITS;
    }
    // with keeps, the choosing pass computes the weights, and the attending pass reads them
    float * weights =
            w.keeps ? o.kept.data() + (((size_t) head * w.n_batch + q.batch) * w.n_far + tile) * KVF_MOST_Q * KVF_TILE
                    : room.data();
    if (!w.keeps || !w.attends) {
        weigh_tile(w, at, head, tile, q, weights, sums, tops);
        for (uint32_t j = 0; j < q.n; ++j) {
            if (w.asking[(first_q + j) / w.group] >= 0) {
                o.tops[shares_at(w, head, first_q + j) * w.n_far + tile] = tops[j];
            }
        }
    }
    for (uint32_t j = 0; j < q.n; ++j) {
        if (w.keeps) { tops[j] = o.tops[shares_at(w, head, first_q + j) * w.n_far + tile]; }
        // rescale the running sums to the larger maximum
        auto &      p    = parts[j];
        const float most = std::max(p.top(), tops[j]), its = kvf_dot(sums[j], w.open.data() + first, n_unit);
        factors[j] = expf(tops[j] - most);
        if (p.top() < most) { kvf_scale_by(p.at + 1, 1 + width, expf(p.top() - most)); }
        p.top() = most;
        p.sum() += its * factors[j];
        if (w.attends) {
            kvf_add_times(p.values(), v.mean(tile * KVF_TILE / kvf_codes::SEGMENT, head), v.width, its * factors[j]);
        }
    }
    if (!w.attends) { return; }

    // for each group of KVF_SUM_UNITS units, find the queries that need its values; for the others, the mean added above is
    // enough. only with keeps are the sums of all weights known by now, so otherwise all queries take the values
    constexpr uint32_t n_group = KVF_TILE_UNITS / KVF_SUM_UNITS;
    seeing             who[n_group];
    const float        unseen = UNSEEN * KVF_SUM_UNITS / w.s->n_unit();
    for (uint32_t j = 0; j < q.n; ++j) {
        const float share = w.keeps ? expf(tops[j] - o.all[head * w.group + first_q + j]) : 0;
        for (uint32_t g = 0; g * KVF_SUM_UNITS < n_unit; ++g) {
            const uint32_t u = g * KVF_SUM_UNITS, n = std::min(KVF_SUM_UNITS, n_unit - u);
            if (!w.keeps || kvf_dot(sums[j] + u, w.open.data() + first + u, n) * share > unseen) { who[g].add(j); }
        }
    }
    for (uint32_t g = 0; g * KVF_SUM_UNITS < n_unit; ++g) {
        if (who[g].n == 0) { continue; }
        const uint32_t u = g * KVF_SUM_UNITS, n = std::min(KVF_SUM_UNITS, n_unit - u);
        add_values(w, head, first + u, n, who[g], weights + (size_t) u * UNIT, factors, parts);
    }
}

// add the weighted values of at most KVF_SUM_UNITS units
void kvf_coarse_on_cpu::add_values(const work & w, uint32_t head, uint32_t first, uint32_t n, const seeing & who,
        const float * weights, const float * factors, part * parts) const {
    static thread_local kvf_aligned<int8_t>  bytes(KVF_SUM_UNITS * KVF_MOST_Q * 64);
    static thread_local kvf_aligned<int32_t> sums;
    static thread_local kvf_aligned<float>   scales(KVF_SUM_UNITS * UNIT);

    const auto & v    = codes[w.seq][w.layer].values();
    const auto * open = w.open.data() + first;
    if (v.is_exact()) {
        for (uint32_t i = 0; i < n * who.n; ++i) {
            const uint32_t u = i / who.n, j = who.its[i % who.n];
            if (open[u] > 0) {
                v.exact_sum(head, first + u, weights + j * KVF_TILE + u * UNIT, factors[j], parts[j].values());
            }
        }
        return;
    }
    kvf_scales_of(v.scale(first, head), n * UNIT, scales.data());
    float   worth[KVF_MOST_Q], all = 0;
    int32_t sum[KVF_MOST_Q];
    for (uint32_t i = 0; i < who.n; ++i) {
        worth[i] = kvf_weight_bytes(weights + (size_t) who.its[i] * KVF_TILE, scales.data(), open, n, who.n,
                bytes.data() + (size_t) i * 64, sum[i]);
        all += worth[i];
    }
    if (all == 0) { return; } // the pool has all of these units

    sums.resize((size_t) KVF_MOST_Q * v.width);
    v.value_sums(head, first, n, bytes.data(), who.n, sums.data());
    for (uint32_t i = 0; i < who.n; ++i) {
        const uint32_t j = who.its[i];
        kvf_add_sums(
                parts[j].values(), sums.data() + (size_t) i * v.width, v.width, worth[i] * factors[j], v.middle() * sum[i]);
    }
}

void kvf_coarse_on_cpu::near(
        const work & w, const node & at, uint32_t head, uint32_t tile, const queries & q, part * parts) {
    static thread_local kvf_aligned<float> keys, products(KVF_MOST_Q * KVF_TILE);

    const auto &   l = fresh.layers[w.layer];
    const auto &   s = *w.s;
    const uint32_t d = l.info.n_embd_head_k, first = tile * KVF_TILE;
    const uint32_t n = std::min(KVF_TILE, w.n_cell - first);

    for (uint32_t j = 0; j < q.n && w.attends && w.keeps && tile == 0; ++j) {
        const float * kept = own[w.seq].near.data() + 2 * (head * w.group + q.batch * KVF_MOST_Q + j);
        parts[j].top()     = kept[0];
        parts[j].sum()     = kept[1];
    }
    const int32_t * cells = w.cells.data() + first;
    if (l.k->type == GGML_TYPE_F16) {
        kvf_half_dots((const uint16_t *) l.k->data + (size_t) head * d, l.info.n_embd_k, cells, n, d, q.plain.data(), q.n,
                products.data());
    } else {
        keys.resize((size_t) KVF_TILE * d);
        kvf_heads_to_float(l.info, head, l.k->data, cells, n, keys.data());
        kvf_dots(keys.data(), n, d, q.plain.data(), q.n, products.data());
    }
    for (uint32_t j = 0; j < q.n; ++j) {
        // a query sees common cells up to its own position, and every guest
        const llama_pos pos = w.pos[(q.batch * KVF_MOST_Q + j) / w.group];
        const uint32_t  end =
                std::upper_bound(s.cells.begin(), s.cells.end(), std::make_pair(pos, INT32_MAX)) - s.cells.begin();
        float *        x    = products.data() + (size_t) j * KVF_TILE;
        const uint32_t from = std::max(end, first), to = std::min(first + n, w.n_common);
        if (from < to) { std::fill(x + from - first, x + to - first, KVF_NONE); }
        std::fill(x + n, x + GGML_PAD(n, LANES), KVF_NONE); // pad to whole vectors
        const float top = kvf_plain_logits(x, GGML_PAD(n, LANES) / LANES, at.scale, 0, l.cap);
        if (top == KVF_NONE) { continue; }
        auto &      p    = parts[j];
        const float most = std::max(top, p.top());
        p.sum()          = (p.sum() > 0 ? p.sum() * expf(p.top() - most) : 0) + kvf_sum_weights(x, GGML_PAD(n, LANES), most);
        p.top()          = most;
    }
}
