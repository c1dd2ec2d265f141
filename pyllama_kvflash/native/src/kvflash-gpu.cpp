// where layers choose by the kernels of a GPU (kvflash-fresh.cu), see kvflash-fresh.h

#include "kvflash-gpu-chooser.h"

#include "llama-graph.h"

namespace {

kvf_kernels * g_host_kernels = nullptr;

// the words of an ask, as an input of the graph
struct ask_input : llm_graph_input_i {
    ask_input(const kvf_gpu_chooser & chooser, ggml_tensor * words, uint32_t n_token) :
        chooser(chooser), words(words), n_token(n_token), waits(chooser.fresh.waits) {}

    void set_input(const llama_ubatch *) override {
        auto ask = chooser.ask();
        chooser.add_tokens(ask, n_token);
        ggml_backend_tensor_set(words, ask.data(), 0, ask.size() * sizeof(int32_t));
    }
    bool can_reuse(const llm_graph_params &) override { return waits == chooser.fresh.waits; }

    const kvf_gpu_chooser & chooser;
    ggml_tensor *           words;
    const uint32_t          n_token;
    const std::vector<bool> waits; // of the graph
};

// what lanes multiply: those of four nibbles at a time that have bits at a shift; an even number for each of four lanes
std::vector<kvf_gpu_word> make_words(const kvf_gpu_form & f) {
    std::vector<kvf_gpu_word> res;
    for (uint32_t quad = 0; quad * 4 < f.n_nibble; ++quad) {
        for (uint32_t shift = 0; shift < 4; ++shift) {
            kvf_gpu_word word = {0, {-1, -1, -1, -1}, (uint16_t) quad, (uint16_t) shift};
            for (uint32_t b = 0; b < 4; ++b) {
                const uint32_t nibble = quad * 4 + b;
                const uint32_t n_bit  = nibble < f.n_four ? 4 : nibble < f.n_four + f.n_two / 2 ? 2 : 1;
                word.comps[b]         = f.component(nibble, shift);
                if (word.comps[b] >= 0) { word.mask |= ((1u << n_bit) - 1) << 8 * b; }
            }
            if (word.mask) { res.push_back(word); }
        }
    }
    res.resize(GGML_PAD(res.size(), 8), {0, {-1, -1, -1, -1}, 0, 0});
    if (res.size() > kvf_gpu_word::MOST) {
        throw kvf_failure(KVF_E_UNSUPPORTED, "the index has too many components for a GPU");
    }
    return res;
}

} // namespace

kvf_kernels * kvf_kernels_of(ggml_backend_buffer_t buf) {
    auto *     dev  = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buf));
    auto *     reg  = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    const auto find = reg ? (kvf_kernels * (*) ()) ggml_backend_reg_get_proc_address(reg, "kvflash_gpu") : nullptr;
    return find ? find() : ggml_backend_buffer_is_host(buf) ? g_host_kernels : nullptr;
}

std::unique_ptr<kvf_chooser> kvf_make_gpu_chooser(kvf_fresh & fresh, ggml_backend_buffer_t buf) {
    auto * gpu = kvf_kernels_of(buf);
    return gpu ? std::make_unique<kvf_gpu_chooser>(fresh, *gpu, buf) : nullptr;
}

void kvf_set_host_kernels(const void * gpu) { g_host_kernels = (kvf_kernels *) gpu; }

