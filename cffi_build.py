"""The cffi declarations of llama.h and kvflash.h that Python may call (API mode).

CMake runs cffi's source generator on this file and compiles the result against the real headers, so a declaration that
differs from them does not compile, and `...` lets the compiler fill in layouts and values.
"""

from cffi import FFI

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

/* ---- kvflash.h ---- */

enum kvf_status {
    KVF_OK, KVF_E_ARGUMENT, KVF_E_UNSUPPORTED, KVF_E_NO_BLOCK, KVF_E_RECORD, KVF_E_STATE, KVF_E_MODEL,
    KVF_E_MEMORY, KVF_E_BACKEND, KVF_E_ABORTED, KVF_E_LOST, KVF_E_LOGITS, ...
};
enum kvf_outputs { KVF_OUTPUTS_NONE, KVF_OUTPUTS_LAST, KVF_OUTPUTS_ALL, ... };
#define KVF_RECORD_MAGIC   ...
#define KVF_RECORD_VERSION ...
#define KVF_UNIT ...
#define KVF_FLAG_V_TRANS   ...
#define KVF_FLAG_ROT_K     ...
#define KVF_FLAG_ROT_V     ...

struct kvf_pool_params {
    uint32_t n_pool; uint32_t n_chunk; uint32_t q_tap; uint64_t fingerprint; uint32_t q_every;
    uint32_t n_exchange; uint32_t coarse_k; uint32_t coarse_v;
    struct llama_context * panes;
};
struct kvf_heads { uint32_t n_query; uint32_t n_kv; uint32_t n_embd; uint32_t n_embd_v; };
struct kvf_codes_info { uint64_t bytes; uint64_t device_bytes; uint32_t n; uint32_t n_known; uint32_t n_block; uint32_t n_slot; };
struct kvf_pane_params { uint32_t n_pane; uint32_t q_tap; uint32_t q_every; uint32_t mass_piece; uint64_t least_bytes; };
struct kvf_pane_info { uint64_t bytes; uint64_t n_bytes; uint32_t n_pane; uint32_t n_layer; uint32_t n_stream; };
struct kvf_pool_info {
    uint32_t n_pool; uint32_t n_chunk; uint32_t n_block; uint32_t n_block_free; uint32_t n_landing; uint32_t n_kv;
    uint32_t n_layer; uint32_t n_copy; uint64_t record_bytes; uint32_t meta_bytes; uint32_t flags;
};
struct kvf_layer {
    int32_t il; int32_t type_k; int32_t type_v; uint32_t n_embd_k; uint32_t n_embd_v;
    uint32_t n_head; uint32_t n_head_kv; uint32_t n_embd_head_k; int32_t device;
    uint64_t offs_k; uint64_t size_k; uint64_t offs_v; uint64_t size_v;
};
struct kvf_kv_bytes { uint64_t attn; uint64_t swa; uint64_t recurrent; };

const char * kvf_error(void);
void kvf_init(void);
void kvf_log_level(int min_level);
void kvf_interrupt(bool stop);
int  kvf_model_load(const char * path, const struct llama_model_params * params, const char * const * on_host,
                    uint32_t n_on_host, struct llama_model ** model);
int  kvf_get_weight(struct llama_model * model, uint32_t i, const char ** name, uint64_t * size, int32_t * device);
uint32_t kvf_n_weight(struct llama_model * model);
int  kvf_context_new(struct llama_model * model, const struct llama_context_params * params,
                     const struct kvf_pool_params * pool, const struct kvf_pane_params * panes,
                     struct llama_context ** ctx);
const char * kvf_memory_class(struct llama_context * ctx);
int  kvf_get_kv_bytes(struct llama_context * ctx, struct kvf_kv_bytes * bytes);
int  kvf_get_compute_bytes(struct llama_context * ctx, int32_t device, uint64_t * bytes);
int  kvf_get_layer(struct llama_context * ctx, uint32_t i, struct kvf_layer * layer);
uint32_t kvf_n_layer(struct llama_context * ctx);
int  kvf_decode(struct llama_context * ctx, llama_seq_id seq, llama_pos pos,
                const llama_token * tokens, int32_t n, int outputs);
int  kvf_decode_exact(struct llama_context * ctx, struct llama_context * pool, llama_seq_id seq, llama_pos pos,
                      const llama_token * tokens, int32_t n, int outputs, void * const * records, uint32_t n_record,
                      size_t record_size);
