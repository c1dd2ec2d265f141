// the codes of rows, see coarse/codes.h. coarse/products.cpp has the products with them

#include "coarse/codes.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>

kvf_codes::kvf_codes(uint32_t n_head, uint32_t d, uint32_t n_bit, uint32_t n_rot) :
    n_head(n_head), d(d), n_bit(n_bit), n_rot(n_rot), width(GGML_PAD(d, 16)), spread((size_t) n_head * d, 1.0f) {
    for (uint32_t rest = d; rest;) {
        uint32_t block = 1;
        while (2 * block <= rest) {
            block *= 2;
        }
        blocks.push_back(block);
        rest -= block;
    }
}

//
// the rotation
//

// a pseudo-random sign for each element of a row: rows might match a regular pattern (splitmix64, Steele et al. 2014)
static float sign_of(uint32_t i) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull;
    x          = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x          = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (x ^ x >> 31) & 1 ? 1.0f : -1.0f;
}

KVF_CLONES
static void hadamard(lanes_f * x, uint32_t n) {
    for (uint32_t half = 1; half < n; half *= 2) {
        for (uint32_t i = 0; i < n; i += 2 * half) {
            for (uint32_t j = i; j < i + half; ++j) {
                const lanes_f a = x[j], b = x[j + half];
                x[j]        = a + b;
                x[j + half] = a - b;
            }
        }
    }
    const float norm = 1 / sqrtf(n);
    for (uint32_t i = 0; i < n; ++i) {
        x[i] = x[i] * norm;
    }
}

void kvf_codes::turn(lanes_f * x) const {
    for (uint32_t i = 0; i < d; ++i) {
        x[i] = x[i] * sign_of(i);
    }
    for (const uint32_t n : blocks) {
        hadamard(x, n);
        x += n;
    }
}

// a Hadamard matrix is its own inverse
KVF_CLONES
static void hadamard_rows(float * x, size_t n, uint32_t n_rot) {
    const float norm = 1 / sqrtf(n_rot);
    for (size_t at = 0; at < n; at += n_rot, x += n_rot) {
        for (uint32_t half = 1; half < n_rot; half *= 2) {
            for (uint32_t i = 0; i < n_rot; i += 2 * half) {
                for (uint32_t j = i; j < i + half; ++j) {
                    const float a = x[j], b = x[j + half];
                    x[j]        = a + b;
                    x[j + half] = a - b;
                }
            }
        }
        for (uint32_t i = 0; i < n_rot; ++i) {
            x[i] *= norm;
        }
    }
}

void kvf_codes::turn_back(float * rows, uint32_t n) const {
    if (n_rot) { hadamard_rows(rows, (size_t) n * n_head * d, n_rot); }
}

void kvf_codes::rotate(uint32_t head, lanes_f * x) const {
    for (uint32_t i = 0; i < d; ++i) {
        x[i] = x[i] * (1 / spread[(size_t) head * d + i]);
    }
    turn(x);
}

void kvf_codes::rotate_query(uint32_t head, lanes_f * x) const {
    for (uint32_t i = 0; n_rot && i < d; i += n_rot) {
        hadamard(x + i, n_rot);
    }
    for (uint32_t i = 0; i < d; ++i) {
        x[i] = x[i] * spread[(size_t) head * d + i];
    }
    turn(x);
}

void kvf_codes::rotate_back(uint32_t head, lanes_f * x) const {
    auto * at = x;
    for (const uint32_t n : blocks) {
        hadamard(at, n);
        at += n;
    }
    for (uint32_t i = 0; i < d; ++i) {
        x[i] = x[i] * (sign_of(i) * spread[(size_t) head * d + i]);
    }
    for (uint32_t i = 0; n_rot && i < d; i += n_rot) {
        hadamard(x + i, n_rot);
    }
}

//
// codes
//

kvf_codes::moments kvf_codes::moments_of(uint32_t segment) const {
    return {segment, 0, std::vector<double>((size_t) n_head * d), std::vector<double>((size_t) n_head * d)};
}

// the root of each element's standard deviation about the means of its segments. a deviation counts as at least a hundredth
// of the head's largest one: an element that hardly varied so far may vary in later text
static std::vector<float> spread_of(const std::vector<kvf_codes::moments> & segments, uint32_t n_head, uint32_t d) {
    std::vector<float> res((size_t) n_head * d);
    for (uint32_t h = 0; h < n_head; ++h) {
        float most = 0;
        for (uint32_t i = h * d; i < (h + 1) * d; ++i) {
            double square = 0;
            size_t n      = 0;
            for (const auto & s : segments) {
                if (s.n_sum > 0) { square += s.square[i] - s.sum[i] * s.sum[i] / s.n_sum; }
                n += s.n_sum;
            }
            res[i] = n > 0 ? sqrt(std::max(0.0, square / n)) : 0;
            most   = std::max(most, res[i]);
        }
        for (uint32_t i = h * d; i < (h + 1) * d; ++i) {
            res[i] = most > 0 ? sqrtf(std::max(res[i], 0.01f * most)) : 1;
        }
    }
    return res;
}

void kvf_codes::spread_over(const std::vector<moments> & segments) { spread = spread_of(segments, n_head, d); }

