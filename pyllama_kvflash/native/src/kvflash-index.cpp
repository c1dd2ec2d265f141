// the index: keys in a few bits, see kvflash-fresh.h

#include "kvflash-fresh.h"
#include "kvflash-lanes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define KVF_AVX2 1
#endif

static constexpr uint32_t HALF     = kvf_index::GROUP / 2;
static constexpr uint32_t MOST_SUM = 65535; // sums of table entries are 16 bits wide

kvf_index::kvf_index(const kvf_layer & layer, const form & f) :
    n_head_kv(layer.n_head_kv), d(layer.n_embd_head_k), its(f), mean((size_t) n_head_kv * d),
    basis((size_t) n_head_kv * d * f.n_comp()), step((size_t) n_head_kv * f.n_comp(), 1.0f) {}

void kvf_index::fit(const float * mean, const float * basis, const float * step) {
    std::copy_n(mean, this->mean.size(), this->mean.begin());
    std::copy_n(basis, this->basis.size(), this->basis.begin());
    std::copy_n(step, this->step.size(), this->step.begin());
    codes.clear();
}

// for each nibble: its first component, and the bits of each
template <typename F> static void each_nibble(const kvf_index::form & f, const F & go) {
    uint32_t comp = 0, nibble = 0;
    for (const auto & [n, n_bit] : {std::make_pair(f.n_four, 4u), {f.n_two, 2u}, {f.n_one, 1u}}) {
        for (const uint32_t end = comp + n; comp < end; comp += 4 / n_bit) {
            go(nibble++, comp, n_bit);
        }
    }
}

// the middle of the codes of a component, which stands for 0
static float middle(uint32_t n_bit) { return 0.5f * ((1 << n_bit) - 1); }

//
// codes
//

// x (less mean, if there is one) in a basis [d][n]
KVF_CLONES
static void project(const float * x, const float * mean, const float * basis, uint32_t d, uint32_t n, float * res) {
    std::fill_n(res, n, 0.0f);
    for (uint32_t i = 0; i < d; ++i) {
        const float   a   = mean ? x[i] - mean[i] : x[i];
        const float * row = basis + (size_t) i * n;
        for (uint32_t j = 0; j < n; ++j) {
            res[j] += a * row[j];
        }
    }
}

void kvf_index::put(uint32_t pos, const float * keys, uint32_t n) {
    codes.resize(place(n_group(pos + n), 0));

    const uint32_t     n_comp = its.n_comp();
    std::vector<float> x(n_comp);
    for (uint32_t t = 0; t < n; ++t, ++pos) {
        const uint32_t shift = pos % GROUP < HALF ? 0 : 4;
        for (uint32_t h = 0; h < n_head_kv; ++h) {
            project(keys + ((size_t) t * n_head_kv + h) * d, mean.data() + (size_t) h * d,
                    basis.data() + (size_t) h * d * n_comp, d, n_comp, x.data());

            const float * steps = step.data() + (size_t) h * n_comp;
            uint8_t *     dst   = codes.data() + place(pos / GROUP, h) + pos % HALF;
            each_nibble(its, [&](uint32_t i, uint32_t comp, uint32_t n_bit) {
                uint32_t code = 0;
                for (uint32_t j = 0; j < 4 / n_bit; ++j) {
                    const float unit = steps[comp + j];
                    const float v    = unit > 0 ? roundf(x[comp + j] / unit + middle(n_bit)) : middle(n_bit);
                    code |= (uint32_t) std::clamp(v, 0.0f, 2 * middle(n_bit)) << (j * n_bit);
                }
                dst[i * 32] = (dst[i * 32] & ~(15 << shift)) | code << shift;
            });
        }
    }
}

//
// bytes
//

size_t kvf_index::size(const kvf_layer & layer, const form & f, uint32_t n) {
    const size_t each = layer.n_embd_head_k + (size_t) layer.n_embd_head_k * f.n_comp() + f.n_comp();
    return layer.n_head_kv * (each * sizeof(float) + (size_t) n_group(n) * f.n_nibble() * 32);
}

void kvf_index::get(uint32_t n, char * dst) const {
    for (const auto * part : {&mean, &basis, &step}) {
        memcpy(dst, part->data(), part->size() * sizeof(float));
        dst += part->size() * sizeof(float);
    }
    memcpy(dst, codes.data(), place(n_group(n), 0));
}

void kvf_index::set(uint32_t n, const char * src) {
    for (auto * part : {&mean, &basis, &step}) {
        memcpy(part->data(), src, part->size() * sizeof(float));
        src += part->size() * sizeof(float);
    }
    codes.resize(place(n_group(n), 0));
    memcpy(codes.data(), src, codes.size());
}

