// kvflash-fuzz: random calls of kvflash.h on a real model, against four oracles
//
//   shadow   which chunk lies in which block: predicted here, compared with the pool after every step
//   host     a record that is read again equals the first one, to the byte
//   mirror   a stock context decodes the same tokens and forgets what is evicted: the same logits, to the bit
//   again    out of the pool and in again, the bytes of free blocks overwritten in between: the same logits, to the bit
//
// An episode begins exact: what is evicted stays out, so that the mirror can follow. It ends free: chunks come back into
// any block, and attention adds up in another order than in a stock cache.

#include "kvflash.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

using record = std::vector<uint8_t>;

static constexpr uint32_t N_CTX       = 8192;
static constexpr uint64_t FINGERPRINT = 0x1234567890abcdef;

// finite numbers in every cache type: attention multiplies masked rows by zero
static constexpr uint8_t SCRIBBLES[] = { 0x00, 0x11, 0x3c, 0x55 };

static void expect(bool ok, const std::string & what) {
    if (!ok) {
        throw std::runtime_error(what);
    }
}

// what a call returned, and that it left a sentence exactly when it failed
static void expect_status(const std::string & what, int want, int got) {
    const std::string error = kvf_error();
    expect(got == want, what + ": status " + std::to_string(got) + " instead of " + std::to_string(want) + " (" + error + ")");
    expect(error.empty() == (got == KVF_OK), what + ": status " + std::to_string(got) + " with the error '" + error + "'");
}

static void expect_ok(const std::string & what, int got) {
    expect_status(what, KVF_OK, got);
}

struct settings {
    std::string path;
    uint32_t    n_step = 200;
    uint32_t    seed   = 1;
    ggml_type   type   = GGML_TYPE_F16;
    bool        fa     = true;
};

// a block as it should be: the chunk it holds, and which of its positions
struct slot {
    int32_t  chunk = -1;
    uint64_t mask  = 0;
};

class fuzz {
public:
    explicit fuzz(const settings & set);
    ~fuzz();

    void step();

private:
    // the shadow
    int32_t              block_of(int32_t chunk) const;
    int32_t              tail() const { return (n_past - 1)/n_chunk; } // -1/n_chunk is 0: there is always a tail
    bool                 sealed(int32_t chunk) const { return (chunk + 1)*n_chunk <= n_past; }
    std::vector<int32_t> resident(bool evictable) const;
    std::vector<int32_t> evicted() const;
    std::vector<int32_t> free_blocks() const;
    std::vector<slot>    placed(int32_t n) const; // the slots after n more tokens, empty: they do not fit
    uint32_t             width(const std::vector<slot> & after) const;

    // calls, each with all that must come of it
    std::vector<float> decode(const std::vector<llama_token> & batch, int outputs);
    void   decode_aborted();
    void   rollback(int32_t pos);
    record read(int32_t chunk);
    void   evict(int32_t chunk);
    void   page_in(int32_t chunk, const record & rec, int32_t block);
    void   round_trip(bool same_blocks);
    void   again();
    void   wrong_call();
    void   wrong_contexts();
    void   scribble();
    void   clear();

    void check();
    void check_layout();

    void                     make_room(int32_t n);
    std::vector<llama_token> some_tokens(int32_t n);
    std::vector<float>       logits(llama_context * ctx, int32_t n, int outputs) const;

    uint32_t rnd(uint32_t n) { return rng()%n; }
    template <typename T> T pick(const std::vector<T> & from) { return from[rnd(from.size())]; }

    std::mt19937         rng;
    llama_model *        model  = nullptr;
    llama_context *      pool   = nullptr;
    llama_context *      mirror = nullptr;
    llama_context_params cparams;
    kvf_pool_params      pparams;
    kvf_pool_info        info;

    bool    hybrid;
    bool    mrope;
    int32_t n_vocab;
    int32_t n_chunk;
    int32_t n_batch;

    // the episode
    std::vector<slot>         slots;
    std::vector<llama_token>  tokens;
    std::map<int32_t, record> host;
    std::set<int32_t>         pins;
    uint32_t                  n_kv;
    int32_t                   n_past;
    int32_t                   n_fixed; // roll back no further: the mirror would not reuse the same cells
    int32_t                   n_exact; // steps left in which the mirror follows
    int32_t                   n_left;  // steps left
};

