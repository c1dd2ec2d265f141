// llama.cpp's log, conversion of exceptions to statuses, start-up and interrupt

#include "api/args.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <string>

#ifdef GGML_BACKEND_DL
#include <dlfcn.h>
#include <filesystem>
#endif

//
// log
//

static std::atomic<int> g_min_level = GGML_LOG_LEVEL_NONE;

// the last error lines of the log: llama.cpp explains its failures only there
static std::mutex  g_log_mutex;
static std::string g_log;

static constexpr size_t LOG_BYTES = 4096;

static void log_line(ggml_log_level level, const char * text, void * /*ud*/) {
    static thread_local ggml_log_level last = GGML_LOG_LEVEL_NONE;
    if (level != GGML_LOG_LEVEL_CONT) { last = level; }
    if (last >= GGML_LOG_LEVEL_ERROR) {
        const std::lock_guard<std::mutex> lock(g_log_mutex);
        g_log += text;
        if (g_log.size() > LOG_BYTES) { g_log.erase(0, g_log.size() - LOG_BYTES); }
    }
    const int min_level = g_min_level;
    if (min_level != GGML_LOG_LEVEL_NONE && last >= min_level) { fputs(text, stderr); }
}

std::string kvf_take_log() {
    const std::lock_guard<std::mutex> lock(g_log_mutex);

    std::string res;
    res.swap(g_log);
    while (!res.empty() && res.back() == '\n') {
        res.pop_back();
    }
    return res;
}

void kvf_log_level(int min_level) { g_min_level = min_level; }

//
// errors
//

static thread_local std::string g_error;

// nesting depth of this thread in kvf_guard()
static thread_local int g_guarded = 0;

// the cause that a GPU backend logs just before it aborts with a bare "CUDA error"; empty: none
static std::string gpu_error() {
    static const std::string mark = "CUDA error: ";

    const std::string log = kvf_take_log();
    const size_t      at  = log.rfind(mark);
    return at == std::string::npos ? "" : log.substr(at + mark.size(), log.find('\n', at) - at - mark.size());
}

// a failed GGML_ASSERT would end the process. within a kvf_guard() it becomes an exception instead, which passes through C
// code (compiled with -fexceptions, see CMakeLists.txt). llama.cpp's state may be damaged then, but the caller can report
// the error and keep its data
static void on_abort(const char * message) {
    if (g_guarded > 0) {
        const std::string why = gpu_error();
        if (why == "out of memory" || why == "the resource allocation failed") { // the latter is from cuBLAS
            throw kvf_failure(KVF_E_MEMORY,
                    "the GPU ran out of memory during the computation: reduce `n_ubatch`, `pool`, `n_ctx` or "
                    "`n_gpu_layers`; `kvflash plan` shows what fits");
        }
        throw kvf_failure(KVF_E_BACKEND, why.empty() ? message : message + (": " + why));
    }
    fprintf(stderr, "%s\n", message);
}

// destructors must not throw: they run outside a kvf_guard(), or during stack unwinding
void kvf_on_lost(const char * endpoint) {
    if (g_guarded > 0 && std::uncaught_exceptions() == 0) {
        throw kvf_failure(KVF_E_LOST, "the RPC server " + std::string(endpoint) +
                                              " is gone, with its weights and KV cache: start it again, and load the "
                                              "model again");
    }
}

// the status of the current exception. its message becomes this thread's kvf_error()
static int status_of_exception() {
    const auto failed = [](int status, const char * what) {
        g_error = what;
        return status;
    };
    try {
        throw;
    } catch (const kvf_failure & err) { return failed(err.status, err.what()); } catch (const std::bad_alloc &) {
        return failed(KVF_E_MEMORY, "out of memory");
    } catch (const std::exception & err) { return failed(KVF_E_BACKEND, err.what()); } catch (...) {
        return failed(KVF_E_BACKEND, "unknown error");
    }
}

int kvf_guard(const std::function<void()> & f) {
    struct enter {
        enter() { g_guarded++; }
        ~enter() { g_guarded--; }
    } const inside;

    g_error.clear();
    try {
        f();
        return KVF_OK;
    } catch (...) { return status_of_exception(); }
}

const char * kvf_error(void) { return g_error.c_str(); }

//
// start and interrupt
//

static std::atomic<bool> g_stop = false;

#ifdef GGML_BACKEND_DL
// load the backends of a wheel, which are modules in this library's folder. of the CPU backends, only the best one for this
// processor is loaded
static void load_backends() {
    Dl_info self;
    if (dladdr((void *) kvf_init, &self)) {
        ggml_backend_load_all_from_path(std::filesystem::path(self.dli_fname).parent_path().c_str());
    }
}
#endif

void kvf_init(void) {
    static std::once_flag once;
    std::call_once(once, [] {
#ifndef _WIN32
        setenv("GGML_NO_BACKTRACE", "1", 0); // a backtrace would attach a debugger to the process
#endif
        llama_log_set(log_line, nullptr);
        ggml_set_abort_callback(on_abort);
#ifdef GGML_BACKEND_DL
        load_backends();
#endif
        llama_backend_init();
    });
}

void kvf_interrupt(bool stop) { g_stop = stop; }

bool kvf_stopped() { return g_stop.load(std::memory_order_relaxed); }