kvf_gpu_chooser::kvf_gpu_chooser(kvf_fresh & fresh, kvf_kernels & gpu, ggml_backend_buffer_t buf) :
    fresh(fresh), gpu(gpu), buft(ggml_backend_buffer_get_type(buf)), owns(fresh.sequences.size()) {
    const auto all = lay_out();
    for (uint32_t i = 0; i < fresh.layers.size(); ++i) {
        const auto & l    = layers.emplace_back(of_layer(all, i));
        const auto   type = (ggml_type) l.type_k;
        keys.push_back({l.type_k, l.n_head_kv, l.d, (uint32_t) ggml_blck_size(type), (uint32_t) ggml_type_size(type),
                l.row_size, l.k.offs, l.index});
    }
    gpu.upload(fixed.at(at_keys), keys.data(), keys.size() * sizeof(keys[0]));
    for (const auto & l : layers) {
        if (!gpu.fits(l, fixed.at())) {
            throw kvf_failure(KVF_E_UNSUPPORTED, format("a block of this GPU cannot choose among the %d tokens of the pool",
                                                         (int) (l.n_slot * kvf_fresh::UNIT)));
        }
    }
    const std::vector<int32_t> none(layers.size() * owns.size() * all.n_slot, -1);
    gpu.upload(indexes[0].table, none.data(), none.size() * sizeof(int32_t));
    gpu.upload(fixed.at(at_index), indexes.data(), indexes.size() * sizeof(indexes[0]));

    for (uint32_t i = 0; i < layers.size(); ++i) {
        events.emplace_back(gpu.events(fixed.at()), gpu.forget);
    }

    // a tensor that is there already: what is computed "in its place" is computed on its device
    view.type   = GGML_TYPE_F32;
    view.buffer = fixed.buf.get();
    view.data   = fixed.at();
    view.ne[0] = view.ne[1] = view.ne[2] = view.ne[3] = 1;
    view.nb[0] = view.nb[1] = view.nb[2] = view.nb[3] = sizeof(float);
}

// take the fixed memory. returns what all layers have in common
kvf_gpu_layer kvf_gpu_chooser::lay_out() {
    const uint32_t n_seq = owns.size(), n_layer = fresh.layers.size(), n_block = fresh.n_cell / fresh.n_chunk;
    const uint32_t each = fresh.n_chunk / kvf_fresh::UNIT, n_comp = fresh.its.form.n_comp();
    uint32_t       n_head = 0, n_cov = 0;
    for (const auto & l : fresh.layers) {
        n_head  = std::max(n_head, l.info.n_head);
        n_value = std::max(n_value, l.info.n_head_kv * l.info.n_embd_head_k);
        n_cov   = std::max(n_cov, l.info.n_head_kv * l.info.n_embd_head_k * l.info.n_embd_head_k);
    }
    n_record = (fresh.its.n_ctx + fresh.n_chunk - 1) / fresh.n_chunk;

    kvf_gpu_layer res = {};
    res.n_turn        = fresh.its.n_turn;
    res.n_chunk       = fresh.n_chunk;
    res.n_slot        = n_block * each;
    res.n_exchange    = fresh.its.n_exchange;
    const auto & form = fresh.its.form;
    res.form          = {form.n_four, form.n_two, form.n_one, n_comp, form.n_nibble(), 0};
    const auto words  = make_words(res.form);
    res.form.n_each   = words.size() / 4;
    res.ask           = {std::max(n_seq, kvf_fresh::MOST_ASKING), n_seq, n_block, n_record * each};

    kvf_gpu_places in;
    const auto     at_lse     = in.take(sizeof(float) * res.ask.n_asker * n_head * res.ask.n_unit);
    const auto     at_parts   = in.take(2 * sizeof(float) * res.ask.n_asker * n_head * KVF_GPU_PARTS);
    const auto     at_shares  = in.take(sizeof(int32_t) * n_seq * res.ask.n_unit);
    const auto     at_tops    = in.take(sizeof(int32_t) * n_seq * (res.ask.n_unit / 4 + 1));
    const auto     at_moves   = in.take(sizeof(kvf_move) * res.n_slot);
    const auto     at_n_moves = in.take(sizeof(uint32_t));
    const auto     at_counts  = in.take(2 * sizeof(uint64_t));
    const auto     at_words   = in.take(sizeof(kvf_gpu_word) * words.size());
    const auto     at_mean = in.take(sizeof(float) * n_value), at_cov = in.take(sizeof(float) * n_cov);
    const auto     at_table = in.take(sizeof(int32_t) * n_layer * n_seq * res.n_slot);
    const auto     at_own   = in.end; // a mean, a basis and steps of each layer and sequence
    for (const auto & l : fresh.layers) {
        const size_t n = l.info.n_head_kv * l.info.n_embd_head_k;
        in.take(n_seq * sizeof(float) * (n + n * n_comp + l.info.n_head_kv * n_comp));
    }
    for (const auto & l : fresh.layers) {
        at_drift.push_back(in.take(sizeof(float) * n_seq * l.info.n_head * (l.info.n_embd_head_k + 1)));
    }
    at_records = in.take(sizeof(void *) * n_seq * n_record);
    at_blocks  = in.take(sizeof(int32_t) * n_block);
    at_index   = in.take(sizeof(kvf_gpu_index) * n_layer * n_seq);
    at_keys    = in.take(sizeof(kvf_gpu_keys) * n_layer);
    fixed      = kvf_gpu_memory(buft, in.end);
    mean       = (float *) fixed.at(at_mean);
    cov        = (float *) fixed.at(at_cov);

    kvf_gpu_places own = {at_own};
    for (uint32_t i = 0; i < n_layer; ++i) {
        const auto & l  = fresh.layers[i].info;
        const size_t n  = l.n_head_kv * l.n_embd_head_k;
        float *      at = (float *) fixed.at(own.take(n_seq * sizeof(float) * (n + n * n_comp + l.n_head_kv * n_comp)));
        for (uint32_t seq = 0; seq < n_seq; ++seq) {
            float * basis = at + n;
            float * step  = basis + n * n_comp;
            indexes.push_back({nullptr, at, basis, step, (int32_t *) fixed.at(at_table) + indexes.size() * res.n_slot,
                    (const char * const *) fixed.at(at_records) + (size_t) seq * n_record});
            at = step + l.n_head_kv * n_comp;
        }
    }
    gpu.upload(fixed.at(at_words), words.data(), words.size() * sizeof(words[0]));
    res.words     = (const kvf_gpu_word *) fixed.at(at_words);
    res.lse       = (float *) fixed.at(at_lse);
    res.parts     = (float *) fixed.at(at_parts);
    res.keys      = (int32_t *) fixed.at(at_shares);
    res.tops      = (int32_t *) fixed.at(at_tops);
    res.moves     = (kvf_move *) fixed.at(at_moves);
    res.n_moves   = (uint32_t *) fixed.at(at_n_moves);
    res.n_fetched = (uint64_t *) fixed.at(at_counts);
    res.n_arrived = (uint32_t *) fixed.at(at_counts) + 2;
    res.n_met     = res.n_arrived + 1;
    return res;
}

