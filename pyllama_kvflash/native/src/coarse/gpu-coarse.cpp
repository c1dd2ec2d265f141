// attention by codes on a GPU (coarse/attend.cu): where they are, and the nodes of the graph

#include "coarse/coarse.h"
#include "guests/gpu-chooser.h"

#include "ggml-impl.h"
#include "llama-graph.h"

namespace {

// guests of a layer that a token exchanges: more come no closer where they are chosen for the next one, and take the time of
// a bus
constexpr uint32_t MOST_LATE = 8;

struct gpu_coarse : kvf_gpu_chooser, kvf_tenant {
    gpu_coarse(kvf_fresh & fresh, kvf_kernels & gpu, ggml_backend_buffer_t buf);
    ~gpu_coarse() override {
        if (lodges) { fresh.panes->tenant = nullptr; }
    }

    void begin(llama_seq_id) override { come_back(); }
    void leave() override;

    void put(llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records,
            uint32_t n) override;
    void get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) override;
    void set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) override;

    void build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale, int32_t il,
            uint32_t layer) override;
    ggml_tensor * blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float scale, ggml_tensor * cur,
            ggml_tensor * sinks, bool by_head, int32_t il, uint32_t layer) override;

    void     add_tokens(std::vector<int32_t> & ask, uint32_t n_token) const override;
    uint32_t n_token_word() const override { return kvf_gpu_attend::LEN_TOKEN; }
    uint64_t device_bytes() override { return kvf_gpu_chooser::device_bytes() + tables.size + coded.size; }

    // where the device has codes of a layer and a sequence, and how many bytes
    struct place {
        place(kvf_gpu_places & all, const kvf_codes & c, uint32_t n_ctx);
        size_t codes, scales, means, factors, end;
    };

    void                       lay_out();
    void                       lay_out_passes();
    void                       lay_out_codes();
    void                       lay_out_coders();
    void                       lay_out_attends();
    void                       take_codes(size_t size);
    void                       come_back();
    template <typename F> void each_part(F && copy);
    void begin_segments(llama_seq_id seq, uint32_t layer, uint32_t n_layer, const kvf_gpu_chunks & from, uint32_t first);
    void begin_first(llama_seq_id seq, uint32_t layer, uint32_t n_layer, const kvf_gpu_chunks & from,
            const std::vector<kvf_gpu_sampled> & sampled);
    void upload_factors(llama_seq_id seq, uint32_t layer);

    kvf_gpu_coders coders(uint32_t layer, uint32_t n_layer) const;

    kvf_coarse_codes                codes;            // what rows are divided by: the device has the others
    std::vector<std::vector<place>> at[2];            // of keys and of values: [layer][seq]
    kvf_gpu_memory                  tables;           // what is needed beside codes
    kvf_gpu_memory                  coded;            // codes, unless they are in the memory of panes
    char *                          base   = nullptr; // of codes
    bool                            lodges = false;   // they are there
    bool                            here   = true;    // and not on the host
    std::shared_ptr<char>           away;             // where they are then
    size_t                          at_coders = 0, at_sums = 0, at_chunks = 0, at_end = 0; // and of codes
    uint32_t                        n_head = 0, n_sum = 0; // of a layer: heads of keys; values of keys or of value rows
    size_t                          memory = 0;            // that a block shares which makes codes
    std::vector<kvf_gpu_attend>     attends;               // of each layer of the model
    // of the graph that is being built: the last such nodes; and whose the latter is, until another layer waits for it
    ggml_tensor *    attend = nullptr, *late = nullptr;
    kvf_gpu_attend * late_of = nullptr;
    kvf_gpu_occupy   all     = {};
};

} // namespace

std::unique_ptr<kvf_chooser> kvf_gpu_coarse_chooser(kvf_fresh & fresh, ggml_backend_buffer_t buf) {
    auto * gpu = kvf_kernels_of(buf);
    return gpu ? std::make_unique<gpu_coarse>(fresh, *gpu, buf) : nullptr;
}

gpu_coarse::gpu_coarse(kvf_fresh & fresh, kvf_kernels & gpu, ggml_backend_buffer_t buf) :
    kvf_gpu_chooser(fresh, gpu, buf), codes(fresh) {
    for (auto & l : layers) {
        l.n_exchange = std::min(l.n_exchange, MOST_LATE);
    }
}

