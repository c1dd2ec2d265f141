// products with codes, see coarse/codes.h

#include "coarse/codes.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define KVF_X86 1
#elif defined(__aarch64__) && defined(__GNUC__)
#include <arm_neon.h>
#define KVF_ARM 1
#ifdef __linux__
#include <sys/auxv.h>
#endif
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

namespace any {

static bool is_here() { return true; }

template <uint32_t N> static void key(const packed & p, const int8_t * q, int32_t * res) {
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

template <uint32_t N> static void value(const packed & p, const int8_t * w, int32_t * res) {
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

} // namespace any

//
// What coarse/loops.h calls a set of instructions: vectors of codes or other bytes, and of words, each the sum of four
// products
//

#if defined(KVF_X86) || defined(KVF_ARM)

static uint32_t four_at(const int8_t * x) {
    uint32_t res;
    memcpy(&res, x, sizeof(res));
    return res;
}

// four positions of a value side by side, rather than four values of a position
#define KVF_TURNED 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15

#endif

#ifdef KVF_X86

#define KVF_TARGET __attribute__((target("avx512f,avx512bw,avx512vnni")))
namespace vnni {

static bool is_here() { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"); }

using bytes = __m512i;
using words = __m512i;

KVF_TARGET static inline bytes each_byte(uint8_t x) { return _mm512_set1_epi8(x); }
KVF_TARGET static inline bytes each_word(uint32_t x) { return _mm512_set1_epi32(x); }
KVF_TARGET static inline bytes bytes_at(const void * x) { return _mm512_loadu_si512(x); }
KVF_TARGET static inline bytes both(bytes x, bytes y) { return _mm512_and_si512(x, y); }
KVF_TARGET static inline bytes shifted(bytes x, uint32_t n) { return _mm512_srli_epi16(x, n); }
KVF_TARGET static inline bytes turned(bytes x) {
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_setr_epi8(KVF_TURNED)));
}
KVF_TARGET static inline words no_words() { return _mm512_setzero_si512(); }
KVF_TARGET static inline words add_fours(words sums, bytes codes, bytes x) { return _mm512_dpbusd_epi32(sums, codes, x); }
KVF_TARGET static inline void  put_four(int32_t * res, words sums) {
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_si128((__m128i *) res, four);
}

#include "coarse/loops.h"

} // namespace vnni
#undef KVF_TARGET

#define KVF_TARGET __attribute__((target("avx2")))
namespace avx2 {

static bool is_here() { return __builtin_cpu_supports("avx2"); }

using bytes = __m256i;
using words = __m256i;

KVF_TARGET static inline bytes each_byte(uint8_t x) { return _mm256_set1_epi8(x); }
KVF_TARGET static inline bytes each_word(uint32_t x) { return _mm256_set1_epi32(x); }
KVF_TARGET static inline bytes bytes_at(const void * x) { return _mm256_loadu_si256((const __m256i *) x); }
KVF_TARGET static inline bytes both(bytes x, bytes y) { return _mm256_and_si256(x, y); }
KVF_TARGET static inline bytes shifted(bytes x, uint32_t n) { return _mm256_srli_epi16(x, n); }
KVF_TARGET static inline bytes turned(bytes x) {
    return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_setr_epi8(KVF_TURNED)));
}
KVF_TARGET static inline words no_words() { return _mm256_setzero_si256(); }
// 2*15*127 is less than 2^15
KVF_TARGET static inline words add_fours(words sums, bytes codes, bytes x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
KVF_TARGET static inline void put_four(int32_t * res, words sums) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    _mm_storeu_si128((__m128i *) res, four);
}

#include "coarse/loops.h"

} // namespace avx2
#undef KVF_TARGET

#endif
#ifdef KVF_ARM

// what any ARM of 64 bits has. a code is a number from 0 to 15, so it is the same with a sign
namespace arm {

using bytes = int8x16_t;
using words = int32x4_t;

static inline bytes each_byte(uint8_t x) { return vdupq_n_s8(x); }
static inline bytes each_word(uint32_t x) { return vreinterpretq_s8_u32(vdupq_n_u32(x)); }
static inline bytes bytes_at(const void * x) { return vld1q_s8((const int8_t *) x); }
static inline bytes both(bytes x, bytes y) { return vandq_s8(x, y); }
static inline bytes shifted(bytes x, uint32_t n) {
    return vreinterpretq_s8_u8(vshlq_u8(vreinterpretq_u8_s8(x), vdupq_n_s8(-(int8_t) n)));
}
static inline bytes turned(bytes x) {
    static const uint8_t turn[] = {KVF_TURNED};
    return vqtbl1q_s8(x, vld1q_u8(turn));
}
static inline words no_words() { return vdupq_n_s32(0); }
static inline void  put_four(int32_t * res, words sums) { vst1q_s32(res, sums); }

} // namespace arm

#define KVF_TARGET
namespace neon {

using namespace arm;

static bool is_here() { return true; }

// 2*15*127 is less than 2^15
static inline words add_fours(words sums, bytes codes, bytes x) {
    const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(x)), high = vmull_high_s8(codes, x);
    return vpadalq_s16(sums, vpaddq_s16(low, high));
}

#include "coarse/loops.h"

} // namespace neon
#undef KVF_TARGET

// a compiler for a processor that has them needs no target. Clang before 16 has them only then
#if defined(__ARM_FEATURE_DOTPROD) || !defined(__clang__)
#define KVF_DOTPROD 1
#ifdef __ARM_FEATURE_DOTPROD
#define KVF_TARGET
#else
#define KVF_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
namespace dotprod {

using namespace arm;

static bool is_here() {
#if defined(__ARM_FEATURE_DOTPROD)
    return true;
#elif defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return false;
#endif
}

KVF_TARGET static inline words add_fours(words sums, bytes codes, bytes x) { return vdotq_s32(sums, codes, x); }

#include "coarse/loops.h"

} // namespace dotprod
#undef KVF_TARGET

#endif
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

// a set of instructions, whether the processor has it, and its loops for 1 to 8 vectors
struct loops {
    using product = void (*)(const packed &, const int8_t *, int32_t *);

    const char * name;
    bool (*is_here)();
    product key[8], value[8];
};

#define KVF_EACH(of) {of<1>, of<2>, of<3>, of<4>, of<5>, of<6>, of<7>, of<8>}
#define KVF_LOOPS(set) {#set, set::is_here, KVF_EACH(set::key), KVF_EACH(set::value)}

// the best one first
static const loops LOOPS[] = {
#ifdef KVF_X86
        KVF_LOOPS(vnni), KVF_LOOPS(avx2),
#endif
#ifdef KVF_DOTPROD
        KVF_LOOPS(dotprod),
#endif
#ifdef KVF_ARM
        KVF_LOOPS(neon),
#endif
        KVF_LOOPS(any)};

static const loops & best() {
    static const loops * res = std::find_if(std::begin(LOOPS), std::end(LOOPS), [](const loops & x) { return x.is_here(); });
    return *res;
}

void kvf_codes::key_products(
        uint32_t head, uint32_t first, uint32_t n_unit, const int8_t * queries, uint32_t N, int32_t * res) const {
    const packed p = {unit(first, head), unit_bytes(), n_unit, n_bit, width};
    best().key[N - 1](p, queries, res);
}

void kvf_codes::value_sums(
        uint32_t head, uint32_t first, uint32_t n_unit, const int8_t * weights, uint32_t N, int32_t * res) const {
    const packed p = {unit(first, head), unit_bytes(), n_unit, n_bit, width};
    best().value[N - 1](p, weights, res);
}
