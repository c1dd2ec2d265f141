// guests: which blocks and cells they have, and what a ubatch asks, see kvflash-fresh.h

#include "kvflash-fresh.h"
#include "kvflash-args.h"

#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"

#include <algorithm>
#include <map>

kvf_fresh::kvf_fresh(const llama_kv_cache & kv, const params & p) :
    n_chunk(llama_kvflash::n_chunk(kv)), n_cell(kv.get_size()), v_trans(llama_kvflash::v_trans(kv)), its(p),
    sequences(p.n_seq), kv(kv) {
    for (uint32_t i = 0; i < llama_kvflash::n_layer(kv); ++i) {
        const auto info = llama_kvflash::layer(kv, i);
        const auto t    = llama_kvflash::tensors(kv, i);
        layers.push_back({info, t.k, t.v, llama_kvflash::soft_cap(kv), llama_kvflash::n_rot_k(kv), nullptr});
    }
    for (int32_t il = 0; il < (int32_t) LLAMA_MAX_LAYERS; ++il) {
        const int32_t i = llama_kvflash::read_by(kv, il);
        if (i >= 0) { of_model.resize(il + 1, -1), of_model[il] = i; }
    }

    std::map<ggml_backend_dev_t, kvf_chooser *> made; // null: the CPU
    for (auto & l : layers) {
        auto * buf = l.k->buffer;
        auto * dev =
                ggml_backend_buffer_is_host(buf) ? nullptr : ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buf));
        auto & chooser = made[dev];
        if (!chooser) {
            auto found = its.coarse_k ? kvf_gpu_coarse_chooser(*this, buf) : kvf_make_gpu_chooser(*this, buf);
            if (!dev && !found) { found = its.coarse_k ? kvf_coarse_chooser(*this) : kvf_cpu_chooser(*this); }
            choosers.push_back(std::move(found));
            chooser = choosers.back().get();
            if (!chooser) {
                throw kvf_failure(KVF_E_UNSUPPORTED,
                        its.coarse_k ? "codes of all positions are kept by the CPU or by CUDA, and the KV cache is on "
                                       "another device"
                                     : "layers choose on the CPU or by CUDA, and the KV cache is on another device");
            }
        }
        l.chooser = chooser;
    }
    waits.assign(layers.size(), its.ahead != AHEAD_ALWAYS);
}

void kvf_chooser::moments(uint32_t, const void * const *, uint32_t, float *, float *) {
    throw kvf_failure(KVF_E_UNSUPPORTED, "codes have no principal components");
}

void kvf_chooser::fit(llama_seq_id, uint32_t, const float *, const float *, const float *) {
    throw kvf_failure(KVF_E_UNSUPPORTED, "codes have no basis");
}

