// kvflash-plain: what a stock context of llama.h computes, and how fast, for bench/upstream.py
//
// Nothing of kvflash.h is used: the same source is linked with the patched libllama and with upstream's, and must write the
// same bytes. Beside batches and single tokens it does what the patched functions of a stock cache are for: forget
// positions, clear, restore a whole-context state, shift.

#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

static void expect(bool ok, const char * what) {
    if (!ok) { throw std::runtime_error(what); }
}

struct plain {
    llama_model *        model = nullptr;
    llama_context *      ctx   = nullptr;
    std::vector<float>   logits;
    std::vector<int32_t> tokens;
    int32_t              n_vocab = 0;
    bool                 shifts  = true;

    plain(const char * path, const std::string & cache, int32_t n_batch, int32_t n_threads) {
        static const std::map<std::string, ggml_type> types = {
                {"f16", GGML_TYPE_F16}, {"f16-nofa", GGML_TYPE_F16}, {"q8_0", GGML_TYPE_Q8_0}};

        model = llama_model_load_from_file(path, llama_model_default_params());
        expect(model, "the model cannot be loaded");

        auto params            = llama_context_default_params();
        params.n_ctx           = 2048;
        params.n_batch         = n_batch;
        params.n_ubatch        = n_batch;
        params.n_threads       = n_threads;
        params.n_threads_batch = n_threads;
        params.type_k          = types.at(cache);
        params.type_v          = types.at(cache);
        params.swa_full        = false;
        params.flash_attn_type = cache == "f16-nofa" ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_ENABLED;

        shifts = cache != "q8_0"; // RoPE of a part of a quantised row is not implemented

        ctx = llama_init_from_model(model, params);
        expect(ctx, "the context cannot be made");

        n_vocab      = llama_vocab_n_tokens(llama_model_get_vocab(model));
        uint64_t rnd = 1;
        for (int32_t i = 0; i < 4096; ++i) {
            rnd = rnd * 6364136223846793005u + 1442695040888963407u;
            tokens.push_back((rnd >> 33) % n_vocab);
        }
    }

    ~plain() {
        llama_free(ctx);
        llama_model_free(model);
    }

    // tokens [begin, end) at positions from begin - shift on, in batches of n, and the last logits of each
    void feed(int32_t begin, int32_t end, int32_t n, int32_t shift = 0) {
        for (int32_t i = begin; i < end; i += n) {
            const int32_t size = std::min(n, end - i);

            auto batch     = llama_batch_init(size, 0, 1);
            batch.n_tokens = size;
            for (int32_t j = 0; j < size; ++j) {
                batch.token[j]     = tokens[i + j];
                batch.pos[j]       = i + j - shift;
                batch.n_seq_id[j]  = 1;
                batch.seq_id[j][0] = 0;
                batch.logits[j]    = j == size - 1;
            }
            const int status = llama_decode(ctx, batch);
            llama_batch_free(batch);
            expect(status == 0, "a batch cannot be decoded");

            const float * last = llama_get_logits_ith(ctx, -1);
            expect(last, "there are no logits");
            logits.insert(logits.end(), last, last + n_vocab);
        }
    }

    // what else a stock cache can do. which of it this one does is printed
    void more(int32_t n) {
        auto * mem = llama_get_memory(ctx);

        if (llama_memory_seq_rm(mem, 0, n - 3, -1)) { // a recurrent state cannot
            printf(" rm");
            feed(n - 3, n, 1);
        }

        std::vector<uint8_t> state(llama_state_get_size(ctx));
        expect(llama_state_get_data(ctx, state.data(), state.size()) == state.size(), "the state cannot be read");
        llama_memory_clear(mem, true);
        feed(0, 100, 50);
        if (llama_state_set_data(ctx, state.data(), state.size()) == state.size()) {
            printf(" state");
            feed(n, n + 5, 1);
        }

        if (shifts && llama_memory_can_shift(mem)) {
            printf(" shift");
            llama_memory_seq_rm(mem, 0, 100, 200);
            llama_memory_seq_add(mem, 0, 200, -1, -100);
            feed(n + 5, n + 10, 1, 100);
        }
    }
};

// seconds that the process has computed: others on the machine do not count
static double seconds() { return (double) clock() / CLOCKS_PER_SEC; }

int main(int argc, char ** argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: %s MODEL.gguf f16|f16-nofa|q8_0 N_PROMPT N_BATCH N_STEPS FILE|-\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);

    try {
        const int32_t n_prompt = atoi(argv[3]), n_batch = atoi(argv[4]), n_steps = atoi(argv[5]);

        plain run(argv[1], argv[2], n_batch, 1);
        run.feed(0, n_batch, n_batch); // to warm up
        llama_memory_clear(llama_get_memory(run.ctx), true);

        const double t0 = seconds();
        run.feed(0, n_prompt, n_batch);
        const double t1 = seconds();
        run.feed(n_prompt, n_prompt + n_steps, 1);
        const double t2 = seconds();

        printf("%.6f %.6f", t1 - t0, t2 - t1);
        if (std::string(argv[6]) == "-") { return 0; }

        run.more(n_prompt + n_steps);

        const std::unique_ptr<FILE, int (*)(FILE *)> file(fopen(argv[6], "wb"), fclose);
        expect(file && fwrite(run.logits.data(), 4, run.logits.size(), file.get()) == run.logits.size(), "cannot write");
    } catch (const std::exception & err) {
        fprintf(stderr, "%s\n", err.what());
        return 1;
    }
}
