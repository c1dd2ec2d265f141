#pragma once

#include "guests/fresh.h"

#include <atomic>

// Choosing on the CPU: which units are in the slots of each layer, and how their rows come there.
struct kvf_host_chooser : kvf_chooser {
    explicit kvf_host_chooser(kvf_fresh & fresh);

    std::vector<int32_t> table(llama_seq_id seq, uint32_t layer) override { return tables[seq][layer]; }
    void                 keep(llama_seq_id seq, uint32_t n) override;
    void                 set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetching) override;
    uint64_t             n_fetched() override { return fetched; }
    uint64_t             device_bytes() override { return 0; }

protected:
    // Decide which units come to a layer: they fill its free slots, or else are exchanged for guests with a smaller score,
    // [n_unit]. A slot is free until fetch_chosen() has been called for the layer, on all threads or on one
    void begin_choice() { chosen.clear(); }
    void choose(llama_seq_id seq, uint32_t layer, const std::vector<float> & score);
    void fetch_chosen(uint32_t layer, int ith, int nth);

    kvf_fresh &                                    fresh;
    std::vector<std::vector<std::vector<int32_t>>> tables; // [seq][layer][slot]

private:
    struct arrival {
        llama_seq_id seq;
        uint32_t     slot, unit;
    };

    void fetch(uint32_t layer, const kvf_fresh::sequence & s, uint32_t slot, uint32_t unit);

    std::vector<arrival>  chosen;
    std::atomic<uint64_t> fetched = 0;
};