int  kvf_get_mass(struct llama_context * ctx, uint32_t back, float * dst, uint32_t n_piece);
int  kvf_pace_exact(struct llama_context * ctx, bool paced);
int  kvf_wait_exact(struct llama_context * ctx, uint32_t n, llama_pos * end);
int  kvf_get_pane_info(struct llama_context * ctx, struct kvf_pane_info * info);
int  kvf_synchronize(struct llama_context * ctx);
int  kvf_argmax(struct llama_context * ctx, int32_t i, llama_token * token);
int  kvf_top_probability(struct llama_context * ctx, int32_t i, float * res);
int  kvf_decode_each(struct llama_context * ctx, const llama_seq_id * seqs, const llama_pos * pos,
                     const llama_token * tokens, int32_t n);
int  kvf_clear(struct llama_context * ctx);
int  kvf_clear_seq(struct llama_context * ctx, llama_seq_id seq);
int  kvf_seq_rm(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);
int  kvf_attn_seq_rm(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);
int  kvf_get_pool_info(struct llama_context * ctx, struct kvf_pool_info * info);
int  kvf_blocks(struct llama_context * ctx, int32_t * chunks, int32_t * n_used, llama_seq_id * seqs,
                uint32_t n_block);
int  kvf_block_of(struct llama_context * ctx, llama_seq_id seq, int32_t chunk, int32_t * block);
int  kvf_read(struct llama_context * ctx, llama_seq_id seq, int32_t chunk, void * dst, size_t size, uint64_t * ticket);
int  kvf_drop(struct llama_context * ctx, llama_seq_id seq, int32_t chunk);
int  kvf_page_in(struct llama_context * ctx, llama_seq_id seq, int32_t chunk, const void * src, size_t size,
                 int32_t * block);
int  kvf_commit(struct llama_context * ctx, llama_seq_id seq, int32_t chunk);
int  kvf_cancel(struct llama_context * ctx, llama_seq_id seq, int32_t chunk);
int  kvf_wait(struct llama_context * ctx, uint64_t ticket);
struct kvf_host;
int  kvf_host_new(struct llama_context * ctx, size_t size, struct kvf_host ** host);
void * kvf_host_base(struct kvf_host * host);
void kvf_host_free(struct kvf_host * host);
int  kvf_time_copies(struct llama_context * ctx, size_t size, uint32_t n, bool to_device, double * seconds);
int  kvf_scribble(struct llama_context * ctx, uint8_t byte);
int  kvf_q(struct llama_context * ctx, uint32_t back, float * dst, size_t n, uint64_t * ticket);
int  kvf_q_scale(struct llama_context * ctx, float * dst, uint32_t n);
struct kvf_checksum * kvf_checksum_new(void);
void kvf_checksum_add(struct kvf_checksum * sum, const void * data, size_t size);
void kvf_checksum_get(const struct kvf_checksum * sum, uint8_t * dst);
void kvf_checksum_free(struct kvf_checksum * sum);
int  kvf_quantize(const char * src, const char * dst, const struct llama_model_quantize_params * params);
int  kvf_device_memory(uint32_t device, size_t * n_free, size_t * n_total);
int  kvf_add_rpc(const char * endpoint);
void kvf_drop_rpc(void);

struct kvf_spec;
struct kvf_spec_params { const char * type; int32_t n_max; int32_t n_gram; int32_t window; float p_min; };
struct kvf_tokens;
int  kvf_tokens_new(const struct llama_vocab * vocab, struct kvf_tokens ** tokens);
void kvf_tokens_free(struct kvf_tokens * tokens);
struct kvf_grammar;
struct kvf_grammar_params {
    const char * text; const char * after; bool lazy;
    const char * const * patterns; size_t n_patterns; const llama_token * tokens; size_t n_tokens;
    const char * thinking; const char * const * thought; size_t n_thought;
};
int  kvf_grammar_new(struct kvf_tokens * tokens, const struct llama_vocab * vocab,
                     const struct kvf_grammar_params * params, struct kvf_grammar ** grammar);
int  kvf_grammar_copy(struct kvf_grammar * grammar, struct kvf_grammar ** copy);
int  kvf_grammar_mask(const struct kvf_grammar * grammar, uint64_t * mask, size_t n);
int  kvf_grammar_accept(struct kvf_grammar * grammar, llama_token token);
void kvf_grammar_free(struct kvf_grammar * grammar);
int  kvf_sample(struct llama_context * ctx, int32_t i, struct llama_sampler * chain, int32_t top_k,
                struct kvf_grammar * grammar, llama_token * token);

struct kvf_chat;
struct kvf_reply;
void kvf_text_free(char * text);
int  kvf_chat_new(const struct llama_model * model, const char * source, double seconds, struct kvf_chat ** chat);
void kvf_chat_free(struct kvf_chat * chat);
int  kvf_chat_caps(const struct kvf_chat * chat, char ** result);
int  kvf_chat_apply(const struct kvf_chat * chat, const char * request, double seconds, char ** result);
int  kvf_reply_new(int32_t format, const char * parser, const char * generation_prompt, struct kvf_reply ** reply);
void kvf_reply_free(struct kvf_reply * reply);
int  kvf_reply_push(struct kvf_reply * reply, const char * text, bool partial, char ** deltas);