bool kvf_fresh::has_coarse() const {
    const auto covered = [](const sequence & s) { return s.n > 0; };
    // memory for a graph is taken before anything is decoded: it is for one with these nodes
    return its.coarse_k && (!begun || std::any_of(sequences.begin(), sequences.end(), covered));
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

size_t kvf_fresh::size(uint32_t layer, uint32_t n) const {
    return its.coarse_k ? kvf_coarse_size(layers[layer], its, n) : kvf_index::size(layers[layer].info, its.form, n);
}

ggml_tensor * kvf_fresh::blend(
        ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * cur, ggml_tensor * sinks, bool by_head, int32_t il) {
    const uint32_t i = of_model[il];
    return layers[i].chooser->blend(ctx, gf, q, scale, cur, sinks, by_head, il, i);
}

bool kvf_fresh::is_guest(uint32_t block) const {
    return std::any_of(sequences.begin(), sequences.end(),
            [&](const auto & s) { return std::find(s.blocks.begin(), s.blocks.end(), block) != s.blocks.end(); });
}

void kvf_fresh::interrupt(llama_seq_id seq) {
    of(seq).pos_next = -1;
    waits.assign(layers.size(), its.ahead != AHEAD_ALWAYS); // of the next graph, which is built before its tokens are known
}

void kvf_fresh::truncate(llama_seq_id seq, uint32_t p) {
    auto & s  = of(seq);
    s.changed = true; // a ubatch may have been cut off
    if (p >= s.n) { return; }

    interrupt(seq);
    s.n = p / n_chunk * n_chunk;
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
    kvf_check(s.n + n * n_chunk <= GGML_PAD(its.n_ctx, n_chunk), "the index has a whole context at most");
    for (uint32_t i = 0; i < n; ++i) {
        s.records.push_back((const char *) records[i]);
    }
    s.n += n * n_chunk;
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
        kvf_check(s.blocks.empty(), "blocks of guests can only be given to a sequence without guests");
        for (const uint32_t b : want) {
            kvf_check(b < llama_kvflash::n_block(kv) && llama_kvflash::is_free(kv, b) &&
                              std::count(want.begin(), want.end(), b) == 1,
                    "a block of guests is not free");
        }
    }
    for (uint32_t b = 0; b < llama_kvflash::n_block(kv) && want.size() < n; ++b) {
        if (llama_kvflash::is_free(kv, b) && std::find(want.begin(), want.end(), b) == want.end()) { want.push_back(b); }
    }
    if (want.size() < n) {
        throw kvf_failure(KVF_E_NO_BLOCK, format("%u blocks of guests are needed, and fewer are free", n));
    }

    const uint32_t n_before = n_slot(s);
    s.blocks                = std::move(want);
    for (const auto & chooser : choosers) {
        chooser->keep(seq, std::min(n_before, n_slot(s)));
    }
    s.n_fill    = std::min(s.n_fill, n_slot(s));
    s.n_visible = std::min(s.n_visible, n_slot(s));
    if (!s.blocks.empty()) {
        const uint32_t last = *std::max_element(s.blocks.begin(), s.blocks.end());
        llama_kvflash::set_n_kv(kv, GGML_PAD((last + 1) * n_chunk, 256));
    }
}

void kvf_fresh::build(
        ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, int32_t il) {
    const uint32_t i       = of_model[il];
    auto &         chooser = *layers[i].chooser;
    this->q                = q;
    this->scale            = scale;
    if (its.coarse_k) { return chooser.build(ctx, gf, res, q, scale, il, i, {}); }
    if (layers[i].info.il != il) { return; } // another layer's rows are chosen by that layer

    kvf_ahead ahead;
    if (is_ahead(q->ne[2])) { ahead = kvf_ahead(ctx, gf, q, il, i, chooser.beside()); }
    if (!ahead.q) {
        before = {};
        return chooser.build(ctx, gf, res, q, scale, il, i, before);
    }
    if (layer_before + 1 != i || layers[layer_before].chooser != &chooser) { before = {}; }
    if (before.q) { ahead.reads.insert(ahead.reads.end(), {before.own, before.q}); }

    const auto beside = [&](const ggml_tensor * after, const auto & add) {
        const int first = ggml_graph_n_nodes(gf);
        chooser.fork(ctx, gf, i);
        add();
        chooser.back(ctx, gf, i);
        kvf_move_nodes(gf, first, after);
    };
    beside(ahead.begin, [&] { ggml_build_forward_expand(gf, ahead.q); });
    if (!waits[i]) {
        beside(ahead.near, [&] { chooser.build(ctx, gf, res, ahead.q, scale, il, i, before); });
    }
    chooser.join(ctx, gf, i, ahead.reads);
    if (waits[i]) { chooser.build(ctx, gf, res, q, scale, il, i, before); }
    before       = {ahead.q, q};
    layer_before = i;
}

bool kvf_fresh::is_ahead(uint32_t n_tokens) const {
    const auto beside = [](const auto & chooser) { return chooser->beside(); };
    return its.ahead && !its.coarse_k && n_tokens <= its.n_seq && std::all_of(choosers.begin(), choosers.end(), beside);
}

