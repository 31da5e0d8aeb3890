// What the attention kernels take: crates/kvrs-cuda/src/args.rs mirrors every structure.
#pragma once
#include <kvrs/layout.cuh>

namespace kvrs {

constexpr int ROWS = 16;                  // query rows of a unit at most
constexpr int ACC = 4096;                 // rows of a unit times channels of a sum at most
constexpr uint32_t OWN = 0xffffu;         // class of the call's own tokens

// One page of a table, or 64 of the call's own tokens.
struct Entry {
    const uint8_t* page;
    uint64_t live;
    uint32_t first;     // token index of slot 0; own tokens: number of the first among them
    uint32_t gathered;  // where the index of each slot stands in `indices`, or NONE: they follow `first`
    uint32_t column;    // live tokens of the table before it
    uint32_t pad;
};

// Some query rows [query][head of the group] of one sequence against one key-value head.
struct Unit {
    uint64_t record;     // where its logits [rows][tokens] begin
    uint32_t sequence, head, first_row, rows;
    uint32_t first_split, splits;
    uint32_t tokens, pad;
};

// Entries of one class for a unit: one block of threads.
struct Split {
    uint32_t unit, first_entry, entries, group_class;
};

// One sequence of the call.
struct Sequence {
    int64_t start;         // position of index 0
    uint32_t first_index;  // index of the first query
    uint32_t first_query;  // queries of the call before it
    uint32_t prepared;     // where its query 0 stands among the prepared ones, modulo 2^32
    uint32_t pad;
};

enum Stage : uint32_t { WHOLE, LOGITS, VALUES };

struct Attend {
    const Split* splits;
    const Unit* units;
    const Sequence* sequences;
    const Entry* entries;
    const uint32_t* indices;
    const uint32_t* columns;   // column of each query of the call
    const Side* const* sides;  // [head group][class][2]
    const float* queries;      // [classes + 1][prepared][query heads][stride]: prepared, then as they came
    View own_k, own_v;
    float* max;                // [splits][ROWS]
    float* sum;                // [splits][ROWS]
    float* acc;                // [splits][ROWS][acc_stride]
    float* record;             // logits of units, or null
    unsigned long long* value_tiles;  // [2]: seen, read
    const uint32_t* chosen;    // the splits that a launch takes
    uint32_t classes, heads_per_group, group, query_heads, key_dim, value_dim;
    uint32_t query_rows;       // prepared queries times query heads
    uint32_t query_stride, acc_stride, causal, sliding, stage, values, count;  // count: chosen splits
    float scale, softcap;      // softcap 0: none
};

KV_DEVICE float exponential(float x) { return kv_exp2(x * 1.4426950408889634f); }

// A block's place in the call.
struct Place {
    const Attend& call;
    const Split& split;
    const Unit& unit;
    const Sequence& sequence;

    KV_DEVICE explicit Place(const Attend& call, uint32_t index)
        : call(call),
          split(call.splits[index]),
          unit(call.units[split.unit]),
          sequence(call.sequences[unit.sequence]) {}

    KV_DEVICE bool own() const { return split.group_class == OWN; }
    KV_DEVICE uint32_t query(uint32_t row) const { return (unit.first_row + row) / call.group; }
    KV_DEVICE uint32_t query_head(uint32_t row) const {
        return unit.head * call.group + (unit.first_row + row) % call.group;
    }

    // The query of a row, prepared for class `group_class` (or, for `classes`, as it came).
    KV_DEVICE const float* prepared(uint32_t group_class, uint32_t row) const {
        const uint64_t at = uint64_t(sequence.prepared + query(row)) * call.query_heads + query_head(row);
        return call.queries + (group_class * uint64_t(call.query_rows) + at) * call.query_stride;
    }

    KV_DEVICE const Side& side(uint32_t which) const {
        const uint32_t head_group = unit.head / call.heads_per_group;
        return *call.sides[2 * (head_group * call.classes + split.group_class) + which];
    }

    KV_DEVICE uint32_t part() const { return unit.head % call.heads_per_group; }

    KV_DEVICE int64_t index(const Entry& entry, uint32_t slot) const {
        if (own()) return int64_t(sequence.first_index) + entry.first + slot;
        return entry.gathered == NONE ? int64_t(entry.first) + slot : call.indices[entry.gathered + slot];
    }

    // Slots of an entry that a row sees, as bits.
    KV_DEVICE uint64_t mask(const Entry& entry, uint32_t row) const {
        const int64_t at = int64_t(sequence.first_index) + query(row);
        const int64_t end = call.causal || own() ? at + 1 : int64_t(0x7fffffffffffffff);
        const int64_t start = call.sliding == NONE ? 0 : at + 1 - int64_t(call.sliding);
        if (entry.gathered == NONE) {
            const int64_t first = index(entry, 0);
            return entry.live & ~lowest(start - first) & lowest(end - first);
        }
        uint64_t bits = 0;
#pragma unroll 1
        for (uint32_t slot = 0; slot < PAGE_SLOTS; slot++) {
            if (!(entry.live >> slot & 1)) continue;
            const int64_t token = index(entry, slot);
            bits |= uint64_t(token >= start && token < end) << slot;
        }
        return bits;
    }

    // The lowest n bits.
    KV_DEVICE static uint64_t lowest(int64_t n) {
        return n <= 0 ? 0 : n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1;
    }

    KV_DEVICE bool visible(const Entry& entry, uint32_t slot, uint32_t row) const {
        if (!(entry.live >> slot & 1)) return false;
        const int64_t token = index(entry, slot), at = int64_t(sequence.first_index) + query(row);
        if (token > at && (call.causal || own())) return false;
        return call.sliding == NONE || token + call.sliding > at;
    }
};

}  // namespace kvrs
