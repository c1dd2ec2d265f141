// speculative drafts, by the implementations in llama.cpp's common library, see kvflash.h

#include "api/guard.h"

#include "../src/llama-ext.h" // llama.cpp's staging API, included as in its common library
#include "common.h"
#include "log.h"
#include "speculative.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>

// the drafter of a sequence: an implementation and its state
struct kvf_spec {
    ~kvf_spec() { listen(params.draft.ctx_tgt, false); }

    // set whether a context of the target's model outputs the features of its layers that the drafter reads
    void listen(llama_context * ctx, bool on) const {
        if (mtp) { llama_set_embeddings_nextn(ctx, on, false); }
        if (!features) { return; }

        const auto *   model = llama_get_model(params.draft.ctx_dft);
        const auto *   ids   = llama_model_target_layer_ids(model);
        const uint32_t n     = llama_model_target_layer_ids_n(model);
        const int32_t  n_all = llama_model_n_layer(llama_get_model(ctx));
        for (uint32_t i = 0; i < n; ++i) {
            if (ids[i] < n_all || !eagle3) {
                llama_set_embeddings_layer_inp(ctx, ids[i], on);
            } else {
                llama_set_embeddings_nextn(ctx, on, false);
            }
        }
    }

    // remove positions [p0, p1) from the drafter's memory
    void forget(llama_pos p0, llama_pos p1) const {
        auto * ctx = params.draft.ctx_dft;
        if (ctx && p1 != 0 && !llama_memory_seq_rm(llama_get_memory(ctx), 0, p0, p1)) {
            throw kvf_failure(KVF_E_UNSUPPORTED, "the drafter's memory cannot go back: it has a recurrent state");
        }
    }

    common_params_speculative params;
    common_speculative_ptr    impl;
    common_batch              batch;
    llama_tokens              history;
    bool                      features = false; // the drafter reads layers of the target
    bool                      eagle3   = false; // it is EAGLE-3, for which the last layer's output is enabled in another way
    bool                      mtp      = false; // it reads only the last layer's output
    int32_t                   window   = 0;     // positions that the drafter remembers
};

// llama.cpp's drafters read the outputs of one context. while this object lives, they read those of another one
struct lent_features {
    lent_features(llama_context * from, llama_context * to) : from(from), to(to) { kvf_exchange_features(from, to); }
    ~lent_features() { kvf_exchange_features(from, to); }

    lent_features(const lent_features &)             = delete;
    lent_features & operator=(const lent_features &) = delete;

    llama_context * from;
    llama_context * to;
};

// whether the graph of a model outputs the last layer's result to a drafter that reads the inputs of layers
static bool gives_last(const llama_model * model) {
    char arch[64] = "";
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));

    static const std::string known[] = {"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"};
    return std::find(std::begin(known), std::end(known), arch) != std::end(known);
}

// throw if drafter and target do not match. llama.cpp would fail an assertion, or notice it only while drafting
static void check_pair(const char * type, llama_context * ctx_tgt, llama_context * ctx_dft) {
    const auto refuse = [&](const std::string & what) { throw kvf_failure(KVF_E_UNSUPPORTED, what); };

    const auto kind = common_speculative_type_from_name(type);
    if (kind == COMMON_SPECULATIVE_TYPE_COUNT) { refuse(std::string("there is no drafter of type ") + type); }
    if (!ctx_dft) { return; }

    const auto *  tgt     = llama_get_model(ctx_tgt);
    const auto *  dft     = llama_get_model(ctx_dft);
    const int32_t n_layer = llama_model_n_layer(tgt);
    const auto    n_ids   = llama_model_target_layer_ids_n(dft);

    const bool reads = kind == COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH || kind == COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK ||
                       kind == COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3;
    if (reads && n_ids == 0) { refuse("the drafter names no layers of the target that it reads"); }
    if (!reads && n_ids > 0) { refuse("the drafter is of another type: it reads layers of its target"); }

    for (uint32_t i = 0; i < n_ids; ++i) {
        const int32_t id = llama_model_target_layer_ids(dft)[i];
        if (id < 0 || id > n_layer) {
            refuse("the drafter reads layer " + std::to_string(id) + " of its target, which has " + std::to_string(n_layer));
        }
        if (id == n_layer && kind != COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3 && !gives_last(tgt)) {
            refuse("the drafter reads the output of the target's last layer, which llama.cpp does not provide for this "
                   "model");
        }
    }

    const int32_t n_tgt = llama_vocab_n_tokens(llama_model_get_vocab(tgt));
    const int32_t n_dft = llama_vocab_n_tokens(llama_model_get_vocab(dft));
    if (kind != COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE && n_dft > n_tgt) {
        refuse("the drafter's vocabulary has " + std::to_string(n_dft) + " tokens, and the target's " +
                std::to_string(n_tgt));
    }
}

