// ragged_cutoff_2d, ragged_cutoff_3d, ragged_topk_index_cutoff: some values of every row.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/features/ragged.h"
#include "cpu/memory/reserve.h"
#include "cpu/ragged/lists.h"

namespace dynemb::cpu {
namespace {

using Lists = std::vector<Tensor>;

// Calls f(feature) for all features, on torch's threads.
template <class F>
void for_each_feature(const std::vector<Ragged>& lists, const F& f) {
  parallel_units(static_cast<int64_t>(lists.size()), row_begins(lists).back(),
                 [&](int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) f(static_cast<size_t>(i));
                 });
}

std::vector<int64_t> last_offsets(const Lists& offsets) {
  std::vector<int64_t> sizes;
  for (const Tensor& tensor : offsets) sizes.push_back(words_of(tensor)[tensor.size(0) - 1]);
  return sizes;
}

std::tuple<Lists, Lists, Lists> ragged_cutoff_2d(Lists values, Lists offsets, Lists weights,
                                                 std::vector<int64_t> weighted,
                                                 std::vector<int64_t> keep_lengths,
                                                 std::vector<int64_t> drop_left) {
  const char* op = "ragged_cutoff_2d";
  const auto lists =
      ragged_of(op, "values", values, "offsets", offsets, "weights", weights, weighted);
  check_numbers(op, "keep_lengths", keep_lengths, lists.size(), 0);
  check_entries(op, "drop_left", drop_left.size(), lists.size());
  Lists cut_offsets;
  for (const Ragged& list : lists) {
    cut_offsets.push_back(empty_cpu({list.rows + 1}, ScalarType::Long));
  }
  for_each_feature(lists, [&](size_t f) {
    const Ragged& list = lists[f];
    int64_t* cut = words_of(cut_offsets[f]);
    cut[0] = 0;
    for (int64_t r = 0; r < list.rows; ++r) {
      cut[r + 1] = cut[r] + std::min(list.offset[r + 1] - list.offset[r], keep_lengths[f]);
    }
  });
  TakenLists taken = taken_lists(values, lists, last_offsets(cut_offsets));
  for_each_range(row_begins(lists), row_work(lists), [&](size_t f, int64_t first, int64_t last) {
    const Ragged& list = lists[f];
    const int64_t* cut = words_of(cut_offsets[f]);
    RangeCopy copy(list, taken.to[f]);
    for (int64_t r = first; r < last; ++r) {
      const Kept kept =
          kept_of(list.offset[r], list.offset[r + 1], keep_lengths[f], drop_left[f] != 0);
      copy.add(kept.begin, cut[r], kept.count);
    }
  });
  return {taken.values, cut_offsets, taken.weights};
}

std::tuple<Lists, Lists, Lists, Lists> ragged_cutoff_3d(Lists values, Lists outer_offsets,
                                                        Lists inner_offsets, Lists weights,
                                                        std::vector<int64_t> weighted,
                                                        std::vector<int64_t> keep_lengths,
                                                        std::vector<int64_t> drop_left,
                                                        std::vector<int64_t> pad_left) {
  const char* op = "ragged_cutoff_3d";
  const auto lists =
      ragged_of(op, "values", values, "inner_offsets", inner_offsets, "weights", weights, weighted);
  check_offset_lists(op, "outer_offsets", outer_offsets, lists.size());
  check_numbers(op, "keep_lengths", keep_lengths, lists.size(), 0);
  check_entries(op, "drop_left", drop_left.size(), lists.size());
  check_entries(op, "pad_left", pad_left.size(), lists.size());
  Lists cut_outer, cut_inner;
  for (size_t f = 0; f < lists.size(); ++f) {
    check_list_offsets(op, "outer_offsets", f, outer_offsets[f], lists[f].rows);
    const int64_t rows = outer_offsets[f].size(0) - 1;
    cut_outer.push_back(empty_cpu({rows + 1}, ScalarType::Long));
    const std::string name = entry_name("keep_lengths", f);
    const int64_t bytes = result_bytes(op, name.c_str(), keep_lengths[f],
                                       {std::max<int64_t>(rows, 1), keep_lengths[f]}, 8);
    check_padding(op, name, keep_lengths[f], lists[f].rows, bytes);
    check_result_memory(op, name.c_str(), keep_lengths[f], bytes);
    cut_inner.push_back(empty_cpu({rows * keep_lengths[f] + 1}, ScalarType::Long));
  }
  for_each_feature(lists, [&](size_t f) {
    const int64_t keep = keep_lengths[f];
    const int64_t* outer = words_of(outer_offsets[f]);
    int64_t* to_outer = words_of(cut_outer[f]);
    int64_t* to_inner = words_of(cut_inner[f]);
    const int64_t rows = outer_offsets[f].size(0) - 1;
    int64_t size = 0;
    *to_inner++ = 0;
    to_outer[0] = 0;
    for (int64_t r = 0; r < rows; ++r) {
      to_outer[r + 1] = (r + 1) * keep;
      const Kept kept = kept_of(outer[r], outer[r + 1], keep, drop_left[f] != 0);
      const int64_t before = pad_left[f] != 0 ? keep - kept.count : 0;
      const int64_t* inner = lists[f].offset + kept.begin;
      for (int64_t j = 0; j < before; ++j) *to_inner++ = size;
      for (int64_t j = 0; j < kept.count; ++j) *to_inner++ = size += inner[j + 1] - inner[j];
      for (int64_t j = before + kept.count; j < keep; ++j) *to_inner++ = size;
    }
  });
  TakenLists taken = taken_lists(values, lists, last_offsets(cut_inner));
  const auto begins =
      item_begins(lists.size(), [&](size_t f) { return outer_offsets[f].size(0) - 1; });
  for_each_range(begins, row_work(lists), [&](size_t f, int64_t first, int64_t last) {
    const int64_t keep = keep_lengths[f];
    const int64_t* outer = words_of(outer_offsets[f]);
    const int64_t* inner = lists[f].offset;
    const int64_t* cut = words_of(cut_inner[f]);
    RangeCopy copy(lists[f], taken.to[f]);
    for (int64_t r = first; r < last; ++r) {
      const Kept kept = kept_of(outer[r], outer[r + 1], keep, drop_left[f] != 0);
      const int64_t begin = inner[kept.begin];
      copy.add(begin, cut[r * keep], inner[kept.begin + kept.count] - begin);
    }
  });
  return {taken.values, cut_outer, cut_inner, taken.weights};
}

std::tuple<Lists, Lists, Lists> ragged_topk_index_cutoff(Lists values, Lists offsets, Lists indices,
                                                         Lists weights,
                                                         std::vector<int64_t> weighted) {
  const char* op = "ragged_topk_index_cutoff";
  const auto lists =
      ragged_of(op, "values", values, "offsets", offsets, "weights", weights, weighted);
  check_list(op, "indices", indices, lists.size(), ScalarType::Long, 2);
  Lists cut_offsets;
  for (size_t f = 0; f < lists.size(); ++f) {
    check_size(op, entry_name("indices", f).c_str(), indices[f], 0, lists[f].rows);
    cut_offsets.push_back(empty_cpu({lists[f].rows + 1}, ScalarType::Long));
  }
  for_each_feature(lists, [&](size_t f) {
    const Ragged& list = lists[f];
    const int64_t k = indices[f].size(1);
    const int64_t* index = words_of(indices[f]);
    int64_t* cut = words_of(cut_offsets[f]);
    int64_t size = cut[0] = 0;
    for (int64_t r = 0; r < list.rows; ++r) {
      const auto length = static_cast<uint64_t>(list.offset[r + 1] - list.offset[r]);
      for (int64_t j = 0; j < k; ++j) size += static_cast<uint64_t>(*index++) < length ? 1 : 0;
      cut[r + 1] = size;
    }
  });
  TakenLists taken = taken_lists(values, lists, last_offsets(cut_offsets));
  for_each_range(row_begins(lists), row_work(lists), [&](size_t f, int64_t first, int64_t last) {
    const Ragged& list = lists[f];
    const int64_t k = indices[f].size(1);
    with_bytes(list.bytes, [&](auto type) {
      using T = decltype(type);
      const auto* from = reinterpret_cast<const T*>(list.values);
      auto* to = reinterpret_cast<T*>(taken.to[f].values);
      int64_t at = words_of(cut_offsets[f])[first];
      for (int64_t r = first; r < last; ++r) {
        const auto length = static_cast<uint64_t>(list.offset[r + 1] - list.offset[r]);
        const int64_t* index = words_of(indices[f]) + r * k;
        for (int64_t j = 0; j < k; ++j) {
          if (static_cast<uint64_t>(index[j]) >= length) continue;
          const int64_t source = list.offset[r] + index[j];
          to[at] = from[source];
          if (list.weight != nullptr) taken.to[f].weight[at] = list.weight[source];
          ++at;
        }
      }
    });
  });
  return {taken.values, cut_offsets, taken.weights};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("ragged_cutoff_2d", TORCH_BOX(&dynemb::cpu::ragged_cutoff_2d));
  m.impl("ragged_cutoff_3d", TORCH_BOX(&dynemb::cpu::ragged_cutoff_3d));
  m.impl("ragged_topk_index_cutoff", TORCH_BOX(&dynemb::cpu::ragged_topk_index_cutoff));
}
