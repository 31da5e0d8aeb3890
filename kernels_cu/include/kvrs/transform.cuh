// Rotations of vectors in shared memory: crates/kvrs-codec/src/transform.rs.
#pragma once
#include <kvrs/layout.cuh>

namespace kvrs {

// Threads that work on one vector together: `rank` of `size`, which meet in `sync`.
struct WarpTeam {
    KV_DEVICE uint32_t rank() const { return threadIdx.x % 32; }
    KV_DEVICE uint32_t size() const { return 32; }
    KV_DEVICE void sync() const { __syncwarp(); }
};

struct BlockTeam {
    KV_DEVICE uint32_t rank() const { return threadIdx.x; }
    KV_DEVICE uint32_t size() const { return blockDim.x; }
    KV_DEVICE void sync() const { __syncthreads(); }
};

// Unnormalised Walsh-Hadamard transform of x [d], stages 1, 2, 4 .. d / 2. Ends in a meeting of the team.
template <class Team> KV_DEVICE void walsh_hadamard(Team team, float* x, uint32_t d) {
    for (uint32_t h = 1; h < d; h *= 2) {
        for (uint32_t i = team.rank(); i < d / 2; i += team.size()) {
            const uint32_t at = i / h * 2 * h + i % h;
            const float a = x[at], b = x[at + h];
            x[at] = __fadd_rn(a, b);
            x[at + h] = __fsub_rn(a, b);
        }
        team.sync();
    }
}

// Three rounds of signs and Walsh-Hadamard, bit for bit as encoding demands.
template <class Team> KV_DEVICE void hadamard(Team team, const Side& side, float* x) {
    const uint32_t d = side.d;
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t c = team.rank(); c < d; c += team.size()) {
            const float y = round == 0 ? x[c] : __fmul_rn(x[c], side.between_rounds);
            x[c] = __fmul_rn(y, side.analysis[round * d + c]);
        }
        team.sync();
        walsh_hadamard(team, x, d);
    }
}

// The transpose of `hadamard`, in place and orthonormal.
template <class Team> KV_DEVICE void hadamard_transposed(Team team, const Side& side, float* x) {
    const uint32_t d = side.d;
    for (uint32_t left = 3; left-- > 0;) {
        walsh_hadamard(team, x, d);
        const float factor = left > 0 ? side.between_rounds : side.rotation_factor;
        for (uint32_t c = team.rank(); c < d; c += team.size()) x[c] *= side.analysis[left * d + c] * factor;
        team.sync();
    }
}

}  // namespace kvrs
