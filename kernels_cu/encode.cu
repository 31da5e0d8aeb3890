// A group of raw rows becomes codes and scales, bit for bit those of crates/kvrs-codec/src/encode.rs.
//
// A block takes one side of one tile of 16 tokens; a warp takes every fourth token.
#include <kvrs/portable.cuh>
#include <kvrs/phasor.cuh>
#include <kvrs/planes.cuh>
#include <kvrs/transform.cuh>
#include <kvrs/view.cuh>

namespace kvrs {

enum Rule : uint32_t { RAW_SCALE, NORM_SCALE, LSQ_SCALE, UNBIASED_SCALE, RMS_SCALE };

// How a run's channels become codes: thresholds, or a uniform step where there are none.
struct Book {
    const float* thresholds;  // [levels - 1]
    uint32_t levels, pad;     // 0: uniform
    float inverse_step, zero, top, step;
};

// What encodes one side.
struct Encoder {
    const Book* books;  // of the runs
    uint32_t rule, scaled;
    float unit_factor, root, inverse_root, inverse_live;  // of d channels; 1 / live
};

// 16 tokens of one head group.
struct TileJob {
    const uint8_t* raw;         // page of 16 raw rows
    uint8_t* page;
    const int64_t* positions;   // [16]
    const Side* const* from;    // raw class: keys, values
    const Side* const* to;      // target class
    const Encoder* encoders;    // keys, values
    uint32_t slot, pad;
};

struct Encode {
    const TileJob* jobs;
};

constexpr int ENCODED = 256;  // most stored channels of a side that this kernel encodes

namespace {

// Working memory of a warp.
struct Lane {
    float (&x)[ENCODED];
    float (&u)[ENCODED];
    float (&v)[ENCODED];
    float (&sums)[16];
};

KV_DEVICE float at_most(float x, float top) { return x < top ? x : top; }

class Token {
   public:
    KV_DEVICE Token(const TileJob& job, uint32_t which, uint32_t token, const Lane& lane)
        : job(job), side(*job.to[which]), encoder(job.encoders[which]), raw(*job.from[which]), token(token), m(lane) {}

    // Writes the codes [n] and the scale.
    KV_DEVICE void encode(uint8_t* codes) {
        load();
        centre();
        Length length = rotate();
        for (uint32_t c = lane(); c < side.n; c += 32) m.u[c] = __fmul_rn(m.u[c], length.factor);
        __syncwarp();
        for (uint32_t r = 0, first = 0; r < side.runs; first += side.run[r++].channels) look_up(r, first, codes);
        __syncwarp();
        const float scale = scaled(length.length);
        if (lane() == 0) write_scale(scale);
        __syncwarp();
    }

    // Copies 16-bit rows as they are.
    KV_DEVICE void copy() {
        const Run& run = side.run[0];
        const uint32_t slot = job.slot + token;
        uint8_t* tile = job.page + side.codes_at + slot / TILE * side.tile_bytes + run.at;
        uint16_t* row = reinterpret_cast<uint16_t*>(tile) + token * run.channels;
        const uint16_t* from = raw_row();
        const uint32_t width = side.parts * side.d;
        for (uint32_t c = lane(); c < run.channels; c += 32) row[c] = c < width ? converted(from[c]) : 0;
    }

   private:
    struct Length {
        float length, factor;
    };

    const TileJob& job;
    const Side& side;
    const Encoder& encoder;
    const Side& raw;
    uint32_t token;
    Lane m;

    KV_DEVICE uint32_t lane() const { return threadIdx.x % 32; }

    KV_DEVICE const uint16_t* raw_row() const {
        const Run& run = raw.run[0];
        return reinterpret_cast<const uint16_t*>(job.raw + raw.codes_at + run.at) + token * run.channels;
    }

    KV_DEVICE float widened(uint16_t bits) const { return raw.run[0].elem == F16 ? half_bits(bits) : bfloat_bits(bits); }

    KV_DEVICE uint16_t converted(uint16_t bits) const {
        if (raw.run[0].elem == side.run[0].elem) return bits;
        const float x = widened(bits);
        return side.run[0].elem == F16 ? to_half_bits(x) : to_bfloat_bits(x);
    }

    KV_DEVICE void load() {
        const uint16_t* row = raw_row();
        for (uint32_t c = lane(); c < side.d; c += 32) m.x[c] = widened(row[c]);
        __syncwarp();
    }

