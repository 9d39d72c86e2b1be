// One thread at a time may change a table. A second one is refused before it has changed anything.
#pragma once

#include <atomic>

namespace dynemb::cpu {

// Held by an op while it changes what lies at `memory`: the counters of an index or of pending
// gradients, or the rows of the first slab, each of which is one tensor of a group. Costs one
// atomic exchange.
class OneWriter {
 public:
  // What other threads do that want it meanwhile. What a save does is awaited, so that it never
  // makes a training step fail.
  enum class Others { kRaise, kWait };

  // Raises where another thread holds it, unless that one is awaited.
  OneWriter(const char* op, const void* memory, Others others = Others::kRaise);
  ~OneWriter();
  OneWriter(const OneWriter&) = delete;
  OneWriter& operator=(const OneWriter&) = delete;

 private:
  std::atomic<const void*>* slot_;
};

// Whether an op holds it that is not awaited.
bool has_writer(const void* memory);

// Raises if an op holds it that is not awaited.
void check_no_writer(const char* op, const void* memory);

}  // namespace dynemb::cpu
