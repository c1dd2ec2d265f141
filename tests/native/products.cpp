// the loops of coarse/products.cpp, each by its name, for tests/test_products.py

#include "coarse/products.cpp"

// of the i-th set of instructions; null behind the last one
extern "C" const char * loops_name(uint32_t i) { return i < std::size(LOOPS) ? LOOPS[i].name : nullptr; }
extern "C" bool         loops_are_here(uint32_t i) { return LOOPS[i].is_here(); }

extern "C" void loops_run(uint32_t i, bool of_keys, const uint8_t * codes, uint32_t n_unit, uint32_t n_bit, uint32_t width,
        const int8_t * vectors, uint32_t N, int32_t * res) {
    const packed p = {codes, (size_t) width * LANES * n_bit / 8, n_unit, n_bit, width};
    (of_keys ? LOOPS[i].key : LOOPS[i].value)[N - 1](p, vectors, res);
}
