// the token tree of a vocabulary, and the rules of a grammar, see grammar/rules.h

#include "grammar/rules.h"

#include "api/guard.h"

#include "../src/llama-grammar.h" // the parser
#include "common.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

static constexpr uint32_t LAST_CHAR    = 0x10FFFF;
static constexpr size_t   MAX_ELEMENTS = 4 << 20; // of a grammar: 32 MiB in llama.cpp

//
// tokens
//

kvf_token_tree::kvf_token_tree(const llama_vocab * vocab) : pieces(llama_vocab_n_tokens(vocab)) {
    for (llama_token t = 0; t < (llama_token) pieces.size(); ++t) {
        if (llama_vocab_is_eog(vocab, t)) {
            ends.push_back(t);
            continue;
        }
        pieces[t] = common_token_to_piece(vocab, t, true);
        if (pieces[t].find('\0') != std::string::npos) { pieces[t].clear(); } // llama.cpp allows no token with a zero byte
        if (!pieces[t].empty()) { tokens.push_back(t); }
        max_depth = std::max(max_depth, pieces[t].size());
    }
    std::sort(tokens.begin(), tokens.end(), [&](llama_token a, llama_token b) { return pieces[a] < pieces[b]; });

    std::vector<uint32_t> path; // the nodes of the last token
    const std::string     none, *last = &none;
    for (size_t i = 0; i < tokens.size(); ++i) {
        const std::string & piece = pieces[tokens[i]];
        size_t              n     = 0;
        while (n < std::min(last->size(), piece.size()) && (*last)[n] == piece[n]) {
            ++n;
        }
        for (; path.size() > n; path.pop_back()) {
            nodes[path.back()].end = nodes.size();
        }
        for (; path.size() < piece.size(); path.push_back(nodes.size() - 1)) {
            nodes.push_back({0, (uint32_t) i, 0, (uint16_t) path.size(), (uint8_t) piece[path.size()]});
        }
        nodes[path.back()].n_tokens++;
        last = &piece;
    }
    for (const uint32_t node : path) {
        nodes[node].end = nodes.size();
    }
}

//
// rules
//

using range = kvf_rules::range;

static llama_grammar_rules parsed(const llama_vocab * vocab, const char * text, uint32_t & root) {
    llama_grammar_parser parser(vocab);

    size_t       n   = 0;
    const char * pos = text;
    while (true) {
        while (*pos && (isspace((unsigned char) *pos) || *pos == '#')) {
            const bool comment = *pos == '#';
            pos += comment ? strcspn(pos, "\r\n") : 1;
        }
        if (!*pos) { break; }
        const size_t n_known = parser.rules.size();
        pos                  = parser.parse_rule(pos);
        for (size_t i = n_known; i < parser.rules.size(); ++i) {
            n += parser.rules[i].size();
        }
        kvf_check(n <= MAX_ELEMENTS, "it is too large");
    }
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            throw kvf_failure(KVF_E_ARGUMENT, "rule '" + name + "' is not defined");
        }
    }
    const auto found = parser.symbol_ids.find("root");
    kvf_check(found != parser.symbol_ids.end(), "there is no rule 'root'");
    root = found->second;
    return parser.rules;
}

static std::vector<range> merged(std::vector<range> ranges) {
    std::sort(ranges.begin(), ranges.end());
    std::vector<range> res;
    for (const auto & r : ranges) {
        if (!res.empty() && r.first <= res.back().second + 1) {
            res.back().second = std::max(res.back().second, r.second);
        } else if (r.first <= r.second) {
            res.push_back(r);
        }
    }
    return res;
}

static std::vector<range> complement(const std::vector<range> & ranges) {
    std::vector<range> res;
    uint32_t           from = 0;
    for (const auto & [first, last] : ranges) {
        if (first > from) { res.emplace_back(from, first - 1); }
        from = last + 1;
    }
    if (from <= LAST_CHAR) { res.emplace_back(from, LAST_CHAR); }
    return res;
}

// return the character class that begins at an element. e: moved to the first element after the class
static std::vector<range> class_at(const llama_grammar_element *& e) {
    const auto         type = e->type;
    std::vector<range> res;
    do {
        const bool     any   = e->type == LLAMA_GRETYPE_CHAR_ANY;
        const uint32_t first = any ? 0 : std::min(e->value, LAST_CHAR);
        uint32_t       last  = any ? LAST_CHAR : first;
        if (e[1].type == LLAMA_GRETYPE_CHAR_RNG_UPPER) { last = std::min((++e)->value, LAST_CHAR); }
        res.emplace_back(first, last);
        ++e;
    } while (e->type == LLAMA_GRETYPE_CHAR_ALT);
    res = merged(res);
    return type == LLAMA_GRETYPE_CHAR_NOT ? complement(res) : res;
}

