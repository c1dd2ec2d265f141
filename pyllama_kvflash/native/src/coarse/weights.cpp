// the vectorised parts of attention by codes, see coarse/weights.h

#include "coarse/weights.h"

#include <algorithm>
#include <cmath>

KVF_CLONES
void kvf_add_row(const float * row, uint32_t n, double * sum, double * square) {
    for (uint32_t i = 0; i < n; ++i) {
        sum[i] += row[i];
        square[i] += (double) row[i] * row[i];
    }
}

float kvf_query_bytes(const float * x, uint32_t n, int8_t * dst) {
    float most = 0;
    for (uint32_t i = 0; i < n; ++i) {
        most = std::max(most, fabsf(x[i]));
    }
    const float factor = most > 0 ? KVF_MOST_BYTE / most : 0;
    for (uint32_t i = 0; i < n; ++i) {
        dst[i] = (int8_t) lrintf(x[i] * factor);
    }
    return most / KVF_MOST_BYTE;
}

// cap*tanh(x/cap)
static inline __attribute__((always_inline)) lanes_f capped(lanes_f x, float cap) {
    const lanes_f size = (x < 0 ? -x : x) * (1 / cap), e = exponential(-2 * size), y = cap * (1 - e) / (1 + e);
    return x < 0 ? -y : y;
}

KVF_CLONES
void kvf_scales_of(const uint16_t * scales, uint32_t n, float * dst) {
    for (uint32_t i = 0; i < n; i += LANES) {
        const lanes_u bits = __builtin_convertvector(vector_at<lanes_h>(scales + i), lanes_u) << 13;
        const lanes_f x    = (lanes_f) bits * 0x1p112f;
        memcpy(dst + i, &x, sizeof(x));
    }
}

KVF_CLONES
float kvf_logits(const int32_t * sums, uint32_t N, const float * scales, uint32_t n_unit, float middle, float unit,
        float base, float cap, float * dst) {
    lanes_f most = lanes_f{} + KVF_NONE;
    for (uint32_t u = 0; u < n_unit; ++u) {
        const auto sum   = vector_at<lanes_i>(sums + (size_t) u * N * LANES);
        const auto scale = vector_at(scales + (size_t) u * LANES);
        lanes_f    x     = (__builtin_convertvector(sum, lanes_f) - middle) * (scale * unit) + base;
        if (cap > 0) { x = capped(x, cap); }
        most = x > most ? x : most;
        memcpy(dst + (size_t) u * LANES, &x, sizeof(x));
    }
    return most_lane(most);
}

KVF_CLONES
float kvf_plain_logits(float * x, uint32_t n_unit, float scale, float base, float cap) {
    lanes_f most = lanes_f{} + KVF_NONE;
    for (uint32_t u = 0; u < n_unit; ++u, x += LANES) {
        lanes_f y = vector_at(x) * scale + base;
        if (cap > 0) { y = y > KVF_NONE ? capped(y, cap) : y; }
        most = y > most ? y : most;
        memcpy(x, &y, sizeof(y));
    }
    return most_lane(most);
}

KVF_CLONES
void kvf_weigh(float * x, uint32_t n_unit, float top, float * sums) {
    constexpr float LOG2E = 1.44269504f;

    for (uint32_t first = 0; first < n_unit; first += LANES) {
        const uint32_t n = std::min(LANES, n_unit - first);
        lanes_f        y[LANES];
        for (uint32_t u = 0; u < LANES; ++u, x += u <= n ? LANES : 0) {
            y[u] = lanes_f{};
            if (u >= n) { continue; }

            y[u] = power_of_two((vector_at(x) - top) * LOG2E);
            memcpy(x, &y[u], sizeof(y[u]));
        }
        const lanes_f all = sums_of(y);
        memcpy(sums + first, &all, n * sizeof(float));
    }
}

