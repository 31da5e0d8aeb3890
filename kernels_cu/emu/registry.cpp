#include "kernel.h"

// Written by the build: one function of each file with kernels, so that a linker keeps all of them.
extern void (*const kvrs_emu_units[])();

namespace emu {

constinit const Kernel* registered = nullptr;

Registration::Registration(const char* name, unsigned threads, void (*call)(const void*))
        : kernel{name, threads, call, registered} {
    registered = &kernel;
}

const Kernel* find_kernel(const char* name) {
    if (!kvrs_emu_units[0]) return nullptr;
    for (const Kernel* kernel = registered; kernel; kernel = kernel->next)
        if (!std::strcmp(kernel->name, name)) return kernel;
    return nullptr;
}

}  // namespace emu
