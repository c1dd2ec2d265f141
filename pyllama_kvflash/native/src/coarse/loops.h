// products of vectors of codes. coarse/products.cpp includes this once in the namespace of each set of instructions: no
// template can have its target for an argument

template <uint32_t N> KVF_TARGET static void key(const packed & p, const int8_t * q, int32_t * res) {
    const bytes mask = each_byte((1 << p.n_bit) - 1);
    for (uint32_t u = 0; u < p.n_unit; ++u, res += N * LANES) {
        // some of the positions at a time: the sums of all may be more than there are registers
        for (uint32_t part = 0; part < QUAD; part += sizeof(bytes)) {
            const uint8_t * from = p.at + u * p.stride + part;
            words           sums[N];
            for (uint32_t i = 0; i < N; ++i) {
                sums[i] = no_words();
            }
            for (uint32_t quad = 0; quad < p.n_quad(); from += QUAD) {
                bytes c = bytes_at(from);
                for (uint32_t end = quad + p.each(); quad < end; ++quad, c = shifted(c, p.n_bit)) {
                    const bytes codes = both(c, mask);
                    for (uint32_t i = 0; i < N; ++i) {
                        sums[i] = add_fours(sums[i], codes, each_word(four_at(q + i * p.width + quad * 4)));
                    }
                }
            }
            for (uint32_t i = 0; i < N; ++i) {
                memcpy(res + i * LANES + part / 4, &sums[i], sizeof(words));
            }
        }
    }
}

template <uint32_t N> KVF_TARGET static void value(const packed & p, const int8_t * w, int32_t * res) {
    const bytes mask = each_byte((1 << p.n_bit) - 1);
    for (uint32_t quad = 0; quad < p.n_quad(); ++quad) {
        const uint8_t * from  = p.at + quad / p.each() * QUAD;
        const uint32_t  shift = quad % p.each() * p.n_bit;
        words           sums[N];
        for (uint32_t i = 0; i < N; ++i) {
            sums[i] = no_words();
        }
        for (uint32_t u = 0; u < p.n_unit; ++u) {
            for (uint32_t part = 0; part < QUAD; part += sizeof(bytes)) {
                const bytes codes = turned(both(shifted(bytes_at(from + u * p.stride + part), shift), mask));
                for (uint32_t i = 0; i < N; ++i) {
                    sums[i] = add_fours(sums[i], codes, bytes_at(w + (u * N + i) * QUAD + part));
                }
            }
        }
        for (uint32_t i = 0; i < N; ++i) {
            put_four(res + i * p.width + quad * 4, sums[i]);
        }
    }
}
