// kvflash-fuzz: random calls of kvflash.h on a real model, against seven oracles
//
//   shadow   which chunk lies in which block: predicted here, compared with the pool after every step
//   host     a record that is read again equals the first one, to the byte
//   mirror   a stock context decodes the same tokens and forgets what is evicted: the same logits, to the bit
//   again    out of the pool and in again, the bytes of free blocks overwritten in between: the same logits, to the bit
//   panes    a paned context decodes the same tokens as a stock one: the same logits, to the bit, and the pool's records
//   softmax  the attention that random queries pay to records: from the rows of their summaries, and from all their keys,
//            one number at a time
//   codes    with --coarse: nothing is evicted without codes, so a stock context that forgets nothing has nearly the same
//            logits; codes made anew have the same bytes; from bytes, another sequence goes on with the same logits, to the
//            bit
//
// Nothing waits for a copy unless it must: records and queries are checked at a later step.
//
// An episode begins exact: what is evicted stays out, so that the mirror can follow. It ends free: chunks come back into
// any block, and attention adds up in another order than in a stock cache. With codes it is free all the time.

#include "kvflash.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using record = std::vector<uint8_t>;

static constexpr uint32_t N_CTX       = 8192;
static constexpr uint64_t FINGERPRINT = 0x1234567890abcdef;
static constexpr uint32_t SEGMENT     = 4096; // positions whose codes have one mean

// finite numbers in every cache type: attention multiplies masked rows by zero
static constexpr uint8_t SCRIBBLES[] = {0x00, 0x11, 0x3c, 0x55};

static void expect(bool ok, const std::string & what) {
    if (!ok) { throw std::runtime_error(what); }
}

// what a call returned, and that it left a sentence exactly when it failed
static void expect_status(const std::string & what, int want, int got) {
    const std::string error = kvf_error();
    expect(got == want && error.empty() == (got == KVF_OK),
            what + ": status " + std::to_string(got) + ", not " + std::to_string(want) + ", with the error '" + error + "'");
}

static void expect_ok(const std::string & what, int got) { expect_status(what, KVF_OK, got); }

static void expect_finite(const std::string & what, const std::vector<float> & values) {
    expect(std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); }), what + " are not finite");
}

static void expect_same(const std::string & what, const std::vector<float> & a, const std::vector<float> & b) {
    expect(a.size() == b.size() && (a.empty() || !memcmp(a.data(), b.data(), a.size() * sizeof(float))),
            "other logits " + what);
}

struct settings {
    std::string path;
    uint32_t    n_step   = 200;
    uint32_t    seed     = 1;
    ggml_type   type     = GGML_TYPE_F16;
    bool        fa       = true;
    uint32_t    coarse_k = 0; // bits of codes
    uint32_t    coarse_v = 0;
};

// a block as it should be: the chunk it holds, and which of its positions
struct slot {
    static constexpr int32_t GUESTS = -2; // each layer has its own units here

    int32_t  chunk = -1;
    uint64_t mask  = 0;
};

// a copy to host memory that was begun, of a chunk or of queries (-1), and what must be true of it once it is done
struct copy {
    uint64_t              ticket;
    int32_t               chunk;
    std::function<void()> check;
};

struct fuzz {
    std::mt19937 rng;
    std::mt19937 rng_mass{1}; // of its own: what is asked of summaries changes no episode

    llama_model *   model  = nullptr;
    llama_context * pool   = nullptr;
    llama_context * mirror = nullptr;

    llama_context_params cparams;
    kvf_pool_params      pparams;
    kvf_pool_info        info;

    bool    hybrid;
    bool    mrope;
    bool    coarse;  // what is evicted has codes
    bool    is_near; // so the stock context, which has all of it, has nearly the same logits
    int32_t n_vocab;
    int32_t n_chunk;
    int32_t n_batch;
    size_t  n_q = 0; // floats that the queries of all layers are

    std::list<copy>   copies;  // begun, and not checked yet
    std::list<record> sources; // of page-ins whose copies may not be done
    uint64_t          n_ticket = 0;

    // the episode
    std::vector<slot>         slots;
    std::vector<llama_token>  tokens;
    std::map<int32_t, record> host;
    std::set<int32_t>         pins;

    llama_seq_id         own     = 0; // the episode's sequence in the pool
    int32_t              n_coded = 0; // chunks with codes
    int32_t              n_known = 0; // that had some when the text's only segment began
    std::vector<int32_t> guests;      // blocks

    // chunks whose codes were made, in this order, from these records: the first ones tell what others are like
    std::vector<std::pair<int32_t, std::vector<record>>> puts;

    uint32_t n_kv;
    int32_t  n_past;
    int32_t  n_fixed; // roll back no further: the mirror would not reuse the same cells
    int32_t  n_exact; // steps left in which the mirror follows
    int32_t  n_left;  // steps left

    std::map<std::string, int> done; // what was checked how often: a run that checks nothing passes, too

    ~fuzz() {
        llama_free(pool);
        llama_free(mirror);
        llama_model_free(model);
    }

    void start(const settings & set) {
        rng.seed(set.seed);
        kvf_init();

        auto mparams         = llama_model_default_params();
        mparams.n_gpu_layers = 0;
        expect_ok("load", kvf_model_load(set.path.c_str(), &mparams, nullptr, 0, &model));

        const auto rope = llama_model_rope_type(model);
        mrope           = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE;
        hybrid          = llama_model_is_hybrid(model);
        n_vocab         = llama_vocab_n_tokens(llama_model_get_vocab(model));

        pparams = {256 * (1 + rnd(3)), 16u << rnd(3), true, FINGERPRINT};
        n_chunk = pparams.n_chunk;
        n_batch = std::min(pparams.n_chunk + rnd(160), pparams.n_pool - 2 * pparams.n_chunk);

        cparams                 = llama_context_default_params();
        cparams.n_ctx           = N_CTX;
        cparams.n_batch         = n_batch;
        cparams.n_ubatch        = 32 + rnd(64);
        cparams.n_rs_seq        = hybrid && rnd(2) ? 4 : 0;
        cparams.n_threads       = 1;
        cparams.n_threads_batch = 1;
        cparams.flash_attn_type = set.fa ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        cparams.type_k          = set.type;
        cparams.type_v          = set.type;
        cparams.swa_full        = false;
        coarse                  = set.coarse_k > 0;
        if (coarse) {
            pparams.coarse_k   = set.coarse_k;
            pparams.coarse_v   = set.coarse_v;
            pparams.n_exchange = 1 + set.seed % 5;
            cparams.n_seq_max  = 2;
            cparams.kv_unified = true;
            cparams.n_rs_seq   = 0; // a state that is put back has none before it
        }

        expect_ok("pooled context", kvf_context_new(model, &cparams, &pparams, nullptr, &pool));
        expect_ok("stock context", kvf_context_new(model, &cparams, nullptr, nullptr, &mirror));
        expect_status("the stock context is none", KVF_E_ARGUMENT, kvf_get_pool_info(mirror, &info));

        for (uint32_t i = 0; i < kvf_n_layer(pool); ++i) {
            kvf_layer layer;
            expect_ok("layer", kvf_get_layer(pool, i, &layer));
            expect(layer.device >= 0 && (size_t) layer.device < ggml_backend_dev_count() &&
                            ggml_backend_dev_type(ggml_backend_dev_get(layer.device)) == GGML_BACKEND_DEVICE_TYPE_CPU,
                    "a layer is on another device than the CPU");
            n_q += layer.n_head * layer.n_embd_head_k;
        }

        double     seconds = -1;
        kvf_host * pinned  = nullptr;
        expect_ok("time_copies", kvf_time_copies(pool, 4096, 2, set.seed % 2, &seconds));
        expect(seconds >= 0, "copies take no time");
        expect_ok("host_new", kvf_host_new(pool, 4096, &pinned));
        expect(!pinned, "memory is pinned for the CPU");
        clear();
    }

    uint32_t rnd(uint32_t n) { return rng() % n; }

    // whether the stock context decodes the same tokens
    bool is_mirrored() const { return n_exact > 0 || is_near; }

    int32_t pick(const std::vector<int32_t> & from) { return from[rnd(from.size())]; }

    //
    // the shadow
    //

    // the chunk that is never evicted; there always is one
    int32_t tail() const { return std::max(n_past - 1, 0) / n_chunk; }

    bool sealed(int32_t chunk) const { return (chunk + 1) * n_chunk <= n_past; }

    // -1: not resident. chunk -1: the first free block
    static int32_t block_of(const std::vector<slot> & slots, int32_t chunk) {
        const auto it = std::find_if(slots.begin(), slots.end(), [&](const slot & s) { return s.chunk == chunk; });
        return it == slots.end() ? -1 : it - slots.begin();
    }
    int32_t block_of(int32_t chunk) const { return block_of(slots, chunk); }

    std::vector<int32_t> resident(bool evictable) const {
        std::vector<int32_t> res;
        for (const auto & s : slots) {
            const bool stays = evictable && (s.chunk == tail() || pins.count(s.chunk));
            if (s.chunk >= 0 && !stays) { res.push_back(s.chunk); }
        }
        return res;
    }

