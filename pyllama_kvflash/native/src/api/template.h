#pragma once

// limits for chat templates, which come with model files and are not trusted: hooks in llama.cpp's template interpreter

#include <chrono>
#include <cstdint>
#include <stdexcept>

// limits and state of the template that runs on this thread. by default there is no time limit
struct kvf_template_run {
    using clock = std::chrono::steady_clock;

    static constexpr int    max_depth = 400;      // nested expressions; each takes a few KiB of stack
    static constexpr size_t max_range = 100000;   // items of range(), the limit of jinja2's sandbox
    static constexpr size_t max_items = 1 << 20;  // items of any list
    static constexpr size_t max_text  = 64 << 20; // bytes of any intermediate string

    clock::time_point deadline = clock::time_point::max();
    int               depth    = 0;
    bool              refused  = false; // the template exceeded a limit
};

inline thread_local kvf_template_run kvf_template;

[[noreturn]] inline void kvf_template_refuse(const char * why) {
    kvf_template.refused = true;
    throw std::runtime_error(why);
}

// one step of the interpreter
struct kvf_template_step {
    kvf_template_step() {
        auto & run = kvf_template;
        if (run.depth >= run.max_depth) { kvf_template_refuse("it is nested too deeply"); }
        if (kvf_template_run::clock::now() > run.deadline) { kvf_template_refuse("it takes too long"); }
        ++run.depth;
    }
    ~kvf_template_step() { --kvf_template.depth; }

    kvf_template_step(const kvf_template_step &)             = delete;
    kvf_template_step & operator=(const kvf_template_step &) = delete;

    // return the result of a step, or refuse it as too large
    template <typename T> T checked(T val) const {
        if (val->val_str.length() > kvf_template_run::max_text) { kvf_template_refuse("it produces too long a text"); }
        if (val->val_arr.size() > kvf_template_run::max_items) { kvf_template_refuse("it produces too long a list"); }
        return val;
    }
};

inline void kvf_template_range(int64_t start, int64_t stop, int64_t step) {
    const double n = step == 0 ? 0.0 : ((double) stop - (double) start) / (double) step;
    if (n > (double) kvf_template_run::max_range) { kvf_template_refuse("it calls range() for too many items"); }
}
