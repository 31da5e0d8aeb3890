// What the sanitizers want to know about fibers and memory; nothing without them.
//
// KVRS_EMU_ASAN and KVRS_EMU_TSAN are set for all files when the kernels are compiled with that sanitizer. The
// emulator itself is never instrumented: its own state is not the kernels' memory.
#pragma once
#include <cstddef>

#ifdef KVRS_EMU_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t bytes);
void __sanitizer_finish_switch_fiber(void* saved, const void** old_bottom, size_t* old_bytes);
void __asan_poison_memory_region(const volatile void* address, size_t bytes);
void __asan_unpoison_memory_region(const volatile void* address, size_t bytes);
}
#endif

#ifdef KVRS_EMU_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
}
#endif

namespace emu {

#ifdef KVRS_EMU_ASAN
inline void poison_memory(void* address, size_t bytes) { __asan_poison_memory_region(address, bytes); }
inline void unpoison_memory(void* address, size_t bytes) { __asan_unpoison_memory_region(address, bytes); }
#else
inline void poison_memory(void*, size_t) {}
inline void unpoison_memory(void*, size_t) {}
#endif

#ifdef KVRS_EMU_TSAN
// What comes before a publish of the address comes before what follows a later observe of it.
inline void publish(void* address) { __tsan_release(address); }
inline void observe(void* address) { __tsan_acquire(address); }
#else
inline void publish(void*) {}
inline void observe(void*) {}
#endif

}  // namespace emu
