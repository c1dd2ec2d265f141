// the C API: argument checks, exceptions to statuses, the log

#include "kvflash-fresh.h"
#include "kvflash-impl.h"

#include "gguf.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#ifdef GGML_BACKEND_DL
#include <dlfcn.h>
#include <filesystem>
#endif

//
// log and errors
//

static thread_local std::string g_error;

static std::atomic<bool> g_stop      = false;
static std::atomic<int>  g_min_level = GGML_LOG_LEVEL_NONE;

// the library says why it failed in its log only: keep its last error lines
static std::mutex  g_log_mutex;
static std::string g_log;

static constexpr size_t LOG_BYTES = 4096;

static void log_line(ggml_log_level level, const char * text, void * /*ud*/) {
    static thread_local ggml_log_level last = GGML_LOG_LEVEL_NONE;
    if (level != GGML_LOG_LEVEL_CONT) { last = level; }
    if (last >= GGML_LOG_LEVEL_ERROR) {
        const std::lock_guard<std::mutex> lock(g_log_mutex);
        g_log += text;
        if (g_log.size() > LOG_BYTES) { g_log.erase(0, g_log.size() - LOG_BYTES); }
    }
    const int min_level = g_min_level;
    if (min_level != GGML_LOG_LEVEL_NONE && last >= min_level) { fputs(text, stderr); }
}

static std::string take_log() {
    const std::lock_guard<std::mutex> lock(g_log_mutex);

    std::string res;
    res.swap(g_log);
    while (!res.empty() && res.back() == '\n') {
        res.pop_back();
    }
    return res;
}

static int fail(int status, const std::string & what) {
    g_error = what;
    return status;
}

// calls of kvf_guard() that this thread is in
static thread_local int g_guarded = 0;

// a failed GGML_ASSERT of the library would end the process: within a kvf_guard() it becomes an exception instead. its state
// may be damaged then, but the caller can still say what happened, and keep what it has
static void on_abort(const char * message) {
    if (g_guarded > 0) { throw kvf_failure(KVF_E_BACKEND, message); }
    fprintf(stderr, "%s\n", message);
}

int kvf_guard(const std::function<void()> & f) {
    struct enter {
        enter() { g_guarded++; }
        ~enter() { g_guarded--; }
    } const inside;

    g_error.clear();
    try {
        f();
        return KVF_OK;
    } catch (const kvf_failure & err) { return fail(err.status, err.what()); } catch (const std::bad_alloc &) {
        return fail(KVF_E_MEMORY, "out of memory");
    } catch (const std::exception & err) { return fail(KVF_E_BACKEND, err.what()); } catch (...) {
        return fail(KVF_E_BACKEND, "unknown error");
    }
}

// the attention cache of a context
static llama_kv_cache & get_kv(llama_context * ctx, bool pool) {
    kvf_check(ctx, "there is no context");

    auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    if (!kv) { throw kvf_failure(KVF_E_UNSUPPORTED, "this model has no full-attention KV cache"); }
    kvf_check(!pool || llama_kvflash::is_pool(*kv), "this context has no pool");

    return *kv;
}

static void check_seq(llama_context * ctx, llama_seq_id seq) {
    kvf_check(seq >= 0 && (uint32_t) seq < llama_n_seq_max(ctx), "there is no such sequence");
}

static void check_not_paned(llama_context * ctx) {
    const auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    kvf_check(!kv || !llama_kvflash::panes(*kv), "a paned context decodes exact batches only");
}

// the rows from pos on are not what panes and guests have, if the context has any
static void forget(llama_context * ctx, llama_seq_id seq, llama_pos pos) {
    const auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    if (kv && llama_kvflash::panes(*kv)) { llama_kvflash::panes(*kv)->forget(std::max(pos, 0)); }
    if (kv && llama_kvflash::fresh(*kv)) { llama_kvflash::fresh(*kv)->truncate(seq, std::max(pos, 0)); }
}

static void free_guests(llama_context * ctx, llama_seq_id seq) {
    const auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    if (kv && llama_kvflash::fresh(*kv)) { llama_kvflash::fresh(*kv)->clear(seq); }
}

static void check_chunk(const llama_kv_cache & kv, int32_t chunk) {
    kvf_check(chunk >= 0 && chunk < INT32_MAX / (int32_t) llama_kvflash::n_chunk(kv), "there is no such chunk");
}