fuzz::fuzz(const settings & set) : rng(set.seed) {
    kvf_init(GGML_LOG_LEVEL_NONE);

    auto mparams = llama_model_default_params();
    mparams.n_gpu_layers = 0;
    expect_ok("load", kvf_model_load(set.path.c_str(), &mparams, &model));

    const auto rope = llama_model_rope_type(model);
    mrope   = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE;
    hybrid  = llama_model_is_hybrid(model);
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    pparams = { 256*(2 + rnd(2)), 16u << rnd(3), true, FINGERPRINT };

    cparams = llama_context_default_params();
    cparams.n_ctx           = N_CTX;
    cparams.n_batch         = pparams.n_chunk + rnd(192);
    cparams.n_ubatch        = 32 + rnd(64);
    cparams.n_rs_seq        = hybrid && rnd(2) ? 4 : 0;
    cparams.n_threads       = 1;
    cparams.n_threads_batch = 1;
    cparams.flash_attn_type = set.fa ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cparams.type_k          = set.type;
    cparams.type_v          = set.type;
    cparams.swa_full        = false;

    n_chunk = pparams.n_chunk;
    n_batch = cparams.n_batch;

    wrong_contexts();
    expect_ok("stock context",  kvf_context_new(model, &cparams, nullptr,  &mirror));
    expect_ok("pooled context", kvf_context_new(model, &cparams, &pparams, &pool));
    clear();
}

fuzz::~fuzz() {
    llama_free(pool);
    llama_free(mirror);
    llama_model_free(model);
}

//
// the shadow
//

int32_t fuzz::block_of(int32_t chunk) const {
    const auto it = std::find_if(slots.begin(), slots.end(), [&](const slot & s) { return s.chunk == chunk; });
    return it == slots.end() ? -1 : it - slots.begin();
}

std::vector<int32_t> fuzz::resident(bool evictable) const {
    std::vector<int32_t> res;
    for (const auto & s : slots) {
        if (s.chunk >= 0 && !(evictable && (s.chunk == tail() || pins.count(s.chunk)))) {
            res.push_back(s.chunk);
        }
    }
    return res;
}

std::vector<int32_t> fuzz::evicted() const {
    std::vector<int32_t> res;
    for (const auto & [chunk, _] : host) {
        if (block_of(chunk) < 0) {
            res.push_back(chunk);
        }
    }
    return res;
}

std::vector<int32_t> fuzz::free_blocks() const {
    std::vector<int32_t> res;
    for (size_t b = 0; b < slots.size(); ++b) {
        if (slots[b].chunk < 0) {
            res.push_back(b);
        }
    }
    return res;
}

std::vector<slot> fuzz::placed(int32_t n) const {
    auto res = slots;
    for (int32_t pos = n_past; pos < n_past + n; ++pos) {
        const int32_t chunk = pos/n_chunk;
        auto it = std::find_if(res.begin(), res.end(), [&](const slot & s) { return s.chunk == chunk; });
        if (it == res.end()) {
            it = std::find_if(res.begin(), res.end(), [&](const slot & s) { return s.chunk < 0; });
        }
        if (it == res.end()) {
            return {};
        }
        it->chunk = chunk;
        it->mask |= 1ull << pos%n_chunk;
    }
    return res;
}

// of the attention graph: up to the last cell in use, and never less than before
uint32_t fuzz::width(const std::vector<slot> & after) const {
    uint32_t n_cell = 1;
    for (size_t b = 0; b < after.size(); ++b) {
        for (int32_t i = 0; i < n_chunk; ++i) {
            n_cell = after[b].mask >> i & 1 ? b*n_chunk + i + 1 : n_cell;
        }
    }
    return std::max(n_kv, (n_cell + 255)/256*256);
}

