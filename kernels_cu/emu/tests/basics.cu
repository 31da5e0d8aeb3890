// Correct kernels for the emulator's own tests.
#include <kvrs/portable.cuh>

namespace emu_tests {

struct SumRows {
    const float* in;  // [rows][256]
    float* out;       // [rows]
};

// Each block adds up one row of its grid, in the same order whatever the order of the threads.
KV_KERNEL(emu_sum_rows, 128, 2)(const SumRows args) {
    KV_SHARED(float, sums, [4]);
    const uint32_t row = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x, t = threadIdx.x;
    const float* in = args.in + 256 * row;
    float sum = __uint_as_float(kv_load<uint32_t>(in + t)) + __uint_as_float(kv_load<uint32_t>(in + 128 + t));
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (t % 32 == 0) sums[t / 32] = sum;
    __syncthreads();
    if (t == 0) args.out[row] = sums[0] + sums[1] + sums[2] + sums[3];
}

struct Turns {
    uint32_t* out;  // [blocks][256]
    uint32_t rounds;
};

// Nothing but changes of threads: barriers and shuffles.
KV_KERNEL(emu_turns, 256, 1)(const Turns args) {
    uint32_t value = threadIdx.x;
    for (uint32_t i = 0; i < args.rounds; i++) {
        value = __shfl_xor_sync(0xffffffffu, value, 1);
        __syncthreads();
    }
    args.out[blockIdx.x * 256 + threadIdx.x] = value;
}

struct Halves {
    uint32_t* out;  // [32]
};

// The halves of a warp go their own ways and meet again.
KV_KERNEL(emu_halves, 32, 1)(const Halves args) {
    const uint32_t lane = threadIdx.x, mask = lane < 16 ? 0xffffu : 0xffff0000u;
    uint32_t value = lane;
    for (uint32_t i = 0; i < (lane < 16 ? 2 : 3); i++) value += __shfl_xor_sync(mask, value, 1);
    __syncwarp();
    args.out[lane] = value + __popc(__ballot_sync(0xffffffffu, lane < 7));
}

struct Stage {
    const uint4* in;  // [blocks][4][64]
    uint4* out;       // [blocks][4][64]
    uint32_t valid;   // of the 64
};

// Four tiles through two buffers, each copied while the one before it is read.
KV_KERNEL(emu_stage, 64, 1)(const Stage args) {
    KV_SHARED(uint4, buffer, [2][64]);
    const uint32_t t = threadIdx.x, first = blockIdx.x * 256;
    for (uint32_t tile = 0; tile < 4; tile++) {
        if (tile == 0) {
            kv_cp_async<16>(&buffer[0][t], args.in + first + t, t < args.valid);
            kv_cp_async_commit();
        }
        const uint32_t next = tile + 1;
        if (next < 4) kv_cp_async<16>(&buffer[next % 2][t], args.in + first + 64 * next + t, t < args.valid);
        kv_cp_async_commit();
        kv_cp_async_wait<1>();
        __syncthreads();
        args.out[first + 64 * tile + t] = buffer[tile % 2][63 - t];
        __syncthreads();
    }
    kv_cp_async_wait<0>();
}

}  // namespace emu_tests
