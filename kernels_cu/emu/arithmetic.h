// Floating point: what IEEE 754 fixes is the same as on a device; exp2f, tanhf and the approximations are the host's.
#pragma once
#include "integer.h"
#include <cmath>

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }

inline float __double2float_rn(double x) { return float(x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
// cvt.rni.s32.f32: ties to even, values outside the range become its ends, NaN becomes 0.
inline int __float2int_rn(float x) {
    if (std::isnan(x)) return 0;
    double r = std::nearbyint(double(x));
    return r >= 2147483647.0 ? 2147483647 : r <= -2147483648.0 ? int(-2147483647 - 1) : int(r);
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float kv_exp2(float x) { return std::exp2(x); }

// Binary16 and bfloat16 as their bits.
struct __half { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
struct __nv_bfloat16 { uint16_t bits; };

inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

// Round to nearest, ties to even; a NaN becomes the device's one NaN.
inline __half __float2half_rn(float x) {
    return {std::isnan(x) ? uint16_t(0x7fff) : std::bit_cast<uint16_t>(_Float16(x))};
}
inline float __half2float(__half x) { return float(std::bit_cast<_Float16>(x.bits)); }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    if (std::isnan(x)) return {0x7fff};
    uint32_t bits = std::bit_cast<uint32_t>(x);
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
