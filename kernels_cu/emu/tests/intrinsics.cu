// Each operation that kernels use, on values that a test chooses: results are stored as bits, and compared with what
// the PTX manual says. The same kernels run in the emulator and on a device.
#include <kvrs/portable.cuh>

namespace emu_tests {

struct Words {
    const uint32_t* in;
    uint32_t* out;
    uint32_t count;
};

KV_DEVICE uint32_t position() { return blockIdx.x * blockDim.x + threadIdx.x; }

// in: pairs of words, one for each row of blocks; out: [pairs][65536], one result for each selector.
KV_KERNEL(try_byte_perm, 256, 1)(const Words args) {
    const uint32_t* pair = args.in + 2 * blockIdx.y;
    args.out[(blockIdx.y << 16) + position()] = __byte_perm(pair[0], pair[1], position());
}

// in: [count][3]; out: [count][2], with signs and without.
KV_KERNEL(try_dp4a, 128, 1)(const Words args) {
    const uint32_t i = position();
    if (i >= args.count) return;
    const uint32_t* v = args.in + 3 * i;
    args.out[2 * i] = uint32_t(__dp4a(int(v[0]), int(v[1]), int(v[2])));
    args.out[2 * i + 1] = __dp4a(v[0], v[1], v[2]);
}

// out: [65536][2], a half and a bfloat16 of these bits as floats.
KV_KERNEL(try_widen, 256, 1)(const Words args) {
    const uint32_t bits = position();
    args.out[2 * bits] = __float_as_uint(__half2float(__ushort_as_half(uint16_t(bits))));
    args.out[2 * bits + 1] = __float_as_uint(__bfloat162float(__ushort_as_bfloat16(uint16_t(bits))));
}

// in: floats; out: [count][2], as half and as bfloat16.
KV_KERNEL(try_narrow, 256, 1)(const Words args) {
    const uint32_t i = position();
    if (i >= args.count) return;
    const float x = __uint_as_float(args.in[i]);
    args.out[2 * i] = __half_as_ushort(__float2half_rn(x));
    args.out[2 * i + 1] = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// in: [count][3] floats; out: [count][12].
KV_KERNEL(try_floats, 128, 1)(const Words args) {
    const uint32_t i = position();
    if (i >= args.count) return;
    const float x = __uint_as_float(args.in[3 * i]), y = __uint_as_float(args.in[3 * i + 1]);
    const float z = __uint_as_float(args.in[3 * i + 2]);
    uint32_t* out = args.out + 12 * i;
    out[0] = __float_as_uint(__fadd_rn(x, y));
    out[1] = __float_as_uint(__fsub_rn(x, y));
    out[2] = __float_as_uint(__fmul_rn(x, y));
    out[3] = __float_as_uint(__fdiv_rn(x, y));
    out[4] = __float_as_uint(__fmaf_rn(x, y, z));
    out[5] = __float_as_uint(__fsqrt_rn(x));
    out[6] = __float_as_uint(rintf(x));
    out[7] = __float_as_uint(fmaxf(x, y));
    out[8] = __float_as_uint(fminf(x, y));
    out[9] = uint32_t(__float2int_rn(x));
    out[10] = __float_as_uint(__int2float_rn(int(args.in[3 * i])));
    out[11] = __float_as_uint(__frcp_rn(x));
}

struct Doubles {
    const double* in;  // [count][3]
    double* out;       // [count][5]
    uint32_t* narrow;  // [count], the first as a float
    uint32_t count;
};

KV_KERNEL(try_doubles, 128, 1)(const Doubles args) {
    const uint32_t i = position();
    if (i >= args.count) return;
    const double x = args.in[3 * i], y = args.in[3 * i + 1], z = args.in[3 * i + 2];
    double* out = args.out + 5 * i;
    out[0] = __dadd_rn(x, y);
    out[1] = __dsub_rn(x, y);
    out[2] = __dmul_rn(x, y);
    out[3] = __ddiv_rn(x, y);
    out[4] = __fma_rn(x, y, z);
    args.narrow[i] = __float_as_uint(__double2float_rn(x));
}

// in: floats; out: [count][4], functions that are not rounded exactly.
KV_KERNEL(try_functions, 128, 1)(const Words args) {
    const uint32_t i = position();
    if (i >= args.count) return;
    const float x = __uint_as_float(args.in[i]);
    args.out[4 * i] = __float_as_uint(kv_exp2(x));
    args.out[4 * i + 1] = __float_as_uint(exp2f(x));
    args.out[4 * i + 2] = __float_as_uint(tanhf(x));
    args.out[4 * i + 3] = __float_as_uint(rsqrtf(x));
}

// in: [count][2]; out: [count][10].
KV_KERNEL(try_bits, 128, 1)(const Words args) {
    const uint32_t i = position();
    if (i >= args.count) return;
    const uint32_t low = args.in[2 * i], high = args.in[2 * i + 1];
    const uint64_t both = uint64_t(high) << 32 | low;
    uint32_t* out = args.out + 10 * i;
    out[0] = __popc(low);
    out[1] = __popcll(both);
    out[2] = __ffs(int(low));
    out[3] = __ffsll((long long)both);
    out[4] = __clz(int(low));
    out[5] = __clzll((long long)both);
    out[6] = __umulhi(low, high);
    out[7] = __brev(low);
    out[8] = __funnelshift_l(low, high, low & 31);
    out[9] = __funnelshift_r(low, high, low & 31);
}

// Block (operand, width): out [6][32][4][32], shuffles of the lane's number plus 100 by index, up, down and xor.
KV_KERNEL(try_shuffles, 32, 1)(const Words args) {
    const uint32_t lane = threadIdx.x, operand = blockIdx.x, value = 100 + lane;
    const int width = 1 << blockIdx.y;
    uint32_t* out = args.out + (blockIdx.y * 32 + operand) * 128 + lane;
    out[0] = __shfl_sync(0xffffffffu, value, int(operand), width);
    out[32] = __shfl_up_sync(0xffffffffu, value, operand, width);
    out[64] = __shfl_down_sync(0xffffffffu, value, operand, width);
    out[96] = __shfl_xor_sync(0xffffffffu, value, int(operand), width);
}

// out: [3][32][2] words: a float, a double, and a long long from the next lane.
KV_KERNEL(try_shuffled_types, 32, 1)(const Words args) {
    const uint32_t lane = threadIdx.x;
    const float f = __shfl_sync(0xffffffffu, 0.5f + lane, int(lane) + 1);
    const double d = __shfl_sync(0xffffffffu, 1.0 / 3 + lane, int(lane) + 1);
    const long long l = __shfl_sync(0xffffffffu, (long long)lane << 33 | 5, int(lane) + 1);
    const long long bits = __double_as_longlong(d);
    args.out[2 * lane] = __float_as_uint(f);
    args.out[2 * lane + 1] = 0;
    args.out[64 + 2 * lane] = uint32_t(bits);
    args.out[64 + 2 * lane + 1] = uint32_t(bits >> 32);
    args.out[128 + 2 * lane] = uint32_t(l);
    args.out[128 + 2 * lane + 1] = uint32_t(l >> 32);
}

// in: [blocks][2], a mask of lanes that vote and what lanes say; out: [blocks][32][3].
KV_KERNEL(try_votes, 32, 1)(const Words args) {
    const uint32_t lane = threadIdx.x, mask = args.in[2 * blockIdx.x], says = args.in[2 * blockIdx.x + 1];
    if (!(mask >> lane & 1)) return;
    uint32_t* out = args.out + (blockIdx.x * 32 + lane) * 3;
    out[0] = __ballot_sync(mask, says >> lane & 1);
    out[1] = __any_sync(mask, says >> lane & 1);
    out[2] = __all_sync(mask, says >> lane & 1);
}

// in: [32 rows][8] halves as [32][4] words; out: [32 lanes][12]: x4, x4 transposed, x2, x2 transposed.
KV_KERNEL(try_ldmatrix, 32, 1)(const Words args) {
    KV_SHARED(uint4, rows, [32]);
    const uint32_t lane = threadIdx.x;
    rows[lane] = kv_load<uint4>(args.in + 4 * lane);
    __syncthreads();
    uint32_t four[4], four_t[4], two[2], two_t[2];
    kv_ldmatrix_x4(four, &rows[lane]);
    kv_ldmatrix_x4_trans(four_t, &rows[lane]);
    kv_ldmatrix_x2(two, &rows[lane % 16]);
    kv_ldmatrix_x2_trans(two_t, &rows[lane % 16]);
    uint32_t* out = args.out + 12 * lane;
    for (int i = 0; i < 4; i++) {
        out[i] = four[i];
        out[4 + i] = four_t[i];
    }
    for (int i = 0; i < 2; i++) {
        out[8 + i] = two[i];
        out[10 + i] = two_t[i];
    }
}

struct Mma {
    const uint32_t* a;  // [blocks][32 lanes][4]
    const uint32_t* b;  // [blocks][32][2]
    const uint32_t* c;  // [blocks][32][4]
    uint32_t* out;      // [blocks][32][4]
    uint32_t format;    // 0: binary16, 1: bfloat16, 2: signed bytes
};

KV_KERNEL(try_mma, 32, 1)(const Mma args) {
    const uint32_t at = blockIdx.x * 32 + threadIdx.x;
    uint32_t a[4], b[2];
    float f[4];
    int n[4];
    for (int i = 0; i < 4; i++) {
        a[i] = args.a[4 * at + i];
        n[i] = int(args.c[4 * at + i]);
        f[i] = __int_as_float(n[i]);
    }
    for (int i = 0; i < 2; i++) b[i] = args.b[2 * at + i];
    if (args.format == 0) kv_mma_m16n8k16_f16(f, a, b);
    if (args.format == 1) kv_mma_m16n8k16_bf16(f, a, b);
    if (args.format == 2) kv_mma_m16n8k32_s8(n, a, b);
    for (int i = 0; i < 4; i++) args.out[4 * at + i] = args.format == 2 ? uint32_t(n[i]) : __float_as_uint(f[i]);
}

// in: [3][32][4] words; out: [3][32][4], of which each lane copies 16, 8 and 4 bytes. Lanes from `count` on copy zeros.
KV_KERNEL(try_cp_async, 32, 1)(const Words args) {
    KV_SHARED(uint4, copied, [3][32]);
    const uint32_t lane = threadIdx.x;
    for (int i = 0; i < 3; i++) copied[i][lane] = make_uint4(7, 7, 7, 7);
    __syncthreads();
    const bool valid = lane < args.count;
    kv_cp_async<16>(&copied[0][lane], args.in + 4 * lane, valid);
    kv_cp_async_commit();
    kv_cp_async<8>(&copied[1][lane], args.in + 128 + 4 * lane, valid);
    kv_cp_async_commit();
    kv_cp_async<4>(&copied[2][lane], args.in + 256 + 4 * lane, valid);
    kv_cp_async_commit();
    kv_cp_async_wait<2>();
    __syncthreads();
    reinterpret_cast<uint4*>(args.out)[lane] = copied[0][lane];
    kv_cp_async_wait<0>();
    __syncthreads();
    reinterpret_cast<uint4*>(args.out)[32 + lane] = copied[1][lane];
    reinterpret_cast<uint4*>(args.out)[64 + lane] = copied[2][lane];
}

// in: 512 bytes; out: [32][9], what a lane reads at its own place of a row of units of 16, 8, 4, 2 and 1 bytes.
KV_KERNEL(try_loads, 32, 1)(const Words args) {
    const uint32_t lane = threadIdx.x;
    const uint8_t* in = reinterpret_cast<const uint8_t*>(args.in);
    const uint4 q = kv_load<uint4>(in + 16 * lane);
    const uint2 d = kv_load<uint2>(in + 8 * lane);
    uint32_t* out = args.out + 9 * lane;
    out[0] = q.x;
    out[1] = q.y;
    out[2] = q.z;
    out[3] = q.w;
    out[4] = d.x;
    out[5] = d.y;
    out[6] = kv_load<uint32_t>(in + 4 * lane);
    out[7] = kv_load<uint16_t>(in + 2 * lane);
    out[8] = kv_load<uint8_t>(in + lane);
}

// out: [2], the sum of the numbers of all threads of the grid, and the largest.
KV_KERNEL(try_atomics, 64, 1)(const Words args) {
    atomicAdd(args.out, position());
    atomicMax(args.out + 1, position() ^ 5u);
}

}  // namespace emu_tests