void fuzz::check() {
    expect_ok("info", kvf_get_pool_info(pool, &info));
    expect(info.n_pool == pparams.n_pool && info.n_block == slots.size() && (int32_t) info.n_chunk == n_chunk, "the pool has another size");
    expect(info.n_block_free == free_blocks().size(), "another number of blocks is free");
    expect(info.n_kv == n_kv && n_kv <= info.n_pool, "n_kv is " + std::to_string(info.n_kv) + " instead of " + std::to_string(n_kv));

    std::vector<int32_t> chunks(slots.size());
    std::vector<int32_t> n_used(slots.size());
    expect_ok("blocks", kvf_blocks(pool, chunks.data(), n_used.data(), slots.size()));
    for (size_t b = 0; b < slots.size(); ++b) {
        int32_t n = 0;
        for (uint64_t m = slots[b].mask; m; m &= m - 1) {
            n++;
        }
        expect(chunks[b] == slots[b].chunk && n_used[b] == n, "block " + std::to_string(b) + " holds " + std::to_string(n_used[b]) +
                " of chunk " + std::to_string(chunks[b]) + " instead of " + std::to_string(n) + " of " + std::to_string(slots[b].chunk));
    }

    for (int32_t chunk = 0; chunk <= tail() + 1; ++chunk) {
        int32_t block;
        expect_ok("block_of", kvf_block_of(pool, 0, chunk, &block));
        expect(block == block_of(chunk), "chunk " + std::to_string(chunk) + " is in another block");
        expect(!sealed(chunk) || block >= 0 || host.count(chunk), "chunk " + std::to_string(chunk) + " is lost");
        expect(!pins.count(chunk) || block >= 0, "a pinned chunk is not resident");
    }

    if (!resident(false).empty()) {
        read(pick(resident(false)));
    }
}

//
// calls
//

std::vector<float> fuzz::logits(llama_context * ctx, int32_t n, int outputs) const {
    std::vector<float> res;
    for (int32_t i = outputs == 2 ? 0 : n - outputs; i < n; ++i) {
        const float * row = llama_get_logits_ith(ctx, i);
        expect(row, "no logits");
        res.insert(res.end(), row, row + n_vocab);
    }
    return res;
}

static bool same(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && (a.empty() || !memcmp(a.data(), b.data(), a.size()*sizeof(float)));
}

std::vector<float> fuzz::decode(const std::vector<llama_token> & batch, int outputs) {
    const int32_t n     = batch.size();
    const auto    after = placed(n);

    const int status = kvf_decode(pool, 0, n_past, batch.data(), n, outputs);
    expect_status("decode", after.empty() ? KVF_E_NO_BLOCK : KVF_OK, status);
    if (status != KVF_OK) {
        return {};
    }

    const auto res = logits(pool, n, outputs);
    if (n_exact > 0) {
        expect_ok("decode, stock", kvf_decode(mirror, 0, n_past, batch.data(), n, outputs));
        expect(same(res, logits(mirror, n, outputs)), "other logits than those of the stock context");
    }
    expect(std::all_of(res.begin(), res.end(), [](float x) { return std::isfinite(x); }), "a logit is not finite");

    kvf_layer layer;
    const uint32_t i = rnd(info.n_layer);
    expect_ok("layer", kvf_get_layer(pool, i, &layer));
    std::vector<float> q(layer.n_head*layer.n_embd_head_k, NAN);
    expect_ok("q", kvf_q(pool, i, q.data(), q.size()));
    expect(std::all_of(q.begin(), q.end(), [](float x) { return std::isfinite(x); }), "a query is not finite");

    n_kv   = width(after);
    slots  = after;
    n_past = n_past + n;
    tokens.insert(tokens.end(), batch.begin(), batch.end());

    return res;
}

void fuzz::decode_aborted() {
    const auto batch = some_tokens(1 + rnd(32)); // one ubatch
    const auto after = placed(batch.size());
    if (after.empty()) {
        return;
    }

    kvf_interrupt(true);
    const int status = kvf_decode(pool, 0, n_past, batch.data(), batch.size(), 1);
    kvf_interrupt(false);

    expect_status("decode, stopped", KVF_E_ABORTED, status);
    n_kv = width(after);
    if (hybrid) {
        clear(); // a recurrent state cannot go back
    }
}

