// Stored values of one tile: crates/kvrs-codec/src/tile.rs. All threads of the block work together.
#pragma once
#include <kvrs/phasor.cuh>
#include <kvrs/planes.cuh>
#include <kvrs/transform.cuh>
#include <kvrs/view.cuh>

namespace kvrs {

// A block of 16 x 16 values: rows are summed over, lanes are not (keys: channel by token, values: token by channel).
using Block = float[TILE][TILE + 1];
// 16 rebuilt vectors.
using Rebuilt = float[TILE][MAX_DIM + 1];

// One side of one tile of a page.
struct TileAt {
    const Side& side;
    const uint8_t* page;
    uint32_t index;  // tile of the page
    uint32_t live;   // bit per token: others read as zero

    KV_DEVICE float half_at(uint32_t at) const { return half_bits(kv_load<uint16_t>(page + at)); }

    KV_DEVICE float with_inner(float x, uint32_t token, uint32_t channel) const {
        if (side.inner == NO_INNER) return x;
        const uint32_t slot = index * TILE + token;
        const uint32_t pair = side.inner == GROUP_CHANNEL
                                  ? slot / side.block * side.n + channel
                                  : slot * ((side.n + side.block - 1) / side.block) + channel / side.block;
        const uint32_t at = side.inner_at + 4 * pair;
        return __fadd_rn(__fmul_rn(x, half_at(at)), half_at(at + 2));
    }

    KV_DEVICE float with_sparse(float x, uint32_t token, uint32_t channel) const {
        for (uint32_t i = 0; i < side.sparse_per_tile; i++) {
            const uint32_t at = side.sparse_at + 4 * (index * side.sparse_per_tile + i);
            if (kv_load<uint16_t>(page + at) == token * 0x400 + channel) x += half_at(at + 2);
        }
        return x;
    }

    // Value of (token, channel `c` of block `block` of run `r`), whose first stored channel is `first`.
    KV_DEVICE float value(uint32_t r, uint32_t block, uint32_t first, uint32_t token, uint32_t c) const {
        if (!(live >> token & 1)) return 0.f;
        const Run& run = side.run[r];
        const uint8_t* tile = page + side.codes_at + index * side.tile_bytes + run.at;
        float x;
        if (run.width == 16) {
            const uint16_t bits = kv_load<uint16_t>(tile + 2 * (token * run.channels + 16 * block + c));
            x = run.elem == F16 ? half_bits(bits) : bfloat_bits(bits);
        } else {
            const uint32_t summed = side.is_key ? c : token, lane = side.is_key ? token : c;
            const Planes planes(run.width, block, run.channels);
            x = side.levels[256 * r + code_at(tile, planes, block, summed / 4, 4 * lane + summed % 4)];
        }
        if (run.scale != NONE) x *= half_at(side.scales_at + 2 * (run.scale * side.slots + index * TILE + token));
        const uint32_t channel = first + 16 * block + c;
        return with_sparse(with_inner(x, token, channel), token, channel);
    }

    // Fills a block; callers meet before and after.
    KV_DEVICE void load(uint32_t r, uint32_t block, uint32_t first, Block& out) const {
        for (uint32_t e = threadIdx.x; e < 256; e += blockDim.x) {
            const uint32_t summed = e / 64 * 4 + e % 4, lane = e % 64 / 4;
            out[summed][lane] = side.is_key ? value(r, block, first, lane, summed) : value(r, block, first, summed, lane);
        }
    }

    // Fills a block with one after the other; `use(stored channel, prepared channel)` sees each, named by its first
    // channel among the stored ones and in the prepared vector. Threads meet before and after.
    template <class Use> KV_DEVICE void each_block(Block& block, const Use& use) const {
        for (uint32_t r = 0, first = 0; r < side.runs; first += side.run[r++].channels) {
            for (uint32_t b = 0; b < side.run[r].channels / 16; b++) {
                __syncthreads();
                load(r, b, first, block);
                __syncthreads();
                use(first + 16 * b, side.run[r].vec_at + 16 * b);
            }
        }
        __syncthreads();
    }

