// contexts: creation, memory and layers

#include "api/args.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <memory>
#include <string>

// whether an allocation failed. upstream returns a null pointer for any failure, and only its log has the cause: "failed to
// allocate ...", "unable to allocate ...", "allocating 5.00 MiB on device 0: cudaMalloc failed"
static bool is_of_memory(const std::string & log) { return log.find("allocat") != std::string::npos; }

int kvf_context_new(llama_model * model, const llama_context_params * params, const kvf_pool_params * pool,
        const kvf_pane_params * panes, llama_context ** ctx) {
    return kvf_guard([&] {
        kvf_check(model && params && ctx, "model, params and ctx must not be null");
        kvf_check(!pool || !panes, "a context cannot be both pooled and paned");
        kvf_take_log();

        llama_context_params cparams = *params;
        cparams.abort_callback       = [](void *) { return kvf_stopped(); };

        // t5, eagle3 and models with bidirectional attention also have a cache, but are not decoders
        if ((pool || panes) && (!model->hparams.causal_attn || llama_model_has_encoder(model))) {
            throw kvf_failure(
                    KVF_E_UNSUPPORTED, "only a decoder can have a pool, and this model is not one; use a stock context");
        }

        if (params->ctx_type == LLAMA_CONTEXT_TYPE_MTP && model->hparams.n_layer_nextn == 0) {
            throw kvf_failure(KVF_E_UNSUPPORTED, "it has no heads that predict further tokens");
        }

        if (pool) {
            const llama_kvflash::scope scope(*pool);
            *ctx = llama_init_from_model(model, cparams);
            if (!*ctx) { scope.rethrow(); }
        } else if (panes) {
            const llama_kvflash::scope scope(std::make_shared<kvf_panes>(*panes));
            *ctx = llama_init_from_model(model, cparams);
            if (!*ctx) { scope.rethrow(); }
        } else {
            *ctx = llama_init_from_model(model, cparams);
        }
        if (!*ctx) {
            const auto log = kvf_take_log();
            throw kvf_failure(is_of_memory(log) ? KVF_E_MEMORY : KVF_E_UNSUPPORTED, log);
        }
    });
}

const char * kvf_memory_class(llama_context * ctx) { return ctx ? llama_kvflash::class_name(ctx->get_memory()) : "none"; }

int kvf_get_kv_bytes(llama_context * ctx, struct kvf_kv_bytes * bytes) {
    return kvf_guard([&] {
        kvf_check(ctx && bytes, "ctx and bytes must not be null");
        *bytes = llama_kvflash::kv_bytes(ctx->get_memory());
    });
}

int kvf_get_compute_bytes(llama_context * ctx, int32_t device, uint64_t * bytes) {
    return kvf_guard([&] {
        kvf_check(ctx && bytes, "ctx and bytes must not be null");

        *bytes = 0;
        for (const auto & [buft, size] : ctx->memory_breakdown()) {
            if (llama_kvflash::device_index(buft) == device) { *bytes += size.compute; }
        }
    });
}

uint32_t kvf_n_layer(llama_context * ctx) {
    const auto * kv = ctx ? llama_kvflash::get_kv(ctx->get_memory()) : nullptr;
    return kv ? llama_kvflash::n_layer(*kv) : 0;
}

int kvf_get_layer(llama_context * ctx, uint32_t i, struct kvf_layer * layer) {
    return kvf_guard([&] {
        const auto & kv = kvf_attention(ctx);
        kvf_check(layer && i < llama_kvflash::n_layer(kv), "layer must not be null; i must be below kvf_n_layer()");
        *layer = llama_kvflash::layer(kv, i);
    });
}
