// additional outputs of the attention graph: the queries of the last tokens, and their attention. also the mask of a paned
// cache, whose cell indices are positions

#include "guests/fresh.h"
#include "pool/impl.h"

#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-graph.h"
#include "llama-hparams.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

// q: [d, n_head, n_tokens], the attention's input. k: [d, n_head_kv, n_kv, 1], from the cache. kq_mask: [n_kv, n_tokens]
void llm_graph_context::build_taps(
        ggml_tensor * q, ggml_tensor * k, ggml_tensor * kq_mask, ggml_tensor * sinks, float kq_scale, int il) const {
    if (cparams.fresh && cparams.fresh->reads(il)) { cparams.fresh->build(ctx0, gf, res, q, kq_scale, il); }
    if (il < 0 || !cparams.q_tap || !cparams.q_tap_layers[il]) { return; }

    // the attention of many tokens is costly, and not needed in the middle of a prompt. one token is still taken there, to
    // keep the graph's nodes the same: if they change, ggml waits for all devices and allocates the graph again
    const int64_t n_q = cparams.mass_piece && n_outputs == 0 ? 1 : std::min<int64_t>(q->ne[2], cparams.q_tap);

    // do not flag the whole Q as an output instead: ggml-alloc reuses the layout of the reserved prompt graph for one token,
    // so all ubatch sizes would need the flag, which costs n_ubatch*n_embd_q floats per layer
    q = ggml_cont(ctx0, ggml_view_3d(ctx0, q, q->ne[0], q->ne[1], n_q, q->nb[1], q->nb[2], (q->ne[2] - n_q) * q->nb[2]));
    res->t_q[il]     = q;
    res->q_scale[il] = kq_scale;
    cb(q, "q_tap", il);
    ggml_build_forward_expand(gf, q);

    if (!cparams.mass_piece) { return; }

    // the softmax of build_attn_mha() for these tokens only, summed over heads and position pieces. heads that share keys
    // are columns of one product, which reads the keys once: a product per head would take longer than the attention
    const int64_t n_share = q->ne[1] / k->ne[1];

    ggml_tensor * cols = ggml_cont(ctx0, ggml_permute(ctx0, q, 0, 2, 1, 3)); // [d, n_q, n_head]
    cols               = ggml_reshape_3d(ctx0, cols, q->ne[0], n_q * n_share, k->ne[1]);
    ggml_tensor * kq   = ggml_mul_mat(ctx0, ggml_permute(ctx0, k, 0, 2, 1, 3), cols);
    ggml_prec_set_acc(kq, GGML_PREC_F32);
    keep_beside(kq, k, k);
    kq = ggml_reshape_3d(ctx0, kq, kq->ne[0], n_q, q->ne[1]);
    if (hparams.attn_soft_cap) {
        const float cap = hparams.f_attn_logit_softcapping;

        kq       = ggml_scale(ctx0, ggml_tanh(ctx0, ggml_scale(ctx0, kq, kq_scale / cap)), cap);
        kq_scale = 1.0f;
    }
    auto * mask = ggml_view_2d(ctx0, kq_mask, kq_mask->ne[0], n_q, kq_mask->nb[1], (kq_mask->ne[1] - n_q) * kq_mask->nb[1]);

    auto * p = ggml_soft_max_ext(ctx0, kq, mask, kq_scale, hparams.f_max_alibi_bias);
    ggml_soft_max_add_sinks(p, sinks);

    const int64_t n_piece = p->ne[0] / cparams.mass_piece, n_head = p->ne[2];

    p = ggml_sum_rows(ctx0, ggml_reshape_3d(ctx0, p, cparams.mass_piece, n_piece, n_q * n_head));
    p = ggml_permute(ctx0, ggml_reshape_3d(ctx0, p, n_piece, n_q, n_head), 1, 2, 0, 3); // [n_head, n_piece, n_q]
    p = ggml_reshape_2d(ctx0, ggml_sum_rows(ctx0, ggml_cont(ctx0, p)), n_piece, n_q);

    res->t_mass[il] = p;
    cb(p, "mass_tap", il);
    ggml_build_forward_expand(gf, p);
}

// cur: the result of the attention, before its heads are joined into rows
ggml_tensor * llm_graph_context::build_coarse(ggml_tensor * cur, ggml_tensor * sinks, bool by_head, int il) const {
    auto * fresh = cparams.fresh;
    return fresh && fresh->reads(il) ? fresh->blend(ctx0, gf, cur, sinks, by_head, il) : cur;
}

static constexpr int DEEP = 12; // most nodes between the attention's result and its products with keys