    // those that can come in
    std::vector<int32_t> evicted() const {
        std::vector<int32_t> res;
        for (const auto & [chunk, _] : host) {
            if (block_of(chunk) < 0) { res.push_back(chunk); }
        }
        return res;
    }

    // whether a copy of the chunk was begun, and not checked yet
    bool is_read(int32_t chunk) const {
        return std::any_of(copies.begin(), copies.end(), [&](const copy & c) { return c.chunk == chunk; });
    }

    std::vector<int32_t> free_blocks() const {
        std::vector<int32_t> res;
        for (size_t b = 0; b < slots.size(); ++b) {
            if (slots[b].chunk == -1) { res.push_back(b); }
        }
        return res;
    }

    // the slots after n more tokens, empty: they do not fit
    std::vector<slot> placed(int32_t n) const {
        auto res = slots;
        for (int32_t pos = n_past; pos < n_past + n; ++pos) {
            const int32_t chunk = pos / n_chunk;
            const int32_t own   = block_of(res, chunk);
            const int32_t block = own >= 0 ? own : block_of(res, -1);
            if (block < 0) { return {}; }
            res[block].chunk = chunk;
            res[block].mask |= 1ull << pos % n_chunk;
        }
        return res;
    }

    // of the attention graph: up to the last cell in use, and never less than before
    uint32_t width(const std::vector<slot> & after) const {
        uint32_t n_cell = 1;
        for (size_t i = 0; i < after.size() * n_chunk; ++i) {
            const auto & s = after[i / n_chunk];
            n_cell         = s.mask >> i % n_chunk & 1 ? i + 1 : n_cell;
        }
        return std::max(n_kv, (n_cell + 255) / 256 * 256);
    }

    void check() {
        expect_ok("info", kvf_get_pool_info(pool, &info));
        expect(info.n_pool == pparams.n_pool && info.n_block == slots.size(), "the pool has another size");
        expect(info.n_block_free == free_blocks().size(), "another number of blocks is free");
        expect(info.n_kv == n_kv && n_kv <= info.n_pool,
                "n_kv is " + std::to_string(info.n_kv) + ", not " + std::to_string(n_kv));

        std::vector<int32_t>      chunks(slots.size());
        std::vector<int32_t>      n_used(slots.size());
        std::vector<llama_seq_id> seqs(slots.size());
        expect_ok("blocks", kvf_blocks(pool, chunks.data(), n_used.data(), seqs.data(), slots.size()));
        for (size_t b = 0; b < slots.size(); ++b) {
            int32_t n = 0;
            for (uint64_t mask = slots[b].mask; mask; mask &= mask - 1) {
                n++;
            }
            expect(chunks[b] == std::max(slots[b].chunk, -1) && n_used[b] == n,
                    "block " + std::to_string(b) + " holds something else");
            expect(seqs[b] == (slots[b].chunk < 0 ? -1 : own), "block " + std::to_string(b) + " is another sequence's");
        }

        for (int32_t chunk = 0; chunk <= tail() + 1; ++chunk) {
            int32_t block;
            expect_ok("block_of", kvf_block_of(pool, own, chunk, &block));
            expect(block == block_of(chunk), "chunk " + std::to_string(chunk) + " is in another block");
            expect(block >= 0 || (!pins.count(chunk) && (!sealed(chunk) || host.count(chunk) || is_read(chunk))),
                    "a chunk is lost");
        }

        if (n_past > 0) { read(pick(resident(false))); }
        if (coarse) { check_guests(); }
    }

    void check_guests() {
        struct kvf_codes_info found;
        expect_ok("codes_info", kvf_codes_info(pool, own, &found));
        expect(found.n == (uint32_t) (n_coded * n_chunk), "other positions have codes");

        for (const auto & units : tables()) {
            std::set<int32_t> seen;
            for (const int32_t unit : units) {
                expect(unit < n_coded * n_chunk / KVF_UNIT, "a guest has no codes");
                expect(unit < 0 || seen.insert(unit).second, "a guest is twice there");
            }
        }
    }

    //
    // calls, each with all that must come of it
    //

    // outputs: enum kvf_outputs. returns the logits, nothing if there was no room
    std::vector<float> decode(const std::vector<llama_token> & batch, int outputs) {
        const int32_t n     = batch.size();
        const auto    after = placed(n);

        const int status = kvf_decode(pool, own, n_past, batch.data(), n, outputs);
        expect_status("decode", after.empty() ? KVF_E_NO_BLOCK : KVF_OK, status);
        if (status != KVF_OK) {
            done["no room"]++;
            return {};
        }

        const auto logits = [&](llama_context * ctx) {
            std::vector<float> res;
            for (int32_t i = outputs == KVF_OUTPUTS_ALL ? 0 : n - outputs; i < n; ++i) {
                const float * row = llama_get_logits_ith(ctx, i);
                res.insert(res.end(), row, row + n_vocab);
            }
            return res;
        };

        const auto res = logits(pool);
        expect_finite("logits", res);
        if (outputs != KVF_OUTPUTS_NONE) {
            const int32_t i    = rnd(res.size() / n_vocab); // of those that were asked for
            const auto    row  = res.begin() + i * n_vocab;
            llama_token   best = -1;
            expect_ok("argmax", kvf_argmax(pool, outputs == KVF_OUTPUTS_ALL ? i : -1, &best));
            expect(best == std::max_element(row, row + n_vocab) - row, "another token is the most likely one");

            float  likely = 0;
            double sum    = 0;
            for (auto x = row; x != row + n_vocab; ++x) {
                sum += exp((double) *x - row[best]);
            }
            expect_ok("top probability", kvf_top_probability(pool, outputs == KVF_OUTPUTS_ALL ? i : -1, &likely));
            expect(fabs(likely * sum - 1) < 1e-4, "its probability is another");
        }
        if (is_mirrored()) {
            expect_ok("decode, stock", kvf_decode(mirror, 0, n_past, batch.data(), n, outputs));
            is_near ? expect_near(res, logits(mirror)) : expect_same("than those of the stock context", res, logits(mirror));
            done["mirrored"]++;
        }

        queries();

        decoded(batch, after);
        return res;
    }

    // the shadow after that
    void decoded(const std::vector<llama_token> & batch, const std::vector<slot> & after) {
        n_kv   = width(after);
        slots  = after;
        n_past = n_past + batch.size();
        tokens.insert(tokens.end(), batch.begin(), batch.end());
    }

    // row by row, but for what codes lose: exact ones are other sums of the same
    void expect_near(const std::vector<float> & got, const std::vector<float> & want) const {
        expect(got.size() == want.size(), "another number of logits");
        const uint32_t bits = std::min(pparams.coarse_k, pparams.coarse_v);
        const bool     few  = cparams.type_k == GGML_TYPE_Q4_0; // of rows that are nearly the same, it may round some apart
        const double   most = bits == 32 ? (few ? 0.08 : 0.02) : bits == 4 ? 0.3 : 1;
        for (size_t from = 0; from < got.size(); from += n_vocab) {
            double off = 0, all = 0;
            for (size_t i = from; i < from + n_vocab; ++i) {
                off += pow(got[i] - want[i], 2);
                all += pow(want[i], 2);
            }
            expect(off <= most * most * all, "logits that are off by " + std::to_string(sqrt(off / all)) + " of their size");
        }
    }

    // wait for the copies up to a ticket, 0: all, and check them
    void wait(uint64_t ticket) {
        expect_ok("wait", kvf_wait(pool, ticket));
        if (!ticket) { sources.clear(); }
        while (!copies.empty() && (!ticket || copies.front().ticket <= ticket)) {
            copies.front().check();
            copies.pop_front();
        }
    }

    void wait_for_some() {
        uint64_t ticket = 0;
        if (!copies.empty() && rnd(2)) { ticket = std::next(copies.begin(), rnd(copies.size()))->ticket; }
        done["read late"] += std::count_if(copies.begin(), copies.end(),
                [&](const copy & c) { return c.chunk >= 0 && (!ticket || c.ticket <= ticket); });
        wait(ticket);
    }

    // of a copy that was just begun: they are counted
    void begun(const std::string & what, int status, const uint64_t & ticket) {
        expect_ok(what, status);
        expect(ticket > n_ticket, what + ": ticket " + std::to_string(ticket) + " after " + std::to_string(n_ticket));
        n_ticket = ticket;
    }

    // read the queries twice: for now, and to be compared after a later wait
    void queries() {
        const auto begin = [&](std::vector<float> & q) {
            uint64_t ticket = 0;
            q.assign(n_q, NAN);
            begun("q", kvf_q(pool, 0, q.data(), q.size(), &ticket), ticket);
            return ticket;
        };

        const auto later  = std::make_shared<std::vector<float>>();
        const auto ticket = begin(*later);

        std::vector<float> now;
        expect_ok("wait", kvf_wait(pool, begin(now)));
        expect_finite("queries", now);
        copies.push_back({ticket, -1, [=] { expect(*later == now, "the queries of a token are others later on"); }});
    }

