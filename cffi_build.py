"""The cffi declarations of what Python may call (API mode): parts of llama.h, and all of kvflash.h.

CMake runs cffi's source generator on this file and compiles the result against the real headers. So a declaration that differs
from them does not compile, and the compiler fills in layouts and values where `...` stands.
"""

import re
from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).parent / "pyllama_kvflash/native/src/kvflash.h"

ffibuilder = FFI()

ffibuilder.cdef("""
/* ---- ggml.h, ggml-backend.h ---- */

enum ggml_type {
    GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
    GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL, ...
};
enum ggml_log_level {
    GGML_LOG_LEVEL_NONE, GGML_LOG_LEVEL_INFO, GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR, ...
};
size_t  ggml_row_size(enum ggml_type type, int64_t ne);

typedef struct ggml_backend_device * ggml_backend_dev_t;
enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_ACCEL, ... };
size_t             ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
const char *       ggml_backend_dev_name(ggml_backend_dev_t device);
const char *       ggml_backend_dev_description(ggml_backend_dev_t device);
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);

/* ---- llama.h ---- */

struct llama_model;
struct llama_context;
struct llama_vocab;
struct llama_sampler;
typedef int32_t llama_token;
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;

enum llama_flash_attn_type {
    LLAMA_FLASH_ATTN_TYPE_AUTO, LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED, ...
};
enum llama_context_type { LLAMA_CONTEXT_TYPE_DEFAULT, LLAMA_CONTEXT_TYPE_MTP, ... };
enum llama_load_mode { LLAMA_LOAD_MODE_AUTO, LLAMA_LOAD_MODE_NONE, ... };
enum llama_split_mode { LLAMA_SPLIT_MODE_NONE, LLAMA_SPLIT_MODE_LAYER, ... };
typedef bool (*llama_progress_callback)(float progress, void * user_data);

struct llama_model_params {
    int32_t n_gpu_layers;
    enum llama_split_mode split_mode;
    int32_t main_gpu;
    enum llama_load_mode load_mode;
    const float * tensor_split;
    llama_progress_callback progress_callback;
    void * progress_callback_user_data;
    bool no_alloc;
    bool load_mtp;
    ...;
};
enum llama_rope_scaling_type {
    LLAMA_ROPE_SCALING_TYPE_NONE, LLAMA_ROPE_SCALING_TYPE_LINEAR, LLAMA_ROPE_SCALING_TYPE_YARN, ...
};
struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t  n_threads;
    int32_t  n_threads_batch;
    enum llama_context_type ctx_type;
    enum llama_flash_attn_type flash_attn_type;
    enum llama_rope_scaling_type rope_scaling_type;
    float    rope_freq_base;
    float    rope_freq_scale;
    float    yarn_ext_factor;
    float    yarn_attn_factor;
    float    yarn_beta_fast;
    float    yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    enum ggml_type type_k;
    enum ggml_type type_v;
    bool offload_kqv;
    bool no_perf;
    bool swa_full;
    bool kv_unified;
    struct llama_context * ctx_other;
    ...;
};
struct llama_sampler_chain_params { bool no_perf; ...; };

enum llama_ftype {
    LLAMA_FTYPE_MOSTLY_Q2_K, LLAMA_FTYPE_MOSTLY_Q3_K_S, LLAMA_FTYPE_MOSTLY_Q3_K_M, LLAMA_FTYPE_MOSTLY_Q3_K_L,
    LLAMA_FTYPE_MOSTLY_Q4_K_S, LLAMA_FTYPE_MOSTLY_Q4_K_M, LLAMA_FTYPE_MOSTLY_Q5_K_S, LLAMA_FTYPE_MOSTLY_Q5_K_M,
    LLAMA_FTYPE_MOSTLY_Q6_K, LLAMA_FTYPE_MOSTLY_IQ4_NL, LLAMA_FTYPE_MOSTLY_IQ4_XS, ...
};
typedef struct llama_model_quantize_params { int32_t nthread; enum llama_ftype ftype; ...; } llama_model_quantize_params;

size_t                            llama_max_devices(void);
struct llama_model_params         llama_model_default_params(void);
struct llama_context_params       llama_context_default_params(void);
struct llama_sampler_chain_params llama_sampler_chain_default_params(void);

struct llama_model_quantize_params llama_model_quantize_default_params(void);

void llama_model_free(struct llama_model * model);
void llama_free(struct llama_context * ctx);

const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t  llama_model_n_ctx_train(const struct llama_model * model);
int32_t  llama_model_n_layer(const struct llama_model * model);
int32_t  llama_model_n_swa(const struct llama_model * model);
uint64_t llama_model_size(const struct llama_model * model);
uint64_t llama_model_n_params(const struct llama_model * model);
bool     llama_model_is_recurrent(const struct llama_model * model);
bool     llama_model_is_hybrid(const struct llama_model * model);
bool     llama_model_has_encoder(const struct llama_model * model);
bool     llama_model_is_diffusion(const struct llama_model * model);
int32_t  llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
int32_t  llama_model_meta_val_str(const struct llama_model * model, const char * key, char * buf, size_t buf_size);

uint32_t llama_n_ctx(const struct llama_context * ctx);
uint32_t llama_n_rs_seq(const struct llama_context * ctx);
float *  llama_get_logits_ith(struct llama_context * ctx, int32_t i);

size_t llama_state_get_size(struct llama_context * ctx);
size_t llama_state_get_data(struct llama_context * ctx, uint8_t * dst, size_t size);
size_t llama_state_set_data(struct llama_context * ctx, const uint8_t * src, size_t size);

enum llama_vocab_type { LLAMA_VOCAB_TYPE_NONE, ... };
enum llama_vocab_type llama_vocab_type(const struct llama_vocab * vocab);
int32_t     llama_vocab_n_tokens(const struct llama_vocab * vocab);
bool        llama_vocab_is_eog(const struct llama_vocab * vocab, llama_token token);
llama_token llama_vocab_fim_pre(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_suf(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_mid(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_rep(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_sep(const struct llama_vocab * vocab);
int32_t     llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len,
                           llama_token * tokens, int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t     llama_token_to_piece(const struct llama_vocab * vocab, llama_token token,
                                 char * buf, int32_t length, int32_t lstrip, bool special);

struct llama_sampler * llama_sampler_chain_init(struct llama_sampler_chain_params params);
void                   llama_sampler_chain_add(struct llama_sampler * chain, struct llama_sampler * smpl);
struct llama_sampler * llama_sampler_init_greedy(void);
struct llama_sampler * llama_sampler_init_dist(uint32_t seed);
struct llama_sampler * llama_sampler_init_top_k(int32_t k);
struct llama_sampler * llama_sampler_init_top_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_min_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_typical(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_top_n_sigma(float n);
struct llama_sampler * llama_sampler_init_xtc(float p, float t, size_t min_keep, uint32_t seed);
struct llama_sampler * llama_sampler_init_temp(float t);
struct llama_sampler * llama_sampler_init_temp_ext(float t, float delta, float exponent);
struct llama_sampler * llama_sampler_init_mirostat(int32_t n_vocab, uint32_t seed, float tau, float eta, int32_t m);
struct llama_sampler * llama_sampler_init_mirostat_v2(uint32_t seed, float tau, float eta);
struct llama_sampler * llama_sampler_init_dry(
    const struct llama_vocab * vocab, float dry_multiplier, float dry_base, int32_t dry_allowed_length,
    int32_t dry_penalty_last_n, const char ** seq_breakers, size_t num_breakers);
struct llama_logit_bias { llama_token token; float bias; };
struct llama_sampler * llama_sampler_init_logit_bias(
        int32_t n_vocab, int32_t n_logit_bias, const struct llama_logit_bias * logit_bias);
struct llama_sampler * llama_sampler_init_penalties(
    int32_t n_vocab, int32_t penalty_last_n, float penalty_repeat, float penalty_freq, float penalty_present);
llama_token            llama_sampler_sample(struct llama_sampler * smpl, struct llama_context * ctx, int32_t idx);
void                   llama_sampler_accept(struct llama_sampler * smpl, llama_token token);
struct llama_sampler * llama_sampler_chain_get(struct llama_sampler * chain, int32_t i);
struct llama_sampler * llama_sampler_clone(const struct llama_sampler * smpl);
void                   llama_sampler_free(struct llama_sampler * smpl);
""")


def declared(header: str) -> str:
    """Return the declarations of kvflash.h without comments, directives and LLAMA_API, which cffi cannot read."""
    text = re.sub(r"//[^\n]*", "", header)
    text = text[text.index('extern "C" {') + len('extern "C" {') : text.rindex("#ifdef __cplusplus")]
    text = re.sub(r"^#define (\w+) .*", r"#define \1 ...", text, flags=re.MULTILINE)
    return re.sub(r"^#(?!define).*", "", text, flags=re.MULTILINE).replace("LLAMA_API ", "")


ffibuilder.cdef(declared(HEADER.read_text()))
ffibuilder.cdef('extern "Python" bool kvf_on_progress(float progress, void * user_data);')

ffibuilder.set_source("pyllama_kvflash.native._kvflash", '#include "kvflash.h"\n#include "ggml-backend.h"\n')
