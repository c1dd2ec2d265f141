// the guests of layers in a GPU's memory (kernels: guests/fresh.cu), see guests/fresh.h

#include "guests/gpu-chooser.h"

#include "llama-graph.h"

namespace {

// the most guests of a layer that a token exchanges. they are chosen for the next token, and more would not improve its
// attention, but take time on the bus
constexpr uint32_t MOST_LATE = 8;

kvf_kernels * g_host_kernels = nullptr;

// the ask as an input of the graph
struct ask_input : llm_graph_input_i {
    ask_input(const kvf_gpu_chooser & chooser, ggml_tensor * words, uint32_t n_token) :
        chooser(chooser), words(words), n_token(n_token) {}

    void set_input(const llama_ubatch *) override {
        const auto ask = chooser.ask(n_token);
        ggml_backend_tensor_set(words, ask.data(), 0, ask.size() * sizeof(int32_t));
    }
    bool can_reuse(const llm_graph_params &) override { return true; }

    const kvf_gpu_chooser & chooser;
    ggml_tensor *           words;
    const uint32_t          n_token;
};

} // namespace

static kvf_kernels * kernels_of(ggml_backend_buffer_t buf, ggml_backend_dev_t dev) {
    auto *     reg  = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    const auto find = reg ? (kvf_kernels * (*) ()) ggml_backend_reg_get_proc_address(reg, "kvflash_gpu") : nullptr;
    return find ? find() : ggml_backend_buffer_is_host(buf) ? g_host_kernels : nullptr;
}

std::unique_ptr<kvf_chooser> kvf_gpu_coarse_chooser(kvf_fresh & fresh, ggml_backend_buffer_t buf, ggml_backend_dev_t dev) {
    auto * gpu = kernels_of(buf, dev);
    return gpu ? std::make_unique<kvf_gpu_chooser>(fresh, *gpu, dev, ggml_backend_buffer_get_type(buf)) : nullptr;
}

void kvf_set_host_kernels(const void * gpu) { g_host_kernels = (kvf_kernels *) gpu; }

kvf_gpu_chooser::kvf_gpu_chooser(
        kvf_fresh & fresh, kvf_kernels & gpu, ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) :
    fresh(fresh), gpu(gpu), dev(dev), buft(buft), n_seq(fresh.sequences.size()), shape(kvf_gpu_shape::of(fresh)), in(shape),
    records(n_seq), codes(fresh), fixed(buft, in.end) {
    lay_out_layers();
    for (const auto & l : layers) {
        if (!gpu.fits(l, fixed.at())) {
            throw kvf_failure(KVF_E_UNSUPPORTED, format("a block of this GPU cannot choose among the %d tokens of the pool",
                                                         (int) (l.n_slot * kvf_fresh::UNIT)));
        }
    }
    const std::vector<int32_t> none(shape.n_table() * shape.n_slot(), -1);
    gpu.upload(all_guests[0].table, none.data(), none.size() * sizeof(int32_t));
    gpu.upload(fixed.at(in.guests), all_guests.data(), all_guests.size() * sizeof(all_guests[0]));

    // an allocated tensor: the scheduler computes a node that is "in place" of it on its device
    view.type   = GGML_TYPE_F32;
    view.buffer = fixed.buf.get();
    view.data   = fixed.at();
    view.ne[0] = view.ne[1] = view.ne[2] = view.ne[3] = 1;
    view.nb[0] = view.nb[1] = view.nb[2] = view.nb[3] = sizeof(float);

    lay_out_codes();
    lay_out_attends();
    lay_out_coders();
    if (lodges) { fresh.panes->tenant = this; }
}

kvf_gpu_chooser::~kvf_gpu_chooser() {
    if (lodges) { fresh.panes->tenant = nullptr; }
}

kvf_gpu_shape kvf_gpu_shape::of(const kvf_fresh & fresh) {
    kvf_gpu_shape res = {{}, fresh.its.n_ctx, (uint32_t) fresh.sequences.size(), fresh.n_cell, fresh.n_chunk};
    for (const auto & l : fresh.layers) {
        const auto & i = l.info;
        res.layers.push_back({i.n_head, i.n_head_kv, i.n_embd_head_k, i.n_embd_v / i.n_head_kv});
    }
    return res;
}