    void decode_stopped() {
        const auto batch = some_tokens(1 + rnd(16)); // one ubatch
        const auto after = placed(batch.size());
        if (after.empty()) { return; }

        kvf_interrupt(true);
        const int status = kvf_decode(pool, own, n_past, batch.data(), batch.size(), 1);
        kvf_interrupt(false);
        expect_status("decode, stopped", KVF_E_ABORTED, status);
        done["stopped"]++;

        n_kv = width(after);
        if (hybrid) {
            clear(); // a recurrent state cannot go back
        }
    }

    // false: a recurrent state or a sliding window cannot go back so far
    bool rollback(int32_t pos) {
        const int status = kvf_seq_rm(pool, own, pos, -1);
        if (n_exact > 0 || (is_near && status == KVF_OK)) { // a window that was moved may be shorter
            expect(status == kvf_seq_rm(mirror, 0, pos, -1), "seq_rm: another status than that of the stock context");
        }
        if (status == KVF_E_UNSUPPORTED && (hybrid || llama_model_n_swa(model) > 0)) {
            done["not rolled back"]++;
            if (coarse) { recover(); }
            return false;
        }
        expect_ok("seq_rm", status);
        wait(0); // what was begun before is as it was
        done["rolled back"]++;
        truncate(pos);
        return true;
    }

    // the shadow after a rollback
    void truncate(int32_t pos) {
        for (auto & s : slots) {
            if (s.chunk == slot::GUESTS) { continue; }
            const int32_t n_keep = std::clamp(pos - s.chunk * n_chunk, 0, n_chunk);
            s.mask &= n_keep < 64 ? (1ull << n_keep) - 1 : ~0ull;
            s = s.mask ? s : slot();
        }
        n_past  = pos;
        n_coded = std::min(n_coded, pos / n_chunk);
        tokens.resize(pos);
        host.erase(host.lower_bound(pos / n_chunk), host.end());
        pins.erase(pins.lower_bound((pos + n_chunk - 1) / n_chunk), pins.end());
        if (n_coded < n_known) { // means tell of what is gone
            const int32_t n = std::exchange(n_coded, 0);
            n_known         = 0;
            cover(n);
        }
    }

    // what no chunk holds, put back after more tokens: the same tokens give the same again. what is no such state is
    // refused, or does no harm that putting back the right one does not mend
    void partial() {
        const auto batch = some_tokens(1 + rnd(4));
        make_room(batch.size());
        if (placed(batch.size()).empty()) { return; }

        size_t size = 0;
        expect_ok("partial_size", kvf_partial_size(pool, own, &size));
        const bool window = llama_model_n_swa(model) > 0;
        expect((size > 0) == (hybrid || window), "a state of another size");
        if (!size) { return; }

        record state(size);
        expect_ok("partial_get", kvf_partial_get(pool, own, state.data(), size));
        const int32_t start = n_past;
        const auto    first = decode(batch, 2);

        for (uint32_t n = 1 + rnd(4); n > 0; --n) {
            auto bad = state;
            if (window && rnd(2)) {
                bad[rnd(rnd(2) ? 32 : size)] ^= 1 << rnd(8); // its head, or anything
            } else {
                bad.resize(rnd(2) ? size - 1 - rnd(size - 1) : size + 1 + rnd(64));
            }
            const int status = kvf_partial_set(pool, own, start, bad.data(), bad.size());
            expect(status == KVF_OK || status == KVF_E_RECORD || status == KVF_E_STATE || status == KVF_E_BACKEND,
                    "partial_set: status " + std::to_string(status));
            expect(status != KVF_OK || bad.size() == size, "a state of another size was put back");
            done["wrong states"]++;
        }
        expect_ok("partial_set", kvf_partial_set(pool, own, start, state.data(), size));
        wait(0);
        truncate(start);
        expect_same("after a state was put back", first, decode(batch, 2));
        done["states"]++;
    }

    // begin to read a resident chunk. its record is checked by a later wait, against its tokens and the host's copy
    std::shared_ptr<const record> begin_read(int32_t chunk) {
        const auto rec    = std::make_shared<record>(info.record_bytes, rnd(256)); // what a read leaves out differs
        uint64_t   ticket = 0;
        begun("read", kvf_read(pool, own, chunk, rec->data(), rec->size(), &ticket), ticket);

        const kvf_record head = {
                KVF_RECORD_MAGIC,
                KVF_RECORD_VERSION,
                sizeof(kvf_record),
                rec->size(),
                FINGERPRINT,
                slots[block_of(chunk)].mask,
                chunk,
                pparams.n_chunk,
                info.n_layer,
                cparams.type_k,
                cparams.type_v,
                info.flags,
                info.meta_bytes,
                0,
        };
        const auto begin = tokens.begin() + chunk * n_chunk;
        const auto text  = std::vector<llama_token>(begin, std::min(begin + n_chunk, tokens.end()));

        copies.push_back({ticket, chunk, [this, rec, head, text, chunk, is_sealed = sealed(chunk)] {
                              expect(!memcmp(rec->data(), &head, sizeof(head)), "the head of a record is wrong");
                              check_cells(*rec, head.mask, text);
                              expect(!is_sealed || host.emplace(chunk, *rec).first->second == *rec,
                                      "chunk " + std::to_string(chunk) + " differs from its record");
                          }});
        return rec;
    }

    void check_cells(const record & rec, uint64_t mask, const std::vector<llama_token> & text) const {
        for (size_t i = 0; i < (info.meta_bytes - sizeof(kvf_record)) / sizeof(int32_t); ++i) {
            int32_t value;
            memcpy(&value, rec.data() + sizeof(kvf_record) + i * sizeof(value), sizeof(value));
            const int32_t cell = i / 3; // x, y, token
            const bool    used = cell < n_chunk && mask >> cell & 1;
            expect(used ? i % 3 < 2 || value == text.at(cell) : value == 0, "the cells of a record are wrong");
        }
    }

    // the same at once; what was begun before is left to a later wait
    record read(int32_t chunk) {
        const auto rec = begin_read(chunk);
        expect_ok("wait", kvf_wait(pool, copies.back().ticket));
        copies.back().check();
        copies.pop_back();
        return *rec;
    }

    // the record is not read until a later wait
    std::shared_ptr<const record> drop(int32_t chunk) {
        const auto rec = begin_read(chunk);
        if (coarse || rnd(4)) { // the other call forgets all codes from there on
            expect_ok("drop", kvf_drop(pool, own, chunk));
        } else {
            expect_ok("attn_seq_rm", kvf_attn_seq_rm(pool, own, chunk * n_chunk, (chunk + 1) * n_chunk));
        }
        slots[block_of(chunk)] = {};
        return rec;
    }

    void evict(int32_t chunk) {
        if (coarse) { cover(chunk + 1); }
        drop(chunk);
        done["evicted"]++;
        if (n_exact > 0) {
            expect_ok("attn_seq_rm", kvf_attn_seq_rm(mirror, 0, chunk * n_chunk, (chunk + 1) * n_chunk));
            n_fixed = n_past;
        }
    }

    // block -1: the first free one. false: none is free
    bool page_in(int32_t chunk, const record & rec, int32_t block) {
        const bool    full = free_blocks().empty();
        const int32_t want = block < 0 ? block_of(-1) : block;

        const auto & source = sources.emplace_back(rec); // until it is waited for
        expect_status("page_in", full ? KVF_E_NO_BLOCK : KVF_OK,
                kvf_page_in(pool, own, chunk, source.data(), source.size(), &block));
        expect(block == want, "paged in to another block");
        if (!full) {
            kvf_record head;
            memcpy(&head, rec.data(), sizeof(head));
            slots[block] = {chunk, head.mask};
            done["paged in"]++;
            if (!rnd(3)) { wait(0); } // the copy is done, its source gone
        }
        return !full;
    }

    // a chunk comes in. the mirror cannot follow: it goes out again
    void come_back() {
        const int32_t chunk = pick(evicted());
        if (!page_in(chunk, host[chunk], free_blocks().empty() || rnd(2) ? -1 : pick(free_blocks()))) { return; }
        expect(read(chunk) == host.at(chunk), "chunk " + std::to_string(chunk) + " is not what was paged in");
        if (n_exact > 0) { drop(chunk); }
    }

    void scribble() { expect_ok("scribble", kvf_scribble(pool, SCRIBBLES[rnd(sizeof(SCRIBBLES))])); }

    // some chunks out and in again, the tail among them
    void round_trip(bool same_blocks) {
        auto chunks = resident(false);
        std::shuffle(chunks.begin(), chunks.end(), rng);
        chunks.resize(std::min<size_t>(chunks.size(), 1 + rnd(4)));

        std::map<int32_t, std::pair<int32_t, std::shared_ptr<const record>>> out;
        for (int32_t chunk : chunks) {
            const int32_t block = block_of(chunk);
            out[chunk]          = {block, drop(chunk)};
        }
        scribble();
        wait(0);
        for (int32_t chunk : chunks) {
            const auto & [block, rec] = out[chunk];
            page_in(chunk, *rec, same_blocks ? block : rnd(2) ? -1 : pick(free_blocks()));
        }
        if (rnd(2)) { scribble(); }
        std::shuffle(chunks.begin(), chunks.end(), rng);
        for (int32_t chunk : chunks) {
            const auto & [block, rec] = out[chunk];
            expect(read(chunk) == *rec, "chunk " + std::to_string(chunk) + " is not what was paged in");
        }
    }

