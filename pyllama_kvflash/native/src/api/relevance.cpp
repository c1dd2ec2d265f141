// relevance: argument checks for the summaries and scores of pool/summary.cpp and pool/score.cpp

#include "api/args.h"
#include "pool/summary.h"

#include "llama-impl.h"

static void check_summary(const kvf_layer * layer, uint32_t n, int kind, uint32_t n_row, uint32_t n_chunk) {
    kvf_check(layer, "layer must not be null");
    if (layer->n_embd_head_k % 2 || layer->n_head_kv == 0 || layer->n_head % layer->n_head_kv ||
            layer->n_embd_k != layer->n_head_kv * layer->n_embd_head_k) {
        throw kvf_failure(KVF_E_UNSUPPORTED, format("the keys of layer %d are not %u heads of %u dimensions", layer->il,
                                                     layer->n_head_kv, layer->n_embd_head_k));
    }
    const bool one = kind == KVF_SUMMARY_MEAN || kind == KVF_SUMMARY_DIRECTION;
    kvf_check(kind >= KVF_SUMMARY_CENTROIDS && kind <= KVF_SUMMARY_ROWS, "the kind of summary is unknown");
    kvf_check(n_row >= 1 && n_row <= 64 && (n_row & (n_row - 1)) == 0, "n_row must be 1, 2, 4, ... or 64");
    kvf_check(n_chunk == 0 || n_row <= n_chunk, "n_row must not exceed n_chunk");
    kvf_check(n >= 1 && n <= INT32_MAX / 64, "a slab must have 1 to 2^25 - 1 entries");
    kvf_check((!one || n_row == 1) && (kind != KVF_SUMMARY_ROWS || n_chunk == 0 || n_row == n_chunk),
            "n_row must be 1 for a mean or direction, and n_chunk for rows");
}

int kvf_summary_size(const struct kvf_layer * layer, uint32_t n, uint32_t n_row, size_t * size) {
    return kvf_guard([&] {
        check_summary(layer, n, KVF_SUMMARY_CENTROIDS, n_row, 0);
        kvf_check(size, "size must not be null");
        *size = kvf_summary::size(*layer, n, n_row);
    });
}

static void check_record(const kvf_layer & layer, uint32_t n_chunk, const void * record, size_t record_size) {
    kvf_check(n_chunk == 16 || n_chunk == 32 || n_chunk == 64, "n_chunk must be 16, 32 or 64");
    kvf_check(record && layer.size_k == ggml_row_size((ggml_type) layer.type_k, layer.n_embd_k) * n_chunk &&
                      layer.offs_k + layer.size_k <= record_size,
            "the record is shorter than this layer's keys");
}

int kvf_summarise(const struct kvf_layer * const * layers, uint32_t n_layer, uint32_t n_chunk, const void * record,
        size_t record_size, int kind, uint32_t n_row, uint16_t * const * slabs, uint32_t i, uint32_t n) {
    return kvf_guard([&] {
        kvf_check(layers && slabs && i < n, "layers and slabs must not be null; i must be below n");
        for (uint32_t il = 0; il < n_layer; ++il) {
            check_summary(layers[il], n, kind, n_row, n_chunk);
            check_record(*layers[il], n_chunk, record, record_size);
            kvf_check(slabs[il], "the slab of a layer is null");
        }
        for (uint32_t il = 0; il < n_layer; ++il) {
            kvf_summary::write(*layers[il], n_chunk, record, kind, n_row, slabs[il], i);
        }
    });
}

int kvf_score_keys(const struct kvf_layer * layer, uint32_t n_chunk, const void * const * records, uint32_t n,
        size_t record_size, const float * q, uint32_t n_token, float scale, uint32_t n_edge, float * dst) {
    return kvf_guard([&] {
        check_summary(layer, 1, KVF_SUMMARY_MEAN, 1, n_chunk);
        kvf_check(records && q && n_token >= 1 && dst, "records, q and dst must not be null; n_token must be at least 1");
        for (uint32_t i = 0; i < n; ++i) {
            check_record(*layer, n_chunk, records[i], record_size);
        }
        kvf_check(n_edge <= n_chunk && (scale != 0 || n_edge == 0),
                "n_edge must not exceed n_chunk, and must be 0 if scale is 0");
        kvf_summary::score_keys(*layer, n_chunk, records, n, q, n_token, scale, n_edge, dst);
    });
}

int kvf_score(const struct kvf_layer * layer, const uint16_t * slab, uint32_t n, uint32_t n_row, const float * q,
        float * dst, size_t stride) {
    return kvf_guard([&] {
        check_summary(layer, n, KVF_SUMMARY_CENTROIDS, n_row, 0);
        kvf_check(slab && q && dst && stride >= n, "slab, q and dst must not be null; stride must be at least n");
        kvf_summary::score(*layer, slab, n, n_row, q, dst, stride);
    });
}

int kvf_mass(const struct kvf_layer * const * layers, uint32_t n_layer, const uint16_t * const * const * slabs,
        uint32_t slab_size, uint32_t n, uint32_t n_row, const float * const * q, uint32_t n_q, const float * scales,
        float * dst) {
    return kvf_guard([&] {
        kvf_check(layers && slabs && q && scales && dst && n_q >= 1,
                "layers, slabs, q, scales and dst must not be null; n_q must be at least 1");
        kvf_check(slab_size * n_row % 16 == 0, "slab_size*n_row must be a multiple of 16");
        for (uint32_t i = 0; i < n_layer; ++i) {
            check_summary(layers[i], slab_size, KVF_SUMMARY_CENTROIDS, n_row, 0);
            kvf_check(slabs[i] && q[i], "the slabs or queries of a layer are null");
            kvf_summary::mass(*layers[i], slabs[i], slab_size, n, n_row, q[i], n_q, scales[i], dst + (size_t) i * n);
        }
    });
}
