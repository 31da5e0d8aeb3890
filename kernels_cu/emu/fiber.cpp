#include "fiber.h"
#include "sanitizer.h"
#include "thread.h"
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#ifndef __x86_64__
#error "the emulator switches stacks on x86-64 only"
#endif

// Puts the registers that a call preserves on the stack, changes the stack, and takes the other's registers from it.
// It jumps instead of returning: the CPU would predict a return into the fiber that it came from.
asm(R"(
.text
.type kvrs_emu_change_stack,@function
kvrs_emu_change_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size kvrs_emu_change_stack, .-kvrs_emu_change_stack
)");
extern "C" void kvrs_emu_change_stack(void** save, void* next);

namespace emu {
namespace {

constexpr size_t GUARD_BYTES = 4096;
#if defined(KVRS_EMU_ASAN) || defined(KVRS_EMU_TSAN)
constexpr size_t STACK_BYTES = 256 << 10;
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr size_t SAVED_REGISTERS = 6;

#ifdef KVRS_EMU_ASAN
thread_local Fiber* left;  // the fiber that was left by the last change
#endif

}  // namespace

Fiber::~Fiber() { unmap(); }

void Fiber::map() {
    Unseen unseen;
    void* memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE)) {
        std::perror("kvrs emulator: no memory for the stack of a thread");
        std::abort();
    }
    stack_ = static_cast<char*>(memory) + GUARD_BYTES;
    bottom_ = stack_;
    bytes_ = STACK_BYTES;
#ifdef KVRS_EMU_TSAN
    shadow_ = __tsan_create_fiber(0);
#endif
}

void Fiber::unmap() {
    if (!stack_) return;
    Unseen unseen;
    unpoison_memory(stack_, STACK_BYTES);
#ifdef KVRS_EMU_TSAN
    __tsan_destroy_fiber(shadow_);
#endif
    munmap(stack_ - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
    stack_ = nullptr;
}

void Fiber::adopt() {
#ifdef KVRS_EMU_TSAN
    shadow_ = __tsan_get_current_fiber();
#endif
}

void* Fiber::top() const { return stack_ + STACK_BYTES - 64 - sizeof(void*); }

bool Fiber::overflowed(const void* address) const { return address < stack_ && address >= stack_ - GUARD_BYTES; }

void Fiber::drop() {
#ifdef KVRS_EMU_TSAN
    shadow_ = __tsan_create_fiber(0);  // the old record is lost: it must not end amid calls
#endif
    unpoison_memory(stack_, STACK_BYTES);
}

void Fiber::prepare(void (*entry)(), unsigned colour) {
    if (!stack_) map();
    void** top = reinterpret_cast<void**>(stack_ + STACK_BYTES - 64 - colour % 32 * 128);
    *--top = nullptr;  // in the place of a return address: `entry` finds the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (size_t i = 0; i < SAVED_REGISTERS; i++) *--top = nullptr;
    stack_pointer_ = top;
}

#ifdef KVRS_EMU_ASAN

void Fiber::change(Fiber& from, Fiber& to, bool last) {
    left = &from;
    __sanitizer_start_switch_fiber(last ? nullptr : &from.shadow_, to.bottom_, to.bytes_);
    kvrs_emu_change_stack(&from.stack_pointer_, to.stack_pointer_);
    __sanitizer_finish_switch_fiber(from.shadow_, &left->bottom_, &left->bytes_);
}

void Fiber::entered() { __sanitizer_finish_switch_fiber(nullptr, &left->bottom_, &left->bytes_); }

#else

void Fiber::change(Fiber& from, Fiber& to, [[maybe_unused]] bool last) {
#ifdef KVRS_EMU_TSAN
    __tsan_switch_to_fiber(to.shadow_, 1);  // 1: a switch orders no memory
#endif
    kvrs_emu_change_stack(&from.stack_pointer_, to.stack_pointer_);
}

void Fiber::entered() {}

#endif

}  // namespace emu
