// the state machine of a grammar, see grammar/rules.h

#include "api/guard.h"
#include "grammar/rules.h"

#include <algorithm>

using range = kvf_rules::range;

//
// states
//

kvf_machine::kvf_machine(std::shared_ptr<const kvf_token_tree> tree, std::shared_ptr<const kvf_rules> rules) :
    tree(std::move(tree)), rules(std::move(rules)), stacks{{0, 0}}, seen{0} {}

void kvf_machine::spend() {
    ++work;
    if (work > MAX_WORK || n_bytes > 4 * MAX_BYTES) {
        throw kvf_failure(KVF_E_ARGUMENT, "it is too ambiguous: a token can be of too many of its rules at once");
    }
}

uint32_t kvf_machine::stack_of(uint32_t item, uint32_t below) {
    const auto [at, is_new] = stack_ids.emplace((uint64_t) item << 32 | below, stacks.size());
    if (is_new) {
        stacks.push_back({item, below});
        seen.push_back(0);
        n_bytes += 64;
    }
    return at->second;
}

// the stack that remains after its top was matched
uint32_t kvf_machine::after(uint32_t top) {
    const auto [item, below] = stacks[top];
    return rules->items[item + 1].what == kvf_rules::end ? below : stack_of(item + 1, below);
}

// the state of a set of stacks: expand rules on top of them until each top is a terminal
int32_t kvf_machine::state_of(std::vector<uint32_t> tops) {
    std::vector<uint32_t> found;
    ++search;
    while (!tops.empty()) {
        const uint32_t top = tops.back();
        tops.pop_back();
        if (seen[top] == search) { continue; }
        seen[top] = search;
        spend();
        const auto item = rules->items[stacks[top].item];
        if (top == 0 || item.what != kvf_rules::rule) {
            found.push_back(top);
            continue;
        }
        const uint32_t below = after(top);
        for (const uint32_t first : rules->alternatives[item.value]) {
            tops.push_back(rules->items[first].what == kvf_rules::end ? below : stack_of(first, below));
        }
    }
    std::sort(found.begin(), found.end());
    return known(std::move(found));
}

int32_t kvf_machine::known(std::vector<uint32_t> found) {
    if (found.empty()) { return dead; }
    size_t hash = found.size();
    for (const uint32_t s : found) {
        hash = hash * 0x9E3779B97F4A7C15 + s;
    }
    const auto [first, last] = state_ids.equal_range(hash);
    for (auto it = first; it != last; ++it) {
        if (states[it->second].stacks == found) { return it->second; }
    }
    state res;
    res.stacks = std::move(found);
    divide(res);
    n_bytes += sizeof(state) + 64 + 4 * (res.stacks.size() + res.bounds.size() + res.next.size());
    state_ids.emplace(hash, states.size());
    states.push_back(std::move(res));
    return states.size() - 1;
}

// find the intervals in which every code point leads to the same state
void kvf_machine::divide(state & s) const {
    std::vector<range> all;
    for (const uint32_t top : s.stacks) {
        const auto item = rules->items[stacks[top].item];
        if (top == 0) { continue; }
        s.has_tokens = s.has_tokens || item.what != kvf_rules::chars;
        if (item.what != kvf_rules::chars) { continue; }
        const auto & ranges = rules->classes[item.value];
        all.insert(all.end(), ranges.begin(), ranges.end());
    }
    for (const auto & [first, last] : all) {
        s.bounds.push_back(first);
        s.bounds.push_back(last + 1);
    }
    std::sort(s.bounds.begin(), s.bounds.end());
    s.bounds.erase(std::unique(s.bounds.begin(), s.bounds.end()), s.bounds.end());

    std::vector<int32_t> depth(s.bounds.size() + 1);
    const auto index = [&](uint32_t c) { return std::lower_bound(s.bounds.begin(), s.bounds.end(), c) - s.bounds.begin(); };
    for (const auto & [first, last] : all) {
        depth[index(first)]++;
        depth[index(last + 1)]--;
    }
    for (size_t i = 0, n = 0; i < s.bounds.size(); ++i) {
        n += depth[i];
        s.next.push_back(n > 0 ? unknown : dead);
    }
    s.ascii.fill(unknown);
}

