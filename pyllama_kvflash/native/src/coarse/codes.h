#pragma once

#include "coarse/lanes.h"
#include "kvflash.h"

#include <array>
#include <utility>
#include <vector>

// The rows of a layer, either its keys or its values, in 4 or 2 bits per element. Each head of a row is encoded separately:
//
// 1. Keys of a quantised cache have llama.cpp's own Hadamard rotation. turn_back() undoes it.
// 2. Each element of a key is divided by the root of its standard deviation over the text (`spread`). Queries are multiplied
//    by it. Some elements vary much more than others, and queries may be large where keys vary little. If queries are alike
//    in all elements, this division gives the products the least noise.
// 3. The row is rotated, so that its elements are alike, and the noise of the codes is spread evenly over them (QuaRot,
//    Ashkboos et al. 2024, arXiv 2404.00456). The rotation changes signs, and then applies Hadamard matrices, whose sizes
//    are the powers of two that add up to the row's width.
// 4. The mean is subtracted. Keys turn with their position (RoPE), so each segment of positions has its own mean.
// 5. The row is divided by its own standard deviation. Each element becomes the nearest of 16 or 4 equally spaced levels,
//    with the best step for normally distributed values (Max 1960, table II). So a code is a number, and products use it
//    directly.
//
// The codes of a unit of 16 positions and a head are contiguous: [width/8][16][4] bytes with 4 bits, [width/16][16][4] with
// 2. A byte holds 2 or 4 elements of one position, 4 apart. So shifts unpack a vector of 64 bytes, and instructions that add
// up four products of bytes apply: of four elements for logits, of four positions for sums of values. The units of a tile
// and a head are contiguous, too, in the order in which they are read.
struct kvf_codes {
    static constexpr uint32_t UNIT     = LANES; // positions
    static constexpr uint32_t SEGMENT  = 4096;  // positions that share a mean
    static constexpr uint32_t OWN_MEAN = 1024;  // with fewer known positions, a later segment takes the mean before it
    static constexpr uint32_t TILE     = 64;    // contiguous units of a head
    static constexpr uint32_t QUAD     = 64;    // bytes: 4 of each of 16 positions

    // n_rot: the block size of llama.cpp's rotation of rows and queries; 0: they are not rotated
    kvf_codes(uint32_t n_head, uint32_t d, uint32_t n_bit, uint32_t n_rot = 0);

    // undo llama.cpp's rotation of rows [n][n_head*d]
    void turn_back(float * rows, uint32_t n) const;

    // encode rows [n][n_head*d], already turned back, of positions pos, pos + 1, ... pos and n are multiples of UNIT.
    // begin() must have been called for their segments
    void put(uint32_t pos, const float * rows, uint32_t n);

    // sums of n_sum rows of a segment, and of their squares, each [n_head*d]
    struct moments {
        uint32_t            segment, n_sum = 0;
        std::vector<double> sum, square;
    };

    // the moments of a segment, still without rows
    moments moments_of(uint32_t segment) const;
    // set the divisors of keys, from all segments that are known when the first one begins
    void spread_over(const std::vector<moments> & segments);
    // set the means of segments, in ascending order. a segment without sums takes the mean of the one before
    void begin(const std::vector<moments> & segments);

    // bytes of the divisors, of a segment's means, and of a unit's scales and codes
    size_t spread_size() const { return n_head * d * sizeof(float); }
    size_t mean_size() const { return n_head * width * sizeof(float); }
    size_t unit_size() const { return n_head * (UNIT * sizeof(uint16_t) + unit_bytes()); }
    size_t n_segment(uint32_t n) const { return (n + SEGMENT - 1) / SEGMENT; }
    // bytes for n positions
    size_t size(uint32_t n) const {
        return spread_size() + n_segment(n) * mean_size() + (n + UNIT - 1) / UNIT * unit_size();
    }
    void get_factors(float * dst) const; // [n_head*d]: spread times sign, the factors of queries before the rotation
    // reserve memory for n positions, so that it need not grow
    void reserve(uint32_t n);
    // the memory of the codes, scales and means of the first n positions, in whole tiles; it grows if needed
    std::array<std::pair<char *, size_t>, 3> memory(uint32_t n);
    // free that memory, because a GPU has the codes
    void drop();

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

    // x [width]: each lane is a row or a query of a head, with zeros from element d on. rotate() also divides by `spread`,
    // and rotate_query() multiplies. rotate_back() turns rotated sums into the basis of the cache
    void rotate(uint32_t head, lanes_f * x) const;
    void rotate_query(uint32_t head, lanes_f * x) const;
    void rotate_back(uint32_t head, lanes_f * x) const;

    // Products of the units of one tile with N vectors (1 to 8) of bytes from -127 to 127. Codes count from 0 up, so the
    // caller subtracts middle() times the sum of the bytes.
    //
    // queries [N][width] -> res [n_unit][N][16]
    void key_products(
            uint32_t head, uint32_t first, uint32_t n_unit, const int8_t * queries, uint32_t N, int32_t * res) const;
    // weights [n_unit][N][64] -> res [N][width]. the weight of position i is in bytes 16*(i/4) + i%4, +4, +8 and +12
    void value_sums(uint32_t head, uint32_t first, uint32_t n_unit, const int8_t * weights, uint32_t N, int32_t * res) const;

    uint32_t n_half() const { return 1 << (n_bit - 1); } // levels on each side of 0
    float    middle() const { return n_half() - 0.5f; }
    float    step() const { return n_bit == 4 ? 0.3352f : 0.9957f; } // between levels, in standard deviations

    // 32 bits, for tests: rotated rows as floats, [width][16] for each unit and head. they show that each position counts
    // once
    bool is_exact() const { return n_bit == 32; }
    // products of units with a rotated query [width] -> res [n_unit][16]
    void exact_products(uint32_t head, uint32_t first, uint32_t n_unit, const float * query, float * res) const;
    // add the rows of a unit, times weights [16] and a factor, to res [width]
    void exact_sum(uint32_t head, uint32_t u, const float * weights, float factor, float * res) const;

    const uint32_t n_head, d, n_bit, n_rot, width;

private:
    void   turn(lanes_f * x) const;
    void   grow(uint32_t n_unit);
    size_t slot(uint32_t u, uint32_t head) const { return ((size_t) u / TILE * n_head + head) * TILE + u % TILE; }

    std::vector<float>    spread; // the divisors of rows before the rotation [n_head*d]
    kvf_aligned<uint8_t>  codes;
    kvf_aligned<uint16_t> scales; // the size of a step [tile][head][unit][16], in half precision
    kvf_aligned<float>    means;  // rotated [segment][head][width]
    std::vector<uint32_t> blocks; // the sizes of the rotation's matrices
};
