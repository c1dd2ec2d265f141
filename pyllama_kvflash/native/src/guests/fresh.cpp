// guests and codes of all layers: blocks, cells, and the tokens of a ubatch that choose, see guests/fresh.h

#include "guests/fresh.h"
#include "api/args.h"
#include "coarse/codes.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <map>

namespace {

// keeps a graph with nodes for codes from being reused for a ubatch without codes, and the other way round
struct coarse_input : llm_graph_input_i {
    explicit coarse_input(const kvf_fresh & fresh) : fresh(fresh), there(fresh.has_coarse()), out(fresh.has_out()) {}

    void set_input(const llama_ubatch *) override {}
    bool can_reuse(const llm_graph_params &) override { return there == fresh.has_coarse() && out == fresh.has_out(); }

    const kvf_fresh & fresh;
    const bool        there, out;
};

} // namespace

kvf_fresh::kvf_fresh(const llama_kv_cache & kv, const params & p, std::shared_ptr<kvf_panes> panes) :
    n_chunk(llama_kvflash::n_chunk(kv)), n_cell(kv.get_size()), v_trans(llama_kvflash::v_trans(kv)), its(p),
    sequences(p.n_seq), panes(std::move(panes)), kv(kv) {
    for (uint32_t i = 0; i < llama_kvflash::n_layer(kv); ++i) {
        const auto info = llama_kvflash::layer(kv, i);
        const auto t    = llama_kvflash::tensors(kv, i);
        auto *     buf  = t.k->buffer;
        auto *     dev =
                ggml_backend_buffer_is_host(buf) ? nullptr : ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buf));
        layers.push_back({info, t.k, t.v, dev, llama_kvflash::soft_cap(kv), llama_kvflash::n_rot_k(kv), nullptr});
    }
    for (int32_t il = 0; il < (int32_t) LLAMA_MAX_LAYERS; ++il) {
        const int32_t i = llama_kvflash::read_by(kv, il);
        if (i >= 0) { of_model.resize(il + 1, -1), of_model[il] = i; }
    }

    std::map<ggml_backend_dev_t, kvf_chooser *> made;
    for (auto & l : layers) {
        auto & chooser = made[l.dev];
        if (!chooser) {
            auto found = kvf_gpu_coarse_chooser(*this, l.k->buffer, l.dev);
            if (!l.dev && !found) { found = kvf_coarse_chooser(*this); }
            if (!found) {
                throw kvf_failure(KVF_E_UNSUPPORTED,
                        "codes need a KV cache on the CPU or on a CUDA GPU, and this one is on another device");
            }
            chooser = found.get();
            choosers.push_back(std::move(found));
        }
        l.chooser = chooser;
    }
}

bool kvf_fresh::has_coarse() const {
    const auto covered = [](const sequence & s) { return s.n > 0; };
    // llama.cpp allocates memory for a graph before the first decode. it must suffice for these nodes
    return !begun || std::any_of(sequences.begin(), sequences.end(), covered);
}

bool kvf_fresh::has_out() const {
    for (size_t seq = 0; seq < sequences.size(); ++seq) {
        const uint32_t n = sequences[seq].n;
        if (n == 0) { continue; }
        const auto & cells = llama_kvflash::cells(kv, seq);
        const auto   is_in = [&](const auto & cell) { return cell.first < (llama_pos) n; };
        const size_t after = std::distance(cells.rbegin(), std::find_if(cells.rbegin(), cells.rend(), is_in));
        if (cells.size() - after < n) { return true; }
    }
    return false;
}

size_t kvf_fresh::size(uint32_t layer, uint32_t n) const { return kvf_coarse_size(layers[layer], its, n); }

ggml_tensor * kvf_fresh::blend(
        ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * cur, ggml_tensor * sinks, bool by_head, int32_t il) {
    if (!has_coarse()) { return cur; }
    const uint32_t i = of_model[il];
    return layers[i].chooser->blend(ctx, gf, q, scale, cur, sinks, by_head, il, i);
}