const char * kvf_error(void) { return g_error.c_str(); }

void kvf_log_level(int min_level) { g_min_level = min_level; }

#ifdef GGML_BACKEND_DL
// a wheel's backends are modules beside this library: the CPU's many times, of which the best for this processor is taken
static void load_backends() {
    Dl_info self;
    if (dladdr((void *) kvf_init, &self)) {
        ggml_backend_load_all_from_path(std::filesystem::path(self.dli_fname).parent_path().c_str());
    }
}
#endif

void kvf_init(void) {
    static std::once_flag once;
    std::call_once(once, [] {
#ifndef _WIN32
        setenv("GGML_NO_BACKTRACE", "1", 0); // it would start a debugger on the process
#endif
        llama_log_set(log_line, nullptr);
        ggml_set_abort_callback(on_abort);
#ifdef GGML_BACKEND_DL
        load_backends();
#endif
        llama_backend_init();
    });
}

void kvf_interrupt(bool stop) { g_stop = stop; }

bool kvf_stopped() { return g_stop.load(std::memory_order_relaxed); }

//
// model and context
//

// the library divides by some metadata, and allocates by other, without a look at it: a damaged file would end the process,
// or keep it busy for ever
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
    if (!meta) { throw kvf_failure(KVF_E_MODEL, take_log()); }

    for (int64_t i = 0; i < gguf_get_n_kv(meta.get()); ++i) {
        if (gguf_get_kv_type(meta.get(), i) != GGUF_TYPE_UINT32) { continue; }
        const std::string key   = gguf_get_key(meta.get(), i);
        const int64_t     value = gguf_get_val_u32(meta.get(), i);
        for (const auto & limit : LIMITS) {
            const size_t n = strlen(limit.suffix);
            if (key.size() > n && key.compare(key.size() - n, n, limit.suffix) == 0 &&
                    (value < limit.low || value > limit.high)) {
                throw kvf_failure(
                        KVF_E_MODEL, format("its metadata is damaged: %s is %lld", key.c_str(), (long long) value));
            }
        }
    }
}

int kvf_model_load(const char * path, const llama_model_params * params, const char * const * on_host, uint32_t n_on_host,
        llama_model ** model) {
    return kvf_guard([&] {
        kvf_check(path && params && model && (on_host || !n_on_host),
                "a path, parameters and a place for the model are needed");
        take_log();
        check_metadata(path);

        // the caller's callback, but for an interrupt
        llama_model_params mparams          = *params;
        mparams.progress_callback_user_data = const_cast<llama_model_params *>(params);
        mparams.progress_callback           = [](float progress, void * ud) {
            const auto * user = (const llama_model_params *) ud;
            return !g_stop &&
                   (!user->progress_callback || user->progress_callback(progress, user->progress_callback_user_data));
        };

        std::vector<llama_model_tensor_buft_override> overrides;
        for (uint32_t i = 0; i < n_on_host; ++i) {
            overrides.push_back({on_host[i], ggml_backend_cpu_buffer_type()});
        }
        overrides.push_back({nullptr, nullptr});
        mparams.tensor_buft_overrides = overrides.data();

        *model = llama_model_load_from_file(path, mparams);
        if (!*model) { throw g_stop ? kvf_failure(KVF_E_ABORTED, "interrupted") : kvf_failure(KVF_E_MODEL, take_log()); }
    });
}

uint32_t kvf_n_weight(llama_model * model) { return model ? model->tensors_by_name.size() : 0; }

int kvf_get_weight(llama_model * model, uint32_t i, const char ** name, uint64_t * size, int32_t * device) {
    return kvf_guard([&] {
        kvf_check(name && size && device && i < kvf_n_weight(model), "there is no such tensor in the model");
        const auto & [its_name, tensor] = model->tensors_by_name[i];

        *name   = its_name.c_str();
        *size   = ggml_nbytes(tensor);
        *device = llama_kvflash::device_index(ggml_backend_buffer_get_type(tensor->buffer));
    });
}

