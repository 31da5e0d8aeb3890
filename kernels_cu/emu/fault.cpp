#include "fault.h"
#include "engine.h"
#include <mutex>
#include <ucontext.h>

namespace emu {

#if defined(KVRS_EMU_ASAN) || defined(KVRS_EMU_TSAN)

FaultGuard::FaultGuard() = default;
FaultGuard::~FaultGuard() = default;

#else

namespace {

constexpr size_t SIGNAL_STACK_BYTES = 64 << 10;
constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE};

struct sigaction before[NSIG];
thread_local int fault_signal;
thread_local void* fault_address;

// Runs on the emptied stack of the thread that faulted.
[[noreturn]] void report_fault() {
    static constexpr Site nowhere{nullptr, 0, "fault"};
    if (fault_signal == SIGFPE) fail(nowhere, "an integer was divided by zero");
    if (engine->current().fiber.overflowed(fault_address)) fail(nowhere, "the stack of the thread is full");
    if (!fault_address) fail(nowhere, "null was read or written, or memory through a misaligned pointer to a vector");
    fail(nowhere, "no memory at %p", fault_address);
}

void handle(int signal, siginfo_t* info, void* context) {
    if (!engine || !self) {
        sigaction(signal, &before[signal], nullptr);  // the fault happens again, for the handler before
        return;
    }
    fault_signal = signal;
    fault_address = info->si_addr;
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    registers[REG_RIP] = reinterpret_cast<greg_t>(&report_fault);
    registers[REG_RSP] = reinterpret_cast<greg_t>(engine->current().fiber.top());
}

void install() {
    struct sigaction action{};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : SIGNALS) sigaction(signal, &action, &before[signal]);
}

}  // namespace

FaultGuard::FaultGuard() {
    static std::once_flag installed;
    std::call_once(installed, install);
    stack_t current;
    if (sigaltstack(nullptr, &current) || !(current.ss_flags & SS_DISABLE)) return;
    stack_ = std::make_unique<char[]>(SIGNAL_STACK_BYTES);
    stack_t own{stack_.get(), 0, SIGNAL_STACK_BYTES};
    sigaltstack(&own, nullptr);
}

FaultGuard::~FaultGuard() {
    if (!stack_) return;
    stack_t none{nullptr, SS_DISABLE, 0};
    sigaltstack(&none, nullptr);
}

#endif

}  // namespace emu
