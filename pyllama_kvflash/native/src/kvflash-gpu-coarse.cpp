// attention by codes on a GPU (kvflash-attend.cu): where they are, and the nodes of the graph

#include "kvflash-coarse.h"
#include "kvflash-gpu-chooser.h"

#include "llama-graph.h"

namespace {

struct gpu_coarse : kvf_gpu_chooser {
    gpu_coarse(kvf_fresh & fresh, kvf_kernels & gpu, ggml_backend_buffer_t buf);

    void put(llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records,
            uint32_t n) override;
    void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) override { codes.get(seq, layer, n, dst); }
    void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) override;

    void moments(uint32_t layer, const void * const * records, uint32_t n, float * mean, float * cov) override {
        kvf_chooser::moments(layer, records, n, mean, cov);
    }
    void fit(llama_seq_id seq, uint32_t layer, const float * mean, const float * basis, const float * step) override {
        kvf_chooser::fit(seq, layer, mean, basis, step);
    }

    ggml_backend_dev_t beside() const override { return nullptr; }
    void build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, uint32_t layer,
            const kvf_predicted & before) override;
    ggml_tensor * blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float scale, ggml_tensor * cur,
            ggml_tensor * sinks, bool by_head, int32_t il, uint32_t layer) override;

    void     add_tokens(std::vector<int32_t> & ask, uint32_t n_token) const override;
    uint32_t n_token_word() const override { return kvf_gpu_attend::LEN_TOKEN; }
    uint64_t device_bytes() override { return kvf_gpu_chooser::device_bytes() + coded.size; }

    // where the device has codes of a layer and a sequence
    struct place {
        size_t codes, scales, means, spread;
    };

    void upload(llama_seq_id seq, uint32_t layer, uint32_t first, uint32_t n);
    void upload(const kvf_codes & from, const place & to, uint32_t first, uint32_t n);
    void lay_out();
    void lay_out_codes();
    void lay_out_attends();

    kvf_coarse_codes                codes;
    std::vector<std::vector<place>> at[2]; // of keys and of values: [layer][seq]
    kvf_gpu_memory                  coded;
    std::vector<kvf_gpu_attend>     attends; // of each layer of the model
    kvf_gpu_occupy                  all = {};
};

} // namespace

std::unique_ptr<kvf_chooser> kvf_gpu_coarse_chooser(kvf_fresh & fresh, ggml_backend_buffer_t buf) {
    // a GPU's own kernels were not tried yet
    auto * gpu = ggml_backend_buffer_is_host(buf) ? kvf_kernels_of(buf) : nullptr;
    return gpu ? std::make_unique<gpu_coarse>(fresh, *gpu, buf) : nullptr;
}

gpu_coarse::gpu_coarse(kvf_fresh & fresh, kvf_kernels & gpu, ggml_backend_buffer_t buf) :
    kvf_gpu_chooser(fresh, gpu, buf), codes(fresh) {}

// once it is known which layers are this one's
void gpu_coarse::lay_out() {
    if (!attends.empty()) { return; }
    lay_out_codes();
    lay_out_attends();
}

