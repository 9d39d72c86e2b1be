// unique_ids: the distinct ids of groups, such as tables, in order of first occurrence.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/hash.h"
#include "cpu/index_view.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kAhead = 16;  // ids whose slot is fetched before it is needed

// Distinct ids of one group, and where each id stands among them. Linear probing, at most half
// full.
int64_t unique_of(const int64_t* ids, int64_t count, int64_t* unique, int64_t* inverse) {
  int shift = 63;
  while (shift > 0 && (int64_t{1} << (64 - shift)) < 2 * count) --shift;
  const int64_t slots = int64_t{1} << (64 - shift);
  std::vector<int32_t> number(static_cast<size_t>(slots), -1);
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
      unique[found++] = ids[i];
    }
    inverse[i] = number[slot];
  }
  return found;
}

// Distinct ids [n], group after group; where groups begin in them [groups + 1]; for each id, its
// position in them [N].
std::tuple<Tensor, Tensor, Tensor> unique_ids(Tensor ids, Tensor offsets) {
  const char* op = "unique_ids";
  check_words(op, "ids", ids);
  check_words(op, "offsets", offsets);
  const int64_t groups = offsets.size(0) - 1;
  STD_TORCH_CHECK(groups >= 0, "dynemb::", op, ": offsets is empty, expected [groups + 1]");
  const int64_t count = ids.size(0);
  const auto* begin = static_cast<const int64_t*>(offsets.data_ptr());
  check_offsets(op, begin, groups, count, "ids");
  for (int64_t g = 0; g < groups; ++g) {
    STD_TORCH_CHECK(begin[g + 1] - begin[g] <= INT32_MAX, "dynemb::", op, ": group ", g, " has ",
                    begin[g + 1] - begin[g], " ids, expected at most ", INT32_MAX,
                    ": split the batch");
  }
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  std::vector<int64_t> all(static_cast<size_t>(count));
  std::vector<int64_t> sizes(static_cast<size_t>(groups));
  Tensor inverse = empty_cpu({count}, ScalarType::Long);
  auto* position = static_cast<int64_t*>(inverse.data_ptr());
  parallel_units(groups, count, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      sizes[g] = unique_of(id + begin[g], begin[g + 1] - begin[g], all.data() + begin[g],
                           position + begin[g]);
    }
  });
  Tensor unique_offsets = empty_cpu({groups + 1}, ScalarType::Long);
  auto* unique_begin = static_cast<int64_t*>(unique_offsets.data_ptr());
  unique_begin[0] = 0;
  for (int64_t g = 0; g < groups; ++g) unique_begin[g + 1] = unique_begin[g] + sizes[g];
  Tensor unique = empty_cpu({unique_begin[groups]}, ScalarType::Long);
  auto* to = static_cast<int64_t*>(unique.data_ptr());
  parallel_units(groups, count, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      std::copy_n(all.data() + begin[g], sizes[g], to + unique_begin[g]);
      for (int64_t i = begin[g]; i < begin[g + 1]; ++i) position[i] += unique_begin[g];
    }
  });
  return {unique, unique_offsets, inverse};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("unique_ids", TORCH_BOX(&dynemb::cpu::unique_ids));
}