int kvf_spec_new(llama_context * ctx_tgt, llama_context * ctx_dft, const kvf_spec_params * params, kvf_spec ** spec) {
    return kvf_guard([&] {
        static std::once_flag once;
        std::call_once(once, [] { common_log_set_verbosity_thold(-1); }); // errors come as exceptions

        kvf_check(ctx_tgt && params && spec && params->type, "ctx_tgt, params, params->type and spec must not be null");
        kvf_check(params->n_max > 0 && params->window >= params->n_max, "n_max must be above 0, and must not exceed window");
        check_pair(params->type, ctx_tgt, ctx_dft);

        auto res    = std::make_unique<kvf_spec>();
        res->window = params->window;

        auto & p              = res->params;
        p.types               = {common_speculative_type_from_name(params->type)};
        p.draft.ctx_tgt       = ctx_tgt;
        p.draft.ctx_dft       = ctx_dft;
        p.draft.n_max         = params->n_max;
        p.draft.p_min         = params->p_min;
        p.ngram_simple.size_n = params->n_gram;
        p.ngram_simple.size_m = params->n_max;

        res->eagle3   = p.types[0] == COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3;
        res->mtp      = p.types[0] == COMMON_SPECULATIVE_TYPE_DRAFT_MTP;
        res->features = ctx_dft && llama_model_target_layer_ids_n(llama_get_model(ctx_dft)) > 0;
        res->batch    = common_batch(ctx_tgt);
        res->impl.reset(common_speculative_init(p, 1));
        if (!res->impl) { throw kvf_failure(KVF_E_UNSUPPORTED, "drafts of this type need a drafter's context"); }

        *spec = res.release();
    });
}

void kvf_spec_free(kvf_spec * spec) { delete spec; }

int32_t kvf_spec_n_max(const kvf_spec * spec) { return spec ? common_speculative_n_max(spec->impl.get()) : 0; }

int kvf_spec_listen(kvf_spec * spec, llama_context * ctx, bool on) {
    return kvf_guard([&] {
        kvf_check(spec && ctx, "spec and ctx must not be null");
        spec->listen(ctx, on);
    });
}

int kvf_spec_begin(kvf_spec * spec, const llama_token * tokens, int32_t n) {
    return kvf_guard([&] {
        kvf_check(spec && (tokens || n == 0) && n >= 0, "spec must not be null, nor tokens if n > 0; n must be at least 0");
        spec->history.assign(tokens, tokens + n);
        common_speculative_begin(spec->impl.get(), 0, spec->history);
    });
}

int kvf_spec_process(kvf_spec * spec, llama_context * ctx, llama_pos pos, const llama_token * tokens, int32_t n) {
    return kvf_guard([&] {
        kvf_check(spec && ctx && tokens && n > 0 && pos >= 0,
                "spec, ctx and tokens must not be null; n must be above 0, and pos at least 0");
        const lent_features features(ctx, spec->params.draft.ctx_tgt);
        spec->forget(pos, -1);
        spec->forget(0, std::max(0, pos + n - spec->window));

        spec->batch.clear();
        for (int32_t i = 0; i < n; ++i) {
            spec->batch.add(tokens[i], pos + i, 0, true);
        }
        if (!common_speculative_process(spec->impl.get(), spec->batch)) {
            throw kvf_failure(KVF_E_BACKEND, "the drafter could not read the tokens that the target decoded");
        }
    });
}

int kvf_spec_draft(kvf_spec * spec, int32_t n_keep, const llama_token * tokens, int32_t n, int32_t n_max,
        llama_token * draft, int32_t * n_draft) {
    return kvf_guard([&] {
        kvf_check(spec && tokens && n > 0 && draft && n_draft && n_max > 0,
                "spec, tokens, draft and n_draft must not be null; n and n_max must be above 0");
        auto & history = spec->history;
        kvf_check(n_keep >= 0 && (size_t) n_keep <= history.size(), "n_keep exceeds the tokens of the sequence");

        history.resize(n_keep);
        history.insert(history.end(), tokens, tokens + n - 1);

        llama_tokens found;
        auto &       p = common_speculative_get_draft_params(spec->impl.get(), 0);

        p.drafting = true;
        p.n_max    = n_max;
        p.pos0     = history.size();
        p.id_last  = tokens[n - 1];
        p.prompt   = &history;
        p.result   = &found;
        spec->forget(p.pos0, -1);
        common_speculative_draft(spec->impl.get());
        spec->forget(p.pos0, -1); // the target may not accept the drafted tokens

        // samplers do not check for NaN, which would stay in the drafter's cache. any other status means that it has no
        // logits
        llama_token likeliest = -1;
        if (auto * ctx = spec->params.draft.ctx_dft; ctx && kvf_argmax(ctx, -1, &likeliest) == KVF_E_LOGITS) {
            throw kvf_failure(KVF_E_LOGITS, kvf_error());
        }

        *n_draft = std::min<int32_t>(found.size(), n_max);
        std::copy_n(found.begin(), *n_draft, draft);
    });
}

int kvf_spec_accept(kvf_spec * spec, int32_t n) {
    return kvf_guard([&] {
        kvf_check(spec && n >= 0, "spec must not be null; n must be at least 0");
        common_speculative_accept(spec->impl.get(), 0, n);
    });
}