int32_t kvf_machine::on_char(int32_t s, uint32_t c) {
    if (c < 128 && states[s].ascii[c] != unknown) { return states[s].ascii[c]; }
    const auto & bounds = states[s].bounds;
    const size_t i      = std::upper_bound(bounds.begin(), bounds.end(), c) - bounds.begin();

    int32_t res = i == 0 ? dead : states[s].next[i - 1];
    if (res == unknown) {
        std::vector<uint32_t> tops;
        for (size_t k = 0; k < states[s].stacks.size(); ++k) {
            const uint32_t top  = states[s].stacks[k];
            const auto     item = rules->items[stacks[top].item];
            spend();
            if (top == 0 || item.what != kvf_rules::chars) { continue; }
            const auto & ranges = rules->classes[item.value];
            const auto   it     = std::upper_bound(ranges.begin(), ranges.end(), range{c, UINT32_MAX});
            if (it != ranges.begin() && c <= std::prev(it)->second) { tops.push_back(after(top)); }
        }
        res                   = state_of(std::move(tops));
        states[s].next[i - 1] = res;
    }
    if (c < 128) { states[s].ascii[c] = res; }
    return res;
}

// whether the grammar allows any character with these first bytes
bool kvf_machine::may_go_on(const step & at) const {
    if (at.n_left == 1 && at.value < 2) { return false; } // an overlong encoding of ASCII
    const int      n_bits = 6 * at.n_left;
    const uint32_t low    = at.value ? at.value << n_bits : at.n_left == 2 ? 0x800 : 0x10000;
    const uint32_t high   = (at.value << n_bits) | ((1u << n_bits) - 1);
    const auto &   s      = states[at.state];
    size_t         i      = std::upper_bound(s.bounds.begin(), s.bounds.end(), low) - s.bounds.begin();
    if (i > 0 && s.next[i - 1] != dead) { return true; }
    for (; i < s.bounds.size() && s.bounds[i] <= high; ++i) {
        if (s.next[i] != dead) { return true; }
    }
    return false;
}

kvf_machine::step kvf_machine::on_byte(const step & at, uint8_t byte) {
    const step none = {dead, 0, 0};
    if (at.n_left == 0 && byte < 0x80) { return {on_char(at.state, byte), 0, 0}; }
    step res = at;
    if (at.n_left == 0) {
        if (byte < 0xC0 || byte >= 0xF8) { return none; }
        res.n_left = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
        res.value  = byte & (0x3F >> res.n_left);
    } else {
        if ((byte & 0xC0) != 0x80) { return none; }
        res.n_left--;
        res.value = at.value << 6 | (byte & 0x3F);
        if (res.n_left == 0) { return {on_char(at.state, res.value), 0, 0}; }
    }
    return may_go_on(res) ? res : none;
}

kvf_machine::step kvf_machine::on_text(step at, const std::string & text) {
    for (size_t i = 0; i < text.size() && at.state != dead; ++i) {
        at = on_byte(at, text[i]);
    }
    return at;
}

static bool matches(const kvf_rules::item & item, llama_token token) {
    return item.what == kvf_rules::token ? item.value == (uint32_t) token
                                         : item.what == kvf_rules::other_token && item.value != (uint32_t) token;
}

bool kvf_machine::has_token(int32_t s, llama_token token) const {
    const auto & tops = states[s].stacks;
    return states[s].has_tokens && !tree->pieces[token].empty() && std::any_of(tops.begin(), tops.end(), [&](uint32_t top) {
        return top != 0 && matches(rules->items[stacks[top].item], token);
    });
}

// the state after a token that the grammar names. if its text matches, too, the stacks of both are united
int32_t kvf_machine::on_token(int32_t s, llama_token token) {
    std::vector<uint32_t> tops;
    for (size_t k = 0; k < states[s].stacks.size(); ++k) {
        const uint32_t top = states[s].stacks[k];
        if (top != 0 && matches(rules->items[stacks[top].item], token)) { tops.push_back(after(top)); }
    }
    const step text = on_text({s, 0, 0}, tree->pieces[token]);
    if (text.state != dead && text.n_left == 0) {
        const auto & more = states[text.state].stacks;
        tops.insert(tops.end(), more.begin(), more.end());
    }
    return state_of(std::move(tops));
}

void kvf_machine::fill(const step & at, bits & found) {
    const auto        set = [&](llama_token t) { found[t / 64] |= 1ull << t % 64; };
    std::vector<step> path(tree->max_depth + 1);
    path[0] = at;
    for (size_t i = 0; i < tree->nodes.size();) {
        const auto & node = tree->nodes[i];
        const step   next = on_byte(path[node.depth], node.byte);
        if (next.state == dead) {
            i = node.end;
            continue;
        }
        path[node.depth + 1] = next;
        for (size_t t = 0; t < node.n_tokens; ++t) {
            set(tree->tokens[node.first + t]);
        }
        ++i;
    }
    if (at.n_left > 0) { return; }
    if (is_complete(at.state)) {
        for (const llama_token t : tree->ends) {
            set(t);
        }
    }
    if (!states[at.state].has_tokens) { return; }
    for (size_t t = 0; t < tree->pieces.size(); ++t) {
        if (has_token(at.state, t)) { set(t); }
    }
}