    KV_DEVICE void centre() {
        const int64_t position = job.positions[token];
        for (uint32_t i = lane(); i < side.rope_pairs; i += 32) {
            const Pair& pair = side.rope_pair[i];
            if (pair.b == NONE || pair.turn == 0) continue;
            const CosSin t = turned(-position, pair.turn);
            const float a = m.x[pair.a], b = m.x[pair.b];
            m.x[pair.a] = __fsub_rn(__fmul_rn(a, t.c), __fmul_rn(b, t.s));
            m.x[pair.b] = __fadd_rn(__fmul_rn(b, t.c), __fmul_rn(a, t.s));
        }
        __syncwarp();
        for (uint32_t i = lane(); i < side.base_pairs; i += 32) subtract(side.offset_pair[i], position);
        __syncwarp();
        if (!side.mean) return;
        for (uint32_t c = lane(); c < side.d; c += 32) m.x[c] = __fsub_rn(m.x[c], side.mean[c]);
        __syncwarp();
    }

    KV_DEVICE void subtract(const Pair& pair, int64_t position) {
        const float ka = side.offset[pair.a];
        if (pair.b == NONE) {
            m.x[pair.a] = __fsub_rn(m.x[pair.a], ka);
            return;
        }
        const float kb = side.offset[pair.b];
        const CosSin t = turned(position, pair.turn);
        m.x[pair.a] = __fsub_rn(m.x[pair.a], __fsub_rn(__fmul_rn(ka, t.c), __fmul_rn(kb, t.s)));
        m.x[pair.b] = __fsub_rn(m.x[pair.b], __fadd_rn(__fmul_rn(kb, t.c), __fmul_rn(ka, t.s)));
    }

    // Stored channels in `u`, not yet of unit variance; what makes them so, and the vector's length.
    KV_DEVICE Length rotate() {
        const bool rms = encoder.rule == RMS_SCALE;
        Length norm = rms ? Length{0.f, 0.f} : length(products(m.x, m.x, side.d), 1.f);
        if (side.rotation == DENSE) {
            for (uint32_t r = lane(); r < side.n; r += 32) {
                float sum = 0.f;
                for (uint32_t c = 0; c < side.d; c++) sum = __fadd_rn(sum, __fmul_rn(side.analysis[r * side.d + c], m.x[c]));
                m.u[r] = sum;
            }
        } else {
            for (uint32_t c = lane(); c < side.n; c += 32) m.u[c] = c < side.d ? m.x[c] : 0.f;
        }
        __syncwarp();
        if (side.rotation == HADAMARD) hadamard(WarpTeam{}, side, m.u);
        if (rms) return length(products(m.u, m.u, side.live), encoder.inverse_live);
        norm.factor = __fmul_rn(norm.factor, encoder.unit_factor);
        return norm;
    }

    KV_DEVICE static Length length(float square, float share) {
        const float tiny = 7.888609052210118e-31f;  // 2^-100
        if (!(square >= tiny && square <= 3.402823466e38f)) return {0.f, 0.f};
        const float length = __fsqrt_rn(__fmul_rn(square, share));
        return {length, __fdiv_rn(1.f, length)};
    }

    // red16 of a * b.
    KV_DEVICE float products(const float* a, const float* b, uint32_t n) {
        if (lane() < 16) {
            float sum = 0.f;
            for (uint32_t c = lane(); c < n; c += 16) sum = __fadd_rn(sum, __fmul_rn(a[c], b[c]));
            m.sums[lane()] = sum;
        }
        __syncwarp();
        for (uint32_t half = 8; half > 0; half /= 2) {
            if (lane() < half) m.sums[lane()] = __fadd_rn(m.sums[lane()], m.sums[lane() + half]);
            __syncwarp();
        }
        const float sum = m.sums[0];
        __syncwarp();
        return sum;
    }

    KV_DEVICE void look_up(uint32_t r, uint32_t first, uint8_t* codes) {
        const Book& book = encoder.books[r];
        const Run& run = side.run[r];
        for (uint32_t c = first + lane(); c < first + run.channels; c += 32) {
            uint32_t code = 0;
            if (book.levels) {
                for (uint32_t t = 0; t + 1 < book.levels; t++) code += m.u[c] >= book.thresholds[t];
            } else {
                const float x = __fsub_rn(__fmul_rn(m.u[c], book.inverse_step), book.zero);
                code = uint32_t(rintf(fminf(fmaxf(x, 0.f), book.top)));
            }
            m.v[c] = side.levels[256 * r + code];
            codes[c] = uint8_t(c < side.live ? code : 0);
        }
    }