uint32_t kvf_gpu_shape::n_query() const {
    uint32_t res = 0;
    for (const auto & heads : layers) {
        res = std::max(res, heads.n_query);
    }
    return res;
}

kvf_gpu_ask kvf_gpu_shape::ask() const {
    return {std::max(n_seq, kvf_fresh::MOST_ASKING), n_seq, n_block(), n_record() * (n_chunk / kvf_fresh::UNIT)};
}

// only the fields that determine the sizes of its scratch memory
kvf_gpu_attend kvf_gpu_shape::attend(const kvf_heads & heads) const {
    kvf_gpu_attend res = {};
    res.p.n_head_kv    = heads.n_kv;
    res.p.ask          = ask();
    res.share          = heads.n_query / heads.n_kv;
    for (uint32_t kind = 0; kind < 2; ++kind) {
        auto & to = res.coding[kind];
        to.d      = kind && heads.n_embd_v ? heads.n_embd_v : heads.n_embd;
        to.width  = GGML_PAD(to.d, 16);
        to.n_bit  = 2; // 4 bits need no more memory
    }
    return res;
}

kvf_gpu_tables::kvf_gpu_tables(const kvf_gpu_shape & shape) {
    const auto   ask     = shape.ask();
    const size_t n_query = (size_t) ask.n_asker * shape.n_query(), n_layer = shape.layers.size();
    size_t       of_part = 0, of_passes = 0, of_taken = 0;
    for (const auto & heads : shape.layers) {
        const auto a = shape.attend(heads);
        n_sum        = std::max(n_sum, heads.n_kv * std::max(heads.n_embd, heads.n_embd_v));
        of_part      = std::max<size_t>(of_part, a.part_size());
        of_passes    = std::max(of_passes, (size_t) heads.n_kv * a.n_pass(kvf_gpu_attend::MOST_TOKEN) * a.pass_size());
        of_taken     = kvf_gpu_attend::MOST_TOKEN * a.n_word() * sizeof(uint32_t); // the same for all layers
    }
    lse     = take(sizeof(float) * n_query * ask.n_unit);
    parts   = take(2 * sizeof(float) * n_query * KVF_GPU_PARTS);
    shares  = take(sizeof(int32_t) * shape.n_seq * ask.n_unit);
    tops    = take(sizeof(int32_t) * shape.n_seq * (ask.n_unit / 4 + 1));
    moves   = take(sizeof(kvf_move) * shape.n_slot());
    n_moves = take(sizeof(uint32_t));
    counts  = take(2 * sizeof(uint64_t));
    table   = take(sizeof(int32_t) * shape.n_table() * shape.n_slot());
    records = take(sizeof(void *) * shape.n_seq * shape.n_record());
    blocks  = take(sizeof(int32_t) * shape.n_block());
    guests  = take(sizeof(kvf_gpu_guests) * shape.n_table());

    for (auto & at : codes) {
        at = take(shape.n_table() * sizeof(kvf_gpu_codes));
    }
    layers   = take(n_layer * sizeof(kvf_gpu_layer));
    coders   = take(n_layer * 2 * sizeof(kvf_gpu_coder));
    sums     = take(n_layer * 2 * n_sum * 2 * sizeof(double));
    chunks   = take(shape.n_record() * sizeof(void *));
    attended = take(kvf_gpu_attend::MOST_ROW_PART * shape.n_query() * of_part * sizeof(float));
    passes   = take(of_passes);
    taken    = take(of_taken);
}

uint64_t kvf_choice_bytes(
        const kvf_heads * heads, uint32_t n_layer, uint32_t n_ctx, uint32_t n_seq, uint32_t n_pool, uint32_t n_chunk) {
    return kvf_gpu_tables({{heads, heads + n_layer}, n_ctx, n_seq, n_pool, n_chunk}).end;
}