kvf_gpu_layer kvf_gpu_chooser::of_layer(const kvf_gpu_layer & all, uint32_t i) const {
    constexpr uint32_t UNIT = kvf_fresh::UNIT;

    const auto & l    = fresh.layers[i];
    const auto   size = [&](const ggml_tensor * t) { return UNIT * ggml_row_size(t->type, t->ne[0]); };

    kvf_gpu_layer res = all;
    res.i             = i;
    res.n_head        = l.info.n_head;
    res.n_head_kv     = l.info.n_head_kv;
    res.d             = l.info.n_embd_head_k;
    res.type_k        = l.info.type_k;
    res.row_size      = ggml_row_size(l.k->type, l.k->ne[0]);
    res.cap           = l.cap;
    res.k             = {(char *) l.k->data, size(l.k), 1, 0, l.info.offs_k, 0};
    if (l.v && !fresh.v_trans) { res.v = {(char *) l.v->data, size(l.v), 1, 0, l.info.offs_v, 0}; }
    if (l.v && fresh.v_trans) {
        const size_t el = ggml_type_size(l.v->type);
        res.v = {(char *) l.v->data, UNIT * el, (uint32_t) l.v->ne[0], fresh.n_cell * el, l.info.offs_v, fresh.n_chunk * el};
    }
    res.index = drift(i).index;
    res.drift = drift(i).data;
    if (i > 0) { res.drift_before = drift(i - 1); }
    return res;
}

