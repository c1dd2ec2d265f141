#pragma once

// choosing guests by their keys, and fetching them, within a kernel

#include "guests/ask.cuh"

//
// choose
//

static constexpr uint32_t FEW = 1024; // the least room for pairs to sort: up to so many are sorted without a selection

struct choose_memory {
    uint32_t hist[2048];
    uint32_t n, bin, above;
};

static KVF_BOTH uint32_t n_list(const kvf_gpu_layer & p) { return p.n_slot > FEW ? p.n_slot : FEW; }

static size_t choose_size(const kvf_gpu_layer & p) {
    return sizeof(choose_memory) + (n_list(p) + 2 * p.n_slot) * sizeof(kvf_pair) + p.n_slot * sizeof(int32_t);
}

// Return the k-th largest of n keys, of which at least k are above 0. above: the number of larger ones. If `only` is not 0,
// select among the numbers (from 1) of the keys that equal it, rather than among the keys. A radix select, by 11, 11 and 10
// bits
static __device__ __noinline__ uint32_t kth(
        const int32_t * keys, int32_t only, uint32_t n, uint32_t k, choose_memory & m, uint32_t & above) {
    uint32_t prefix = 0, mask = 0;
    above = 0;
#pragma unroll 1
    for (const uint32_t shift : {21, 10, 0}) {
        const uint32_t all = shift ? 2047 : 1023;
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < 2048; i += THREADS) {
            m.hist[i] = 0;
        }
        __syncthreads();
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
            const uint32_t x = only ? (keys[i] == only ? i + 1 : 0) : max(keys[i], 0);
            if (x && (x & mask) == prefix) { atomicAdd(&m.hist[x >> shift & all], 1); }
        }
        __syncthreads();
        if (threadIdx.x < 32) { // a lane takes 64 bins, the first lane the highest
            const uint32_t top = 2048 - 64 * threadIdx.x;
            uint32_t       sum = 0;
#pragma unroll 1
            for (uint32_t i = 1; i <= 64; ++i) {
                sum += m.hist[top - i];
            }
            uint32_t before = above + sum;
#pragma unroll 1
            for (int i = 1; i < 32; i *= 2) {
                const uint32_t x = __shfl_up_sync(~0u, before, i);
                if ((int) threadIdx.x >= i) { before += x - above; }
            }
            before -= sum;
#pragma unroll 1
            for (uint32_t i = 1; i <= 64; ++i) {
                const uint32_t x = m.hist[top - i];
                if (before < k && before + x >= k) {
                    m.bin   = top - i;
                    m.above = before;
                }
                before += x;
            }
        }
        __syncthreads();
        above = m.above;
        prefix |= m.bin << shift;
        mask |= all << shift;
        __syncthreads();
    }
    return prefix;
}

// Collect the keys that are larger than `last`, or equal to it and at index `from` or later, in no order, and as many as
// there is room for. tops: the largest of every `each` keys. Returns the number of such keys
static __device__ __noinline__ uint32_t gather(const int32_t * keys, const int32_t * tops, uint32_t each, uint32_t n,
        int32_t last, uint32_t from, kvf_pair * to, uint32_t room, choose_memory & m) {
    if (threadIdx.x == 0) { m.n = 0; }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i * each < n; i += THREADS) {
        if (tops[i] < last) { continue; }
#pragma unroll 1
        for (uint32_t j = i * each; j < min(n, (i + 1) * each); ++j) {
            const int32_t x = keys[j];
            if (x < last || (x == last && j < from)) { continue; }
            const uint32_t at = atomicAdd(&m.n, 1);
            if (at < room) { to[at] = {(uint32_t) x, j}; }
        }
    }
    __syncthreads();
    return m.n;
}

// Return a bound that at least k of n keys reach, and few more; 1 if fewer than k are above 0. Each thread finds the largest
// of its keys, and the bound is found bit by bit among these
static __device__ __noinline__ int32_t reached(const int32_t * keys, uint32_t n, uint32_t k) {
    int32_t mine = 0, bound = 0;
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        mine = max(mine, keys[i]);
    }
