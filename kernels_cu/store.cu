// New tokens become 16-bit rows of raw pages.
#include <kvrs/portable.cuh>
#include <kvrs/view.cuh>

namespace kvrs {

// One token of one head group.
struct RawRow {
    uint8_t* page;
    const Side* const* sides;  // of the raw class: keys, values
    uint32_t slot, batch, head, column;
};

struct StoreRaw {
    const RawRow* rows;
    View k, v;
    unsigned int* refused;  // vectors that were not finite or too large for the page's type, stored as zeros
    float limit;
    uint32_t pad;
};

}  // namespace kvrs

// A warp takes one vector. Grid: (rows, 2), heads of a group one after the other.
KV_KERNEL(kvrs_store_raw, 32, 16)(const kvrs::StoreRaw call) {
    using namespace kvrs;
    const RawRow& job = call.rows[blockIdx.x];
    const Side& side = *job.sides[blockIdx.y];
    const View view = blockIdx.y == 0 ? call.k : call.v;
    const Run& run = side.run[0];
    uint8_t* tile = job.page + side.codes_at + job.slot / TILE * side.tile_bytes + run.at;
    uint16_t* row = reinterpret_cast<uint16_t*>(tile) + job.slot % TILE * run.channels;
    for (uint32_t part = 0; part < side.parts; part++) {
        const int64_t from = element(view, job.batch, job.head + part, job.column);
        bool fine = true;
        for (uint32_t c = threadIdx.x; c < side.d; c += 32) fine &= fabsf(read(view, from, c)) <= call.limit;
        const bool all = __all_sync(0xffffffffu, fine);
        if (!all && threadIdx.x == 0) atomicAdd(call.refused, 1u);
        for (uint32_t c = threadIdx.x; c < side.d; c += 32) {
            const float x = all ? read(view, from, c) : 0.f;
            row[part * side.d + c] = run.elem == F16 ? to_half_bits(x) : to_bfloat_bits(x);
        }
    }
    for (uint32_t c = side.parts * side.d + threadIdx.x; c < run.channels; c += 32) row[c] = 0;
}
