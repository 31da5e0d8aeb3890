// The one header that kernels include for the machine they run on: a device, or the emulator on a CPU.
//
// Kernels use these names, and CUDA's own for shuffles, votes, rounded arithmetic and bits; PTX is written here only.
//   KV_KERNEL(name, threads, blocks_per_sm)(const Args args) {...}  an entry point with one structure as its parameter
//   KV_DEVICE                                                       a function that kernels call
//   KV_SHARED(type, name, [extents])                                a variable in shared memory
//   kv_load<T>(pointer)                                             reads 1 to 16 bytes of a page, once
//   kv_cp_async<BYTES>(shared, global, valid), ..._commit(), ..._wait<KEEP>()
//   kv_ldmatrix_x4, _x4_trans, _x2, _x2_trans (registers, row)
//   kv_mma_m16n8k16_f16, kv_mma_m16n8k16_bf16, kv_mma_m16n8k32_s8 (c, a, b)
//   kv_exp2(x)                                                      2^x to about 2 ulp
#pragma once

#ifdef KVRS_EMULATE
#include <emu/device.h>
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef __CUDACC_RTC__  // this compiler has no headers of the host
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#else
#include <cstdint>
#endif

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif

#define KV_DEVICE __device__ __forceinline__
#define KV_KERNEL(name, threads, blocks_per_sm) \
    extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm) name
#define KV_SHARED(type, name, ...) __shared__ __align__(16) type name __VA_ARGS__

// Page bytes are read once: they go through the read-only path and leave nothing in L1.
template <class T> KV_DEVICE T kv_load(const void* pointer);
template <> KV_DEVICE uint4 kv_load<uint4>(const void* pointer) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                              : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                              : "l"(__cvta_generic_to_global(pointer)));
    return v;
}
template <> KV_DEVICE uint2 kv_load<uint2>(const void* pointer) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                              : "=r"(v.x), "=r"(v.y)
                              : "l"(__cvta_generic_to_global(pointer)));
    return v;
}
template <> KV_DEVICE uint32_t kv_load<uint32_t>(const void* pointer) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(pointer)));
    return v;
}
template <> KV_DEVICE uint16_t kv_load<uint16_t>(const void* pointer) {
    uint16_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(__cvta_generic_to_global(pointer)));
    return v;
}
template <> KV_DEVICE uint8_t kv_load<uint8_t>(const void* pointer) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(pointer)));
    return static_cast<uint8_t>(v);
}

// As `kv_load`, where threads of a warp ask for one address together: one transaction, which the emulator counts for
// those that say `counts`.
template <class T> KV_DEVICE T kv_load_together(const void* pointer, bool) { return kv_load<T>(pointer); }

KV_DEVICE uint32_t kv_shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies BYTES from global to shared memory, or writes zeros if not `valid`, until the group is waited for.
template <int BYTES> KV_DEVICE void kv_cp_async(void* shared, const void* global, bool valid = true) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(kv_shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(kv_shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "n"(BYTES), "r"(valid ? BYTES : 0)
                 : "memory");
    }
}
KV_DEVICE void kv_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most KEEP of this thread's groups are pending.
template <int KEEP> KV_DEVICE void kv_cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory");
}

#define KV_LDMATRIX_X4(name, form)                                                                       \
  KV_DEVICE void name(uint32_t (&r)[4], const void* row) {                                               \
    asm volatile("ldmatrix.sync.aligned.m8n8." form ".shared.b16 {%0, %1, %2, %3}, [%4];"                \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                        \
                 : "r"(kv_shared_address(row))                                                           \
                 : "memory");                                                                            \
    }
#define KV_LDMATRIX_X2(name, form)                                                                       \
  KV_DEVICE void name(uint32_t (&r)[2], const void* row) {                                               \
    asm volatile("ldmatrix.sync.aligned.m8n8." form ".shared.b16 {%0, %1}, [%2];"                        \
                 : "=r"(r[0]), "=r"(r[1])                                                                \
                 : "r"(kv_shared_address(row))                                                           \
                 : "memory");                                                                            \
    }
KV_LDMATRIX_X4(kv_ldmatrix_x4, "x4")
KV_LDMATRIX_X4(kv_ldmatrix_x4_trans, "x4.trans")
KV_LDMATRIX_X2(kv_ldmatrix_x2, "x2")
KV_LDMATRIX_X2(kv_ldmatrix_x2_trans, "x2.trans")

// c += a b, where a is 16 rows, b 8 columns and c f32 or int32; fragments as the PTX manual draws them.
#define KV_MMA(name, shape, types, register, number)                                                     \
  KV_DEVICE void name(number (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {                  \
    asm volatile("mma.sync.aligned." shape ".row.col." types                                             \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
                 : "+" register(c[0]), "+" register(c[1]), "+" register(c[2]), "+" register(c[3])        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                    \
    }
KV_MMA(kv_mma_m16n8k16_f16, "m16n8k16", "f32.f16.f16.f32", "f", float)
KV_MMA(kv_mma_m16n8k16_bf16, "m16n8k16", "f32.bf16.bf16.f32", "f", float)
KV_MMA(kv_mma_m16n8k32_s8, "m16n8k32", "s32.s8.s8.s32", "r", int)

KV_DEVICE float kv_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