#pragma unroll 1
    for (int32_t bit = 1 << 30; bit; bit /= 2) {
        const uint32_t found = __syncthreads_count(mine >= (bound | bit));
        if (found < k) { continue; }
        bound |= bit;
        if (found < k + k / 4 + 8) { break; } // close enough
    }
    return max(bound, 1);
}

// Write the k largest of n keys to `to`, in descending order; of equal ones the last comes first. Only keys above 0 count.
// tops: the largest of every `each` keys. list: scratch for `room` pairs, at least k. Returns the number of keys written
static __device__ __noinline__ uint32_t largest(const int32_t * keys, const int32_t * tops, uint32_t each, uint32_t n,
        uint32_t k, kvf_pair * list, uint32_t room, kvf_pair * to, choose_memory & m) {
    if (k == 0) { return 0; }
    const int32_t bound = n <= THREADS ? 1 : reached(tops, (n + each - 1) / each, k); // few keys need no bound
    uint32_t      found = gather(keys, tops, each, n, bound, 0, list, room, m);
    if (found > room) { // too many reach the bound, perhaps because they are equal
        uint32_t       above, more;
        const int32_t  last = kth(keys, 0, n, k, m, above);
        const uint32_t from = kth(keys, last, n, k - above, m, more) - 1;
        found               = gather(keys, tops, each, n, last, from, list, room, m);
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < found; i += THREADS) {
        const kvf_pair mine = list[i];
        uint32_t       rank = 0;
#pragma unroll 4
        for (uint32_t j = 0; j < found; ++j) {
            const kvf_pair x = list[j];
            rank += x.key > mine.key || (x.key == mine.key && x.what > mine.what);
        }
        if (rank < k) { to[rank] = mine; }
    }
    __syncthreads();
    return min(found, k);
}

// Copy a sequence's table to shared memory, without guests in invisible slots and guests that have become common, and set a
// bit for each unit that the pool has. Returns the number of free slots. All blocks of the sequence read its table before
// one writes it
static __device__ uint32_t read_guests(const kvf_gpu_layer & p, const asked & ask, uint32_t seq) {
    int32_t * const  table  = &shared<int32_t>(places(p).table);
    uint32_t * const taken  = &shared<uint32_t>(places(p).taken);
    uint32_t &       n      = work<uint32_t>(p);
    const uint32_t   n_unit = ask.seq(seq)[kvf_gpu_ask::N_UNIT], n_fill = ask.seq(seq)[kvf_gpu_ask::N_FILL];

    __syncthreads();
    if (threadIdx.x == 0) { n = n_fill; }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < (n_unit + 31) / 32; i += THREADS) {
        taken[i] = ask.bits(seq)[i];
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t slot = threadIdx.x; slot < p.n_slot; slot += THREADS) {
        const uint32_t unit = p.guests[seq].table[slot];
        const bool     is   = slot < n_fill && unit < n_unit && !(ask.bits(seq)[unit / 32] >> unit % 32 & 1);
        table[slot]         = is ? (int32_t) unit : -1;
        if (is) {
            atomicOr(&taken[unit / 32], 1u << unit % 32);
            atomicAdd(&n, ~0u);
        }
    }
    __syncthreads();
    const uint32_t res = n;
    __syncthreads();
    return res;
}