//
// products
//

// the value of each component of a nibble, for all 16 values of the nibble
struct nibble_values {
    lanes_f of[5][4] = {}; // [bits][component]

    nibble_values() {
        for (const uint32_t n_bit : {1, 2, 4}) {
            for (uint32_t j = 0; j < 4 / n_bit; ++j) {
                for (uint32_t code = 0; code < 16; ++code) {
                    of[n_bit][j][code] = (code >> (j * n_bit) & ((1 << n_bit) - 1)) - middle(n_bit);
                }
            }
        }
    }
};

// entries of a nibble's table. x: the query's factor for each of its components
KVF_CLONES
static void fill_table(const lanes_f * values, const float * x, uint32_t n, float least, float factor, uint8_t * dst) {
    lanes_f sum = lanes_f{} - least;
    for (uint32_t j = 0; j < n; ++j) {
        sum += values[j] * x[j];
    }
    sum = sum * factor + 0.5f;
    for (uint32_t code = 0; code < LANES; ++code) {
        dst[code] = (uint8_t) (int32_t) sum[code];
    }
}

// x: [n_comp], the query's components times the steps
static void make_tables(
        const float * x, const kvf_index::form & f, std::vector<uint8_t> & entries, float & base, float & unit) {
    static const nibble_values values;

    // components add up, so the least and the most of a nibble are those of its components
    static thread_local std::vector<float> reach;
    reach.resize(f.n_nibble());
    base       = 0;
    float most = 0;
    each_nibble(f, [&](uint32_t i, uint32_t comp, uint32_t n_bit) {
        float sum = 0;
        for (uint32_t j = 0; j < 4 / n_bit; ++j) {
            sum += fabsf(x[comp + j]);
        }
        reach[i] = sum * middle(n_bit);
        base -= reach[i];
        most = std::max(most, 2 * reach[i]);
    });
    unit = most > 0 ? most / std::min<uint32_t>(255, MOST_SUM / f.n_nibble()) : 1;

    entries.resize((size_t) f.n_nibble() * 16);
    each_nibble(f, [&](uint32_t i, uint32_t comp, uint32_t n_bit) {
        fill_table(values.of[n_bit], x + comp, 4 / n_bit, -reach[i], 1 / unit, entries.data() + (size_t) i * 16);
    });
}

// sums of the entries that a group's codes name, for N queries
template <uint32_t N>
static void add_entries(const uint8_t * codes, uint32_t n_nibble, const uint8_t * const * entries, uint16_t (*sums)[64]) {
    memset(sums, 0, N * sizeof(*sums));
    for (uint32_t i = 0; i < n_nibble; ++i, codes += 32) {
        for (uint32_t q = 0; q < N; ++q) {
            const uint8_t * table = entries[q] + (size_t) i * 16;
            for (uint32_t j = 0; j < HALF; ++j) {
                sums[q][j] += table[codes[j] & 15];
                sums[q][j + HALF] += table[codes[j] >> 4];
            }
        }
    }
}

#ifdef KVF_AVX2

// 32 sums of bytes. `both` was added to in pairs: the lower ones' sums carry into the upper ones, which `upper` has alone
__attribute__((target("avx2"), always_inline)) static inline void store(__m256i both, __m256i upper, uint16_t * dst) {
    const __m256i lower = _mm256_sub_epi16(both, _mm256_slli_epi16(upper, 8));
    const __m256i a = _mm256_unpacklo_epi16(lower, upper), b = _mm256_unpackhi_epi16(lower, upper);
    _mm256_storeu_si256((__m256i *) dst, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i *) (dst + 16), _mm256_permute2x128_si256(a, b, 0x31));
}

template <uint32_t N>
__attribute__((target("avx2"))) static void add_entries_avx2(
        const uint8_t * codes, uint32_t n_nibble, const uint8_t * const * entries, uint16_t (*sums)[64]) {
    const __m256i low = _mm256_set1_epi8(15);

    __m256i both[N][2], upper[N][2];
    for (uint32_t i = 0; i < 2 * N; ++i) {
        both[i / 2][i % 2] = upper[i / 2][i % 2] = _mm256_setzero_si256();
    }
    for (uint32_t i = 0; i < n_nibble; ++i) {
        const __m256i c      = _mm256_loadu_si256((const __m256i *) (codes + (size_t) i * 32));
        const __m256i half[] = {_mm256_and_si256(c, low), _mm256_and_si256(_mm256_srli_epi16(c, 4), low)};
        for (uint32_t q = 0; q < N; ++q) {
            const __m256i table =
                    _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) (entries[q] + (size_t) i * 16)));
            for (uint32_t j = 0; j < 2; ++j) {
                const __m256i x = _mm256_shuffle_epi8(table, half[j]);
                both[q][j]      = _mm256_add_epi16(both[q][j], x);
                upper[q][j]     = _mm256_add_epi16(upper[q][j], _mm256_srli_epi16(x, 8));
            }
        }
    }
    for (uint32_t q = 0; q < N; ++q) {
        store(both[q][0], upper[q][0], sums[q]);
        store(both[q][1], upper[q][1], sums[q] + HALF);
    }
}

