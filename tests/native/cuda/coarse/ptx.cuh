#pragma once

// the functions of coarse/ptx.cuh on the CPU

static uint4 read_words(const uint8_t * at) { return *(const uint4 *) at; }
static uint2 read_scales(const uint16_t * at) { return *(const uint2 *) at; }
static void  fetch_early(const void *, uint32_t) {}

// nothing is copied before it is waited for
static auto & all_copies() { return fibers::now->threads[fibers::now->now]->copies; }

template <uint32_t SIZE> static void copy_piece(void * dst, const void * src) {
    all_copies().back().push_back({dst, src, SIZE});
}

static void copies_begun() { all_copies().emplace_back(); }

template <uint32_t N> static void landed() {
    auto & groups = all_copies();
    while (groups.size() > N + 1) {
        for (const auto & c : groups.front()) {
            memcpy(c.dst, c.src, c.size);
        }
        groups.erase(groups.begin());
    }
}

// the operands of a product, as all lanes have them: [lane][a0 ... a3, b.x, b.y]
static const uint32_t (&operands(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b))[32][6] {
    auto &         own   = *fibers::now;
    auto &         w     = own.warps[own.now / 32];
    const uint32_t round = w.here.round % 2, mine[] = {a0, a1, a2, a3, b.x, b.y};
    memcpy(w.words[round][own.now % 32], mine, sizeof(mine));
    fibers::wait(w.here, own.now / 32 * 32, w.here.n);
    return w.words[round];
}

// words have n_value values each, of which value(word, k) is one
template <typename T, typename F>
static void multiply_by(T (&d)[4], const uint32_t (&words)[32][6], uint32_t n_value, const F & value) {
    const uint32_t lane = fibers::now->now % 32;
    for (uint32_t i = 0; i < 4; ++i) {
        for (uint32_t k = 0; k < 8 * n_value; ++k) {
            const uint32_t half = k / (4 * n_value), t = k % (4 * n_value) / n_value;
            d[i] += value(words[lane / 4 * 4 + t][i / 2 + half * 2], k % n_value) *
                    value(words[(lane % 4 * 2 + i % 2) * 4 + t][4 + half], k % n_value);
        }
    }
}

static void multiply(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
    multiply_by(d, operands(a0, a1, a2, a3, b), 4, [](uint32_t word, uint32_t k) { return (int8_t) (word >> 8 * k); });
}

static void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
    multiply_by(d, operands(a0, a1, a2, a3, b), 2,
            [](uint32_t word, uint32_t k) { return GGML_FP16_TO_FP32((uint16_t) (word >> 16 * k)); });
}

// a matrix of 8 rows of 8 halves, of which a lane has two of a row
static uint32_t turned(uint32_t its) {
    const auto &   words = operands(its, 0, 0, 0, {0, 0});
    const uint32_t row = fibers::now->now % 32 / 4, column = fibers::now->now % 4 * 2;
    const auto     half = [&](uint32_t r) { return words[r * 4 + row / 2][0] >> row % 2 * 16 & 65535; };
    return half(column) | half(column + 1) << 16;
}
