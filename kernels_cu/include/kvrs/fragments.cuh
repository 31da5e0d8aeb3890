// Codes of 1 to 4 bits as operands of mma.m16n8k32: bytes of levels, looked up four at a time.
//
// A word of a plane holds neighbouring codes of one lane (a token of keys, a channel of values). Nibbles of a word
// select bytes, so the summed axis is met in the order in which nibbles stand; ORDER says which four of the 8 or 16
// summed places of a word a register holds.
#pragma once
#include <kvrs/layout.cuh>

namespace kvrs {

// 16 levels of one run, as prmt reads them.
struct Levels {
    uint32_t word[4];

    KV_DEVICE explicit Levels(const int8_t* lut, uint32_t width) {
        for (uint32_t w = 0; w < 4; w++) {
            word[w] = 0;
            for (uint32_t b = 0; b < 4; b++) {
                const uint32_t code = (4 * w + b) & ((1u << width) - 1);
                word[w] |= uint32_t(uint8_t(lut[code])) << (8 * b);
            }
        }
    }
    Levels() = default;

    // The levels of the four nibbles in the low half of `codes`, which stay below 8.
    KV_DEVICE uint32_t of_8(uint32_t codes) const { return __byte_perm(word[0], word[1], codes); }

    // As above for any nibbles; `low` are the nibbles without their top bits, `top` selects by them.
    KV_DEVICE uint32_t of_16(uint32_t low, uint32_t top) const {
        return __byte_perm(__byte_perm(word[0], word[1], low), __byte_perm(word[2], word[3], low), top);
    }
};

// Eight codes as two registers.
struct Octet {
    uint32_t b[2];
};

// Eight codes of 4 bits: places 0 4 1 5 | 2 6 3 7.
KV_DEVICE Octet octet_4(const Levels& levels, uint32_t w) {
    const uint32_t low = w & 0x77777777u, top = ((w >> 1) & 0x44444444u) | 0x32103210u;
    return {{levels.of_16(low, top), levels.of_16(low >> 16, top >> 16)}};
}

// Eight codes below 8 whose nibbles stand in `w`: places 0 8 1 9 | 2 10 3 11 of sixteen (or four later).
KV_DEVICE Octet octet_8(const Levels& levels, uint32_t w) { return {{levels.of_8(w), levels.of_8(w >> 16)}}; }

// Nibbles of the fields `odd`, `odd` + 2 of a word of plane 2.
KV_DEVICE uint32_t nibbles_2(uint32_t w, uint32_t odd) { return (odd ? w >> 2 : w) & 0x33333333u; }

// One bit of the same fields: of a nibble in plane 1, that of an odd block moved down. Widths 1 and 3 order it apart.
KV_DEVICE uint32_t nibbles_1(uint32_t nibble, uint32_t odd) {
    const uint32_t x = odd ? nibble >> 1 : nibble;
    return (x & 0x01010101u) | (x & 0x04040404u) << 2;
}

KV_DEVICE uint32_t top_bits_3(uint32_t nibble, uint32_t odd) {
    // Fields 0 1 2 3 have bits 2 0 3 1; they become bit 2 of a nibble.
    const uint32_t low = odd ? nibble << 2 : nibble;
    return (low & 0x04040404u) | (low & 0x08080808u) << 3;
}

// The words of four neighbouring lanes; lanes that share words load a part each and exchange.
struct Quad {
    uint32_t w[4];
};

KV_DEVICE Quad load_quad(const uint8_t* at) {
    const uint4 v = kv_load<uint4>(at);
    return {{v.x, v.y, v.z, v.w}};
}

// As `load_quad` for two threads, whose numbers differ by the bit `other`: each loads one half.
KV_DEVICE Quad load_shared(const uint8_t* at, uint32_t other) {
    const uint32_t half = threadIdx.x & other ? 1 : 0;
    const uint2 mine = kv_load<uint2>(at + 8 * half);
    const uint32_t x = __shfl_xor_sync(0xffffffffu, mine.x, other), y = __shfl_xor_sync(0xffffffffu, mine.y, other);
    return half ? Quad{{x, y, mine.x, mine.y}} : Quad{{mine.x, mine.y, x, y}};
}

// As `load_quad` for four threads that differ in the lowest two bits: each loads a word.
KV_DEVICE Quad load_by_four(const uint8_t* at) {
    const uint32_t mine = kv_load<uint32_t>(at + 4 * (threadIdx.x % 4)), first = threadIdx.x % 32 & ~3u;
    Quad quad;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) quad.w[i] = __shfl_sync(0xffffffffu, mine, first + i);
    return quad;
}

