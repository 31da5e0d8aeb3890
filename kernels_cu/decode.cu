// Decode attention on codes of 1 to 4 bits: each packed byte is read once for up to eight query rows, and tensor cores
// take 8-bit levels straight from registers.
//
// A warp takes a split, 64 tokens at a time, without meeting other warps: the accumulators that hold the scores of a
// row's tokens are, in the same threads, the operand that weighs the values. Queries and weights become 8-bit digits,
// with one scale per row and run, and per row and page.
#include <kvrs/portable.cuh>
#include <kvrs/attend.cuh>
#include <kvrs/fragments.cuh>
#include <kvrs/view.cuh>

namespace kvrs {
namespace {

constexpr int WARPS = 4;

KV_DEVICE uint32_t bytes_of(int a, int b, int c, int d) {
    return uint32_t(a & 255) | uint32_t(b & 255) << 8 | uint32_t(c & 255) << 16 | uint32_t(d & 255) << 24;
}

KV_DEVICE float most_of_four(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

KV_DEVICE float sum_of_four(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The per-token scales of a thread's own eight tokens in both chunks; the threads of all rows ask for the same. Runs
// that share a scale share what was loaded.
struct Scales {
    uint32_t scale = NONE;
    uint32_t words[2][4];

    // Whether they were others before.
    KV_DEVICE bool take(const Side& side, const uint8_t* page, uint32_t index, const uint32_t (&slots)[2]) {
        if (index == scale) return false;
        scale = index;
#pragma unroll
        for (uint32_t chunk = 0; chunk < 2; chunk++) {
            const uint8_t* at = page + side.scales_at + 2 * (scale * side.slots + slots[chunk]);
            const uint4 v = kv_load_together<uint4>(at, threadIdx.x % 32 < 4);
            words[chunk][0] = v.x, words[chunk][1] = v.y, words[chunk][2] = v.z, words[chunk][3] = v.w;
        }
        return true;
    }

    KV_DEVICE float of(uint32_t chunk, uint32_t token) const {
        if (scale == NONE) return 1.f;
        return half_bits(uint16_t(words[chunk][token / 2] >> (16 * (token % 2))));
    }
};

// The pairs of 16-channel blocks `first .. end` that a run has.
struct Pairs {
    int first, end;
};

template <int PAIRS> class Decoder {
   public:
    KV_DEVICE Decoder(const Attend& call, uint32_t split) : index(split), p(call, split), keys(p.side(0)), values(p.side(1)) {}

    KV_DEVICE void run() {
        take_query();
#pragma unroll
        for (int q = 0; q < PAIRS; q++)
#pragma unroll
            for (int i = 0; i < 8; i++) acc[q][i / 2][i % 2] = 0.f;
#pragma unroll 1
        for (uint32_t e = 0; e < p.split.entries; e++) add(p.call.entries[p.split.first_entry + e]);
        leave();
    }

   private:
    uint32_t index;
    Place p;
    const Side& keys;
    const Side& values;
    uint32_t query[PAIRS][2];  // digits of the thread's row and channels
    float query_scale[PAIRS];
    float acc[PAIRS][4][2];
    float max = -INFINITY, sum = 0.f;

    KV_DEVICE uint32_t row() const { return threadIdx.x % 32 / 4; }
    KV_DEVICE uint32_t source() const { return threadIdx.x % 4; }
    KV_DEVICE uint32_t parity() const { return threadIdx.x % 32 / 16; }
    KV_DEVICE uint32_t lane_of_four() const { return threadIdx.x % 16 / 4 * 4; }
    KV_DEVICE bool active() const { return row() < p.unit.rows; }

    template <class Each> KV_DEVICE void each_run(const Side& side, const Each& each) const {
        int first = 0;
#pragma unroll 1
        for (uint32_t r = 0; r < side.runs; r++) {
            const int end = first + int(side.run[r].channels / 32);
            each(side.run[r], Pairs{first, end});
            first = end;
        }
    }

    // Digits of the prepared query in the order of the keys' operands.
    KV_DEVICE void take_query() {
        each_run(keys, [&](const Run& run, Pairs pairs) {
            float most = 0.f;
            for (int q = pairs.first; q < pairs.end; q++) {
                for (uint32_t i = 0; i < 8; i++) most = fmaxf(most, fabsf(channel(run, q - pairs.first, i)));
            }
            most = most_of_four(most);
            const float inverse = most > 0.f ? 127.f / most : 0.f;
#pragma unroll
            for (int q = 0; q < PAIRS; q++) {
                if (q < pairs.first || q >= pairs.end) continue;
                int digit[8];
#pragma unroll
                for (uint32_t i = 0; i < 8; i++) digit[i] = int(rintf(channel(run, q - pairs.first, i) * inverse));
                query[q][0] = bytes_of(digit[0], digit[1], digit[2], digit[3]);
                query[q][1] = bytes_of(digit[4], digit[5], digit[6], digit[7]);
                query_scale[q] = most / 127.f * run.step;
            }
        });
    }

    // The i-th of the thread's eight channels of the run's pair `in`.
    KV_DEVICE float channel(const Run& run, uint32_t in, uint32_t i) const {
        if (!active()) return 0.f;
        const uint32_t block = source() / 2, odd = source() % 2, low = i / 2, high = i % 2;
        const uint32_t place = run.width == 4 ? 8 * odd + 4 * high + low : 4 * odd + 8 * high + low;
        return p.prepared(p.split.group_class, row())[run.vec_at + 32 * in + 16 * block + place];
    }

    KV_DEVICE void add(const Entry& entry) {
        float s[2][4][2] = {};
        const uint32_t slots[2] = {first_slot(0), first_slot(1)};
        Scales scales;
        each_run(keys, [&](const Run& run, Pairs pairs) {
            scales.take(keys, entry.page, run.scale, slots);
            switch (run.width) {
                case 4: score<4>(entry, run, pairs, scales, s); break;
                case 3: score<3>(entry, run, pairs, scales, s); break;
                case 2: score<2>(entry, run, pairs, scales, s); break;
                default: score<1>(entry, run, pairs, scales, s); break;
            }
        });
        soften(entry, s);
        if (!p.call.values) return;
        scales.scale = NONE;
        Digits digits;
        weigh(scales, s, digits);
        each_run(values, [&](const Run& run, Pairs pairs) {
            if (scales.take(values, entry.page, run.scale, slots)) weigh(scales, s, digits);
            switch (run.width) {
                case 4: add_values<4>(entry, run, pairs, digits); break;
                case 3: add_values<3>(entry, run, pairs, digits); break;
                case 2: add_values<2>(entry, run, pairs, digits); break;
                default: add_values<1>(entry, run, pairs, digits); break;
            }
        });
    }

    // The thread's own eight tokens of chunk `chunk` of 32.
    KV_DEVICE uint32_t first_slot(uint32_t chunk) const { return 16 * (2 * chunk + source() / 2) + 8 * (source() % 2); }

    template <int WIDTH>
    KV_DEVICE void score(const Entry& entry, const Run& run, Pairs pairs, const Scales& scales, float (&s)[2][4][2]) {
        const Levels levels(keys.lut8 + run.lut_at, WIDTH);
        const uint8_t* tiles = entry.page + keys.codes_at + run.at;
        float factor = 0.f;
#pragma unroll
        for (uint32_t chunk = 0; chunk < 2; chunk++) {
            const uint8_t* tile = tiles + (2 * chunk + parity()) * keys.tile_bytes;
            int c[4][4] = {};
#pragma unroll
            for (int q = 0; q < PAIRS; q++) {
                if (q < pairs.first || q >= pairs.end) continue;
                Octet octets[4];
                key_octets<WIDTH>(levels, tile + (q - pairs.first) * 64 * WIDTH, lane_of_four(), octets);
                const uint32_t a[4] = {query[q][0], 0, query[q][1], 0};
#pragma unroll
                for (int i = 0; i < 4; i++) kv_mma_m16n8k32_s8(c[i], a, octets[i].b);
                factor = query_scale[q];
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int e = 0; e < 2; e++) s[chunk][i][e] += factor * scales.of(chunk, 4 * e + i) * float(c[i][e]);
        }
    }

    KV_DEVICE float capped(float x) const {
        if (p.call.softcap <= 0.f) return x;
        const float e = exponential(2.f * x / p.call.softcap);
        return p.call.softcap * (1.f - 2.f / (e + 1.f));
    }

    // One step of the online softmax: scores become weights, sums are scaled.
    KV_DEVICE void soften(const Entry& entry, float (&s)[2][4][2]) {
        const uint64_t seen = active() ? p.mask(entry, row()) : 0;
        float most = -INFINITY;
#pragma unroll
        for (int k = 0; k < 16; k++) {
            float& x = s[k / 8][k % 8 / 2][k % 2];
            const uint32_t slot = first_slot(k / 8) + 4 * (k % 2) + k % 8 / 2;
            x = seen >> slot & 1 ? capped(x * p.call.scale) : -INFINITY;
            most = fmaxf(most, x);
        }
        most = fmaxf(most_of_four(most), max);
        const bool none = most == -INFINITY;
        const float factor = none ? 1.f : exponential(max - most);
        float total = 0.f;
#pragma unroll
        for (int k = 0; k < 16; k++) {
            float& x = s[k / 8][k % 8 / 2][k % 2];
            x = none ? 0.f : exponential(x - most);
            total += x;
        }
        max = most;
        sum = sum * factor + sum_of_four(total);
#pragma unroll
        for (int q = 0; q < PAIRS; q++)
#pragma unroll
            for (int i = 0; i < 8; i++) acc[q][i / 2][i % 2] *= factor;
    }

    // Weights times the values' scales as digits of eight tokens in order, [chunk][4 tokens].
    struct Digits {
        uint32_t d[2][2];
        float worth;
    };

    KV_DEVICE void weigh(const Scales& scales, const float (&s)[2][4][2], Digits& out) const {
        float x[16], most = 0.f;
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const float w = s[k / 8][k % 4][k % 8 / 4];
            x[k] = w > 0.f ? w * scales.of(k / 8, k % 8) : 0.f;  // whatever the scale of a dead slot is
            most = fmaxf(most, x[k]);
        }
        most = most_of_four(most);
        const float inverse = most > 0.f ? 127.f / most : 0.f;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int digit[4];
#pragma unroll
            for (int t = 0; t < 4; t++) digit[t] = int(rintf(x[4 * k + t] * inverse));
            out.d[k / 2][k % 2] = bytes_of(digit[0], digit[1], digit[2], digit[3]);
        }
        out.worth = most / 127.f;
    }

    // The digits in the order of the values' operands. Below 4 bits threads that hold halves of two tiles exchange one.
    template <int WIDTH> KV_DEVICE void arrange(const uint32_t (&d)[2][2], uint32_t (&a)[2][4]) const {
        const bool even = source() % 2 == 0;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t first = d[k][0], second = d[k][1];
            if constexpr (WIDTH != 4) {
                const uint32_t other = __shfl_xor_sync(0xffffffffu, even ? d[1][k] : d[0][k], 1);
                first = even ? d[0][k] : other;
                second = even ? other : d[1][k];
            }
            a[k][0] = __byte_perm(first, second, 0x5140);
            a[k][2] = __byte_perm(first, second, 0x7362);
            a[k][1] = a[k][3] = 0;
        }
    }