kvf_gpu_drift kvf_gpu_chooser::drift(uint32_t i) const {
    const auto & l  = fresh.layers[i].info;
    float *      at = (float *) fixed.at(at_drift[i]);
    return {at, at + owns.size() * l.n_head * l.n_embd_head_k, (const kvf_gpu_index *) fixed.at(at_index) + i * owns.size(),
            l.n_head, l.n_head_kv, l.n_embd_head_k};
}

//
// the index
//

size_t kvf_gpu_chooser::codes_size(uint32_t layer, uint32_t n) const {
    return (size_t) fresh.layers[layer].info.n_head_kv * ((n + kvf_index::GROUP - 1) / kvf_index::GROUP) *
           layers[layer].form.group_size();
}

std::array<std::pair<float *, size_t>, 3> kvf_gpu_chooser::parts(llama_seq_id seq, uint32_t layer) {
    const auto & l       = layers[layer];
    const auto & its     = index(seq, layer);
    const size_t n_value = (size_t) l.n_head_kv * l.d, n_comp = fresh.its.form.n_comp();
    return {{{its.mean, sizeof(float) * n_value}, {its.basis, sizeof(float) * n_value * n_comp},
            {its.step, sizeof(float) * l.n_head_kv * n_comp}}};
}

const char * kvf_gpu_chooser::device_record(const void * record) {
    auto & res = seen[record];
    if (!res) { res = gpu.pinned((const char *) record); }
    kvf_check(res, "the records of guests have to be in pinned memory");
    return res;
}

void kvf_gpu_chooser::upload_index(llama_seq_id seq, uint32_t layer) {
    gpu.upload(fixed.at(at_index + (layer * owns.size() + seq) * sizeof(kvf_gpu_index)), &index(seq, layer),
            sizeof(kvf_gpu_index));
}

// room for the codes of n positions. anew: the codes so far may be dropped
void kvf_gpu_chooser::reserve(llama_seq_id seq, uint32_t n, bool anew) {
    auto & o = owns[seq];
    if (n <= o.n_room) { return; }

    // with room to grow until the index is made anew
    const uint32_t most = n_record * fresh.n_chunk;
    const uint32_t room = std::min(most, (uint32_t) GGML_PAD(n + n / 8 + 1024, kvf_index::GROUP));
    if (anew) { o.codes = {}; }

    kvf_gpu_places      in;
    std::vector<size_t> at;
    for (uint32_t i = 0; i < layers.size(); ++i) {
        at.push_back(in.take(mine(i) ? codes_size(i, room) : 0));
    }
    o.n_room = 0;
    kvf_gpu_memory made(buft, in.end);
    for (uint32_t i = 0; i < layers.size(); ++i) {
        if (!mine(i)) { continue; }
        auto & codes = index(seq, i).codes;
        if (!anew && codes) { gpu.copy(made.at(at[i]), codes, codes_size(i, fresh.of(seq).n)); }
        codes = (uint8_t *) made.at(at[i]);
        upload_index(seq, i);
    }
    o.codes  = std::move(made); // the old ones go only after what the device computes with them
    o.n_room = room;
}

kvf_gpu_records kvf_gpu_chooser::device_records(const void * const * records, uint32_t n) {
    kvf_gpu_records res = {fresh.n_chunk, n, {}};
    for (uint32_t i = 0; i < n; ++i) {
        res.at[i] = device_record(records[i]);
    }
    return res;
}