void fuzz::rollback(int32_t pos) {
    const int status = kvf_seq_rm(pool, 0, pos, -1);
    if (n_exact > 0) {
        expect_status("seq_rm, stock", status, kvf_seq_rm(mirror, 0, pos, -1));
    }
    if (status != KVF_OK) {
        expect(hybrid && status == KVF_E_UNSUPPORTED, std::string("seq_rm: ") + kvf_error());
        return;
    }

    for (auto & s : slots) {
        const int32_t n_keep = std::clamp(pos - s.chunk*n_chunk, 0, n_chunk);
        s.mask &= n_keep < 64 ? (1ull << n_keep) - 1 : ~0ull;
        s = s.mask ? s : slot();
    }
    n_past = pos;
    tokens.resize(pos);
    host.erase(host.lower_bound(pos/n_chunk), host.end());
    pins.erase(pins.lower_bound((pos + n_chunk - 1)/n_chunk), pins.end());
}

// the record of a resident chunk, checked against its tokens and the host's copy
record fuzz::read(int32_t chunk) {
    record rec(info.record_bytes, rnd(256)); // what a read leaves out differs from read to read
    expect_ok("read", kvf_read(pool, 0, chunk, rec.data(), rec.size()));

    kvf_record head;
    memcpy(&head, rec.data(), sizeof(head));
    expect(head.magic == KVF_RECORD_MAGIC && head.version == KVF_RECORD_VERSION && head.head_bytes == sizeof(head) &&
           head.record_bytes == rec.size() && head.fingerprint == FINGERPRINT && head.chunk == chunk &&
           (int32_t) head.n_chunk == n_chunk && head.n_layer == info.n_layer && head.flags == info.flags &&
           head.type_k == cparams.type_k && head.type_v == cparams.type_v && head.meta_bytes == info.meta_bytes &&
           head.reserved == 0, "the head of a record is wrong");
    expect(head.mask == slots[block_of(chunk)].mask, "the mask of a record is wrong");

    for (size_t i = 0; i < info.meta_bytes - sizeof(head); i += 3*sizeof(int32_t)) {
        int32_t cell[3] = {}; // x, y, token
        memcpy(cell, rec.data() + sizeof(head) + i, std::min(sizeof(cell), info.meta_bytes - sizeof(head) - i));
        const size_t k = i/sizeof(cell);
        const bool   used = k < (size_t) n_chunk && (head.mask >> k & 1);
        expect(used ? cell[2] == tokens[chunk*n_chunk + k] : !cell[0] && !cell[1] && !cell[2], "the cells of a record are wrong");
    }

    if (sealed(chunk)) {
        expect(host.emplace(chunk, rec).first->second == rec, "chunk " + std::to_string(chunk) + " differs from its record");
    }
    return rec;
}

void fuzz::evict(int32_t chunk) {
    read(chunk);
    expect_ok("drop", kvf_drop(pool, 0, chunk));
    slots[block_of(chunk)] = {};

    if (n_exact > 0) {
        expect_ok("attn_seq_rm", kvf_attn_seq_rm(mirror, 0, chunk*n_chunk, (chunk + 1)*n_chunk));
        n_fixed = n_past;
    }
}

// block -1: any
void fuzz::page_in(int32_t chunk, const record & rec, int32_t block) {
    const auto    free = free_blocks();
    const int32_t want = block >= 0 || free.empty() ? block : free[0];

    const int status = kvf_page_in(pool, 0, chunk, rec.data(), rec.size(), &block);
    expect_status("page_in", free.empty() ? KVF_E_NO_BLOCK : KVF_OK, status);
    expect(block == want, "paged in to another block");

    if (status == KVF_OK) {
        kvf_record head;
        memcpy(&head, rec.data(), sizeof(head));
        slots[block] = { chunk, head.mask };
        expect(read(chunk) == rec, "chunk " + std::to_string(chunk) + " is not what was paged in");
    }
}

void fuzz::scribble() {
    expect_ok("scribble", kvf_scribble(pool, SCRIBBLES[rnd(sizeof(SCRIBBLES))]));
}

