// A lock that lets one thread at a time change a table. A second one is refused before it has
// changed anything.
#pragma once

#include <atomic>

#include "cpu/index/moving_entries.h"

namespace dynemb::cpu {

struct WriterSlot;

// Held by an op while it changes the memory at `memory`: the counters of an index or of pending
// gradients, or the rows of the first slab, each of which is one tensor of a group. Costs one
// atomic exchange. Between lock_memory and unlock_memory a thread holds it through several ops.
class OneWriter {
 public:
  // Behaviour of other threads that want the lock meanwhile. They wait for a save, so that a save
  // never makes a training step fail.
  enum class Others { kRaise, kWait };

  // Raises if another thread holds the lock with kRaise, or through several ops.
  OneWriter(const char* op, const void* memory, Others others = Others::kRaise);
  ~OneWriter();
  OneWriter(const OneWriter&) = delete;
  OneWriter& operator=(const OneWriter&) = delete;

 private:
  WriterSlot* slot_;
};

// Whether an op holds the lock with kRaise, or another thread holds it through several ops.
bool has_writer(const void* memory);

// Raises if has_writer.
void check_no_writer(const char* op, const void* memory);

// The part of `Moves` that changes of several ops count in: those between lock_memory and
// unlock_memory that move rows to other ids' places.
Moves& moves_between_ops(const void* memory);

// Raises during such a change of another thread.
void check_unmoved(const char* op, const void* memory);

// Runs read(), a whole call that reads tables, until no such change has begun meanwhile.
template <class Read>
void read_between_moves(const char* op, const void* memory, const Read& read) {
  const Moves& moves = moves_between_ops(memory);
  for (;;) {
    const uint64_t before = moves.word();
    check_unmoved(op, memory);
    read();
    if (moves.unchanged(before)) return;
  }
}

}  // namespace dynemb::cpu
