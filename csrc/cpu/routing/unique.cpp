// unique_ids: the distinct ids of groups, such as tables, in order of first occurrence.
#include "cpu/routing/unique.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

namespace dynemb::cpu {
namespace {

constexpr int64_t kAhead = 16;  // distance of prefetching slots

// Distinct ids, group after group; where groups begin in them [groups + 1]; for each id, its
// position in them [N]; and how often each occurs. `padded`: as long as the input, 0 at the end.
//
// The place of a group's distinct ids is unknown before those of earlier groups are counted.
// Keeping them until then would take as much memory as the results. Instead they are written later,
// from the number of each id.
std::tuple<Tensor, Tensor, Tensor, Tensor> unique_ids(Tensor ids, Tensor offsets, bool padded) {
  const GroupedIds given = grouped_ids("unique_ids", ids, offsets);
  const int64_t* begin = given.offsets;
  Tensor inverse = empty_cpu({given.count}, ScalarType::Long);
  auto* position = static_cast<int64_t*>(inverse.data_ptr());
  Tensor unique_offsets = empty_cpu({given.groups + 1}, ScalarType::Long);
  auto* unique_begin = static_cast<int64_t*>(unique_offsets.data_ptr());
  unique_begin[0] = 0;
  parallel_units(given.groups, given.count, [&](int64_t first, int64_t last) {
    DistinctNumbers distinct;
    for (int64_t g = first; g < last; ++g) {
      unique_begin[g + 1] =
          distinct.number(given.ids + begin[g], begin[g + 1] - begin[g], position + begin[g]);
    }
  });
  for (int64_t g = 0; g < given.groups; ++g) unique_begin[g + 1] += unique_begin[g];
  const int64_t found = unique_begin[given.groups];
  const int64_t length = padded ? given.count : found;
  Tensor distinct_ids = empty_cpu({length}, ScalarType::Long);
  Tensor counts = empty_cpu({length}, ScalarType::Long);
  auto* to = static_cast<int64_t*>(distinct_ids.data_ptr());
  auto* times = static_cast<int64_t*>(counts.data_ptr());
  parallel_units(given.groups, given.count, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      std::fill(times + unique_begin[g], times + unique_begin[g + 1], 0);
      for (int64_t i = begin[g]; i < begin[g + 1]; ++i) {
        const int64_t at = position[i] + unique_begin[g];
        to[at] = given.ids[i];
        ++times[at];
        position[i] = at;
      }
    }
  });
  std::fill(to + found, to + length, 0);
  std::fill(times + found, times + length, 0);
  return {distinct_ids, unique_offsets, inverse, counts};
}

}  // namespace

GroupedIds grouped_ids(const char* op, const Tensor& ids, const Tensor& offsets) {
  const GroupedIds given = grouped_tensors(op, ids, offsets);
  check_offsets(op, given.offsets, given.groups, given.count, "ids");
  for (int64_t g = 0; g < given.groups; ++g) {
    const int64_t size = given.offsets[g + 1] - given.offsets[g];
    DYNEMB_CHECK(size <= INT32_MAX, "dynemb::", op, ": group ", g, " has ", size,
                 " ids, expected at most ", INT32_MAX, ": split the batch");
  }
  return given;
}

int64_t DistinctNumbers::number(const int64_t* ids, int64_t count, int64_t* number_of_id) {
  int shift = 63;
  while (shift > 0 && (int64_t{1} << (64 - shift)) < 2 * count) --shift;
  const int64_t mask = (int64_t{1} << (64 - shift)) - 1;
  slots_.assign(static_cast<size_t>(mask + 1), -1);
  if (distinct_.size() < static_cast<size_t>(count)) distinct_.resize(static_cast<size_t>(count));
  const auto slot_of = [shift](int64_t id) {
    return static_cast<int64_t>(fmix64(static_cast<uint64_t>(id)) >> shift);
  };
  int32_t* const slots = slots_.data();
  int64_t* const distinct = distinct_.data();
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(slots + slot_of(ids[i + kAhead]), 1);
    const int64_t id = ids[i];
    int64_t slot = slot_of(id);
    int32_t number = slots[slot];
    while (number >= 0 && distinct[number] != id) {
      slot = (slot + 1) & mask;
      number = slots[slot];
    }
    if (number < 0) {
      number = found++;
      slots[slot] = number;
      distinct[number] = id;
    }
    number_of_id[i] = number;
  }
  return found;
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("unique_ids", TORCH_BOX(&dynemb::cpu::unique_ids));
}