// once it is known which layers are this one's
void gpu_coarse::lay_out() {
    if (tables.buf) { return; }
    lay_out_passes();
    lay_out_codes();
    lay_out_coders();
    lay_out_attends();
}

static kvf_gpu_coding coding_of(const kvf_codes & c) { return {c.n_head, c.d, c.width, c.n_bit, c.n_rot}; }

// how each layer of the model attends
void gpu_coarse::lay_out_passes() {
    attends.clear(); // of a time when there was no memory
    for (uint32_t il = 0; il < fresh.n_layer_model(); ++il) {
        auto &        a = attends.emplace_back();
        const int32_t i = fresh.layer_read_by(il);
        if (i < 0 || !mine(i)) { continue; }
        a.p     = layers[i];
        a.share = a.p.n_head / a.p.n_head_kv;
        for (uint32_t kind = 0; kind < 2; ++kind) {
            a.coding[kind] = coding_of(kind ? codes[0][i].values() : codes[0][i].keys());
        }
    }
}

kvf_gpu_coarse::kvf_gpu_coarse(const kvf_gpu_shape & shape) {
    const size_t n_layer = shape.layers.size();
    size_t       of_part = 0, of_passes = 0, of_taken = 0;
    for (const auto & heads : shape.layers) {
        const auto a = shape.attend(heads);
        n_sum        = std::max(n_sum, heads.n_kv * std::max(heads.n_embd, heads.n_embd_v));
        of_part      = std::max<size_t>(of_part, a.part_size());
        of_passes    = std::max(of_passes, (size_t) heads.n_kv * a.n_pass(kvf_gpu_attend::MOST_TOKEN) * a.pass_size());
        of_taken     = kvf_gpu_attend::MOST_TOKEN * a.n_word() * sizeof(uint32_t); // alike in all layers
    }
    for (auto & at : codes) {
        at = take(shape.n_table() * sizeof(kvf_gpu_codes));
    }
    layers = take(n_layer * sizeof(kvf_gpu_layer));
    coders = take(n_layer * 2 * sizeof(kvf_gpu_coder));
    sums   = take(n_layer * 2 * n_sum * 2 * sizeof(double));
    chunks = take(shape.n_record() * sizeof(void *));
    parts  = take(kvf_gpu_attend::MOST_ROW_PART * shape.n_query() * of_part * sizeof(float));
    passes = take(of_passes);
    taken  = take(of_taken);
}

uint64_t kvf_choice_bytes(
        const kvf_heads * heads, uint32_t n_layer, uint32_t n_ctx, uint32_t n_seq, uint32_t n_pool, uint32_t n_chunk) {
    const kvf_gpu_shape shape = {{heads, heads + n_layer}, n_ctx, n_seq, n_pool, n_chunk};
    return kvf_gpu_choice(shape).end + kvf_gpu_coarse(shape).end;
}

// of n_ctx positions, in whole tiles
gpu_coarse::place::place(kvf_gpu_places & all, const kvf_codes & c, uint32_t n_ctx) {
    const size_t n_unit = GGML_PAD((n_ctx + kvf_codes::UNIT - 1) / kvf_codes::UNIT, kvf_codes::TILE) * c.n_head;
    codes               = all.take(n_unit * c.unit_bytes());
    scales              = all.take(n_unit * kvf_codes::UNIT * sizeof(uint16_t));
    means               = all.take(c.n_segment(n_ctx) * c.mean_size());
    factors             = all.take(c.spread_size());
    end                 = all.end;
}

uint64_t kvf_codes_bytes(const kvf_heads * heads, uint32_t n_bit_k, uint32_t n_bit_v, uint32_t n, bool on_gpu) {
    std::vector<kvf_codes> codes = {{heads->n_kv, heads->n_embd, n_bit_k}};
    if (heads->n_embd_v) { codes.emplace_back(heads->n_kv, heads->n_embd_v, n_bit_v); }
    kvf_gpu_places there;
    uint64_t       here = 0;
    for (const auto & c : codes) {
        here += c.size(n);
        gpu_coarse::place(there, c, n);
    }
    return on_gpu ? there.end : here;
}