int  kvf_spec_new(struct llama_context * ctx_tgt, struct llama_context * ctx_dft, const struct kvf_spec_params * params,
                  struct kvf_spec ** spec);
void kvf_spec_free(struct kvf_spec * spec);
int32_t kvf_spec_n_max(const struct kvf_spec * spec);
int  kvf_spec_listen(struct kvf_spec * spec, struct llama_context * ctx, bool on);
int  kvf_spec_begin(struct kvf_spec * spec, const llama_token * tokens, int32_t n);
int  kvf_spec_process(struct kvf_spec * spec, struct llama_context * ctx, llama_pos pos, const llama_token * tokens,
                      int32_t n);
int  kvf_spec_draft(struct kvf_spec * spec, int32_t n_keep, const llama_token * tokens, int32_t n, int32_t n_max,
                    llama_token * draft, int32_t * n_draft);
int  kvf_spec_accept(struct kvf_spec * spec, int32_t n);

enum kvf_summary_kind {
    KVF_SUMMARY_CENTROIDS, KVF_SUMMARY_MEAN, KVF_SUMMARY_DIRECTION, KVF_SUMMARY_ROWS, ...
};
int  kvf_summary_size(const struct kvf_layer * layer, uint32_t n, uint32_t n_row, size_t * size);
int  kvf_summarise(const struct kvf_layer * const * layers, uint32_t n_layer, uint32_t n_chunk, const void * record,
                   size_t record_size, int kind, uint32_t n_row, uint16_t * const * slabs, uint32_t i, uint32_t n);
int  kvf_score(const struct kvf_layer * layer, const uint16_t * slab, uint32_t n, uint32_t n_row, const float * q,
               float * dst, size_t stride);
int  kvf_mass(const struct kvf_layer * const * layers, uint32_t n_layer, const uint16_t * const * const * slabs,
              uint32_t slab_size, uint32_t n, uint32_t n_row, const float * const * q, uint32_t n_q, const float * scales,
              float * dst);
int  kvf_score_keys(const struct kvf_layer * layer, uint32_t n_chunk, const void * const * records, uint32_t n,
                    size_t record_size, const float * q, uint32_t n_token, float scale, uint32_t n_edge, float * dst);
void kvf_set_host_kernels(const void * kernels);
int  kvf_codes_put(struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first,
                   const void * const * records, uint32_t n);
int  kvf_codes_cover(struct llama_context * ctx, llama_seq_id seq, uint32_t first, const void * const * records, uint32_t n);
int  kvf_codes_forget(struct llama_context * ctx, llama_seq_id seq);
uint64_t kvf_choice_bytes(const struct kvf_heads * heads, uint32_t n_layer, uint32_t n_ctx, uint32_t n_seq, uint32_t n_pool, uint32_t n_chunk);
int  kvf_codes_info(struct llama_context * ctx, llama_seq_id seq, struct kvf_codes_info * info);
int  kvf_guests_fetched(struct llama_context * ctx, uint64_t * n);
int  kvf_codes_size(struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, size_t * size);
int  kvf_codes_get(struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, void * dst, size_t size);
int  kvf_codes_set(struct llama_context * ctx, llama_seq_id seq, uint32_t layer, uint32_t n, const void * src, size_t size);
int  kvf_set_guests(struct llama_context * ctx, llama_seq_id seq, uint32_t n, const int32_t * blocks);
int  kvf_get_guests(struct llama_context * ctx, llama_seq_id seq, int32_t * blocks, uint32_t n_block, int32_t * units,
                    size_t n_unit);
int  kvf_place_guests(struct llama_context * ctx, llama_seq_id seq, const int32_t * units, size_t n_unit);
int  kvf_partial_size(struct llama_context * ctx, llama_seq_id seq, size_t * size);
int  kvf_partial_get(struct llama_context * ctx, llama_seq_id seq, void * dst, size_t size);
int  kvf_partial_set(struct llama_context * ctx, llama_seq_id seq, llama_pos pos, const void * src, size_t size);
int  kvf_partial_copy(struct llama_context * from, struct llama_context * to, llama_seq_id seq, llama_pos pos);
int  kvf_set_width(struct llama_context * ctx, uint32_t n_kv);

extern "Python" bool kvf_on_progress(float progress, void * user_data);
""")

ffibuilder.set_source("pyllama_kvflash.native._kvflash", '#include "kvflash.h"\n#include "ggml-backend.h"\n')