    KV_DEVICE float scaled(float length) {
        const float along = products(m.u, m.v, side.live), square = products(m.v, m.v, side.live);
        if (length == 0.f) return 0.f;
        switch (encoder.rule) {
            case RAW_SCALE: return __fmul_rn(length, encoder.inverse_root);
            case LSQ_SCALE: return __fmul_rn(__fmul_rn(length, encoder.inverse_root), __fdiv_rn(along, square));
            case UNBIASED_SCALE:
                if (along > 0.f) return __fdiv_rn(__fmul_rn(length, encoder.root), along);
                break;
            case RMS_SCALE: return length;
            default: break;
        }
        return __fdiv_rn(length, __fsqrt_rn(square));
    }

    KV_DEVICE void write_scale(float scale) const {
        const uint16_t bits = to_half_bits(at_most(scale, 65504.f));
        memcpy(job.page + side.scales_at + 2 * (job.slot + token), &bits, 2);
    }
};

// Packs the codes [16][n] of a tile; a thread writes whole bytes.
KV_DEVICE void pack(const TileJob& job, const Side& side, const uint8_t (*codes)[ENCODED]) {
    for (uint32_t r = 0, first = 0; r < side.runs; first += side.run[r++].channels) {
        const Run& run = side.run[r];
        uint8_t* tile = job.page + side.codes_at + job.slot / TILE * side.tile_bytes + run.at;
        for (uint32_t i = threadIdx.x; i < run.channels / 16 * 64; i += blockDim.x) {
            const uint32_t block = i / 64, byte = i % 64;
            const Planes p(run.width, block, run.channels);
            const auto cell_of = [&](uint32_t in) {
                return [=](uint32_t field, uint32_t at) -> uint32_t {
                    const uint32_t summed = 4 * field + at % 4, lane = at / 4;
                    return side.is_key ? codes[lane][first + 16 * in + summed] : codes[summed][first + 16 * in + lane];
                };
            };
            const auto cell = cell_of(block);
            if (run.width == 8) {
                for (uint32_t field = 0; field < 4; field++) tile[block * 256 + 64 * field + byte] = uint8_t(cell(field, byte));
                continue;
            }
            if (run.width & 4) {
                tile[p.four + byte] = uint8_t(plane_four(cell, 0, byte));
                tile[p.four + 64 + byte] = uint8_t(plane_four(cell, 1, byte));
            }
            if (run.width & 2) tile[p.two + byte] = uint8_t(plane_two(cell, p.low_two, byte));
            if (!(run.width & 1)) continue;
            if (p.lone && byte < 32) {
                tile[p.one + byte] = uint8_t(plane_one(cell, p, byte) | plane_one(cell, p, byte + 32) << 4);
            } else if (!p.lone && !p.odd) {
                tile[p.one + byte] = uint8_t(plane_one(cell, p, byte) | plane_one(cell_of(block + 1), p, byte) << 4);
            }
        }
    }
}

}  // namespace
}  // namespace kvrs

// Grid: (tiles, 2 sides).
KV_KERNEL(kvrs_encode, 128, 4)(const kvrs::Encode call) {
    using namespace kvrs;
    KV_SHARED(float, x, [4][ENCODED]);
    KV_SHARED(float, u, [4][ENCODED]);
    KV_SHARED(float, v, [4][ENCODED]);
    KV_SHARED(float, sums, [4][16]);
    KV_SHARED(uint8_t, codes, [TILE][ENCODED]);
    const TileJob& job = call.jobs[blockIdx.x];
    const uint32_t warp = threadIdx.x / 32;
    const Side& side = *job.to[blockIdx.y];
    const bool scaled = job.encoders[blockIdx.y].scaled;
    for (uint32_t token = warp; token < TILE; token += 4) {
        Token work(job, blockIdx.y, token, Lane{x[warp], u[warp], v[warp], sums[warp]});
        if (scaled) {
            work.encode(codes[token]);
        } else {
            work.copy();
        }
    }
    __syncthreads();
    if (scaled) pack(job, side, codes);
}
