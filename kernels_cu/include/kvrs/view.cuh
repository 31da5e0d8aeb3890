// Elements of strided tensors.
#pragma once
#include <kvrs/layout.cuh>

namespace kvrs {

KV_DEVICE float half_bits(uint16_t bits) {
    __half half;
    memcpy(&half, &bits, sizeof half);
    return __half2float(half);
}

KV_DEVICE uint16_t to_half_bits(float x) {
    const __half half = __float2half_rn(x);
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

KV_DEVICE float bfloat_bits(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

// Nearest even; NaN stays NaN.
KV_DEVICE uint16_t to_bfloat_bits(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 64);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

KV_DEVICE int64_t element(const View& view, uint32_t batch, uint32_t head, uint32_t token) {
    return batch * view.strides[0] + head * view.strides[1] + token * view.strides[2];
}

// Channel `c` of the row that begins at element `row`.
KV_DEVICE float read(const View& view, int64_t row, uint32_t c) {
    const int64_t at = row + c * view.strides[3];
    if (view.dtype == FLOAT32) return reinterpret_cast<const float*>(view.start)[at];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(view.start)[at];
    return view.dtype == FLOAT16 ? half_bits(bits) : bfloat_bits(bits);
}

KV_DEVICE void write(const View& view, int64_t row, uint32_t c, float x) {
    const int64_t at = row + c * view.strides[3];
    if (view.dtype == FLOAT32) {
        reinterpret_cast<float*>(view.start)[at] = x;
    } else {
        reinterpret_cast<uint16_t*>(view.start)[at] = view.dtype == FLOAT16 ? to_half_bits(x) : to_bfloat_bits(x);
    }
}

}  // namespace kvrs
