// products of codes. coarse/products.cpp includes this file in the namespace of each instruction set, because a template
// cannot take its target as an argument

template <uint32_t N> KVF_TARGET static void key(const packed & p, const int8_t * q, int32_t * res) {
    const bytes mask = bytes{} + p.mask();
    for (uint32_t u = 0; u < p.n_unit; ++u, res += N * LANES) {
        // a part of the positions at a time: there may be too few registers for the sums of all
        for (uint32_t part = 0; part < QUAD; part += sizeof(bytes)) {
            const uint8_t * from = p.at + u * p.stride + part;
            words           sums[N];
            std::fill_n(sums, N, words{});
            for (uint32_t quad = 0; quad < p.n_quad(); from += QUAD) {
                bytes c = vector_at<bytes>(from);
                for (uint32_t end = quad + p.each(); quad < end; ++quad, c = (bytes) ((pairs) c >> p.n_bit)) {
                    const bytes codes = c & mask;
                    for (uint32_t i = 0; i < N; ++i) {
                        const int32_t four = vector_at<int32_t>(q + i * p.width + quad * 4);
                        sums[i]            = add_fours(sums[i], codes, (bytes) (words{} + four));
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
    const bytes mask = bytes{} + p.mask();
    for (uint32_t quad = 0; quad < p.n_quad(); ++quad) {
        const uint8_t * from  = p.at + quad / p.each() * QUAD;
        const uint32_t  shift = quad % p.each() * p.n_bit;
        words           sums[N];
        std::fill_n(sums, N, words{});
        for (uint32_t u = 0; u < p.n_unit; ++u) {
            for (uint32_t part = 0; part < QUAD; part += sizeof(bytes)) {
                const bytes codes = (bytes) ((pairs) vector_at<bytes>(from + u * p.stride + part) >> shift) & mask;
                const bytes its   = turned(codes);
                for (uint32_t i = 0; i < N; ++i) {
                    sums[i] = add_fours(sums[i], its, vector_at<bytes>(w + (u * N + i) * QUAD + part));
                }
            }
        }
        for (uint32_t i = 0; i < N; ++i) {
            four_words parts[sizeof(words) / sizeof(four_words)], sum = {};
            memcpy(parts, &sums[i], sizeof(parts));
            for (const four_words & part : parts) {
                sum += part;
            }
            memcpy(res + i * p.width + quad * 4, &sum, sizeof(sum));
        }
    }
}
