// Kernels with one bug each, all of which the emulator or a sanitizer must report. Never launched on a device.
#include <kvrs/portable.cuh>

namespace emu_tests {

struct Planted {
    uint32_t* out;
    const void* in;
    uint32_t bytes;  // at `in`
};

// Reads what another warp writes, and does not wait for it.
KV_KERNEL(planted_missing_barrier, 128, 1)(const Planted args) {
    KV_SHARED(uint32_t, values, [128]);
    const uint32_t t = threadIdx.x;
    values[t] = t;
    args.out[t] = values[127 - t];
}

// Waits before it reads, but not before it writes again.
KV_KERNEL(planted_missing_second_barrier, 128, 1)(const Planted args) {
    KV_SHARED(uint32_t, values, [128]);
    const uint32_t t = threadIdx.x;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 4; i++) {
        values[t] = t + i;
        __syncthreads();
        sum += values[127 - t];
    }
    args.out[t] = sum;
}

// Lanes exchange through shared memory; a shuffle in between brings them together, but orders no memory.
KV_KERNEL(planted_missing_syncwarp, 32, 1)(const Planted args) {
    KV_SHARED(uint32_t, values, [32]);
    const uint32_t t = threadIdx.x;
    values[t] = t;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, t, 31);
    args.out[t] = values[31 - t] + other;
}

// All blocks write the same word.
KV_KERNEL(planted_race_of_blocks, 32, 1)(const Planted args) {
    if (threadIdx.x == 0) args.out[0] = blockIdx.x;
}

KV_KERNEL(planted_lane_outside_its_mask, 32, 1)(const Planted args) {
    const uint32_t t = threadIdx.x;
    args.out[t] = __shfl_xor_sync(0x7fffffffu, t, 1);
}

KV_KERNEL(planted_source_outside_the_mask, 32, 1)(const Planted args) {
    const uint32_t t = threadIdx.x;
    if (t < 16) args.out[t] = __shfl_sync(0xffffu, t, 16 + t);
}

KV_KERNEL(planted_lane_that_never_comes, 32, 1)(const Planted args) {
    const uint32_t t = threadIdx.x;
    uint32_t value = t;
    if (t != 7) value = __shfl_xor_sync(0xffffffffu, t, 1);
    args.out[t] = value;
}

KV_KERNEL(planted_divergent_collective, 32, 1)(const Planted args) {
    const uint32_t t = threadIdx.x;
    if (t & 1) {
        args.out[t] = __shfl_xor_sync(0xffffffffu, t, 2);
    } else {
        args.out[t] = __shfl_xor_sync(0xffffffffu, t, 4);
    }
}

KV_KERNEL(planted_width_of_12, 32, 1)(const Planted args) {
    args.out[threadIdx.x] = __shfl_down_sync(0xffffffffu, threadIdx.x, 1, 12);
}

KV_KERNEL(planted_divergent_barrier, 64, 1)(const Planted args) {
    if (threadIdx.x < 32) {
        __syncthreads();
        args.out[threadIdx.x] = 1;
    } else {
        __syncthreads();
        args.out[threadIdx.x] = 2;
    }
}

KV_KERNEL(planted_exit_before_barrier, 128, 1)(const Planted args) {
    if (threadIdx.x >= 100) return;
    __syncthreads();
    args.out[threadIdx.x] = 1;
}

// Half of a warp waits for the other half, which waits for the block.
KV_KERNEL(planted_deadlock, 64, 1)(const Planted args) {
    if (threadIdx.x % 32 < 16) __syncwarp(0xffffffffu);
    __syncthreads();
    args.out[threadIdx.x] = 1;
}

// One element more than there are.
KV_KERNEL(planted_read_behind_a_page, 32, 1)(const Planted args) {
    const uint8_t* page = static_cast<const uint8_t*>(args.in);
    uint32_t sum = 0;
    for (uint32_t i = threadIdx.x; i <= args.bytes / 4; i += 32) sum += kv_load<uint32_t>(page + 4 * i);
    args.out[threadIdx.x] = sum;
}

KV_KERNEL(planted_write_behind_a_page, 32, 1)(const Planted args) {
    uint8_t* page = static_cast<uint8_t*>(const_cast<void*>(args.in));
    page[args.bytes - 31 + threadIdx.x] = 1;
}

