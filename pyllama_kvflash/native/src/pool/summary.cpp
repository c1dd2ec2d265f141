// summaries of a chunk's keys, see pool/summary.h. all functions are pure

#include "pool/summary.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

static constexpr float TINY    = 1e-9f; // a row of zeros has no direction
static constexpr float NOTHING = -1e4f; // stands for the logarithm of 0 keys; finite, since it may be multiplied by 0

static uint16_t to_bf16(float x) { return ggml_fp32_to_bf16(x).bits; }

// squared distances of a point from n rows, stored dimension by dimension: [d][n]
KVF_CLONES
static void distances(const float * columns, uint32_t n, const float * point, uint32_t d, float * res) {
    std::fill_n(res, n, 0.0f);
    for (uint32_t i = 0; i < d; ++i) {
        const float * x = columns + (size_t) i * n;
        for (uint32_t t = 0; t < n; ++t) {
            res[t] += (x[t] - point[i]) * (x[t] - point[i]);
        }
    }
}

KVF_CLONES
static void add(const float * row, float * sum, uint32_t d) {
    for (uint32_t i = 0; i < d; ++i) {
        sum[i] += row[i];
    }
}

static void scale(float * row, float factor, uint32_t d) {
    for (uint32_t i = 0; i < d; ++i) {
        row[i] *= factor;
    }
}

static float length(const float * row, uint32_t d) {
    float sum = 0;
    for (uint32_t i = 0; i < d; ++i) {
        sum += row[i] * row[i];
    }
    return sqrtf(sum);
}

static std::vector<float> mean(const kvf_keys & k) {
    std::vector<float> res(k.d, 0.0f);
    for (uint32_t t = 0; t < k.n; ++t) {
        add(k.row(t), res.data(), k.d);
    }
    scale(res.data(), 1.0f / k.n, k.d);
    return res;
}

// k-means: farthest-point seeds (Gonzalez 1985), beginning with the row farthest from the mean, then two Lloyd steps. A
// centroid without rows stays where it is. Finally, each centroid is scaled to the mean length of its rows: the mean of rows
// with different directions is shorter than the rows, and would lose against a chunk of equal rows
static std::vector<float> centroids(const kvf_keys & k, uint32_t n, float * counts) {
    std::vector<float> columns((size_t) k.d * k.n);
    for (uint32_t t = 0; t < k.n; ++t) {
        for (uint32_t i = 0; i < k.d; ++i) {
            columns[(size_t) i * k.n + t] = k.row(t)[i];
        }
    }

    std::vector<float> res((size_t) n * k.d);
    std::vector<float> dist(k.n);
    std::vector<float> least(k.n);

    const auto at = [&](uint32_t i) { return res.data() + (size_t) i * k.d; };

    distances(columns.data(), k.n, mean(k).data(), k.d, least.data());
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t far = std::max_element(least.begin(), least.end()) - least.begin();
        memcpy(at(i), k.row(far), k.d * sizeof(float));
        distances(columns.data(), k.n, at(i), k.d, dist.data());
        for (uint32_t t = 0; t < k.n; ++t) {
            least[t] = i ? std::min(least[t], dist[t]) : dist[t];
        }
    }

    std::vector<uint32_t> nearest(k.n);
    for (int step = 0; step < 2; ++step) {
        std::fill(nearest.begin(), nearest.end(), 0);
        distances(columns.data(), k.n, at(0), k.d, least.data());
        for (uint32_t i = 1; i < n; ++i) {
            distances(columns.data(), k.n, at(i), k.d, dist.data());
            for (uint32_t t = 0; t < k.n; ++t) {
                if (dist[t] < least[t]) {
                    least[t]   = dist[t];
                    nearest[t] = i;
                }
            }
        }
        for (uint32_t i = 0; i < n; ++i) {
            const uint32_t count = std::count(nearest.begin(), nearest.end(), i);
            if (count == 0) { continue; }
            std::fill_n(at(i), k.d, 0.0f);
            for (uint32_t t = 0; t < k.n; ++t) {
                if (nearest[t] == i) { add(k.row(t), at(i), k.d); }
            }
            scale(at(i), 1.0f / count, k.d);
        }
    }

    const std::vector<float> origin(k.d, 0.0f);
    distances(columns.data(), k.n, origin.data(), k.d, dist.data());
    for (uint32_t i = 0; i < n; ++i) {
        float    sum   = 0;
        uint32_t count = 0;
        for (uint32_t t = 0; t < k.n; ++t) {
            if (nearest[t] == i) {
                sum += sqrtf(dist[t]);
                count++;
            }
        }
        if (count) { scale(at(i), sum / count / (length(at(i), k.d) + TINY), k.d); }
        counts[i] = count;
    }
    return res;
}

static std::vector<float> direction(const kvf_keys & k) {
    auto res = mean(k);
    scale(res.data(), 1.0f / (length(res.data(), k.d) + TINY), k.d);
    return res;
}

static std::vector<float> rows(const kvf_keys & k) {
    std::vector<float> res((size_t) k.n * k.d);
    for (uint32_t t = 0; t < k.n; ++t) {
        memcpy(res.data() + (size_t) t * k.d, k.row(t), k.d * sizeof(float));
    }
    return res;
}

// the n_row rows of a summary, and the number of keys that each stands for
static std::vector<float> summary(const kvf_keys & k, int kind, uint32_t n_row, float * counts) {
    std::fill_n(counts, n_row, (float) k.n / n_row);
    switch (kind) {
        case KVF_SUMMARY_CENTROIDS: return centroids(k, n_row, counts);
        case KVF_SUMMARY_MEAN: return mean(k);
        case KVF_SUMMARY_DIRECTION: return direction(k);
        default: return rows(k);
    }
}

