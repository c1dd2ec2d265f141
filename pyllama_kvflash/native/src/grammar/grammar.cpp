// sampling under a grammar, see kvflash.h

#include "api/guard.h"
#include "grammar/rules.h"

#include "../src/llama-grammar.h" // llama_grammar_trigger_pattern
#include "common.h"
#include "llama-cpp.h"
#include "reasoning-budget.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

// llama.cpp's error as one line
static kvf_failure in_words(const std::exception & err) {
    std::string what = err.what();
    std::replace(what.begin(), what.end(), '\n', ' ');
    return kvf_failure(KVF_E_ARGUMENT, what);
}

struct kvf_tokens {
    std::shared_ptr<const kvf_token_tree> tree;
};

int kvf_tokens_new(const llama_vocab * vocab, kvf_tokens ** tokens) {
    return kvf_guard([&] {
        kvf_check(vocab && tokens, "vocab and tokens must not be null");
        *tokens = new kvf_tokens{std::make_shared<kvf_token_tree>(vocab)};
    });
}

void kvf_tokens_free(kvf_tokens * tokens) { delete tokens; }

// a pattern that begins a lazy grammar: a word or a regular expression. an expression is searched only in the last MAX_SEEN
// bytes, because it is slow, and searches them again after each token
class kvf_trigger {
public:
    static constexpr size_t MAX_SEEN = 512;

    explicit kvf_trigger(const std::string & pattern) : word(word_of(pattern)), pattern{pattern, {}} {
        if (!word) { this->pattern.regex = std::regex(pattern); }
    }

    // the index in a text from which to search, if its last n bytes are new
    size_t first(const std::string & text, size_t n) const {
        return text.size() - std::min(text.size(), word ? n + word->size() : MAX_SEEN);
    }

    // the first index at or after `from` where the grammar may begin; npos: none yet
    size_t find(const std::string & text, size_t from) const {
        if (word) { return text.find(*word, from); }
        if (from > 0 && pattern.pattern.rfind('^', 0) == 0) { return std::string::npos; }
        const size_t found = pattern.find(text.substr(from));
        return found == std::string::npos ? found : from + found;
    }

private:
    // the word that an expression matches; none: it does not match just one word
    static std::optional<std::string> word_of(const std::string & pattern) {
        std::string res;
        for (size_t i = 0; i < pattern.size(); ++i) {
            const bool escaped = pattern[i] == '\\' && i + 1 < pattern.size() && ispunct((unsigned char) pattern[i + 1]);
            if (!escaped && strchr("\\^$.|?*+()[]{}", pattern[i])) { return {}; }
            res += pattern[i += escaped];
        }
        return res;
    }

    std::optional<std::string>    word;
    llama_grammar_trigger_pattern pattern;
};

struct kvf_grammar {
    kvf_machine::place place;    // the place of the answer
    llama_sampler_ptr  thinking; // tracks the answer's reasoning, in which a lazy grammar does not apply; null: not tracked

    // a lazy grammar: its triggers, whether it waits for one, and the answer's text until then
    std::vector<kvf_trigger> triggers;
    std::vector<llama_token> trigger_tokens;
    bool                     waits = false;
    std::string              text;

    // whether the grammar applies to the next token
    bool holds() const { return !waits && !reasons(); }

    bool reasons() const {
        if (!thinking) { return false; }
        const auto state = common_reasoning_budget_get_state(thinking.get());
        return state != REASONING_BUDGET_IDLE && state != REASONING_BUDGET_DONE;
    }

    void accept(llama_token token) {
        const bool reasoned = reasons();
        if (thinking) {
            llama_sampler_accept(thinking.get(), token);
            // the end tag of the reasoning may also be the trigger of the grammar
            const auto * end = !reasoned || reasons() ? nullptr : common_reasoning_budget_get_end_match(thinking.get());
            for (const llama_token last : end ? *end : llama_tokens()) {
                follow(last);
            }
        }
        if (!reasoned) { follow(token); }
    }

private:
    void follow(llama_token token) {
        if (!waits) {
            place.take(token); // false for a token that ends the text, after which nothing follows
        } else if (std::find(trigger_tokens.begin(), trigger_tokens.end(), token) != trigger_tokens.end()) {
            waits = !place.take(token);
        } else {
            look_for_beginning(place.machine->vocabulary().pieces[token]);
        }
    }