KV_KERNEL(planted_index_outside_shared_memory, 32, 1)(const Planted args) {
    KV_SHARED(uint32_t, values, [2][16]);
    const uint32_t t = threadIdx.x;
    values[t / 16][t % 16] = t;
    __syncthreads();
    args.out[t] = values[0][t];
}

KV_KERNEL(planted_unwritten_shared_memory, 32, 1)(const Planted args) {
    KV_SHARED(uint32_t, values, [32]);
    if (threadIdx.x < 31) values[threadIdx.x] = threadIdx.x;
    __syncthreads();
    args.out[threadIdx.x] = values[threadIdx.x];
}

KV_KERNEL(planted_too_much_shared_memory, 32, 1)(const Planted args) {
    KV_SHARED(uint32_t, values, [12289]);
    values[threadIdx.x] = 1;
    args.out[threadIdx.x] = values[threadIdx.x];
}

// `in` was freed.
KV_KERNEL(planted_read_after_free, 32, 1)(const Planted args) {
    args.out[threadIdx.x] = kv_load<uint32_t>(static_cast<const uint32_t*>(args.in) + threadIdx.x);
}

KV_KERNEL(planted_copy_never_waited_for, 32, 1)(const Planted args) {
    KV_SHARED(uint4, values, [32]);
    kv_cp_async<16>(&values[threadIdx.x], static_cast<const uint4*>(args.in) + threadIdx.x, true);
    kv_cp_async_commit();
    args.out[threadIdx.x] = 1;
}

KV_KERNEL(planted_copy_read_before_its_wait, 32, 1)(const Planted args) {
    KV_SHARED(uint4, values, [32]);
    kv_cp_async<16>(&values[threadIdx.x], static_cast<const uint4*>(args.in) + threadIdx.x, true);
    kv_cp_async_commit();
    args.out[threadIdx.x] = values[threadIdx.x].x;
    kv_cp_async_wait<0>();
}

// Waits for its own copy only, and reads another thread's.
KV_KERNEL(planted_copy_read_without_barrier, 64, 1)(const Planted args) {
    KV_SHARED(uint4, values, [64]);
    kv_cp_async<16>(&values[threadIdx.x], static_cast<const uint4*>(args.in) + threadIdx.x, true);
    kv_cp_async_commit();
    kv_cp_async_wait<0>();
    args.out[threadIdx.x] = values[63 - threadIdx.x].x;
}

KV_KERNEL(planted_misaligned_load, 32, 1)(const Planted args) {
    args.out[threadIdx.x] = kv_load<uint4>(static_cast<const uint8_t*>(args.in) + 4 * threadIdx.x).x;
}

KV_KERNEL(planted_misaligned_store, 32, 1)(const Planted args) {
    uint4* to = reinterpret_cast<uint4*>(args.out + 2);
    *to = make_uint4(threadIdx.x, threadIdx.x, threadIdx.x, threadIdx.x);
}

KV_KERNEL(planted_misaligned_matrix, 32, 1)(const Planted args) {
    KV_SHARED(uint32_t, values, [64]);
    values[threadIdx.x] = values[threadIdx.x + 32] = threadIdx.x;
    __syncthreads();
    uint32_t registers[4];
    kv_ldmatrix_x4(registers, &values[threadIdx.x]);
    args.out[threadIdx.x] = registers[0];
}

KV_KERNEL(planted_null, 32, 1)(const Planted args) {
    volatile uint32_t* nowhere = reinterpret_cast<volatile uint32_t*>(uintptr_t(args.bytes - 1024));
    if (threadIdx.x == 5) *nowhere = 1;
    args.out[threadIdx.x] = 1;
}

__attribute__((noinline)) uint32_t deep(uint32_t depth) {
    volatile uint32_t frame[256];
    frame[depth % 256] = depth;
    return depth == 0 ? 0 : deep(depth - 1) + frame[depth % 256];
}

KV_KERNEL(planted_full_stack, 32, 1)(const Planted args) { args.out[threadIdx.x] = deep(args.bytes); }

KV_KERNEL(planted_division_by_zero, 32, 1)(const Planted args) {
    const int zero = int(args.bytes), t = int(threadIdx.x);
    args.out[t] = uint32_t(t / zero);
}

}  // namespace emu_tests