// vectorised ggml_fp16_to_fp32(): ggml-base is compiled for any processor, and converts one value at a time
KVF_CLONES
static void from_half(const ggml_fp16_t * src, uint32_t n, float * dst) {
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t bits   = src[i] & 0x7fffu; // without the sign
        const uint32_t normal = (bits << 13) + (224u << 23), small = bits | 126u << 23;

        float x, y;
        memcpy(&x, &normal, sizeof(x));
        memcpy(&y, &small, sizeof(y));
        x      = bits < 1024 ? y - 0.5f : x * 0x1p-112f;
        dst[i] = src[i] & 0x8000u ? -x : x;
    }
}

static void to_float(ggml_type type, const void * src, uint32_t n, float * dst) {
    if (type == GGML_TYPE_F32) {
        memcpy(dst, src, n * sizeof(float));
    } else if (type == GGML_TYPE_F16) {
        from_half((const ggml_fp16_t *) src, n, dst);
    } else {
        ggml_get_type_traits(type)->to_float(src, dst, n);
    }
}

void kvf_rows_to_float(const kvf_layer & layer, uint32_t n, const void * rows, float * dst) {
    const size_t size = ggml_row_size((ggml_type) layer.type_k, layer.n_embd_k);
    for (uint32_t t = 0; t < n; ++t) {
        to_float(
                (ggml_type) layer.type_k, (const char *) rows + t * size, layer.n_embd_k, dst + (size_t) t * layer.n_embd_k);
    }
}

void kvf_values_to_float(const kvf_layer & layer, uint32_t n, bool v_trans, const void * rows, float * dst) {
    const auto     type  = (ggml_type) layer.type_v;
    const uint32_t n_row = v_trans ? layer.n_embd_v : n, n_col = v_trans ? n : layer.n_embd_v;
    const size_t   size = ggml_row_size(type, n_col);

    std::vector<float> turned(v_trans ? (size_t) n_row * n_col : 0);
    float *            to = v_trans ? turned.data() : dst;
    for (uint32_t i = 0; i < n_row; ++i) {
        to_float(type, (const char *) rows + i * size, n_col, to + (size_t) i * n_col);
    }
    for (uint32_t i = 0; i < turned.size(); ++i) {
        dst[(size_t) (i % n) * n_row + i / n] = turned[i];
    }
}

// one head of one row of keys [n_embd_head_k]
static void kvf_to_float(const kvf_layer & layer, uint32_t head, const void * row, float * dst) {
    const auto     type = (ggml_type) layer.type_k;
    const uint32_t d    = layer.n_embd_head_k;
    if (type == GGML_TYPE_F16) {
        from_half((const ggml_fp16_t *) row + (size_t) head * d, d, dst);
    } else if (type == GGML_TYPE_F32) {
        memcpy(dst, (const float *) row + (size_t) head * d, d * sizeof(float));
    } else if (d % ggml_blck_size(type) == 0) {
        ggml_get_type_traits(type)->to_float((const char *) row + ggml_row_size(type, (size_t) head * d), dst, d);
    } else { // heads are not aligned to quantisation blocks
        std::vector<float> all(layer.n_embd_k);
        ggml_get_type_traits(type)->to_float(row, all.data(), layer.n_embd_k);
        std::copy_n(all.data() + (size_t) head * d, d, dst);
    }
}

void kvf_heads_to_float(
        const kvf_layer & layer, uint32_t head, const void * rows, const int32_t * cells, uint32_t n, float * dst) {
    const uint32_t d    = layer.n_embd_head_k;
    const size_t   size = ggml_row_size((ggml_type) layer.type_k, layer.n_embd_k);
    for (uint32_t i = 0; i < n; ++i) {
        kvf_to_float(layer, head, (const char *) rows + cells[i] * size, dst + (size_t) i * d);
    }
}

// the n keys of a record in one layer, [n][n_embd_k]
std::vector<float> kvf_read_keys(const kvf_layer & layer, uint32_t n, const void * record) {
    std::vector<float> res((size_t) n * layer.n_embd_k);
    kvf_rows_to_float(layer, n, (const char *) record + layer.offs_k, res.data());
    return res;
}

void kvf_summary::write(const kvf_layer & layer, uint32_t n_chunk, const void * record, int kind, uint32_t n_row,
        uint16_t * dst, uint32_t i) {
    const auto k = kvf_read_keys(layer, n_chunk, record);

    const uint32_t d = layer.n_embd_head_k;
    for (uint32_t h = 0; h < layer.n_head_kv; ++h) {
        float      counts[kvf_keys::MOST];
        const auto res = summary({k.data() + (size_t) h * d, n_chunk, d, layer.n_embd_k}, kind, n_row, counts);
        for (uint32_t r = 0; r < n_row; ++r) {
            uint16_t * to = dst + kvf_summary::place(layer, h, i * n_row + r);
            for (uint32_t j = 0; j < d; ++j) {
                to[(size_t) j * LANES] = to_bf16(res[(size_t) r * d + j]);
            }
            to[(size_t) d * LANES] = to_bf16(counts[r] > 0 ? logf(counts[r]) : NOTHING);
        }
    }
}

size_t kvf_summary::size(const kvf_layer & layer, uint32_t n, uint32_t n_row) {
    return (size_t) GGML_PAD(n * n_row, LANES) * layer.n_head_kv * (layer.n_embd_head_k + 1);
}