// take the memory of codes of whole contexts
void gpu_coarse::lay_out_codes() {
    const uint32_t n_layer = layers.size();

    const kvf_gpu_coarse in(kvf_gpu_shape::of(fresh));
    kvf_gpu_places       all_codes;
    n_sum     = in.n_sum;
    at_coders = in.coders;
    at_sums   = in.sums;
    at_chunks = in.chunks;
    for (uint32_t kind = 0; kind < 2; ++kind) {
        at[kind].assign(n_layer, {});
        for (uint32_t i = 0; i < n_layer; ++i) {
            if (!mine(i)) { continue; }
            const auto & its = codes[0][i];
            const auto & c   = kind ? its.values() : its.keys();
            n_head           = std::max(n_head, c.n_head);
            for (uint32_t seq = 0; seq < n_seq; ++seq) {
                if (kind && its.all.size() == 1) {
                    at[1][i].push_back(at[0][i][seq]); // they are the keys'
                    continue;
                }
                at[kind][i].emplace_back(all_codes, c, fresh.its.n_ctx);
            }
        }
    }
    take_codes(all_codes.end);
    tables = kvf_gpu_memory(buft, in.end);

    for (auto & a : attends) {
        a.parts  = (float *) tables.at(in.parts);
        a.passes = tables.at(in.passes);
        a.taken  = (uint32_t *) tables.at(in.taken);
    }
    for (uint32_t kind = 0; kind < 2; ++kind) {
        std::vector<kvf_gpu_codes> of(n_layer * n_seq);
        for (uint32_t i = 0; i < n_layer; ++i) {
            for (uint32_t seq = 0; seq < at[kind][i].size(); ++seq) {
                const auto & p      = at[kind][i][seq];
                of[i * n_seq + seq] = {(uint8_t *) (base + p.codes), (uint16_t *) (base + p.scales),
                        (float *) (base + p.means), (const float *) (base + p.factors)};
            }
        }
        gpu.upload(tables.at(in.codes[kind]), of.data(), of.size() * sizeof(of[0]));
        for (auto & a : attends) {
            a.codes[kind] = (const kvf_gpu_codes *) tables.at(in.codes[kind]);
        }
    }
    gpu.upload(tables.at(in.layers), layers.data(), n_layer * sizeof(layers[0]));
    all.layers = (const kvf_gpu_layer *) tables.at(in.layers);
}

// the memory of all codes: that of panes, if these leave as much
void gpu_coarse::take_codes(size_t size) {
    at_end        = size;
    size_t room   = 0;
    char * shared = fresh.panes ? fresh.panes->memory(device(), room) : nullptr;
    if (shared && room >= size && !fresh.panes->tenant) {
        base                = shared;
        lodges              = true;
        here                = false; // nothing is there yet
        fresh.panes->tenant = this;
        return;
    }
    coded = kvf_gpu_memory(buft, size);
    base  = coded.at();
}

// copy(offset, bytes) what any sequence has of codes
template <typename F> void gpu_coarse::each_part(F && copy) {
    for (uint32_t kind = 0; kind < 2; ++kind) {
        for (uint32_t i = 0; i < layers.size(); ++i) {
            if (!mine(i) || (kind && codes[0][i].all.size() == 1)) { continue; }
            const auto & c = kind ? codes[0][i].values() : codes[0][i].keys();
            for (uint32_t seq = 0; seq < n_seq; ++seq) {
                const uint32_t n =
                        (fresh.sequences[seq].n_unit() + kvf_codes::TILE - 1) / kvf_codes::TILE * kvf_codes::TILE * c.n_head;
                const auto & p = at[kind][i][seq];
                if (n == 0) { continue; }
                copy(p.codes, n * c.unit_bytes());
                copy(p.scales, n * kvf_codes::UNIT * sizeof(uint16_t));
                copy(p.means, p.end - p.means); // and factors
            }
        }
    }
}