    void look_for_beginning(const std::string & piece) {
        if (text.size() > 64 * kvf_trigger::MAX_SEEN) { text.erase(0, text.size() - 32 * kvf_trigger::MAX_SEEN); }
        text += piece;
        for (const auto & trigger : triggers) {
            size_t start = trigger.find(text, trigger.first(text, piece.size()));
            while (start != std::string::npos) {
                if (place.take(text.substr(start))) {
                    waits = false;
                    text.clear();
                    return;
                }
                start = trigger.find(text, start + 1); // the pattern matched, but the grammar cannot begin with this text
            }
        }
    }
};

// tokenize the text that a template puts before an answer, without the leading space that some tokenizers add
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

int kvf_grammar_new(
        kvf_tokens * tokens, const llama_vocab * vocab, const kvf_grammar_params * params, kvf_grammar ** grammar) {
    return kvf_guard([&] {
        kvf_check(tokens && vocab && params && grammar, "tokens, vocab, params and grammar must not be null");
        auto & p   = *params;
        auto   res = std::make_unique<kvf_grammar>();
        try {
            auto rules = std::make_shared<kvf_rules>(vocab, p.text);
            res->place = kvf_machine::place::begin(std::make_shared<kvf_machine>(tokens->tree, std::move(rules)));
            res->waits = p.lazy;
            res->trigger_tokens.assign(p.tokens, p.tokens + p.n_tokens);
            for (size_t i = 0; p.lazy && i < p.n_patterns; ++i) {
                res->triggers.emplace_back(p.patterns[i]);
            }
            res->thinking.reset(thinking_of(vocab, p));
            for (const llama_token token : tokens_before(vocab, p.after)) {
                if (res->thinking) { llama_sampler_accept(res->thinking.get(), token); }
                kvf_check(p.lazy || res->place.take(token), "the text before the answer does not match the grammar");
            }
        } catch (const kvf_failure &) { throw; } catch (const std::exception & err) {
            throw in_words(err);
        }
        *grammar = res.release();
    });
}

int kvf_grammar_copy(kvf_grammar * grammar, kvf_grammar ** copy) {
    return kvf_guard([&] {
        kvf_check(grammar && copy, "grammar and copy must not be null");
        grammar->place.move_on(); // otherwise each copy would make a new machine for itself
        auto res            = std::make_unique<kvf_grammar>();
        res->place          = grammar->place;
        res->triggers       = grammar->triggers;
        res->trigger_tokens = grammar->trigger_tokens;
        res->waits          = grammar->waits;
        res->text           = grammar->text;
        if (grammar->thinking) { res->thinking.reset(llama_sampler_clone(grammar->thinking.get())); }
        *copy = res.release();
    });
}

void kvf_grammar_free(kvf_grammar * grammar) { delete grammar; }

int kvf_grammar_mask(const kvf_grammar * grammar, uint64_t * mask, size_t n) {
    return kvf_guard([&] {
        kvf_check(grammar && mask, "grammar and mask must not be null");
        grammar->place.begin_token();
        const auto found = grammar->place.mask();
        kvf_check(n == found.size(), "the mask must have a bit for each token of the vocabulary");
        std::copy(found.begin(), found.end(), mask);
    });
}

int kvf_grammar_accept(kvf_grammar * grammar, llama_token token) {
    return kvf_guard([&] {
        kvf_check(grammar && token >= 0 && token < (llama_token) grammar->place.machine->vocabulary().pieces.size(),
                "grammar must not be null; token must be in its vocabulary");
        grammar->place.begin_token();
        grammar->accept(token);
    });
}

