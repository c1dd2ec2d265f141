// set-up and placement, see kvflash.h

#include "api/args.h"
#include "guests/fresh.h"
#include "pool/impl.h"

#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-impl.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <map>
#include <optional>
#include <typeinfo>

//
// set-up
//

// thread-local, not a field of llama_context_params: other bindings rely on its layout
static thread_local const kvf_pool_params *    g_setup = nullptr;
static thread_local std::shared_ptr<kvf_panes> g_panes;
static thread_local std::optional<kvf_failure> g_refusal;

[[noreturn]] static void refuse(int status, const std::string & what) {
    g_refusal.emplace(status, what);
    throw *g_refusal;
}

llama_kvflash::scope::scope(const kvf_pool_params & params) {
    if (params.n_chunk != 16 && params.n_chunk != 32 && params.n_chunk != 64) {
        throw kvf_failure(KVF_E_ARGUMENT, format("n_chunk must be 16, 32 or 64, not %u", params.n_chunk));
    }
    if (params.n_pool == 0 || params.n_pool % 256 != 0) {
        throw kvf_failure(KVF_E_ARGUMENT, format("n_pool must be a multiple of 256 above 0, not %u", params.n_pool));
    }

    g_setup = &params;
    g_refusal.reset();
}

llama_kvflash::scope::scope(std::shared_ptr<kvf_panes> panes) {
    const uint32_t piece = panes->params.mass_piece;
    kvf_check(panes->params.n_pane > 0, "n_pane must be at least 1");
    kvf_check(piece == 0 || 256 % piece == 0, "mass_piece must divide 256, or be 0");

    g_panes = std::move(panes);
    g_refusal.reset();
}

llama_kvflash::scope::~scope() {
    g_setup = nullptr;
    g_panes.reset();
}

void llama_kvflash::scope::rethrow() const {
    if (g_refusal) { throw *g_refusal; }
}

// not limited to kv_size, which is for one sequence: several may share a pool
uint32_t llama_kvflash::n_cells(uint32_t kv_size) { return g_setup ? g_setup->n_pool : kv_size; }

ggml_backend_buffer_t llama_kvflash::alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, llama_swa_type swa_type) {
    const bool paned = g_panes && swa_type == LLAMA_SWA_TYPE_NONE;

    return paned ? g_panes->alloc(ctx, buft) : ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
}

ggml_backend_buffer_t llama_kvflash::alloc_states(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool no_alloc) {
    if (!no_alloc) { return ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft); }
    ggml_backend_buffer_t empty = ggml_backend_buft_alloc_buffer(buft, 0);

    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        t->buffer = empty; // otherwise the scheduler would allocate it
    }
    return empty;
}

size_t llama_kvflash::states_size(ggml_context * ctx, ggml_backend_buffer_t buf, bool no_alloc) {
    return no_alloc ? ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, ggml_backend_buffer_get_type(buf))
                    : ggml_backend_buffer_get_size(buf);
}

void llama_kvflash::tap(llama_kv_cache & kv, llama_cparams & cparams, uint32_t q_tap, uint32_t q_every) {
    kv.pool_q_every = std::max(1u, q_every);

    cparams.q_tap = q_tap ? std::max(q_tap, cparams.n_seq_max) : 0;
    for (const uint32_t i : tapped(kv)) {
        cparams.q_tap_layers[layer(kv, i).il] = true;
    }
}

void llama_kvflash::attach_fresh(llama_kv_cache & kv, llama_cparams & cparams) {
    if (kv.hparams.use_alibi) {
        refuse(KVF_E_UNSUPPORTED, "ALiBi needs the position of each cell, which guests do not have");
    }
    for (uint32_t i = 0; i < n_layer(kv); ++i) {
        const auto l = layer(kv, i);
        if (l.n_embd_k != l.n_head_kv * l.n_embd_head_k || l.n_head % l.n_head_kv) {
            refuse(KVF_E_UNSUPPORTED, format("the K rows of layer %d are not divided into heads", l.il));
        }
    }
    const kvf_fresh::params params = {
            g_setup->n_exchange, cparams.n_ctx_seq, cparams.n_seq_max, g_setup->coarse_k, g_setup->coarse_v};
    const auto is_bits = [](uint32_t n) { return n == 2 || n == 4 || n == 32; };
    if (!is_bits(params.coarse_k) || !is_bits(params.coarse_v)) {
        refuse(KVF_E_ARGUMENT, "coarse_k and coarse_v must be 2 or 4 bits, or 32 (exact)");
    }
    try {
        kv.pool_fresh =
                std::make_shared<kvf_fresh>(kv, params, g_setup->panes ? kvf_paned(g_setup->panes).pool_panes : nullptr);
    } catch (const kvf_failure & err) { refuse(err.status, err.what()); }
    cparams.fresh = kv.pool_fresh.get();
}

