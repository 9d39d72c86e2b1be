// Host side of the backward's dedupe.
#pragma once

#include <vector>

#include "cuda/gradient_runs.cuh"
#include "cuda/rows_args.h"

namespace dynemb::cuda {

// Checks the output gradient of a lookup.
void check_gradient(const Call& call, const LookupCall& lookup, const Tensor& gradient);

// Sorts the occurrences of a lookup and finds runs and pieces. Holds the memory they lie in.
class GradientSort {
 public:
  // Uploads the words of `lookup`.
  GradientSort(const Call& call, const GroupRows& rows, LookupCall* lookup, const Tensor& gradient);

  const GradientArgs& args() const { return args_; }
  const GradientRuns& runs() const { return runs_; }
  // 16-byte accesses to a slab's gradients are possible.
  bool aligned(size_t slab) const { return aligned_[slab]; }

 private:
  template <class Key>
  void sort(const Call& call, const GroupRows& rows, const LookupCall& lookup, int64_t total_rows,
            int bits);

  Scratch scratch_;
  Scratch::Part<int64_t> base_part_;
  Scratch::Part<int64_t> slab_first_part_;
  Scratch::Part<int32_t> begin_part_;
  Scratch::Part<int32_t> piece_part_;
  Scratch::Part<int32_t> piece_run_part_;
  Scratch::Part<int32_t> piece_from_part_;
  Scratch::Part<int64_t> head_part_;
  Scratch::Part<uint32_t> bag_part_;
  Scratch::Part<uint32_t> position_part_;
  GradientArgs args_;
  GradientRuns runs_;
  std::vector<bool> aligned_;
};

}  // namespace dynemb::cuda
