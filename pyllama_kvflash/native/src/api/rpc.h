#pragma once

// Hooks in llama.cpp's RPC backend (patch 0009): calls that need a lost RPC server fail, instead of ending the process. A
// message to a lost server has no effect, and its answer is zeros.

#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <string.h>
#include <string>

#include "ggml.h"

// a connection to a server
struct kvf_rpc_server {
    using on_lost_t = void (*)(const char * endpoint);

    // runs when a call needs a lost server, and may throw. without it, the process ends
    static inline std::atomic<on_lost_t> on_lost = nullptr;

    std::string           endpoint;
    std::atomic_bool      lost = false;
    std::function<void()> shutdown; // interrupts sending and receiving

    ~kvf_rpc_server() {
        std::lock_guard<std::mutex> const lock(mutex);
        all.erase(this);
    }

    void connected(const std::string & to, std::function<void()> end) {
        std::lock_guard<std::mutex> const lock(mutex);
        endpoint = to;
        shutdown = std::move(end);
        all.insert(this);
    }

    // call after each message. output: the buffer of the answer, size bytes; null: there is no answer
    void answered(bool ok, void * output, size_t size) {
        lost = !ok;
        if (!ok && output) { memset(output, 0, size); }
    }

    void check() const {
        if (lost) { fail(endpoint); }
    }

    static void fail(const std::string & endpoint) {
        const on_lost_t call = on_lost.load();
        if (!call) { GGML_ABORT("the RPC server %s is gone", endpoint.c_str()); }
        call(endpoint.c_str());
    }

    static void drop_all() {
        std::lock_guard<std::mutex> const lock(mutex);
        for (auto * server : all) {
            if (!server->lost) { server->shutdown(); }
        }
    }

private:
    static inline std::mutex                 mutex;
    static inline std::set<kvf_rpc_server *> all;
};

// look up a hook by name, for ggml_backend_reg_get_proc_address(); null: there is no such hook
inline void * kvf_rpc_function(const char * name) {
    if (strcmp(name, "kvflash_rpc_set_on_lost") == 0) {
        return (void *) +[](kvf_rpc_server::on_lost_t f) { kvf_rpc_server::on_lost = f; };
    }
    return strcmp(name, "kvflash_rpc_drop_servers") == 0 ? (void *) kvf_rpc_server::drop_all : nullptr;
}