// some chunks out and in again, the tail among them
void fuzz::round_trip(bool same_blocks) {
    auto chunks = resident(false);
    std::shuffle(chunks.begin(), chunks.end(), rng);
    chunks.resize(std::min<size_t>(chunks.size(), 1 + rnd(4)));

    std::map<int32_t, std::pair<record, int32_t>> out;
    for (int32_t chunk : chunks) {
        out[chunk] = { read(chunk), block_of(chunk) };
        expect_ok("drop", kvf_drop(pool, 0, chunk));
        slots[block_of(chunk)] = {};
    }
    scribble();

    for (int32_t chunk : chunks) {
        const auto & [rec, block] = out[chunk];
        for (int32_t other : resident(false)) {
            int32_t taken = block_of(other);
            expect_status("page_in, a used block", KVF_E_STATE, kvf_page_in(pool, 0, chunk, rec.data(), rec.size(), &taken));
        }
        page_in(chunk, rec, same_blocks ? block : rnd(2) ? -1 : pick(free_blocks()));
    }
}

// the same tokens twice, with everything moved in between that may not matter
void fuzz::again() {
    const auto batch = some_tokens(1 + rnd(4));
    if (hybrid || placed(batch.size()).empty()) {
        return;
    }

    const auto first = decode(batch, 2);
    rollback(n_past - batch.size());
    round_trip(true);
    scribble();
    expect(same(decode(batch, 2), first), "other logits after a round trip");
}

void fuzz::clear() {
    expect_ok("clear", kvf_clear(pool));
    expect_ok("clear, stock", kvf_clear(mirror));
    expect_ok("info", kvf_get_pool_info(pool, &info));

    slots.assign(info.n_block, {});
    tokens.clear();
    host.clear();
    pins.clear();

    n_kv    = 0;
    n_past  = 0;
    n_fixed = 0;
    n_exact = 10 + rnd(50);
    n_left  = n_exact + rnd(50);
}

//
// records against llama.cpp's own serialisation
//

// K of all layers, then V of all layers, as state_write() finds them in the stock context, must be those of the records.
// every chunk is in its natural place, and the last one is full
void fuzz::check_layout() {
    record state(llama_state_seq_get_size(mirror, 0));
    expect(llama_state_seq_get_data(mirror, state.data(), state.size(), 0) == state.size(), "the state has another size");

    size_t at = 0;
    const auto find = [&](const kvf_layer & layer, uint64_t offs, uint64_t size, size_t n_col) {
        record want;
        for (size_t col = 0; col < n_col; ++col) {
            for (int32_t chunk = 0; chunk <= tail(); ++chunk) {
                const auto rec = read(chunk);
                want.insert(want.end(), rec.begin() + offs + size/n_col*col, rec.begin() + offs + size/n_col*(col + 1));
            }
        }
        const auto it = std::search(state.begin() + at, state.end(), std::boyer_moore_horspool_searcher(want.begin(), want.end()));
        expect(it != state.end(), "the rows of layer " + std::to_string(layer.il) + " are not those of a stock cache");
        at = it - state.begin() + want.size();
    };

    std::vector<kvf_layer> layers(info.n_layer);
    uint64_t offs = info.meta_bytes;
    for (uint32_t i = 0; i < info.n_layer; ++i) {
        expect_ok("layer", kvf_get_layer(pool, i, &layers[i]));
        expect(layers[i].offs_k == offs && layers[i].offs_v == offs + layers[i].size_k, "the layers of a record are not dense");
        offs += layers[i].size_k + layers[i].size_v;
    }
    expect(offs == info.record_bytes, "the layers of a record do not fill it");

    for (const auto & layer : layers) {
        find(layer, layer.offs_k, layer.size_k, 1);
    }
    for (const auto & layer : layers) {
        find(layer, layer.offs_v, layer.size_v, info.flags & KVF_FLAG_V_TRANS ? layer.n_embd_v : 1);
    }
}

//
// wrong calls: the status, and nothing else
//

