#pragma once

#include "coarse/lanes.h"
#include "pool/impl.h"

#include <vector>

// the keys of one head: n rows of d floats
struct kvf_keys {
    static constexpr uint32_t MOST = 64; // keys of a chunk

    const float * data;
    uint32_t      n, d, stride;

    const float * row(uint32_t i) const { return data + (size_t) i * stride; }
};

// the n keys of a record in one layer, [n][n_embd_k]
std::vector<float> kvf_read_keys(const kvf_layer & layer, uint32_t n, const void * record);

// summaries of chunks, [n_row/16 panels][n_head_kv][n_embd_head_k + 1][16 rows] bf16 for each layer: the rows, and the
// logarithm of the number of keys that each row stands for. a panel stores LANES rows dimension by dimension, so its product
// with a query needs no horizontal sum
struct kvf_summary {
    static size_t size(const kvf_layer & layer, uint32_t n, uint32_t n_row);

    // the index of dimension 0 of a row. the next dimension is LANES further on. after the last one comes the logarithm of
    // the number of keys that the row stands for
    static size_t place(const kvf_layer & layer, uint32_t head, uint32_t row) {
        return ((size_t) (row / LANES) * layer.n_head_kv + head) * (layer.n_embd_head_k + 1) * LANES + row % LANES;
    }

    static void write(const kvf_layer & layer, uint32_t n_chunk, const void * record, int kind, uint32_t n_row,
            uint16_t * dst, uint32_t i);
    static void score(const kvf_layer & layer, const uint16_t * slab, uint32_t n, uint32_t n_row, const float * q,
            float * dst, size_t stride);
    static void mass(const kvf_layer & layer, const uint16_t * const * slabs, uint32_t slab_size, uint32_t n, uint32_t n_row,
            const float * q, uint32_t n_q, float scale, float * dst);
    static void score_keys(const kvf_layer & layer, uint32_t n_chunk, const void * const * records, uint32_t n,
            const float * q, uint32_t n_token, float scale, uint32_t n_edge, float * dst);
};
