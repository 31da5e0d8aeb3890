// Rotary phases from exact 64-bit fractions of a turn: crates/kvrs-codec/src/phasor.rs, operation for operation.
#pragma once
#include <kvrs/layout.cuh>

namespace kvrs {

struct CosSin {
    float c, s;
};

template <int N> KV_DEVICE double horner(const double (&coefficients)[N], double z) {
    double p = coefficients[0];
#pragma unroll
    for (int i = 1; i < N; i++) p = __dadd_rn(__dmul_rn(p, z), coefficients[i]);
    return p;
}

// Cosine and sine of `position * turn / 2^64` turns, each rounded once to f32.
KV_DEVICE CosSin turned(int64_t position, uint64_t turn) {
    const double sine[7] = {1.0 / 6227020800.0, -1.0 / 39916800.0, 1.0 / 362880.0, -1.0 / 5040.0,
                            1.0 / 120.0,        -1.0 / 6.0,        1.0};
    const double cosine[8] = {-1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0, 1.0 / 40320.0,
                              -1.0 / 720.0,         1.0 / 24.0,        -1.0 / 2.0,       1.0};
    const uint64_t phase = uint64_t(position) * turn;
    const uint64_t quarter = (phase + (uint64_t(1) << 61)) >> 62;
    const double radians = 6.283185307179586 * (1.0 / 18446744073709551616.0);
    const double x = __dmul_rn(double(int64_t(phase - (quarter << 62))), radians);
    const double square = __dmul_rn(x, x);
    const double c = horner(cosine, square), s = __dmul_rn(horner(sine, square), x);
    const double a = quarter & 1 ? s : c, b = quarter & 1 ? c : s;
    return {float((quarter + 1) & 2 ? -a : a), float(quarter & 2 ? -b : b)};
}

}  // namespace kvrs