bool kvf_fresh::is_guest(uint32_t block) const {
    return std::any_of(sequences.begin(), sequences.end(),
            [&](const auto & s) { return std::find(s.blocks.begin(), s.blocks.end(), block) != s.blocks.end(); });
}

void kvf_fresh::truncate(llama_seq_id seq, uint32_t p) {
    auto & s = of(seq);
    if (p >= s.n) { return; }

    s.n = p / n_chunk * n_chunk;
    // a segment is encoded again if its means were computed from removed positions: then the codes are as if these had never
    // been there
    const auto of = [](uint32_t n) { return (n + kvf_codes::SEGMENT - 1) / kvf_codes::SEGMENT; };
    if (of(s.n) > 0 && s.known[of(s.n) - 1] > s.n) { s.n = (of(s.n) - 1) * kvf_codes::SEGMENT; }
    s.known.resize(of(s.n));
    s.records.resize(s.n / n_chunk);
    for (uint32_t i = 0; i < layers.size() && !s.blocks.empty(); ++i) {
        auto table = layers[i].chooser->table(seq, i);
        for (auto & unit : table) {
            if (unit >= (int32_t) s.n_unit()) { unit = -1; }
        }
        layers[i].chooser->set_table(seq, i, table.data(), false);
    }
}

void kvf_fresh::clear(llama_seq_id seq) {
    truncate(seq, 0);
    of(seq).blocks.clear();
}

void kvf_fresh::cover(llama_seq_id seq, const void * const * records, uint32_t n) {
    auto & s = of(seq);
    kvf_check(s.n + n * n_chunk <= GGML_PAD(its.n_ctx, n_chunk), "codes cannot exceed the context");
    for (uint32_t i = 0; i < n; ++i) {
        s.records.push_back((const char *) records[i]);
    }
    s.n += n * n_chunk;
    while (s.known.size() * kvf_codes::SEGMENT < s.n) {
        s.known.push_back(std::min<uint32_t>(s.n, (s.known.size() + 1) * kvf_codes::SEGMENT));
    }
    for (const auto & chooser : choosers) {
        chooser->cover(seq);
    }
}

void kvf_fresh::resize(llama_kv_cache & kv, llama_seq_id seq, uint32_t n, const int32_t * blocks) {
    auto & s    = of(seq);
    auto   want = s.blocks;
    want.resize(std::min<size_t>(n, want.size()));
    if (blocks) {
        want.assign(blocks, blocks + n);
        kvf_check(s.blocks.empty(), "blocks must be null for a sequence that already has guest blocks");
        for (const uint32_t b : want) {
            kvf_check(b < llama_kvflash::n_block(kv) && llama_kvflash::is_free(kv, b) &&
                              std::count(want.begin(), want.end(), b) == 1,
                    "blocks must be different free blocks");
        }
    }
    for (uint32_t b = 0; b < llama_kvflash::n_block(kv) && want.size() < n; ++b) {
        if (llama_kvflash::is_free(kv, b) && std::find(want.begin(), want.end(), b) == want.end()) { want.push_back(b); }
    }
    if (want.size() < n) { throw kvf_failure(KVF_E_NO_BLOCK, format("too few blocks are free for %u guest blocks", n)); }

    const uint32_t n_before = n_slot(s);
    s.blocks                = std::move(want);
    for (const auto & chooser : choosers) {
        chooser->keep(seq, std::min(n_before, n_slot(s)));
    }
    s.n_fill = std::min(s.n_fill, n_slot(s));
    if (!s.blocks.empty()) {
        const uint32_t last = *std::max_element(s.blocks.begin(), s.blocks.end());
        llama_kvflash::set_n_kv(kv, GGML_PAD((last + 1) * n_chunk, 256));
    }
}

void kvf_fresh::build(
        ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, int32_t il) {
    const uint32_t i = of_model[il];
    this->q          = q;
    this->scale      = scale;
    if (i == 0 && layers[0].info.il == il) { res->add_input(std::make_unique<coarse_input>(*this)); }
    if (has_coarse()) { layers[i].chooser->build(ctx, gf, res, q, scale, il, i); }
}

//
// a ubatch
//

