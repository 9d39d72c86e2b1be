// Work shared among torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace dynemb::cpu {

// Runs f(begin, end) over [0, units) on torch's threads, or inline if `work` (in ids) is small.
constexpr int64_t kParallelWork = 2048;
template <class F>
void parallel_units(int64_t units, int64_t work, const F& f) {
  if (units <= 1 || work < kParallelWork) {
    if (units > 0) f(int64_t{0}, units);
    return;
  }
  torch::stable::parallel_for(0, units, 1, f);
}

}  // namespace dynemb::cpu
