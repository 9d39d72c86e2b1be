// ids_concat: concatenates ids of many features, and the offsets of their bags.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "arguments/routing.h"
#include "cpu/features/lists.h"
#include "cpu/memory/reserve.h"

namespace dynemb::cpu {
namespace {

// Only this op can tell which of two adjacent features is wrong where they meet; the op that takes
// the offsets checks the rest.
void check_meetings(const char* op, const std::vector<FeatureBags>& features, int64_t bags) {
  for (size_t f = 0; f + 1 < features.size(); ++f) {
    const FeatureBags& feature = features[f];
    DYNEMB_CHECK(ends_right(feature, bags), "dynemb::", op, ": ",
                 entry_name("offsets", static_cast<size_t>(feature.entry)), " ends with ",
                 bag_offset(feature, bags, bags), ", expected the number of ids, ", feature.count,
                 ": offsets have one element per bag and that number at the end");
    const FeatureBags& next = features[f + 1];
    DYNEMB_CHECK(begins_right(next, bags), "dynemb::", op, ": ",
                 entry_name("offsets", static_cast<size_t>(next.entry)), " begins with ",
                 bag_offset(next, 0, bags), ", expected 0");
  }
}

std::tuple<Tensor, Tensor> ids_concat(std::vector<Tensor> ids, std::vector<Tensor> offsets,
                                      std::vector<int64_t> ragged, int64_t bags) {
  const char* op = "ids_concat";
  const std::vector<FeatureBags> features = feature_bags(op, ids, offsets, ragged, bags);
  check_meetings(op, features, bags);
  const std::vector<int64_t> begin = element_begins(ids);
  Tensor all_ids = empty_cpu({begin.back()}, ScalarType::Long);
  auto* id = static_cast<int64_t*>(all_ids.data_ptr());
  for_each_range(begin, 1, [&](size_t f, int64_t first, int64_t last) {
    const FeatureBags& feature = features[f];
    if (feature.ids_wide != 0) {
      const auto* from = static_cast<const int64_t*>(feature.ids);
      std::copy(from + first, from + last, id + begin[f] + first);
    } else {
      const auto* from = static_cast<const int32_t*>(feature.ids);
      std::copy(from + first, from + last, id + begin[f] + first);
    }
  });
  const std::vector<int64_t> first_bag = item_begins(features.size(), [&](size_t) { return bags; });
  check_result_memory("ids_concat", "bags", bags, 8 * first_bag.back());
  Tensor all_offsets = empty_cpu({first_bag.back() + 1}, ScalarType::Long);
  auto* offset = static_cast<int64_t*>(all_offsets.data_ptr());
  for_each_range(first_bag, 1, [&](size_t f, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      offset[first_bag[f] + b] = bag_begin(features[f], b, bags);
    }
  });
  offset[first_bag.back()] = bag_begin(features.back(), bags, bags);
  return {all_ids, all_offsets};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("ids_concat", TORCH_BOX(&dynemb::cpu::ids_concat));
}
