// serialise the sliding-window cache of a sequence with its cell indices: upstream's sequence state re-packs the cells, and
// later results would round differently
//
// little endian: kvf_window, n_cell cells of kvf_window_cell, and for each layer in order, the K rows and the V rows of the
// cells

#include "pool/impl.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <vector>

struct kvf_window {
    uint32_t magic; // "KVFW"
    uint32_t version;
    uint32_t size; // cells of the cache
    uint32_t head; // where the search for free cells begins
    uint32_t n_cell;
    uint32_t n_layer;
    uint32_t v_trans;
    uint32_t row_bytes; // size of a cell in all layers
};

struct kvf_window_cell {
    uint32_t          idx;
    llama_pos         pos;
    llama_kv_cell_ext ext;
};

static_assert(sizeof(kvf_window) == 32 && sizeof(kvf_window_cell) == 20, "the window's layout is a file format");

static constexpr uint32_t MAGIC   = 0x5746564bu;
static constexpr uint32_t VERSION = 1;

// the bytes of a cell in a tensor, transposed or not
static size_t cell_bytes(const ggml_tensor * t) { return t ? ggml_row_size(t->type, t->ne[0]) : 0; }

// a cell of the cache, and its place in the blob
struct kvf_window_place {
    uint32_t idx;
    uint32_t at;
};

// call f for each contiguous run of cells with its offset in the tensor, its offset in the blob (of n_cell cells), and its
// size. columns: the tensor is transposed
template <typename F>
static void each_run(const ggml_tensor * t, bool columns, uint32_t size, uint32_t n_cell,
        const std::vector<kvf_window_place> & places, F && f) {
    const size_t n_col = columns ? t->ne[0] : 1;
    const size_t el    = columns ? ggml_type_size(t->type) : cell_bytes(t);

    for (size_t c = 0; c < n_col; ++c) {
        for (size_t i = 0; i < places.size();) {
            const auto & p = places[i];

            size_t n = 1;
            while (i + n < places.size() && places[i + n].idx == p.idx + n && places[i + n].at == p.at + n) {
                n++;
            }

            f((c * size + p.idx) * el, (c * n_cell + p.at) * el, n * el);
            i += n;
        }
    }
}

kvf_window llama_kvflash::window_head(const llama_kv_cache & kv, llama_seq_id seq) {
    if (kv.v_cells.size() != 1) {
        throw kvf_failure(
                KVF_E_UNSUPPORTED, "the sliding-window cache has a separate stream for each sequence; set kv_unified");
    }

    kvf_window res = {};
    res.magic      = MAGIC;
    res.version    = VERSION;
    res.size       = kv.get_size();
    res.head       = kv.v_heads[0];
    res.n_layer    = kv.layers.size();
    res.v_trans    = kv.v_trans;

    for (const auto & layer : kv.layers) {
        res.row_bytes += cell_bytes(layer.k) + cell_bytes(layer.v);
    }
    for (uint32_t i = 0; i < kv.get_size(); ++i) {
        res.n_cell += !kv.v_cells[0].is_empty(i) && kv.v_cells[0].seq_has(i, seq);
    }

    return res;
}

size_t llama_kvflash::window_size(const llama_kv_cache & kv, llama_seq_id seq) {
    const auto head = window_head(kv, seq);

    return sizeof(head) + head.n_cell * (sizeof(kvf_window_cell) + (size_t) head.row_bytes);
}

void llama_kvflash::window_get(llama_context * ctx, const llama_kv_cache & kv, llama_seq_id seq, void * dst, size_t size) {
    kvf_check(size == window_size(kv, seq), "size must be that of kvf_partial_size()");
    ctx->synchronize();

    const auto head = window_head(kv, seq);

    auto * out = (uint8_t *) dst;
    memcpy(out, &head, sizeof(head));
    out += sizeof(head);

    std::vector<kvf_window_place> places;
    for (const auto & cell : window_cells(kv, seq)) {
        memcpy(out, &cell, sizeof(cell));
        out += sizeof(cell);
        places.push_back({cell.idx, (uint32_t) places.size()});
    }

    const auto rows = [&](const ggml_tensor * t, bool columns) {
        if (!t) { return; }
        each_run(t, columns, kv.get_size(), head.n_cell, places,
                [&](size_t at, size_t to, size_t n) { ggml_backend_tensor_get(t, out + to, at, n); });
        out += cell_bytes(t) * head.n_cell;
    };
    for (const auto & layer : kv.layers) {
        rows(layer.k, false);
        rows(layer.v, kv.v_trans);
    }
}

std::vector<kvf_window_cell> llama_kvflash::window_cells(const llama_kv_cache & kv, llama_seq_id seq) {
    const auto & cells = kv.v_cells[0];

    std::vector<kvf_window_cell> res;
    for (uint32_t i = 0; i < kv.get_size(); ++i) {
        if (!cells.is_empty(i) && cells.seq_has(i, seq)) { res.push_back({i, cells.pos_get(i), cells.ext_get(i)}); }
    }
    return res;
}

