// Lists with an entry for each feature of a call: checks of offsets, and work shared among threads.
#pragma once

#include <algorithm>
#include <vector>

#include "arguments/features.h"
#include "cpu/index/args.h"

namespace dynemb::cpu {

// Raises unless the offsets of feature `f` ascend from 0 to `count`, the number of its values.
inline void check_list_offsets(const char* op, const char* name, size_t f, const Tensor& offsets,
                               int64_t count) {
  const int64_t rows = offsets.size(0) - 1;
  const std::string entry = entry_name(name, f);
  DYNEMB_CHECK(rows >= 0, "dynemb::", op, ": ", entry, " is empty, expected [n + 1]");
  const auto* offset = static_cast<const int64_t*>(offsets.data_ptr());
  DYNEMB_CHECK(offset[0] == 0, "dynemb::", op, ": ", entry, " begins with ", offset[0],
               ", expected 0");
  bool decreases = false;
  for (int64_t i = 0; i < rows; ++i) decreases |= offset[i + 1] < offset[i];
  if (decreases) {
    int64_t i = 0;
    while (offset[i + 1] >= offset[i]) ++i;
    DYNEMB_CHECK(false, "dynemb::", op, ": ", entry, "[", i + 1, "] is ", offset[i + 1],
                 ", less than ", entry, "[", i, "] = ", offset[i], ": offsets must not decrease");
  }
  DYNEMB_CHECK(offset[rows] == count, "dynemb::", op, ": ", entry, " ends with ", offset[rows],
               ", expected the number of values, ", count);
}

// Tensors of the same shapes and of the dtype.
inline std::vector<Tensor> empty_like_list(const std::vector<Tensor>& list, ScalarType dtype) {
  std::vector<Tensor> result;
  result.reserve(list.size());
  for (const Tensor& tensor : list) {
    result.push_back(empty_cpu(shape_of(tensor), dtype));
  }
  return result;
}

// Where the items of each feature begin among all items [features + 1].
template <class Count>
std::vector<int64_t> item_begins(size_t features, const Count& count) {
  std::vector<int64_t> begin(features + 1, 0);
  for (size_t f = 0; f < features; ++f) begin[f + 1] = begin[f] + count(f);
  return begin;
}
inline std::vector<int64_t> element_begins(const std::vector<Tensor>& list) {
  return item_begins(list.size(), [&](size_t f) { return list[f].numel(); });
}

// Calls f(feature, first, last) for disjoint ranges that cover all items, on torch's threads.
// `weight` is the work of an item, in ids.
template <class F>
void for_each_range(const std::vector<int64_t>& begin, int64_t weight, const F& f) {
  const int64_t count = begin.back();
  constexpr int64_t kChunk = 4096;
  const int64_t chunk = std::max<int64_t>(kChunk / weight, 1);
  parallel_units((count + chunk - 1) / chunk, count * weight, [&](int64_t from, int64_t to) {
    int64_t item = from * chunk;
    const int64_t end = std::min(to * chunk, count);
    auto feature = std::upper_bound(begin.begin(), begin.end(), item) - begin.begin() - 1;
    for (; item < end; ++feature) {
      const int64_t last = std::min(begin[feature + 1], end);
      if (last > item)
        f(static_cast<size_t>(feature), item - begin[feature], last - begin[feature]);
      item = last;
    }
  });
}

}  // namespace dynemb::cpu
