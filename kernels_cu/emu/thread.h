// What a kernel sees of the emulator: its own thread, the barrier, and the exchange between the lanes of a warp.
//
// Each CUDA thread is a fiber. A fiber runs until it comes to a barrier or a collective operation of its warp, where
// it waits for the others; which of those that can go on goes first is FIFO or random, by the seed of the launch.
#pragma once
#include "sanitizer.h"
#include "types.h"
#include <cstddef>
#include <cstring>

namespace emu {

// A place in a kernel. Two places are the same if their addresses are.
struct Site {
    const char* file;
    int line;
    const char* what;
};

// The part of a thread's state that kernels read.
struct Thread {
    uint3 index;
    unsigned lane, warp;
    uint64_t loaded_bytes = 0;
    const struct Launch* launch = nullptr;
    const uint3* block_index = nullptr;
    int unseen = 0;  // objects of Unseen that live in this thread
};

struct Kernel;

// One call of a kernel.
struct Launch {
    const Kernel* kernel;
    const void* args;
    dim3 grid, block;
    uint64_t seed;
};

// The thread that runs. The emulator changes it at every switch.
extern constinit thread_local Thread* self;

// While it lives, TSan takes no account of what the functions that the emulator calls (memcpy, malloc) do to memory.
struct Unseen {
#ifdef KVRS_EMU_TSAN
    Unseen() {
        __tsan_ignore_thread_begin();
        if (self) self->unseen++;
    }
    ~Unseen() {
        __tsan_ignore_thread_end();
        if (self) self->unseen--;
    }
    // Ends all of this thread, which goes no further.
    static void end_all() {
        for (; self->unseen > 0; self->unseen--) __tsan_ignore_thread_end();
    }
#else
    Unseen() {}
    static void end_all() {}
#endif
};

// Ends the launch with an error: `format` is printf's, the message starts with kernel, block, thread and place.
[[noreturn]] void fail(const Site& site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// __syncthreads().
void synchronize_block(const Site& site);

// __syncwarp(): the only operation of a warp that also orders its memory accesses.
void synchronize_warp(const Site& site, unsigned mask = 0xffffffffu);

// Memory of the block for the variable that `key` stands for, filled with 0xFF when the block starts.
void* shared_memory(const void* key, size_t bytes);

// Adds to the bytes that the kernel has read from pages.
#ifdef KVRS_EMU_TSAN
void count_loaded(size_t bytes);
#else
inline void count_loaded(size_t bytes) { self->loaded_bytes += bytes; }
#endif

constexpr size_t LANES = 32;
constexpr size_t PAYLOAD_BYTES = 32;

// What the lanes of a warp have put together.
struct Collective {
    unsigned mask, arrived, left;
    const Site* site;
    alignas(16) unsigned char payload[LANES][PAYLOAD_BYTES];
};

// Waits until all lanes of `mask` have come to the same place, and gives what each of them brought.
Collective* arrive(const Site& site, unsigned mask, const void* payload, size_t bytes);

// Says that this lane has read what it needs.
void leave(Collective* collective);

// The values of all lanes of `mask`, for the time that the object lives.
template <class T> class Exchange {
    static_assert(sizeof(T) <= PAYLOAD_BYTES, "more than a lane can bring");

  public:
    Exchange(const Site& site, unsigned mask, const T& mine) : collective_(arrive(site, mask, &mine, sizeof mine)) {}
    ~Exchange() { leave(collective_); }
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    T operator[](unsigned lane) const {
        T value;
        __builtin_memcpy(&value, collective_->payload[lane], sizeof value);
        return value;
    }

  private:
    Collective* collective_;
};

}  // namespace emu

// The place of this expression in the source.
#define EMU_SITE(what)                                            \
  ([]() -> const ::emu::Site& {                                   \
    static constexpr ::emu::Site site{__FILE__, __LINE__, what};  \
    return site;                                                  \
    }())

#define threadIdx (::emu::self->index)
#define blockIdx (*::emu::self->block_index)
#define blockDim (::emu::self->launch->block)
#define gridDim (::emu::self->launch->grid)
#define warpSize 32
#define __syncthreads() ::emu::synchronize_block(EMU_SITE("__syncthreads"))
#define __syncwarp(...) ::emu::synchronize_warp(EMU_SITE("__syncwarp") __VA_OPT__(, ) __VA_ARGS__)
