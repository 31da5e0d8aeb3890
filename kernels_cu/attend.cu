// Attention of query rows over the pages of one class, or over the call's own tokens, for any descriptor.
//
// A block takes one split: it scores a page of 64 slots for all rows of its unit, takes one step of the online
// softmax, and adds the values. Partial results are merged by merge.cu.
#include <kvrs/portable.cuh>
#include <kvrs/attend.cuh>
#include <kvrs/stored.cuh>

namespace kvrs {
namespace {

constexpr int PAIRS = 8;  // frequency pairs whose phasors are held at a time

struct Shared {
    Block& block;
    Rebuilt& tile;
    float (&scores)[ROWS][PAGE_SLOTS];
    float (&acc)[ACC];
    float (&max)[ROWS];
    float (&sum)[ROWS];
    float (&factor)[ROWS];
    float (&phasor)[PAIRS][2][TILE + 1];
};

class Pass {
   public:
    KV_DEVICE Pass(const Attend& call, const Shared& shared)
        : index(call.chosen[blockIdx.x]), p(call, index), s(shared) {}

    KV_DEVICE void run() {
        const uint32_t channels = acc_channels();
        for (uint32_t i = threadIdx.x; i < p.unit.rows * channels; i += blockDim.x) s.acc[i] = 0.f;
        if (threadIdx.x < ROWS) {
            s.max[threadIdx.x] = -INFINITY;
            s.sum[threadIdx.x] = 0.f;
        }
        __syncthreads();
        for (uint32_t e = 0; e < p.split.entries; e++) {
            const Entry& entry = p.call.entries[p.split.first_entry + e];
            add(entry);
        }
        leave(channels);
    }

   private:
    uint32_t index;  // of the split
    Place p;
    Shared s;

    KV_DEVICE uint32_t acc_channels() const {
        if (!p.call.values) return 0;
        if (p.own()) return p.call.value_dim;
        return p.side(1).path == TILED ? p.side(1).d : p.side(1).vec_len;
    }

    KV_DEVICE void add(const Entry& entry) {
        if (p.call.stage == VALUES) {
            recall(entry);
        } else {
            score(entry);
        }
        __syncthreads();
        if (p.call.stage != VALUES) mask(entry);
        __syncthreads();
        if (p.call.stage == LOGITS) return;
        soften();
        __syncthreads();
        if (p.call.values) add_values(entry);
        __syncthreads();
    }

    // Bits of the tile's tokens that some row of the unit sees.
    KV_DEVICE uint32_t seen(const Entry& entry, uint32_t tile) const {
        const int64_t first = int64_t(p.sequence.first_index) + p.query(0);
        const int64_t last = int64_t(p.sequence.first_index) + p.query(p.unit.rows - 1);
        uint32_t bits = 0;
        for (uint32_t token = 0; token < TILE; token++) {
            const uint32_t slot = TILE * tile + token;
            if (!(entry.live >> slot & 1)) continue;
            const int64_t index = p.index(entry, slot);
            const bool late = index > last && (p.call.causal || p.own());
            const bool old = p.call.sliding != NONE && index + p.call.sliding <= first;
            bits |= uint32_t(!late && !old) << token;
        }
        return bits;
    }

    KV_DEVICE uint32_t tiles() const { return p.own() ? PAGE_SLOTS / TILE : p.side(0).slots / TILE; }

    KV_DEVICE void score(const Entry& entry) {
        for (uint32_t i = threadIdx.x; i < ROWS * PAGE_SLOTS; i += blockDim.x) s.scores[i / PAGE_SLOTS][i % PAGE_SLOTS] = 0.f;
        __syncthreads();
        for (uint32_t tile = 0; tile < tiles(); tile++) {
            const uint32_t bits = seen(entry, tile);
            if (bits == 0) continue;
            if (p.own()) {
                load_own(p.call.own_k, p.call.key_dim, entry, tile, bits);
                score_rebuilt(tile, p.call.key_dim);
            } else if (p.side(0).path == TILED) {
                rebuild(0, entry, tile, bits);
                score_rebuilt(tile, p.side(0).d);
            } else {
                score_codes(entry, tile, bits);
            }
        }
    }

    KV_DEVICE int64_t position(const Entry& entry, uint32_t tile, uint32_t token) const {
        return p.sequence.start + p.index(entry, TILE * tile + token);
    }

    KV_DEVICE void rebuild(uint32_t which, const Entry& entry, uint32_t tile, uint32_t bits) {
        const TileAt at{p.side(which), entry.page, tile, bits};
        const auto where = [&](uint32_t token) { return position(entry, tile, token); };
        __syncthreads();
        at.rebuild(p.part(), where, s.block, s.tile);
    }