// Keys of 4 neighbouring tokens against eight channels of a pair of blocks: thread `source` of four has block
// `source / 2` and half of its channels. `at` is where the pair begins in the tile of the thread's tokens.
template <int WIDTH>
KV_DEVICE void key_octets(const Levels& levels, const uint8_t* at, uint32_t token, Octet (&out)[4]) {
    const uint32_t source = threadIdx.x % 4, block = source / 2, odd = source % 2;
    at += 4 * token;
    if constexpr (WIDTH == 4) {
        const Quad quad = load_quad(at + 128 * block + 64 * odd);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) out[i] = octet_4(levels, quad.w[i]);
    } else {
        Quad nibbles{{0, 0, 0, 0}};
        if constexpr (WIDTH >= 2) {
            const Quad quad = load_shared(at + 64 * block, 1);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) nibbles.w[i] = nibbles_2(quad.w[i], odd);
        }
        if constexpr (WIDTH != 2) {
            const Quad quad = load_by_four(at + (WIDTH == 3 ? 128 : 0));
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t nibble = quad.w[i] >> (4 * block) & 0x0f0f0f0fu;
                nibbles.w[i] |= WIDTH == 3 ? top_bits_3(nibble, odd) : nibbles_1(nibble, odd);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) out[i] = octet_8(levels, nibbles.w[i]);
    }
}

// Values of 4 neighbouring channels of block `block` of a pair over 64 tokens as two operands: with 4 bits, source s of
// operand g has tokens 8 (s % 2) .. + 7 of tile 2 g + s / 2; below, all 16 tokens of tile s / 2 + 2 (s % 2), the operand
// being the half of its fields. `at` is where the pair begins in the first tile.
template <int WIDTH>
KV_DEVICE void value_octets(const Levels& levels, const uint8_t* at, uint32_t tile_bytes, uint32_t block, uint32_t channel,
                            Octet (&out)[2][4]) {
    const uint32_t source = threadIdx.x % 4;
    at += 4 * channel;
    if constexpr (WIDTH == 4) {
#pragma unroll
        for (uint32_t g = 0; g < 2; g++) {
            const Quad quad = load_quad(at + (2 * g + source / 2) * tile_bytes + 128 * block + 64 * (source % 2));
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) out[g][i] = octet_4(levels, quad.w[i]);
        }
    } else {
        at += (source / 2 + 2 * (source % 2)) * tile_bytes;
        Quad two{{0, 0, 0, 0}}, one{{0, 0, 0, 0}};
        if constexpr (WIDTH >= 2) two = load_quad(at + 64 * block);
        if constexpr (WIDTH != 2) one = load_shared(at + (WIDTH == 3 ? 128 : 0), 16);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t nibble = one.w[i] >> (4 * block) & 0x0f0f0f0fu;
#pragma unroll
            for (uint32_t odd = 0; odd < 2; odd++) {
                uint32_t nibbles = WIDTH >= 2 ? nibbles_2(two.w[i], odd) : 0;
                if constexpr (WIDTH != 2) nibbles |= WIDTH == 3 ? top_bits_3(nibble, odd) : nibbles_1(nibble, odd);
                out[odd][i] = octet_8(levels, nibbles);
            }
        }
    }
}

}  // namespace kvrs
