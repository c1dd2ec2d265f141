#pragma once

#include <stdint.h>
#include <string.h>

// the hot loops, for the widest vectors that the processor has
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

// the sum of all lanes, by halves: one after the other would wait for each addition
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

// p times 2 to a whole number, which is put together from its bits (Schraudolph 1999)
static inline __attribute__((always_inline)) lanes_f times_power(lanes_f p, lanes_i whole) {
    const lanes_i bits = (whole + 127) << 23;
    lanes_f       power;
    memcpy(&power, &bits, sizeof(power));
    return power * p;
}

// e to the x, for x <= 0 (1 for others: lanes that nobody looks at), to a part in 10^5: 2 to the whole part, and a
// polynomial for 2 to the rest
static inline __attribute__((always_inline)) lanes_f exponential(lanes_f x) {
    lanes_f t = x * 1.44269504f;
    t         = t < -126.0f ? lanes_f{} - 126.0f : t;
    t         = t > 0.0f ? lanes_f{} : t;

    const lanes_i whole = __builtin_convertvector(t, lanes_i); // towards zero: what is left is in (-1, 0]
    const lanes_f f     = (t - __builtin_convertvector(whole, lanes_f)) * 0.69314718f;
    const lanes_f p = 1 + f * (1 + f * (0.5f + f * (0.16666667f + f * (0.04166667f + f * (0.00833333f + f * 0.00138889f)))));

    return times_power(p, whole);
}
