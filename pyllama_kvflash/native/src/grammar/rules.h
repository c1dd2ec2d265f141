#pragma once

// what a grammar lets follow. llama.cpp parses GBNF, and then asks each token of the vocabulary about each stack of rules,
// every time: seconds for an enum of thousands of values. here the tokens are a tree of bytes, stacks share what is below
// their tops, and a set of stacks is a state whose successors and tokens are found once

#include "llama.h"

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

// the tokens of a vocabulary as a tree of their bytes, in preorder. those that end a text, and those without text, are left
// out
struct kvf_token_tree {
    explicit kvf_token_tree(const llama_vocab * vocab);

    struct node {
        uint32_t end;   // the first node after its subtree
        uint32_t first; // its tokens are [first, first + n_tokens) of `tokens`
        uint16_t n_tokens;
        uint16_t depth; // bytes before its own
        uint8_t  byte;
    };

    std::vector<node>        nodes;
    std::vector<llama_token> tokens;
    std::vector<std::string> pieces; // of each token of the vocabulary; "" if it is not in the tree
    std::vector<llama_token> ends;   // tokens that end a text
    size_t                   max_depth = 0;
};

// a grammar: sequences of items, each closed by an end
struct kvf_rules {
    // throws kvf_failure, which names the error
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
    std::vector<std::vector<uint32_t>> alternatives; // of each rule: the first item of each
    std::vector<std::vector<range>>    classes;      // sorted, apart from each other
    uint32_t                           root = 0;

private:
    void add(uint32_t r, std::vector<std::vector<item>> sequences);
    void check_left_recursion() const;
};

// the sets of stacks that were reached so far, and what may follow each. threads may share one
class kvf_machine {
public:
    kvf_machine(std::shared_ptr<const kvf_token_tree> tree, std::shared_ptr<const kvf_rules> rules);

    using bits = std::vector<uint64_t>; // one for each token

    // where a text is: in a state, and perhaps within a character
    struct place {
        std::shared_ptr<kvf_machine> machine;
        int32_t                      state  = 0;
        uint32_t                     value  = 0; // of the bytes of the character so far
        int32_t                      n_left = 0; // bytes that it still needs

        // all throw kvf_failure if the grammar is too ambiguous: if they take too much since begin_token()
        static place begin(std::shared_ptr<kvf_machine> machine);
        void         begin_token() const;
        bool         allows(llama_token token) const;
        bits         mask() const;
        bool         take(llama_token token);        // false: not allowed, and nothing changed
        bool         take(const std::string & text); // as above
        void         move_on();                      // leave a machine that has become large
    };

    const kvf_token_tree & vocabulary() const { return *tree; }

private:
    static constexpr int32_t dead = -1, unknown = -2;

    struct step {
        int32_t  state;
        uint32_t value;
        int32_t  n_left;
    };

    // a stack: the item on its top, and the stack below. 0: the empty one, at the end of a text
    struct stack {
        uint32_t item, below;
    };

    struct state {
        std::vector<uint32_t>    stacks; // ascending, each with characters or a token on its top
        std::vector<uint32_t>    bounds; // code points from which on others of them may go on
        std::vector<int32_t>     next;   // by interval between these: a state, dead or unknown
        std::array<int32_t, 128> ascii;
        std::unique_ptr<bits>    mask; // null: not needed yet
        bool                     has_tokens = false;
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

    static constexpr size_t MAX_BYTES = 16 << 20; // of states and stacks, until one that has less begins anew
    static constexpr size_t MAX_WORK  = 1 << 20;  // stacks looked at for one token: some 0.1 s

    std::shared_ptr<const kvf_token_tree>    tree;
    std::shared_ptr<const kvf_rules>         rules;
    std::vector<stack>                       stacks;
    std::unordered_map<uint64_t, uint32_t>   stack_ids;
    std::vector<state>                       states;
    std::unordered_multimap<size_t, int32_t> state_ids;
    std::vector<uint32_t>                    seen; // of each stack: in which search it was seen last
    uint32_t                                 search  = 0;
    size_t                                   n_bytes = 0, work = 0;
    mutable std::mutex                       mutex;
};
