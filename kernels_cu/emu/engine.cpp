#include "engine.h"
#include <cstdio>
#include <cstdlib>

namespace emu {

constinit thread_local Thread* self = nullptr;
constinit thread_local Engine* engine = nullptr;
char launch_order;

void ReadyQueue::clear(uint64_t seed) {
    head_ = tail_ = 0;
    random_ = seed;
}

unsigned ReadyQueue::pop() {
    if (random_) {
        random_ ^= random_ << 13;
        random_ ^= random_ >> 7;
        random_ ^= random_ << 17;
        unsigned chosen = head_ + unsigned(random_ >> 32) % (tail_ - head_);
        std::swap(threads_[head_ % CAPACITY], threads_[chosen % CAPACITY]);
    }
    return threads_[head_++ % CAPACITY];
}

Engine::~Engine() { release_shared(); }

bool Engine::run(const Launch& launch, const uint3& index, uint64_t seed) {
    Engine* outer = engine;
    engine = this;
    start(launch, index, seed);
    publish(&orders_->start);
    Worker& first = *workers_[ready_.pop()];
    self = &first;
    Fiber::change(home_, first.fiber);
    self = nullptr;
    engine = outer;
    bool succeeded = error_.empty();
    if (!succeeded) give_up();
    release_shared();
    return succeeded;
}

void Engine::start(const Launch& launch, const uint3& index, uint64_t seed) {
    Unseen unseen;
    launch_ = &launch;
    block_ = index;
    error_.clear();
    threads_ = live_ = launch.block.x;
    barrier_site_ = nullptr;
    barrier_waiting_ = 0;
    home_.adopt();
    orders_ = std::make_unique<Orders>();
    warps_.assign((threads_ + LANES - 1) / LANES, Warp{});
    if (threads_ % LANES) warps_.back().exited = ~0u << threads_ % LANES;
    ready_.clear(seed);
#ifdef KVRS_EMU_TSAN
    workers_.swap(resting_);
#endif
    while (workers_.size() < threads_) workers_.push_back(std::make_unique<Worker>());
    for (unsigned i = 0; i < threads_; i++) {
        Worker& worker = *workers_[i];
        worker.index = {i, 0, 0};
        worker.lane = i % LANES;
        worker.warp = i / LANES;
        worker.launch = &launch;
        worker.block_index = &block_;
        worker.done = false;
        worker.waits_at = nullptr;
        worker.fiber.prepare(&Engine::entry, i);  // colours the stack by the thread's number
        ready_.push(i);
    }
}

// After a failure: what the threads were doing is forgotten.
void Engine::give_up() {
    for (unsigned i = 0; i < threads_; i++) {
        Worker& worker = *workers_[i];
        worker.fiber.drop();
        worker.unseen = 0;
        worker.copies.clear();
        worker.groups.clear();
        worker.uncommitted = 0;
    }
    free_collectives_.clear();
    for (auto& collective : collectives_) free_collectives_.push_back(collective.get());
}

void Engine::entry() {
    Fiber::entered();
    observe(&engine->orders_->start);
    engine->launch_->kernel->call(engine->launch_->args);
    engine->end_thread();
}

void Engine::end_thread() {
    publish(&launch_order);
    Unseen unseen;
    Worker& worker = current();
    require_no_wait_for(worker);
    worker.done = true;
    live_--;
    warps_[worker.warp].exited |= 1u << worker.lane;
    Unseen::end_all();
    if (!live_) Fiber::change(worker.fiber, home_, true);
    go_on(worker, true);
}

// A thread that exits must have its copies landed, and nobody may wait for it.
void Engine::require_no_wait_for(Worker& worker) {
    static constexpr Site nowhere{nullptr, 0, "exit"};
    if (!worker.copies.empty()) emu::fail(nowhere, "%zu cp.async were not waited for", worker.copies.size());
    if (barrier_site_)
        emu::fail(*barrier_site_, "%u threads wait here, and this thread exits without coming", barrier_waiting_);
    for (const Collective* pending : warps_[worker.warp].pending)
        if ((pending->mask & ~pending->arrived) >> worker.lane & 1)
            emu::fail(*pending->site, "lanes %08x of mask %08x wait here, and lane %u exits without coming",
                                pending->arrived, pending->mask, worker.lane);
}

void Engine::wait(const Site& site) {
    Worker& worker = current();
    worker.waits_at = &site;
    go_on(worker, false);
    worker.waits_at = nullptr;
}

// Runs the next thread that can go on, until `from` is the next.
void Engine::go_on(Worker& from, bool last) {
    if (ready_.empty()) report_deadlock();
    Worker& next = *workers_[ready_.pop()];
    if (&next == &from) return;
    self = &next;
    Fiber::change(from.fiber, next.fiber, last);
}

// Groups of neighbours that wait in the same place.
void Engine::describe_waits() {
    waits_.clear();
    for (unsigned i = 0, end; i < threads_; i = end) {
        const Worker& first = *workers_[i];
        for (end = i + 1; end < threads_; end++)
            if (workers_[end]->done != first.done || workers_[end]->waits_at != first.waits_at) break;
        if (waits_.size() > 600) continue;
        waits_ += "; threads " + std::to_string(i) + ".." + std::to_string(end - 1);
        if (first.done) waits_ += " have exited";
        else if (const Site* site = first.waits_at)
            waits_ += std::string(" wait in ") + site->what + " at line " + std::to_string(site->line);
    }
}

void Engine::report_deadlock() {
    static constexpr Site nowhere{nullptr, 0, "deadlock"};
    describe_waits();
    emu::fail(nowhere, "no thread can go on%s", waits_.c_str());
}

void Engine::barrier(const Site& site) {
    Unseen unseen;
    if (live_ != threads_) emu::fail(site, "%u threads have exited before this barrier", threads_ - live_);
    if (barrier_site_ && barrier_site_ != &site)
        emu::fail(site, "other threads wait in another barrier, at line %d", barrier_site_->line);
    void* order = &orders_->barrier[barrier_phase_];
    barrier_site_ = &site;
    publish(order);
    if (++barrier_waiting_ < live_) {
        wait(site);
    } else {
        barrier_site_ = nullptr;
        barrier_waiting_ = 0;
        barrier_phase_ ^= 1;
        for (unsigned i = 0; i < threads_; i++)
            if (workers_[i].get() != self) ready_.push(i);
    }
    observe(order);
}

void Engine::fail(const Site* site, const char* format, va_list values) {
    char text[1024];
    int length = std::snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u), thread %u: ", launch_->kernel->name,
                             block_.x, block_.y, block_.z, self->index.x);
    if (site->file) {
        const char* file = std::strstr(site->file, "kernels_cu/");
        length += std::snprintf(text + length, sizeof text - length, "%s:%d: ", file ? file : site->file, site->line);
    }
    length += std::snprintf(text + length, sizeof text - length, "%s: ", site->what);
    std::vsnprintf(text + length, sizeof text - length, format, values);
    error_ = text;
    Unseen::end_all();
    Fiber::change(current().fiber, home_, true);
    std::abort();  // nobody goes back to a thread that failed
}

uint64_t Engine::take_loaded() {
    uint64_t bytes = 0;
    for (auto* workers : {&workers_, &resting_})
        for (auto& worker : *workers) bytes += std::exchange(worker->loaded_bytes, 0);
    return bytes;
}

}  // namespace emu
