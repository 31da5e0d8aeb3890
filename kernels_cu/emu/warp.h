// Shuffles and votes: shfl.sync and vote.sync of PTX.
#pragma once
#include "thread.h"

namespace emu {

// shfl.sync: `source` is where this lane wants to read, if `inside` says that its segment has that lane.
template <class T> T shuffle(const Site& site, unsigned mask, T value, unsigned source, bool inside) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    Exchange<T> all(site, mask, value);
    if (!inside) return value;
    if (!(mask >> source & 1)) fail(site, "reads lane %u, which is not in mask %08x", source, mask);
    return all[source];
}

// The bits of a lane number that name the segment of `width` lanes.
inline unsigned segment_bits(const Site& site, int width) {
    if (width < 1 || width > 32 || (width & (width - 1))) fail(site, "width %d; allowed: 1, 2, 4, 8, 16, 32", width);
    return 32 - width;
}

template <class T> T shuffle_index(const Site& site, unsigned mask, T value, int source, int width = 32) {
    unsigned segment = segment_bits(site, width), lane = self->lane;
    return shuffle(site, mask, value, (lane & segment) | (source & ~segment & 31), true);
}

template <class T> T shuffle_xor(const Site& site, unsigned mask, T value, int bits, int width = 32) {
    unsigned segment = segment_bits(site, width), lane = self->lane, source = lane ^ (bits & 31);
    return shuffle(site, mask, value, source, source <= (lane | (~segment & 31)));
}

template <class T> T shuffle_up(const Site& site, unsigned mask, T value, unsigned delta, int width = 32) {
    int segment = segment_bits(site, width), lane = self->lane, source = lane - int(delta & 31);
    return shuffle(site, mask, value, source & 31, source >= (lane & segment));
}

template <class T> T shuffle_down(const Site& site, unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned segment = segment_bits(site, width), lane = self->lane, source = lane + (delta & 31);
    return shuffle(site, mask, value, source & 31, source <= (lane | (~segment & 31)));
}

inline unsigned ballot(const Site& site, unsigned mask, int predicate) {
    Exchange<bool> all(site, mask, predicate != 0);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < LANES; lane++) votes |= unsigned((mask >> lane & 1) && all[lane]) << lane;
    return votes;
}

inline int any(const Site& site, unsigned mask, int predicate) { return ballot(site, mask, predicate) != 0; }
inline int all(const Site& site, unsigned mask, int predicate) { return ballot(site, mask, predicate) == mask; }

}  // namespace emu

#define __shfl_sync(...) ::emu::shuffle_index(EMU_SITE("__shfl_sync"), __VA_ARGS__)
#define __shfl_xor_sync(...) ::emu::shuffle_xor(EMU_SITE("__shfl_xor_sync"), __VA_ARGS__)
#define __shfl_up_sync(...) ::emu::shuffle_up(EMU_SITE("__shfl_up_sync"), __VA_ARGS__)
#define __shfl_down_sync(...) ::emu::shuffle_down(EMU_SITE("__shfl_down_sync"), __VA_ARGS__)
#define __ballot_sync(...) ::emu::ballot(EMU_SITE("__ballot_sync"), __VA_ARGS__)
#define __any_sync(...) ::emu::any(EMU_SITE("__any_sync"), __VA_ARGS__)
#define __all_sync(...) ::emu::all(EMU_SITE("__all_sync"), __VA_ARGS__)