void kvf_fresh::begin(const llama_kv_cache & kv, const llama_ubatch & ubatch) {
    begun = true;
    for (auto & s : sequences) {
        s.tokens.clear();
        s.pos.clear();
        s.asking.clear();
    }
    const bool coarse = has_coarse();
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        auto & s = of(ubatch.seq_id[i][0]);
        if (!s.blocks.empty() || coarse) {
            s.tokens.push_back(i);
            s.pos.push_back(ubatch.pos[i]);
        }
    }
    for (size_t seq = 0; seq < sequences.size(); ++seq) {
        auto & s = sequences[seq];
        s.n_fill = 0;
        if (s.tokens.empty()) { continue; }

        s.common.assign(s.n_unit(), 0);
        s.cells.clear();
        for (const auto & [pos, cell] : llama_kvflash::cells(kv, seq)) {
            s.cells.emplace_back(pos, cell);
            if (pos < (llama_pos) s.n) { s.common[pos / UNIT] = 1; }
        }
        const uint32_t n_out = std::count(s.common.begin(), s.common.end(), 0);
        s.n_fill             = std::min(n_out, n_slot(s));

        const uint32_t n = s.tokens.size(), n_asking = std::min(n, MOST_ASKING);
        for (uint32_t i = 0; i < n_asking; ++i) {
            const uint32_t row = s.tokens[(i + 1) * n / n_asking - 1];
            s.asking.emplace_back(row, ubatch.pos[row]);
        }
        for (const auto & chooser : choosers) {
            chooser->begin(seq);
        }
    }
}

