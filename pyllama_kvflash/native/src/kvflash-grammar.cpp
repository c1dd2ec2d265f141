// sampling under a grammar, by llama.cpp's own: see kvflash.h

#include "kvflash-guard.h"

#include "../src/llama-grammar.h" // the parser, for what is wrong with a grammar
#include "json-schema-to-grammar.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

// an error of the library as one line
static kvf_failure in_words(const std::exception & err) {
    std::string what = err.what();
    std::replace(what.begin(), what.end(), '\n', ' ');
    return kvf_failure(KVF_E_ARGUMENT, what);
}

// throws what is wrong: llama_sampler_init_grammar() prints it
static void check_grammar(const llama_vocab * vocab, const char * text) {
    llama_grammar_parser parser(vocab);

    const char * pos = text;
    while (true) {
        while (*pos && (isspace((unsigned char) *pos) || *pos == '#')) {
            const bool comment = *pos == '#';
            pos += comment ? strcspn(pos, "\r\n") : 1;
        }
        if (!*pos) { break; }
        pos = parser.parse_rule(pos);
    }
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            throw kvf_failure(KVF_E_ARGUMENT, "rule '" + name + "' is not defined");
        }
    }
    kvf_check(parser.symbol_ids.count("root"), "there is no rule 'root'");
}

int kvf_json_grammar(const char * schema, char * dst, size_t size, size_t * n) {
    return kvf_guard([&] {
        kvf_check(schema && n, "a schema and a place for the size are needed");
        std::string found;
        try {
            found = json_schema_to_grammar(common_json::parse(schema));
        } catch (const std::exception & err) { throw in_words(err); }

        *n = found.size() + 1;
        if (dst && size >= *n) { memcpy(dst, found.c_str(), *n); }
    });
}

int kvf_grammar_new(const llama_vocab * vocab, const char * text, llama_sampler ** grammar) {
    return kvf_guard([&] {
        kvf_check(vocab && text && grammar, "a vocabulary, a grammar and a place for the sampler are needed");
        try {
            check_grammar(vocab, text);
        } catch (const std::exception & err) { throw in_words(err); }

        *grammar = llama_sampler_init_grammar(vocab, text, "root");
        kvf_check(*grammar, "its rules refer to themselves from the left");
    });
}

int kvf_sample(llama_context * ctx, int32_t i, llama_sampler * chain, llama_sampler * grammar, llama_token * token) {
    return kvf_guard([&] {
        kvf_check(ctx && chain && grammar && token, "a context, samplers and a place for the token are needed");
        const float * logits = llama_get_logits_ith(ctx, i);
        kvf_check(logits, "the last batch has no such output");

        std::vector<llama_token_data> all(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
        const auto                    choose = [&](llama_sampler * first) {
            for (size_t t = 0; t < all.size(); ++t) {
                all[t] = {(llama_token) t, logits[t], 0.0f};
            }
            llama_token_data_array candidates = {all.data(), all.size(), -1, false};
            if (first) { llama_sampler_apply(first, &candidates); }
            llama_sampler_apply(chain, &candidates);
            kvf_check(candidates.selected >= 0, "the chain chooses nothing");
            return candidates.data[candidates.selected];
        };

        // mostly the grammar lets through what is chosen without it; to ask it about every token takes far longer
        llama_token_data       found = choose(nullptr);
        llama_token_data       one   = {found.id, 1.0f, 0.0f};
        llama_token_data_array alone = {&one, 1, -1, false};
        llama_sampler_apply(grammar, &alone);
        if (std::isinf(one.logit)) { found = choose(grammar); }
        if (std::isinf(found.logit)) {
            throw kvf_failure(KVF_E_BACKEND, "the model has no token that the grammar lets through here");
        }
        llama_sampler_accept(grammar, found.id);
        llama_sampler_accept(chain, found.id);
        *token = found.id;
    });
}
