#include "cpu/index/one_writer.h"

// lock_memory, unlock_memory: the lock through several ops. being_changed: whether it is held.
#include <pthread.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"

namespace dynemb::cpu {

// Each address hashes to one slot, so that two threads conflict there. Ops with addresses that
// share a slot wait for each other, which is rare and short: an op holds one at a time.
struct WriterSlot {
  std::atomic<const void*> busy{nullptr};  // the address that an op holds
  std::atomic<int> locked{0};              // addresses that threads hold through several ops
  Moves moves;                             // of such threads
};

namespace {

constexpr uintptr_t kSlots = 1024;
WriterSlot slots[kSlots];

WriterSlot* slot_of(const void* memory) {
  return &slots[(reinterpret_cast<uintptr_t>(memory) >> 6) % kSlots];
}

// An address that a thread holds through several ops.
struct Lock {
  std::thread::id owner;
  int depth;   // calls of lock_memory
  int moving;  // of them, those that move rows
};

std::mutex locks_mutex;
std::map<const void*, Lock>& locks() {
  static auto* map = new std::map<const void*, Lock>();  // outlives threads that run at exit
  return *map;
}

// A forked process has none of the threads that held locks.
const int forks_are_watched =
    pthread_atfork([] { locks_mutex.lock(); }, [] { locks_mutex.unlock(); },
                   [] {
                     for (WriterSlot& slot : slots) {
                       slot.busy.store(nullptr, std::memory_order_relaxed);
                       slot.locked.store(0, std::memory_order_relaxed);
                     }
                     locks().clear();
                     locks_mutex.unlock();
                   });

// Content of a slot while others wait for its holder. Tensors begin at even addresses.
const void* awaited(const void* memory) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(memory) | 1);
}

constexpr const char* kAnotherThread =
    ": another thread is changing this table, so this call has changed nothing: one thread at "
    "a time may train a table or change it. Give each trainer a table of its own, or let them "
    "take turns with a lock around forward, backward and step";

// Whether another thread holds an address through several ops; `moving`: and moves rows.
bool is_locked_elsewhere(const void* memory, bool moving = false) {
  if (slot_of(memory)->locked.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard<std::mutex> guard(locks_mutex);
  const auto found = locks().find(memory);
  return found != locks().end() && found->second.owner != std::this_thread::get_id() &&
         (!moving || found->second.moving > 0);
}

const void* address(int64_t word) {
  return reinterpret_cast<const void*>(static_cast<uintptr_t>(word));
}

void unlock_memory(std::vector<int64_t> memory, bool moves_rows) {
  for (const int64_t word : memory) {
    WriterSlot* slot = slot_of(address(word));
    const std::lock_guard<std::mutex> guard(locks_mutex);
    const auto found = locks().find(address(word));
    // a process that was forked in between has no lock
    if (found == locks().end() || found->second.owner != std::this_thread::get_id()) continue;
    if (moves_rows) {
      --found->second.moving;
      slot->moves.end();
    }
    if (--found->second.depth > 0) continue;
    locks().erase(found);
    slot->locked.fetch_sub(1, std::memory_order_release);
  }
}

// Raises if another thread holds one of the addresses; then it holds none of them.
void lock_memory(std::vector<int64_t> memory, bool moves_rows) {
  std::vector<int64_t> held;
  try {
    for (const int64_t word : memory) {
      if (word == 0) continue;                               // of a tensor without elements
      const OneWriter writer("lock_memory", address(word));  // no op of another thread is in it
      WriterSlot* slot = slot_of(address(word));
      const std::lock_guard<std::mutex> guard(locks_mutex);
      Lock& lock =
          locks().try_emplace(address(word), Lock{std::this_thread::get_id(), 0, 0}).first->second;
      if (lock.depth++ == 0) slot->locked.fetch_add(1, std::memory_order_relaxed);
      if (moves_rows) {
        ++lock.moving;
        slot->moves.begin();
      }
      held.push_back(word);
    }
  } catch (...) {
    unlock_memory(held, moves_rows);
    throw;
  }
}

// Whether a thread holds one of these addresses with Others::kRaise, another one if through
// several ops.
bool being_changed(std::vector<int64_t> memory) {
  return std::any_of(memory.begin(), memory.end(),
                     [](int64_t word) { return has_writer(address(word)); });
}

}  // namespace

// A refused op holds the slot as one that others wait for, so that it never refuses an op of the
// thread that holds the address through several.
OneWriter::OneWriter(const char* op, const void* memory, Others others) : slot_(slot_of(memory)) {
  const void* holder = nullptr;
  while (!slot_->busy.compare_exchange_weak(holder, awaited(memory), std::memory_order_acquire,
                                            std::memory_order_relaxed)) {
    DYNEMB_CHECK(holder != memory, "dynemb::", op, kAnotherThread, kInUseError);
    if (holder != nullptr) std::this_thread::yield();
    holder = nullptr;
  }
  if (is_locked_elsewhere(memory)) {
    slot_->busy.store(nullptr, std::memory_order_release);
    DYNEMB_CHECK(false, "dynemb::", op, kAnotherThread, kInUseError);
  }
  if (others == Others::kRaise) slot_->busy.store(memory, std::memory_order_relaxed);
}

OneWriter::~OneWriter() { slot_->busy.store(nullptr, std::memory_order_release); }

bool has_writer(const void* memory) {
  return memory != nullptr && (slot_of(memory)->busy.load(std::memory_order_acquire) == memory ||
                               is_locked_elsewhere(memory));
}

void check_no_writer(const char* op, const void* memory) {
  DYNEMB_CHECK(!has_writer(memory), "dynemb::", op, kAnotherThread, kInUseError);
}

Moves& moves_between_ops(const void* memory) { return slot_of(memory)->moves; }

void check_unmoved(const char* op, const void* memory) {
  DYNEMB_CHECK(!is_locked_elsewhere(memory, true), "dynemb::", op,
               ": another thread is compacting, loading or replacing this table, so its rows "
               "cannot be read now: call again afterwards, or let both threads take turns with a "
               "lock",
               kInUseError);
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CompositeExplicitAutograd, m) {
  m.impl("being_changed", TORCH_BOX(&dynemb::cpu::being_changed));
  m.impl("lock_memory", TORCH_BOX(&dynemb::cpu::lock_memory));
  m.impl("unlock_memory", TORCH_BOX(&dynemb::cpu::unlock_memory));
}