void gpu_coarse::leave() {
    if (!here) { return; }
    gpu.wait(base);
    const bool any = std::any_of(fresh.sequences.begin(), fresh.sequences.end(), [](const auto & s) { return s.n > 0; });
    if (any && !away && kvf_mover::has_pinned(device())) {
        auto pinned = std::make_shared<kvf_host>(device(), at_end);
        away        = {pinned, (char *) pinned->base};
    } else if (any && !away) {
        away = {new char[at_end], std::default_delete<char[]>()};
    }
    each_part([&](size_t offset, size_t size) { gpu.download(away.get() + offset, base + offset, size); });
    fresh.panes->clear(base);
    here = false;
}

// codes are needed, where panes may have been since
void gpu_coarse::come_back() {
    if (here) { return; }
    fresh.panes->vacate();
    fresh.panes->clear(base); // the last tile has unused positions
    each_part([&](size_t offset, size_t size) { gpu.upload(base + offset, away.get() + offset, size); });
    here = true;
}

// how codes are made, of keys and of values
void gpu_coarse::lay_out_coders() {
    std::vector<kvf_gpu_coder> res(layers.size() * 2);
    for (uint32_t i = 0; i < layers.size(); ++i) {
        const auto & its = codes[0][i];
        for (uint32_t kind = 0; kind < its.all.size() && mine(i); ++kind) {
            const auto & c        = its.all[kind];
            const auto & info     = fresh.layers[i].info;
            const auto * t        = kind ? fresh.layers[i].v : fresh.layers[i].k;
            const bool   by_value = kind && fresh.v_trans;
            auto &       to       = res[i * 2 + kind];
            to.coding             = coding_of(c);
            to.codes              = attends[0].codes[kind] + i * n_seq;
            to.type               = t->type;
            to.d                  = c.d;
            to.block              = ggml_blck_size(t->type);
            to.block_size         = ggml_type_size(t->type);
            to.by_value           = by_value;
            to.offs               = kind ? info.offs_v : info.offs_k;
            to.stride = by_value ? fresh.n_chunk * to.block_size : ggml_row_size(t->type, (size_t) c.n_head * c.d);
            to.n_half = c.n_half();
            to.step   = c.step();
            memory    = std::max(memory, gpu.coder_memory(to));
        }
    }
    gpu.upload(tables.at(at_coders), res.data(), res.size() * sizeof(res[0]));
}

kvf_gpu_coders gpu_coarse::coders(uint32_t layer, uint32_t n_layer) const {
    return {(const kvf_gpu_coder *) tables.at(at_coders) + layer * 2, n_layer * 2, n_head, memory};
}

// kvf_gpu_attend::rows, each of n_head heads
template <typename R> static uint32_t room_of(const R & rows, uint32_t n_head) {
    uint32_t res = 0;
    for (uint32_t head = 0; head < n_head; ++head) {
        uint32_t       n;
        const uint32_t begin = piece_of(rows, head, n);
        res                  = std::max<uint32_t>(res, GGML_PAD(begin + n, 16) - begin / 16 * 16);
    }
    return res % 32 ? res : res + (rows.block == 1 ? 32 : 16);
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
    all.n_seq   = n_seq;
    for (uint32_t il = 0; il < attends.size(); ++il) {
        const int32_t i = fresh.layer_read_by(il);
        if (i < 0 || !mine(i)) { continue; }
        auto & a = attends[il];
        events.emplace_back(gpu.events(tables.at()), gpu.forget);
        a.events = events.back().get();
        for (uint32_t kind = 0; kind < 2; ++kind) {
            a.codes[kind] += i * n_seq;
        }
        for (uint32_t kind = 0; kind < 2; ++kind) {
            const auto   type = (kind && fresh.layers[i].v ? fresh.layers[i].v : fresh.layers[i].k)->type;
            const auto & c    = a.coding[kind];
            a.rows[kind]      = {type, c.d, (uint32_t) ggml_blck_size(type), (uint32_t) ggml_type_size(type), 0};
            a.rows[kind].room = room_of(a.rows[kind], c.n_head);
        }
        a.n_warp = gpu.attend_warps(a, tables.at());
        if (a.n_warp == 0) {
            throw kvf_failure(KVF_E_UNSUPPORTED,
                    "this GPU cannot attend to codes: it is older than Turing, or its blocks have too little memory");
        }
    }
}

//
// codes
//

