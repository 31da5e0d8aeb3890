// Collectives of a warp, shared memory and asynchronous copies: the rest of the engine.
#include "engine.h"
#include <cstdlib>

namespace emu {
namespace {

// Static shared memory that every device gives a block.
constexpr size_t SHARED_LIMIT_BYTES = 48 << 10;
constexpr size_t SHARED_ALIGNMENT = 128;

}  // namespace

// The collective of this mask that others wait in, or a new one.
Collective* Engine::join(const Site& site, unsigned mask) {
    unsigned bit = 1u << self->lane;
    if (!(mask & bit)) emu::fail(site, "lane %u calls it, and is not in mask %08x", self->lane, mask);
    Warp& warp = warps_[self->warp];
    if (unsigned missing = mask & warp.exited) emu::fail(site, "lanes %08x of mask %08x have exited", missing, mask);
    for (Collective* pending : warp.pending) {
        if (pending->arrived & bit || pending->mask != mask) continue;
        if (pending->site != &site)
            emu::fail(site, "lane %u comes here, lanes %08x of the same mask %08x wait in %s at line %d", self->lane,
                                pending->arrived, mask, pending->site->what, pending->site->line);
        return pending;
    }
    return open(site, mask);
}

Collective* Engine::open(const Site& site, unsigned mask) {
    if (free_collectives_.empty()) {
        collectives_.push_back(std::make_unique<Collective>());
        free_collectives_.push_back(collectives_.back().get());
    }
    Collective* collective = free_collectives_.back();
    free_collectives_.pop_back();
    collective->mask = mask;
    collective->arrived = collective->left = 0;
    collective->site = &site;
    warps_[self->warp].pending.push_back(collective);
    return collective;
}

Collective* Engine::arrive(const Site& site, unsigned mask, const void* payload, size_t bytes) {
    Unseen unseen;
    Collective* collective = join(site, mask);
    unsigned bit = 1u << self->lane, first = self->warp * LANES;
    std::memcpy(collective->payload[self->lane], payload, bytes);
    collective->arrived |= bit;
    if (collective->arrived != mask) {
        wait(site);
    } else {
        for (unsigned others = mask & ~bit; others; others &= others - 1) ready_.push(first + __builtin_ctz(others));
    }
    return collective;
}

void Engine::leave(Collective* collective) {
    Unseen unseen;
    collective->left |= 1u << self->lane;
    if (collective->left != collective->mask) return;
    std::erase(warps_[self->warp].pending, collective);
    free_collectives_.push_back(collective);
}

void Engine::order_warp(const Site& site, unsigned mask) {
    void* order = &orders_->warp[self->warp];
    char nothing = 0;
    publish(order);
    leave(arrive(site, mask, &nothing, sizeof nothing));
    observe(order);
}

void* Engine::shared(const Site& site, const void* key, size_t bytes) {
    Unseen unseen;
    for (const Shared& variable : shared_)
        if (variable.key == key) return variable.memory;
    shared_bytes_ += bytes;
    if (shared_bytes_ > SHARED_LIMIT_BYTES)
        emu::fail(site, "%zu bytes of shared memory; allowed: %zu", shared_bytes_, SHARED_LIMIT_BYTES);
    void* memory = nullptr;
    if (posix_memalign(&memory, SHARED_ALIGNMENT, bytes)) emu::fail(site, "no memory on the host");
    std::memset(memory, 0xff, bytes);
    shared_.push_back({key, memory, bytes});
    return memory;
}

void Engine::release_shared() {
    Unseen unseen;
    for (const Shared& variable : shared_) {
        unpoison_memory(variable.memory, variable.bytes);
        std::free(variable.memory);
    }
    shared_.clear();
    shared_bytes_ = 0;
}

void fail(const Site& site, const char* format, ...) {
    Unseen unseen;
    va_list values;
    va_start(values, format);
    engine->fail(&site, format, values);
}

void synchronize_block(const Site& site) { engine->barrier(site); }
void synchronize_warp(const Site& site, unsigned mask) { engine->order_warp(site, mask); }
Collective* arrive(const Site& site, unsigned mask, const void* payload, size_t bytes) {
    return engine->arrive(site, mask, payload, bytes);
}
void leave(Collective* collective) { engine->leave(collective); }

void* shared_memory(const void* key, size_t bytes) {
    static constexpr Site site{nullptr, 0, "KV_SHARED"};
    return engine->shared(site, key, bytes);
}

#ifdef KVRS_EMU_TSAN
void count_loaded(size_t bytes) { self->loaded_bytes += bytes; }
#endif

void issue_copy(const Site&, const AsyncCopy& copy) {
    Unseen unseen;
    Worker& worker = engine->current();
    worker.copies.push_back(copy);
    worker.uncommitted++;
}

void commit_copies(const Site&) {
    Unseen unseen;
    Worker& worker = engine->current();
    worker.groups.push_back(std::exchange(worker.uncommitted, 0));
}

bool next_copy(unsigned keep, AsyncCopy& copy) {
    Unseen unseen;
    Worker& worker = engine->current();
    while (worker.groups.size() > keep) {
        if (worker.groups.front()) {
            worker.groups.front()--;
            copy = worker.copies.front();
            worker.copies.erase(worker.copies.begin());
            return true;
        }
        worker.groups.erase(worker.groups.begin());
    }
    return false;
}

}  // namespace emu