    // the same tokens twice, and whatever may not matter in between. a recurrent state (n_rs_seq > 0) keeps no snapshot of
    // what was before the last ubatch: llama.cpp goes back there without a word, to a wrong state
    void again() {
        const int32_t n_keep = hybrid ? 1 : 0;
        const auto    batch  = some_tokens(n_keep + (hybrid ? 2 + rnd(3) : 1 + rnd(4)));
        if (placed(batch.size()).empty()) { return; }

        const auto chosen = tables();
        auto       first  = decode(batch, 2);
        first.erase(first.begin(), first.begin() + n_keep * n_vocab);
        if (rollback(n_past - batch.size() + n_keep)) {
            place(chosen);
            round_trip(true);
            expect_same("after a round trip", first, decode({batch.begin() + n_keep, batch.end()}, 2));
            done["again"]++;
        }
    }

    void clear() {
        expect_ok("clear", kvf_clear(pool));
        expect_ok("clear, stock", kvf_clear(mirror));
        expect_ok("info", kvf_get_pool_info(pool, &info));
        wait(0); // what was begun before is as it was

        slots.assign(info.n_block, {});
        tokens.clear();
        host.clear();
        pins.clear();
        puts.clear();
        guests.clear();
        n_coded = 0;

        n_kv    = 0;
        n_past  = 0;
        n_fixed = 0;
        n_exact = 10 + rnd(50);
        n_left  = n_exact + rnd(60);
        n_exact = coarse ? 0 : n_exact;
        is_near = coarse;
    }

    // K of all layers, then V of all layers, as llama.cpp's own state_write() finds them in the stock context, must be
    // those of the records. every chunk is in its natural place, and the last one is full
    void check_layout() {
        record state(llama_state_seq_get_size(mirror, 0));
        expect(llama_state_seq_get_data(mirror, state.data(), state.size(), 0) == state.size(),
                "the state has another size");

        auto       at   = state.begin();
        const auto find = [&](uint64_t offs, uint64_t size, size_t n_col) {
            record want;
            for (size_t col = 0; col < n_col; ++col) {
                for (int32_t chunk = 0; chunk <= tail(); ++chunk) {
                    const auto rec   = read(chunk);
                    const auto begin = rec.begin() + offs + size / n_col * col;
                    want.insert(want.end(), begin, begin + size / n_col);
                }
            }
            at = std::search(at, state.end(), std::boyer_moore_horspool_searcher(want.begin(), want.end()));
            expect(at != state.end(), "the rows of a record are not those of a stock cache");
        };

        std::vector<kvf_layer> layers(info.n_layer);
        for (uint32_t i = 0; i < info.n_layer; ++i) {
            expect_ok("layer", kvf_get_layer(pool, i, &layers[i]));
        }
        for (const auto & layer : layers) {
            find(layer.offs_k, layer.size_k, 1);
        }
        for (const auto & layer : layers) {
            find(layer.offs_v, layer.size_v, info.flags & KVF_FLAG_V_TRANS ? layer.n_embd_v : 1);
        }
        done["layouts"]++;
    }

    //
    // summaries
    //

    // what kvf_mass is asked about one layer, and what it should say
    struct asked {
        kvf_layer                          layer;
        std::vector<std::vector<uint16_t>> slabs;
        std::vector<const uint16_t *>      places;
        std::vector<float>                 q;
        float                              scale;
        std::vector<double>                want;
    };

    static constexpr uint32_t SLAB = 16;

    uint32_t any(uint32_t n) { return rng_mass() % n; }

    std::vector<float> some_queries(const kvf_layer & layer, uint32_t n) {
        std::vector<float> q((size_t) n * layer.n_head * layer.n_embd_head_k);
        for (auto & x : q) {
            x = std::normal_distribution<float>()(rng_mass);
        }
        return q;
    }

    const record & any_record() { return std::next(host.begin(), any(host.size()))->second; }

    asked ask(uint32_t n, uint32_t n_row, uint32_t n_query) {
        asked res;
        expect_ok("layer", kvf_get_layer(pool, any(info.n_layer), &res.layer));
        const auto &   layer = res.layer;
        const uint32_t d = layer.n_embd_head_k, group = layer.n_head / layer.n_head_kv;

        size_t size = 0;
        expect_ok("summary_size", kvf_summary_size(&layer, SLAB, n_row, &size));
        res.slabs.assign((n + SLAB - 1) / SLAB, std::vector<uint16_t>(size));
        for (auto & slab : res.slabs) {
            res.places.push_back(slab.data());
        }
        for (uint32_t i = 0; i < n; ++i) {
            const auto &      rec    = any_record();
            const kvf_layer * its    = &layer;
            uint16_t *        places = res.slabs[i / SLAB].data();
            expect_ok("summarise", kvf_summarise(&its, 1, n_chunk, rec.data(), rec.size(), KVF_SUMMARY_CENTROIDS, n_row,
                                           &places, i % SLAB, SLAB));
        }

        // dimension j of a row, and in the place of dimension d the logarithm of how many keys it stands for
        const auto at = [&](uint32_t i, uint32_t head, uint32_t row, uint32_t j) {
            const uint32_t r    = i % SLAB * n_row + row;
            const size_t   from = (((size_t) r / 16 * layer.n_head_kv + head) * (d + 1) + j) * 16 + r % 16;
            const uint32_t bits = (uint32_t) res.slabs[i / SLAB][from] << 16;
            float          x;
            memcpy(&x, &bits, sizeof(x));
            return (double) x;
        };
        res.q = some_queries(layer, n_query);
        std::vector<double> dots((size_t) n_query * layer.n_head * n * n_row);
        double              most = 1e-6;
        for (size_t k = 0; k < dots.size(); ++k) {
            const uint32_t row = k % n_row, i = k / n_row % n, h = k / n_row / n; // h: a head of a query
            for (uint32_t j = 0; j < d; ++j) {
                dots[k] += res.q[(size_t) h * d + j] * at(i, h % layer.n_head / group, row, j);
            }
            most = std::max(most, std::abs(dots[k]));
        }
        res.scale = (any(2) ? 20 : 2) / most; // rounding is a part of what is multiplied
        res.want.resize(n);
        for (uint32_t a = 0; a < n_query; ++a) {
            std::vector<double> mine(n);
            for (uint32_t h = 0; h < layer.n_head; ++h) {
                std::vector<double> sums(n);
                double              all = 0;
                for (uint32_t i = 0; i < n; ++i) {
                    for (uint32_t row = 0; row < n_row; ++row) {
                        const double x = dots[(((size_t) a * layer.n_head + h) * n + i) * n_row + row];
                        const double w = exp(res.scale * x + at(i, h / group, row, d));
                        sums[i] += w;
                        all += w;
                    }
                }
                for (uint32_t i = 0; i < n; ++i) {
                    mine[i] += sums[i] / all;
                }
            }
            for (uint32_t i = 0; i < n; ++i) {
                res.want[i] = std::max(res.want[i], mine[i]);
            }
        }
        return res;
    }

    // of several layers at once
    void masses() {
        if (host.empty()) { return; }

        const uint32_t n = 1 + any(40), n_row = 1u << any(5), n_query = 1 + any(3);

        std::vector<asked> each(1 + any(3));
        for (auto & one : each) {
            one = ask(n, n_row, n_query);
        }
        std::vector<const kvf_layer *>        layers;
        std::vector<const uint16_t * const *> slabs;
        std::vector<const float *>            q;
        std::vector<float>                    scales;
        for (const auto & one : each) {
            layers.push_back(&one.layer);
            slabs.push_back(one.places.data());
            q.push_back(one.q.data());
            scales.push_back(one.scale);
        }
        std::vector<float> found(each.size() * n, NAN);
        expect_ok("mass", kvf_mass(layers.data(), each.size(), slabs.data(), SLAB, n, n_row, q.data(), n_query,
                                  scales.data(), found.data()));
        for (size_t k = 0; k < found.size(); ++k) {
            const double want = each[k / n].want[k % n];
            expect(std::abs(found[k] - want) <= 1e-3 * want + 1e-6, "chunk " + std::to_string(k % n) + " has a mass of " +
                                                                            std::to_string(found[k]) + ", not " +
                                                                            std::to_string(want));
        }
        done["masses"]++;
    }