void kvf_gpu_chooser::moments(uint32_t layer, const void * const * records, uint32_t n, float * mean, float * cov) {
    const std::lock_guard<std::mutex> lock(mutex);

    if (!scratch.size) { scratch = kvf_gpu_memory(buft, sizeof(float) * n_value * kvf_index::MOST_SAMPLES); }
    const auto &   l      = layers[layer];
    const uint32_t n_each = l.n_head_kv * l.d, n_chunk = fresh.n_chunk;
    const uint32_t every = (n * n_chunk + kvf_index::MOST_SAMPLES - 1) / kvf_index::MOST_SAMPLES;
    uint32_t       n_all = 0; // keys
    for (uint32_t first = 0; first < n; first += kvf_gpu_records::MOST) {
        const auto     some = device_records(records + first, std::min(kvf_gpu_records::MOST, n - first));
        const uint32_t skip = (every - first * n_chunk % every) % every, n_here = some.n * n_chunk;
        if (skip >= n_here) { continue; }
        const uint32_t n_taken = (n_here - skip + every - 1) / every;
        gpu.decode(keys[layer], some, skip, every, (float *) scratch.at() + (size_t) n_all * n_each, n_taken);
        n_all += n_taken;
    }
    gpu.moments((const float *) scratch.at(), n_all, l.n_head_kv, l.d, this->mean, this->cov);
    gpu.download(mean, this->mean, sizeof(float) * n_each);
    gpu.download(cov, this->cov, sizeof(float) * n_each * l.d);
}

void kvf_gpu_chooser::fit(llama_seq_id seq, uint32_t layer, const float * mean, const float * basis, const float * step) {
    const std::lock_guard<std::mutex> lock(mutex);

    const float * src[] = {mean, basis, step};
    const auto    to    = parts(seq, layer);
    for (size_t i = 0; i < to.size(); ++i) {
        gpu.upload(to[i].first, src[i], to[i].second);
    }
}

void kvf_gpu_chooser::put(
        llama_seq_id seq, uint32_t layer, uint32_t n_layer, uint32_t first, const void * const * records, uint32_t n) {
    const std::lock_guard<std::mutex> lock(mutex);

    reserve(seq, (first + n) * fresh.n_chunk, first == 0);
    for (uint32_t at = layer, end = layer + n_layer; at < end;) {
        uint32_t     last = at; // layers of this device, one after the other
        kvf_gpu_keys most = {};
        for (; last < end && mine(last); ++last) {
            const auto & k = keys[last];
            most = {k.type, std::max(most.n_head_kv, k.n_head_kv), std::max(most.d, k.d), k.block, k.block_size, 0, 0,
                    nullptr};
        }
        for (uint32_t i = 0; i < n && last > at; i += kvf_gpu_records::MOST) {
            const auto some = device_records(records + i, std::min(kvf_gpu_records::MOST, n - i));
            gpu.encode((const kvf_gpu_keys *) fixed.at(at_keys) + at, last - at, most, some, seq,
                    (first + i) * fresh.n_chunk, layers[at].form);
        }
        at = last + 1;
    }
}

void kvf_gpu_chooser::cover(llama_seq_id seq) {
    const auto & hosts = fresh.of(seq).records;
    auto &       had   = owns[seq].records;
    const size_t n_had =
            std::mismatch(had.begin(), had.begin() + std::min(had.size(), hosts.size()), hosts.begin()).first - had.begin();

    std::vector<const char *> more;
    for (size_t i = n_had; i < hosts.size(); ++i) {
        more.push_back(device_record(hosts[i]));
    }
    if (!more.empty()) {
        gpu.upload(
                fixed.at(at_records + (seq * n_record + n_had) * sizeof(void *)), more.data(), more.size() * sizeof(void *));
    }
    had = hosts;
    seen.clear();
    gpu.wait(fixed.at());
}

// kvf_index has codes as [nibble][32], the device as [quad][32][4]: move() gets the place of each byte in both
template <typename F> static void each_code(const kvf_gpu_form & f, size_t n, const F & move) {
    for (size_t i = 0; i < n; ++i) { // groups of all heads
        for (uint32_t nibble = 0; nibble < f.n_nibble; ++nibble) {
            const size_t host = (i * f.n_nibble + nibble) * 32, device = i * f.group_size() + nibble / 4 * 128 + nibble % 4;
            for (uint32_t t = 0; t < 32; ++t) {
                move(host + t, device + t * 4);
            }
        }
    }
}

