// what the attention graph puts out beside its result: queries of the last tokens, and what they attend to

#include "kvflash-impl.h"

#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-graph.h"
#include "llama-hparams.h"

#include <algorithm>

// q: [d, n_head, n_tokens], as the attention gets it. k: [d, n_head_kv, n_kv, 1], of the cache. kq_mask: [n_kv, n_tokens]
void llm_graph_context::build_taps(
        ggml_tensor * q, ggml_tensor * k, ggml_tensor * kq_mask, ggml_tensor * sinks, float kq_scale, int il) const {
    if (il < 0 || !cparams.q_tap || !cparams.q_tap_layers[il]) { return; }

    const int64_t n_q = std::min<int64_t>(q->ne[2], cparams.q_tap);

    // not the whole Q with an output flag: ggml-alloc reuses the layout of the reserved prompt graph for one token, so the
    // flag would have to be set for all ubatch sizes, at the price of n_ubatch*n_embd_q floats a layer
    q = ggml_cont(ctx0, ggml_view_3d(ctx0, q, q->ne[0], q->ne[1], n_q, q->nb[1], q->nb[2], (q->ne[2] - n_q) * q->nb[2]));
    res->t_q[il]     = q;
    res->q_scale[il] = kq_scale;
    cb(q, "q_tap", il);
    ggml_build_forward_expand(gf, q);

    if (!cparams.mass_piece) { return; }

    // the softmax of build_attn_mha() for these tokens alone, summed over heads and over pieces of positions
    ggml_tensor * kq = ggml_mul_mat(ctx0, ggml_permute(ctx0, k, 0, 2, 1, 3), ggml_permute(ctx0, q, 0, 2, 1, 3));
    ggml_prec_set_acc(kq, GGML_PREC_F32);
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

//
// what a graph gives out
//

const llm_graph_result * llama_kvflash::graph(const llama_context * ctx) { return ctx->gf_res_prev_active; }

void llama_kvflash::set_callback(llama_context & ctx, ggml_backend_sched_eval_callback callback, void * data) {
    ctx.cparams.cb_eval           = callback; // the library takes it from here with each new graph
    ctx.cparams.cb_eval_user_data = data;
    ggml_backend_sched_set_eval_callback(ctx.sched.get(), callback, data);
}

void llama_kvflash::exchange_features(llama_context & a, llama_context & b) {
    a.synchronize();
    b.synchronize();
    std::swap(a.embd_nextn, b.embd_nextn);
    std::swap(a.embd_layer_inp, b.embd_layer_inp);
}