void kvf_gpu_chooser::lay_out_layers() {
    constexpr uint32_t UNIT = kvf_fresh::UNIT;

    const auto size = [&](const ggml_tensor * t) { return UNIT * ggml_row_size(t->type, t->ne[0]); };
    for (uint32_t i = 0; i < shape.n_table(); ++i) {
        all_guests.push_back({(int32_t *) fixed.at(in.table) + (size_t) i * shape.n_slot(),
                (const char * const *) fixed.at(in.records) + (size_t) (i % n_seq) * shape.n_record()});
    }
    for (uint32_t i = 0; i < fresh.layers.size(); ++i) {
        const auto & l   = fresh.layers[i];
        auto &       res = layers.emplace_back();
        res.n_chunk      = fresh.n_chunk;
        res.n_slot       = shape.n_slot();
        res.n_exchange   = std::min(fresh.its.n_exchange, MOST_LATE);
        res.ask          = shape.ask();
        res.lse          = (float *) fixed.at(in.lse);
        res.parts        = (float *) fixed.at(in.parts);
        res.keys         = (int32_t *) fixed.at(in.shares);
        res.tops         = (int32_t *) fixed.at(in.tops);
        res.moves        = (kvf_move *) fixed.at(in.moves);
        res.n_moves      = (uint32_t *) fixed.at(in.n_moves);
        res.n_fetched    = (uint64_t *) fixed.at(in.counts);
        res.n_arrived    = (uint32_t *) fixed.at(in.counts) + 2;
        res.n_met        = res.n_arrived + 1;
        res.n_head       = l.info.n_head;
        res.n_head_kv    = l.info.n_head_kv;
        res.d            = l.info.n_embd_head_k;
        res.cap          = l.cap;
        res.guests       = (const kvf_gpu_guests *) fixed.at(in.guests) + i * n_seq;
        res.k            = {(char *) l.k->data, size(l.k), 1, 0, l.info.offs_k, 0};
        if (l.v && !fresh.v_trans) { res.v = {(char *) l.v->data, size(l.v), 1, 0, l.info.offs_v, 0}; }
        if (l.v && fresh.v_trans) {
            const size_t el = ggml_type_size(l.v->type);
            res.v           = {(char *) l.v->data, UNIT * el, (uint32_t) l.v->ne[0], fresh.n_cell * el, l.info.offs_v,
                              fresh.n_chunk * el};
        }
    }
}

int32_t kvf_gpu_chooser::read_by(int32_t il) const {
    const int32_t i = fresh.layer_read_by(il);
    return i >= 0 && mine(i) ? i : -1;
}

const char * kvf_gpu_chooser::device_record(const void * record) {
    auto & res = seen[record];
    if (!res) { res = gpu.pinned((const char *) record); }
    kvf_check(res, "records have to be in pinned memory");
    return res;
}

void kvf_gpu_chooser::cover(llama_seq_id seq) {
    const auto & hosts = fresh.of(seq).records;
    auto &       had   = records[seq];
    const size_t n_had =
            std::mismatch(had.begin(), had.begin() + std::min(had.size(), hosts.size()), hosts.begin()).first - had.begin();

    std::vector<const char *> more;
    for (size_t i = n_had; i < hosts.size(); ++i) {
        more.push_back(device_record(hosts[i]));
    }
    if (!more.empty()) {
        gpu.upload(fixed.at(in.records + (seq * shape.n_record() + n_had) * sizeof(void *)), more.data(),
                more.size() * sizeof(void *));
    }
    had = hosts;
    seen.clear();
    gpu.wait(fixed.at());
}

//
// guests
//

std::vector<int32_t> kvf_gpu_chooser::table(llama_seq_id seq, uint32_t layer) {
    std::vector<int32_t> res(fresh.n_slot(fresh.of(seq)));
    if (!res.empty()) { gpu.download(res.data(), guests(seq, layer).table, res.size() * sizeof(int32_t)); }
    return res;
}

void kvf_gpu_chooser::keep(llama_seq_id seq, uint32_t n) {
    const size_t each = shape.n_slot() * sizeof(int32_t);
    char *       from = (char *) guests(seq, 0).table + n * sizeof(int32_t);
    if (n < shape.n_slot()) { gpu.fill(from, -1, each * n_seq, each - n * sizeof(int32_t), layers.size()); }
}