void gpu_coarse::put(
        llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records, uint32_t n) {
    const std::lock_guard<std::mutex> lock(mutex);

    lay_out();
    come_back();
    std::vector<const char *> at(n);
    std::transform(records, records + n, at.begin(), [&](const void * record) { return device_record(record); });
    gpu.upload(tables.at(at_chunks), at.data(), n * sizeof(at[0]));
    const kvf_gpu_chunks from = {(const char * const *) tables.at(at_chunks), fresh.n_chunk, n};
    begin_segments(seq, layer, n_layer, from, first);
    gpu.encode_rows(coders(layer, n_layer), from, seq, first * (fresh.n_chunk / kvf_codes::UNIT));
}

// segments whose first chunk is among these. nothing of them comes to the host, but for what the first one says of all
void gpu_coarse::begin_segments(
        llama_seq_id seq, uint32_t layer, uint32_t n_layer, const kvf_gpu_chunks & from, uint32_t first) {
    const auto sampled = kvf_sampled(from.n_chunk, first, from.n);
    const auto its     = coders(layer, n_layer);
    auto *     sums    = (double *) tables.at(at_sums);
    if (first == 0) { begin_first(seq, layer, n_layer, from, sampled); }
    for (const auto & some : sampled) {
        const uint32_t n = some.n(from.n_chunk);
        if (n > 0) { gpu.sum_rows(its, from, some, sums, n_sum); }
        gpu.make_means(its, seq, some.segment, sums, n_sum, n);
    }
}

// what rows are divided by
void gpu_coarse::begin_first(llama_seq_id seq, uint32_t layer, uint32_t n_layer, const kvf_gpu_chunks & from,
        const std::vector<kvf_gpu_sampled> & sampled) {
    std::vector<std::vector<kvf_codes::moments>> segments(n_layer); // of keys
    std::vector<double>                          sums((size_t) n_layer * 2 * n_sum * 2);
    for (const auto & some : sampled) {
        const uint32_t n = some.n(from.n_chunk);
        if (n == 0) { continue; }
        gpu.sum_rows(coders(layer, n_layer), from, some, (double *) tables.at(at_sums), n_sum);
        gpu.download(sums.data(), tables.at(at_sums), sums.size() * sizeof(double));
        for (uint32_t i = 0; i < n_layer; ++i) {
            if (!mine(layer + i)) { continue; }
            auto & s = segments[i].emplace_back(codes[seq][layer + i].keys().moments_of(some.segment));
            s.n_sum  = n;
            for (size_t j = 0; j < s.sum.size(); ++j) {
                s.sum[j]    = sums[((size_t) i * 2 * n_sum + j) * 2];
                s.square[j] = sums[((size_t) i * 2 * n_sum + j) * 2 + 1];
            }
        }
    }
    for (uint32_t i = 0; i < n_layer; ++i) {
        if (segments[i].empty()) { continue; }
        codes[seq][layer + i].keys().spread_over(segments[i]);
        upload_factors(seq, layer + i);
    }
}

void gpu_coarse::upload_factors(llama_seq_id seq, uint32_t layer) {
    const auto & its = codes[seq][layer].all;
    for (uint32_t kind = 0; kind < its.size(); ++kind) {
        std::vector<float> factors(its[kind].spread_size() / sizeof(float));
        its[kind].get_factors(factors.data());
        gpu.upload(base + at[kind][layer][seq].factors, factors.data(), its[kind].spread_size());
    }
}

void gpu_coarse::get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        come_back();
    }
    auto & its = codes[seq][layer];
    for (uint32_t kind = 0; kind < its.all.size() && n > 0; ++kind) {
        const auto [levels, scales, means] = its.all[kind].memory(n);
        const auto & from                  = at[kind][layer][seq];
        gpu.download(levels.first, base + from.codes, levels.second);
        gpu.download(scales.first, base + from.scales, scales.second);
        gpu.download(means.first, base + from.means, means.second);
    }
    codes.get(seq, layer, n, dst);
    for (auto & each : its.all) {
        each.drop();
    }
}

