// KV_KERNEL under emulation: the kernel is a function, and tells the emulator its name before main starts.
#pragma once
#include "thread.h"
#include <cstring>

namespace emu {

struct Kernel {
    const char* name;
    unsigned threads;
    void (*call)(const void* args);
    const Kernel* next;  // the registry is a list, whose head is in registry.cpp
};

// Puts a kernel into the registry.
struct Registration {
    Registration(const char* name, unsigned threads, void (*call)(const void*));
    Kernel kernel;
};

// The kernel's parameter, whatever its type. `Tag` makes the compiler look for the kernel where its tag was declared.
template <class Tag> struct Parameter {
    const void* args;
    template <class Args> operator Args() const {
        Args value;
        std::memcpy(&value, args, sizeof value);
        return value;
    }
};

}  // namespace emu

// The kernel's own declaration follows the macro, so `name(...)` is looked up when the template is instantiated, at
// the end of the file.
#define KV_KERNEL(name, threads, blocks_per_sm)                                                             \
  struct name##_tag {};                                                                                     \
  template <class Tag> void name##_call(const void* args) { name(::emu::Parameter<Tag>{args}); }            \
  static ::emu::Registration name##_registration{#name, threads, &name##_call<name##_tag>};                 \
    extern "C" void name
