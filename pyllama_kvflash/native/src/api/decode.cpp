// decoding: batches, the likeliest token, and removal of positions

#include "api/args.h"
#include "coarse/lanes.h"
#include "guests/fresh.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <set>
#include <vector>

static std::mutex                      g_bad_mutex;
static std::set<const llama_context *> g_bad; // may contain freed contexts, which does no harm

void kvf_mark_bad(const llama_context * ctx) {
    const std::lock_guard<std::mutex> lock(g_bad_mutex);
    g_bad.insert(ctx);
}

bool kvf_was_bad(const llama_context * ctx) {
    const std::lock_guard<std::mutex> lock(g_bad_mutex);
    return g_bad.erase(ctx) > 0;
}

static void check_not_paned(llama_context * ctx) {
    const auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    kvf_check(!kv || !llama_kvflash::panes(*kv), "a paned context decodes exact batches only: use kvf_decode_exact()");
}

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

    kvf_take_log();
    if (kvf_was_bad(ctx)) { llama_kvflash::scrub(ctx); }

    const auto * kv      = llama_kvflash::get_kv(ctx->get_memory());
    auto *       mover   = kv && llama_kvflash::is_pool(*kv) ? &llama_kvflash::mover(*kv) : nullptr;
    const auto   is_free = [&](int32_t block) { return llama_kvflash::is_free(*kv, block); };

    if (mover) { mover->order(ctx, is_free); }

    // return values of llama_decode(), which llama.h does not name
    constexpr int DECODED = 0, NO_ROOM = 1, ABORTED = 2, NO_MEMORY = -2;

    switch (llama_decode(ctx, batch)) {
        case DECODED: break;
        case NO_ROOM:
            throw kvf_failure(KVF_E_NO_BLOCK, format("no room in the KV cache for %d tokens at position %d", n, pos[0]));
        case ABORTED: throw kvf_failure(KVF_E_ABORTED, "interrupted");
        case NO_MEMORY: throw kvf_failure(KVF_E_MEMORY, kvf_take_log());
        default: throw kvf_failure(KVF_E_BACKEND, kvf_take_log());
    }
}

void kvf_compute(llama_context * ctx, llama_seq_id seq, llama_pos pos, const llama_token * tokens, int32_t n, int outputs) {
    std::vector<llama_pos>      p(n);
    std::vector<llama_seq_id *> seqs(n, &seq);
    std::vector<int8_t>         out(n, outputs == KVF_OUTPUTS_ALL);

    std::iota(p.begin(), p.end(), pos);
    out[n - 1] = outputs != KVF_OUTPUTS_NONE;

    decode(ctx, tokens, n, p, seqs, out);
}

int kvf_decode(llama_context * ctx, llama_seq_id seq, llama_pos pos, const llama_token * tokens, int32_t n, int outputs) {
    return kvf_guard([&] {
        kvf_check(ctx && tokens, "ctx and tokens must not be null");
        kvf_check_seq(ctx, seq);
        check_not_paned(ctx);
        kvf_check(n > 0 && (uint32_t) n <= llama_n_batch(ctx), "a batch must have 1 to n_batch tokens");
        kvf_check(pos >= 0 && pos <= INT32_MAX - n, "positions must be from 0 to 2^31 - 1");

        kvf_compute(ctx, seq, pos, tokens, n, outputs);
    });
}

int kvf_decode_each(
        llama_context * ctx, const llama_seq_id * seqs, const llama_pos * pos, const llama_token * tokens, int32_t n) {
    return kvf_guard([&] {
        kvf_check(ctx && seqs && pos && tokens, "ctx, seqs, pos and tokens must not be null");
        check_not_paned(ctx);
        kvf_check(
                n > 0 && (uint32_t) n <= llama_n_ubatch(ctx), "a batch of several sequences must have 1 to n_ubatch tokens");

        std::vector<llama_pos>      p(pos, pos + n);
        std::vector<llama_seq_id>   s(seqs, seqs + n);
        std::vector<llama_seq_id *> to(n);
        std::vector<int8_t>         out(n, true);

        for (int32_t i = 0; i < n; ++i) {
            kvf_check_seq(ctx, s[i]);
            kvf_check(p[i] >= 0 && p[i] < INT32_MAX, "positions must be from 0 to 2^31 - 1");
            const bool goes_on = i > 0 && s[i] == s[i - 1] && p[i] == p[i - 1] + 1;
            kvf_check(goes_on || std::find(s.begin(), s.begin() + i, s[i]) == s.begin() + i,
                    "the tokens of a sequence must be consecutive in a batch");
            to[i] = &s[i];
        }

        decode(ctx, tokens, n, p, to, out);
    });
}