// Choose the units to fetch, and their slots: fill free slots, or if there are none, exchange guests for units with a larger
// share. moves: set to the moves, in shared memory. Returns their number
static __device__ uint32_t choose(
        const kvf_gpu_layer & p, const asked & ask, uint32_t seq, uint32_t n_free, const kvf_move *& moves) {
    auto &           m      = work<choose_memory>(p);
    kvf_pair * const list   = &work<kvf_pair>(p, sizeof(choose_memory));
    kvf_pair * const in     = list + n_list(p);
    kvf_pair * const out    = in + p.n_slot;
    int32_t * const  goes   = (int32_t *) (out + p.n_slot);
    const int32_t *  table  = &shared<int32_t>(places(p).table);
    const uint32_t   n_unit = ask.seq(seq)[kvf_gpu_ask::N_UNIT], n_fill = ask.seq(seq)[kvf_gpu_ask::N_FILL];
    const int32_t *  keys = keys_of(p, seq), *tops = tops_of(p, seq);

    // keys of slots: if any are free, only these have one, the first slot the largest. otherwise, the smaller the key of a
    // guest, the larger the key of its slot
#pragma unroll 1
    for (uint32_t slot = threadIdx.x; slot < n_fill; slot += THREADS) {
        const int32_t unit = table[slot];
        goes[slot]         = n_free ? (unit < 0 ? n_fill - slot : 0) : LAST - (keys[unit] & LAST);
    }
    const uint32_t n_most = n_free ? n_free : min(p.n_exchange, p.n_slot);
    const uint32_t n_in   = largest(keys, tops, TILE, n_unit, n_most, list, n_list(p), in, m);
    const uint32_t n_out  = largest(goes, goes, 1, n_fill, n_in, list, n_list(p), out, m);

    if (threadIdx.x == 0) { m.n = 0; }
    __syncthreads();
    kvf_move * const to = (kvf_move *) list;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < min(n_in, n_out); i += THREADS) {
        if (!n_free && in[i].key <= LAST - out[i].key) { continue; } // this unit, and all after it, are no better
        to[i] = {out[i].what, in[i].what};
        atomicAdd(&m.n, 1);
    }
    __syncthreads();
    moves = to;
    return m.n;
}

//
// fetch: from records in host memory
//

// copy a piece of a unit's rows, by one warp
static __device__ __noinline__ void fetch_piece(
        const kvf_gpu_rows & r, const char * rec, uint32_t part, uint32_t cell, uint64_t from) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t n    = min((uint64_t) kvf_gpu_rows::PIECE, r.size * r.n_run - from);
    if (r.n_run == 1) {
        copy_bytes(r.data + (uint64_t) cell / UNIT * r.size + from, rec + r.offs + part * r.size + from, n, lane, 32);
        return;
    }
    // transposed: the positions of an element are adjacent
#pragma unroll 1
    for (uint32_t i = from / 4 + lane; i < (uint32_t) (from + n) / 4; i += 32) {
        const uint32_t each = r.size / 4, run = i / each, word = i % each;
        ((uint32_t *) (r.data + run * r.stride + cell / UNIT * r.size))[word] =
                ((const uint32_t *) (rec + r.offs + run * r.stride_rec + part * r.size))[word];
    }
}

// fetch the units in `moves`. this is warp number `warp` of n_warp, which share the work
static __device__ void fetch(const kvf_gpu_layer & p, uint32_t seq, const int32_t * blocks, const kvf_move * moves,
        uint32_t n_move, uint32_t warp, uint32_t n_warp) {
    const auto n_piece = [](const kvf_gpu_rows & r) -> uint32_t {
        return (r.size * r.n_run + kvf_gpu_rows::PIECE - 1) / kvf_gpu_rows::PIECE;
    };
    const uint32_t each = p.n_chunk / UNIT, n_k = n_piece(p.k), n_both = n_k + n_piece(p.v);
#pragma unroll 1
    for (uint32_t i = warp; i < n_move * n_both; i += n_warp) {
        const auto [slot, unit] = moves[i / n_both];
        const uint32_t piece = i % n_both, cell = blocks[slot / each] * p.n_chunk + slot % each * UNIT;
        const char *   rec = p.guests[seq].records[unit / each];
        if (piece < n_k) {
            fetch_piece(p.k, rec, unit % each, cell, (uint64_t) piece * kvf_gpu_rows::PIECE);
        } else {
            fetch_piece(p.v, rec, unit % each, cell, (uint64_t) (piece - n_k) * kvf_gpu_rows::PIECE);
        }
    }
}

