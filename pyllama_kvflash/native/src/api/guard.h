#pragma once

#include "kvflash.h"

#include <functional>
#include <stdexcept>
#include <string>

// an error of the C API: a status and a message
struct kvf_failure : std::runtime_error {
    kvf_failure(int status, const std::string & what) : std::runtime_error(what), status(status) {}

    int status;
};

// run f, and convert its exceptions to a status. failed assertions of llama.cpp count as exceptions
LLAMA_API int kvf_guard(const std::function<void()> & f);

// fail the call that needs a lost RPC server with KVF_E_LOST, unless it is in a destructor
void kvf_on_lost(const char * endpoint);

// the error for values that no intact model computes
inline kvf_failure kvf_not_finite(const std::string & what) {
    return kvf_failure(
            KVF_E_LOGITS, what + " are NaN or infinite: its weights are damaged, or a value was too large for f16; "
                                 "get the file again, or try `type_k` and `type_v` bf16 or `flash_attn` off");
}

inline void kvf_check(bool ok, const char * what) {
    if (!ok) { throw kvf_failure(KVF_E_ARGUMENT, what); }
}