template <typename T> void kvf_fresh::show(T * mask, int64_t n_kv) const {
    for (const auto & s : sequences) {
        for (const uint32_t i : s.tokens) {
            for (uint32_t slot = 0; slot < s.n_fill; ++slot) {
                std::fill_n(mask + i * n_kv + cell_of(s, slot), UNIT, T(0)); // 0: visible
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
// the C API
//

static kvf_fresh & fresh_of(llama_context * ctx, llama_seq_id seq) {
    kvf_check(ctx, "ctx must not be null");
    auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    kvf_check(kv && llama_kvflash::fresh(*kv), "this context has no codes: coarse_k is 0");
    kvf_check_seq(ctx, seq);
    return *llama_kvflash::fresh(*kv);
}

static kvf_fresh & idle_fresh_of(llama_context * ctx, llama_seq_id seq) {
    auto & fresh = fresh_of(ctx, seq);
    ctx->synchronize(); // a GPU may still be computing
    return fresh;
}

static const kvf_fresh::layer & layer_of(const kvf_fresh & fresh, uint32_t layer) {
    kvf_check(layer < fresh.layers.size(), "layer must be below kvf_n_layer()");
    return fresh.layers[layer];
}

int kvf_codes_put(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first,
        const void * const * records, uint32_t n) {
    return kvf_guard([&] {
        auto & fresh = fresh_of(ctx, seq);
        kvf_check(records, "records must not be null");
        kvf_check(layer + n_layer <= fresh.layers.size(), "layer + n_layer must not exceed kvf_n_layer()");
        for (const auto & chooser : fresh.choosers) {
            chooser->put(seq, layer, n_layer, first, records, n);
        }
    });
}

int kvf_codes_cover(llama_context * ctx, llama_seq_id seq, uint32_t first, const void * const * records, uint32_t n) {
    return kvf_guard([&] {
        auto & fresh = idle_fresh_of(ctx, seq);
        kvf_check(records && first * fresh.n_chunk == fresh.of(seq).n,
                "records must not be null; first must be the first chunk without codes");
        fresh.cover(seq, records, n);
    });
}

int kvf_codes_forget(llama_context * ctx, llama_seq_id seq) {
    return kvf_guard([&] { idle_fresh_of(ctx, seq).truncate(seq, 0); });
}

int kvf_codes_info(llama_context * ctx, llama_seq_id seq, struct kvf_codes_info * info) {
    return kvf_guard([&] {
        auto &       fresh = fresh_of(ctx, seq);
        const auto & s     = fresh.of(seq);
        kvf_check(info, "info must not be null");
        *info = {};
        for (uint32_t i = 0; i < fresh.layers.size(); ++i) {
            if (fresh.layers[i].chooser->device_bytes() == 0) { info->bytes += fresh.size(i, s.n); }
        }
        info->n       = s.n;
        info->n_known = s.known.empty() ? 0 : s.known.back();
        info->n_block = s.blocks.size();
        info->n_slot  = fresh.n_slot(s);
        for (const auto & chooser : fresh.choosers) {
            info->device_bytes += chooser->device_bytes();
        }
    });
}

int kvf_guests_fetched(llama_context * ctx, uint64_t * n) {
    return kvf_guard([&] {
        auto & fresh = fresh_of(ctx, 0);
        kvf_check(n, "n must not be null");
        *n = 0;
        for (const auto & chooser : fresh.choosers) {
            *n += chooser->n_fetched();
        }
    });
}

int kvf_codes_size(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, size_t * size) {
    return kvf_guard([&] {
        const auto & fresh = fresh_of(ctx, seq);
        kvf_check(size, "size must not be null");
        layer_of(fresh, layer);
        *size = fresh.size(layer, n);
    });
}

int kvf_codes_get(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, void * dst, size_t size) {
    return kvf_guard([&] {
        auto &       fresh = idle_fresh_of(ctx, seq);
        const auto & l     = layer_of(fresh, layer);
        kvf_check(n <= fresh.of(seq).n, "n must not exceed the number of positions with codes");
        kvf_check(dst && size == fresh.size(layer, n), "dst must not be null; size must be that of kvf_codes_size()");
        l.chooser->get(seq, layer, n, (char *) dst);
    });
}

int kvf_codes_set(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, const void * src, size_t size) {
    return kvf_guard([&] {
        auto &       fresh = fresh_of(ctx, seq); // no need to wait: nothing computes with codes until they are covered
        const auto & l     = layer_of(fresh, layer);
        kvf_check(src && size == fresh.size(layer, n), "src must not be null; size must be that of kvf_codes_size()");
        l.chooser->set(seq, layer, n, (const char *) src);
    });
}

int kvf_set_guests(llama_context * ctx, llama_seq_id seq, uint32_t n, const int32_t * blocks) {
    return kvf_guard([&] { idle_fresh_of(ctx, seq).resize(*llama_kvflash::get_kv(ctx->get_memory()), seq, n, blocks); });
}

int kvf_get_guests(
        llama_context * ctx, llama_seq_id seq, int32_t * blocks, uint32_t n_block, int32_t * units, size_t n_unit) {
    return kvf_guard([&] {
        auto &         fresh = idle_fresh_of(ctx, seq);
        const auto &   s     = fresh.of(seq);
        const uint32_t n     = fresh.n_slot(s);
        kvf_check(blocks && units && n_block == s.blocks.size() && n_unit == fresh.layers.size() * n,
                "blocks must hold n_block values, and units n_layer*n_slot");
        std::copy(s.blocks.begin(), s.blocks.end(), blocks);
        for (uint32_t i = 0; i < fresh.layers.size() && n; ++i, units += n) {
            std::copy_n(fresh.layers[i].chooser->table(seq, i).begin(), n, units);
        }
    });
}

int kvf_place_guests(llama_context * ctx, llama_seq_id seq, const int32_t * units, size_t n_unit) {
    return kvf_guard([&] {
        auto &         fresh = idle_fresh_of(ctx, seq);
        auto &         s     = fresh.of(seq);
        const uint32_t n     = fresh.n_slot(s);
        kvf_check(units && n_unit == fresh.layers.size() * n, "units must hold n_layer*n_slot values");
        kvf_check(std::all_of(units, units + n_unit, [&](int32_t u) { return u >= -1 && u < (int32_t) s.n_unit(); }),
                "a unit must be -1 or have codes");
        for (uint32_t i = 0; i < fresh.layers.size(); ++i) {
            fresh.layers[i].chooser->set_table(seq, i, units + (size_t) i * n, true);
        }
    });
}