    KV_DEVICE void load_own(const View& view, uint32_t dim, const Entry& entry, uint32_t tile, uint32_t bits) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < TILE * dim; i += blockDim.x) {
            const uint32_t token = i / dim, own = entry.first + TILE * tile + token;
            float x = 0.f;
            if (bits >> token & 1) {
                const uint32_t column = p.call.columns[p.sequence.first_query + own];
                x = read(view, element(view, p.unit.sequence, p.unit.head, column), i % dim);
            }
            s.tile[token][i % dim] = x;
        }
        __syncthreads();
    }

    KV_DEVICE void score_rebuilt(uint32_t tile, uint32_t d) {
        for (uint32_t i = threadIdx.x; i < p.unit.rows * TILE; i += blockDim.x) {
            const uint32_t row = i / TILE, token = i % TILE;
            const float* q = p.prepared(p.call.classes, row);
            float dot = 0.f;
            for (uint32_t c = 0; c < d; c++) dot += q[c] * s.tile[token][c];
            s.scores[row][TILE * tile + token] = dot;
        }
        __syncthreads();
    }

    KV_DEVICE void score_codes(const Entry& entry, uint32_t tile, uint32_t bits) {
        const Side& side = p.side(0);
        const TileAt at{side, entry.page, tile, bits};
        at.each_block(s.block, [&](uint32_t, uint32_t channel) { add_scores(tile, channel); });
        for (uint32_t pair = 0; pair < side.base_pairs; pair += PAIRS) add_base(side, entry, tile, bits, pair);
        __syncthreads();
    }

    KV_DEVICE void add_scores(uint32_t tile, uint32_t channel) {
        for (uint32_t i = threadIdx.x; i < p.unit.rows * TILE; i += blockDim.x) {
            const uint32_t row = i / TILE, token = i % TILE;
            const float* z = p.prepared(p.split.group_class, row) + channel;
            float dot = 0.f;
#pragma unroll
            for (uint32_t c = 0; c < 16; c++) dot += z[c] * s.block[c][token];
            s.scores[row][TILE * tile + token] += dot;
        }
    }

