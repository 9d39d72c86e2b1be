// ids_partition: the distinct ids of groups, ordered by the part that owns them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "arguments/routing.h"
#include "core/features/routing.h"
#include "cpu/memory/reserve.h"
#include "cpu/routing/unique.h"

namespace dynemb::cpu {
namespace {

// A counting sort of each group's distinct ids, which keeps their order. Groups have counters and
// ranges of the output of their own.
std::tuple<Tensor, Tensor, Tensor, Tensor> ids_partition(Tensor ids, Tensor offsets, int64_t parts,
                                                         int64_t slots) {
  const char* op = "ids_partition";
  check_slots(op, parts, slots);
  const GroupedIds given = grouped_ids(op, ids, offsets);
  const SlotRanges ranges =
      make_slot_ranges(static_cast<uint64_t>(parts), static_cast<uint64_t>(slots));
  check_result_memory(op, "parts", parts,
                      result_bytes(op, "parts", parts, {parts, given.groups}, 8));
  Tensor inverse = empty_cpu({given.count}, ScalarType::Long);
  auto* position = static_cast<int64_t*>(inverse.data_ptr());
  const GroupedUnique distinct = unique_of_groups(given, position);

  Tensor lengths = zeros_cpu({parts, given.groups}, ScalarType::Long);
  auto* length = static_cast<int64_t*>(lengths.data_ptr());
  std::vector<int64_t> place(static_cast<size_t>(given.count));  // first the owner
  parallel_units(given.groups, given.count, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      for (int64_t i = given.offsets[g]; i < given.offsets[g] + distinct.sizes[g]; ++i) {
        const uint64_t owner = owner_of(static_cast<uint64_t>(distinct.ids[i]), ranges);
        place[i] = static_cast<int64_t>(owner);
        ++length[place[i] * given.groups + g];
      }
    }
  });
  std::vector<int64_t> next(static_cast<size_t>(parts * given.groups));
  int64_t found = 0;
  for (size_t k = 0; k < next.size(); ++k) {
    next[k] = found;
    found += length[k];
  }
  Tensor owned = empty_cpu({found}, ScalarType::Long);
  Tensor counts = empty_cpu({found}, ScalarType::Long);
  auto* to = static_cast<int64_t*>(owned.data_ptr());
  auto* times = static_cast<int64_t*>(counts.data_ptr());
  parallel_units(given.groups, given.count, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const int64_t begin = given.offsets[g];
      for (int64_t i = begin; i < begin + distinct.sizes[g]; ++i) {
        place[i] = next[place[i] * given.groups + g]++;
        to[place[i]] = distinct.ids[i];
        times[place[i]] = distinct.counts[i];
      }
      for (int64_t i = begin; i < given.offsets[g + 1]; ++i) {
        position[i] = place[begin + position[i]];
      }
    }
  });
  return {owned, lengths, inverse, counts};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("ids_partition", TORCH_BOX(&dynemb::cpu::ids_partition));
}