//
// places
//

kvf_machine::place kvf_machine::place::begin(std::shared_ptr<kvf_machine> machine) {
    place                             res;
    const std::lock_guard<std::mutex> lock(machine->mutex);
    auto &                            m = *machine;
    std::vector<uint32_t>             tops;
    for (const uint32_t first : m.rules->alternatives[m.rules->root]) {
        tops.push_back(m.rules->items[first].what == kvf_rules::end ? 0 : m.stack_of(first, 0));
    }
    res.state = m.state_of(std::move(tops));
    kvf_check(res.state != dead, "its rules refer to themselves, and to nothing else");
    res.machine = std::move(machine);
    return res;
}

void kvf_machine::place::begin_token() const {
    const std::lock_guard<std::mutex> lock(machine->mutex);
    machine->work = 0;
}

bool kvf_machine::place::allows(llama_token token) const {
    auto &                            m = *machine;
    const std::lock_guard<std::mutex> lock(m.mutex);
    const auto &                      pieces = m.tree->pieces;
    if (m.states[state].mask && n_left == 0) { return (*m.states[state].mask)[token / 64] >> token % 64 & 1; }
    if (n_left == 0 && m.has_token(state, token)) { return true; }
    if (pieces[token].empty()) {
        const auto & ends = m.tree->ends;
        return n_left == 0 && m.is_complete(state) && std::find(ends.begin(), ends.end(), token) != ends.end();
    }
    return m.on_text({state, value, n_left}, pieces[token]).state != dead;
}

kvf_machine::bits kvf_machine::place::mask() const {
    auto &                            m = *machine;
    const std::lock_guard<std::mutex> lock(m.mutex);
    if (n_left == 0 && m.states[state].mask) { return *m.states[state].mask; }
    bits found((m.tree->pieces.size() + 63) / 64);
    m.fill({state, value, n_left}, found);
    if (n_left == 0) {
        m.states[state].mask = std::make_unique<bits>(found);
        m.n_bytes += 8 * found.size();
    }
    return found;
}

bool kvf_machine::place::take(llama_token token) {
    move_on();
    auto &                            m = *machine;
    const std::lock_guard<std::mutex> lock(m.mutex);
    step                              next = {dead, 0, 0};
    if (n_left == 0 && m.has_token(state, token)) {
        next.state = m.on_token(state, token);
    } else if (!m.tree->pieces[token].empty()) {
        next = m.on_text({state, value, n_left}, m.tree->pieces[token]);
    }
    if (next.state == dead) { return false; }
    state = next.state, value = next.value, n_left = next.n_left;
    return true;
}

// this does not move on to a new machine, as take(token) does. only the text that begins a lazy grammar is taken here, in
// the machine's first state, possibly several times for a token until a text matches. a match adds one text's states, and
// the next take(token) moves on
bool kvf_machine::place::take(const std::string & text) {
    auto &                            m = *machine;
    const std::lock_guard<std::mutex> lock(m.mutex);
    const step                        next = m.on_text({state, value, n_left}, text);
    if (next.state == dead) { return false; }
    state = next.state, value = next.value, n_left = next.n_left;
    return true;
}

// replace a machine that has become large by a new one, which has only the stacks of this place
void kvf_machine::place::move_on() {
    const auto                        old = machine; // keeps the mutex alive until the lock is released
    const std::lock_guard<std::mutex> lock(old->mutex);
    if (!old->is_full()) { return; }

    std::vector<uint32_t> mine, todo = old->states[state].stacks;
    ++old->search;
    while (!todo.empty()) {
        const uint32_t top = todo.back();
        todo.pop_back();
        if (top == 0 || old->seen[top] == old->search) { continue; }
        old->seen[top] = old->search;
        mine.push_back(top);
        todo.push_back(old->stacks[top].below);
    }
    std::sort(mine.begin(), mine.end()); // the stack below another one has a lower index

    auto                                   other = std::make_shared<kvf_machine>(old->tree, old->rules);
    std::unordered_map<uint32_t, uint32_t> there{{0, 0}};
    for (const uint32_t top : mine) {
        there[top] = other->stack_of(old->stacks[top].item, there.at(old->stacks[top].below));
    }
    std::vector<uint32_t> tops;
    for (const uint32_t top : old->states[state].stacks) {
        tops.push_back(there.at(top));
    }
    std::sort(tops.begin(), tops.end());
    state = other->known(std::move(tops));
    kvf_check(!other->is_full(), "it is too ambiguous, or too deep");
    machine = std::move(other);
}
