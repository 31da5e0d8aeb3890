// ldmatrix and mma, by exchange of the lanes' registers. Letters as in the PTX manual: g = lane / 4, t = lane % 4.
//
// A is 16 rows by K, B is K by 8 columns, C is 16 by 8. Products are exact and sums are rounded once, at the end; a
// device's tensor cores keep fewer bits.
#pragma once
#include "arithmetic.h"
#include "memory.h"
#include "thread.h"

namespace emu {

// ldmatrix.m8n8.b16: lane 8 m + i gives the address of row i of matrix m; lane (g, t) gets elements 2 t and 2 t + 1
// of row g of each matrix, or of column g if transposed.
template <int COUNT>
void load_matrices(const Site& site, uint32_t (&registers)[COUNT], const void* row, bool transposed) {
    struct Row { uint16_t element[8]; } mine{};
    unsigned lane = self->lane, group = lane / 4, pair = 2 * (lane % 4);
    if (lane < 8 * COUNT) {
        require_aligned(site, row, 16);
        std::memcpy(&mine, row, sizeof mine);
    }
    Exchange<Row> all(site, 0xffffffffu, mine);
    for (int m = 0; m < COUNT; m++) {
        uint32_t low, high;
        if (transposed) {
            low = all[8 * m + pair].element[group];
            high = all[8 * m + pair + 1].element[group];
        } else {
            Row source = all[8 * m + group];
            low = source.element[pair];
            high = source.element[pair + 1];
        }
        registers[m] = low | high << 16;
    }
}

// The registers that one lane brings to an mma.
struct Fragments {
    uint32_t a[4], b[2];
};

struct BFloat16 {
    static float value(uint16_t bits) { return __bfloat162float({bits}); }
};
struct Float16 {
    static float value(uint16_t bits) { return __half2float({bits}); }
};

// mma.m16n8k16: register r of A holds row g + 8 (r % 2), columns 2 t + 8 (r / 2) and the next; register r of B holds
// rows 2 t + 8 r and the next, column g.
template <class Format>
void multiply_16(const Site& site, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    Exchange<Fragments> all(site, 0xffffffffu, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
    unsigned group = self->lane / 4, column = 2 * (self->lane % 4);
    double sum[4] = {c[0], c[1], c[2], c[3]};
    for (unsigned k = 0; k < 16; k++) {
        unsigned t = k % 8 / 2, shift = 16 * (k % 2), r = k / 8;
        Fragments rows = all[4 * group + t], left = all[4 * column + t], right = all[4 * column + 4 + t];
        double top = Format::value(rows.a[2 * r] >> shift), bottom = Format::value(rows.a[2 * r + 1] >> shift);
        double first = Format::value(left.b[r] >> shift), second = Format::value(right.b[r] >> shift);
        sum[0] += top * first;
        sum[1] += top * second;
        sum[2] += bottom * first;
        sum[3] += bottom * second;
    }
    for (int i = 0; i < 4; i++) c[i] = float(sum[i]);
}

// mma.m16n8k32 of signed bytes: as above with four bytes in a register, columns 4 t + 16 (r / 2) of A and rows
// 4 t + 16 r of B. Sums wrap.
inline void multiply_bytes(const Site& site, int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    Exchange<Fragments> all(site, 0xffffffffu, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
    unsigned group = self->lane / 4, column = 2 * (self->lane % 4);
    for (unsigned step = 0; step < 8; step++) {
        unsigned t = step % 4, r = step / 4;
        Fragments rows = all[4 * group + t], left = all[4 * column + t], right = all[4 * column + 4 + t];
        for (int i = 0; i < 4; i++) {
            c[i] = __dp4a(int(rows.a[2 * r + i / 2]), int(i % 2 ? right.b[r] : left.b[r]), c[i]);
        }
    }
}

}  // namespace emu

#define kv_ldmatrix_x4(r, row) ::emu::load_matrices<4>(EMU_SITE("ldmatrix.x4"), r, row, false)
#define kv_ldmatrix_x4_trans(r, row) ::emu::load_matrices<4>(EMU_SITE("ldmatrix.x4.trans"), r, row, true)
#define kv_ldmatrix_x2(r, row) ::emu::load_matrices<2>(EMU_SITE("ldmatrix.x2"), r, row, false)
#define kv_ldmatrix_x2_trans(r, row) ::emu::load_matrices<2>(EMU_SITE("ldmatrix.x2.trans"), r, row, true)
#define kv_mma_m16n8k16_f16(c, a, b) ::emu::multiply_16<::emu::Float16>(EMU_SITE("mma.m16n8k16.f16"), c, a, b)
#define kv_mma_m16n8k16_bf16(c, a, b) ::emu::multiply_16<::emu::BFloat16>(EMU_SITE("mma.m16n8k16.bf16"), c, a, b)
#define kv_mma_m16n8k32_s8(c, a, b) ::emu::multiply_bytes(EMU_SITE("mma.m16n8k32.s8"), c, a, b)