    // all keys of some records, and those at their borders: from the bytes, one number at a time
    void closer() {
        if (host.empty()) { return; }

        kvf_layer layer;
        expect_ok("layer", kvf_get_layer(pool, any(info.n_layer), &layer));
        const uint32_t d = layer.n_embd_head_k, group = layer.n_head / layer.n_head_kv;
        const uint32_t n = 1 + any(5), n_token = 1 + any(9), n_query = n_token * layer.n_head;
        const auto     type = (ggml_type) layer.type_k;
        const size_t   row  = ggml_row_size(type, layer.n_embd_k);

        const auto                      q = some_queries(layer, n_token);
        std::vector<const void *>       records;
        std::vector<std::vector<float>> keys;
        double                          most = 1e-6;
        for (uint32_t c = 0; c < n; ++c) {
            const auto & rec = any_record();
            records.push_back(rec.data());
            keys.emplace_back((size_t) n_chunk * layer.n_embd_k);
            for (uint32_t t = 0; t < (uint32_t) n_chunk; ++t) {
                const uint8_t * from = rec.data() + layer.offs_k + t * row;
                float *         to   = keys[c].data() + (size_t) t * layer.n_embd_k;
                if (type == GGML_TYPE_F32) {
                    memcpy(to, from, row);
                } else {
                    ggml_get_type_traits(type)->to_float(from, to, layer.n_embd_k);
                }
            }
        }
        std::vector<double> dots((size_t) n_query * n * n_chunk);
        for (size_t k = 0; k < dots.size(); ++k) {
            const uint32_t t = k % n_chunk, c = k / n_chunk % n, h = k / n_chunk / n;
            for (uint32_t j = 0; j < d; ++j) {
                dots[k] += q[(size_t) h * d + j] * keys[c][(size_t) t * layer.n_embd_k + h % layer.n_head / group * d + j];
            }
            most = std::max(most, std::abs(dots[k]));
        }
        const float    scale  = any(3) ? (any(2) ? 20 : 2) / most : 0;
        const uint32_t n_edge = scale != 0 ? any(n_chunk + 1) : 0, n_part = n_edge ? 3 : 1;

        std::vector<float> found((size_t) n_part * n_query * n, NAN);
        expect_ok("score_keys", kvf_score_keys(&layer, n_chunk, records.data(), n, host.begin()->second.size(), q.data(),
                                        n_token, scale, n_edge, found.data()));
        for (size_t k = 0; k < found.size(); ++k) {
            const uint32_t part = k / n / n_query;
            const auto     from = dots.begin() + k % ((size_t) n * n_query) * n_chunk;
            const auto     a = part == 2 ? from + n_chunk - n_edge : from, b = part == 1 ? from + n_edge : from + n_chunk;
            double         want = *std::max_element(a, b);
            if (scale != 0) {
                const double top = want;
                want             = scale * top +
                       log(std::accumulate(a, b, 0.0, [&](double sum, double x) { return sum + exp(scale * (x - top)); }));
            }
            expect(std::abs(found[k] - want) <= 1e-3 * (scale != 0 ? 1 : most),
                    "part " + std::to_string(part) + " of keys has " + std::to_string(found[k]) + ", not " +
                            std::to_string(want));
        }
        done["closer"]++;
    }

    //
    // codes
    //

    void put(llama_seq_id seq, int32_t first, const std::vector<const void *> & records) {
        const uint32_t each = rnd(2) ? 1 : info.n_layer;
        for (uint32_t layer = 0; layer < info.n_layer; layer += each) {
            expect_ok("codes_put", kvf_codes_put(pool, seq, layer, each, first, records.data(), records.size()));
        }
    }

    // the first n chunks have codes
    void cover(int32_t n) {
        if (n <= n_coded) { return; }
        if (n_coded == 0) {
            puts.clear();
            n_known = n;
        }

        std::vector<const void *> records;
        puts.push_back({n_coded, {}});
        for (int32_t chunk = n_coded; chunk < n; ++chunk) {
            if (is_read(chunk)) { wait(0); }
            if (!host.count(chunk)) { read(chunk); }
            records.push_back(host.at(chunk).data());
            puts.back().second.push_back(host.at(chunk));
        }
        put(own, n_coded, records);
        expect_ok("codes_cover", kvf_codes_cover(pool, own, n_coded, records.data(), records.size()));
        n_coded = n;
        done["covered"]++;
    }

    // codes were forgotten, all or some by a call that failed: guests, too. they come again
    void recover() {
        const int32_t         n = n_coded;
        struct kvf_codes_info found;
        expect_ok("codes_info", kvf_codes_info(pool, own, &found));
        n_coded = found.n / n_chunk;
        check_guests();
        cover(n);
    }

    // the codes of the first n chunks as bytes, of each layer
    std::vector<record> code_bytes(llama_seq_id seq, int32_t n) {
        std::vector<record> res;
        for (uint32_t layer = 0; layer < info.n_layer; ++layer) {
            size_t size = 0;
            expect_ok("codes_size", kvf_codes_size(pool, seq, layer, n * n_chunk, &size));
            res.emplace_back(size);
            expect_ok("codes_get", kvf_codes_get(pool, seq, layer, n * n_chunk, res.back().data(), size));
        }
        return res;
    }

    // records of what has codes
    std::vector<const void *> coded() const {
        std::vector<const void *> res;
        for (int32_t chunk = 0; chunk < n_coded; ++chunk) {
            res.push_back(host.at(chunk).data());
        }
        return res;
    }

    // codes of the same records, put into the other sequence in the same order, have the same bytes; those of fewer are
    // their beginning
    void made_anew() {
        if (n_coded == 0) { return; }

        const llama_seq_id other = 1 - own;
        for (const auto & [first, from] : puts) {
            std::vector<const void *> records;
            for (const auto & rec : from) {
                records.push_back(rec.data());
            }
            put(other, first, records);
        }
        const auto all     = code_bytes(own, n_coded);
        const auto records = coded();
        expect_ok("codes_cover", kvf_codes_cover(pool, other, 0, records.data(), n_coded));
        const int32_t n   = 1 + rnd(n_coded);
        const auto    few = code_bytes(other, n);
        expect(code_bytes(other, n_coded) == all, "codes made anew are others");
        for (uint32_t layer = 0; layer < info.n_layer; ++layer) {
            expect(std::equal(few[layer].begin(), few[layer].end(), all[layer].begin()),
                    "codes of fewer positions are others");
        }
        expect_ok("codes_forget", kvf_codes_forget(pool, other));
        done["made anew"]++;
    }

    // the units in the slots of each layer, as the pool has them; the blocks are checked
    std::vector<std::vector<int32_t>> tables() {
        if (guests.empty()) { return {}; }

        const size_t                      n_slot = guests.size() * n_chunk / KVF_UNIT;
        std::vector<int32_t>              blocks(guests.size()), units(info.n_layer * n_slot);
        std::vector<std::vector<int32_t>> res;
        expect_ok("get_guests", kvf_get_guests(pool, own, blocks.data(), blocks.size(), units.data(), units.size()));
        expect(blocks == guests, "guests have other blocks");
        for (auto at = units.begin(); at != units.end(); at += n_slot) {
            res.emplace_back(at, at + n_slot);
        }
        return res;
    }

    void place(const std::vector<std::vector<int32_t>> & tables) {
        std::vector<int32_t> units;
        for (const auto & table : tables) {
            units.insert(units.end(), table.begin(), table.end());
        }
        if (!units.empty()) { expect_ok("place_guests", kvf_place_guests(pool, own, units.data(), units.size())); }
    }

    // another number of blocks for guests: the first ones stay, free ones come
    void resize_guests(size_t n) {
        auto want = guests;
        want.resize(std::min(n, want.size()));
        for (const int32_t block : free_blocks()) {
            if (want.size() < n) { want.push_back(block); }
        }
        expect_ok("set_guests", kvf_set_guests(pool, own, want.size(), nullptr));
        for (const int32_t block : guests) {
            slots[block] = {};
        }
        for (const int32_t block : want) {
            slots[block].chunk = slot::GUESTS;
            n_kv               = std::max<uint32_t>(n_kv, ((block + 1) * n_chunk + 255) / 256 * 256);
        }
        guests = want;
        done["guests"]++;
    }

    // all there is goes to the other sequence, by bytes: the same tokens give the same there
    void move() {
        const auto batch = some_tokens(1 + rnd(4));
        make_room(batch.size());
        if (placed(batch.size()).empty()) { return; }

        size_t size = 0;
        expect_ok("partial_size", kvf_partial_size(pool, own, &size));
        record state(size);
        if (size) { expect_ok("partial_get", kvf_partial_get(pool, own, state.data(), size)); }
        std::map<int32_t, std::pair<int32_t, record>> in;
        for (const int32_t chunk : resident(false)) {
            in[chunk] = {block_of(chunk), read(chunk)};
        }
        const auto    codes = code_bytes(own, n_coded);
        const auto    units = tables();
        const int32_t start = n_past;
        const auto    first = decode(batch, 2);
        wait(0);

        if (rnd(2)) {
            expect_ok("clear_seq", kvf_clear_seq(pool, own));
        } else {
            expect_ok("clear", kvf_clear(pool));
            expect_ok("set_width", kvf_set_width(pool, n_kv));
        }
        own = 1 - own;
        for (auto & [chunk, from] : in) {
            expect_ok("page_in", kvf_page_in(pool, own, chunk, from.second.data(), from.second.size(), &from.first));
        }
        if (size) { expect_ok("partial_set", kvf_partial_set(pool, own, start, state.data(), size)); }
        for (uint32_t layer = 0; layer < info.n_layer; ++layer) {
            expect_ok("codes_set",
                    kvf_codes_set(pool, own, layer, n_coded * n_chunk, codes[layer].data(), codes[layer].size()));
        }
        const auto records = coded();
        if (n_coded > 0) { expect_ok("codes_cover", kvf_codes_cover(pool, own, 0, records.data(), n_coded)); }
        n_known = n_coded;
        expect_ok("set_guests", kvf_set_guests(pool, own, guests.size(), guests.data()));
        place(units);

        expect_ok("decode", kvf_decode(pool, own, start, batch.data(), batch.size(), KVF_OUTPUTS_ALL));
        const float * logits = llama_get_logits(pool);
        const auto    second = std::vector<float>(logits, logits + first.size());
        if (llama_model_n_swa(model) > 0) {
            expect_near(first, second); // of several sequences, the window's cells are packed
        } else {
            expect_same("in another sequence", first, second);
        }
        done["moved"]++;
    }

