// One thread at a time may change a table. A second one is refused before it has changed anything.
#pragma once

#include <atomic>

namespace dynemb::cpu {

// Held by an op while it changes what lies at `memory`: the counters of an index, of rows or of
// pending gradients, each of which is one tensor of a group. Costs one atomic exchange.
class OneWriter {
 public:
  // Raises where another thread holds it.
  OneWriter(const char* op, const void* memory);
  ~OneWriter();
  OneWriter(const OneWriter&) = delete;
  OneWriter& operator=(const OneWriter&) = delete;

 private:
  std::atomic<const void*>* slot_;
};

}  // namespace dynemb::cpu
