// unique_ids, unique_ids_padded: the distinct ids of groups, such as tables, in order of first
// occurrence.
#include "cpu/routing/unique.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "core/index/hash.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kAhead = 16;  // ids whose slot is fetched before it is needed

// Distinct ids of one group, how often each is there, and where each id stands among them. Linear
// probing, at most half full. `number` is scratch.
int64_t unique_of(const int64_t* ids, int64_t count, int64_t* unique, int64_t* counts,
                  int64_t* inverse, Scratch<int32_t>& number) {
  int shift = 63;
  while (shift > 0 && (int64_t{1} << (64 - shift)) < 2 * count) --shift;
  const int64_t slots = int64_t{1} << (64 - shift);
  number.assign(static_cast<size_t>(slots), -1);
  const auto slot_of = [shift](int64_t id) {
    return static_cast<int64_t>(fmix64(static_cast<uint64_t>(id)) >> shift);
  };
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(number.data() + slot_of(ids[i + kAhead]), 1);
    int64_t slot = slot_of(ids[i]);
    while (number[slot] >= 0 && unique[number[slot]] != ids[i]) slot = (slot + 1) & (slots - 1);
    if (number[slot] < 0) {
      number[slot] = static_cast<int32_t>(found);
      counts[found] = 0;
      unique[found++] = ids[i];
    }
    inverse[i] = number[slot];
    ++counts[number[slot]];
  }
  return found;
}

// Distinct ids, group after group; where groups begin in them [groups + 1]; for each id, its
// position in them [N]; how often each is there. `padded`: as long as the input, 0 at the end.
std::tuple<Tensor, Tensor, Tensor, Tensor> unique(const char* op, const Tensor& ids,
                                                  const Tensor& offsets, bool padded) {
  const GroupedIds given = grouped_ids(op, ids, offsets);
  const int64_t* begin = given.offsets;
  Tensor inverse = empty_cpu({given.count}, ScalarType::Long);
  auto* position = static_cast<int64_t*>(inverse.data_ptr());
  const GroupedUnique distinct = unique_of_groups(given, position);
  Tensor unique_offsets = empty_cpu({given.groups + 1}, ScalarType::Long);
  auto* unique_begin = static_cast<int64_t*>(unique_offsets.data_ptr());
  unique_begin[0] = 0;
  for (int64_t g = 0; g < given.groups; ++g) {
    unique_begin[g + 1] = unique_begin[g] + distinct.sizes[g];
  }
  const int64_t found = unique_begin[given.groups];
  const int64_t length = padded ? given.count : found;
  Tensor unique_ids = empty_cpu({length}, ScalarType::Long);
  Tensor counts = empty_cpu({length}, ScalarType::Long);
  auto* to = static_cast<int64_t*>(unique_ids.data_ptr());
  auto* times = static_cast<int64_t*>(counts.data_ptr());
  parallel_units(given.groups, given.count, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      std::copy_n(distinct.ids.data() + begin[g], distinct.sizes[g], to + unique_begin[g]);
      std::copy_n(distinct.counts.data() + begin[g], distinct.sizes[g], times + unique_begin[g]);
      for (int64_t i = begin[g]; i < begin[g + 1]; ++i) position[i] += unique_begin[g];
    }
  });
  std::fill(to + found, to + length, 0);
  std::fill(times + found, times + length, 0);
  return {unique_ids, unique_offsets, inverse, counts};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unique_ids(Tensor ids, Tensor offsets) {
  return unique("unique_ids", ids, offsets, false);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unique_ids_padded(Tensor ids, Tensor offsets) {
  return unique("unique_ids_padded", ids, offsets, true);
}

}  // namespace

GroupedIds grouped_ids(const char* op, const Tensor& ids, const Tensor& offsets) {
  const GroupedIds given = grouped_tensors(op, ids, offsets);
  check_offsets(op, given.offsets, given.groups, given.count, "ids");
  for (int64_t g = 0; g < given.groups; ++g) {
    const int64_t size = given.offsets[g + 1] - given.offsets[g];
    STD_TORCH_CHECK(size <= INT32_MAX, "dynemb::", op, ": group ", g, " has ", size,
                    " ids, expected at most ", INT32_MAX, ": split the batch");
  }
  return given;
}

GroupedUnique unique_of_groups(const GroupedIds& given, int64_t* inverse) {
  const auto count = static_cast<size_t>(given.count);
  GroupedUnique result{Scratch<int64_t>(count), Scratch<int64_t>(count),
                       std::vector<int64_t>(static_cast<size_t>(given.groups))};
  parallel_units(given.groups, given.count, [&](int64_t first, int64_t last) {
    Scratch<int32_t> number;
    for (int64_t g = first; g < last; ++g) {
      const int64_t at = given.offsets[g];
      result.sizes[g] = unique_of(given.ids + at, given.offsets[g + 1] - at, result.ids.data() + at,
                                  result.counts.data() + at, inverse + at, number);
    }
  });
  return result;
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("unique_ids", TORCH_BOX(&dynemb::cpu::unique_ids));
  m.impl("unique_ids_padded", TORCH_BOX(&dynemb::cpu::unique_ids_padded));
}
