#pragma once

#include "coarse/lanes.h"

#include <limits>

// What attention by codes computes in vectors: logits, weights, and sums. Units have 16 positions, the lanes of a vector.

static constexpr float    KVF_NONE       = -std::numeric_limits<float>::infinity();
static constexpr uint32_t KVF_MOST_Q     = 8;    // queries that are taken at once
static constexpr uint32_t KVF_TILE       = 1024; // positions of a task
static constexpr uint32_t KVF_TILE_UNITS = KVF_TILE / LANES;
static constexpr uint32_t KVF_SUM_UNITS  = 16; // whose weights have one scale
static constexpr float    KVF_MOST_BYTE  = 127;

// a row in sums, and in those of squares
void kvf_add_row(const float * row, uint32_t n, double * sum, double * square);
// x in bytes, each of which is worth what is returned
float kvf_query_bytes(const float * x, uint32_t n, int8_t * dst);
// scales as floats: n numbers in half precision, a multiple of 16, that are neither negative nor infinite
void kvf_scales_of(const uint16_t * scales, uint32_t n, float * dst);

// logits of n_unit units: (sum - middle)*unit*scale of each position + base, with a cap if it is not 0. sums: N*16 from a
// unit to the next. returns the largest
float kvf_logits(const int32_t * sums, uint32_t N, const float * scales, uint32_t n_unit, float middle, float unit,
        float base, float cap, float * dst);
// the same of plain products, which become logits. those of KVF_NONE stay
float kvf_plain_logits(float * x, uint32_t n_unit, float scale, float base, float cap);
// logits [n_unit][16] become weights, exp(logit - top). sums: of each unit
void kvf_weigh(float * x, uint32_t n_unit, float top, float * sums);
// weights times the scales of the values' codes, as bytes [n_unit][N][64] for kvf_codes::value_sums(). open: 0 or 1 for each
// unit, by which they are multiplied. returns what a byte is worth. sum: of the bytes
float kvf_weight_bytes(
        const float * x, const float * scales, const float * open, uint32_t n_unit, uint32_t N, int8_t * dst, int32_t & sum);
// the sum of exp(x - top) of n logits, a multiple of 16
float kvf_sum_weights(const float * x, uint32_t n, float top);

float kvf_dot(const float * a, const float * b, uint32_t n);
// products of n keys [n][d] with n_q queries, [KVF_MOST_Q][width], with zeros from
// d on: [n_q][KVF_TILE]
void kvf_dots(const float * keys, uint32_t n, uint32_t d, const float * queries, uint32_t n_q, float * dst);
// the same of finite numbers in half precision: those of n cells, in rows of `stride` values
void kvf_half_dots(const uint16_t * rows, size_t stride, const int32_t * cells, uint32_t n, uint32_t d,
        const float * queries, uint32_t n_q, float * dst);
void kvf_scale_by(float * x, uint32_t n, float factor);
void kvf_add_times(float * x, const float * y, uint32_t n, float factor);
// x += factor*(sums - less)
void kvf_add_sums(float * x, const int32_t * sums, uint32_t n, float factor, float less);