//
// a ubatch
//

void kvf_fresh::begin(const llama_kv_cache & kv, const llama_ubatch & ubatch) {
    const bool ahead = is_ahead(ubatch.n_tokens);
    begun            = true;
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
        auto &     s      = sequences[seq];
        const auto filled = s.n_fill, seen = s.n_visible;
        s.n_fill = s.n_visible = 0;
        if (s.tokens.empty()) { continue; }

        const auto common = std::move(s.common);
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
        // a chunk that has become common may be in a slot, too. new slots are filled by turns, and seen by nobody until they
        // all are
        bool more = false;
        for (size_t i = 0; i < std::min(s.common.size(), common.size()); ++i) {
            more = more || (s.common[i] && !common[i]);
        }
        s.all          = s.changed || n > 1 || more || !filled;
        s.changed      = false;
        s.n_since      = s.n_fill > filled ? 0 : s.n_since + 1;
        const auto pos = ubatch.pos[s.tokens[0]];
        const bool one = ahead && n == 1 && s.n_fill;
        s.n_drift      = one && pos == s.pos_next ? s.n_drift + 1 : 0;
        s.pos_next     = one ? pos + 1 : -1;
        s.pos_ahead    = pos - 1;
        s.n_visible    = s.all || s.n_since + 1 >= its.n_turn ? s.n_fill : std::min(s.n_fill, seen);
        s.n_step++;
        for (const auto & chooser : choosers) {
            chooser->begin(seq);
        }
    }
    set_waits(ahead);
}

