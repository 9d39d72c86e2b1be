// A lock that lets one thread at a time change a table. A second one is refused before it has
// changed anything.
#pragma once

#include <atomic>

namespace dynemb::cpu {

// Held by an op while it changes the memory at `memory`: the counters of an index or of pending
// gradients, or the rows of the first slab, each of which is one tensor of a group. Costs one
// atomic exchange.
class OneWriter {
 public:
  // Behaviour of other threads that want the lock meanwhile. They wait for a save, so that a save
  // never makes a training step fail.
  enum class Others { kRaise, kWait };

  // Raises if another thread holds the lock with kRaise.
  OneWriter(const char* op, const void* memory, Others others = Others::kRaise);
  ~OneWriter();
  OneWriter(const OneWriter&) = delete;
  OneWriter& operator=(const OneWriter&) = delete;

 private:
  std::atomic<const void*>* slot_;
};

// Whether an op holds the lock with kRaise.
bool has_writer(const void* memory);

// Raises if an op holds the lock with kRaise.
void check_no_writer(const char* op, const void* memory);

}  // namespace dynemb::cpu
