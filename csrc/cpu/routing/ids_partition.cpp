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

// A counting sort of each group's distinct ids, which keeps their order. Groups have their own
// counters and ranges of the output. As in unique.cpp, the distinct ids of a group are not kept
// until their place is known; only their owners are.
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
  Tensor lengths = zeros_cpu({parts, given.groups}, ScalarType::Long);
  auto* length = static_cast<int64_t*>(lengths.data_ptr());
  // of the distinct ids of group g, from offsets[g] on
  Scratch<int64_t> owner(static_cast<size_t>(given.count));
  std::vector<int64_t> sizes(static_cast<size_t>(given.groups));
  parallel_units(given.groups, given.count, [&](int64_t first, int64_t last) {
    DistinctNumbers distinct;
    for (int64_t g = first; g < last; ++g) {
      const int64_t begin = given.offsets[g];
      sizes[g] = distinct.number(given.ids + begin, given.offsets[g + 1] - begin, position + begin);
      for (int64_t k = 0; k < sizes[g]; ++k) {
        const uint64_t part = owner_of(static_cast<uint64_t>(distinct.ids()[k]), ranges);
        owner[begin + k] = static_cast<int64_t>(part);
        ++length[owner[begin + k] * given.groups + g];
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
    Scratch<int64_t> place;  // of each distinct id of a group
    for (int64_t g = first; g < last; ++g) {
      const int64_t begin = given.offsets[g];
      if (place.size() < static_cast<size_t>(sizes[g])) place.resize(sizes[g]);
      for (int64_t k = 0; k < sizes[g]; ++k) {
        place[k] = next[owner[begin + k] * given.groups + g]++;
        times[place[k]] = 0;
      }
      for (int64_t i = begin; i < given.offsets[g + 1]; ++i) {
        const int64_t at = place[position[i]];
        to[at] = given.ids[i];
        ++times[at];
        position[i] = at;
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