void kvf_fresh::set_waits(bool ahead) {
    const uint32_t n = layers.size();
    if (its.ahead == AHEAD_ALWAYS) { return; }
    std::vector<bool> res(n, !ahead);
    for (size_t seq = 0; seq < sequences.size() && ahead; ++seq) {
        auto & s = sequences[seq];
        if (s.tokens.empty() || !s.n_fill) { continue; }
        if (s.n_drift < N_MEASURED) { s.waits.assign(n, true); }
        for (uint32_t i = 0; i < n && s.n_drift == N_MEASURED; ++i) {
            s.waits[i] = layers[i].chooser->missed(seq, i) > MOST_MISSED * (N_MEASURED - 1);
        }
        for (uint32_t i = 0; i < n; ++i) {
            res[i] = res[i] || s.waits[i];
        }
    }
    waits = res;
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
// the C API
//

static kvf_fresh & fresh_of(llama_context * ctx, llama_seq_id seq) {
    kvf_check(ctx, "there is no context");
    auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    kvf_check(kv && llama_kvflash::fresh(*kv), "this context has no guests");
    kvf_check_seq(ctx, seq);
    return *llama_kvflash::fresh(*kv);
}

static kvf_fresh & idle_fresh_of(llama_context * ctx, llama_seq_id seq) {
    auto & fresh = fresh_of(ctx, seq);
    ctx->synchronize(); // a GPU may still be computing
    return fresh;
}

static const kvf_fresh::layer & layer_of(const kvf_fresh & fresh, uint32_t layer) {
    kvf_check(layer < fresh.layers.size(), "the attention cache has no such layer");
    return fresh.layers[layer];
}

int kvf_index_components(llama_context * ctx, uint32_t layer, const void * const * records, uint32_t n, float * mean,
        float * variances, float * components) {
    return kvf_guard([&] {
        auto &       fresh = fresh_of(ctx, 0);
        const auto & l     = layer_of(fresh, layer);
        kvf_check(records && n > 0 && mean && variances && components, "records and room for the result are needed");

        const size_t       d = l.info.n_embd_head_k, n_head = l.info.n_head_kv;
        std::vector<float> cov(n_head * d * d);
        l.chooser->moments(layer, records, n, mean, cov.data());
        for (size_t h = 0; h < n_head; ++h) {
            try {
                kvf_principal(d, cov.data() + h * d * d, variances + h * d, components + h * d * d);
            } catch (...) {
                kvf_mark_bad(ctx);
                throw;
            }
        }
    });
}

int kvf_index_fit(
        llama_context * ctx, llama_seq_id seq, uint32_t layer, const float * mean, const float * basis, const float * step) {
    return kvf_guard([&] {
        auto & fresh = fresh_of(ctx, seq);
        kvf_check(mean && basis && step, "a mean, a basis and steps are needed");
        layer_of(fresh, layer).chooser->fit(seq, layer, mean, basis, step);
    });
}

int kvf_index_put(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first,
        const void * const * records, uint32_t n) {
    return kvf_guard([&] {
        auto & fresh = fresh_of(ctx, seq);
        kvf_check(records, "records are needed");
        kvf_check(layer + n_layer <= fresh.layers.size(), "the attention cache has no such layer");
        for (const auto & chooser : fresh.choosers) {
            chooser->put(seq, layer, n_layer, first, records, n);
        }
    });
}

int kvf_index_cover(llama_context * ctx, llama_seq_id seq, uint32_t first, const void * const * records, uint32_t n) {
    return kvf_guard([&] {
        auto & fresh = idle_fresh_of(ctx, seq);
        kvf_check(records && first * fresh.n_chunk == fresh.of(seq).n, "the index continues at another chunk");
        fresh.cover(seq, records, n);
    });
}

int kvf_index_forget(llama_context * ctx, llama_seq_id seq) {
    return kvf_guard([&] { idle_fresh_of(ctx, seq).truncate(seq, 0); });
}

int kvf_index_info(llama_context * ctx, llama_seq_id seq, struct kvf_index_info * info) {
    return kvf_guard([&] {
        auto &       fresh = fresh_of(ctx, seq);
        const auto & s     = fresh.of(seq);
        kvf_check(info, "room for the result is needed");
        *info = {};
        for (uint32_t i = 0; i < fresh.layers.size(); ++i) {
            info->bytes += fresh.size(i, s.n);
        }
        info->n       = s.n;
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
        kvf_check(n, "room for the result is needed");
        *n = 0;
        for (const auto & chooser : fresh.choosers) {
            *n += chooser->n_fetched();
        }
    });
}

int kvf_index_size(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, size_t * size) {
    return kvf_guard([&] {
        const auto & fresh = fresh_of(ctx, seq);
        kvf_check(size, "room for the result is needed");
        layer_of(fresh, layer);
        *size = fresh.size(layer, n);
    });
}

int kvf_index_get(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, void * dst, size_t size) {
    return kvf_guard([&] {
        auto &       fresh = idle_fresh_of(ctx, seq);
        const auto & l     = layer_of(fresh, layer);
        kvf_check(n <= fresh.of(seq).n, "there are fewer positions in the index");
        kvf_check(dst && size == fresh.size(layer, n), "room for the index of a layer is needed");
        l.chooser->get(seq, layer, n, (char *) dst);
        fresh.interrupt(seq); // it goes on as a sequence does that is made of this
    });
}

int kvf_index_set(llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, const void * src, size_t size) {
    return kvf_guard([&] {
        auto &       fresh = idle_fresh_of(ctx, seq);
        const auto & l     = layer_of(fresh, layer);
        kvf_check(src && size == fresh.size(layer, n), "this is not the index of such a layer");
        l.chooser->set(seq, layer, n, (const char *) src);
        fresh.interrupt(seq);
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
                "room for all guests is needed");
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
        kvf_check(units && n_unit == fresh.layers.size() * n, "a unit for each slot of each layer is needed");
        kvf_check(std::all_of(units, units + n_unit, [&](int32_t u) { return u >= -1 && u < (int32_t) s.n_unit(); }),
                "a unit is not in the index");
        s.changed = true;
        for (uint32_t i = 0; i < fresh.layers.size(); ++i) {
            fresh.layers[i].chooser->set_table(seq, i, units + (size_t) i * n, true);
        }
    });
}
