// products of summaries and keys with queries, see pool/summary.h. all functions are pure

#include "pool/summary.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

// bf16 is the upper half of a float
static inline __attribute__((always_inline)) void widen(const uint16_t * src, lanes_f & dst) {
    dst = (lanes_f) (__builtin_convertvector(vector_at<lanes_h>(src), lanes_u) << 16);
}

// multiply G queries of d floats with the LANES rows of a panel
template <uint32_t G>
static inline __attribute__((always_inline)) void multiply(
        const uint16_t * panel, uint32_t d, const float * q, lanes_f * res) {
    lanes_f even[G] = {};
    lanes_f odd[G]  = {};

    for (uint32_t i = 0; i < d; i += 2) { // two sums per query: a single one would be limited by the latency of additions
        lanes_f a, b;
        widen(panel + (size_t) i * LANES, a);
        widen(panel + (size_t) (i + 1) * LANES, b);
        __builtin_prefetch(panel + (size_t) (i + 64) * LANES);
        for (uint32_t g = 0; g < G; ++g) {
            even[g] += q[(size_t) g * d + i] * a;
            odd[g] += q[(size_t) g * d + i + 1] * b;
        }
    }
    for (uint32_t g = 0; g < G; ++g) {
        res[g] = even[g] + odd[g];
    }
}

// the best row of each chunk in a panel whose first row is `row`. a chunk with more rows than LANES spans several panels
static inline __attribute__((always_inline)) void best(
        const lanes_f & dots, uint32_t n_row, uint32_t row, uint32_t n, float * dst) {
    float x[LANES];
    memcpy(x, &dots, sizeof(x));

    uint32_t n_left = LANES;
    for (uint32_t width = 1; width < n_row && n_left > 1; width *= 2) {
        n_left /= 2;
        for (uint32_t j = 0; j < n_left; ++j) {
            x[j] = std::max(x[2 * j], x[2 * j + 1]);
        }
    }
    const uint32_t first = row / n_row;
    for (uint32_t j = 0; j < n_left && first + j < n; ++j) {
        dst[first + j] = std::max(dst[first + j], x[j]);
    }
}

KVF_CLONES
static void score_panels(const kvf_layer & layer, const uint16_t * slab, uint32_t n, uint32_t n_row, const float * q,
        float * dst, size_t stride) {
    const uint32_t d     = layer.n_embd_head_k;
    const uint32_t group = layer.n_head / layer.n_head_kv;

    for (uint32_t row = 0; row < n * n_row; row += LANES) {
        for (uint32_t k = 0; k < layer.n_head_kv; ++k) {
            const uint16_t * panel = slab + kvf_summary::place(layer, k, row);

            lanes_f res[4];
            for (uint32_t g = 0; g < group;) {
                const uint32_t h    = k * group + g;
                const float *  qh   = q + (size_t) h * d;
                const uint32_t left = group - g;
                const uint32_t step = left >= 4 ? 4 : left >= 2 ? 2 : 1;
                switch (step) {
                    case 4: multiply<4>(panel, d, qh, res); break;
                    case 2: multiply<2>(panel, d, qh, res); break;
                    default: multiply<1>(panel, d, qh, res); break;
                }
                for (uint32_t j = 0; j < step; ++j) {
                    best(res[j], n_row, row, n, dst + (h + j) * stride);
                }
                g += step;
            }
        }
    }
}

// the logarithms of the weights of all rows for G queries: scale*q*row plus the logarithm of the number of keys that the row
// stands for. one query after the other in dst
template <uint32_t G>
static inline __attribute__((always_inline)) void all_products(const kvf_layer & layer, const uint16_t * const * slabs,
        uint32_t slab_rows, uint32_t n, uint32_t head, const float * q, float scale, float * dst, size_t stride) {
    const uint32_t d = layer.n_embd_head_k;
    for (uint32_t row = 0; row < n; row += LANES) {
        const uint16_t * panel = slabs[row / slab_rows] + kvf_summary::place(layer, head, row % slab_rows);

        lanes_f res[G], count;
        multiply<G>(panel, d, q, res);
        widen(panel + (size_t) d * LANES, count);
        for (uint32_t g = 0; g < G; ++g) {
            res[g] = res[g] * scale + count;
            memcpy(dst + g * stride + row, &res[g], sizeof(res[g]));
        }
    }
}