void kvf_codes::begin(const std::vector<moments> & segments) {
    const size_t each = (size_t) n_head * width;
    kvf_lanes    x(width);
    for (const auto & s : segments) {
        means.resize((s.segment + 1) * each, 0.0f);
        if (s.n_sum == 0 && s.segment > 0) {
            std::copy_n(means.begin() + (s.segment - 1) * each, each, means.begin() + s.segment * each);
        }
        for (uint32_t h = 0; h < n_head && s.n_sum > 0; ++h) {
            for (uint32_t i = 0; i < width; ++i) {
                x[i] = lanes_f{} + (i < d ? (float) (s.sum[(size_t) h * d + i] / s.n_sum) : 0.0f);
            }
            rotate(h, x.data());
            for (uint32_t i = 0; i < width; ++i) {
                means[s.segment * each + (size_t) h * width + i] = x[i][0];
            }
        }
    }
}

// the codes of rows: x times `factor`, rounded to levels. vectors are passed by reference, because clones for different
// processors would pass them in different registers
KVF_CLONES
static void encode(const lanes_f * x, uint32_t n, const lanes_f & factor, int32_t n_half, uint8_t * dst) {
    const lanes_f most = lanes_f{} + (float) (n_half - 1);
    for (uint32_t i = 0; i < n; ++i, dst += LANES) {
        const lanes_f y     = x[i] * factor;
        const lanes_f size  = y < 0 ? -y : y;
        const lanes_i above = __builtin_convertvector(size < most ? size : most, lanes_i);
        const lanes_i code  = y < 0 ? n_half - 1 - above : n_half + above;
        for (uint32_t l = 0; l < LANES; ++l) {
            dst[l] = code[l];
        }
    }
}

void kvf_codes::put(uint32_t pos, const float * rows, uint32_t n) {
    const uint32_t first = pos / UNIT, n_unit = n / UNIT, each = 8 / n_bit; // elements in a byte
    grow(first + n_unit);

    kvf_lanes            x(width);
    std::vector<uint8_t> code((size_t) width * LANES);
    for (uint32_t u = first; u < first + n_unit; ++u, rows += (size_t) UNIT * n_head * d) {
        for (uint32_t h = 0; h < n_head; ++h) {
            for (uint32_t i = 0; i < width; ++i) {
                for (uint32_t l = 0; l < LANES; ++l) {
                    x[i][l] = i < d ? rows[((size_t) l * n_head + h) * d + i] : 0.0f;
                }
            }
            rotate(h, x.data());
            const float * mu    = mean(u * UNIT / SEGMENT, h);
            lanes_f       power = {};
            for (uint32_t i = 0; i < width; ++i) {
                x[i] = x[i] - mu[i];
                power += x[i] * x[i];
            }
            if (is_exact()) {
                memcpy(unit(u, h), x.data(), unit_bytes());
                continue;
            }
            lanes_f    factor = {};
            uint16_t * scale  = this->scale(u, h);
            for (uint32_t l = 0; l < LANES; ++l) {
                scale[l]        = ggml_fp32_to_fp16(std::min(sqrtf(power[l] / d) * step(), 65504.0f));
                const float its = ggml_fp16_to_fp32(scale[l]);
                factor[l]       = its > 0 ? 1 / its : 0;
            }
            encode(x.data(), width, factor, n_half(), code.data());

            uint8_t * dst = unit(u, h);
            std::fill_n(dst, unit_bytes(), 0);
            for (uint32_t i = 0; i < width; ++i) {
                const uint32_t quad = i / 4, shift = quad % each * n_bit;
                for (uint32_t l = 0; l < LANES; ++l) {
                    dst[quad / each * QUAD + l * 4 + i % 4] |= code[i * LANES + l] << shift;
                }
            }
        }
    }
}

//
// bytes
//

void kvf_codes::get_factors(float * dst) const {
    for (size_t i = 0; i < spread.size(); ++i) {
        dst[i] = spread[i] * sign_of(i % d);
    }
}

// make room for n_unit units, in whole tiles
void kvf_codes::grow(uint32_t n_unit) {
    const size_t n = (size_t) GGML_PAD(n_unit, TILE) * n_head;
    if (n * UNIT <= scales.size()) { return; }
    scales.resize(n * UNIT);
    codes.resize(n * unit_bytes());
}

void kvf_codes::reserve(uint32_t n) {
    const size_t n_unit = (size_t) GGML_PAD((n + UNIT - 1) / UNIT, TILE) * n_head;
    scales.reserve(n_unit * UNIT);
    codes.reserve(n_unit * unit_bytes());
}

std::array<std::pair<char *, size_t>, 3> kvf_codes::memory(uint32_t n) {
    const uint32_t n_unit = (n + UNIT - 1) / UNIT; // not 0
    grow(n_unit);
    means.resize(n_segment(n) * n_head * width);
    const size_t n_slot = slot(n_unit - 1, n_head - 1) / TILE * TILE + TILE;
    return {{{(char *) codes.data(), n_slot * unit_bytes()}, {(char *) scales.data(), n_slot * UNIT * sizeof(uint16_t)},
            {(char *) means.data(), n_segment(n) * mean_size()}}};
}

void kvf_codes::drop() {
    kvf_aligned<uint8_t>().swap(codes);
    kvf_aligned<uint16_t>().swap(scales);
    kvf_aligned<float>().swap(means);
}
