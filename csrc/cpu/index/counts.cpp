// reported_counts: counts of the tables, as far as known without waiting.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "arguments/clocks.h"
#include "cpu/runtime/results.h"

namespace dynemb::cpu {
namespace {

Tensor copy_words(const Tensor& words) {
  std::vector<int64_t> size;
  for (int64_t d = 0; d < words.dim(); ++d) size.push_back(words.size(d));
  Tensor copy = empty_cpu(size, ScalarType::Long);
  const auto* from = static_cast<const int64_t*>(words.data_ptr());
  std::copy(from, from + words.numel(), static_cast<int64_t*>(copy.data_ptr()));
  return copy;
}

// On the CPU all counts are known.
std::tuple<Tensor, Tensor> reported_counts(Tensor buckets, Tensor tables, Tensor row_clock) {
  const char* op = "reported_counts";
  check_counts(op, buckets, tables, row_clock);
  return {copy_words(tables), copy_words(row_clock)};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("reported_counts", TORCH_BOX(&dynemb::cpu::reported_counts));
}