// sum exp(x - max(x)) over the n_row rows of each chunk -> sums[n]. returns the sum of all. x has room for whole panels
static inline __attribute__((always_inline)) float sum_exponentials(float * x, uint32_t n, uint32_t n_row, float * sums) {
    const uint32_t n_all = n * n_row;
    const uint32_t n_pad = GGML_PAD(n_all, LANES);
    std::fill(x + n_all, x + n_pad, -std::numeric_limits<float>::infinity());

    lanes_f most = lanes_f{} - std::numeric_limits<float>::infinity();
    for (uint32_t i = 0; i < n_pad; i += LANES) {
        const lanes_f a = vector_at(x + i);
        most            = a > most ? a : most;
    }
    const float top = most_lane(most);

    lanes_f total = {};
    for (uint32_t i = 0; i < n_pad; i += LANES) {
        const lanes_f a = exponential(vector_at(x + i) - top);
        total += a;
        memcpy(x + i, &a, sizeof(a));
    }
    float all = 0;
    for (uint32_t j = 0; j < LANES; ++j) {
        all += total[j];
    }

    // add pairs of neighbours until each chunk has one value
    for (uint32_t width = n_row; width > 1; width /= 2) {
        for (uint32_t i = 0; i < n * width / 2; ++i) {
            x[i] = x[2 * i] + x[2 * i + 1];
        }
    }
    memcpy(sums, x, n * sizeof(float));
    return all;
}

KVF_CLONES
static void add_shares(float * x, uint32_t n, uint32_t n_row, float * sums, float * dst) {
    const float all = sum_exponentials(x, n, n_row, sums);
    for (uint32_t c = 0; c < n; ++c) {
        dst[c] += sums[c] / all;
    }
}

KVF_CLONES
static void products(const kvf_layer & layer, const uint16_t * const * slabs, uint32_t slab_rows, uint32_t n, uint32_t head,
        const float * q, float scale, uint32_t n_head, float * dst, size_t stride) {
    switch (n_head) {
        case 4: all_products<4>(layer, slabs, slab_rows, n, head, q, scale, dst, stride); break;
        case 2: all_products<2>(layer, slabs, slab_rows, n, head, q, scale, dst, stride); break;
        default: all_products<1>(layer, slabs, slab_rows, n, head, q, scale, dst, stride); break;
    }
}

void kvf_summary::mass(const kvf_layer & layer, const uint16_t * const * slabs, uint32_t slab_size, uint32_t n,
        uint32_t n_row, const float * q, uint32_t n_q, float scale, float * dst) {
    const uint32_t d      = layer.n_embd_head_k;
    const uint32_t group  = layer.n_head / layer.n_head_kv;
    const uint32_t n_rows = n * n_row;
    const size_t   stride = GGML_PAD(n_rows, LANES);

    std::vector<float> x(4 * stride);
    std::vector<float> sums(n);
    std::vector<float> mine(n);

    std::fill_n(dst, n, 0.0f);
    for (uint32_t i = 0; i < n_q; ++i) {
        std::fill(mine.begin(), mine.end(), 0.0f);
        for (uint32_t h = 0; h < layer.n_head;) {
            const uint32_t left = group - h % group;
            const uint32_t step = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            const float *  qh   = q + ((size_t) i * layer.n_head + h) * d;
            products(layer, slabs, slab_size * n_row, n_rows, h / group, qh, scale, step, x.data(), stride);
            for (uint32_t j = 0; j < step; ++j) {
                add_shares(x.data() + j * stride, n, n_row, sums.data(), mine.data());
            }
            h += step;
        }
        for (uint32_t c = 0; c < n; ++c) {
            dst[c] = std::max(dst[c], mine[c]);
        }
    }
}

void kvf_summary::score(const kvf_layer & layer, const uint16_t * slab, uint32_t n, uint32_t n_row, const float * q,
        float * dst, size_t stride) {
    for (uint32_t h = 0; h < layer.n_head; ++h) {
        std::fill_n(dst + h * stride, n, -std::numeric_limits<float>::infinity());
    }
    score_panels(layer, slab, n, n_row, q, dst, stride);
}

