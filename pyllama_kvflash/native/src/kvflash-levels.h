#pragma once

#include "kvflash-codes.h"

static constexpr uint32_t KVF_QUAD = 64; // bytes: four values of 16 positions

// positive halves of the levels, in steps of a byte, and how many steps a standard deviation has. those of Max, to the
// nearest whole step; the squared error is 1/3 of a percent larger than with his
static constexpr float    HALF_FOUR[] = {2.5f, 7.5f, 12.5f, 18.5f, 24.5f, 31.5f, 40.5f, 53.5f};
static constexpr float    HALF_TWO[]  = {17.5f, 58.5f};
static constexpr float    STEPS_FOUR = 19.56f, STEPS_TWO = 38.73f;
static constexpr uint32_t N_HALF_FOUR = 8, N_HALF_TWO = 2;

struct kvf_levels {
    uint8_t       table[16]; // those of 2 bits four times
    const float * half;
    uint32_t      n_half;
    float         steps;

    explicit kvf_levels(uint32_t n_bit) :
        half(n_bit == 4 ? HALF_FOUR : HALF_TWO), n_half(n_bit == 4 ? N_HALF_FOUR : N_HALF_TWO),
        steps(n_bit == 4 ? STEPS_FOUR : STEPS_TWO) {
        for (uint32_t i = 0; i < 16; ++i) {
            const uint32_t code = i % (2 * n_half);
            const float    x    = code < n_half ? -half[n_half - 1 - code] : half[code - n_half];
            table[i]            = (uint8_t) (kvf_codes::middle() + x);
        }
    }
};

static inline const kvf_levels & kvf_levels_of(uint32_t n_bit) { // not of 32
    static const kvf_levels four(4), two(2);
    return n_bit == 4 ? four : two;
}