static void keep_on(ggml_backend_sched_t sched, ggml_backend_t backend, ggml_tensor * t, const ggml_tensor * k,
        const ggml_tensor * v, int depth) {
    if (!t || depth == 0) { return; }
    for (auto * src : t->src) {
        if (!src) { break; }
        const auto * root = kvf_root(src);
        if (kvf_computes(t) && (root == kvf_root(k) || root == kvf_root(v))) {
            ggml_backend_sched_set_tensor_backend(sched, t, backend);
        }
        keep_on(sched, backend, src, k, v, depth - 1);
    }
}

// Panes are filled during the computation. If a layer's weights and rows are on the host, the scheduler would copy both to a
// GPU, and the rows too early. So the nodes that read the rows are kept on the CPU
void llm_graph_context::keep_beside(ggml_tensor * cur, const ggml_tensor * k, const ggml_tensor * v) const {
    auto * buf = kvf_root(k)->buffer;
    if (cparams.paned && buf && ggml_backend_buffer_is_host(buf)) { keep_on(sched, backend_cpu, cur, k, v, DEEP); }
}

uint32_t llama_kvflash::n_rot_k(const llama_kv_cache & kv) {
    uint32_t res = kv.attn_rot_k ? 64 : 0;
    while (res && kv.n_embd_head_k_all % (2 * res) == 0) {
        res *= 2;
    }
    return res;
}

float llama_kvflash::soft_cap(const llama_kv_cache & kv) {
    return kv.hparams.attn_soft_cap ? kv.hparams.f_attn_logit_softcapping : 0.0f;
}

//
// the mask of a paned cache
//

static constexpr size_t MASK_PER_THREAD = 1 << 19; // values; fewer are not worth a thread
static constexpr size_t MASK_THREADS    = 8;

template <typename T> static void fill_mask(T * row, T keep, T drop, int64_t n_kv, const llama_pos * pos, int64_t n) {
    for (int64_t i = 0; i < n; ++i, row += n_kv) {
        std::fill(row, row + pos[i] + 1, keep);
        std::fill(row + pos[i] + 1, row + n_kv, drop);
    }
}

// llama.cpp examines every cell, but in parallel with the previous batch. The exact pass waits for each batch, so its mask
// must be fast
bool llama_kvflash::set_mask(const llama_kv_cache & kv, ggml_tensor * dst, const llama_ubatch & ubatch, bool causal) {
    if (!panes(kv) || !causal || kv.hparams.use_alibi || kv.swa_type != LLAMA_SWA_TYPE_NONE) { return false; }
    const auto & cells = kv.v_cells[0];
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) { // no two tokens share a position, so M-RoPE's other axes do not matter
        const llama_pos pos = ubatch.pos[i];
        if (cells.is_empty(pos) || cells.pos_get(pos) != pos) { return false; }
    }

    const int64_t n_kv = dst->ne[0], n = ubatch.n_tokens;
    const int64_t n_thread = std::clamp<size_t>(n * n_kv / MASK_PER_THREAD, 1, MASK_THREADS);
    const auto    part     = [&](int64_t at) {
        const int64_t from = n * at / n_thread, m = n * (at + 1) / n_thread - from;
        if (dst->type == GGML_TYPE_F16) {
            const auto drop = ggml_fp32_to_fp16(-INFINITY);
            fill_mask<ggml_fp16_t>((ggml_fp16_t *) dst->data + from * n_kv, 0, drop, n_kv, ubatch.pos + from, m);
        } else {
            fill_mask<float>((float *) dst->data + from * n_kv, 0, -INFINITY, n_kv, ubatch.pos + from, m);
        }
    };

    std::vector<std::thread> threads;
    for (int64_t i = 1; i < n_thread; ++i) {
        try {
            threads.emplace_back(part, i);
        } catch (const std::system_error &) { part(i); } // no more threads can be created
    }
    part(0);
    for (auto & t : threads) {
        t.join();
    }
    return true;
}

//
// outputs of a graph
//

const llm_graph_result * llama_kvflash::graph(const llama_context * ctx) { return ctx->gf_res_prev_active; }

void llama_kvflash::set_callback(llama_context & ctx, ggml_backend_sched_eval_callback callback, void * data) {
    ctx.cparams.cb_eval           = callback; // llama.cpp reads it from here for each new graph
    ctx.cparams.cb_eval_user_data = data;
    ggml_backend_sched_set_eval_callback(ctx.sched.get(), callback, data);
}

void llama_kvflash::exchange_features(llama_context & a, llama_context & b) {
    a.synchronize();
    b.synchronize();
    std::swap(a.embd_nextn, b.embd_nextn);
    std::swap(a.embd_layer_inp, b.embd_layer_inp);
}