void llama_kvflash::attach_panes(llama_memory_i * mem, llama_cparams & cparams) {
    auto * kv = get_kv(mem);
    if (!kv || kv->other || kv->layers.empty() || kv->get_n_stream() != 1) {
        refuse(KVF_E_UNSUPPORTED, format("the memory of this model (%s) cannot be read layer by layer", class_name(mem)));
    }
    kv->pool_panes = g_panes;
    tap(*kv, cparams, g_panes->params.q_tap, g_panes->params.q_every);
    cparams.mass_piece = g_panes->params.mass_piece;
    cparams.paned      = true;
}

void llama_kvflash::attach(llama_memory_i * mem, llama_cparams & cparams) {
    if (g_panes) { attach_panes(mem, cparams); }
    if (!g_setup) { return; }

    auto * kv = get_kv(mem);
    if (kv && kv->get_n_stream() != 1) {
        refuse(KVF_E_UNSUPPORTED, "the sequences of a pool share its cells, but this cache has a separate stream for "
                                  "each sequence; set kv_unified, or use the full cache");
    }
    if (!kv || kv->other || kv->layers.empty() || kv->get_size() != n_cells(cparams.n_ctx_seq)) {
        refuse(KVF_E_UNSUPPORTED, format("the memory of this model (%s) cannot be pooled", class_name(mem)));
    }
    // nothing may be evicted between the ubatches of a batch, so the pool must hold a whole batch
    if (kv->get_size() < std::min(cparams.n_batch, cparams.n_ctx_seq) + 2 * g_setup->n_chunk) {
        refuse(KVF_E_ARGUMENT,
                format("a pool of %u cells cannot hold a batch of %u and two chunks", kv->get_size(), cparams.n_batch));
    }

    kv->pool_chunk       = g_setup->n_chunk;
    kv->pool_fingerprint = g_setup->fingerprint;

    const auto last = layer(*kv, n_layer(*kv) - 1);
    kv->pool_mover  = std::make_shared<kvf_mover>(pieces(*kv), last.offs_v + last.size_v);

    tap(*kv, cparams, g_setup->q_tap, g_setup->q_every);
    if (g_setup->coarse_k) { attach_fresh(*kv, cparams); }
}

std::vector<uint32_t> llama_kvflash::tapped(const llama_kv_cache & kv) {
    std::vector<uint32_t> res;
    for (uint32_t i = kv.pool_q_every / 2; i < n_layer(kv); i += kv.pool_q_every) {
        res.push_back(i);
    }
    return res;
}

void llama_kvflash::reject_restore(llama_memory_i * mem) {
    const auto * kv = get_kv(mem);
    if (kv && is_pool(*kv)) {
        throw kvf_failure(KVF_E_UNSUPPORTED,
                "a whole-context state cannot be restored into a pool, because that re-packs the "
                "cells across chunks; page in the chunks, and restore the partial state");
    }
}

//
// placement
//

// cast to exactly this class: the pool does not know about the additional state of a derived class
template <typename T> static T * exactly(llama_memory_i * mem) {
    return mem && typeid(*mem) == typeid(T) ? static_cast<T *>(mem) : nullptr;
}

llama_kv_cache * llama_kvflash::get_kv(llama_memory_i * mem) {
    if (auto * m = exactly<llama_memory_hybrid>(mem)) { return m->get_mem_attn(); }
    if (auto * m = exactly<llama_memory_hybrid_iswa>(mem)) { return m->get_mem_attn()->get_base(); }
    if (auto * m = exactly<llama_kv_cache_iswa>(mem)) { return m->get_base(); }

    return exactly<llama_kv_cache>(mem);
}

