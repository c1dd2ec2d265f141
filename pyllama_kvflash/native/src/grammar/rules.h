#pragma once

// Finds the tokens that a grammar allows next. llama.cpp parses GBNF, but then checks each token of the vocabulary against
// each stack of rules, for every token of the answer. An enum of thousands of values takes it seconds. Here the tokens are a
// tree of bytes, stacks share everything below their tops, and a set of stacks is a state. The successors and the allowed
// tokens of a state are computed once.

#include "llama.h"

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

// The tokens of a vocabulary as a tree of their bytes, in preorder. Tokens without text are left out, and so are tokens that
// end a text, which are in `ends`.
struct kvf_token_tree {
    explicit kvf_token_tree(const llama_vocab * vocab);

    struct node {
        uint32_t end;   // the first node after its subtree
        uint32_t first; // its tokens are [first, first + n_tokens) of `tokens`
        uint16_t n_tokens;
        uint16_t depth; // bytes before this one
        uint8_t  byte;
    };

    std::vector<node>        nodes;
    std::vector<llama_token> tokens;
    std::vector<std::string> pieces; // the text of each token of the vocabulary; "" if it is not in the tree
    std::vector<llama_token> ends;   // tokens that end a text
    size_t                   max_depth = 0;
};

// A grammar, as sequences of items. Each sequence is terminated by an `end`.
struct kvf_rules {
    // throws kvf_failure with the error
    kvf_rules(const llama_vocab * vocab, const char * text);

    enum kind : uint8_t { chars, token, other_token, rule, end };

    struct item {
        kind     what;
        uint32_t value; // index in `classes`, a token, or index in `alternatives`

        bool operator==(const item & o) const { return what == o.what && value == o.value; }
        bool operator<(const item & o) const { return what < o.what || (what == o.what && value < o.value); }
    };

    using range = std::pair<uint32_t, uint32_t>; // code points, first and last

    std::vector<item>                  items;
    std::vector<std::vector<uint32_t>> alternatives; // for each rule, the first item of each alternative
    std::vector<std::vector<range>>    classes;      // character classes: sorted ranges with gaps between them
    uint32_t                           root = 0;

private:
    void add(uint32_t r, std::vector<std::vector<item>> sequences);
    void check_left_recursion() const;
};

// A state machine for a grammar: the states reached so far, with their successors and allowed tokens. Threads may share one.
class kvf_machine {
public:
    kvf_machine(std::shared_ptr<const kvf_token_tree> tree, std::shared_ptr<const kvf_rules> rules);

    using bits = std::vector<uint64_t>; // a bit for each token

    // the place of a text in the machine: a state, and possibly the first bytes of a character
    struct place {
        std::shared_ptr<kvf_machine> machine;
        int32_t                      state  = 0;
        uint32_t                     value  = 0; // the bits of the incomplete character
        int32_t                      n_left = 0; // the bytes that it still needs

        // these throw kvf_failure if the grammar is too ambiguous: they take too much work for one token, which
        // begin_token() begins
        static place begin(std::shared_ptr<kvf_machine> machine);
        void         begin_token() const;
        bool         allows(llama_token token) const;
        bits         mask() const;
        bool         take(llama_token token);        // advance; false: it is not allowed, and the place stays the same
        bool         take(const std::string & text); // the same for a text
        void         move_on();                      // if the machine has become large, leave it for a new one
    };

    const kvf_token_tree & vocabulary() const { return *tree; }

private:
    static constexpr int32_t dead = -1, unknown = -2;

    struct step {
        int32_t  state;
        uint32_t value;
        int32_t  n_left;
    };

    // a stack: the item on its top, and the stack below. stack 0 is the empty one: the text may end
    struct stack {
        uint32_t item, below;
    };

    struct state {
        std::vector<uint32_t>    stacks; // ascending; each has a character class or a token on its top
        std::vector<uint32_t>    bounds; // the first code point of each interval: within one, all lead to the same state
        std::vector<int32_t>     next;   // the successor for each interval: a state, dead or unknown
        std::array<int32_t, 128> ascii;  // the successor for each ASCII character
        std::unique_ptr<bits>    mask;   // the allowed tokens; null: not computed yet
        bool                     has_tokens = false; // a stack has a token on its top
    };

    bool is_complete(int32_t s) const { return states[s].stacks.front() == 0; }
    bool is_full() const { return n_bytes > MAX_BYTES; }

    uint32_t stack_of(uint32_t item, uint32_t below);
    uint32_t after(uint32_t top);
    int32_t  state_of(std::vector<uint32_t> tops);
    int32_t  known(std::vector<uint32_t> stacks);
    void     divide(state & s) const;
    int32_t  on_char(int32_t s, uint32_t c);
    step     on_byte(const step & at, uint8_t byte);
    step     on_text(step at, const std::string & text);
    bool     may_go_on(const step & at) const;
    bool     has_token(int32_t s, llama_token token) const;
    int32_t  on_token(int32_t s, llama_token token);
    void     fill(const step & at, bits & found);
    void     spend();

    static constexpr size_t MAX_BYTES = 16 << 20; // of states and stacks: beyond that, places move on to a new machine
    static constexpr size_t MAX_WORK  = 1 << 20;  // most stacks looked at for one token, some 0.1 s

    std::shared_ptr<const kvf_token_tree>    tree;
    std::shared_ptr<const kvf_rules>         rules;
    std::vector<stack>                       stacks;
    std::unordered_map<uint64_t, uint32_t>   stack_ids;
    std::vector<state>                       states;
    std::unordered_multimap<size_t, int32_t> state_ids;
    std::vector<uint32_t>                    seen; // for each stack, the last search that visited it
    uint32_t                                 search  = 0;
    size_t                                   n_bytes = 0, work = 0;
    mutable std::mutex                       mutex;
};
