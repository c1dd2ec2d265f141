// products with codes, see coarse/codes.h

#include "coarse/codes.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

// the contiguous codes of a head's units, and how to unpack them
struct packed {
    const uint8_t * at;
    size_t          stride; // bytes from a unit to the next
    uint32_t        n_unit, n_bit, width;

    uint32_t each() const { return 8 / n_bit; } // elements in a byte
    uint8_t  mask() const { return (1 << n_bit) - 1; }
    uint32_t n_quad() const { return width / 4; }
};

static constexpr uint32_t QUAD = kvf_codes::QUAD;

typedef int32_t four_words __attribute__((vector_size(16)));

//
// Instruction sets. Each has vectors of one size, is_here() (whether the processor has the instructions), and the two
// operations of coarse/loops.h: add_fours() adds four products of codes and bytes to each word; turned() transposes 4x4
// bytes, so that four positions of an element are side by side instead of four elements of a position
//

#define KVF_VECTORS(size)                                                                                                   \
    typedef uint8_t  bytes __attribute__((vector_size(size)));                                                              \
    typedef uint16_t pairs __attribute__((vector_size(size)));                                                              \
    typedef int32_t  words __attribute__((vector_size(size)));

#define KVF_TURNED(i)                                                                                                       \
    i, i + 4, i + 8, i + 12, i + 1, i + 5, i + 9, i + 13, i + 2, i + 6, i + 10, i + 14, i + 3, i + 7, i + 11, i + 15

#ifdef __x86_64__

#define KVF_TARGET __attribute__((target("avx512f,avx512bw,avx512vnni")))
namespace vnni {

KVF_VECTORS(64)

static bool is_here() { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"); }

KVF_TARGET static inline words add_fours(words sums, bytes codes, bytes x) {
    return (words) _mm512_dpbusd_epi32((__m512i) sums, (__m512i) codes, (__m512i) x);
}
KVF_TARGET static inline bytes turned(bytes x) {
    return __builtin_shufflevector(x, x, KVF_TURNED(0), KVF_TURNED(16), KVF_TURNED(32), KVF_TURNED(48));
}

#include "coarse/loops.h"

} // namespace vnni
#undef KVF_TARGET

#define KVF_TARGET __attribute__((target("avx2")))
namespace avx2 {

KVF_VECTORS(32)

static bool is_here() { return __builtin_cpu_supports("avx2"); }

// 2*15*127 is less than 2^15
KVF_TARGET static inline words add_fours(words sums, bytes codes, bytes x) {
    return sums + (words) _mm256_madd_epi16(_mm256_maddubs_epi16((__m256i) codes, (__m256i) x), _mm256_set1_epi16(1));
}
KVF_TARGET static inline bytes turned(bytes x) { return __builtin_shufflevector(x, x, KVF_TURNED(0), KVF_TURNED(16)); }

#include "coarse/loops.h"

} // namespace avx2
#undef KVF_TARGET

#endif

// vectors of 16 bytes, which the compiler emulates where the processor lacks them
namespace sixteen {

KVF_VECTORS(16)

static bool is_here() { return true; }

static inline bytes turned(bytes x) { return __builtin_shufflevector(x, x, KVF_TURNED(0)); }

} // namespace sixteen

#define KVF_TARGET
namespace any {

using namespace sixteen;

static inline words add_fours(words sums, bytes codes, bytes x) {
    typedef int8_t  small __attribute__((vector_size(16)));
    typedef int16_t products __attribute__((vector_size(32)));
    typedef int32_t twos __attribute__((vector_size(32)));
    typedef int64_t fours __attribute__((vector_size(32)));

    const twos  all = (twos) (__builtin_convertvector(codes, products) * __builtin_convertvector((small) x, products));
    const fours two = (fours) ((all << 16 >> 16) + (all >> 16));
    return sums + __builtin_convertvector((two << 32 >> 32) + (two >> 32), words);
}

#include "coarse/loops.h"

} // namespace any

#ifdef __aarch64__

// every 64-bit ARM processor has these. codes are 0 to 15, so they are the same numbers as signed bytes
namespace neon {

using namespace sixteen;

// 2*15*127 is less than 2^15
static inline words add_fours(words sums, bytes codes, bytes x) {
    const int8x16_t a = (int8x16_t) codes, b = (int8x16_t) x;
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return (words) vpadalq_s16((int32x4_t) sums, vpaddq_s16(low, high));
}

#include "coarse/loops.h"

} // namespace neon
#undef KVF_TARGET

// no target is needed if the compiler already generates code for a processor with these. Clang before 16 knows no such
// target
#if defined(__ARM_FEATURE_DOTPROD) || !defined(__clang__)
#define KVF_DOTPROD 1
#ifdef __ARM_FEATURE_DOTPROD
#define KVF_TARGET
#else
#define KVF_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
namespace dotprod {

using sixteen::bytes, sixteen::pairs, sixteen::words, sixteen::turned;

static bool is_here() {
#if defined(__ARM_FEATURE_DOTPROD)
    return true;
#elif defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return false;
#endif
}

KVF_TARGET static inline words add_fours(words sums, bytes codes, bytes x) {
    return (words) vdotq_s32((int32x4_t) sums, (int8x16_t) codes, (int8x16_t) x);
}

#include "coarse/loops.h"

} // namespace dotprod
#undef KVF_TARGET

#endif
#endif

void kvf_codes::exact_products(uint32_t head, uint32_t first, uint32_t n_unit, const float * query, float * res) const {
    for (uint32_t u = 0; u < n_unit; ++u) {
        lanes_f sum = {};
        for (uint32_t i = 0; i < width; ++i) {
            sum += vector_at(unit(first + u, head) + i * sizeof(lanes_f)) * query[i];
        }
        memcpy(res + (size_t) u * LANES, &sum, sizeof(sum));
    }
}

void kvf_codes::exact_sum(uint32_t head, uint32_t u, const float * weights, float factor, float * res) const {
    const lanes_f w = vector_at(weights) * factor;
    for (uint32_t i = 0; i < width; ++i) {
        res[i] += sum_lanes(vector_at(unit(u, head) + i * sizeof(lanes_f)) * w);
    }
}

// an instruction set: whether the processor has it, and its loops for 1 to 8 vectors
struct loops {
    using product = void (*)(const packed &, const int8_t *, int32_t *);

    const char * name; // for tests/native/products.cpp
    bool (*is_here)();
    product key[8], value[8];
};

#define KVF_EACH(of) {of<1>, of<2>, of<3>, of<4>, of<5>, of<6>, of<7>, of<8>}
#define KVF_LOOPS(set) {#set, set::is_here, KVF_EACH(set::key), KVF_EACH(set::value)}

// the fastest first
static const loops LOOPS[] = {
#ifdef __x86_64__
        KVF_LOOPS(vnni), KVF_LOOPS(avx2),
#endif
#ifdef KVF_DOTPROD
        KVF_LOOPS(dotprod),
#endif
#ifdef __aarch64__
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