const char * llama_kvflash::class_name(llama_memory_i * mem) {
    if (exactly<llama_kv_cache>(mem)) { return "llama_kv_cache"; }
    if (exactly<llama_kv_cache_dsa>(mem)) { return "llama_kv_cache_dsa"; }
    if (exactly<llama_kv_cache_dsa_iswa>(mem)) { return "llama_kv_cache_dsa_iswa"; }
    if (exactly<llama_kv_cache_dsv4>(mem)) { return "llama_kv_cache_dsv4"; }
    if (exactly<llama_kv_cache_iswa>(mem)) { return "llama_kv_cache_iswa"; }
    if (exactly<llama_kv_cache_msa>(mem)) { return "llama_kv_cache_msa"; }
    if (exactly<llama_memory_hybrid>(mem)) { return "llama_memory_hybrid"; }
    if (exactly<llama_memory_hybrid_idx>(mem)) { return "llama_memory_hybrid_idx"; }
    if (exactly<llama_memory_hybrid_iswa>(mem)) { return "llama_memory_hybrid_iswa"; }
    if (exactly<llama_memory_recurrent>(mem)) { return "llama_memory_recurrent"; }

    return mem ? "of an unknown class" : "none";
}

static llama_kv_cache * get_swa(llama_memory_i * mem) {
    if (auto * m = exactly<llama_memory_hybrid_iswa>(mem)) { return m->get_mem_attn()->get_swa(); }
    if (auto * m = exactly<llama_kv_cache_iswa>(mem)) { return m->get_swa(); }

    return nullptr;
}

bool llama_kvflash::has_window(llama_memory_i * mem, llama_seq_id seq, llama_pos pos) {
    const auto *    swa   = get_swa(mem);
    const llama_pos first = swa ? swa->seq_pos_min(seq) : -1;

    return first < 0 || pos <= 0 || first <= std::max(0, pos - (llama_pos) swa->n_swa + 1);
}

llama_kv_cache * llama_kvflash::get_window(llama_memory_i * mem) {
    return exactly<llama_kv_cache_iswa>(mem) ? get_swa(mem) : nullptr;
}

bool llama_kvflash::has_partial(llama_memory_i * mem) {
    return (get_kv(mem) && !exactly<llama_kv_cache>(mem)) || exactly<llama_memory_recurrent>(mem);
}

kvf_kv_bytes llama_kvflash::kv_bytes(llama_memory_i * mem) {
    const auto bytes = [](const llama_kv_cache * kv) -> uint64_t { return kv->size_k_bytes() + kv->size_v_bytes(); };
    const auto sum   = [](llama_memory_i * m) {
        uint64_t res = 0;
        for (const auto & [_, size] : m->memory_breakdown()) {
            res += size;
        }
        return res;
    };

    kvf_kv_bytes res = {};

    if (const auto * kv = get_kv(mem)) { res.attn = panes(*kv) ? panes(*kv)->info().bytes : bytes(kv); }
    if (const auto * kv = get_swa(mem)) { res.swa = bytes(kv); }
    if (auto * m = exactly<llama_memory_hybrid>(mem)) {
        res.recurrent = sum(m->get_mem_recr());
    } else if (auto * m = exactly<llama_memory_hybrid_iswa>(mem)) {
        res.recurrent = sum(m->get_mem_recr());
    } else if (mem && !res.attn) {
        res.recurrent = sum(mem);
    }

    return res;
}

int32_t llama_kvflash::block_of(const llama_kv_cache & kv, llama_seq_id seq, int32_t chunk) {
    const auto & sp = kv.v_cells[0].seq_pos_get(seq);

    const llama_pos p0 = chunk * (llama_pos) kv.pool_chunk;

    const auto it = sp.lower_bound({p0, 0});
    if (it == sp.end() || it->first >= p0 + (llama_pos) kv.pool_chunk) { return -1; }

    return it->second / kv.pool_chunk;
}

uint32_t llama_kvflash::n_block(const llama_kv_cache & kv) { return kv.get_size() / kv.pool_chunk; }