    // a short text in the other sequence, of which all but the last chunk are outside. then both decode in one batch
    void beside() {
        if (n_past % n_chunk == 0) { return; } // needs no block
        while (free_blocks().size() < 2 && !resident(true).empty()) {
            evict(pick(resident(true)));
        }
        if (free_blocks().size() < 2) { return; }

        const llama_seq_id  other = 1 - own;
        const int32_t       n     = 2 + rnd(2);
        std::vector<record> records(n, record(info.record_bytes));
        for (int32_t chunk = 0; chunk < n; ++chunk) {
            const auto batch = some_tokens(n_chunk);
            uint64_t   ticket;
            expect_ok("decode, beside", kvf_decode(pool, other, chunk * n_chunk, batch.data(), n_chunk, 1));
            expect_ok("decode, stock", kvf_decode(mirror, 1, chunk * n_chunk, batch.data(), n_chunk, 1));
            expect_near(last_logits(pool), last_logits(mirror));
            expect_ok("read", kvf_read(pool, other, chunk, records[chunk].data(), info.record_bytes, &ticket));
            expect_ok("wait", kvf_wait(pool, ticket));
            put(other, chunk, {records[chunk].data()});
            const void * at = records[chunk].data();
            expect_ok("codes_cover", kvf_codes_cover(pool, other, chunk, &at, 1));
            if (chunk + 1 < n) { expect_ok("drop", kvf_drop(pool, other, chunk)); }
        }

        const auto         both   = some_tokens(2);
        const llama_seq_id seqs[] = {own, other}, its[] = {0, 1};
        const llama_pos    pos[] = {n_past, n * n_chunk};
        expect_ok("decode_each", kvf_decode_each(pool, seqs, pos, both.data(), 2));
        expect_ok("decode_each, stock", kvf_decode_each(mirror, its, pos, both.data(), 2));
        for (int32_t i = 0; i < 2; ++i) {
            const auto row = [&](llama_context * ctx) {
                const float * at = llama_get_logits_ith(ctx, i);
                return std::vector<float>(at, at + n_vocab);
            };
            expect_near(row(pool), row(mirror));
        }
        decoded({both[0]}, placed(1));
        expect_ok("clear_seq", kvf_clear_seq(pool, other));
        expect_ok("seq_rm, stock", kvf_seq_rm(mirror, 1, 0, -1));
        expect_ok("info", kvf_get_pool_info(pool, &info));
        expect(info.n_kv >= n_kv, "the graph has become narrower");
        n_kv = info.n_kv;
        done["beside"]++;
    }

    // a text of more than a segment, of few tokens from there on: its second mean is its own, or the first one. each chunk
    // was read with the one before. a paned context attends to the rows themselves
    void far() {
        if (hybrid || llama_model_n_swa(model) > 0) { return; } // they have more to hand over
        clear();
        is_near = false;

        const int32_t want = SEGMENT + (rnd(2) ? 1100 : 200) + rnd(200);
        while (n_past < want) {
            auto batch = some_tokens(std::min(want - n_past, n_chunk));
            for (auto & token : batch) {
                token %= n_past < (int32_t) SEGMENT ? n_vocab : 8;
            }
            const auto after = placed(batch.size());
            expect_ok("decode", kvf_decode(pool, own, n_past, batch.data(), batch.size(), 0));
            decoded(batch, after);
            if (tail() > 1 && block_of(tail() - 2) >= 0) { drop(tail() - 2); }
        }
        wait(0);
        cover(tail() - rnd(2) * 512 / n_chunk);
        cover(tail());

        const context ctx = paned();
        for (int32_t n = 3; n > 0; --n) {
            std::list<record>   records;
            std::vector<void *> places;
            for (int32_t chunk = 0; chunk * n_chunk < n_past + n; ++chunk) {
                const bool there = block_of(chunk) >= 0;
                places.push_back(records.emplace_back(there             ? read(chunk)
                                                      : chunk < n_coded ? host.at(chunk)
                                                                        : record(info.record_bytes))
                                         .data());
            }
            const auto batch = some_tokens(n);
            const auto after = placed(n);
            llama_pos  end;
            expect_ok("decode, in panes", kvf_decode_exact(ctx.get(), pool, 0, n_past, batch.data(), n, 1, places.data(),
                                                  places.size(), info.record_bytes));
            expect_ok("wait_exact", kvf_wait_exact(ctx.get(), 0, &end));
            expect_ok("decode", kvf_decode(pool, own, n_past, batch.data(), n, 1));
            expect_near(last_logits(pool), last_logits(ctx.get()));
            decoded(batch, after);
            resize_guests(n % 3);
            move();
            check();
        }
        made_anew();
        done["far"]++;
    }

    // whatever may happen to codes between two tokens
    void codes() {
        const uint32_t what = rnd(20);
        if (what < 3) {
            cover(rnd(n_past / n_chunk + 1));
        } else if (what < 5) {
            resize_guests(rnd(info.n_block / 2));
        } else if (what < 7) {
            made_anew();
        } else if (what < 9) {
            move();
        } else if (what == 9) {
            beside();
        } else if (what == 10) {
            expect_ok("codes_forget", kvf_codes_forget(pool, own));
            recover();
        }
    }

    //
    // wrong calls: a status, a sentence, and nothing else
    //

