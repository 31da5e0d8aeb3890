// Memory faults of kernels become errors of the launch.
#pragma once
#include <csignal>
#include <memory>

namespace emu {

// For the time that it lives, this OS thread has a stack for signals, so that even an overflow of a fiber's stack is
// reported. The first one also makes faults of kernels errors for the whole process; other faults are left to who
// handled them before. Under a sanitizer it does nothing: that reports faults itself.
class FaultGuard {
 public:
    FaultGuard();
    ~FaultGuard();
    FaultGuard(const FaultGuard&) = delete;
    FaultGuard& operator=(const FaultGuard&) = delete;

 private:
    std::unique_ptr<char[]> stack_;  // null if the thread had one already
};

}  // namespace emu