    template <int WIDTH>
    KV_DEVICE void add_values(const Entry& entry, const Run& run, Pairs pairs, const Digits& digits) {
        uint32_t a[2][4];
        const float factor = digits.worth * run.step;
        arrange<WIDTH>(digits.d, a);
        const Levels levels(values.lut8 + run.lut_at, WIDTH);
        const uint8_t* at = entry.page + values.codes_at + run.at;
#pragma unroll
        for (int q = 0; q < PAIRS; q++) {
            if (q < pairs.first || q >= pairs.end) continue;
            Octet octets[2][4];
            const uint8_t* pair = at + (q - pairs.first) * 64 * WIDTH;
            value_octets<WIDTH>(levels, pair, values.tile_bytes, parity(), lane_of_four(), octets);
            int c[4][4] = {};
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) kv_mma_m16n8k32_s8(c[i], a[k], octets[k][i].b);
#pragma unroll
            for (int i = 0; i < 8; i++) acc[q][i / 2][i % 2] += factor * float(c[i / 2][i % 2]);
        }
    }

    KV_DEVICE void leave() const {
        if (!active()) return;
        const uint64_t at = uint64_t(index) * ROWS + row();
        if (source() == 0) {
            p.call.max[at] = max;
            p.call.sum[at] = sum;
        }
        if (!p.call.values) return;
        float* out = p.call.acc + at * p.call.acc_stride;
        each_run(values, [&](const Run& run, Pairs pairs) {
#pragma unroll
            for (int q = 0; q < PAIRS; q++) {
                if (q < pairs.first || q >= pairs.end) continue;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const uint32_t lane = 16 * (source() / 2) + 4 * (2 * (source() % 2) + i % 2) + i / 2;
                    out[run.vec_at + 32 * (q - pairs.first) + lane] = acc[q][i / 2][i % 2];
                }
            }
        });
    }
};

template <int PAIRS> KV_DEVICE void decode(const Attend& call) {
    const uint32_t place = blockIdx.x * WARPS + threadIdx.x / 32;
    if (place < call.count) Decoder<PAIRS>(call, call.chosen[place]).run();
}

}  // namespace
}  // namespace kvrs

// Newer devices' code needs a few registers more; a block less costs them less than spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define KVRS_BLOCKS(older, newer) newer
#else
#define KVRS_BLOCKS(older, newer) older
#endif

// Up to 64, 128 and 256 stored channels a side. Grid: (chosen splits / 4 rounded up).
KV_KERNEL(kvrs_decode_64, 128, KVRS_BLOCKS(4, 3))(const kvrs::Attend call) { kvrs::decode<2>(call); }

KV_KERNEL(kvrs_decode_128, 128, KVRS_BLOCKS(3, 2))(const kvrs::Attend call) { kvrs::decode<4>(call); }

KV_KERNEL(kvrs_decode_256, 128, 2)(const kvrs::Attend call) { kvrs::decode<8>(call); }