void fuzz::wrong_contexts() {
    const auto wrong = [&](const char * what, int status, kvf_pool_params p, uint32_t n_seq_max) {
        auto c = cparams;
        c.n_seq_max = n_seq_max;
        expect_status(what, status, kvf_context_new(model, &c, &p, &pool));
        expect(!pool, "a context in spite of an error");
    };

    wrong("a chunk of 48",        KVF_E_ARGUMENT,    { 512, 48,      true, 0 }, 1);
    wrong("a pool of 0",          KVF_E_ARGUMENT,    { 0,   64,      true, 0 }, 1);
    wrong("a pool of 300",        KVF_E_ARGUMENT,    { 300, 64,      true, 0 }, 1);
    wrong("two sequences",        KVF_E_UNSUPPORTED, { 512, 64,      true, 0 }, 2);
    cparams.n_batch += 512;
    wrong("a batch like the pool", KVF_E_UNSUPPORTED, { 512, 64,     true, 0 }, 1);
    cparams.n_batch -= 512;
}

void fuzz::wrong_call() {
    if (n_past == 0) {
        return;
    }

    const int32_t c = pick(resident(false));
    const int32_t none = tail() + 1 + rnd(100);
    const auto    size = info.record_bytes;

    auto good = read(c);
    auto bad  = good;
    auto head = [&](size_t offs) { return bad[offs] ^= 1 + rnd(255), bad.data(); };

    int32_t     block = -1;
    int32_t     n_used[64];
    float       q[4096];
    kvf_layer   layer;
    llama_token token = rnd(n_vocab);

    std::vector<llama_token> many(n_batch + 1, token);
    llama_token outside[] = { -1, n_vocab };

    const auto decode  = [&](int seq, llama_pos pos, const llama_token * t, int32_t n) { return kvf_decode(pool, seq, pos, t, n, 1); };
    const auto read    = [&](int seq, int32_t chunk, void * dst, size_t n) { return kvf_read(pool, seq, chunk, dst, n); };
    const auto page_in = [&](int seq, int32_t chunk, const void * src, size_t n, int32_t b) { return block = b, kvf_page_in(pool, seq, chunk, src, n, &block); };

    // a byte of the head that is not of the mask
    size_t offs = rnd(sizeof(kvf_record) - sizeof(kvf_record::mask));
    offs += offs >= offsetof(kvf_record, mask) ? sizeof(kvf_record::mask) : 0;

    const auto mask = [&](uint64_t m) { return memcpy(bad.data() + offsetof(kvf_record, mask), &m, sizeof(m)), bad.data(); };

    const struct {
        const char *         what;
        int                  status;
        std::function<int()> call;
    } calls[] = {
        { "decode: no tokens",         KVF_E_ARGUMENT, [&] { return decode(0, n_past, &token, 0); } },
        { "decode: too many",          KVF_E_ARGUMENT, [&] { return decode(0, n_past, many.data(), n_batch + 1); } },
        { "decode: null",              KVF_E_ARGUMENT, [&] { return decode(0, n_past, nullptr, 1); } },
        { "decode: sequence",          KVF_E_ARGUMENT, [&] { return decode(rnd(2) ? 1 : -1, n_past, &token, 1); } },
        { "decode: position < 0",      KVF_E_ARGUMENT, [&] { return decode(0, -1, &token, 1); } },
        { "decode: position too high", KVF_E_ARGUMENT, [&] { return decode(0, INT32_MAX, many.data(), 2); } },
        { "decode: position taken",    KVF_E_BACKEND,  [&] { return decode(0, rnd(n_past), &token, 1); } },
        { "decode: token",             KVF_E_ARGUMENT, [&] { return decode(0, n_past, outside + rnd(2), 1); } },
        { "decode: context",           KVF_E_ARGUMENT, [&] { return kvf_decode(nullptr, 0, n_past, &token, 1, 1); } },
        { "seq_rm: sequence",          KVF_E_ARGUMENT, [&] { return kvf_seq_rm(pool, rnd(2) ? 1 : -1, 0, -1); } },
        { "attn_seq_rm: sequence",     KVF_E_ARGUMENT, [&] { return kvf_attn_seq_rm(pool, rnd(2) ? 1 : -1, 0, -1); } },
        { "info: null",                KVF_E_ARGUMENT, [&] { return kvf_get_pool_info(pool, nullptr); } },
        { "info: stock",               KVF_E_ARGUMENT, [&] { return kvf_get_pool_info(mirror, &info); } },
        { "layer: number",             KVF_E_ARGUMENT, [&] { return kvf_get_layer(pool, info.n_layer, &layer); } },
        { "blocks: number",            KVF_E_ARGUMENT, [&] { return kvf_blocks(pool, n_used, n_used, info.n_block + (rnd(2) ? 1 : -1)); } },
        { "block_of: sequence",        KVF_E_ARGUMENT, [&] { return kvf_block_of(pool, 1, c, &block); } },
        { "block_of: chunk",           KVF_E_ARGUMENT, [&] { return kvf_block_of(pool, 0, rnd(2) ? INT32_MAX : -1, &block); } },
        { "read: sequence",            KVF_E_ARGUMENT, [&] { return read(1, c, bad.data(), size); } },
        { "read: chunk",               KVF_E_ARGUMENT, [&] { return read(0, rnd(2) ? INT32_MAX : -1, bad.data(), size); } },
        { "read: size",                KVF_E_ARGUMENT, [&] { return read(0, c, bad.data(), size - 1); } },
        { "read: null",                KVF_E_ARGUMENT, [&] { return read(0, c, nullptr, size); } },
        { "read: not resident",        KVF_E_STATE,    [&] { return read(0, none, bad.data(), size); } },
        { "read: stock",               KVF_E_ARGUMENT, [&] { return kvf_read(mirror, 0, c, bad.data(), size); } },
        { "drop: sequence",            KVF_E_ARGUMENT, [&] { return kvf_drop(pool, 1, c); } },
        { "drop: chunk",               KVF_E_ARGUMENT, [&] { return kvf_drop(pool, 0, rnd(2) ? INT32_MAX : -1); } },
        { "drop: not resident",        KVF_E_STATE,    [&] { return kvf_drop(pool, 0, none); } },
        { "drop: stock",               KVF_E_ARGUMENT, [&] { return kvf_drop(mirror, 0, c); } },
        { "page_in: sequence",         KVF_E_ARGUMENT, [&] { return page_in(-1, c, good.data(), size, -1); } },
        { "page_in: chunk",            KVF_E_ARGUMENT, [&] { return page_in(0, rnd(2) ? INT32_MAX : -1, good.data(), size, -1); } },
        { "page_in: null",             KVF_E_ARGUMENT, [&] { return page_in(0, c, nullptr, size, -1); } },
        { "page_in: too short",        KVF_E_RECORD,   [&] { return page_in(0, c, good.data(), size - 1, -1); } },
        { "page_in: empty",            KVF_E_RECORD,   [&] { return page_in(0, c, good.data(), 0, -1); } },
        { "page_in: of another chunk", KVF_E_RECORD,   [&] { return page_in(0, none, good.data(), size, -1); } },
        { "page_in: head",             KVF_E_RECORD,   [&] { return page_in(0, c, head(offs), size, -1); } },
        { "page_in: empty mask",       KVF_E_RECORD,   [&] { return page_in(0, c, mask(0), size, -1); } },
        { "page_in: mask",             n_chunk < 64 ? KVF_E_RECORD : KVF_E_STATE, [&] { return page_in(0, c, mask(~0ull), size, -1); } },
        { "page_in: resident",         KVF_E_STATE,    [&] { return page_in(0, c, good.data(), size, -1); } },
        { "page_in: stock",            KVF_E_ARGUMENT, [&] { return kvf_page_in(mirror, 0, c, good.data(), size, &block); } },
        { "scribble: stock",           KVF_E_ARGUMENT, [&] { return kvf_scribble(mirror, 0); } },
        { "q: layer",                  KVF_E_ARGUMENT, [&] { return kvf_q(pool, info.n_layer, q, 1); } },
        { "q: size",                   KVF_E_ARGUMENT, [&] { return kvf_q(pool, 0, q, 1); } },
        { "q: stock",                  KVF_E_ARGUMENT, [&] { return kvf_q(mirror, 0, q, 1); } },
    };
    const auto & call = calls[rnd(std::size(calls))];
    expect_status(call.what, call.status, call.call());

    // M-RoPE positions may jump
    if (!mrope) {
        expect_status("decode: position not next", KVF_E_BACKEND, decode(0, n_past + 1 + rnd(N_CTX), &token, 1));
    }
    // an evicted chunk, a good record, a wrong block
    if (!evicted().empty()) {
        const int32_t out = pick(evicted());
        expect_status("page_in: block", KVF_E_ARGUMENT, page_in(0, out, host[out].data(), size, rnd(2) ? info.n_block : INT32_MAX));
        expect_status("page_in: used block", KVF_E_STATE, page_in(0, out, host[out].data(), size, block_of(c)));
    }
}

