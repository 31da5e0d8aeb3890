// What the logits of a call say once they are all there: the largest of each row, and the attention that each token
// received.
#include <kvrs/portable.cuh>
#include <kvrs/attend.cuh>

namespace kvrs {

struct TopK {
    const Unit* units;
    float* record;
    uint32_t k, pad;
};

// Some queries of one sequence against one key-value head.
struct Receiver {
    uint64_t record;   // logits [queries][group][tokens]
    uint64_t sums;     // [tokens]
    uint32_t sequence, head, tokens;
    uint32_t first_query, queries, pad;
};

enum Reduce : uint32_t { MEAN, LARGEST, TOTAL };
enum Fold : uint32_t { SUM, ABOVE, LAST };

struct Received {
    const Receiver* receivers;
    const Sequence* sequences;
    const uint32_t* columns;
    const float* record;
    const float* lse;  // [batch][query heads][width]
    float* sums;
    uint32_t group, query_heads, width, reduce, fold, pad;
};

namespace {

// An order-preserving image of a float.
KV_DEVICE uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Finds the k-th largest of a row by its bytes, largest byte first.
class Selection {
   public:
    KV_DEVICE Selection(float* logits, uint32_t tokens, uint32_t (&histogram)[256], uint32_t (&found)[2])
        : logits(logits), tokens(tokens), histogram(histogram), found(found) {}

    // Leaves the `k` largest; equal ones go to the earlier token.
    KV_DEVICE void keep(uint32_t k) {
        uint32_t prefix = 0;
        for (uint32_t shift = 32; shift > 0;) {
            shift -= 8;
            count(prefix, shift);
            if (threadIdx.x == 0) find(k, prefix, shift);
            __syncthreads();
            prefix = found[0];
            k = found[1];
        }
        drop(prefix, k);
    }

   private:
    float* logits;
    uint32_t tokens;
    uint32_t (&histogram)[256];
    uint32_t (&found)[2];

    KV_DEVICE void count(uint32_t prefix, uint32_t shift) {
        for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) histogram[i] = 0;
        __syncthreads();
        for (uint32_t t = threadIdx.x; t < tokens; t += blockDim.x) {
            const uint32_t key = ordered(logits[t]);
            const bool same = shift == 24 || key >> (shift + 8) == prefix >> (shift + 8);
            if (same) atomicAdd(&histogram[key >> shift & 255], 1u);
        }
        __syncthreads();
    }

    KV_DEVICE void find(uint32_t k, uint32_t prefix, uint32_t shift) {
        uint32_t byte = 255;
        while (byte > 0 && histogram[byte] < k) k -= histogram[byte--];
        found[0] = prefix | byte << shift;
        found[1] = k;
    }

    // Drops what is smaller than the threshold, and all but the first `equal` of its equals.
    KV_DEVICE void drop(uint32_t threshold, uint32_t equal) {
        for (uint32_t t = threadIdx.x; t < tokens; t += blockDim.x) {
            if (ordered(logits[t]) < threshold) logits[t] = -INFINITY;
        }
        __syncthreads();
        if (threadIdx.x >= 32) return;
        uint32_t seen = 0;
        for (uint32_t first = 0; first < tokens; first += 32) {
            const uint32_t t = first + threadIdx.x;
            const bool same = t < tokens && ordered(logits[t]) == threshold;
            const uint32_t votes = __ballot_sync(0xffffffffu, same);
            const uint32_t before = seen + __popc(votes & ((1u << threadIdx.x) - 1));
            if (same && before >= equal) logits[t] = -INFINITY;
            seen += __popc(votes);
        }
    }
};

KV_DEVICE float reduced(const Received& call, const float* logits, const float* lse, uint64_t stride, uint32_t tokens) {
    float all = 0.f;
    for (uint32_t head = 0; head < call.group; head++) {
        const float sum = lse[head * stride];
        const float p = sum == -INFINITY ? 0.f : exponential(logits[uint64_t(head) * tokens] - sum);
        all = call.reduce == LARGEST ? fmaxf(all, p) : all + p;
    }
    return call.reduce == MEAN ? all / float(call.group) : all;
}

}  // namespace
}  // namespace kvrs

// Grid: (units, ROWS).
KV_KERNEL(kvrs_top_k, 128, 8)(const kvrs::TopK call) {
    using namespace kvrs;
    KV_SHARED(uint32_t, histogram, [256]);
    KV_SHARED(uint32_t, found, [2]);
    const Unit& unit = call.units[blockIdx.x];
    if (blockIdx.y >= unit.rows || unit.tokens <= call.k) return;
    float* logits = call.record + unit.record + uint64_t(blockIdx.y) * unit.tokens;
    Selection(logits, unit.tokens, histogram, found).keep(call.k);
}

// Grid: (receivers, most tokens / 128 rounded up).
KV_KERNEL(kvrs_received, 128, 8)(const kvrs::Received call) {
    using namespace kvrs;
    KV_SHARED(uint32_t, seen, [4]);
    const Receiver& receiver = call.receivers[blockIdx.x];
    const Sequence& sequence = call.sequences[receiver.sequence];
    const uint32_t token = blockIdx.y * blockDim.x + threadIdx.x;
    if (blockIdx.y * blockDim.x >= receiver.tokens) return;
    float sum = 0.f;
    const uint32_t first = call.fold == LAST && receiver.queries > 0 ? receiver.queries - 1 : 0;
    for (uint32_t query = first; query < receiver.queries; query++) {
        const float* logits = call.record + receiver.record + uint64_t(query) * call.group * receiver.tokens;
        const uint32_t column = call.columns[sequence.first_query + receiver.first_query + query];
        const uint64_t heads = (uint64_t(receiver.sequence) * call.query_heads + receiver.head * call.group) * call.width;
        const float p = token < receiver.tokens
                            ? reduced(call, logits + token, call.lse + heads + column, call.width, receiver.tokens)
                            : 0.f;
        if (call.fold != ABOVE) {
            sum += p;
            continue;
        }
        uint32_t mine = 0;  // all heads of a query see the same tokens
        for (uint32_t t = threadIdx.x; t < receiver.tokens; t += blockDim.x) mine += logits[t] > -INFINITY;
        for (uint32_t o = 16; o > 0; o /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, o);
        __syncthreads();
        if (threadIdx.x % 32 == 0) seen[threadIdx.x / 32] = mine;
        __syncthreads();
        const uint32_t visible = seen[0] + seen[1] + seen[2] + seen[3];
        sum += visible > 0 && p > 1.f / float(visible) ? 1.f : 0.f;
    }
    if (token < receiver.tokens) call.sums[receiver.sums + token] = sum;
}