void kvf_gpu_chooser::set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetching) {
    const auto &          s = fresh.of(seq);
    const uint32_t        n = fresh.n_slot(s);
    std::vector<int32_t>  all(shape.n_slot(), -1);
    std::vector<kvf_move> moves;
    std::copy_n(units, n, all.begin());
    gpu.upload(guests(seq, layer).table, all.data(), all.size() * sizeof(int32_t));
    for (uint32_t slot = 0; fetching && slot < n; ++slot) {
        if (units[slot] >= 0) { moves.push_back({slot, (uint32_t) units[slot]}); }
    }
    if (moves.empty()) { return; }

    const uint32_t n_move = moves.size();
    const auto &   l      = layers[layer];
    gpu.upload(l.moves, moves.data(), n_move * sizeof(kvf_move));
    gpu.upload(l.n_moves, &n_move, sizeof(n_move));
    gpu.upload(fixed.at(in.blocks), s.blocks.data(), s.blocks.size() * sizeof(int32_t));
    gpu.fetch(l, seq, (const int32_t *) fixed.at(in.blocks));
    gpu.wait(fixed.at());
}

uint64_t kvf_gpu_chooser::n_fetched() {
    uint64_t res = 0;
    gpu.download(&res, layers[0].n_fetched, sizeof(res));
    return res;
}

//
// a ubatch
//

std::vector<int32_t> kvf_gpu_chooser::ask(uint32_t n_token) const {
    using A = kvf_gpu_ask;
    using T = kvf_gpu_attend;

    const A              its = shape.ask();
    std::vector<int32_t> res(its.size() + n_token * T::LEN_TOKEN, 0);
    int32_t *            tokens = res.data() + its.size();
    std::fill(tokens, res.data() + res.size(), -1);
    for (size_t seq = 0; seq < n_seq; ++seq) {
        const auto & s  = fresh.sequences[seq];
        int32_t *    to = res.data() + A::LEN + A::LEN_ASKER * its.n_asker + seq * its.seq_size();
        if (!s.n_fill && s.tokens.empty()) { continue; }

        for (size_t i = 0; i < s.tokens.size(); ++i) {
            int32_t * token = tokens + s.tokens[i] * T::LEN_TOKEN;
            token[T::SEQ]   = seq;
            token[T::POS]   = s.pos[i];
        }
        // with many sequences, fewer tokens of each choose
        const size_t room = std::max<size_t>(1, its.n_asker / n_seq), n = s.n_fill ? std::min(room, s.asking.size()) : 0;
        for (size_t i = 0; i < n; ++i) {
            const uint32_t row = s.asking[(i + 1) * s.asking.size() / n - 1].first;

            tokens[row * T::LEN_TOKEN + T::ASKER] = res[A::N_ASKER];
            int32_t * asker                       = res.data() + A::LEN + A::LEN_ASKER * res[A::N_ASKER]++;
            asker[A::SEQ]                         = seq;
            asker[A::ROW]                         = row;
        }
        to[A::N_UNIT]    = s.n_unit();
        to[A::N_FILL]    = s.n_fill;
        int32_t * blocks = to + A::LEN_SEQ;
        std::copy(s.blocks.begin(), s.blocks.end(), blocks);

        // common cells: runs of consecutive positions within a block
        int32_t * common = blocks + its.n_block;
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
        auto * bits = (uint32_t *) common + A::LEN_COMMON * its.n_block;
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
    words = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, shape.ask().size() + n_token * kvf_gpu_attend::LEN_TOKEN);
    ggml_set_input(words);
    ggml_set_name(words, "fresh_ask");
    res->add_input(std::make_unique<ask_input>(*this, words, n_token));
    return true;
}

ggml_tensor * kvf_gpu_chooser::add(ggml_context * ctx, ggml_cgraph * gf, const char * name, uint32_t layer,
        void (*launch)(ggml_tensor *, void *), void * userdata, std::vector<ggml_tensor *> args) {
    auto * node = ggml_custom_inplace(
            ctx, &view, args.data(), args.size(), (ggml_custom_op_t) launch, kvf_gpu::LAUNCHES, userdata);
    ggml_format_name(node, "fresh_%s-%u", name, layer);
    ggml_build_forward_expand(gf, node);
    return node;
}