kvf_rules::kvf_rules(const llama_vocab * vocab, const char * text) {
    const auto elements = parsed(vocab, text, root);
    alternatives.resize(elements.size());

    std::map<std::vector<range>, uint32_t> known;
    for (size_t r = 0; r < elements.size(); ++r) {
        std::vector<std::vector<item>> sequences(1);
        for (const llama_grammar_element * e = elements[r].data(); e->type != LLAMA_GRETYPE_END;) {
            auto & items = sequences.back();
            switch (e->type) {
                case LLAMA_GRETYPE_ALT: sequences.emplace_back(); break;
                case LLAMA_GRETYPE_RULE_REF: items.push_back({rule, e->value}); break;
                case LLAMA_GRETYPE_TOKEN: items.push_back({token, e->value}); break;
                case LLAMA_GRETYPE_TOKEN_NOT: items.push_back({other_token, e->value}); break;
                default: {
                    const auto [at, is_new] = known.emplace(class_at(e), classes.size());
                    if (is_new) { classes.push_back(at->first); }
                    items.push_back({chars, at->second});
                    continue; // class_at() has moved e on
                }
            }
            ++e;
        }
        add(r, std::move(sequences));
    }
    check_left_recursion();
}

// add the alternatives of a rule as a tree: alternatives share a common beginning, so there are fewer stacks
void kvf_rules::add(uint32_t r, std::vector<std::vector<item>> sequences) {
    std::sort(sequences.begin(), sequences.end());

    struct part {
        uint32_t rule;
        size_t   first, last; // sequences [first, last)
        size_t   from;        // items at their beginning that are already added
    };
    std::vector<part> todo{{r, 0, sequences.size(), 0}};
    while (!todo.empty()) {
        const part p = todo.back();
        todo.pop_back();
        for (size_t i = p.first, j; i < p.last; i = j) {
            const auto & one = sequences[i];
            for (j = i + 1; j < p.last && one.size() > p.from && sequences[j][p.from] == one[p.from];) {
                ++j;
            }
            const auto & last = sequences[j - 1];
            size_t       n    = p.from; // the sequences are sorted, so all share what the first and the last one share
            while (n < std::min(one.size(), last.size()) && one[n] == last[n]) {
                ++n;
            }
            alternatives[p.rule].push_back(items.size());
            items.insert(items.end(), one.begin() + p.from, one.begin() + n);
            if (one != last) {
                items.push_back({rule, (uint32_t) alternatives.size()});
                todo.push_back({(uint32_t) alternatives.size(), i, j, n});
                alternatives.emplace_back();
            }
            items.push_back({end, 0});
        }
    }
}

// throw if a rule begins with itself, possibly after items that may be empty: its stacks would grow without end
void kvf_rules::check_left_recursion() const {
    const size_t          n = alternatives.size();
    std::vector<bool>     empty(n);
    std::vector<uint32_t> owner, at;
    for (size_t r = 0; r < n; ++r) {
        for (const uint32_t first : alternatives[r]) {
            owner.push_back(r);
            at.push_back(first);
        }
    }
    // find the rules that may be empty. an alternative waits at its first rule that is not known to be one of them
    std::vector<std::vector<uint32_t>> waiting(n);
    std::vector<uint32_t>              todo(at.size());
    std::iota(todo.begin(), todo.end(), 0);
    while (!todo.empty()) {
        const uint32_t a = todo.back();
        todo.pop_back();
        while (items[at[a]].what == rule && empty[items[at[a]].value]) {
            ++at[a];
        }
        if (items[at[a]].what == rule) { waiting[items[at[a]].value].push_back(a); }
        if (items[at[a]].what == end && !empty[owner[a]]) {
            empty[owner[a]] = true;
            todo.insert(todo.end(), waiting[owner[a]].begin(), waiting[owner[a]].end());
        }
    }
    // find the rules that each rule may begin with. a rule at the end of a sequence replaces it, so stacks do not grow there
    struct edge {
        uint32_t to;
        bool     grows;
    };
    std::vector<std::vector<edge>> begins(n);
    for (size_t r = 0; r < n; ++r) {
        for (uint32_t i : alternatives[r]) {
            for (; items[i].what == rule; ++i) {
                begins[r].push_back({items[i].value, items[i + 1].what != end});
                if (!empty[items[i].value]) { break; }
            }
        }
    }
    // find the rules that lead to each other, which are strongly connected components (Tarjan 1972). within such a
    // component, no edge may grow a stack
    std::vector<uint32_t>                    index(n), low(n), part(n), open;
    std::vector<std::pair<uint32_t, size_t>> path; // rules, and the number of their edges that were followed
    uint32_t                                 n_seen = 0, n_parts = 0;
    for (uint32_t r = 0; r < n; ++r) {
        if (index[r] == 0) { path.emplace_back(r, 0); }
        while (!path.empty()) {
            const uint32_t v    = path.back().first;
            size_t &       next = path.back().second;
            if (next == 0) {
                index[v] = low[v] = ++n_seen;
                open.push_back(v);
            } else { // the search has returned from the last edge
                const uint32_t w = begins[v][next - 1].to;
                if (part[w] == 0) { low[v] = std::min(low[v], low[w]); }
            }
            if (next < begins[v].size()) {
                const uint32_t w = begins[v][next++].to;
                if (index[w] == 0) { path.emplace_back(w, 0); }
                continue;
            }
            path.pop_back();
            if (low[v] != index[v]) { continue; }
            for (++n_parts; part[v] == 0; open.pop_back()) {
                part[open.back()] = n_parts;
            }
        }
    }
    for (size_t r = 0; r < n; ++r) {
        for (const auto & [to, grows] : begins[r]) {
            kvf_check(!grows || part[r] != part[to], "its rules refer to themselves from the left");
        }
    }
}
