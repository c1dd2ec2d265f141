#pragma once

// regular expressions of JSON schemas: a hook in llama.cpp's converter, which takes what they say of a string for what
// stands in the JSON text. There a quote, a backslash and what controls are escaped.

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

// rewrites a pattern for the converter: sets of characters, as it reads them, and what JSON makes of each
class kvf_pattern {
public:
    // "" if there is no grammar for it
    static std::string rewritten(const std::string & pattern) {
        try {
            return kvf_pattern(pattern).whole();
        } catch (const unsupported &) { return ""; }
    }

private:
    struct unsupported {};
    using range = std::pair<uint32_t, uint32_t>;
    using set   = std::vector<range>; // of code points, first and last

    static constexpr uint32_t last = 0x10FFFF;

    const std::string & text;
    size_t              pos = 0;
    std::string         out;

    explicit kvf_pattern(const std::string & pattern) : text(pattern) {}

    bool at_end() const { return pos >= text.size(); }

    std::string whole() {
        const bool begins = !text.empty() && text[0] == '^';
        pos               = begins ? 1 : 0;
        int  depth        = 0;
        bool bars = false, ends = false;
        while (!at_end() && !ends) {
            const char c = text[pos];
            ends         = c == '$' && pos + 1 == text.size();
            depth += c == '(' ? 1 : c == ')' ? -1 : 0;
            bars = bars || (c == '|' && depth == 0);
            if (!ends) { step(c); }
        }
        // what is not anchored may be anywhere; of alternatives each has its own anchors
        if (bars && !(begins && ends)) { throw unsupported(); }
        const std::string middle = out;
        out.clear();
        put({{0, last}});
        return "^" + (begins ? "" : out + "*") + middle + (ends ? "" : out + "*") + "$";
    }

    void step(char c) {
        if (c == '.') {
            ++pos;
            put(without({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}));
        } else if (c == '[') {
            ++pos;
            put(bracket());
        } else if (c == '{') { // how often
            const size_t end = std::min(text.find('}', pos), text.size() - 1) + 1;
            out += text.substr(pos, end - pos);
            pos = end;
        } else if (std::string("()|*+?}^$]").find(c) != std::string::npos) {
            out += c;
            ++pos;
        } else {
            put(item());
        }
    }

    // a character, or what an escape stands for
    set item() {
        if (text[pos] != '\\') {
            const uint32_t c = code_point();
            return {{c, c}};
        }
        if (++pos >= text.size()) { throw unsupported(); }
        const set  digits = {{'0', '9'}};
        const set  spaces = {{'\t', '\r'}, {' ', ' '}, {0xA0, 0xA0}, {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029},
                 {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}}; // as ECMAScript has them
        const set  words  = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
        const auto one    = [&](uint32_t c) { return ++pos, set{{c, c}}; };
        switch (text[pos]) {
            case 'd': return ++pos, digits;
            case 'w': return ++pos, words;
            case 's': return ++pos, spaces;
            case 'D': return ++pos, without(digits);
            case 'W': return ++pos, without(words);
            case 'S': return ++pos, without(spaces);
            case 't': return one('\t');
            case 'n': return one('\n');
            case 'r': return one('\r');
            case 'f': return one('\f');
            case 'v': return one('\v');
            case 'x': return hex(2);
            case 'u': return hex(4);
            default: break;
        }
        if (isalnum((unsigned char) text[pos])) { throw unsupported(); } // a place, a group, a property
        const uint32_t c = code_point();
        return {{c, c}};
    }

    set hex(size_t n) {
        const std::string digits = text.substr(++pos, n);
        if (digits.size() < n || !std::all_of(digits.begin(), digits.end(), [](unsigned char c) { return isxdigit(c); })) {
            throw unsupported();
        }
        pos += n;
        const auto c = (uint32_t) std::stoul(digits, nullptr, 16);
        return {{c, c}};
    }

    uint32_t code_point() {
        const auto   first = (unsigned char) text[pos];
        const size_t n     = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
        if (pos + n > text.size()) { throw unsupported(); }
        uint32_t res = n == 1 ? first : first & (0x7F >> n);
        for (size_t i = 1; i < n; ++i) {
            res = res << 6 | (text[pos + i] & 0x3F);
        }
        pos += n;
        return res;
    }

    // what [...] stands for
    set bracket() {
        const bool negated = !at_end() && text[pos] == '^';
        pos += negated ? 1 : 0;
        set res;
        while (!at_end() && text[pos] != ']') {
            set found = item();
            if (found.size() == 1 && pos + 1 < text.size() && text[pos] == '-' && text[pos + 1] != ']') {
                ++pos;
                const set to = item();
                if (to.size() != 1 || found[0].first > to[0].second) { throw unsupported(); }
                found[0].second = to[0].second;
            }
            res.insert(res.end(), found.begin(), found.end());
        }
        if (at_end()) { throw unsupported(); }
        ++pos;
        return negated ? without(res) : res;
    }

    // all others
    static set without(const set & these) { return subtracted({{0, last}}, these); }

    static set subtracted(set from, const set & these) {
        for (const auto & [first, end] : these) {
            set res;
            for (const auto & [a, b] : from) {
                if (a < first) { res.emplace_back(a, std::min(b, first - 1)); }
                if (b > end) { res.emplace_back(std::max(a, end + 1), b); }
            }
            from = res;
        }
        return from;
    }

    // write a set as JSON has its characters, to the converter's taste: what may be repeated is one class or group
    void put(const set & chars) {
        if (chars.size() == 1 && chars[0].first == chars[0].second && plain(chars[0].first)) {
            out += (char) chars[0].first;
            return;
        }
        std::string options;
        if (const set raw = subtracted(chars, {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}, {0xD800, 0xDFFF}}); !raw.empty()) {
            options = "[";
            for (const auto & [first, end] : raw) {
                options += code(first) + (first == end ? "" : "-" + code(end));
            }
            options += "]";
        }
        const size_t n_raw = options.size();
        for (const auto & [c, escaped] :
                {std::pair('"', "\""), {'\\', "\\\\"}, {'\n', "n"}, {'\t', "t"}, {'\r', "r"}, {'\f', "f"}}) {
            const auto has = [c = (uint32_t) c](const range & r) { return r.first <= c && c <= r.second; };
            if (std::any_of(chars.begin(), chars.end(), has)) {
                options += std::string(options.empty() ? "" : "|") + "\\\\" + escaped;
            }
        }
        if (options.empty()) { throw unsupported(); }
        out += options.size() == n_raw ? options : "(" + options + ")";
    }

    // whether the converter takes it for itself
    static bool plain(uint32_t c) {
        return c >= ' ' && c < 0x7F && std::string("\\\"|.()[]{}*+?^$").find((char) c) == std::string::npos;
    }

    static std::string code(uint32_t c) {
        char res[12];
        snprintf(res, sizeof res, "\\U%08X", c);
        return res;
    }
};
