#include "cpu/index/one_writer.h"

#include <pthread.h>

#include <cstdint>
#include <thread>

#include "core/runtime/check.h"

namespace dynemb::cpu {
namespace {

// What is being changed. Memory has one slot, so that two threads meet there; others that share it
// wait for one another, which is rare and short: no op holds two.
constexpr uintptr_t kSlots = 1024;
std::atomic<const void*> busy[kSlots];

// A forked process has none of the threads that were changing something.
const int forks_are_watched = pthread_atfork(nullptr, nullptr, [] {
  for (auto& slot : busy) slot.store(nullptr, std::memory_order_relaxed);
});

}  // namespace

OneWriter::OneWriter(const char* op, const void* memory)
    : slot_(&busy[(reinterpret_cast<uintptr_t>(memory) >> 6) % kSlots]) {
  const void* holder = nullptr;
  while (!slot_->compare_exchange_weak(holder, memory, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
    DYNEMB_CHECK(
        holder != memory, "dynemb::", op,
        ": another thread is changing this table, so this call has changed nothing: one thread at "
        "a time may train a table or change it. Give each trainer a table of its own, or let them "
        "take turns with a lock around forward, backward and step");
    if (holder != nullptr) std::this_thread::yield();
    holder = nullptr;
  }
}

OneWriter::~OneWriter() { slot_->store(nullptr, std::memory_order_release); }

}  // namespace dynemb::cpu
