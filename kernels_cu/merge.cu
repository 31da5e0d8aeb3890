// Partial results of a unit's splits become outputs: sums of a class are synthesised once, means added.
#include <kvrs/portable.cuh>
#include <kvrs/attend.cuh>
#include <kvrs/transform.cuh>
#include <kvrs/view.cuh>

namespace kvrs {

struct Merge {
    const Split* splits;
    const Unit* units;
    const Sequence* sequences;
    const uint32_t* columns;
    const Side* const* sides;
    const float* max;
    const float* sum;
    const float* acc;
    const float* sinks;  // [query heads], or null
    float* lse;          // [batch][query heads][columns], or null
    View out;
    uint32_t classes, heads_per_group, group, value_dim, acc_stride, query_heads, width, values;
};

namespace {

class Row {
   public:
    KV_DEVICE Row(const Merge& call, float (&sums)[MAX_CHANNELS], float (&out)[MAX_DIM])
        : call(call), unit(call.units[blockIdx.x]), sums(sums), out(out), row(blockIdx.y) {}

    KV_DEVICE void run() {
        for (uint32_t c = threadIdx.x; c < call.value_dim; c += blockDim.x) out[c] = 0.f;
        float max = -INFINITY;
        for (uint32_t i = 0; i < unit.splits; i++) max = fmaxf(max, call.max[part(i)]);
        const bool none = max == -INFINITY;
        float sum = 0.f;
        for (uint32_t i = 0; i < unit.splits && !none;) i = add_class(i, max, sum);
        __syncthreads();
        write_row(max, sum, none);
    }

   private:
    const Merge& call;
    const Unit& unit;
    float (&sums)[MAX_CHANNELS];
    float (&out)[MAX_DIM];
    uint32_t row;

    KV_DEVICE uint64_t part(uint32_t split) const { return uint64_t(unit.first_split + split) * ROWS + row; }

    // Adds the splits of one class from split `first` on; the number of the first split behind them.
    KV_DEVICE uint32_t add_class(uint32_t first, float max, float& sum) {
        const uint32_t group_class = call.splits[unit.first_split + first].group_class;
        uint32_t end = first;
        float mass = 0.f;
        while (end < unit.splits && call.splits[unit.first_split + end].group_class == group_class) {
            mass += call.sum[part(end)] * exponential(call.max[part(end)] - max);
            end++;
        }
        sum += mass;
        if (!call.values) return end;
        const Side* side = group_class == OWN ? nullptr : value_side(group_class);
        const bool dot = side && side->path == DOT;
        const uint32_t channels = dot ? side->vec_len : call.value_dim;
        __syncthreads();
        for (uint32_t c = threadIdx.x; c < channels; c += blockDim.x) {
            float total = 0.f;
            for (uint32_t i = first; i < end; i++) {
                const float weight = exponential(call.max[part(i)] - max);
                if (weight > 0.f) total += weight * call.acc[part(i) * call.acc_stride + c];
            }
            sums[c] = total;
        }
        __syncthreads();
        if (dot && side->rotation == HADAMARD) hadamard_transposed(BlockTeam{}, *side, sums);
        for (uint32_t c = threadIdx.x; c < call.value_dim; c += blockDim.x) out[c] += finished(side, dot, c, mass);
        return end;
    }

    KV_DEVICE const Side* value_side(uint32_t group_class) const {
        const uint32_t head_group = unit.head / call.heads_per_group;
        return call.sides[2 * (head_group * call.classes + group_class) + 1];
    }

    KV_DEVICE float finished(const Side* side, bool dot, uint32_t c, float mass) const {
        float x = 0.f;
        if (dot && side->rotation == DENSE) {
            for (uint32_t r = 0; r < side->n; r++) x += side->synthesis[r * side->d + c] * sums[r];
        } else {
            x = sums[c];
        }
        return dot && side->mean ? x + side->mean[c] * mass : x;
    }

    KV_DEVICE void write_row(float max, float sum, bool none) {
        const Sequence& sequence = call.sequences[unit.sequence];
        const uint32_t query = (unit.first_row + row) / call.group;
        const uint32_t head = unit.head * call.group + (unit.first_row + row) % call.group;
        const uint32_t column = call.columns[sequence.first_query + query];
        float lse = -INFINITY, factor = 0.f;
        if (!none) {
            const float sink = call.sinks ? call.sinks[head] : -INFINITY, top = fmaxf(max, sink);
            const float total = sum * exponential(max - top) + exponential(sink - top);
            factor = exponential(max - top) / total;
            lse = top + logf(total);
        }
        if (call.lse && threadIdx.x == 0) call.lse[(uint64_t(unit.sequence) * call.query_heads + head) * call.width + column] = lse;
        if (!call.values) return;
        const int64_t at = element(call.out, unit.sequence, head, column);
        for (uint32_t c = threadIdx.x; c < call.value_dim; c += blockDim.x) write(call.out, at, c, out[c] * factor);
    }
};

}  // namespace
}  // namespace kvrs

// Grid: (units, ROWS).
KV_KERNEL(kvrs_merge, 128, 8)(const kvrs::Merge call) {
    using namespace kvrs;
    KV_SHARED(float, sums, [MAX_CHANNELS]);
    KV_SHARED(float, out, [MAX_DIM]);
    if (blockIdx.y >= call.units[blockIdx.x].rows) return;
    Row(call, sums, out).run();
}