KVF_CLONES
float kvf_weight_bytes(const float * x, const float * scales, const float * open, uint32_t n_unit, uint32_t N, int8_t * dst,
        int32_t & sum) {
    typedef uint8_t lanes_b __attribute__((vector_size(LANES)));

    lanes_f y[KVF_SUM_UNITS], most = {};
    for (uint32_t u = 0; u < n_unit; ++u) {
        y[u] = vector_at(x + (size_t) u * LANES) * vector_at(scales + (size_t) u * LANES) * open[u];
        most = y[u] > most ? y[u] : most;
    }
    const float top = most_lane(most), factor = top > 0 ? KVF_MOST_BYTE / top : 0;
    lanes_i     all = {};
    for (uint32_t u = 0; u < n_unit; ++u, dst += (size_t) N * 64) {
        const lanes_i whole = __builtin_convertvector(y[u] * factor + 0.5f, lanes_i);
        const lanes_b bytes = __builtin_convertvector(whole, lanes_b);
        all += whole;

        typedef uint32_t words __attribute__((vector_size(LANES)));
        const words      fours = (words) bytes;
        const lanes_u    times = __builtin_shufflevector(fours, fours, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        memcpy(dst, &times, sizeof(times));
    }
    sum = 0;
    for (uint32_t i = 0; i < LANES; ++i) {
        sum += all[i];
    }
    return top / KVF_MOST_BYTE;
}

KVF_CLONES
float kvf_dot(const float * a, const float * b, uint32_t n) { return dot_of(a, b, n); }

KVF_CLONES
void kvf_scale_by(float * x, uint32_t n, float factor) {
    for (uint32_t i = 0; i < n; ++i) {
        x[i] *= factor;
    }
}

KVF_CLONES
void kvf_add_times(float * x, const float * y, uint32_t n, float factor) {
    for (uint32_t i = 0; i < n; ++i) {
        x[i] += factor * y[i];
    }
}

KVF_CLONES
void kvf_add_sums(float * x, const int32_t * sums, uint32_t n, float factor, float less) {
    for (uint32_t i = 0; i < n; ++i) {
        x[i] += factor * (sums[i] - less);
    }
}

KVF_CLONES
float kvf_sum_weights(const float * x, uint32_t n, float top) {
    lanes_f all = {};
    for (uint32_t i = 0; i < n; i += LANES) {
        all += exponential(vector_at(x + i) - top);
    }
    return sum_lanes(all);
}

static inline __attribute__((always_inline)) lanes_f lanes_at(const float * x) { return vector_at(x); }

// convert 16 finite half-precision numbers
static inline __attribute__((always_inline)) lanes_f lanes_at(const uint16_t * x) {
    const lanes_u wide = __builtin_convertvector(vector_at<lanes_h>(x), lanes_u);
    return (lanes_f) ((wide & 0x7fff) << 13 | (wide & 0x8000) << 16) * 0x1p112f;
}

// products with N queries. it takes two keys at a time: with 8 queries, these are the 16 sums that sums_of() adds up
template <uint32_t N, typename T, typename F>
static inline __attribute__((always_inline)) void n_dots(
        const F & key, uint32_t n, uint32_t d, const float * queries, uint32_t n_q, float * dst) {
    const uint32_t width = (d + LANES - 1) / LANES * LANES;
    for (uint32_t i = 0; i < n; i += 2) {
        const T * its[2]      = {key(i), key(std::min(i + 1, n - 1))};
        lanes_f   sums[LANES] = {};
        for (uint32_t at = 0; at < d; at += LANES) {
            lanes_f keys[2];
            for (uint32_t k = 0; k < 2; ++k) {
                T rest[LANES] = {};
                if (at + LANES > d) { memcpy(rest, its[k] + at, (d - at) * sizeof(T)); }
                keys[k] = lanes_at(at + LANES > d ? rest : its[k] + at);
            }
            for (uint32_t j = 0; j < N; ++j) {
                const lanes_f q = lanes_at(queries + (size_t) j * width + at);
                sums[j] += keys[0] * q;
                sums[LANES / 2 + j] += keys[1] * q;
            }
        }
        const lanes_f all = sums_of(sums);
        for (uint32_t j = 0; j < n_q; ++j) {
            dst[j * KVF_TILE + i] = all[j];
            if (i + 1 < n) { dst[j * KVF_TILE + i + 1] = all[LANES / 2 + j]; }
        }
    }
}

template <typename T, typename F>
static inline __attribute__((always_inline)) void dots_of(
        const F & key, uint32_t n, uint32_t d, const float * queries, uint32_t n_q, float * dst) {
    static_assert(KVF_MOST_Q == 8 && LANES == 16);
    if (n_q == 1) { return n_dots<1, T>(key, n, d, queries, n_q, dst); }
    if (n_q <= 4) { return n_dots<4, T>(key, n, d, queries, n_q, dst); }
    n_dots<8, T>(key, n, d, queries, n_q, dst);
}

KVF_CLONES
void kvf_dots(const float * keys, uint32_t n, uint32_t d, const float * queries, uint32_t n_q, float * dst) {
    dots_of<float>([=](uint32_t i) { return keys + (size_t) i * d; }, n, d, queries, n_q, dst);
}

KVF_CLONES
void kvf_half_dots(const uint16_t * rows, size_t stride, const int32_t * cells, uint32_t n, uint32_t d,
        const float * queries, uint32_t n_q, float * dst) {
    dots_of<uint16_t>([=](uint32_t i) { return rows + cells[i] * stride; }, n, d, queries, n_q, dst);
}