//
// steps
//

std::vector<llama_token> fuzz::some_tokens(int32_t n) {
    std::vector<llama_token> res(n);
    for (auto & token : res) {
        token = rnd(n_vocab);
    }
    return res;
}

// the mirror places the next tokens in the first cells that are free, the pool behind the last token until its chunk is
// full: so while it follows, chunks leave when there is no token to be placed in the tail
void fuzz::make_room(int32_t n) {
    if (n_exact > 0 && n_past%n_chunk != 0) {
        decode(some_tokens(n_chunk - n_past%n_chunk), 1);
    }
    if (n_exact > 0 && n_fixed == 0) {
        check_layout();
    }
    while (placed(n).empty() && !resident(true).empty()) {
        evict(pick(resident(true)));
    }
}

void fuzz::step() {
    n_exact -= 1;
    n_left  -= 1;
    if (n_left < 0) {
        clear();
    }

    const uint32_t what = rnd(100);

    if (what < 45 || n_past == 0) {
        const int32_t n = what%2 ? 1 : 1 + rnd(what%4 ? 8 : n_batch);
        if (placed(n).empty() && rnd(4)) {
            make_room(n);
        }
        decode(some_tokens(n), rnd(3));
    } else if (what < 52) {
        make_room(1 + rnd(n_batch));
        if (!resident(true).empty() && (n_exact <= 0 || n_past%n_chunk == 0)) {
            evict(pick(resident(true)));
        }
    } else if (what < 60) {
        const int32_t pos = n_past - rnd(std::min(n_past + 1, what%2 ? 5 : 2*n_chunk));
        if (pos == 0 || (block_of((pos - 1)/n_chunk) >= 0 && (n_exact <= 0 || pos >= n_fixed))) {
            rollback(pos);
        }
    } else if (what < 70) {
        if (n_exact <= 0 && !evicted().empty()) {
            const auto chunk = pick(evicted());
            page_in(chunk, host[chunk], free_blocks().empty() || rnd(2) ? -1 : pick(free_blocks()));
        }
    } else if (what < 76) {
        round_trip(n_exact > 0);
    } else if (what < 82) {
        again();
    } else if (what < 84) {
        scribble();
    } else if (what < 87) {
        pins.size() < 2 ? (void) pins.insert(pick(resident(false))) : pins.clear();
    } else if (what < 89) {
        decode_aborted();
    } else {
        wrong_call();
    }

    check();
}