// threads may do different layers
void gpu_coarse::set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        lay_out();
        come_back();
    }
    codes.set(seq, layer, n, src);
    auto & its = codes[seq][layer];
    for (uint32_t kind = 0; kind < its.all.size() && n > 0; ++kind) {
        const auto [levels, scales, means] = its.all[kind].memory(n);
        const auto & to                    = at[kind][layer][seq];
        gpu.upload(base + to.codes, levels.first, levels.second);
        gpu.upload(base + to.scales, scales.first, scales.second);
        gpu.upload(base + to.means, means.first, means.second);
    }
    if (n > 0) { upload_factors(seq, layer); }
    for (auto & each : its.all) {
        each.drop();
    }
}

//
// the graph
//

// whether a device computes all nodes of the graph from the one after `after` on
static bool computes_since(ggml_backend_dev_t dev, const ggml_cgraph * gf, const ggml_tensor * after) {
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

void gpu_coarse::add_tokens(std::vector<int32_t> & ask, uint32_t n_token) const {
    using A = kvf_gpu_attend;

    std::vector<int32_t> tokens(n_token * A::LEN_TOKEN, -1);
    for (size_t seq = 0; seq < fresh.sequences.size(); ++seq) {
        const auto & s = fresh.sequences[seq];
        for (size_t i = 0; i < s.tokens.size(); ++i) {
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

void gpu_coarse::build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale,
        int32_t il, uint32_t layer) {
    const bool chooses = fresh.layers[layer].info.il == il;
    if (layer == 0 && chooses) { kvf_add_coarse_input(fresh, res); }
    if (!fresh.has_coarse()) { return; }

    lay_out();
    auto & at = attends[il];
    if (add_words(ctx, res, q->ne[2])) {
        add(ctx, gf, "occupy", layer, gpu.occupy, &all, {words});
        late_of = nullptr;
    }
    at.p.scale = scale;
    at.chooses = chooses;
    attend     = add(ctx, gf, "attend", il, gpu.attend, &at, {q, words});
}

// whether its own kernels attend to the pool, in place of the library's attention
static bool is_whole(const kvf_gpu_attend & a, const ggml_tensor * cur) {
    const auto fits = [](int32_t type) { // halves have what it has
        return type != GGML_TYPE_F32 && type != GGML_TYPE_BF16;
    };
    return cur->op == GGML_OP_FLASH_ATTN_EXT && cur->ne[2] <= kvf_gpu_attend::MOST_WHOLE && fits(a.rows[0].type) &&
           fits(a.rows[1].type);
}

ggml_tensor * gpu_coarse::blend(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * q, float, ggml_tensor * cur,
        ggml_tensor * sinks, bool by_head, int32_t il, uint32_t) {
    if (!fresh.has_coarse()) { return cur; }

    auto & at = attends[il];
    at.whole  = fresh.has_out() && is_whole(at, cur);
    if (!at.whole) { ggml_build_forward_expand(gf, cur); }
    if (!computes_since(device(), gf, attend)) {
        throw kvf_failure(KVF_E_UNSUPPORTED, "the attention is computed on another device than that of its KV cache");
    }
    // what runs beside other nodes has to be over when the device gives the graph to another one
    at.by_head     = by_head;
    at.late_beside = false; // until there is a node that waits for it
    at.after       = nullptr;
    if (late_of) { // the first one that comes after it
        late_of->late_beside = computes_since(device(), gf, late);
        if (late_of->late_beside) { at.after = late_of->events; }
        late_of = nullptr;
    }

    std::vector<ggml_tensor *> args = {attend, words, q}; // queries last until then
    if (sinks) { args.push_back(sinks); }
    const auto    node = (ggml_custom_op_t) gpu.mix;
    ggml_tensor * res;
    if (at.whole) {
        args.insert(args.begin(), cur->src[3]); // the mask: what fills it begins a ubatch
        res = ggml_custom_4d(ctx, cur->type, cur->ne[0], cur->ne[1], cur->ne[2], cur->ne[3], args.data(), args.size(), node,
                kvf_gpu::LAUNCHES, &at);
    } else {
        res = ggml_custom_inplace(ctx, cur, args.data(), args.size(), node, kvf_gpu::LAUNCHES, &at);
    }
    ggml_format_name(res, "fresh_mix-%d", il);
    if (at.chooses) {
        late    = add(ctx, gf, "late", il, gpu.choose_late, &at, {res, words});
        late_of = &at;
    }
    return res;
}
