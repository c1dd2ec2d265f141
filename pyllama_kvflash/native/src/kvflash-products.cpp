// products with codes, see kvflash-codes.h

#include "kvflash-codes.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define KVF_X86 1
#endif

// where the codes of a head's units are, one after the other, and how they are unpacked
struct packed {
    const uint8_t * at;
    size_t          stride; // of a unit
    uint32_t        n_unit, n_bit, width;

    uint32_t each() const { return 8 / n_bit; } // values in a byte
    uint32_t n_quad() const { return width / 4; }
};

static constexpr uint32_t QUAD = kvf_codes::QUAD;

static void unpack(const packed & p, const uint8_t * unit, uint32_t quad, uint8_t * codes) {
    const uint8_t * from  = unit + quad / p.each() * QUAD;
    const uint32_t  shift = quad % p.each() * p.n_bit, mask = (1 << p.n_bit) - 1;
    for (uint32_t i = 0; i < QUAD; ++i) {
        codes[i] = from[i] >> shift & mask;
    }
}

template <uint32_t N> static void key_any(const packed & p, const int8_t * q, int32_t * res) {
    uint8_t codes[QUAD];
    for (uint32_t u = 0; u < p.n_unit; ++u, res += N * LANES) {
        int32_t sums[N][LANES] = {};
        for (uint32_t quad = 0; quad < p.n_quad(); ++quad) {
            unpack(p, p.at + u * p.stride, quad, codes);
            for (uint32_t i = 0; i < N; ++i) {
                const int8_t * x = q + (size_t) i * p.width + quad * 4;
                for (uint32_t l = 0; l < LANES; ++l) {
                    sums[i][l] += codes[l * 4] * x[0] + codes[l * 4 + 1] * x[1] + codes[l * 4 + 2] * x[2] +
                                  codes[l * 4 + 3] * x[3];
                }
            }
        }
        memcpy(res, sums, sizeof(sums));
    }
}

template <uint32_t N> static void value_any(const packed & p, const int8_t * w, int32_t * res) {
    uint8_t codes[QUAD];
    std::fill_n(res, (size_t) N * p.width, 0);
    for (uint32_t u = 0; u < p.n_unit; ++u) {
        for (uint32_t quad = 0; quad < p.n_quad(); ++quad) {
            unpack(p, p.at + u * p.stride, quad, codes);
            for (uint32_t i = 0; i < N; ++i) {
                const int8_t * its = w + ((size_t) u * N + i) * QUAD;
                for (uint32_t l = 0; l < LANES; ++l) {
                    for (uint32_t k = 0; k < 4; ++k) {
                        res[i * p.width + quad * 4 + k] += codes[l * 4 + k] * its[l / 4 * 16 + l % 4];
                    }
                }
            }
        }
    }
}

#ifdef KVF_X86

static uint32_t four_at(const int8_t * x) {
    uint32_t res;
    memcpy(&res, x, sizeof(res));
    return res;
}

#define KVF_VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))

template <uint32_t N> KVF_VNNI static void key_vnni(const packed & p, const int8_t * q, int32_t * res) {
    const __m512i mask = _mm512_set1_epi8((1 << p.n_bit) - 1);
    for (uint32_t u = 0; u < p.n_unit; ++u, res += N * LANES) {
        const uint8_t * from = p.at + u * p.stride;
        __m512i         sums[N];
        for (uint32_t i = 0; i < N; ++i) {
            sums[i] = _mm512_setzero_si512();
        }
        for (uint32_t quad = 0; quad < p.n_quad(); from += QUAD) {
            __m512i c = _mm512_loadu_si512(from);
            for (uint32_t end = quad + p.each(); quad < end; ++quad, c = _mm512_srli_epi16(c, p.n_bit)) {
                const __m512i codes = _mm512_and_si512(c, mask);
                for (uint32_t i = 0; i < N; ++i) {
                    sums[i] = _mm512_dpbusd_epi32(sums[i], codes, _mm512_set1_epi32(four_at(q + i * p.width + quad * 4)));
                }
            }
        }
        for (uint32_t i = 0; i < N; ++i) {
            _mm512_storeu_si512(res + i * LANES, sums[i]);
        }
    }
}

// four positions of a value side by side, rather than four values of a position
#define KVF_TURNED 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15

template <uint32_t N> KVF_VNNI static void value_vnni(const packed & p, const int8_t * w, int32_t * res) {
    const __m512i turn = _mm512_broadcast_i32x4(_mm_setr_epi8(KVF_TURNED));
    const __m512i mask = _mm512_set1_epi8((1 << p.n_bit) - 1);
    for (uint32_t quad = 0; quad < p.n_quad(); ++quad) {
        const uint8_t * from  = p.at + quad / p.each() * QUAD;
        const uint32_t  shift = quad % p.each() * p.n_bit;
        __m512i         sums[N];
        for (uint32_t i = 0; i < N; ++i) {
            sums[i] = _mm512_setzero_si512();
        }
        for (uint32_t u = 0; u < p.n_unit; ++u) {
            const __m512i c     = _mm512_srli_epi16(_mm512_loadu_si512(from + u * p.stride), shift);
            const __m512i codes = _mm512_shuffle_epi8(_mm512_and_si512(c, mask), turn);
            for (uint32_t i = 0; i < N; ++i) {
                sums[i] = _mm512_dpbusd_epi32(sums[i], codes, _mm512_loadu_si512(w + (u * N + i) * QUAD));
            }
        }
        for (uint32_t i = 0; i < N; ++i) {
            const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums[i]), _mm512_extracti64x4_epi64(sums[i], 1));
            const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
            _mm_storeu_si128((__m128i *) (res + i * p.width + quad * 4), four);
        }
    }
}