    KV_DEVICE float stored(const Block& block, uint32_t token, uint32_t c) const {
        return side.is_key ? block[c][token] : block[token][c];
    }

    // Rebuilds the vectors [16][d] of one part: matrix, mean, rotary embedding and key offset applied.
    // `position(token)` is asked for live tokens only.
    template <class Position>
    KV_DEVICE void rebuild(uint32_t part, const Position& position, Block& block, Rebuilt& out) const {
        const uint32_t d = side.d, width = side.parts * d;
        const bool matrix = side.tile_ops & MATRIX && side.rotation == DENSE;
        for (uint32_t i = threadIdx.x; i < TILE * d; i += blockDim.x) out[i / d][i % d] = 0.f;
        each_block(block, [&](uint32_t channel, uint32_t) {
            if (matrix) {
                add_product(part, channel, width, block, out);
            } else {
                place(part, channel, block, out);
            }
        });
        if (side.tile_ops & MATRIX && side.rotation == HADAMARD) {
            for (uint32_t token = 0; token < TILE; token++) hadamard_transposed(BlockTeam{}, side, out[token]);
        }
        turn(part, position, out);
        __syncthreads();
    }

   private:
    KV_DEVICE void add_product(uint32_t part, uint32_t channel, uint32_t width, const Block& block, Rebuilt& out) const {
        for (uint32_t i = threadIdx.x; i < TILE * side.d; i += blockDim.x) {
            const uint32_t token = i / side.d, dim = i % side.d;
            const float* column = side.synthesis + channel * width + part * side.d + dim;
            float sum = out[token][dim];
            for (uint32_t c = 0; c < 16; c++) sum += stored(block, token, c) * column[c * width];
            out[token][dim] = sum;
        }
    }

    KV_DEVICE void place(uint32_t part, uint32_t channel, const Block& block, Rebuilt& out) const {
        for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) {
            const uint32_t token = i / 16, dim = channel + i % 16 - part * side.d;
            if (dim < side.d) out[token][dim] = stored(block, token, i % 16);
        }
    }

    template <class Position> KV_DEVICE void turn(uint32_t part, const Position& position, Rebuilt& out) const {
        if (side.mean) {
            for (uint32_t i = threadIdx.x; i < TILE * side.d; i += blockDim.x) {
                out[i / side.d][i % side.d] += side.mean[part * side.d + i % side.d];
            }
            __syncthreads();
        }
        const uint32_t ropes = side.tile_ops & ROPE ? side.rope_pairs : 0;
        for (uint32_t i = threadIdx.x; i < TILE * ropes; i += blockDim.x) {
            const Pair& pair = side.rope_pair[i / TILE];
            const uint32_t token = i % TILE;
            if (!(live >> token & 1) || pair.b == NONE || pair.turn == 0) continue;
            const CosSin t = turned(position(token), pair.turn);
            const float a = out[token][pair.a], b = out[token][pair.b];
            out[token][pair.a] = a * t.c - b * t.s;
            out[token][pair.b] = b * t.c + a * t.s;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < TILE * side.base_pairs; i += blockDim.x) {
            const uint32_t token = i % TILE;
            if (live >> token & 1) add_offset(side.offset_pair[i / TILE], position(token), out[token]);
        }
    }

    KV_DEVICE void add_offset(const Pair& pair, int64_t position, float* row) const {
        const float ka = side.offset[pair.a];
        if (pair.b == NONE) {
            row[pair.a] += ka;
            return;
        }
        const float kb = side.offset[pair.b];
        const CosSin t = turned(position, pair.turn);
        row[pair.a] += ka * t.c - kb * t.s;
        row[pair.b] += kb * t.c + ka * t.s;
    }
};

}  // namespace kvrs
