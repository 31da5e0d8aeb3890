// Launches: the blocks of a grid on OS threads, and the C interface for Rust.
#include "engine.h"
#include "fault.h"
#include <atomic>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <thread>

namespace emu {

const Kernel* find_kernel(const char* name);

namespace {

constexpr unsigned MOST_THREADS = 1024, MOST_BLOCKS_Y = 65535;

// Engines keep their stacks between launches.
class EnginePool {
  public:
    std::unique_ptr<Engine> take() {
        std::lock_guard lock(mutex_);
        if (engines_.empty()) return std::make_unique<Engine>();
        auto engine = std::move(engines_.back());
        engines_.pop_back();
        return engine;
    }
    void give(std::unique_ptr<Engine> engine) {
        std::lock_guard lock(mutex_);
        engines_.push_back(std::move(engine));
    }

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Engine>> engines_;
};

EnginePool& pool() {
    static EnginePool* engines = new EnginePool;  // never destroyed: threads may still run at exit
    return *engines;
}

uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// The blocks of one launch, taken one after the other by the OS threads that run them.
class Grid {
  public:
    explicit Grid(const Launch& launch)
        : launch_(launch), order_(size_t(launch.grid.x) * launch.grid.y * launch.grid.z) {
        std::iota(order_.begin(), order_.end(), 0u);
        if (!launch.seed) return;
        uint64_t state = mix(launch.seed);
        for (size_t i = order_.size(); i > 1; i--) std::swap(order_[i - 1], order_[(state = mix(state + i)) % i]);
    }

    void run(unsigned os_threads) {
        std::vector<std::thread> others;
        for (unsigned i = 1; i < os_threads && i < order_.size(); i++) others.emplace_back([this] { run_blocks(); });
        run_blocks();
        for (auto& other : others) other.join();
    }

    uint64_t loaded() const { return loaded_; }
    const std::string& error() const { return error_; }

  private:
    void run_blocks() {
        FaultGuard guard;
        auto engine = pool().take();
        for (size_t i; !failed_ && (i = next_++) < order_.size();) {
            unsigned block = order_[i];
            const dim3& grid = launch_.grid;
            uint3 index{block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
            uint64_t seed = launch_.seed ? mix(launch_.seed + mix(block + 1)) | 1 : 0;
            if (!engine->run(launch_, index, seed)) note_failure(engine->error());
        }
        loaded_ += engine->take_loaded();
        pool().give(std::move(engine));
    }

    void note_failure(const std::string& error) {
        std::lock_guard lock(mutex_);
        if (!failed_.exchange(true)) error_ = error;
    }

    const Launch& launch_;
    std::vector<unsigned> order_;
    std::atomic<size_t> next_{0};
    std::atomic<uint64_t> loaded_{0};
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
    std::string error_;
};

// What a driver would refuse.
std::string refuse(const char* name, const Kernel* kernel, const dim3& grid, unsigned threads) {
    char text[256] = "";
    if (!kernel)
        std::snprintf(text, sizeof text, "no kernel is called %s", name);
    else if (threads != kernel->threads || !threads || threads > MOST_THREADS)
        std::snprintf(text, sizeof text, "kernel %s: %u threads; allowed: %u", name, threads, kernel->threads);
    else if (!grid.x || !grid.y || !grid.z || grid.x > INT32_MAX || grid.y > MOST_BLOCKS_Y || grid.z > MOST_BLOCKS_Y)
        std::snprintf(text, sizeof text,
                      "kernel %s: a grid of (%u, %u, %u) blocks; allowed: 1..2147483647, 1..65535, 1..65535",
                  name, grid.x, grid.y, grid.z);
    return text;
}

}  // namespace
}  // namespace emu

// Runs `kernel` on `grid` blocks of `threads` threads; its parameter is the structure at `args`. `seed` 0 runs threads
// first in first out, any other in its own random order. Adds the bytes that were read from pages to `loaded`.
// Returns 0, or 1 and writes a message that ends in a NUL to `error`.
extern "C" int kvrs_emu_launch(const char* kernel, const unsigned* grid, unsigned threads, const void* args,
                               uint64_t seed, unsigned os_threads, uint64_t* loaded, char* error, size_t error_bytes) {
    emu::Unseen unseen;
    const emu::Kernel* found = emu::find_kernel(kernel);
    dim3 blocks{grid[0], grid[1], grid[2]};
    std::string message = emu::refuse(kernel, found, blocks, threads);
    if (message.empty()) {
        emu::observe(&emu::launch_order);
        emu::Launch launch{found, args, blocks, {threads, 1, 1}, seed};
        emu::Grid run(launch);
        run.run(os_threads);
        *loaded += run.loaded();
        message = run.error();
        emu::observe(&emu::launch_order);
        emu::publish(&emu::launch_order);
    }
    std::snprintf(error, error_bytes, "%s", message.c_str());
    return message.empty() ? 0 : 1;
}