int kvf_context_new(llama_model * model, const llama_context_params * params, const kvf_pool_params * pool,
        const kvf_pane_params * panes, llama_context ** ctx) {
    return kvf_guard([&] {
        kvf_check(model && params && ctx, "a model, parameters and a place for the context are needed");
        kvf_check(!pool || !panes, "a context is pooled or paned, not both");
        take_log();

        llama_context_params cparams = *params;
        cparams.abort_callback       = [](void *) { return kvf_stopped(); };

        // a cache alone does not make a decoder: t5, eagle3 and models with attention in both directions have one, too
        if ((pool || panes) && (!model->hparams.causal_attn || llama_model_has_encoder(model))) {
            throw kvf_failure(
                    KVF_E_UNSUPPORTED, "only a decoder has a pool: this model has an encoder; use a stock context");
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
            // upstream turns every cause into a null pointer: the log tells them apart
            const auto log = take_log();
            throw kvf_failure(log.find("allocate") != std::string::npos ? KVF_E_MEMORY : KVF_E_UNSUPPORTED, log);
        }
    });
}

const char * kvf_memory_class(llama_context * ctx) { return ctx ? llama_kvflash::class_name(ctx->get_memory()) : "none"; }

int kvf_get_kv_bytes(llama_context * ctx, struct kvf_kv_bytes * bytes) {
    return kvf_guard([&] {
        kvf_check(ctx && bytes, "a context and a place for the result are needed");
        *bytes = llama_kvflash::kv_bytes(ctx->get_memory());
    });
}

int kvf_get_compute_bytes(llama_context * ctx, int32_t device, uint64_t * bytes) {
    return kvf_guard([&] {
        kvf_check(ctx && bytes, "a context and a place for the result are needed");

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
        const auto & kv = get_kv(ctx, false);
        kvf_check(layer && i < llama_kvflash::n_layer(kv), "there is no such layer in the attention cache");
        *layer = llama_kvflash::layer(kv, i);
    });
}

//
// decode
//

static void decode(llama_context * ctx, const llama_token * tokens, int32_t n, std::vector<llama_pos> & pos,
        std::vector<llama_seq_id *> & seqs, std::vector<int8_t> & outputs) {
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    for (int32_t i = 0; i < n; ++i) {
        kvf_check(tokens[i] >= 0 && tokens[i] < n_vocab, "a token is not in the vocabulary");
    }

    std::vector<int32_t> n_seq(n, 1);

    llama_batch batch = {};
    batch.n_tokens    = n;
    batch.token       = const_cast<llama_token *>(tokens);
    batch.pos         = pos.data();
    batch.n_seq_id    = n_seq.data();
    batch.seq_id      = seqs.data();
    batch.logits      = outputs.data();

    take_log();

    const auto * kv      = llama_kvflash::get_kv(ctx->get_memory());
    auto *       mover   = kv && llama_kvflash::is_pool(*kv) ? &llama_kvflash::mover(*kv) : nullptr;
    const auto   is_free = [&](int32_t block) { return llama_kvflash::is_free(*kv, block); };

    if (mover) { mover->order(ctx, is_free); }

    switch (llama_decode(ctx, batch)) {
        case 0:
            if (mover) { mover->submitted(llama_kvflash::n_block(*kv), is_free); }
            break;
        case 1: throw kvf_failure(KVF_E_NO_BLOCK, format("no room in the KV cache for %d tokens at position %d", n, pos[0]));
        case 2: throw kvf_failure(KVF_E_ABORTED, "interrupted");
        case -2: throw kvf_failure(KVF_E_MEMORY, take_log());
        default: throw kvf_failure(KVF_E_BACKEND, take_log());
    }
}

void kvf_compute(llama_context * ctx, llama_seq_id seq, llama_pos pos, const llama_token * tokens, int32_t n, int outputs) {
    std::vector<llama_pos>      p(n);
    std::vector<llama_seq_id *> seqs(n, &seq);
    std::vector<int8_t>         out(n, outputs == 2);

    std::iota(p.begin(), p.end(), pos);
    out[n - 1] = outputs != 0;

    decode(ctx, tokens, n, p, seqs, out);
}

int kvf_decode(llama_context * ctx, llama_seq_id seq, llama_pos pos, const llama_token * tokens, int32_t n, int outputs) {
    return kvf_guard([&] {
        kvf_check(ctx && tokens, "a context and tokens are needed");
        check_seq(ctx, seq);
        check_not_paned(ctx);
        kvf_check(n > 0 && (uint32_t) n <= llama_n_batch(ctx), "a batch has 1 to n_batch tokens");
        kvf_check(pos >= 0 && pos <= INT32_MAX - n, "positions are from 0 to 2^31 - 1");

        kvf_compute(ctx, seq, pos, tokens, n, outputs);
    });
}