// take the memory of codes of whole contexts
void gpu_coarse::lay_out_codes() {
    const uint32_t n_layer = layers.size(), n_seq = owns.size();
    const uint32_t n_tile = (fresh.its.n_ctx + kvf_codes::TILE * kvf_codes::UNIT - 1) / (kvf_codes::TILE * kvf_codes::UNIT);
    const uint32_t n_segment = (fresh.its.n_ctx + kvf_codes::SEGMENT - 1) / kvf_codes::SEGMENT;

    kvf_gpu_places in;
    const size_t   at_of[] = {
            in.take(n_layer * n_seq * sizeof(kvf_gpu_codes)), in.take(n_layer * n_seq * sizeof(kvf_gpu_codes))};
    const size_t at_layers = in.take(n_layer * sizeof(kvf_gpu_layer));
    uint32_t     n_head = 0, width = 0;
    for (uint32_t kind = 0; kind < 2; ++kind) {
        at[kind].resize(n_layer);
        for (uint32_t i = 0; i < n_layer; ++i) {
            if (!mine(i)) { continue; }
            const auto & its = codes[0][i];
            const auto & c   = kind ? its.values() : its.keys();
            n_head           = std::max(n_head, fresh.layers[i].info.n_head);
            width            = std::max(width, its.values().width);
            for (uint32_t seq = 0; seq < n_seq; ++seq) {
                if (kind && its.all.size() == 1) {
                    at[1][i].push_back(at[0][i][seq]); // they are the keys'
                    continue;
                }
                const size_t n = (size_t) n_tile * kvf_codes::TILE * c.n_head;
                at[kind][i].push_back({in.take(n * c.unit_bytes()), in.take(n * kvf_codes::UNIT * sizeof(uint16_t)),
                        in.take(n_segment * c.mean_size()), in.take(c.spread_size())});
            }
        }
    }
    const size_t at_parts = in.take((size_t) kvf_gpu_attend::MOST_ROW_PART * 2 * n_head * (2 + width) * sizeof(float));
    coded                 = kvf_gpu_memory(buft, in.end);

    for (uint32_t i = 0; i < fresh.n_layer_model(); ++i) {
        attends.push_back({});
        attends.back().parts = (float *) coded.at(at_parts);
    }
    for (uint32_t kind = 0; kind < 2; ++kind) {
        std::vector<kvf_gpu_codes> of(n_layer * n_seq);
        for (uint32_t i = 0; i < n_layer; ++i) {
            for (uint32_t seq = 0; seq < at[kind][i].size(); ++seq) {
                const auto & p      = at[kind][i][seq];
                of[i * n_seq + seq] = {(const uint8_t *) coded.at(p.codes), (const uint16_t *) coded.at(p.scales),
                        (const float *) coded.at(p.means), (const float *) coded.at(p.spread)};
            }
        }
        gpu.upload(coded.at(at_of[kind]), of.data(), of.size() * sizeof(of[0]));
        for (auto & a : attends) {
            a.codes[kind] = (const kvf_gpu_codes *) coded.at(at_of[kind]);
        }
    }
    gpu.upload(coded.at(at_layers), layers.data(), n_layer * sizeof(layers[0]));
    all.layers = (const kvf_gpu_layer *) coded.at(at_layers);
}

// what nodes of each layer of the model have, but for what only a graph tells
void gpu_coarse::lay_out_attends() {
    uint32_t first = layers.size(), last = 0;
    for (uint32_t i = 0; i < layers.size(); ++i) {
        if (!mine(i)) { continue; }
        first = std::min(first, i), last = i + 1;
        all.memory = std::max(all.memory, gpu.shared_size(layers[i]));
    }
    all.layers += first;
    all.n_layer = last - first;
    all.n_seq   = owns.size();
    for (uint32_t il = 0; il < attends.size(); ++il) {
        const int32_t i = fresh.layer_read_by(il);
        if (i < 0 || !mine(i)) { continue; }
        auto & a = attends[il];
        a.p      = layers[i];
        for (uint32_t kind = 0; kind < 2; ++kind) {
            const auto & c = kind ? codes[0][i].values() : codes[0][i].keys();
            a.coding[kind] = {c.n_head, c.d, c.width, c.n_bit, c.n_rot, kind == 0 || codes[0][i].all.size() == 1};
            a.codes[kind] += i * owns.size();
        }
        if (!gpu.attend_fits(a, coded.at())) {
            throw kvf_failure(KVF_E_UNSUPPORTED, "a block of this GPU has too little memory for attention by codes");
        }
    }
}

//
// codes
//

