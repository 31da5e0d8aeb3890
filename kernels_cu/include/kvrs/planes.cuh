// Codes of 1 to 8 bits as planes of 4, 2 and 1 bits: crates/kvrs-codec/src/layout/planes.rs.
//
// A cell of a 16 x 16 block is (field 0..3, byte 0..63): the summed axis is 4 * field + byte % 4, the lane byte / 4.
#pragma once
#include <kvrs/layout.cuh>

namespace kvrs {

// Where the planes of a block lie in the tile of its run, in bytes.
struct Planes {
    uint32_t four, two, one;
    uint32_t width, low_two, low_one;  // bits of a code below plane 2 and plane 1
    uint32_t odd;                      // the block is the second of its pair
    bool lone;                         // the block has no partner

    KV_DEVICE Planes(uint32_t width, uint32_t block, uint32_t channels) : width(width), odd(block & 1) {
        lone = (block | 1) >= channels / 16;
        const uint32_t blocks = lone ? 1 : 2;
        four = (block / 2) * 64 * width;
        two = four + (width & 4 ? blocks * 128 : 0);
        one = two + (width & 2 ? blocks * 64 : 0);
        four += odd * 128;
        two += odd * 64;
        low_two = width & 4;
        low_one = low_two + (width & 2);
    }
};

// Bit of plane 1 that belongs to a field: width 3 uses the half of the nibble that plane 2 leaves free.
KV_DEVICE uint32_t one_bit(uint32_t width, uint32_t field) { return width == 3 ? (0x1302u >> (4 * field)) & 3 : field; }

// The code of a cell in block `block` of a run's tile.
KV_DEVICE uint32_t code_at(const uint8_t* tile, const Planes& p, uint32_t block, uint32_t field, uint32_t byte) {
    if (p.width == 8) return kv_load<uint8_t>(tile + block * 256 + 64 * field + byte);
    uint32_t code = 0;
    if (p.width & 4) code = kv_load<uint8_t>(tile + p.four + 64 * (field / 2) + byte) >> (4 * (field & 1)) & 15;
    if (p.width & 2) code |= (kv_load<uint8_t>(tile + p.two + byte) >> (2 * field) & 3) << p.low_two;
    if (p.width & 1) {
        const uint32_t high = p.lone ? byte / 32 : p.odd;
        const uint32_t bits = kv_load<uint8_t>(tile + p.one + (p.lone ? byte % 32 : byte));
        code |= (bits >> (one_bit(p.width, field) + 4 * high) & 1) << p.low_one;
    }
    return code;
}

// The byte of plane 4 that holds the cells (2 * half, byte) and (2 * half + 1, byte); `cell(field, byte)` gives codes.
template <class Cells> KV_DEVICE uint32_t plane_four(const Cells& cell, uint32_t half, uint32_t byte) {
    return (cell(2 * half, byte) & 15) | (cell(2 * half + 1, byte) & 15) << 4;
}

template <class Cells> KV_DEVICE uint32_t plane_two(const Cells& cell, uint32_t low, uint32_t byte) {
    uint32_t bits = 0;
    for (uint32_t field = 0; field < 4; field++) bits |= (cell(field, byte) >> low & 3) << (2 * field);
    return bits;
}

// The nibble of plane 1 of a byte.
template <class Cells> KV_DEVICE uint32_t plane_one(const Cells& cell, const Planes& p, uint32_t byte) {
    uint32_t bits = 0;
    for (uint32_t field = 0; field < 4; field++) {
        bits |= (cell(field, byte) >> p.low_one & 1) << one_bit(p.width, field);
    }
    return bits;
}

}  // namespace kvrs
