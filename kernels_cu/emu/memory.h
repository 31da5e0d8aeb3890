// Shared memory, loads from pages, and cp.async.
#pragma once
#include "thread.h"
#include <type_traits>

namespace emu {

struct AsyncCopy {
    void* to;
    const void* from;
    unsigned bytes;
    bool valid;
};

// Puts a copy into the group that is being formed.
void issue_copy(const Site& site, const AsyncCopy& copy);
// Ends the group.
void commit_copies(const Site& site);
// Takes one copy out of the oldest group while more than `keep` groups are pending.
bool next_copy(unsigned keep, AsyncCopy& copy);

inline void require_aligned(const Site& site, const void* pointer, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(pointer) % bytes) fail(site, "%p is not aligned to %zu bytes", pointer, bytes);
}

// The bytes land as late as a device may let them, at the wait; the destination is spoilt as early, at the issue.
inline void copy_async(const Site& site, void* to, const void* from, unsigned bytes, bool valid) {
    require_aligned(site, to, bytes);
    if (valid) require_aligned(site, from, bytes);
    std::memset(to, 0xff, bytes);
    poison_memory(to, bytes);
    issue_copy(site, {to, from, bytes, valid});
    if (valid) count_loaded(bytes);
}

inline void wait_copies(unsigned keep) {
    for (AsyncCopy copy; next_copy(keep, copy);) {
        unpoison_memory(copy.to, copy.bytes);
        if (copy.valid) std::memcpy(copy.to, copy.from, copy.bytes);
        else std::memset(copy.to, 0, copy.bytes);
    }
}

}  // namespace emu

// A variable in shared memory with its own allocation, so that sanitizers see its ends.
#define KV_SHARED(type, name, ...)                 \
  using name##_shared_type = type __VA_ARGS__;     \
  static char name##_shared_key;                   \
  name##_shared_type& name = *static_cast<name##_shared_type*>( \
            ::emu::shared_memory(&name##_shared_key, sizeof(name##_shared_type)))

template <class T>
KV_DEVICE T kv_load(const void* pointer, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    static_assert(sizeof(T) <= 16 && !(sizeof(T) & (sizeof(T) - 1)), "a load moves 1, 2, 4, 8 or 16 bytes");
    emu::require_aligned({file, line, "kv_load"}, pointer, sizeof(T));
    emu::count_loaded(sizeof(T));
    return *static_cast<const T*>(pointer);
}
template <class T>
KV_DEVICE T kv_load_together(const void* pointer, bool counts, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (counts) return kv_load<T>(pointer, file, line);
    emu::require_aligned({file, line, "kv_load"}, pointer, sizeof(T));
    return *static_cast<const T*>(pointer);
}
template <class T> T __ldg(const T* pointer) { return *pointer; }

// Relaxed, as on a device: an atomic addition orders no other memory.
template <class T, class Value> T atomicAdd(T* target, Value value) {
    if constexpr (std::is_integral_v<T>) return __atomic_fetch_add(target, T(value), __ATOMIC_RELAXED);
    T old, sum;
    __atomic_load(target, &old, __ATOMIC_RELAXED);
    do sum = old + T(value);
    while (!__atomic_compare_exchange(target, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
template <class T, class Value> T atomicMax(T* target, Value value) {
    T old;
    __atomic_load(target, &old, __ATOMIC_RELAXED);
    for (T most = T(value); old < most;)
        if (__atomic_compare_exchange(target, &old, &most, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
    return old;
}

template <int BYTES>
void kv_cp_async(void* shared, const void* global, bool valid = true, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    emu::copy_async({file, line, "cp.async"}, shared, global, BYTES, valid);
}
#define kv_cp_async_commit() ::emu::commit_copies(EMU_SITE("cp.async.commit_group"))
template <int KEEP> void kv_cp_async_wait() { emu::wait_copies(KEEP); }