//
// exchange
//

// A barrier of all blocks of a grid. What a block wrote before arrive() is visible to all after wait(). Its counters are in
// device memory, and serve one grid after another, of any size
struct meeting {
    const kvf_gpu_layer & p;
    uint32_t              n_block;
    uint32_t              n_over; // barriers passed before this one

    __device__ void arrive() {
        __syncthreads();
        if (threadIdx.x == 0) {
            n_over = *(volatile uint32_t *) p.n_met;
            __threadfence();
            if (atomicAdd(p.n_arrived, 1u) + 1 == n_block) {
                *p.n_arrived = 0;
                __threadfence();
                atomicAdd(p.n_met, 1u);
            }
        }
    }

    __device__ void wait() const {
        if (threadIdx.x == 0) {
            while (*(volatile uint32_t *) p.n_met == n_over) {
                __nanosleep(20);
            }
            __threadfence();
        }
        __syncthreads();
    }
};

// return the number of sequences that have guests. which: the i-th of them
static __device__ uint32_t n_choosing(const kvf_gpu_layer & p, const asked & ask, uint32_t i, uint32_t & which) {
    uint32_t n = 0;
#pragma unroll 1
    for (uint32_t seq = 0; seq < p.ask.n_seq; ++seq) {
        if (ask.seq(seq)[kvf_gpu_ask::N_FILL] <= 0) { continue; }
        if (n++ == i) { which = seq; }
    }
    return n;
}

// Choose the guests of n sequences by the shares of units, and fetch them. n_part: the parts of each head's sums. All blocks
// of a sequence make the same choice, so that each knows at once which units it has to fetch
static __device__ void exchange(const kvf_gpu_layer & p, const asked & ask, uint32_t n, uint32_t n_part, meeting & meet) {
    // each block takes several sequences, or each sequence has several blocks
    const uint32_t n_first = min(n, meet.n_block), rank = blockIdx.x / n_first;
    const uint32_t n_block = (meet.n_block - blockIdx.x % n_first + n_first - 1) / n_first;
    uint32_t       seq     = 0;
    const auto     begin   = [&](uint32_t i) {
        n_choosing(p, ask, i, seq);
        return read_guests(p, ask, seq);
    };
    uint32_t n_free = begin(blockIdx.x % n_first);
#pragma unroll 1
    for (uint32_t i = blockIdx.x % n_first; i < n; i += n_first) {
        if (n > n_first) { begin(i); }
        add_shares(p, ask, seq, n_part, &shared<uint32_t>(places(p).taken), rank, n_block);
    }
    meet.arrive();
    meet.wait();
#pragma unroll 1
    for (uint32_t i = blockIdx.x % n_first; i < n; i += n_first) {
        if (n > n_first) { n_free = begin(i); }

        const kvf_move * moves;
        const uint32_t   n_move = choose(p, ask, seq, n_free, moves);
        if (rank == 0) {
            int32_t * table = p.guests[seq].table;
#pragma unroll 1
            for (uint32_t slot = threadIdx.x; slot < p.n_slot; slot += THREADS) {
                table[slot] = shared<int32_t>(places(p).table + slot * sizeof(int32_t));
            }
            __syncthreads();
#pragma unroll 1
            for (uint32_t j = threadIdx.x; j < n_move; j += THREADS) {
                table[moves[j].slot] = moves[j].unit;
            }
            if (threadIdx.x == 0) { atomicAdd((unsigned long long *) p.n_fetched, n_move); }
        }
        fetch(p, seq, ask.blocks(seq), moves, n_move, threadIdx.x / 32 * n_block + rank, n_block * WARPS);
        __syncthreads();
    }
}

// the shared memory of a block, in bytes
static size_t shared_size(const kvf_gpu_layer & p) {
    return GGML_PAD(places(p).work + std::max(score_size(p), choose_size(p)), 16);
}