void kvf_gpu_chooser::get(llama_seq_id seq, uint32_t layer, uint32_t n, char * dst) {
    for (const auto & [from, size] : parts(seq, layer)) {
        gpu.download(dst, from, size);
        dst += size;
    }
    std::vector<char> codes(codes_size(layer, n));
    if (codes.empty()) { return; }
    gpu.download(codes.data(), index(seq, layer).codes, codes.size());
    const auto & form = layers[layer].form;
    each_code(form, codes.size() / form.group_size(), [&](size_t host, size_t device) { dst[host] = codes[device]; });
}

void kvf_gpu_chooser::set(llama_seq_id seq, uint32_t layer, uint32_t n, const char * src) {
    reserve(seq, n, true);
    for (const auto & [to, size] : parts(seq, layer)) {
        gpu.upload(to, src, size);
        src += size;
    }
    std::vector<char> codes(codes_size(layer, n));
    if (codes.empty()) { return; }
    const auto & form = layers[layer].form;
    each_code(form, codes.size() / form.group_size(), [&](size_t host, size_t device) { codes[device] = src[host]; });
    gpu.upload(index(seq, layer).codes, codes.data(), codes.size());
}

//
// guests
//

std::vector<int32_t> kvf_gpu_chooser::table(llama_seq_id seq, uint32_t layer) {
    std::vector<int32_t> res(fresh.n_slot(fresh.of(seq)));
    if (!res.empty()) { gpu.download(res.data(), index(seq, layer).table, res.size() * sizeof(int32_t)); }
    return res;
}

void kvf_gpu_chooser::keep(llama_seq_id seq, uint32_t n) {
    const size_t each = layers[0].n_slot * sizeof(int32_t);
    char *       from = (char *) index(seq, 0).table + n * sizeof(int32_t);
    if (n < layers[0].n_slot) { gpu.fill(from, -1, each * owns.size(), each - n * sizeof(int32_t), layers.size()); }
}

void kvf_gpu_chooser::set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetching) {
    const auto &          s = fresh.of(seq);
    const uint32_t        n = fresh.n_slot(s);
    std::vector<int32_t>  all(layers[layer].n_slot, -1);
    std::vector<kvf_move> moves;
    std::copy_n(units, n, all.begin());
    gpu.upload(index(seq, layer).table, all.data(), all.size() * sizeof(int32_t));
    for (uint32_t slot = 0; fetching && slot < n; ++slot) {
        if (units[slot] >= 0) { moves.push_back({slot, (uint32_t) units[slot]}); }
    }
    if (moves.empty()) { return; }

    const uint32_t n_move = moves.size();
    const auto &   l      = layers[layer];
    gpu.upload(l.moves, moves.data(), n_move * sizeof(kvf_move));
    gpu.upload(l.n_moves, &n_move, sizeof(n_move));
    gpu.upload(fixed.at(at_blocks), s.blocks.data(), s.blocks.size() * sizeof(int32_t));
    gpu.fetch(l, seq, (const int32_t *) fixed.at(at_blocks));
    gpu.wait(fixed.at());
}

float kvf_gpu_chooser::missed(llama_seq_id seq, uint32_t layer) {
    const auto         its = drift(layer);
    std::vector<float> res(its.n_head);
    gpu.idle(its.missed); // the token before may not be done yet
    gpu.download(res.data(), its.missed + (size_t) seq * its.n_head, its.n_head * sizeof(float));
    return layers[layer].scale * *std::max_element(res.begin(), res.end());
}

uint64_t kvf_gpu_chooser::n_fetched() {
    uint64_t res = 0;
    gpu.download(&res, layers[0].n_fetched, sizeof(res));
    return res;
}

uint64_t kvf_gpu_chooser::device_bytes() {
    uint64_t res = fixed.size + scratch.size;
    for (const auto & o : owns) {
        res += o.codes.size;
    }
    return res;
}

//
// a ubatch
//