int kvf_decode_each(
        llama_context * ctx, const llama_seq_id * seqs, const llama_pos * pos, const llama_token * tokens, int32_t n) {
    return kvf_guard([&] {
        kvf_check(ctx && seqs && pos && tokens, "a context, sequences, positions and tokens are needed");
        check_not_paned(ctx);
        kvf_check(n > 0 && (uint32_t) n <= llama_n_ubatch(ctx), "a batch of several sequences has 1 to n_ubatch tokens");

        std::vector<llama_pos>      p(pos, pos + n);
        std::vector<llama_seq_id>   s(seqs, seqs + n);
        std::vector<llama_seq_id *> to(n);
        std::vector<int8_t>         out(n, true);

        for (int32_t i = 0; i < n; ++i) {
            check_seq(ctx, s[i]);
            kvf_check(p[i] >= 0 && p[i] < INT32_MAX, "positions are from 0 to 2^31 - 1");
            const bool goes_on = i > 0 && s[i] == s[i - 1] && p[i] == p[i - 1] + 1;
            kvf_check(goes_on || std::find(s.begin(), s.begin() + i, s[i]) == s.begin() + i,
                    "the tokens of a sequence follow each other in a batch");
            to[i] = &s[i];
        }

        decode(ctx, tokens, n, p, to, out);
    });
}

// in lanes, which become vector instructions: a plain loop would have to keep the order of its comparisons
static int32_t argmax(const float * x, int32_t n) {
    constexpr int32_t N = 32;

    float best[N];
    std::fill_n(best, N, -INFINITY);

    int32_t i = 0;
    for (; i + N <= n; i += N) {
        for (int32_t j = 0; j < N; ++j) {
            best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
        }
    }
    float top = *std::max_element(best, best + N);
    for (; i < n; ++i) {
        top = x[i] > top ? x[i] : top;
    }
    const auto * at = std::find(x, x + n, top);
    return at == x + n ? 0 : at - x; // not a number everywhere: as llama.cpp's greedy sampler
}

