#pragma once

// shared by the functions of the C API: lookups of caches, and checks of arguments. a failed lookup or check throws
// kvf_failure

#include "pool/impl.h"

#include <string>

// take the error lines logged since the last call: llama.cpp explains its failures only in its log
std::string kvf_take_log();

// the full-attention KV cache of any context; of a pooled context; of a paned context
llama_kv_cache & kvf_attention(llama_context * ctx);
llama_kv_cache & kvf_pooled(llama_context * ctx);
llama_kv_cache & kvf_paned(llama_context * ctx);

void kvf_check_seq(llama_context * ctx, llama_seq_id seq);

// mark a context whose cells may hold NaN; and return whether it was marked since the last call
void kvf_mark_bad(const llama_context * ctx);
bool kvf_was_bad(const llama_context * ctx);

// invalidate a sequence's rows from pos on in panes and guests, if there are any: the rows in the cache have changed
void kvf_forget(llama_context * ctx, llama_seq_id seq, llama_pos pos);
