#pragma once

// A lost RPC server fails the calls that need it: hooks in llama.cpp's RPC backend (patch 0009), which ends the process
// otherwise. A message to a lost server has no effect, and its answer is zeros.

#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <string.h>
#include <string>

#include "ggml.h"

// the connection to a server
struct kvf_rpc_server {
    using on_lost_t = void (*)(const char * endpoint);

    // called when a call needs a lost server, and may throw; without it the process ends
    static inline std::atomic<on_lost_t> on_lost = nullptr;

    std::string           endpoint;
    std::atomic_bool      lost = false;
    std::function<void()> shutdown; // ends what the connection is sending or receiving

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

    // after a message. output: where its answer is to be, of size bytes; null: it has none
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

// a function by its name, as ggml_backend_reg_get_proc_address() finds it; null: not one of these
inline void * kvf_rpc_function(const char * name) {
    if (strcmp(name, "kvflash_rpc_set_on_lost") == 0) {
        return (void *) +[](kvf_rpc_server::on_lost_t f) { kvf_rpc_server::on_lost = f; };
    }
    return strcmp(name, "kvflash_rpc_drop_servers") == 0 ? (void *) kvf_rpc_server::drop_all : nullptr;
}