#endif

using adder = void (*)(const uint8_t *, uint32_t, const uint8_t * const *, uint16_t (*)[64]);

template <uint32_t N> static adder best_adder() {
#ifdef KVF_AVX2
    if (__builtin_cpu_supports("avx2")) { return add_entries_avx2<N>; }
#endif
    return add_entries<N>;
}

void kvf_index::products(uint32_t head, const float * const * q, uint32_t n_q, uint32_t n, logits * res) const {
    static const adder one = best_adder<1>(), two = best_adder<2>();

    static thread_local std::vector<uint8_t> made[2];
    static thread_local std::vector<float>   x;

    const uint32_t  n_comp = its.n_comp();
    const uint8_t * entries[2];
    x.resize(n_comp);
    for (uint32_t i = 0; i < n_q; ++i) {
        project(q[i], nullptr, basis.data() + (size_t) head * d * n_comp, d, n_comp, x.data());
        for (uint32_t j = 0; j < n_comp; ++j) {
            x[j] *= step[(size_t) head * n_comp + j];
        }
        make_tables(x.data(), its, made[i], res[i].base, res[i].unit);
        entries[i] = made[i].data();
        for (uint32_t j = 0; j < d; ++j) {
            res[i].base += q[i][j] * mean[(size_t) head * d + j];
        }
        res[i].sums.resize((size_t) n_group(n) * GROUP);
    }

    uint16_t sums[2][GROUP];
    for (uint32_t g = 0; g < n_group(n); ++g) {
        const uint8_t * from = codes.data() + place(g, head);
        (n_q == 2 ? two : one)(from, its.n_nibble(), entries, sums);
        for (uint32_t i = 0; i < n_q; ++i) {
            memcpy(res[i].sums.data() + (size_t) g * GROUP, sums[i], sizeof(sums[i]));
        }
    }
}

//
// what a basis is made from
//

KVF_CLONES
static void add_product(const float * x, uint32_t d, float * cov) {
    for (uint32_t i = 0; i < d; ++i) {
        const float a = x[i];
        for (uint32_t j = 0; j < d; ++j) {
            cov[(size_t) i * d + j] += a * x[j];
        }
    }
}

void kvf_index::moments(
        const kvf_layer & layer, uint32_t n_chunk, const void * const * records, uint32_t n, float * mean, float * cov) {
    const uint32_t d = layer.n_embd_head_k, n_head = layer.n_head_kv;
    const uint32_t every = (n * n_chunk + MOST_SAMPLES - 1) / MOST_SAMPLES, n_all = (n * n_chunk + every - 1) / every;

    std::vector<float> keys((size_t) n_chunk * layer.n_embd_k), samples;
    samples.reserve((size_t) n_all * layer.n_embd_k);
    for (uint32_t c = 0, at = 0; c < n; ++c) {
        kvf_rows_to_float(layer, n_chunk, (const char *) records[c] + layer.offs_k, keys.data());
        for (uint32_t t = 0; t < n_chunk; ++t, ++at) {
            const float * row = keys.data() + (size_t) t * layer.n_embd_k;
            if (at % every == 0) { samples.insert(samples.end(), row, row + layer.n_embd_k); }
        }
    }

    std::vector<double> sum(layer.n_embd_k);
    for (size_t i = 0; i < samples.size(); ++i) {
        sum[i % layer.n_embd_k] += samples[i];
    }
    for (uint32_t i = 0; i < layer.n_embd_k; ++i) {
        mean[i] = sum[i] / n_all;
    }

    std::vector<float> x(d);
    std::fill_n(cov, (size_t) n_head * d * d, 0.0f);
    for (uint32_t t = 0; t < n_all; ++t) {
        for (uint32_t h = 0; h < n_head; ++h) {
            for (uint32_t i = 0; i < d; ++i) {
                x[i] = samples[((size_t) t * n_head + h) * d + i] - mean[(size_t) h * d + i];
            }
            add_product(x.data(), d, cov + (size_t) h * d * d);
        }
    }
    for (size_t i = 0; i < (size_t) n_head * d * d; ++i) {
        cov[i] /= n_all;
    }
}
