#pragma once

#include <stdint.h>
#include <string.h>

#include <new>
#include <vector>

// compile a function for several instruction sets. the best one for the processor is chosen when the library is loaded
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define KVF_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVF_CLONES
#endif

static constexpr uint32_t LANES = 16;

typedef float    lanes_f __attribute__((vector_size(LANES * 4)));
typedef int32_t  lanes_i __attribute__((vector_size(LANES * 4)));
typedef uint32_t lanes_u __attribute__((vector_size(LANES * 4)));
typedef uint16_t lanes_h __attribute__((vector_size(LANES * 2)));

// load a T from an address, aligned or not
template <typename T = lanes_f> static inline __attribute__((always_inline)) T vector_at(const void * x) {
    T res;
    memcpy(&res, x, sizeof(res));
    return res;
}

// an allocator that aligns to whole vectors: loading one that spans two cache lines takes twice as long
template <typename T> struct kvf_aligner {
    using value_type = T;
    static constexpr std::align_val_t ALIGN{sizeof(lanes_f)};

    kvf_aligner() = default;
    template <typename U> kvf_aligner(const kvf_aligner<U> &) {}

    T *                        allocate(size_t n) { return (T *) ::operator new(n * sizeof(T), ALIGN); }
    void                       deallocate(T * p, size_t) { ::operator delete(p, ALIGN); }
    template <typename U> bool operator==(const kvf_aligner<U> &) const { return true; }
    template <typename U> bool operator!=(const kvf_aligner<U> &) const { return false; }
};

template <typename T> using kvf_aligned = std::vector<T, kvf_aligner<T>>;

// an array of lanes_f. std::vector<lanes_f> would not be aligned, since a template drops the alignment of its argument
struct kvf_lanes {
    explicit kvf_lanes(size_t n) : all(n * LANES) {}

    lanes_f & operator[](size_t i) { return data()[i]; }
    lanes_f * data() { return (lanes_f *) all.data(); }

private:
    kvf_aligned<float> all;
};

// the largest lane
static inline __attribute__((always_inline)) float most_lane(lanes_f x) {
    float res = x[0];
    for (uint32_t i = 1; i < LANES; ++i) {
        res = x[i] > res ? x[i] : res;
    }
    return res;
}

// the sum of all lanes. it adds halves of the vector, because in a lane-by-lane sum each addition waits for the last one
static inline __attribute__((always_inline)) float sum_lanes(lanes_f x) {
    typedef float half_f __attribute__((vector_size(LANES * 2)));
    typedef float quarter_f __attribute__((vector_size(LANES)));

    half_f halves[2];
    memcpy(halves, &x, sizeof(x));
    halves[0] += halves[1];
    quarter_f quarters[2];
    memcpy(quarters, halves, sizeof(quarters));
    quarters[0] += quarters[1];
    return (quarters[0][0] + quarters[0][1]) + (quarters[0][2] + quarters[0][3]);
}

// the dot product of two rows of n floats
static inline __attribute__((always_inline)) float dot_of(const float * a, const float * b, uint32_t n) {
    lanes_f  sum = {};
    uint32_t i   = 0;
    for (; i + LANES <= n; i += LANES) {
        sum += vector_at(a + i) * vector_at(b + i);
    }
    float res = sum_lanes(sum);
    for (; i < n; ++i) {
        res += a[i] * b[i];
    }
    return res;
}

// p * 2^whole. the power of two is assembled from its bits (Schraudolph 1999)
static inline __attribute__((always_inline)) lanes_f times_power(lanes_f p, lanes_i whole) {
    return (lanes_f) ((whole + 127) << 23) * p;
}

// e^x for x <= 0, accurate to 1 part in 10^5. For x > 0, which only unused lanes have, the result is 1. The exponent's
// integer part becomes a power of two, its fraction goes through a polynomial
static inline __attribute__((always_inline)) lanes_f exponential(lanes_f x) {
    lanes_f t = x * 1.44269504f;
    t         = t < -126.0f ? lanes_f{} - 126.0f : t;
    t         = t > 0.0f ? lanes_f{} : t;

    const lanes_i whole = __builtin_convertvector(t, lanes_i); // rounds towards zero: the fraction is in (-1, 0]
    const lanes_f f     = (t - __builtin_convertvector(whole, lanes_f)) * 0.69314718f;
    const lanes_f p = 1 + f * (1 + f * (0.5f + f * (0.16666667f + f * (0.04166667f + f * (0.00833333f + f * 0.00138889f)))));

    return times_power(p, whole);
}

// 2^x for x <= 0, accurate to 1 part in 5,000: as exponential(), with a shorter polynomial
static inline __attribute__((always_inline)) lanes_f power_of_two(lanes_f x) {
    const lanes_f t     = x < -126.0f ? lanes_f{} - 126.0f : x;
    const lanes_i whole = __builtin_convertvector(t, lanes_i); // rounds towards zero: the fraction is in (-1, 0]
    const lanes_f f     = t - __builtin_convertvector(whole, lanes_f);
    const lanes_f p     = 1 + f * (0.69161f + f * (0.23139f + f * 0.03987f));
    return times_power(p, whole);
}

// the sums of 16 vectors, one in each lane. two vectors are folded into one that holds their half sums, two of these into
// one that holds quarter sums, and so on
static inline __attribute__((always_inline)) lanes_f sums_of(const lanes_f * x) {
    lanes_f two[8], four[4], eight[2];
    for (uint32_t i = 0; i < 8; ++i) {
        const lanes_f a = x[2 * i], b = x[2 * i + 1];
        two[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (uint32_t i = 0; i < 4; ++i) {
        const lanes_f a = two[2 * i], b = two[2 * i + 1];
        four[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    for (uint32_t i = 0; i < 2; ++i) {
        const lanes_f a = four[2 * i], b = four[2 * i + 1];
        eight[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                   __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    }
    const lanes_f a = eight[0], b = eight[1];
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