using candidates = std::vector<llama_token_data>;

// the n likeliest tokens, or a few more
static candidates likeliest(const float * logits, size_t n_vocab, size_t n) {
    const auto likelier = [](const llama_token_data & a, const llama_token_data & b) { return a.logit > b.logit; };
    candidates res;
    res.reserve(std::min(2 * n, n_vocab));
    float least = -INFINITY;
    for (size_t t = 0; t < n_vocab; ++t) {
        if (logits[t] <= least && res.size() >= n) { continue; }
        res.push_back({(llama_token) t, logits[t], 0.0f});
        if (res.size() == 2 * n) {
            std::nth_element(res.begin(), res.begin() + n - 1, res.end(), likelier);
            res.resize(n);
            least = res.back().logit;
        }
    }
    std::sort(res.begin(), res.end(), likelier);
    return res;
}

static candidates everything(const float * logits, size_t n_vocab) {
    candidates res(n_vocab);
    for (size_t t = 0; t < n_vocab; ++t) {
        res[t] = {(llama_token) t, logits[t], 0.0f};
    }
    return res;
}

// the tokens whose bits are set
static candidates allowed(const float * logits, const kvf_machine::bits & mask) {
    candidates res;
    for (size_t word = 0; word < mask.size(); ++word) {
        for (uint64_t left = mask[word]; left; left &= left - 1) {
            const llama_token t = 64 * word + __builtin_ctzll(left);
            res.push_back({t, logits[t], 0.0f});
        }
    }
    return res;
}

// the token that a chain chooses (null: the likeliest one); -1: none
static llama_token chosen(llama_sampler * chain, candidates from) {
    if (from.empty()) { return -1; }
    llama_token_data_array all = {from.data(), from.size(), -1, false};
    if (chain) {
        llama_sampler_apply(chain, &all);
    } else {
        const auto less = [](const llama_token_data & a, const llama_token_data & b) { return a.logit < b.logit; };
        all.selected    = std::max_element(from.begin(), from.end(), less) - from.begin();
    }
    return all.selected < 0 || std::isinf(all.data[all.selected].logit) ? -1 : all.data[all.selected].id;
}

int kvf_sample(
        llama_context * ctx, int32_t i, llama_sampler * chain, int32_t top_k, kvf_grammar * grammar, llama_token * token) {
    return kvf_guard([&] {
        kvf_check(ctx && token && top_k >= 0, "ctx and token must not be null; top_k must be at least 0");
        llama_token found  = -1;
        const int   status = kvf_argmax(ctx, i, &found); // first, because samplers do not check for NaN
        if (status != KVF_OK) { throw kvf_failure(status, kvf_error()); }
        if (!grammar) {
            *token = chain ? llama_sampler_sample(chain, ctx, i) : found;
            return;
        }

        grammar->place.begin_token();
        // choose without the grammar first, because it allows most such tokens
        const float * logits  = llama_get_logits_ith(ctx, i);
        const size_t  n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
        candidates    best; // more than the chain takes, so that the grammar usually allows enough of them
        if (chain && top_k > 0) {
            best  = likeliest(logits, n_vocab, std::max<size_t>(128, 4 * (size_t) top_k));
            found = chosen(chain, best);
        } else if (chain) {
            found = chosen(chain, everything(logits, n_vocab));
        }
        if (grammar->holds() && (found < 0 || !grammar->place.allows(found))) {
            const auto refused = [&](const llama_token_data & one) { return !grammar->place.allows(one.id); };
            best.erase(std::remove_if(best.begin(), best.end(), refused), best.end());
            const bool enough = top_k > 0 && best.size() >= (size_t) top_k;
            found             = chosen(chain, enough ? best : allowed(logits, grammar->place.mask()));
        }
        if (found < 0) { throw kvf_failure(KVF_E_STATE, "the grammar allows none of the model's tokens here"); }
        grammar->accept(found);
        if (chain) { llama_sampler_accept(chain, found); }
        *token = found;
    });
}
