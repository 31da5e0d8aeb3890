// A stack that code can run on and leave half-way.
#pragma once
#include <cstddef>

namespace emu {

class Fiber {
  public:
    // Without a stack of its own: stands for the one that the OS thread runs on.
    Fiber() = default;
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Says that this fiber is the OS thread which runs now.
    void adopt();

    // Makes the next switch to this fiber call `entry` on an empty stack. `entry` calls entered() first and never
    // returns. `colour` moves the top of the stack a little: tops of many stacks at one offset would share a cache set.
    void prepare(void (*entry)(), unsigned colour);

    // Tells sanitizers that the calls on this stack were given up. Not for the fiber that runs.
    void drop();

    // An aligned address at the top of the stack, as after a call.
    void* top() const;
    // Whether the address is on the page that traps an overflow.
    bool overflowed(const void* address) const;

    // Leaves `from`, which runs, and goes on with `to`. `last`: nobody comes back to `from`.
    static void change(Fiber& from, Fiber& to, bool last = false);

    // The first call of an entry.
    static void entered();

  private:
    void map();
    void unmap();

    void* stack_pointer_ = nullptr;
    char* stack_ = nullptr;         // lowest usable byte; the page below traps an overflow
    const void* bottom_ = nullptr;  // of the stack, an OS thread's too; ASan wants to know
    size_t bytes_ = 0;
    void* shadow_ = nullptr;        // ASan's or TSan's record of this fiber
};

}  // namespace emu