// pack queries into panels of LANES, dimension by dimension, grouped by key head. so the product of a key and a panel needs
// no horizontal sum, and keys need no repacking
static std::vector<float> query_panels(const kvf_layer & layer, const float * q, uint32_t n_token, uint32_t n_panel) {
    const uint32_t d     = layer.n_embd_head_k;
    const uint32_t group = layer.n_head / layer.n_head_kv;

    std::vector<float> res((size_t) layer.n_head_kv * n_panel * d * LANES, 0.0f);
    for (uint32_t t = 0; t < n_token; ++t) {
        for (uint32_t h = 0; h < layer.n_head; ++h) {
            const uint32_t i  = t * group + h % group; // among the queries of this key head
            float *        to = res.data() + ((size_t) h / group * n_panel + i / LANES) * d * LANES + i % LANES;
            for (uint32_t j = 0; j < d; ++j) {
                to[(size_t) j * LANES] = q[((size_t) t * layer.n_head + h) * d + j];
            }
        }
    }
    return res;
}

// multiply N keys with a panel of queries
template <uint32_t N>
static inline __attribute__((always_inline)) void meet(
        const kvf_keys & k, uint32_t first, const float * panel, lanes_f * res) {
    lanes_f sum[N] = {};
    for (uint32_t i = 0; i < k.d; ++i) {
        const lanes_f a = vector_at(panel + (size_t) i * LANES);
        for (uint32_t j = 0; j < N; ++j) {
            sum[j] += k.row(first + j)[i] * a;
        }
    }
    memcpy(res + first, sum, sizeof(sum));
}

// score each query of a panel -> dst[LANES]: its largest product with a key (scale 0), or the logarithm of the sum of
// exp(scale*product). n_edge > 0: the same for the first n_edge keys, and for the last n_edge -> dst[3*LANES]
KVF_CLONES
static void score_panel(const kvf_keys & k, const float * panel, float scale, uint32_t n_edge, float * dst) {
    lanes_f dots[kvf_keys::MOST];
    for (uint32_t t = 0; t < k.n; t += 4) {
        meet<4>(k, t, panel, dots);
    }
    lanes_f most = dots[0];
    for (uint32_t t = 1; t < k.n; ++t) {
        most = dots[t] > most ? dots[t] : most;
    }
    if (scale == 0) {
        memcpy(dst, &most, sizeof(most));
        return;
    }

    lanes_f sums[3] = {}; // over all keys, the first and the last n_edge
    for (uint32_t t = 0; t < k.n; ++t) {
        const lanes_f e = exponential((dots[t] - most) * scale);
        sums[0] += e;
        if (t < n_edge) { sums[1] += e; }
        if (t >= k.n - n_edge) { sums[2] += e; }
    }
    for (uint32_t part = 0; part < (n_edge ? 3 : 1); ++part) {
        for (uint32_t j = 0; j < LANES; ++j) {
            dst[part * LANES + j] = scale * most[j] + logf(sums[part][j]);
        }
    }
}

void kvf_summary::score_keys(const kvf_layer & layer, uint32_t n_chunk, const void * const * records, uint32_t n,
        const float * q, uint32_t n_token, float scale, uint32_t n_edge, float * dst) {
    const uint32_t d       = layer.n_embd_head_k;
    const uint32_t group   = layer.n_head / layer.n_head_kv;
    const uint32_t n_query = n_token * group; // of one key head
    const uint32_t n_panel = (n_query + LANES - 1) / LANES;
    const uint32_t n_part  = n_edge ? 3 : 1;
    const size_t   stride  = (size_t) n_token * layer.n_head * n; // from one part to the next

    const auto panels = query_panels(layer, q, n_token, n_panel);

    float found[3 * LANES];
    for (uint32_t c = 0; c < n; ++c) {
        const auto all = kvf_read_keys(layer, n_chunk, records[c]);
        for (uint32_t i = 0; i < layer.n_head_kv * n_panel; ++i) {
            const uint32_t kv = i / n_panel;
            score_panel({all.data() + (size_t) kv * d, n_chunk, d, layer.n_embd_k}, panels.data() + (size_t) i * d * LANES,
                    scale, n_edge, found);
            for (uint32_t j = 0; j < LANES && i % n_panel * LANES + j < n_query; ++j) {
                const uint32_t query = i % n_panel * LANES + j;
                const size_t   to    = ((size_t) query / group * layer.n_head + kv * group + query % group) * n + c;
                for (uint32_t part = 0; part < n_part; ++part) {
                    dst[part * stride + to] = found[part * LANES + j];
                }
            }
        }
    }
}
