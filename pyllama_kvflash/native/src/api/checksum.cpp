// checksums of records and codes: 128-bit XXH3, which is as fast as memory. llama.cpp vendors it

#include "kvflash.h"

#define XXH_INLINE_ALL
#include "hash/xxhash/xxhash.h"

#include <new>

struct kvf_checksum {
    XXH3_state_t state; // needs a larger alignment than malloc() gives
};

kvf_checksum * kvf_checksum_new() {
    auto * res = new (std::nothrow) kvf_checksum;
    if (res) { XXH3_128bits_reset(&res->state); }
    return res;
}

void kvf_checksum_add(kvf_checksum * sum, const void * data, size_t size) { XXH3_128bits_update(&sum->state, data, size); }

void kvf_checksum_get(const kvf_checksum * sum, uint8_t * dst) {
    XXH128_canonicalFromHash((XXH128_canonical_t *) dst, XXH3_128bits_digest(&sum->state));
}

void kvf_checksum_free(kvf_checksum * sum) { delete sum; }
