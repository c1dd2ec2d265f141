#pragma once

// what the functions of the C API share: checks of their arguments, and the caches that they work on. each throws
// kvf_failure if it does not find what it is to return

#include "pool/impl.h"

#include <string>

// the error lines of the library's log since the last call: it writes why it failed only there
std::string kvf_take_log();

// the full-attention KV cache of a context, of one with a pool, and of one with panes
llama_kv_cache & kvf_attention(llama_context * ctx);
llama_kv_cache & kvf_pooled(llama_context * ctx);
llama_kv_cache & kvf_paned(llama_context * ctx);

void kvf_check_seq(llama_context * ctx, llama_seq_id seq);

// a context computed NaN, which may be in its cells; and whether that was so since the last call
void kvf_mark_bad(const llama_context * ctx);
bool kvf_was_bad(const llama_context * ctx);

// the rows of a sequence from pos on have changed: panes and guests, if there are any, must not use theirs
void kvf_forget(llama_context * ctx, llama_seq_id seq, llama_pos pos);
