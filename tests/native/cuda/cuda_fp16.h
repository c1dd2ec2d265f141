#pragma once

// see ggml-cuda/common.cuh beside this

#include <cstdint>

struct half {
    uint16_t bits;
};

struct half2 {
    half x, y;
};