    // Scores against the key offset of PAIRS frequency pairs from `first` on.
    KV_DEVICE void add_base(const Side& side, const Entry& entry, uint32_t tile, uint32_t bits, uint32_t first) {
        const uint32_t pairs = min(uint32_t(PAIRS), side.base_pairs - first);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < pairs * TILE; i += blockDim.x) {
            const uint32_t token = i % TILE;
            const bool live = bits >> token & 1;
            const CosSin t = live ? turned(position(entry, tile, token), side.offset_pair[first + i / TILE].turn) : CosSin{0.f, 0.f};
            s.phasor[i / TILE][0][token] = t.c;
            s.phasor[i / TILE][1][token] = t.s;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < p.unit.rows * TILE; i += blockDim.x) {
            const uint32_t row = i / TILE, token = i % TILE;
            const float* q = p.prepared(p.call.classes, row);
            float dot = 0.f;
            for (uint32_t j = 0; j < pairs; j++) {
                const Pair& pair = side.offset_pair[first + j];
                const float qa = q[pair.a], ka = side.offset[pair.a];
                const float qb = pair.b == NONE ? 0.f : q[pair.b], kb = pair.b == NONE ? 0.f : side.offset[pair.b];
                dot += (qa * ka + qb * kb) * s.phasor[j][0][token] + (qb * ka - qa * kb) * s.phasor[j][1][token];
            }
            s.scores[row][TILE * tile + token] += dot;
        }
    }

    // Raw scores to logits; what a row does not see is -inf. Logits go into the record where there is one.
    KV_DEVICE void mask(const Entry& entry) {
        for (uint32_t i = threadIdx.x; i < p.unit.rows * PAGE_SLOTS; i += blockDim.x) {
            const uint32_t row = i / PAGE_SLOTS, slot = i % PAGE_SLOTS;
            float logit = s.scores[row][slot] * p.call.scale;
            if (p.call.softcap > 0.f) logit = p.call.softcap * tanhf(logit / p.call.softcap);
            if (!p.visible(entry, slot, row)) logit = -INFINITY;
            s.scores[row][slot] = logit;
            if (p.call.record && entry.live >> slot & 1) *recorded(entry, row, slot) = logit;
        }
    }

    KV_DEVICE float* recorded(const Entry& entry, uint32_t row, uint32_t slot) const {
        const uint64_t before = entry.live & ((uint64_t(1) << slot) - 1);
        return p.call.record + p.unit.record + uint64_t(row) * p.unit.tokens + entry.column + __popcll(before);
    }

    KV_DEVICE void recall(const Entry& entry) {
        for (uint32_t i = threadIdx.x; i < p.unit.rows * PAGE_SLOTS; i += blockDim.x) {
            const uint32_t row = i / PAGE_SLOTS, slot = i % PAGE_SLOTS;
            s.scores[row][slot] = entry.live >> slot & 1 ? *recorded(entry, row, slot) : -INFINITY;
        }
    }

    // One step of the online softmax: a warp takes every fourth row.
    KV_DEVICE void soften() {
        const uint32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
        for (uint32_t row = threadIdx.x / 32; row < p.unit.rows; row += warps) {
            const float a = s.scores[row][lane], b = s.scores[row][lane + 32];
            // Only the lane that writes it reads it.
            const float old = __shfl_sync(0xffffffffu, lane == 0 ? s.max[row] : 0.f, 0);
            float most = fmaxf(a, b);
            for (uint32_t o = 16; o > 0; o /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, o));
            most = fmaxf(most, old);
            const bool none = most == -INFINITY;
            const float wa = none ? 0.f : exponential(a - most), wb = none ? 0.f : exponential(b - most);
            float sum = wa + wb;
            for (uint32_t o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
            s.scores[row][lane] = wa;
            s.scores[row][lane + 32] = wb;
            if (lane == 0) {
                const float factor = none ? 1.f : exponential(old - most);
                s.max[row] = most;
                s.sum[row] = s.sum[row] * factor + sum;
                s.factor[row] = factor;
            }
        }
    }

    // Tokens of a tile with a weight.
    KV_DEVICE uint32_t weighed(uint32_t tile) const {
        uint32_t bits = 0;
        for (uint32_t row = 0; row < p.unit.rows; row++) {
            for (uint32_t token = 0; token < TILE; token++) {
                bits |= uint32_t(s.scores[row][TILE * tile + token] > 0.f) << token;
            }
        }
        return bits;
    }

    KV_DEVICE void add_values(const Entry& entry) {
        const uint32_t channels = acc_channels();
        for (uint32_t i = threadIdx.x; i < p.unit.rows * channels; i += blockDim.x) s.acc[i] *= s.factor[i / channels];
        for (uint32_t tile = 0; tile < tiles(); tile++) {
            const uint32_t bits = weighed(tile);
            if (p.call.value_tiles && threadIdx.x == 0) count(entry, tile, bits);
            if (bits == 0) continue;
            if (p.own()) {
                load_own(p.call.own_v, p.call.value_dim, entry, tile, bits);
                sum_rebuilt(tile, p.call.value_dim);
            } else if (p.side(1).path == TILED) {
                rebuild(1, entry, tile, bits);
                sum_rebuilt(tile, p.side(1).d);
            } else {
                sum_codes(entry, tile, bits, channels);
            }
        }
    }

    KV_DEVICE void count(const Entry& entry, uint32_t tile, uint32_t bits) const {
        atomicAdd(p.call.value_tiles, (unsigned long long)(seen(entry, tile) != 0));
        atomicAdd(p.call.value_tiles + 1, (unsigned long long)(bits != 0));
    }

    KV_DEVICE void sum_rebuilt(uint32_t tile, uint32_t d) {
        for (uint32_t i = threadIdx.x; i < p.unit.rows * d; i += blockDim.x) {
            const uint32_t row = i / d, c = i % d;
            float sum = 0.f;
            for (uint32_t token = 0; token < TILE; token++) sum += s.scores[row][TILE * tile + token] * s.tile[token][c];
            s.acc[i] += sum;
        }
        __syncthreads();
    }

    KV_DEVICE void sum_codes(const Entry& entry, uint32_t tile, uint32_t bits, uint32_t channels) {
        const Side& side = p.side(1);
        const TileAt at{side, entry.page, tile, bits};
        at.each_block(s.block, [&](uint32_t, uint32_t channel) {
            for (uint32_t i = threadIdx.x; i < p.unit.rows * 16; i += blockDim.x) {
                const uint32_t row = i / 16, c = i % 16;
                float sum = 0.f;
#pragma unroll
                for (uint32_t token = 0; token < TILE; token++) sum += s.scores[row][TILE * tile + token] * s.block[token][c];
                s.acc[row * channels + channel + c] += sum;
            }
        });
    }

    KV_DEVICE void leave(uint32_t channels) const {
        const uint64_t first = uint64_t(index) * ROWS;
        if (threadIdx.x < p.unit.rows) {
            p.call.max[first + threadIdx.x] = s.max[threadIdx.x];
            p.call.sum[first + threadIdx.x] = s.sum[threadIdx.x];
        }
        for (uint32_t i = threadIdx.x; i < p.unit.rows * channels; i += blockDim.x) {
            p.call.acc[(first + i / channels) * p.call.acc_stride + i % channels] = s.acc[i];
        }
    }
};

}  // namespace
}  // namespace kvrs

KV_KERNEL(kvrs_attend, 128, 4)(const kvrs::Attend call) {
    using namespace kvrs;
    KV_SHARED(Block, block);
    KV_SHARED(Rebuilt, tile);
    KV_SHARED(float, scores, [ROWS][PAGE_SLOTS]);
    KV_SHARED(float, acc, [ACC]);
    KV_SHARED(float, max, [ROWS]);
    KV_SHARED(float, sum, [ROWS]);
    KV_SHARED(float, factor, [ROWS]);
    KV_SHARED(float, phasor, [PAIRS][2][TILE + 1]);
    Pass(call, Shared{block, tile, scores, acc, max, sum, factor, phasor}).run();
}
