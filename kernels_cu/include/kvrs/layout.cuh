// What the bytes of a page mean: the page descriptor of crates/kvrs-codec/src/desc.rs, field for field, with the
// constants of a codec behind it. crates/kvrs-cuda/src/args.rs mirrors every structure here.
#pragma once
#include <kvrs/portable.cuh>

namespace kvrs {

constexpr uint32_t NONE = 0xffffffffu;
constexpr int TILE = 16;                  // tokens of a tile, channels of a block
constexpr int PAGE_SLOTS = 64;            // most slots of a page
constexpr int MAX_DIM = 256;              // most channels of a key or value head
constexpr int MAX_CHANNELS = 1024;        // most stored channels of a side

enum Elem : uint32_t { LUT8, INT, F16, BF16, E4M3, E5M2, LUT32 };
enum Path : uint32_t { DOT, TILED };
enum Inner : uint32_t { NO_INNER, GROUP_CHANNEL, TOKEN_BLOCK };
enum TileOp : uint32_t { SPARSE = 1, MATRIX = 2, ROPE = 4 };
enum Rotation : uint32_t { IDENTITY, HADAMARD, DENSE };
enum Dtype : uint32_t { FLOAT32, FLOAT16, BFLOAT16 };

struct Run {
    uint32_t width, elem, arith, scale, channels, vec_at, at, lut_at;
    float step, zero;
};

// Two channels that turn together; `b` is NONE for the last channel of an odd dimension.
struct Pair {
    uint64_t turn;  // share of a turn per position, times 2^64
    uint32_t a, b;
};

// One side of the pages of a class. Addresses of constants that a codec has not are null.
struct Side {
    const Run* run;
    const float* levels;     // [runs][256]: the value of each code, zero and step applied
    const int8_t* lut8;      // 8-bit levels of all runs
    const float* analysis;   // Hadamard: signs [3][d]; dense: [n][parts * d]
    const float* synthesis;  // dense: [n][parts * d]
    const float* mean;       // [parts * d]
    const float* offset;     // [d]: the constant of keys
    const Pair* offset_pair; // [base_pairs]
    const Pair* rope_pair;   // [rope_pairs]
    uint32_t path, parts, d, n, vec_len, inner, block, base_pairs, sparse_per_tile, tile_ops, tile_bytes, codes_at,
        scales_at, scales, inner_at, sparse_at;
    uint32_t runs, slots, rotation, rope_pairs;
    float rotation_factor;   // Hadamard: what makes three rounds orthonormal
    float between_rounds;    // Hadamard: factor after all rounds but the last
    uint32_t is_key, live;   // live: stored channels that are not padding
};

// A strided tensor [batch, heads, tokens, channels]; strides in elements.
struct View {
    char* start;
    int64_t strides[4];
    uint32_t dtype, pad;
};

}  // namespace kvrs
