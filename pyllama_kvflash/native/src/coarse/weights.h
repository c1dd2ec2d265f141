#pragma once

#include "coarse/lanes.h"

#include <limits>

// The vectorised parts of attention by codes: logits, weights and sums. The 16 positions of a unit are the lanes of a
// vector.

static constexpr float    KVF_NONE       = -std::numeric_limits<float>::infinity();
static constexpr uint32_t KVF_MOST_Q     = 8;    // queries of a task
static constexpr uint32_t KVF_TILE       = 1024; // positions of a tile
static constexpr uint32_t KVF_TILE_UNITS = KVF_TILE / LANES;
static constexpr uint32_t KVF_SUM_UNITS  = 16; // units whose weights share a scale
static constexpr float    KVF_MOST_BYTE  = 127;

// add a row to sums, and its squares to sums of squares
void kvf_add_row(const float * row, uint32_t n, double * sum, double * square);
// quantise x to bytes. returns their scale: x[i] is about scale*dst[i]
float kvf_query_bytes(const float * x, uint32_t n, int8_t * dst);
// convert n half-precision numbers to floats. n is a multiple of 16; the numbers are finite and not negative
void kvf_scales_of(const uint16_t * scales, uint32_t n, float * dst);

// the logits of n_unit units: (sum - middle)*unit*scale of each position + base, soft-capped if cap is not 0. sums: those of
// a unit are N*16 after those of the last one. returns the largest logit
float kvf_logits(const int32_t * sums, uint32_t N, const float * scales, uint32_t n_unit, float middle, float unit,
        float base, float cap, float * dst);
// turn products x [n_unit][16] into logits in place: x*scale + base, soft-capped if cap is not 0. KVF_NONE stays. returns
// the largest logit
float kvf_plain_logits(float * x, uint32_t n_unit, float scale, float base, float cap);
// turn logits x [n_unit][16] into weights exp(x - top), in place. sums: the sum of each unit
void kvf_weigh(float * x, uint32_t n_unit, float top, float * sums);
// multiply weights x by the scales of the values' codes and by `open`, 0 or 1 for each unit, and quantise them to the bytes
// of one query in [n_unit][N][64] (kvf_codes::value_sums()). sum: of the bytes. returns their scale
float kvf_weight_bytes(
        const float * x, const float * scales, const float * open, uint32_t n_unit, uint32_t N, int8_t * dst, int32_t & sum);
// the sum of exp(x - top) over n logits; n is a multiple of 16
float kvf_sum_weights(const float * x, uint32_t n, float top);

float kvf_dot(const float * a, const float * b, uint32_t n);
// products of n keys [n][d] with the first n_q of queries [KVF_MOST_Q][width] -> dst [n_q][KVF_TILE]. queries are 0 from
// element d on
void kvf_dots(const float * keys, uint32_t n, uint32_t d, const float * queries, uint32_t n_q, float * dst);
// the same for the finite half-precision keys of n cells, in rows of `stride` elements
void kvf_half_dots(const uint16_t * rows, size_t stride, const int32_t * cells, uint32_t n, uint32_t d,
        const float * queries, uint32_t n_q, float * dst);
void kvf_scale_by(float * x, uint32_t n, float factor);
void kvf_add_times(float * x, const float * y, uint32_t n, float factor);
// x += factor*(sums - less)
void kvf_add_sums(float * x, const int32_t * sums, uint32_t n, float factor, float less);
