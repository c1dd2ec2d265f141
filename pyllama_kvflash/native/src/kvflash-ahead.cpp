// a layer's queries before they are there, see kvf_ahead in kvflash-fresh.h

#include "kvflash-fresh.h"

#include "ggml-impl.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <unordered_map>

namespace {

constexpr size_t MOST = 64; // tensors that a layer's queries are computed from
constexpr int    NEAR = 12; // and those between them and the layer before

constexpr size_t MOST_READ = GGML_MAX_SRC - 4; // by a node, with two of its own, and two queries of the layer before

// copies what a tensor is computed from, with another tensor in the place of one of these
struct copier {
    ggml_context *      ctx;
    const ggml_tensor * from;
    ggml_tensor *       to;

    std::unordered_map<const ggml_tensor *, ggml_tensor *> done;
    std::vector<ggml_tensor *>                             made;

    // null: `from` has no part in it
    ggml_tensor * copy(const ggml_tensor * t) {
        if (t == from) { return to; }
        const auto known = done.find(t);
        if (known != done.end()) { return known->second; }
        done[t] = nullptr;
        if (t->op == GGML_OP_NONE || done.size() > MOST) { return nullptr; }

        std::array<ggml_tensor *, GGML_MAX_SRC> srcs = {};
        bool                                    any  = false;
        for (int i = 0; i < GGML_MAX_SRC && t->src[i]; ++i) {
            auto * src = copy(t->src[i]);
            any        = any || src;
            srcs[i]    = src ? src : t->src[i];
        }
        if (!any) { return nullptr; }

        auto * root    = t->view_src ? copy(t->view_src) : nullptr;
        auto * res     = t->view_src ? ggml_view_tensor(ctx, root ? root : t->view_src)
                                     : ggml_new_tensor(ctx, t->type, GGML_MAX_DIMS, t->ne);
        res->op        = t->op;
        res->view_offs = t->view_offs;
        memcpy(res->ne, t->ne, sizeof(t->ne));
        memcpy(res->nb, t->nb, sizeof(t->nb));
        memcpy(res->op_params, t->op_params, sizeof(t->op_params));
        std::copy(srcs.begin(), srcs.end(), res->src);
        made.push_back(res);
        return done[t] = res;
    }
};

bool is_named(const ggml_tensor * t, const char * what, int32_t il) {
    return t && t->name == std::string(what) + "-" + std::to_string(il);
}

// the nearest tensor of this name that t is computed from
ggml_tensor * find(ggml_tensor * t, const char * what, int32_t il, int depth) {
    if (!t || depth == 0) { return nullptr; }
    if (is_named(t, what, il)) { return t; }
    for (auto * src : t->src) {
        if (auto * res = find(src, what, il, depth - 1)) { return res; }
    }
    return nullptr;
}

// whether the backend computes t together with its only reader, which then takes its memory
bool is_fused(const ggml_tensor * t, const ggml_tensor * reader) {
    return ggml_are_same_shape(t, reader) && ((t->op == GGML_OP_RMS_NORM && reader->op == GGML_OP_MUL) ||
                                                     (t->op == GGML_OP_MUL_MAT && reader->op == GGML_OP_ADD));
}

// the source of t of this name
ggml_tensor * source(const ggml_tensor * t, const char * what, int32_t il) {
    const auto named = [&](const ggml_tensor * src) { return is_named(src, what, il); };
    auto *     found = std::find_if(t->src, t->src + GGML_MAX_SRC, named);
    return found == t->src + GGML_MAX_SRC ? nullptr : *found;
}

template <typename T> bool has(const T & all, const ggml_tensor * t) {
    return std::find(std::begin(all), std::end(all), t) != std::end(all);
}

} // namespace

kvf_ahead::kvf_ahead(
        ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * exact, int32_t il, uint32_t layer, ggml_backend_dev_t dev) {
    auto * out = il > 0 ? find(exact, "l_out", il - 1, NEAR) : nullptr;
    if (!out) { return; }
    near = source(out, "ffn_inp", il - 1);
    if (!near) { near = source(out, "sa_out", il - 1); }
    if (!near) { return; }
    auto * from = il == 1 ? near->src[1] : source(near, "l_out", il - 2);
    if (!from || from->op == GGML_OP_NONE || !kvf_computes_since(dev, gf, from)) { return; }

    copier c   = {ctx, out, from, {}, {}};
    auto * res = c.copy(exact);
    // other nodes run at the same time, and must not take the memory of these, nor of what they read
    reads = {from};
    for (auto * t : c.made) {
        const auto reader =
                std::find_if(c.made.begin(), c.made.end(), [&](const ggml_tensor * r) { return has(r->src, t); });
        if (reader == c.made.end() || !is_fused(t, *reader)) { ggml_set_output(t); }
        ggml_format_name(t, "fresh_ahead-%d", il);
        for (auto * src : t->src) {
            if (src && !src->buffer && !has(c.made, src) && !has(reads, src)) { reads.push_back(src); }
        }
    }
    if (reads.size() > MOST_READ || c.done.size() > MOST) { return; }

    begin      = from;
    bool ready = true; // what they read is computed before them
    for (int i = gf->n_nodes - 1; gf->nodes[i] != begin; --i) {
        if (is_named(gf->nodes[i], "fresh_join", layer - 1)) {
            begin = gf->nodes[i];
            break;
        }
        ready = ready && !has(reads, gf->nodes[i]);
    }
    if (ready) { q = res; }
}

bool kvf_computes_since(ggml_backend_dev_t dev, const ggml_cgraph * gf, const ggml_tensor * after) {
    const bool on_cpu = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU; // in tests
    for (int i = gf->n_nodes - 1; i >= 0 && gf->nodes[i] != after; --i) {
        const auto * node = gf->nodes[i];
        if (!ggml_backend_dev_supports_op(dev, node)) { return false; }
        for (const auto * src : node->src) {
            auto *     buf   = src ? src->buffer : nullptr;
            const bool there = !buf || (on_cpu ? ggml_backend_buffer_is_host(buf)
                                               : ggml_backend_buffer_get_type(buf) == ggml_backend_dev_buffer_type(dev));
            if (!there) { return false; }
        }
    }
    return true;
}

void kvf_move_nodes(ggml_cgraph * gf, int first, const ggml_tensor * after) {
    int to = first - 1;
    while (gf->nodes[to] != after) {
        GGML_ASSERT(--to >= 0);
    }
    std::rotate(gf->nodes + to + 1, gf->nodes + first, gf->nodes + gf->n_nodes);
}