#define KVF_AVX2 __attribute__((target("avx2")))

// sums of four products of bytes: 2*15*127 is less than 2^15
KVF_AVX2 static inline __m256i add_fours(__m256i sums, __m256i codes, __m256i x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}

KVF_AVX2 static inline __m256i codes_at(const uint8_t * from, uint32_t shift, __m256i mask) {
    return _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i *) from), shift), mask);
}

template <uint32_t N> KVF_AVX2 static void key_avx2(const packed & p, const int8_t * q, int32_t * res) {
    const __m256i mask = _mm256_set1_epi8((1 << p.n_bit) - 1);
    for (uint32_t u = 0; u < p.n_unit; ++u, res += N * LANES) {
        for (uint32_t half = 0; half < 2; ++half) { // of the positions: the sums of all are more than there are registers
            __m256i sums[N];
            for (uint32_t i = 0; i < N; ++i) {
                sums[i] = _mm256_setzero_si256();
            }
            for (uint32_t quad = 0; quad < p.n_quad(); ++quad) {
                const __m256i codes =
                        codes_at(p.at + u * p.stride + quad / p.each() * QUAD + half * 32, quad % p.each() * p.n_bit, mask);
                for (uint32_t i = 0; i < N; ++i) {
                    sums[i] = add_fours(sums[i], codes, _mm256_set1_epi32(four_at(q + i * p.width + quad * 4)));
                }
            }
            for (uint32_t i = 0; i < N; ++i) {
                _mm256_storeu_si256((__m256i *) (res + i * LANES + half * 8), sums[i]);
            }
        }
    }
}

template <uint32_t N> KVF_AVX2 static void value_avx2(const packed & p, const int8_t * w, int32_t * res) {
    const __m256i turn = _mm256_broadcastsi128_si256(_mm_setr_epi8(KVF_TURNED));
    const __m256i mask = _mm256_set1_epi8((1 << p.n_bit) - 1);
    for (uint32_t quad = 0; quad < p.n_quad(); ++quad) {
        __m256i sums[N];
        for (uint32_t i = 0; i < N; ++i) {
            sums[i] = _mm256_setzero_si256();
        }
        for (uint32_t u = 0; u < p.n_unit; ++u) {
            for (uint32_t half = 0; half < 2; ++half) {
                const __m256i codes = _mm256_shuffle_epi8(
                        codes_at(p.at + u * p.stride + quad / p.each() * QUAD + half * 32, quad % p.each() * p.n_bit, mask),
                        turn);
                for (uint32_t i = 0; i < N; ++i) {
                    const auto * x = (const __m256i *) (w + (u * N + i) * QUAD + half * 32);
                    sums[i]        = add_fours(sums[i], codes, _mm256_loadu_si256(x));
                }
            }
        }
        for (uint32_t i = 0; i < N; ++i) {
            const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums[i]), _mm256_extracti128_si256(sums[i], 1));
            _mm_storeu_si128((__m128i *) (res + i * p.width + quad * 4), four);
        }
    }
}

#endif

static lanes_f floats_at(const uint8_t * unit, uint32_t i) {
    lanes_f res;
    memcpy(&res, unit + i * sizeof(res), sizeof(res));
    return res;
}

void kvf_codes::exact_products(uint32_t head, uint32_t first, uint32_t n_unit, const float * query, float * res) const {
    for (uint32_t u = 0; u < n_unit; ++u) {
        lanes_f sum = {};
        for (uint32_t i = 0; i < width; ++i) {
            sum += floats_at(unit(first + u, head), i) * query[i];
        }
        memcpy(res + (size_t) u * LANES, &sum, sizeof(sum));
    }
}

void kvf_codes::exact_sum(uint32_t head, uint32_t u, const float * weights, float factor, float * res) const {
    const lanes_f w = floats_at((const uint8_t *) weights, 0) * factor;
    for (uint32_t i = 0; i < width; ++i) {
        res[i] += sum_lanes(floats_at(unit(u, head), i) * w);
    }
}

using product = void (*)(const packed &, const int8_t *, int32_t *);

struct products {
    product key, value;
};

template <uint32_t N> static products best() {
#ifdef KVF_X86
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")) { return {key_vnni<N>, value_vnni<N>}; }
    if (__builtin_cpu_supports("avx2")) { return {key_avx2<N>, value_avx2<N>}; }
#endif
    return {key_any<N>, value_any<N>};
}

static const products & best_of(uint32_t N) {
    static const products all[] = {best<1>(), best<2>(), best<3>(), best<4>(), best<5>(), best<6>(), best<7>(), best<8>()};
    return all[N - 1];
}

void kvf_codes::key_products(
        uint32_t head, uint32_t first, uint32_t n_unit, const int8_t * queries, uint32_t N, int32_t * res) const {
    const packed p = {unit(first, head), unit_bytes(), n_unit, n_bit, width};
    best_of(N).key(p, queries, res);
}

void kvf_codes::value_sums(
        uint32_t head, uint32_t first, uint32_t n_unit, const int8_t * weights, uint32_t N, int32_t * res) const {
    const packed p = {unit(first, head), unit_bytes(), n_unit, n_bit, width};
    best_of(N).value(p, weights, res);
}