    void wrong_call() {
        const int32_t in    = pick(resident(false));
        const int32_t out   = tail() + 1 + rnd(100);
        const int32_t wild  = rnd(2) ? -1 : INT32_MAX;
        const int32_t seq   = rnd(2) ? -1 : (int32_t) cparams.n_seq_max;
        const size_t  size  = info.record_bytes;
        const auto    good  = read(in);
        auto          bad   = good;
        int32_t       block = -1;
        int32_t       ints[64];
        kvf_layer     layer;
        uint64_t      ticket  = 0;
        double        seconds = 0;
        const int32_t used    = block_of(in);
        const void *  one     = good.data();

        struct kvf_codes_info found;
        std::vector<float>    q(n_q);
        kvf_host *            pinned = nullptr;

        std::vector<llama_token> many(n_batch + 1, rnd(n_vocab));
        llama_token * const      token   = many.data();
        const llama_token        alien[] = {-1, n_vocab};

        const auto read_to = [&](llama_context * ctx, int32_t seq, int32_t chunk, void * dst, size_t size) {
            return kvf_read(ctx, seq, chunk, dst, size, &ticket);
        };
        const auto page_in = [&](int32_t chunk, const record & rec, size_t size, int32_t b) {
            block = b;
            return kvf_page_in(pool, own, chunk, rec.data(), size, &block);
        };
        const auto page_in_mask = [&](uint64_t mask) {
            memcpy(bad.data() + offsetof(kvf_record, mask), &mask, sizeof(mask));
            return page_in(in, bad, size, -1);
        };

        const struct {
            const char *         what;
            int                  status;
            std::function<int()> call;
        } calls[] = {
                {"decode: no context", KVF_E_ARGUMENT, [&] { return kvf_decode(nullptr, 0, n_past, token, 1, 1); }},
                {"decode: no tokens", KVF_E_ARGUMENT, [&] { return kvf_decode(pool, own, n_past, nullptr, 1, 1); }},
                {"decode: zero tokens", KVF_E_ARGUMENT, [&] { return kvf_decode(pool, own, n_past, token, 0, 1); }},
                {"decode: too many", KVF_E_ARGUMENT, [&] { return kvf_decode(pool, own, n_past, token, n_batch + 1, 1); }},
                {"decode: sequence", KVF_E_ARGUMENT, [&] { return kvf_decode(pool, seq, n_past, token, 1, 1); }},
                {"decode: position", KVF_E_ARGUMENT, [&] { return kvf_decode(pool, own, wild, token, 2, 1); }},
                {"decode: position taken", KVF_E_BACKEND, [&] { return kvf_decode(pool, own, rnd(n_past), token, 1, 1); }},
                {"decode: token", KVF_E_ARGUMENT, [&] { return kvf_decode(pool, own, n_past, alien + rnd(2), 1, 1); }},
                {"argmax: no context", KVF_E_ARGUMENT, [&] { return kvf_argmax(nullptr, -1, &many[0]); }},
                {"argmax: no place", KVF_E_ARGUMENT, [&] { return kvf_argmax(pool, -1, nullptr); }},
                {"top probability: no place", KVF_E_ARGUMENT, [&] { return kvf_top_probability(pool, -1, nullptr); }},
                {"seq_rm: sequence", KVF_E_ARGUMENT, [&] { return kvf_seq_rm(pool, seq, 0, -1); }},
                {"attn_seq_rm: sequence", KVF_E_ARGUMENT, [&] { return kvf_attn_seq_rm(pool, seq, 0, -1); }},
                {"info: no place", KVF_E_ARGUMENT, [&] { return kvf_get_pool_info(pool, nullptr); }},
                {"info: stock", KVF_E_ARGUMENT, [&] { return kvf_get_pool_info(mirror, &info); }},
                {"layer: number", KVF_E_ARGUMENT, [&] { return kvf_get_layer(pool, info.n_layer, &layer); }},
                {"blocks: number", KVF_E_ARGUMENT, [&] { return kvf_blocks(pool, ints, ints, ints, info.n_block - 1); }},
                {"block_of: sequence", KVF_E_ARGUMENT, [&] { return kvf_block_of(pool, seq, in, &block); }},
                {"block_of: chunk", KVF_E_ARGUMENT, [&] { return kvf_block_of(pool, own, wild, &block); }},
                {"read: sequence", KVF_E_ARGUMENT, [&] { return read_to(pool, seq, in, bad.data(), size); }},
                {"read: chunk", KVF_E_ARGUMENT, [&] { return read_to(pool, own, wild, bad.data(), size); }},
                {"read: size", KVF_E_ARGUMENT, [&] { return read_to(pool, own, in, bad.data(), size - 1); }},
                {"read: no place", KVF_E_ARGUMENT, [&] { return read_to(pool, own, in, nullptr, size); }},
                {"read: no ticket", KVF_E_ARGUMENT, [&] { return kvf_read(pool, own, in, bad.data(), size, nullptr); }},
                {"read: not resident", KVF_E_STATE, [&] { return read_to(pool, own, out, bad.data(), size); }},
                {"read: stock", KVF_E_ARGUMENT, [&] { return read_to(mirror, 0, in, bad.data(), size); }},
                {"drop: sequence", KVF_E_ARGUMENT, [&] { return kvf_drop(pool, seq, in); }},
                {"drop: chunk", KVF_E_ARGUMENT, [&] { return kvf_drop(pool, own, wild); }},
                {"drop: not resident", KVF_E_STATE, [&] { return kvf_drop(pool, own, out); }},
                {"drop: stock", KVF_E_ARGUMENT, [&] { return kvf_drop(mirror, 0, in); }},
                {"page_in: chunk", KVF_E_ARGUMENT, [&] { return page_in(wild, good, size, -1); }},
                {"page_in: size", KVF_E_RECORD, [&] { return page_in(in, good, rnd(size), -1); }},
                {"page_in: another chunk", KVF_E_RECORD, [&] { return page_in(out, good, size, -1); }},
                {"page_in: resident", KVF_E_STATE, [&] { return page_in(in, good, size, -1); }},
                {"page_in: nothing in it", KVF_E_RECORD, [&] { return page_in_mask(0); }},
                {"page_in: too much in it", n_chunk < 64 ? KVF_E_RECORD : KVF_E_STATE, [&] { return page_in_mask(~0ull); }},
                {"page_in: no block", KVF_E_ARGUMENT,
                        [&] { return kvf_page_in(pool, own, in, good.data(), size, nullptr); }},
                {"page_in: no record", KVF_E_ARGUMENT, [&] { return kvf_page_in(pool, own, in, nullptr, size, &block); }},
                {"wait: no context", KVF_E_ARGUMENT, [&] { return kvf_wait(nullptr, 0); }},
                {"wait: stock", KVF_E_ARGUMENT, [&] { return kvf_wait(mirror, rnd(2)); }},
                {"host_new: size", KVF_E_ARGUMENT, [&] { return kvf_host_new(pool, 0, &pinned); }},
                {"host_new: no place", KVF_E_ARGUMENT, [&] { return kvf_host_new(pool, size, nullptr); }},
                {"host_new: stock", KVF_E_ARGUMENT, [&] { return kvf_host_new(mirror, size, &pinned); }},
                {"time_copies: size", KVF_E_ARGUMENT, [&] { return kvf_time_copies(pool, 0, 1, true, &seconds); }},
                {"time_copies: none", KVF_E_ARGUMENT, [&] { return kvf_time_copies(pool, 1, 0, true, &seconds); }},
                {"time_copies: no place", KVF_E_ARGUMENT, [&] { return kvf_time_copies(pool, 1, 1, true, nullptr); }},
                {"time_copies: stock", KVF_E_ARGUMENT, [&] { return kvf_time_copies(mirror, 1, 1, true, &seconds); }},
                {"scribble: stock", KVF_E_ARGUMENT, [&] { return kvf_scribble(mirror, 0); }},
                {"q: size", KVF_E_ARGUMENT, [&] { return kvf_q(pool, 0, q.data(), n_q - 1, &ticket); }},
                {"q: too far back", KVF_E_ARGUMENT, [&] { return kvf_q(pool, cparams.n_seq_max, q.data(), n_q, &ticket); }},
                {"clear_seq: no context", KVF_E_ARGUMENT, [&] { return kvf_clear_seq(nullptr, 0); }},
                {"clear_seq: sequence", KVF_E_ARGUMENT, [&] { return kvf_clear_seq(pool, seq); }},
                {"decode_each: no context", KVF_E_ARGUMENT,
                        [&] { return kvf_decode_each(nullptr, &seq, &n_past, token, 1); }},
                {"decode_each: sequence", KVF_E_ARGUMENT, [&] { return kvf_decode_each(pool, &seq, &n_past, token, 1); }},
                {"decode_each: no sequences", KVF_E_ARGUMENT,
                        [&] { return kvf_decode_each(pool, nullptr, &n_past, token, 1); }},
                {"codes_info: sequence", KVF_E_ARGUMENT, [&] { return kvf_codes_info(pool, seq, &found); }},
                {"codes_put: layer", KVF_E_ARGUMENT,
                        [&] { return kvf_codes_put(pool, own, info.n_layer, 1, n_coded, &one, 1); }},
                {"codes_put: no records", KVF_E_ARGUMENT,
                        [&] { return kvf_codes_put(pool, own, 0, info.n_layer, n_coded, nullptr, 1); }},
                {"codes_cover: too far", KVF_E_ARGUMENT, [&] { return kvf_codes_cover(pool, own, n_coded + 1, &one, 1); }},
                {"codes_get: more than there is", KVF_E_ARGUMENT,
                        [&] { return kvf_codes_get(pool, own, 0, n_coded * n_chunk + KVF_UNIT, bad.data(), size); }},
                {"codes_get: size", KVF_E_ARGUMENT, [&] { return kvf_codes_get(pool, own, 0, 0, bad.data(), 1); }},
                {"codes_set: size", KVF_E_ARGUMENT, [&] { return kvf_codes_set(pool, own, 0, KVF_UNIT, bad.data(), 1); }},
                {"set_guests: too many", coarse ? KVF_E_NO_BLOCK : KVF_E_ARGUMENT,
                        [&] { return kvf_set_guests(pool, own, info.n_block, nullptr); }},
                {"set_guests: block in use", KVF_E_ARGUMENT, [&] { return kvf_set_guests(pool, own, 1, &used); }},
                {"place_guests: number", KVF_E_ARGUMENT, [&] { return kvf_place_guests(pool, own, ints, INT32_MAX); }},
                {"weight: no model", KVF_E_ARGUMENT, [&] { return kvf_get_weight(nullptr, 0, nullptr, nullptr, nullptr); }},
                {"quantize: no path", KVF_E_ARGUMENT, [&] { return kvf_quantize(nullptr, nullptr, nullptr); }},
                {"q: no place", KVF_E_ARGUMENT, [&] { return kvf_q(pool, 0, nullptr, n_q, &ticket); }},
                {"q: no ticket", KVF_E_ARGUMENT, [&] { return kvf_q(pool, 0, q.data(), n_q, nullptr); }},
                {"q: stock", KVF_E_ARGUMENT, [&] { return kvf_q(mirror, 0, q.data(), n_q, &ticket); }},
                {"add_rpc: no endpoint", KVF_E_ARGUMENT, [&] { return kvf_add_rpc(nullptr); }},
                {"add_rpc: not in this build", KVF_E_UNSUPPORTED, [&] { return kvf_add_rpc("127.0.0.1:1"); }},
        };
        for (const auto & call : calls) {
            expect_status(call.what, call.status, call.call());
        }
        // any byte of the head but the mask
        for (size_t i = 0; i < sizeof(kvf_record); ++i) {
            if (i - offsetof(kvf_record, mask) >= sizeof(kvf_record::mask)) {
                bad = good;
                bad[i] ^= 1 + rnd(255);
                expect_status("page_in: byte " + std::to_string(i), KVF_E_RECORD, page_in(in, bad, size, -1));
            }
        }
        // M-RoPE positions may jump
        if (!mrope) {
            const int32_t pos = n_past + 1 + rnd(N_CTX);
            expect_status("decode: position not next", KVF_E_BACKEND, kvf_decode(pool, own, pos, token, 1, 1));
        }
        // an evicted chunk, its record, a wrong block
        if (!evicted().empty()) {
            const auto & [chunk, rec] = *host.find(pick(evicted()));
            expect_status("page_in: block", KVF_E_ARGUMENT, page_in(chunk, rec, size, rnd(2) ? info.n_block : INT32_MAX));
            expect_status("page_in: used block", KVF_E_STATE, page_in(chunk, rec, size, block_of(in)));
        }
        done["wrong calls"]++;
    }

