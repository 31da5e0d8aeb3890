// Queries as the passes over pages read them: B^T q for every class, and q itself in f32.
#include <kvrs/portable.cuh>
#include <kvrs/attend.cuh>
#include <kvrs/transform.cuh>
#include <kvrs/view.cuh>

namespace kvrs {

struct Prepare {
    View q;
    const uint32_t* sequences;    // [queries]: whose each is
    const uint32_t* columns;      // [queries]
    const Side* const* sides;     // [head group][class][2]
    float* queries;               // [classes + 1][queries][query heads][stride]
    uint32_t classes, heads_per_group, group, query_heads, key_dim, query_rows, query_stride, pad;
};

}  // namespace kvrs

// Grid: (queries, query heads, classes + 1).
KV_KERNEL(kvrs_prepare, 128, 8)(const kvrs::Prepare call) {
    using namespace kvrs;
    KV_SHARED(float, x, [MAX_DIM]);
    const uint32_t query = blockIdx.x, head = blockIdx.y, group_class = blockIdx.z;
    const uint64_t flat = uint64_t(query) * call.query_heads + head;
    float* out = call.queries + (group_class * uint64_t(call.query_rows) + flat) * call.query_stride;
    const int64_t row = element(call.q, call.sequences[query], head, call.columns[query]);
    for (uint32_t c = threadIdx.x; c < call.key_dim; c += blockDim.x) x[c] = read(call.q, row, c);
    __syncthreads();
    const uint32_t head_group = head / call.group / call.heads_per_group;
    const Side* side = group_class == call.classes ? nullptr : call.sides[2 * (head_group * call.classes + group_class)];
    if (side && side->path == DOT && side->rotation == DENSE) {
        for (uint32_t r = threadIdx.x; r < side->n; r += blockDim.x) {
            const float* matrix = side->synthesis + r * call.key_dim;
            float sum = 0.f;
            for (uint32_t c = 0; c < call.key_dim; c++) sum += matrix[c] * x[c];
            out[r] = sum;
        }
        return;
    }
    float factor = 1.f;
    if (side && side->path == DOT && side->rotation == HADAMARD) {
        hadamard(BlockTeam{}, *side, x);
        factor = side->rotation_factor;
    }
    const uint32_t length = side && side->path == DOT ? side->vec_len : call.key_dim;
    for (uint32_t c = threadIdx.x; c < length; c += blockDim.x) out[c] = c < call.key_dim ? x[c] * factor : 0.f;
}

namespace kvrs {

struct Clear {
    const uint8_t* padding;  // [batch][width]: 1 where a column holds no query
    float* lse;              // or null
    View out;
    uint32_t query_heads, width, value_dim, values;
};

}  // namespace kvrs

// Zeros, with the log-sum-exp -inf, where a call has no query. Grid: (width, query heads, batch).
KV_KERNEL(kvrs_clear, 128, 8)(const kvrs::Clear call) {
    using namespace kvrs;
    const uint32_t column = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
    if (!call.padding[batch * call.width + column]) return;
    if (call.lse && threadIdx.x == 0) call.lse[(uint64_t(batch) * call.query_heads + head) * call.width + column] = -INFINITY;
    if (!call.values) return;
    const int64_t row = element(call.out, batch, head, column);
    for (uint32_t c = threadIdx.x; c < call.value_dim; c += blockDim.x) write(call.out, row, c, 0.f);
}
