// Slots move between pages of one codec as codes: nothing is encoded again.
#include <kvrs/portable.cuh>
#include <kvrs/layout.cuh>
#include <kvrs/planes.cuh>

namespace kvrs {

struct SlotCopy {
    const uint8_t* from;
    uint8_t* to;
    uint32_t from_slot, to_slot;
};

// Copies into one page, one after the other: slots share bytes.
struct PageCopies {
    uint32_t first, copies;
    const Side* const* sides;
};

struct Copy {
    const SlotCopy* copies;
    const PageCopies* pages;
};

namespace {

// Merges the cells of one token of a block from one tile into another, byte by byte: a thread owns bytes of the target.
struct TokenMove {
    const Side& side;
    const Run& run;
    const uint8_t* from;
    uint8_t* to;
    uint32_t from_token, to_token;

    KV_DEVICE uint32_t code(uint32_t block, const Planes& planes, uint32_t channel) const {
        const uint32_t summed = side.is_key ? channel : from_token, lane = side.is_key ? from_token : channel;
        return code_at(from, planes, block, summed / 4, 4 * lane + summed % 4);
    }

    KV_DEVICE void set(uint32_t at, uint32_t mask, uint32_t bits) const { to[at] = uint8_t((to[at] & ~mask) | bits); }

    // Codes of a token stand in 16 cells of a block. Keys: cells of one field share no byte but in planes 4 and 2, where
    // fields do; values: no two channels share a byte but for lone blocks of odd width. One thread takes a block.
    KV_DEVICE void block(uint32_t block) const {
        const Planes p(run.width, block, run.channels);
        for (uint32_t channel = 0; channel < TILE; channel++) {
            const uint32_t summed = side.is_key ? channel : to_token, lane = side.is_key ? to_token : channel;
            const uint32_t field = summed / 4, byte = 4 * lane + summed % 4, x = code(block, p, channel);
            if (run.width == 8) {
                to[block * 256 + 64 * field + byte] = uint8_t(x);
                continue;
            }
            if (run.width & 4) {
                const uint32_t shift = 4 * (field & 1);
                set(p.four + 64 * (field / 2) + byte, 15u << shift, (x & 15) << shift);
            }
            if (run.width & 2) set(p.two + byte, 3u << (2 * field), (x >> p.low_two & 3) << (2 * field));
            if (run.width & 1) {
                const uint32_t shift = one_bit(run.width, field) + 4 * (p.lone ? byte / 32 : p.odd);
                set(p.one + (p.lone ? byte % 32 : byte), 1u << shift, (x >> p.low_one & 1) << shift);
            }
        }
    }
};

KV_DEVICE void copy_bytes(const uint8_t* from, uint8_t* to, uint32_t bytes) {
    for (uint32_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

KV_DEVICE void copy_side(const Side& side, const SlotCopy& job) {
    const uint32_t a = job.from_slot, b = job.to_slot;
    for (uint32_t r = 0; r < side.runs; r++) {
        const Run& run = side.run[r];
        const uint8_t* from = job.from + side.codes_at + a / TILE * side.tile_bytes + run.at;
        uint8_t* to = job.to + side.codes_at + b / TILE * side.tile_bytes + run.at;
        if (run.width == 16) {
            const uint32_t row = 2 * run.channels;
            copy_bytes(from + a % TILE * row, to + b % TILE * row, row);
            continue;
        }
        // Both blocks of a pair share plane 1: a thread takes the pair.
        const TokenMove move{side, run, from, to, a % TILE, b % TILE};
        for (uint32_t block = 2 * threadIdx.x; block < run.channels / 16; block += 2 * blockDim.x) {
            move.block(block);
            if (block + 1 < run.channels / 16) move.block(block + 1);
        }
    }
    for (uint32_t i = 0; i < side.scales; i++) {
        const uint32_t at = side.scales_at + 2 * i * side.slots;
        copy_bytes(job.from + at + 2 * a, job.to + at + 2 * b, 2);
    }
    if (side.inner == TOKEN_BLOCK) {
        const uint32_t size = 4 * ((side.n + side.block - 1) / side.block);
        copy_bytes(job.from + side.inner_at + a * size, job.to + side.inner_at + b * size, size);
    }
}

}  // namespace
}  // namespace kvrs

// Grid: (target pages, 2 sides).
KV_KERNEL(kvrs_copy_slots, 32, 16)(const kvrs::Copy call) {
    using namespace kvrs;
    const PageCopies& page = call.pages[blockIdx.x];
    for (uint32_t i = 0; i < page.copies; i++) {
        copy_side(*page.sides[blockIdx.y], call.copies[page.first + i]);
        __syncwarp();
    }
}