int kvf_argmax(llama_context * ctx, int32_t i, llama_token * token) {
    return kvf_guard([&] {
        kvf_check(ctx && token, "a context and a place for the token are needed");
        const float * logits = llama_get_logits_ith(ctx, i);
        kvf_check(logits, "the last batch has no such output");
        *token = argmax(logits, llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
    });
}

int kvf_clear(llama_context * ctx) {
    return kvf_guard([&] {
        kvf_check(ctx, "there is no context");
        ctx->synchronize();
        auto * kv = llama_kvflash::get_kv(ctx->get_memory());
        if (kv && llama_kvflash::is_pool(*kv)) {
            llama_kvflash::mover(*kv).wait();
            llama_kvflash::mover(*kv).landings.clear();
        }
        for (uint32_t seq = 0; seq < llama_n_seq_max(ctx); ++seq) {
            forget(ctx, seq, 0);
            free_guests(ctx, seq);
        }
        llama_memory_clear(llama_get_memory(ctx), true);
    });
}

int kvf_clear_seq(llama_context * ctx, llama_seq_id seq) {
    return kvf_guard([&] {
        kvf_check(ctx, "there is no context");
        check_seq(ctx, seq);
        ctx->synchronize();
        auto * kv = llama_kvflash::get_kv(ctx->get_memory());
        if (kv && llama_kvflash::is_pool(*kv)) {
            auto & mover = llama_kvflash::mover(*kv);
            mover.wait();
            mover.landings.erase(std::remove_if(mover.landings.begin(), mover.landings.end(),
                                         [&](const auto & l) { return l.seq == seq; }),
                    mover.landings.end());
        }
        forget(ctx, seq, 0);
        free_guests(ctx, seq);
        llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
    });
}

int kvf_seq_rm(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    return kvf_guard([&] {
        kvf_check(ctx, "there is no context");
        check_seq(ctx, seq);
        // a window that was overwritten does not come back: the library would go on with what is left of it
        if (p1 < 0 && !llama_kvflash::has_window(ctx->get_memory(), seq, p0)) {
            throw kvf_failure(KVF_E_UNSUPPORTED, format("the sliding window before position %d is gone, for later positions "
                                                        "have taken its cells; clear the sequence and read its tokens again",
                                                         p0));
        }
        forget(ctx, seq, p0);
        if (!llama_memory_seq_rm(llama_get_memory(ctx), seq, p0, p1)) {
            throw kvf_failure(
                    KVF_E_UNSUPPORTED, format("the recurrent state of this model cannot go back to position %d, for it "
                                              "keeps no earlier one; clear the sequence and read its tokens again",
                                               p0));
        }
    });
}

int kvf_attn_seq_rm(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    return kvf_guard([&] {
        auto & kv = get_kv(ctx, false);
        check_seq(ctx, seq);
        forget(ctx, seq, p0);
        kv.seq_rm(seq, p0, p1);
    });
}

//
// pool
//

int kvf_get_pool_info(llama_context * ctx, struct kvf_pool_info * info) {
    return kvf_guard([&] {
        const auto & kv = get_kv(ctx, true);
        kvf_check(info, "a place for the result is needed");
        *info = llama_kvflash::info(kv);
    });
}

int kvf_blocks(llama_context * ctx, int32_t * chunks, int32_t * n_used, llama_seq_id * seqs, uint32_t n_block) {
    return kvf_guard([&] {
        const auto & kv = get_kv(ctx, true);
        kvf_check(chunks && n_used && seqs && n_block == llama_kvflash::n_block(kv), "room for n_block values is needed");
        llama_kvflash::blocks(kv, chunks, n_used, seqs);
    });
}

int kvf_block_of(llama_context * ctx, llama_seq_id seq, int32_t chunk, int32_t * block) {
    return kvf_guard([&] {
        const auto & kv = get_kv(ctx, true);
        check_seq(ctx, seq);
        check_chunk(kv, chunk);
        kvf_check(block, "a place for the result is needed");
        *block = llama_kvflash::block_of(kv, seq, chunk);
    });
}

int kvf_read(llama_context * ctx, llama_seq_id seq, int32_t chunk, void * dst, size_t size, uint64_t * ticket) {
    return kvf_guard([&] {
        const auto & kv = get_kv(ctx, true);
        check_seq(ctx, seq);
        check_chunk(kv, chunk);
        kvf_check(dst && size == llama_kvflash::mover(kv).record_bytes, "record_bytes of room are needed");
        kvf_check(ticket, "a place for the ticket is needed");
        *ticket = llama_kvflash::read(ctx, kv, seq, chunk, dst);
    });
}

int kvf_drop(llama_context * ctx, llama_seq_id seq, int32_t chunk) {
    return kvf_guard([&] {
        auto & kv = get_kv(ctx, true);
        check_seq(ctx, seq);
        check_chunk(kv, chunk);
        llama_kvflash::drop(kv, seq, chunk);
    });
}

int kvf_page_in(llama_context * ctx, llama_seq_id seq, int32_t chunk, const void * src, size_t size, int32_t * block) {
    return kvf_guard([&] {
        auto & kv = get_kv(ctx, true);
        check_seq(ctx, seq);
        check_chunk(kv, chunk);
        kvf_check(src && block && *block >= -1, "a record, and a block or -1 are needed");
        const size_t want = llama_kvflash::mover(kv).record_bytes;
        if (size != want) {
            throw kvf_failure(KVF_E_RECORD, format("a record of this cache has %zu bytes, not %zu", want, size));
        }
        *block = llama_kvflash::page_in(ctx, kv, seq, chunk, src, *block);
    });
}

int kvf_commit(llama_context * ctx, llama_seq_id seq, int32_t chunk) {
    return kvf_guard([&] {
        auto & kv = get_kv(ctx, true);
        check_seq(ctx, seq);
        check_chunk(kv, chunk);
        llama_kvflash::commit(ctx, kv, seq, chunk);
    });
}

int kvf_cancel(llama_context * ctx, llama_seq_id seq, int32_t chunk) {
    return kvf_guard([&] {
        auto & kv = get_kv(ctx, true);
        check_seq(ctx, seq);
        check_chunk(kv, chunk);
        llama_kvflash::cancel(kv, seq, chunk);
    });
}

int kvf_wait(llama_context * ctx, uint64_t ticket) {
    return kvf_guard([&] {
        auto & mover = llama_kvflash::mover(get_kv(ctx, true));
        if (ticket) {
            mover.wait(ticket);
        } else {
            mover.wait();
        }
    });
}

int kvf_scribble(llama_context * ctx, uint8_t byte) {
    return kvf_guard([&] { llama_kvflash::scribble(ctx, get_kv(ctx, true), byte); });
}

int kvf_host_new(llama_context * ctx, size_t size, kvf_host ** host) {
    return kvf_guard([&] {
        auto * dev = llama_kvflash::mover(get_kv(ctx, true)).pinned_for();
        kvf_check(host && size > 0, "a size, and a place for the memory are needed");

        const bool pin = dev && ggml_backend_dev_host_buffer_type(dev) && !getenv("GGML_CUDA_NO_PINNED");
        *host          = pin ? new kvf_host(dev, size) : nullptr;
    });
}

void * kvf_host_base(kvf_host * host) { return host ? host->base : nullptr; }

void kvf_host_free(kvf_host * host) { delete host; }

int kvf_time_copies(llama_context * ctx, size_t size, uint32_t n, bool to_device, double * seconds) {
    return kvf_guard([&] {
        kvf_check(size > 0 && n > 0 && seconds, "sizes, and a place for the result are needed");
        *seconds = llama_kvflash::mover(get_kv(ctx, true)).time_copies(size, n, to_device);
    });
}

//
// the state that no chunk holds
//

static constexpr llama_state_seq_flags PARTIAL = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

// a plain cache has none, and upstream would write all of its cells
static bool has_partial(llama_context * ctx) { return llama_kvflash::has_partial(ctx->get_memory()); }

int kvf_partial_size(llama_context * ctx, llama_seq_id seq, size_t * size) {
    return kvf_guard([&] {
        kvf_check(ctx && size, "a context and a place for the result are needed");
        check_seq(ctx, seq);
        if (const auto * kv = llama_kvflash::get_window(ctx->get_memory())) {
            *size = llama_kvflash::window_size(*kv, seq);
            return;
        }
        *size = has_partial(ctx) ? llama_state_seq_get_size_ext(ctx, seq, PARTIAL) : 0;
    });
}

int kvf_partial_get(llama_context * ctx, llama_seq_id seq, void * dst, size_t size) {
    return kvf_guard([&] {
        kvf_check(ctx && dst, "a context and a place for the state are needed");
        check_seq(ctx, seq);
        if (const auto * kv = llama_kvflash::get_window(ctx->get_memory())) {
            llama_kvflash::window_get(ctx, *kv, seq, dst, size);
            return;
        }
        take_log();
        if (has_partial(ctx) && llama_state_seq_get_data_ext(ctx, (uint8_t *) dst, size, seq, PARTIAL) != size) {
            throw kvf_failure(KVF_E_BACKEND, "the state cannot be saved: " + take_log());
        }
    });
}

int kvf_partial_set(llama_context * ctx, llama_seq_id seq, llama_pos pos, const void * src, size_t size) {
    return kvf_guard([&] {
        kvf_check(ctx && src, "a context and a state are needed");
        check_seq(ctx, seq);
        kvf_check(pos >= 0, "positions are from 0 to 2^31 - 1");
        kvf_check(has_partial(ctx) == (size > 0), "this is no state of this model");
        take_log();
        if (auto * kv = llama_kvflash::get_window(ctx->get_memory())) {
            llama_kvflash::window_set(ctx, *kv, seq, src, size);
        } else if (has_partial(ctx) &&
                   llama_state_seq_set_data_ext(ctx, (const uint8_t *) src, size, seq, PARTIAL) != size) {
            throw kvf_failure(KVF_E_BACKEND, "the state cannot be restored: " + take_log());
        }
        forget(ctx, seq, pos);
        if (auto * kv = llama_kvflash::get_kv(ctx->get_memory())) { kv->seq_rm(seq, pos, -1); }
    });
}

int kvf_set_width(llama_context * ctx, uint32_t n_kv) {
    return kvf_guard([&] { llama_kvflash::set_n_kv(get_kv(ctx, true), n_kv); });
}

//
// relevance
//

static void check_summary(const kvf_layer * layer, uint32_t n, int kind, uint32_t n_row, uint32_t n_chunk) {
    kvf_check(layer, "a layer is needed");
    if (layer->n_embd_head_k % 2 || layer->n_head_kv == 0 || layer->n_head % layer->n_head_kv ||
            layer->n_embd_k != layer->n_head_kv * layer->n_embd_head_k) {
        throw kvf_failure(KVF_E_UNSUPPORTED, format("the keys of layer %d are no %u heads of %u dimensions", layer->il,
                                                     layer->n_head_kv, layer->n_embd_head_k));
    }
    const bool one = kind == KVF_SUMMARY_MEAN || kind == KVF_SUMMARY_DIRECTION;
    kvf_check(kind >= KVF_SUMMARY_CENTROIDS && kind <= KVF_SUMMARY_RUNS, "there is no such kind of summary");
    kvf_check(n_row >= 1 && n_row <= 64 && (n_row & (n_row - 1)) == 0, "a summary has 1, 2, 4, ... 64 rows");
    kvf_check(n_chunk == 0 || n_row <= n_chunk, "a summary has at most as many rows as the chunk has keys");
    kvf_check(n >= 1 && n <= INT32_MAX / 64, "a slab has at least one entry");
    kvf_check((!one || n_row == 1) && (kind != KVF_SUMMARY_MINMAX || n_row == 2) &&
                      (kind != KVF_SUMMARY_ROWS || n_chunk == 0 || n_row == n_chunk),
            "this kind of summary has another number of rows");
}

int kvf_summary_size(const struct kvf_layer * layer, uint32_t n, uint32_t n_row, size_t * size) {
    return kvf_guard([&] {
        check_summary(layer, n, KVF_SUMMARY_CENTROIDS, n_row, 0);
        kvf_check(size, "a place for the result is needed");
        *size = kvf_summary::size(*layer, n, n_row);
    });
}

static void check_record(const kvf_layer & layer, uint32_t n_chunk, const void * record, size_t record_size) {
    kvf_check(n_chunk == 16 || n_chunk == 32 || n_chunk == 64, "a chunk has 16, 32 or 64 positions");
    kvf_check(record && layer.size_k == ggml_row_size((ggml_type) layer.type_k, layer.n_embd_k) * n_chunk &&
                      layer.offs_k + layer.size_k <= record_size,
            "the record is shorter than this layer's keys");
}

int kvf_summarise(const struct kvf_layer * const * layers, uint32_t n_layer, uint32_t n_chunk, const void * record,
        size_t record_size, int kind, uint32_t n_row, uint16_t * const * slabs, uint32_t i, uint32_t n) {
    return kvf_guard([&] {
        kvf_check(layers && slabs && i < n, "layers, and slabs with this entry, are needed");
        for (uint32_t il = 0; il < n_layer; ++il) {
            check_summary(layers[il], n, kind, n_row, n_chunk);
            check_record(*layers[il], n_chunk, record, record_size);
            kvf_check(slabs[il], "a slab of each layer is needed");
        }
        for (uint32_t il = 0; il < n_layer; ++il) {
            kvf_summary::write(*layers[il], n_chunk, record, kind, n_row, slabs[il], i);
        }
    });
}

int kvf_score_keys(const struct kvf_layer * layer, uint32_t n_chunk, const void * const * records, uint32_t n,
        size_t record_size, const float * q, uint32_t n_token, float scale, uint32_t n_edge, float * dst) {
    return kvf_guard([&] {
        check_summary(layer, 1, KVF_SUMMARY_MEAN, 1, n_chunk);
        kvf_check(records && q && n_token >= 1 && dst, "records, queries and room for the scores are needed");
        for (uint32_t i = 0; i < n; ++i) {
            check_record(*layer, n_chunk, records[i], record_size);
        }
        kvf_check(n_edge <= n_chunk && (scale != 0 || n_edge == 0),
                "a chunk has no such edges, or they have no largest product");
        kvf_summary::score_keys(*layer, n_chunk, records, n, q, n_token, scale, n_edge, dst);
    });
}

int kvf_score(const struct kvf_layer * layer, const uint16_t * slab, uint32_t n, int kind, uint32_t n_row, const float * q,
        float * dst, size_t stride) {
    return kvf_guard([&] {
        check_summary(layer, n, kind, n_row, 0);
        kvf_check(slab && q && dst && stride >= n, "a slab, queries and room for the scores are needed");
        kvf_summary::score(*layer, slab, n, kind, n_row, q, dst, stride);
    });
}

int kvf_mass(const struct kvf_layer * const * layers, uint32_t n_layer, const uint16_t * const * const * slabs,
        uint32_t slab_size, uint32_t n, uint32_t n_row, const float * const * q, uint32_t n_q, const float * scales,
        float * dst) {
    return kvf_guard([&] {
        kvf_check(layers && slabs && q && scales && dst && n_q >= 1,
                "layers, slabs, queries and room for the masses are needed");
        kvf_check(slab_size * n_row % 16 == 0, "a slab has whole panels");
        for (uint32_t i = 0; i < n_layer; ++i) {
            check_summary(layers[i], slab_size, KVF_SUMMARY_RUNS, n_row, 0);
            kvf_check(slabs[i] && q[i], "slabs and queries of each layer are needed");
            kvf_summary::mass(*layers[i], slabs[i], slab_size, n, n_row, q[i], n_q, scales[i], dst + (size_t) i * n);
        }
    });
}

void kvf_exchange_features(llama_context * a, llama_context * b) {
    if (a != b) { llama_kvflash::exchange_features(*a, *b); }
}

// the attention cache of a context that may keep queries
static llama_kv_cache & get_tapped(llama_context * ctx) {
    auto & kv = get_kv(ctx, false);
    return llama_kvflash::panes(kv) ? kv : get_kv(ctx, true);
}

int kvf_q_scale(llama_context * ctx, float * dst, uint32_t n) {
    return kvf_guard([&] {
        const auto & kv   = get_tapped(ctx);
        const auto * res  = llama_kvflash::graph(ctx);
        const auto   taps = llama_kvflash::tapped(kv);
        kvf_check(dst && n == taps.size(), "room for a number of each tapped layer is needed");
        for (uint32_t i = 0; i < n; ++i) {
            const int32_t il = llama_kvflash::layer(kv, taps[i]).il;
            if (!res || !res->t_q[il]) {
                throw kvf_failure(KVF_E_STATE, "no queries: nothing was decoded, or the pool has no Q tap");
            }
            dst[i] = res->q_scale[il];
        }
    });
}

int kvf_q(llama_context * ctx, uint32_t back, float * dst, size_t n, uint64_t * ticket) {
    return kvf_guard([&] {
        const auto & kv  = get_tapped(ctx);
        const auto * res = llama_kvflash::graph(ctx);
        kvf_check(dst && ticket, "room for the queries and the ticket is needed");

        std::vector<kvf_mover::rows> tensors;

        size_t n_all = 0;
        for (const uint32_t i : llama_kvflash::tapped(kv)) {
            const auto * q = res ? res->t_q[llama_kvflash::layer(kv, i).il] : nullptr;
            if (!q) { throw kvf_failure(KVF_E_STATE, "no queries: nothing was decoded, or the pool has no Q tap"); }
            kvf_check(q->type == GGML_TYPE_F32, "the queries are no floats");
            kvf_check(back < q->ne[2], "the queries of a token so far back are not kept");
            tensors.push_back({q, (q->ne[2] - 1 - back) * q->nb[2], q->nb[2]});
            n_all += q->nb[2] / sizeof(float);
        }
        kvf_check(n == n_all, "room for n_head*n_embd_head_k floats of all tapped layers is needed");

        if (llama_kvflash::is_pool(kv)) {
            *ticket = llama_kvflash::mover(kv).fetch(ctx, tensors, dst);
            return;
        }
        ctx->synchronize();
        for (const auto & r : tensors) {
            ggml_backend_tensor_get(r.tensor, dst, r.at, r.size);
            dst += r.size / sizeof(float);
        }
        *ticket = 0;
    });
}

int kvf_quantize(const char * src, const char * dst, const llama_model_quantize_params * params) {
    return kvf_guard([&] {
        kvf_check(src && dst && params, "two paths and parameters are needed");
        take_log();
        if (llama_model_quantize(src, dst, params) != 0) { throw kvf_failure(KVF_E_MODEL, take_log()); }
    });
}

int kvf_add_rpc(const char * endpoint) {
    return kvf_guard([&] {
        kvf_check(endpoint, "an endpoint is needed");
        kvf_init();
        take_log();

        auto *     reg = ggml_backend_reg_by_name("RPC");
        const auto add = reg ? (ggml_backend_reg_t(*)(const char *)) ggml_backend_reg_get_proc_address(
                                       reg, "ggml_backend_rpc_add_server")
                             : nullptr;
        if (!add) { throw kvf_failure(KVF_E_UNSUPPORTED, "this build has no RPC backend"); }

        auto * server = add(endpoint);
        if (!server) { throw kvf_failure(KVF_E_BACKEND, "the RPC server cannot be reached: " + take_log()); }
        ggml_backend_register(server);
    });
}