bool llama_kvflash::is_free(const llama_kv_cache & kv, uint32_t block) {
    if (fresh(kv) && fresh(kv)->is_guest(block)) { return false; }

    const auto & cells = kv.v_cells[0];
    for (uint32_t i = 0; i < kv.pool_chunk; ++i) {
        if (!cells.is_empty(block * kv.pool_chunk + i)) { return false; }
    }
    return true;
}

static const llama_memory_recurrent * get_recurrent(llama_memory_i * mem) {
    if (auto * m = exactly<llama_memory_hybrid>(mem)) { return m->get_mem_recr(); }
    if (auto * m = exactly<llama_memory_hybrid_iswa>(mem)) { return m->get_mem_recr(); }

    return exactly<llama_memory_recurrent>(mem);
}

void llama_kvflash::scrub(llama_context * ctx) {
    ctx->synchronize();
    auto * mem = ctx->get_memory();

    for (const auto * kv : {get_kv(mem), get_swa(mem)}) {
        if (!kv) { continue; }
        if (is_pool(*kv)) { mover(*kv).wait(); }
        if (panes(*kv)) { panes(*kv)->wait(0); }

        const auto unused = [&](uint32_t cell) {
            const bool taken = fresh(*kv) && fresh(*kv)->is_guest(cell / kv->pool_chunk);
            return !taken && kv->v_cells[0].is_empty(cell);
        };
        for (uint32_t cell = 0, end = 0; cell < kv->get_size(); cell = end + 1) {
            for (end = cell; end < kv->get_size() && unused(end); ++end) {}
            if (end > cell) { fill(*kv, cell, end - cell, 0); }
        }
    }

    if (const auto * states = get_recurrent(mem)) {
        for (const auto & layers : {states->r_l, states->s_l, states->p_l}) {
            for (auto * t : layers) {
                const size_t               row = t ? ggml_nbytes(t) / (states->size * (1 + states->n_rs_seq)) : 0;
                const std::vector<uint8_t> zero(row);
                for (uint32_t i = 0; t && i < states->size * (1 + states->n_rs_seq); ++i) {
                    if (states->cells[i % states->size].is_empty()) {
                        ggml_backend_tensor_set(t, zero.data(), i * row, row);
                    }
                }
            }
        }
    }
}

llama_kv_cache::slot_info llama_kvflash::find_slot(const llama_kv_cache & kv, const llama_ubatch & ubatch) {
    const uint32_t n_chunk = kv.pool_chunk;

    const auto & cells = kv.v_cells[0];

    llama_kv_cache::slot_info res = {0, 0, {}, {}};
    res.resize(1);
    res.strm[0] = 0;
    res.idxs[0].reserve(ubatch.n_tokens);

    // blocks of the chunks that begin in this ubatch
    std::map<std::pair<llama_seq_id, int32_t>, uint32_t> fresh;

    uint32_t b_next = 0;

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq   = ubatch.seq_id[i][0];
        const llama_pos    pos   = ubatch.pos[i];
        const int32_t      chunk = pos / (llama_pos) n_chunk;

        if (ubatch.n_seq_id[i] != 1) {
            LLAMA_LOG_ERROR(
                    "%s: a token of a pool belongs to one sequence, not to %d; decode it for each, or use the full cache\n",
                    __func__, ubatch.n_seq_id[i]);
            return {};
        }

        int32_t block = block_of(kv, seq, chunk);

        if (block < 0) {
            const auto it = fresh.find({seq, chunk});
            if (it != fresh.end()) {
                block = it->second;
            } else {
                while (b_next < n_block(kv) && !is_free(kv, b_next)) {
                    b_next++;
                }
                if (b_next == n_block(kv)) { return {}; }

                block               = b_next++;
                fresh[{seq, chunk}] = block;
            }
        }

        const uint32_t idx = block * n_chunk + pos % n_chunk;

        // for example, tokens of an image that share an M-RoPE position
        if (!cells.is_empty(idx) || (i > 0 && res.idxs[0].back() == idx)) {
            LLAMA_LOG_ERROR("%s: position %d of sequence %d is already in the pool, which has one cell per position; tokens "
                            "that share a position (those of an image, for example) need the full cache\n",
                    __func__, pos, seq);
            return {};
        }

        res.idxs[0].push_back(idx);
    }

    return res;
}
