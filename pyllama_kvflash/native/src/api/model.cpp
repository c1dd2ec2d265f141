// model files and devices: loading, weights, conversion, RPC servers

#include "api/args.h"

#include "gguf.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

// llama.cpp divides by some metadata values and allocates by others without checking them: a damaged file would crash the
// process, or keep it busy forever
static void check_metadata(const char * path) {
    static const struct {
        const char * suffix;
        int64_t      low, high;
    } LIMITS[] = {
            {".full_attention_interval", 1, 1 << 16},
            {".rope.dimension_count", 1, 1 << 16},
            {".rope.dimension_count_swa", 1, 1 << 16},
            {".ssm.conv_kernel", 1, 1 << 16},
            {".ssm.group_count", 0, 1 << 16},
            {".ssm.inner_size", 1, 1 << 24},
            {".ssm.state_size", 1, 1 << 24},
            {".ssm.time_step_rank", 0, 1 << 24},
    };

    const std::unique_ptr<gguf_context, decltype(&gguf_free)> meta(gguf_init_from_file(path, {true, nullptr}), gguf_free);
    if (!meta) { throw kvf_failure(KVF_E_MODEL, kvf_take_log()); }

    for (int64_t i = 0; i < gguf_get_n_kv(meta.get()); ++i) {
        if (gguf_get_kv_type(meta.get(), i) != GGUF_TYPE_UINT32) { continue; }
        const std::string key   = gguf_get_key(meta.get(), i);
        const int64_t     value = gguf_get_val_u32(meta.get(), i);
        for (const auto & limit : LIMITS) {
            const size_t n = strlen(limit.suffix);
            if (key.size() > n && key.compare(key.size() - n, n, limit.suffix) == 0 &&
                    (value < limit.low || value > limit.high)) {
                throw kvf_failure(KVF_E_MODEL,
                        format("its metadata is damaged: %s is %lld; get the file again", key.c_str(), (long long) value));
            }
        }
    }
}

int kvf_model_load(const char * path, const llama_model_params * params, const char * const * on_host, uint32_t n_on_host,
        llama_model ** model) {
    return kvf_guard([&] {
        kvf_check(path && params && model && (on_host || !n_on_host),
                "path, params and model must not be null, nor on_host if n_on_host > 0");
        kvf_take_log();
        check_metadata(path);

        // call the caller's callback, and let kvf_interrupt() stop the loading
        llama_model_params mparams          = *params;
        mparams.progress_callback_user_data = const_cast<llama_model_params *>(params);
        mparams.progress_callback           = [](float progress, void * ud) {
            const auto * user = (const llama_model_params *) ud;
            return !kvf_stopped() &&
                   (!user->progress_callback || user->progress_callback(progress, user->progress_callback_user_data));
        };

        std::vector<llama_model_tensor_buft_override> overrides;
        for (uint32_t i = 0; i < n_on_host; ++i) {
            overrides.push_back({on_host[i], ggml_backend_cpu_buffer_type()});
        }
        overrides.push_back({nullptr, nullptr});
        mparams.tensor_buft_overrides = overrides.data();

        *model = llama_model_load_from_file(path, mparams);
        if (!*model) {
            throw kvf_stopped() ? kvf_failure(KVF_E_ABORTED, "interrupted") : kvf_failure(KVF_E_MODEL, kvf_take_log());
        }
    });
}

uint32_t kvf_n_weight(llama_model * model) { return model ? model->tensors_by_name.size() : 0; }

int kvf_get_weight(llama_model * model, uint32_t i, const char ** name, uint64_t * size, int32_t * device) {
    return kvf_guard([&] {
        kvf_check(name && size && device && i < kvf_n_weight(model),
                "name, size and device must not be null; i must be below kvf_n_weight()");
        const auto & [its_name, tensor] = model->tensors_by_name[i];

        *name   = its_name.c_str();
        *size   = ggml_nbytes(tensor);
        *device = llama_kvflash::device_index(ggml_backend_buffer_get_type(tensor->buffer));
    });
}

int kvf_quantize(const char * src, const char * dst, const llama_model_quantize_params * params) {
    return kvf_guard([&] {
        kvf_check(src && dst && params, "src, dst and params must not be null");
        kvf_take_log();
        if (llama_model_quantize(src, dst, params) != 0) { throw kvf_failure(KVF_E_MODEL, kvf_take_log()); }
    });
}

int kvf_device_memory(uint32_t device, size_t * n_free, size_t * n_total) {
    return kvf_guard([&] {
        kvf_check(n_free && n_total && device < ggml_backend_dev_count(),
                "n_free and n_total must not be null; device must be below ggml_backend_dev_count()");
        ggml_backend_dev_memory(ggml_backend_dev_get(device), n_free, n_total);
    });
}

// a function of the RPC backend, which is a separate module in a wheel; null: this build has no RPC backend
template <typename F> static F rpc_function(const char * name) {
    auto * reg = ggml_backend_reg_by_name("RPC");
    return reg ? (F) ggml_backend_reg_get_proc_address(reg, name) : nullptr;
}

int kvf_add_rpc(const char * endpoint) {
    return kvf_guard([&] {
        kvf_check(endpoint, "endpoint must not be null");
        kvf_init();
        kvf_take_log();

        const auto add = rpc_function<ggml_backend_reg_t (*)(const char *)>("ggml_backend_rpc_add_server");
        if (!add) { throw kvf_failure(KVF_E_UNSUPPORTED, "this build has no RPC backend"); }
        rpc_function<void (*)(void (*)(const char *))>("kvflash_rpc_set_on_lost")(kvf_on_lost);

        auto * server = add(endpoint);
        if (!server) { throw kvf_failure(KVF_E_BACKEND, "the RPC server cannot be reached: " + kvf_take_log()); }
        ggml_backend_register(server);
    });
}

void kvf_drop_rpc(void) {
    const auto drop = rpc_function<void (*)()>("kvflash_rpc_drop_servers");
    if (drop) { drop(); }
}
