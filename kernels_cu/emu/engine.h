// Runs one block at a time: its threads as fibers, their barriers and collectives, and what can go wrong with them.
#pragma once
#include "fiber.h"
#include "kernel.h"
#include "memory.h"
#include "thread.h"
#include <cstdarg>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace emu {

// The threads that can go on, first in first out or in random order.
class ReadyQueue {
  public:
    void clear(uint64_t seed);
    void push(unsigned thread) { threads_[tail_++ % CAPACITY] = thread; }
    unsigned pop();
    bool empty() const { return head_ == tail_; }

  private:
    static constexpr unsigned CAPACITY = 1024;  // the most threads of a block
    unsigned threads_[CAPACITY];
    unsigned head_ = 0, tail_ = 0;
    uint64_t random_ = 0;  // 0: no random order
};

// A thread of the block with all that the emulator keeps for it.
struct Worker : Thread {
    Fiber fiber;
    const Site* waits_at = nullptr;
    bool done = false;
    std::vector<AsyncCopy> copies;  // issued and not landed, oldest first
    size_t uncommitted = 0;         // how many of them are in no group yet
    std::vector<size_t> groups;     // copies of each pending group, oldest first
};

class Engine {
  public:
    Engine() = default;
    ~Engine();

    // Runs block number `block` of the launch; false if something was wrong, which error() tells.
    bool run(const Launch& launch, const uint3& index, uint64_t seed);
    const std::string& error() const { return error_; }
    // Bytes read from pages since the last call.
    uint64_t take_loaded();

    [[noreturn]] void fail(const Site* site, const char* format, va_list values);
    void barrier(const Site& site);
    Collective* arrive(const Site& site, unsigned mask, const void* payload, size_t bytes);
    void leave(Collective* collective);
    void order_warp(const Site& site, unsigned mask);
    void* shared(const Site& site, const void* key, size_t bytes);
    Worker& current() { return static_cast<Worker&>(*self); }

  private:
    struct Shared { const void* key; void* memory; size_t bytes; };
    struct Warp { unsigned exited = 0; std::vector<Collective*> pending; };
    // Addresses that stand for the orders which the block's operations make, in TSan's eyes. A block has its own, and
    // other workers than the block before: nothing orders two blocks that follow each other.
    struct Orders { char start, barrier[2], warp[LANES]; };

    static void entry();
    void start(const Launch& launch, const uint3& index, uint64_t seed);
    void give_up();
    void end_thread();
    void require_no_wait_for(Worker& worker);
    void describe_waits();
    [[noreturn]] void report_deadlock();
    void wait(const Site& site);
    void go_on(Worker& from, bool last);
    Collective* join(const Site& site, unsigned mask);
    Collective* open(const Site& site, unsigned mask);
    void release_shared();

    const Launch* launch_ = nullptr;
    uint3 block_{};
    Fiber home_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::vector<std::unique_ptr<Worker>> resting_;  // those of the block before, under TSan
    std::vector<Warp> warps_;
    std::vector<std::unique_ptr<Collective>> collectives_;
    std::vector<Collective*> free_collectives_;
    std::vector<Shared> shared_;
    size_t shared_bytes_ = 0;
    ReadyQueue ready_;
    unsigned threads_ = 0, live_ = 0;
    const Site* barrier_site_ = nullptr;
    unsigned barrier_waiting_ = 0, barrier_phase_ = 0;
    std::unique_ptr<Orders> orders_;
    // Members, not locals: whoever fails never returns, so its locals are never destroyed.
    std::string error_, waits_;
};

// The engine that runs on this OS thread.
extern constinit thread_local Engine* engine;

// Stands for the order between launches: each comes after all that ended before it.
extern char launch_order;

}  // namespace emu
