// sampling under a grammar, by llama.cpp's own: see kvflash.h

#include "kvflash-guard.h"

#include "../src/llama-grammar.h" // the parser, for what is wrong with a grammar
#include "common.h"
#include "json-schema-to-grammar.h"
#include "llama-cpp.h"
#include "reasoning-budget.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <memory>
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

struct kvf_grammar {
    llama_sampler_ptr rules;
    llama_sampler_ptr thinking; // where the answer is in its reasoning; none: that does not matter

    // whether the rules hold where the answer is
    bool holds() const {
        if (!thinking) { return true; }
        const auto state = common_reasoning_budget_get_state(thinking.get());
        return state == REASONING_BUDGET_IDLE || state == REASONING_BUDGET_DONE;
    }

    void accept(llama_token token) const {
        const bool held = holds();
        if (thinking) {
            llama_sampler_accept(thinking.get(), token);
            // what ends the reasoning may also begin the grammar
            const auto * end = held || !holds() ? nullptr : common_reasoning_budget_get_end_match(thinking.get());
            for (const llama_token last : end ? *end : llama_tokens()) {
                llama_sampler_accept(rules.get(), last);
            }
        }
        if (held) { llama_sampler_accept(rules.get(), token); }
    }
};

// the tokens of what a template puts before an answer; some tokenizers add a space that is not there
static llama_tokens tokens_before(const llama_vocab * vocab, const std::string & text) {
    auto res = text.empty() ? llama_tokens() : common_tokenize(vocab, text, false, true);
    if (!res.empty() && !isspace((unsigned char) text[0])) {
        const std::string first = common_token_to_piece(vocab, res[0], true);
        if (!first.empty() && isspace((unsigned char) first[0])) { res.erase(res.begin()); }
    }
    return res;
}

static llama_sampler * thinking_of(const llama_vocab * vocab, const kvf_grammar_params & params) {
    if (!params.lazy || !*params.thinking || params.n_thought == 0) { return nullptr; }
    std::vector<llama_tokens> ends;
    for (size_t i = 0; i < params.n_thought; ++i) {
        ends.push_back(common_tokenize(vocab, params.thought[i], false, true));
    }
    return common_reasoning_budget_init(vocab, {common_tokenize(vocab, params.thinking, false, true)}, ends, {}, INT_MAX);
}

int kvf_grammar_new(const llama_vocab * vocab, const kvf_grammar_params * params, kvf_grammar ** grammar) {
    return kvf_guard([&] {
        kvf_check(vocab && params && grammar, "a vocabulary, a grammar and a place for it are needed");
        try {
            check_grammar(vocab, params->text);

            auto   res  = std::make_unique<kvf_grammar>();
            auto & p    = *params;
            auto * lazy = p.lazy ? llama_sampler_init_grammar_lazy_patterns(vocab, p.text, "root",
                                           const_cast<const char **>(p.patterns), p.n_patterns, p.tokens, p.n_tokens)
                                 : nullptr;
            res->rules.reset(p.lazy ? lazy : llama_sampler_init_grammar(vocab, p.text, "root"));
            kvf_check((bool) res->rules, "its rules refer to themselves from the left");

            res->thinking.reset(thinking_of(vocab, p));
            for (const llama_token token : tokens_before(vocab, p.after)) {
                if (res->thinking) { llama_sampler_accept(res->thinking.get(), token); }
                if (!p.lazy) { llama_sampler_accept(res->rules.get(), token); }
            }
            *grammar = res.release();
        } catch (const kvf_failure &) { throw; } catch (const std::exception & err) {
            throw in_words(err);
        }
    });
}

int kvf_grammar_copy(const kvf_grammar * grammar, kvf_grammar ** copy) {
    return kvf_guard([&] {
        kvf_check(grammar && copy, "a grammar and a place for its copy are needed");
        auto res = std::make_unique<kvf_grammar>();
        res->rules.reset(llama_sampler_clone(grammar->rules.get()));
        if (grammar->thinking) { res->thinking.reset(llama_sampler_clone(grammar->thinking.get())); }
        *copy = res.release();
    });
}

void kvf_grammar_free(kvf_grammar * grammar) { delete grammar; }

int kvf_sample(llama_context * ctx, int32_t i, llama_sampler * chain, kvf_grammar * grammar, llama_token * token) {
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
        llama_sampler *        rules = grammar->holds() ? grammar->rules.get() : nullptr;
        if (rules) { llama_sampler_apply(rules, &alone); }
        if (std::isinf(one.logit)) { found = choose(rules); }
        if (std::isinf(found.logit)) {
            throw kvf_failure(KVF_E_STATE, "the model has no token that the grammar lets through here");
        }
        grammar->accept(found.id);
        llama_sampler_accept(chain, found.id);
        *token = found.id;
    });
}
