// guests of layers in host memory, see guests/slots.h

#include "guests/slots.h"

#include <algorithm>
#include <cstring>
#include <limits>

kvf_host_chooser::kvf_host_chooser(kvf_fresh & fresh) :
    fresh(fresh), tables(fresh.sequences.size(), std::vector<std::vector<int32_t>>(fresh.layers.size())) {}

void kvf_host_chooser::keep(llama_seq_id seq, uint32_t n) {
    for (auto & table : tables[seq]) {
        table.resize(std::min<size_t>(n, table.size()));
        table.resize(fresh.n_slot(fresh.of(seq)), -1);
    }
}

void kvf_host_chooser::set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetching) {
    const auto & s     = fresh.of(seq);
    auto &       table = tables[seq][layer];
    table.assign(fresh.n_slot(s), -1);
    for (uint32_t slot = 0; slot < table.size(); ++slot) {
        if (fetching && units[slot] >= 0) { fetch(layer, s, slot, units[slot]); }
        table[slot] = units[slot];
    }
}

void kvf_host_chooser::choose(llama_seq_id seq, uint32_t i_layer, const std::vector<float> & score) {
    static thread_local std::vector<uint8_t>  taken;
    static thread_local std::vector<uint32_t> out, in;

    const auto &   s      = fresh.of(seq);
    const uint32_t n_unit = s.n_unit();
    auto &         table  = tables[seq][i_layer];

    taken = s.common;
    in.clear();
    for (uint32_t slot = 0; slot < table.size(); ++slot) {
        auto & unit = table[slot];
        if (slot >= s.n_fill || (unit >= 0 && s.common[unit])) { unit = -1; }
        if (unit >= 0) {
            taken[unit] = 1;
            in.push_back(slot);
        }
    }
    // free slots are filled; if there are none, guests are exchanged. only the few units that beat the worst guest count
    // then
    const auto n_free = s.n_fill - in.size();
    float      least  = n_free ? -1 : std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < in.size() && !n_free; ++i) {
        least = std::min(least, score[table[in[i]]]);
    }
    out.clear();
    for (uint32_t u = 0; u < n_unit; ++u) {
        if (!taken[u] && score[u] > least) { out.push_back(u); }
    }

    // the best unit first. among equals the later one is better, because it is nearer
    const auto better = [&](uint32_t a, uint32_t b) { return score[a] != score[b] ? score[a] > score[b] : a > b; };
    const auto n_best = std::min<size_t>(out.size(), n_free ? n_free : fresh.its.n_exchange);
    std::partial_sort(out.begin(), out.begin() + n_best, out.end(), better);

    size_t     next = 0;
    const auto take = [&](uint32_t slot) {
        chosen.push_back({seq, slot, out[next++]});
        table[slot] = -1;
    };
    for (uint32_t slot = 0; slot < s.n_fill; ++slot) {
        if (table[slot] < 0) { take(slot); }
    }

    const auto n_go = std::min<size_t>(in.size(), n_best - next);
    std::partial_sort(
            in.begin(), in.begin() + n_go, in.end(), [&](uint32_t a, uint32_t b) { return better(table[b], table[a]); });
    for (size_t i = 0; i < n_go && score[out[next]] > score[table[in[i]]]; ++i) {
        take(in[i]);
    }
}

void kvf_host_chooser::fetch_chosen(uint32_t i_layer, int ith, int nth) {
    for (size_t i = ith; i < chosen.size(); i += nth) {
        const auto & [seq, slot, unit] = chosen[i];
        fetch(i_layer, fresh.of(seq), slot, unit);
        tables[seq][i_layer][slot] = unit;
    }
}

// copy a unit's rows of a layer from its record
void kvf_host_chooser::fetch(uint32_t i_layer, const kvf_fresh::sequence & s, uint32_t slot, uint32_t unit) {
    constexpr uint32_t UNIT = kvf_fresh::UNIT;

    const auto &   l    = fresh.layers[i_layer];
    const uint32_t each = fresh.n_chunk / UNIT, part = unit % each, cell = fresh.cell_of(s, slot);
    const char *   rec = s.records[unit / each];

    const auto rows = [&](const ggml_tensor * t, size_t at) {
        const size_t size = UNIT * ggml_row_size(t->type, t->ne[0]);
        memcpy((char *) t->data + (size_t) cell / UNIT * size, rec + at + part * size, size);
    };
    rows(l.k, l.info.offs_k);
    if (l.v && !fresh.v_trans) { rows(l.v, l.info.offs_v); }
    for (int64_t i = 0; l.v && fresh.v_trans && i < l.v->ne[0]; ++i) {
        const size_t el = ggml_type_size(l.v->type);
        memcpy((char *) l.v->data + (i * fresh.n_cell + cell) * el,
                rec + l.info.offs_v + (i * fresh.n_chunk + part * UNIT) * el, UNIT * el);
    }
    fetched++;
}