void gpu_coarse::upload(const kvf_codes & from, const place & to, uint32_t first, uint32_t n) {
    constexpr uint32_t TILE = kvf_codes::TILE, UNIT = kvf_codes::UNIT;

    for (uint32_t u = first; u < first + n;) { // what lies together: units of a head, of one tile
        const uint32_t n_here = std::min(TILE - u % TILE, first + n - u);
        for (uint32_t head = 0; head < from.n_head; ++head) {
            const size_t slot = ((size_t) u / TILE * from.n_head + head) * TILE + u % TILE;
            gpu.upload(coded.at(to.codes + slot * from.unit_bytes()), from.unit(u, head), n_here * from.unit_bytes());
            gpu.upload(coded.at(to.scales + slot * UNIT * sizeof(uint16_t)), from.scale(u, head),
                    n_here * UNIT * sizeof(uint16_t));
        }
        u += n_here;
    }
    std::vector<char> spread(from.spread_size());
    from.get_spread(spread.data());
    gpu.upload(coded.at(to.spread), spread.data(), spread.size());
    for (uint32_t s = first * UNIT / kvf_codes::SEGMENT; s * kvf_codes::SEGMENT < (first + n) * UNIT; ++s) {
        gpu.upload(coded.at(to.means + s * from.mean_size()), from.mean(s, 0), from.mean_size());
    }
}

void gpu_coarse::upload(llama_seq_id seq, uint32_t layer, uint32_t first, uint32_t n) {
    const auto & its = codes[seq][layer];
    for (uint32_t kind = 0; kind < its.all.size(); ++kind) {
        upload(its.all[kind], at[kind][layer][seq], first, n);
    }
}

void gpu_coarse::put(
        llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records, uint32_t n) {
    const uint32_t each = fresh.n_chunk / kvf_codes::UNIT;
    lay_out();
    for (uint32_t i = layer; i < layer + n_layer; ++i) {
        if (!mine(i)) { continue; }
        codes.put(seq, i, first, records, n);
        upload(seq, i, first * each, n * each);
    }
}

void gpu_coarse::set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) {
    lay_out();
    codes.set(seq, layer, n, src);
    if (n) { upload(seq, layer, 0, n / kvf_codes::UNIT); }
}

//
// the graph
//

void gpu_coarse::add_tokens(std::vector<int32_t> & ask, uint32_t n_token) const {
    using A = kvf_gpu_attend;

    std::vector<int32_t> tokens(n_token * A::LEN_TOKEN, -1);
    for (size_t seq = 0; seq < fresh.sequences.size(); ++seq) {
        const auto & s = fresh.sequences[seq];
        for (size_t i = 0; i < s.tokens.size() && s.n > 0; ++i) {
            int32_t * to = tokens.data() + s.tokens[i] * A::LEN_TOKEN;
            to[A::SEQ]   = seq;
            to[A::POS]   = s.pos[i];
        }
    }
    for (int32_t i = 0; i < ask[kvf_gpu_ask::N_ASKER]; ++i) {
        tokens[ask[kvf_gpu_ask::LEN + i * kvf_gpu_ask::LEN_ASKER + kvf_gpu_ask::ROW] * A::LEN_TOKEN + A::ASKER] = i;
    }
    ask.insert(ask.end(), tokens.begin(), tokens.end());
}

void gpu_coarse::build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float, uint32_t layer,
        const kvf_predicted &) {
    if (layer == 0) { kvf_add_coarse_input(fresh, res); }
    if (!fresh.has_coarse()) { return; }
    lay_out();
    if (add_words(ctx, res, q->ne[2])) { add(ctx, gf, "occupy", layer, gpu.occupy, &all, {words}); }
}

ggml_tensor * gpu_coarse::blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float scale, ggml_tensor * cur,
        ggml_tensor * sinks, bool by_head, int32_t il, uint32_t layer) {
    if (!fresh.has_coarse()) { return cur; }

    auto & at  = attends[il];
    at.p.scale = scale;
    at.chooses = fresh.layers[layer].info.il == il;
    at.by_head = by_head;

    std::vector<ggml_tensor *> args = {add(ctx, gf, "attend", il, gpu.attend, &at, {q, words}), words};
    if (sinks) { args.push_back(sinks); }
    auto * res = ggml_custom_inplace(ctx, cur, args.data(), args.size(), (ggml_custom_op_t) gpu.mix, kvf_gpu::LAUNCHES, &at);
    ggml_format_name(res, "fresh_mix-%d", il);
    if (at.chooses) { add(ctx, gf, "late", il, gpu.choose_late, &at, {res, words}); }
    return res;
}