// choose where to restore the saved cells: at their own indices if these are free, otherwise in the first free cells. if
// cells move, or several sequences share the cache, cells outside the window of the next position are left out
std::vector<kvf_window_place> llama_kvflash::window_places(
        const llama_kv_cache & kv, const kvf_window & head, const std::vector<kvf_window_cell> & saved) {
    const auto & cells = kv.v_cells[0];

    llama_pos last = -1;
    for (const auto & cell : saved) {
        last = std::max(last, cell.pos);
    }
    const auto is_dead = [&](const kvf_window_cell & cell) {
        return llama_hparams::is_masked_swa(kv.n_swa, kv.swa_type, cell.pos, last + 1);
    };

    std::vector<kvf_window_place> res;

    bool own = head.size == kv.get_size();
    for (uint32_t i = 0; i < saved.size(); ++i) {
        const uint32_t idx = saved[i].idx;
        if (kv.n_seq_max > 1 && is_dead(saved[i])) { continue; }

        own = own && idx < kv.get_size() && cells.is_empty(idx) && (res.empty() || idx > res.back().idx);
        if (own) { res.push_back({idx, i}); }
    }
    if (own) { return res; }

    res.clear();

    uint32_t idx = 0;
    for (uint32_t i = 0; i < saved.size(); ++i) {
        if (is_dead(saved[i])) { continue; }
        while (idx < kv.get_size() && !cells.is_empty(idx)) {
            idx++;
        }
        if (idx == kv.get_size()) { throw kvf_failure(KVF_E_STATE, "the sliding-window cache has no room for the state"); }
        res.push_back({idx++, i});
    }

    return res;
}

void llama_kvflash::window_set(llama_context * ctx, llama_kv_cache & kv, llama_seq_id seq, const void * src, size_t size) {
    const auto want = window_head(kv, seq);

    kvf_window head;
    if (size < sizeof(head)) { throw kvf_failure(KVF_E_RECORD, "this is not a state of a sliding window"); }
    memcpy(&head, src, sizeof(head));

    const auto * in = (const uint8_t *) src + sizeof(head);
    if (head.magic != MAGIC || head.version != VERSION || head.n_layer != want.n_layer || head.v_trans != want.v_trans ||
            head.row_bytes != want.row_bytes ||
            size != sizeof(head) + head.n_cell * (sizeof(kvf_window_cell) + (size_t) head.row_bytes)) {
        throw kvf_failure(KVF_E_RECORD, "this is not a state of this model's sliding window and cache types");
    }

    std::vector<kvf_window_cell> saved(head.n_cell);
    if (head.n_cell) { memcpy(saved.data(), in, head.n_cell * sizeof(kvf_window_cell)); }
    in += head.n_cell * sizeof(kvf_window_cell);
    for (const auto & cell : saved) {
        if (cell.pos < 0) { throw kvf_failure(KVF_E_RECORD, "a cell of the sliding window has no position"); }
    }

    ctx->synchronize();
    kv.seq_rm(seq, -1, -1);

    const auto places = window_places(kv, head, saved);

    const auto rows = [&](ggml_tensor * t, bool columns) {
        if (!t) { return; }
        each_run(t, columns, kv.get_size(), head.n_cell, places,
                [&](size_t at, size_t from, size_t n) { ggml_backend_tensor_set(t, in + from, at, n); });
        in += cell_bytes(t) * head.n_cell;
    };
    for (const auto & layer : kv.layers) {
        rows(layer.k, false);
        rows(layer.v, kv.v_trans);
    }

    window_occupy(kv, head, seq, saved, places);
}

void llama_kvflash::window_copy(
        llama_context * from, const llama_kv_cache & src, llama_context * to, llama_kv_cache & dst, llama_seq_id seq) {
    const auto head = window_head(src, seq), want = window_head(dst, seq);
    kvf_check(head.n_layer == want.n_layer && head.v_trans == want.v_trans && head.row_bytes == want.row_bytes,
            "the layers or cache types of the two contexts differ");
    from->synchronize();
    to->synchronize();
    dst.seq_rm(seq, -1, -1);

    const auto saved  = window_cells(src, seq);
    const auto places = window_places(dst, head, saved);

    auto across = places; // the source is the other cache instead of a blob
    for (auto & p : across) {
        p.at = saved[p.at].idx;
    }
    const auto rows = [&](const ggml_tensor * s, ggml_tensor * d, bool columns) {
        if (!d) { return; }
        each_run(d, columns, dst.get_size(), src.get_size(), across, [&](size_t at, size_t of, size_t n) {
            ggml_tensor its = kvf_bytes(s, of, n), own = kvf_bytes(d, at, n);
            ggml_backend_tensor_copy(&its, &own);
        });
    };
    for (size_t i = 0; i < dst.layers.size(); ++i) {
        rows(src.layers[i].k, dst.layers[i].k, false);
        rows(src.layers[i].v, dst.layers[i].v, dst.v_trans);
    }

    window_occupy(dst, head, seq, saved, places);
}

void llama_kvflash::window_occupy(llama_kv_cache & kv, const kvf_window & head, llama_seq_id seq,
        const std::vector<kvf_window_cell> & saved, const std::vector<kvf_window_place> & places) {
    auto & cells = kv.v_cells[0];

    for (const auto & p : places) {
        cells.pos_set(p.idx, saved[p.at].pos);
        cells.ext_set(p.idx, saved[p.at].ext);
        cells.seq_add(p.idx, seq);
    }
    if (head.size == kv.get_size() && head.head <= kv.get_size() && cells.get_used() == places.size()) {
        kv.v_heads[0] = head.head;
    }
}