// written in lanes, so that it vectorises: a plain loop would have to keep the order of comparisons
static int32_t argmax(const float * x, int32_t n) {
    constexpr int32_t N = 32;

    float   best[N];
    int32_t bad[N] = {}; // NaN or infinity
    std::fill_n(best, N, -INFINITY);

    int32_t i = 0;
    for (; i + N <= n; i += N) {
        for (int32_t j = 0; j < N; ++j) {
            best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
            bad[j] |= !(x[i + j] < INFINITY);
        }
    }
    float top    = *std::max_element(best, best + N);
    bool  is_bad = *std::max_element(bad, bad + N) != 0;
    for (; i < n; ++i) {
        top = x[i] > top ? x[i] : top;
        is_bad |= !(x[i] < INFINITY);
    }
    if (is_bad || top == -INFINITY) { // a few logits of -inf are fine: tokens that the model never produces
        const auto n_bad = std::count_if(x, x + n, [](float logit) { return !std::isfinite(logit); });
        throw kvf_not_finite(format("%d of the model's %d logits", (int) n_bad, n));
    }
    return std::find(x, x + n, top) - x;
}

int kvf_synchronize(llama_context * ctx) {
    return kvf_guard([&] {
        kvf_check(ctx, "ctx must not be null");
        ctx->synchronize();
    });
}

int kvf_argmax(llama_context * ctx, int32_t i, llama_token * token) {
    return kvf_guard([&] {
        kvf_check(ctx && token, "ctx and token must not be null");
        const float * logits = llama_get_logits_ith(ctx, i);
        kvf_check(logits, "the last batch has no logits for output i");
        try {
            *token = argmax(logits, llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
        } catch (...) {
            kvf_mark_bad(ctx);
            throw;
        }
    });
}

// the softmax probability of the largest of n finite logits, `top`
KVF_CLONES static float top_probability(const float * x, int32_t n, float top) {
    lanes_f sum = {};
    int32_t i   = 0;
    for (; i + (int32_t) LANES <= n; i += LANES) {
        sum += exponential(vector_at(x + i) - top);
    }
    float all = sum_lanes(sum);
    for (; i < n; ++i) {
        all += expf(x[i] - top);
    }
    return 1 / all;
}

int kvf_top_probability(llama_context * ctx, int32_t i, float * res) {
    return kvf_guard([&] {
        llama_token likeliest = -1;
        kvf_check(res, "res must not be null");
        const int status = kvf_argmax(ctx, i, &likeliest);
        if (status != KVF_OK) { throw kvf_failure(status, kvf_error()); }
        const float * logits = llama_get_logits_ith(ctx, i);
        *res = top_probability(logits, llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))), logits[likeliest]);
    });
}

static void free_guests(llama_context * ctx, llama_seq_id seq) {
    const auto * kv = llama_kvflash::get_kv(ctx->get_memory());
    if (kv && llama_kvflash::fresh(*kv)) { llama_kvflash::fresh(*kv)->clear(seq); }
}

int kvf_clear(llama_context * ctx) {
    return kvf_guard([&] {
        kvf_check(ctx, "ctx must not be null");
        ctx->synchronize();
        auto * kv = llama_kvflash::get_kv(ctx->get_memory());
        if (kv && llama_kvflash::is_pool(*kv)) { llama_kvflash::mover(*kv).wait(); }
        for (uint32_t seq = 0; seq < llama_n_seq_max(ctx); ++seq) {
            kvf_forget(ctx, seq, 0);
            free_guests(ctx, seq);
        }
        llama_memory_clear(llama_get_memory(ctx), true);
    });
}

int kvf_clear_seq(llama_context * ctx, llama_seq_id seq) {
    return kvf_guard([&] {
        kvf_check(ctx, "ctx must not be null");
        kvf_check_seq(ctx, seq);
        ctx->synchronize();
        auto * kv = llama_kvflash::get_kv(ctx->get_memory());
        if (kv && llama_kvflash::is_pool(*kv)) { llama_kvflash::mover(*kv).wait(); }
        kvf_forget(ctx, seq, 0);
        free_guests(ctx, seq);
        if (kv && llama_kvflash::panes(*kv)) { llama_kvflash::drop_before(*kv, seq); }
        llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
    });
}

int kvf_seq_rm(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    return kvf_guard([&] {
        kvf_check(ctx, "ctx must not be null");
        kvf_check_seq(ctx, seq);
        // an overwritten window cannot be restored: llama.cpp would continue with the rest of it
        if (p1 < 0 && !llama_kvflash::has_window(ctx->get_memory(), seq, p0)) {
            throw kvf_failure(
                    KVF_E_UNSUPPORTED, format("the sliding window before position %d is gone, because later positions "
                                              "have overwritten it; clear the sequence and read its tokens again",
                                               p0));
        }
        kvf_forget(ctx, seq, p0);
        if (!llama_memory_seq_rm(llama_get_memory(ctx), seq, p0, p1)) {
            throw kvf_failure(
                    KVF_E_UNSUPPORTED, format("the recurrent state of this model cannot go back to position %d, because it "
                                              "keeps no earlier state; clear the sequence and read its tokens again",
                                               p0));
        }
    });
}

int kvf_attn_seq_rm(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    return kvf_guard([&] {
        auto & kv = kvf_attention(ctx);
        kvf_check_seq(ctx, seq);
        kvf_forget(ctx, seq, p0);
        kv.seq_rm(seq, p0, p1);
    });
}
