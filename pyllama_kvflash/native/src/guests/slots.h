#pragma once

#include "guests/fresh.h"

#include <atomic>

// The guests of layers in host memory: the units in the slots of each layer, and the copies of their rows.
struct kvf_host_chooser : kvf_chooser {
    explicit kvf_host_chooser(kvf_fresh & fresh);

    std::vector<int32_t> table(llama_seq_id seq, uint32_t layer) override { return tables[seq][layer]; }
    void                 keep(llama_seq_id seq, uint32_t n) override;
    void                 set_table(llama_seq_id seq, uint32_t layer, const int32_t * units, bool fetching) override;
    uint64_t             n_fetched() override { return fetched; }
    uint64_t             device_bytes() override { return 0; }

protected:
    // begin_choice(), then choose() for each sequence: choose the units that enter a layer. they fill its free slots, or if
    // there are none, replace guests with a lower score. score: [n_unit]. their slots count as free until all threads have
    // called fetch_chosen(), which copies the rows
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