static int usage(const char * name) {
    fprintf(stderr, "usage: %s MODEL.gguf [--steps N] [--seed S] [--type f16|q8_0|q4_0] [--no-fa]\n", name);
    return 2;
}

int main(int argc, char ** argv) {
    settings set;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        const std::string val = i + 1 < argc ? argv[i + 1] : "";
        if (arg == "--no-fa") {
            set.fa = false;
        } else if (arg == "--steps" || arg == "--seed") {
            (arg == "--steps" ? set.n_step : set.seed) = strtoul(argv[++i] ? argv[i] : "0", nullptr, 10);
        } else if (arg == "--type" && (val == "f16" || val == "q8_0" || val == "q4_0")) {
            set.type = val == "f16" ? GGML_TYPE_F16 : val == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_Q4_0;
            ++i;
        } else if (arg[0] != '-' && set.path.empty()) {
            set.path = arg;
        } else {
            return usage(argv[0]);
        }
    }
    if (set.path.empty()) {
        return usage(argv[0]);
    }

    uint32_t n = 0;
    try {
        fuzz f(set);
        for (; n < set.n_step; ++n) {
            f.step();
        }
    } catch (const std::exception & err) {
        printf("%s, seed %u, step %u: %s\n", set.path.c_str(), set.seed, n, err.what());
        printf("%u steps, 1 failure\n", n);
        return 1;
    }
    printf("%u steps, 0 failures\n", n);
    return 0;
}
