#include "cpu/index/one_writer.h"

// being_changed: whether an op is changing a table.
#include <pthread.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"

namespace dynemb::cpu {
namespace {

// Locked addresses. Each address hashes to one slot, so that two threads conflict there. Addresses
// that share a slot wait for each other, which is rare and short: an op holds one at a time.
constexpr uintptr_t kSlots = 1024;
std::atomic<const void*> busy[kSlots];

// A forked process has none of the threads that held locks.
const int forks_are_watched = pthread_atfork(nullptr, nullptr, [] {
  for (auto& slot : busy) slot.store(nullptr, std::memory_order_relaxed);
});

std::atomic<const void*>* slot_of(const void* memory) {
  return &busy[(reinterpret_cast<uintptr_t>(memory) >> 6) % kSlots];
}

// Content of a slot while others wait for its holder. Tensors begin at even addresses.
const void* awaited(const void* memory) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(memory) | 1);
}

constexpr const char* kAnotherThread =
    ": another thread is changing this table, so this call has changed nothing: one thread at "
    "a time may train a table or change it. Give each trainer a table of its own, or let them "
    "take turns with a lock around forward, backward and step";

// Whether an op holds one of these addresses with Others::kRaise.
bool being_changed(std::vector<int64_t> memory) {
  return std::any_of(memory.begin(), memory.end(), [](int64_t address) {
    return has_writer(reinterpret_cast<const void*>(static_cast<uintptr_t>(address)));
  });
}

}  // namespace

OneWriter::OneWriter(const char* op, const void* memory, Others others) : slot_(slot_of(memory)) {
  const void* const held = others == Others::kWait ? awaited(memory) : memory;
  const void* holder = nullptr;
  while (!slot_->compare_exchange_weak(holder, held, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
    DYNEMB_CHECK(holder != memory, "dynemb::", op, kAnotherThread, kInUseError);
    if (holder != nullptr) std::this_thread::yield();
    holder = nullptr;
  }
}

OneWriter::~OneWriter() { slot_->store(nullptr, std::memory_order_release); }

bool has_writer(const void* memory) {
  return memory != nullptr && slot_of(memory)->load(std::memory_order_acquire) == memory;
}

void check_no_writer(const char* op, const void* memory) {
  DYNEMB_CHECK(!has_writer(memory), "dynemb::", op, kAnotherThread, kInUseError);
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CompositeExplicitAutograd, m) {
  m.impl("being_changed", TORCH_BOX(&dynemb::cpu::being_changed));
}
