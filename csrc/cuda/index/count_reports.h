// Counts of a group that the device writes into host memory at the end of a step, for statistics
// that do not wait.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/memory/reservation.h"
#include "cuda/runtime/launch.h"

namespace dynemb::cuda {

class CountReports {
 public:
  // For tensors of at most so many elements.
  CountReports(const char* op, int32_t device, int64_t table_words, int64_t clock_words);

  // Invalidates the reports so far; the stream has been waited for.
  void forget();
  // Copies the tensors on the call's stream.
  void write(const Call& call, const Tensor& tables, const Tensor& row_clock) const;
  // The last report that the device has finished; false: none since forget().
  bool read(std::vector<int64_t>* tables, std::vector<int64_t>* row_clock) const;

 private:
  int64_t table_words_;
  int64_t clock_words_;
  int64_t forgotten_ = 0;  // reports before the last forget()
  PinnedWords words_;
};

}  // namespace dynemb::cuda