    //
    // steps
    //

    std::vector<llama_token> some_tokens(int32_t n) {
        std::vector<llama_token> res(n);
        std::generate(res.begin(), res.end(), [&] { return rnd(n_vocab); });
        return res;
    }

    std::vector<float> last_logits(llama_context * ctx) const {
        const float * row = llama_get_logits_ith(ctx, -1);
        return row ? std::vector<float>(row, row + n_vocab) : std::vector<float>();
    }

    using context = std::unique_ptr<llama_context, decltype(&llama_free)>;

    context paned() {
        const kvf_pane_params params  = {1 + rnd(3), 0, 1, 0};
        llama_context_params  cparams = this->cparams;
        cparams.n_batch = cparams.n_ubatch = llama_n_ubatch(mirror);

        llama_context * res = nullptr;
        expect_ok("paned context", kvf_context_new(model, &cparams, nullptr, &params, &res));
        return {res, llama_free};
    }

    // a prompt in uneven batches, its layers by turns in a few panes; once it goes back, and on with other tokens. two
    // contexts read it by turns, if records are all there is to hand over
    void panes() {
        clear();
        const bool        plain  = !hybrid && llama_model_n_swa(model) == 0;
        const context     ctxs[] = {paned(), paned()};
        const llama_token token  = 1;
        expect_status(
                "a paned context has batches of its own", KVF_E_ARGUMENT, kvf_decode(ctxs[0].get(), 0, 0, &token, 1, 1));

        std::list<record>   records;
        std::vector<void *> places;
        int32_t             pos    = 0;
        const int32_t       n_back = 4 + rnd(4);
        for (int32_t i = 0; i < 16; ++i) {
            if (i == n_back && plain) {
                pos = rnd(pos);
                expect_ok("back", kvf_seq_rm(mirror, 0, pos, -1));
                for (const auto & ctx : ctxs) {
                    expect_ok("back, in panes", kvf_attn_seq_rm(ctx.get(), 0, pos, -1));
                }
            }
            auto *        ctx   = ctxs[plain ? i / 2 % 2 : 0].get();
            const auto    batch = some_tokens(1 + rnd(llama_n_ubatch(mirror)));
            const int32_t n     = batch.size();
            while ((int32_t) places.size() * n_chunk < pos + n) {
                records.emplace_back(info.record_bytes, 0xee);
                places.push_back(records.back().data());
            }
            const uint32_t n_record = (pos + n + n_chunk - 1) / n_chunk;

            expect_ok("decode, stock", kvf_decode(mirror, 0, pos, batch.data(), n, 1));
            expect_ok("decode, in panes",
                    kvf_decode_exact(ctx, pool, 0, pos, batch.data(), n, 1, places.data(), n_record, info.record_bytes));
            expect_same("in panes", last_logits(mirror), last_logits(ctx));
            if (i < n_back && pos + n <= (int32_t) info.n_pool) {
                expect_ok("decode, pool", kvf_decode(pool, own, pos, batch.data(), n, 0));
                check_exact_records(places, (pos + n) / n_chunk);
            }
            pos += n;
        }
        expect_status("too few records", KVF_E_ARGUMENT,
                kvf_decode_exact(ctxs[0].get(), pool, 0, pos, &token, 1, 1, places.data(), 0, info.record_bytes));
        done["in panes"]++;
        clear();
    }

    // the first n are those that the pool writes
    void check_exact_records(const std::vector<void *> & places, int32_t n) {
        for (int32_t chunk = 0; chunk < n; ++chunk) {
            record   rec(info.record_bytes, 0x77);
            uint64_t ticket;
            expect_ok("read", kvf_read(pool, own, chunk, rec.data(), rec.size(), &ticket));
            expect_ok("wait", kvf_wait(pool, ticket));
            expect(!memcmp(rec.data(), places[chunk], rec.size()), "the record of a paned context is another one");
        }
    }

    // a stock cache puts the next tokens into the first free cells, the pool into the block of their chunk: so while the
    // mirror follows, chunks leave when the tail is full
    void make_room(int32_t n) {
        if (n_exact > 0 && n_past % n_chunk != 0) { decode(some_tokens(n_chunk - n_past % n_chunk), 1); }
        if (n_exact > 0 && n_fixed == 0) { check_layout(); }
        while (placed(n).empty() && !resident(true).empty()) {
            evict(pick(resident(true)));
        }
    }

    void step() {
        n_exact--;
        if (n_left % 8 == 0) { masses(); }
        if (n_left % 8 == 4) { closer(); }
        if (n_left-- == 0) { clear(); }
        if (rnd(4) == 0) { wait_for_some(); }
        if (coarse && n_past > 0) { codes(); }

        const uint32_t what = n_past > 0 ? rnd(100) : 0;

        if (what < 48) {
            const int32_t n = what % 2 ? 1 : 1 + rnd(what % 4 ? 8 : n_batch);
            if (placed(n).empty() && rnd(2)) { make_room(n); }
            decode(some_tokens(n), rnd(3));
        } else if (what < 56) {
            make_room(1 + rnd(n_batch));
            if (!resident(true).empty()) { evict(pick(resident(true))); }
        } else if (what < 61) {
            const int32_t pos = n_past - rnd(std::min(n_past + 1, what % 2 ? 5 : (coarse ? 8 : 2) * n_chunk));
            if (pos == 0 || (block_of((pos - 1) / n_chunk) >= 0 && (n_exact <= 0 || pos >= n_fixed))) { rollback(pos); }
        } else if (what < 70) {
            if (!evicted().empty()) { come_back(); }
        } else if (what < 76) {
            round_trip(n_exact > 0);
        } else if (what < 79 || (what < 82 && is_mirrored())) {
            again();
        } else if (what < 82) {
            partial(); // the mirror cannot follow
        } else if (what < 84) {
            scribble();
        } else if (what < 87) {
            pins = pins.size() < 2 ? std::set<int32_t>{tail(), pick(resident(false))} : std::set<int32_t>();
        } else if (what < 89) {
            decode_stopped();
        } else {
            wrong_call();
        }

        check();
    }
};

// false: the command line is wrong
static bool parse(int argc, char ** argv, settings & set) {
    static const std::map<std::string, ggml_type> types = {
            {"f16", GGML_TYPE_F16}, {"q8_0", GGML_TYPE_Q8_0}, {"q4_0", GGML_TYPE_Q4_0}};
    static const std::map<std::string, std::pair<uint32_t, uint32_t>> codes = {
            {"4", {4, 4}}, {"2", {2, 2}}, {"4,2", {4, 2}}, {"32", {32, 32}}};
    for (int i = 1; i < argc; ++i) {
        const std::string arg   = argv[i];
        const auto        value = [&] { return std::string(i + 1 < argc ? argv[++i] : ""); };

        if (arg == "--no-fa") {
            set.fa = false;
        } else if (arg == "--steps") {
            set.n_step = std::stoul(value());
        } else if (arg == "--seed") {
            set.seed = std::stoul(value());
        } else if (arg == "--type") {
            set.type = types.at(value());
        } else if (arg == "--coarse") {
            std::tie(set.coarse_k, set.coarse_v) = codes.at(value());
        } else if (arg[0] != '-' && set.path.empty()) {
            set.path = arg;
        } else {
            return false;
        }
    }
    return !set.path.empty();
}

int main(int argc, char ** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0); // a leak ends the process before buffers are written

    settings set;
    uint32_t n = 0;
    try {
        if (!parse(argc, argv, set)) {
            fprintf(stderr,
                    "usage: %s MODEL.gguf [--steps N] [--seed S] [--type f16|q8_0|q4_0] [--no-fa] [--coarse 4|2|4,2|32]\n",
                    argv[0]);
            return 2;
        }

        fuzz f;
        f.start(set);
        for (; n < set.n_step; ++n) {
            f.step();
        }
        f.coarse ? f.far() : f.panes();
        printf("%u steps, 0 failures:", n);
        for (const auto & [what, count] : f.done) {
            printf(" %s %d,", what.c_str(), count);
        }
        printf(" seed %u\n", set.seed);
    } catch (const std::exception & err) {
        printf("%u steps, 1 failure: %s, seed %u\n", n, err.what(), set.seed);
        return 1;
    }
    return 0;
}