std::vector<int32_t> kvf_gpu_chooser::ask() const {
    using A = kvf_gpu_ask;

    const A &            shape = layers[0].ask;
    std::vector<int32_t> res(shape.size(), 0);
    for (size_t seq = 0; seq < owns.size(); ++seq) {
        const auto & s  = fresh.sequences[seq];
        int32_t *    to = res.data() + A::LEN + A::LEN_ASKER * shape.n_asker + seq * shape.seq_size();
        if (!s.n_fill && (!fresh.its.coarse_k || s.tokens.empty())) { continue; }

        // fewer ask where many sequences do
        const size_t room = std::max<size_t>(1, shape.n_asker / owns.size()),
                     n    = s.n_fill ? std::min(room, s.asking.size()) : 0;
        for (size_t i = 0; i < n; ++i) {
            const auto & [row, pos] = s.asking[(i + 1) * s.asking.size() / n - 1];
            int32_t * asker         = res.data() + A::LEN + A::LEN_ASKER * res[A::N_ASKER]++;
            asker[A::SEQ]           = seq;
            asker[A::ROW]           = row;
            asker[A::POS]           = pos;
            asker[A::POS_AHEAD]     = s.pos_ahead;
        }
        res[A::N_SCORED] += n * s.n_unit();
        to[A::N_UNIT]    = s.n_unit();
        to[A::N_FILL]    = s.n_fill;
        to[A::STEP]      = s.all ? -1 : (int32_t) (s.n_step % fresh.its.n_turn);
        to[A::N_DRIFT]   = s.n_drift;
        int32_t * blocks = to + A::LEN_SEQ;
        std::copy(s.blocks.begin(), s.blocks.end(), blocks);

        // common cells: positions one after the other in a block
        int32_t * common = blocks + shape.n_block;
        for (const auto & [pos, cell] : s.cells) {
            int32_t * last = common + A::LEN_COMMON * (to[A::N_COMMON] - 1);
            if (to[A::N_COMMON] && pos % fresh.n_chunk && last[A::CELL] + last[A::N] == cell &&
                    last[A::FIRST] + last[A::N] == pos) {
                last[A::N]++;
                continue;
            }
            int32_t * next = common + A::LEN_COMMON * to[A::N_COMMON]++;
            next[A::CELL]  = cell;
            next[A::FIRST] = pos;
            next[A::N]     = 1;
        }
        auto * bits = (uint32_t *) common + A::LEN_COMMON * shape.n_block;
        for (uint32_t u = 0; u < s.n_unit(); ++u) {
            bits[u / 32] |= (uint32_t) s.common[u] << u % 32;
        }
    }
    return res;
}

bool kvf_gpu_chooser::add_words(ggml_context * ctx, llm_graph_result * res, uint32_t n_token) {
    words = nullptr;
    for (const auto & input : res->inputs) {
        auto * known = dynamic_cast<ask_input *>(input.get());
        if (known && &known->chooser == this) { words = known->words; }
    }
    if (words) { return false; }
    words = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, layers[0].ask.size() + n_token * n_token_word());
    ggml_set_input(words);
    ggml_set_name(words, "fresh_ask");
    res->add_input(std::make_unique<ask_input>(*this, words, n_token));
    return true;
}

void kvf_gpu_chooser::build(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, ggml_tensor * q, float scale,
        int32_t, uint32_t layer, const kvf_predicted & before) {
    layers[layer].scale = scale;

    add_words(ctx, res, q->ne[2]);
    std::vector<ggml_tensor *> args = {q, words};
    if (before.q) { args.insert(args.end(), {before.own, before.q}); }
    add(ctx, gf, "choose", layer, gpu.choose, &layers[layer], args);
}

ggml_tensor * kvf_gpu_chooser::add(ggml_context * ctx, ggml_cgraph * gf, const char * name, uint32_t layer,
        void (*launch)(ggml_tensor *, void *), void * userdata, std::vector<ggml_tensor *> args) {
    auto * node = ggml_custom_inplace(
            ctx, &view, args.data(), args.size(), (ggml_custom_op_t) launch, kvf_gpu::LAUNCHES, userdata);
    ggml_format_name(node, "fresh_%s-%u", name, layer);
    ggml_build_forward_expand(gf, node);
    return node;
}
