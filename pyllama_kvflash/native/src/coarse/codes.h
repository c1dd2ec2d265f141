#pragma once

#include "coarse/lanes.h"
#include "kvflash.h"

#include <array>
#include <utility>
#include <vector>

// Rows of a layer, its keys or its values, in 4 or 2 bits a value. A row is rotated, so that its values are alike, taken
// about the mean of its head, and divided by its own standard deviation. Then each value becomes the nearest of 16 (4)
// levels, equally spaced, as is best for normal values (Max 1960, table II; the rotation is QuaRot's, Ashkboos et al. 2024,
// arXiv 2404.00456). So a code is a number, which products take as it is.
//
// The rotation is by Hadamard's matrices of the powers of two that add up to the row's width, after a change of signs. It
// spreads the noise of the codes evenly over the values of a row. But keys differ much in some of their values and little in
// others, and queries may be large in the latter. So keys are first divided by the root of each value's spread, and queries
// multiplied by it: where queries are alike in all values, that is the least noise of their products. A quantised cache has
// keys that are rotated (llama.cpp's own rotation, by Hadamard's matrix): they are turned back before.
//
// Keys turn with their position (RoPE), so each segment of positions has a mean of its own.
//
// The codes of a unit of 16 positions and a head lie together, [width/8][16][4] bytes with 4 bits and [width/16][16][4] with
// 2: a byte has the values 4 apart of one position. So a vector of 64 bytes is unpacked by shifts, and
// products with bytes add up in fours: along the width for logits, and along the positions for sums of values. The units of
// a tile and a head lie one after the other, as they are read.
struct kvf_codes {
    static constexpr uint32_t UNIT     = LANES; // positions
    static constexpr uint32_t SEGMENT  = 4096;  // positions with a mean of their own
    static constexpr uint32_t OWN_MEAN = 1024;  // if so many are known when it begins; else with that of the segment before
    static constexpr uint32_t TILE     = 64;    // units of a head that lie together
    static constexpr uint32_t QUAD     = 64;    // bytes: four values of 16 positions

    // n_rot: rows and queries come rotated in blocks of so many values; 0: they do not
    kvf_codes(uint32_t n_head, uint32_t d, uint32_t n_bit, uint32_t n_rot = 0);

    // rows [n][n_head*d] as they were before they were rotated
    void turn_back(float * rows, uint32_t n) const;

    // rows: [n][n_head*d], turned back, of positions from pos on; both are multiples of UNIT. mean() has been called for
    // their segments
    void put(uint32_t pos, const float * rows, uint32_t n);

    // what the next ones are about: sums of n_sum rows of a segment, and of their squares, each [n_head*d]
    struct moments {
        uint32_t            segment, n_sum = 0;
        std::vector<double> sum, square;
    };

    // of none so far
    moments moments_of(uint32_t segment) const;
    // what rows are divided by, of keys: by the sums of all segments that are known when the first one begins
    void spread_over(const std::vector<moments> & segments);
    // begin segments, in their order. those without sums have the mean of the segment before
    void begin(const std::vector<moments> & segments);

    // bytes of what rows are divided by, of a segment's means, and of a unit: scales and codes
    size_t spread_size() const { return n_head * d * sizeof(float); }
    size_t mean_size() const { return n_head * width * sizeof(float); }
    size_t unit_size() const { return n_head * (UNIT * sizeof(uint16_t) + unit_bytes()); }
    size_t n_segment(uint32_t n) const { return (n + SEGMENT - 1) / SEGMENT; }
    // of n positions
    size_t size(uint32_t n) const {
        return spread_size() + n_segment(n) * mean_size() + (n + UNIT - 1) / UNIT * unit_size();
    }
    void get_factors(float * dst) const; // [n_head*d]: by which values of queries are multiplied before they are rotated
    // memory for n positions, so that it need not grow
    void reserve(uint32_t n);
    // the codes, scales and means of the first n positions as they lie, whole tiles of them; and none of them, where a GPU
    // has them
    std::array<std::pair<char *, size_t>, 3> memory(uint32_t n);
    void                                     drop();

    float *    spread_data() { return spread.data(); }
    uint8_t *  unit(uint32_t u, uint32_t head) { return codes.data() + slot(u, head) * unit_bytes(); }
    uint16_t * scale(uint32_t u, uint32_t head) { return scales.data() + slot(u, head) * UNIT; }
    float *    mean(uint32_t segment, uint32_t head) { return means.data() + ((size_t) segment * n_head + head) * width; }

    const uint8_t *  unit(uint32_t u, uint32_t head) const { return codes.data() + slot(u, head) * unit_bytes(); }
    const uint16_t * scale(uint32_t u, uint32_t head) const { return scales.data() + slot(u, head) * UNIT; }
    const float *    mean(uint32_t segment, uint32_t head) const {
        return means.data() + ((size_t) segment * n_head + head) * width;
    }
    size_t unit_bytes() const { return (size_t) width * UNIT * n_bit / 8; }

    // x: [width] of lanes that are rows or queries of a head, with zeros from d on
    void rotate(uint32_t head, lanes_f * x) const;
    void rotate_query(uint32_t head, lanes_f * x) const;
    void rotate_back(uint32_t head, lanes_f * x) const;

    // Products of whole units of a tile with N vectors of bytes from -127 to 127, N: 1 to 8. A code counts as it is, from 0
    // on: the caller takes middle() times the sum of the bytes off.
    //
    // with queries [N][width]: [n_unit][N][16]
    void key_products(
            uint32_t head, uint32_t first, uint32_t n_unit, const int8_t * queries, uint32_t N, int32_t * res) const;
    // with weights [n_unit][N][64], that of position i at bytes 16*(i/4) + i%4, +4, +8, +12: [N][width]
    void value_sums(uint32_t head, uint32_t first, uint32_t n_unit, const int8_t * weights, uint32_t N, int32_t * res) const;

    uint32_t n_half() const { return 1 << (n_bit - 1); } // levels of a sign
    float    middle() const { return n_half() - 0.5f; }
    float    step() const { return n_bit == 4 ? 0.3352f : 0.9957f; } // from level to level, of a standard deviation

    // 32 bits: rotated rows as they are, [width][16] floats of a unit and head, by which tests know that every position
    // counts once
    bool is_exact() const { return n_bit == 32; }
    // products of units with a rotated query [width]: [n_unit][16]
    void exact_products(uint32_t head, uint32_t first, uint32_t n_unit, const float * query, float * res) const;
    // and the sum of those of a unit by weights [16] times a factor, which is added to res [width]
    void exact_sum(uint32_t head, uint32_t u, const float * weights, float factor, float * res) const;

    const uint32_t n_head, d, n_bit, n_rot, width;

private:
    void   turn(lanes_f * x) const;
    void   grow(uint32_t n_unit);
    size_t slot(uint32_t u, uint32_t head) const { return ((size_t) u / TILE * n_head + head) * TILE + u % TILE; }

    std::vector<float>    spread; // what rows are divided by before they are rotated: [n_head*d]
    kvf_aligned<uint8_t>  codes;
    kvf_aligned<uint16_t> scales; // half precision: of a step, [tile][head][unit][16]
    kvf_aligned<float>    means;  // rotated: [segment][head][width]
    std::vector<uint32_t> blocks; // of the rotation
};
