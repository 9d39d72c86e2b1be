// ragged_cutoff_2d, ragged_cutoff_3d, ragged_topk_index_cutoff: some values of every row.
#include <tuple>

#include "core/features/ragged.h"
#include "cuda/ragged/lists.cuh"

namespace dynemb::cuda {
namespace {

using Lists = std::vector<Tensor>;

// Slots are rows.
struct CutRows {
  RaggedArgs rows;
  const int64_t* keep;
  const int64_t* drop_left;
  int64_t* const* cut_offsets;
  TakenArgs taken;

  __device__ __forceinline__ Kept kept(int64_t f, int64_t row) const {
    const RaggedRows of_feature = rows.of(f);
    return kept_of(of_feature.begin(row), of_feature.end(row), keep[f], drop_left[f] != 0);
  }
  __device__ __forceinline__ int64_t size(int64_t f, int64_t row) const {
    return kept(f, row).count;
  }
  __device__ __forceinline__ void check(int64_t f, int64_t row, const ErrorSink& errors) const {
    rows.of(f).check(row, f, errors);
  }
  __device__ __forceinline__ void write_offset(int64_t f, int64_t row, int64_t offset) const {
    cut_offsets[f][row] = offset;
  }
  __device__ __forceinline__ void take(int64_t f, int64_t to, int64_t row, int64_t within) const {
    taken.take(f, to, kept(f, row).begin + within);
  }
};

// Slots are the lists of a row in the result.
struct CutLists {
  RaggedArgs outer;
  RaggedArgs inner;
  const int64_t* keep;
  const int64_t* drop_left;
  const int64_t* pad_left;
  int64_t* const* cut_outer;
  int64_t* const* cut_inner;
  TakenArgs taken;

  // The list in a slot; -1: an empty list.
  __device__ __forceinline__ int64_t list_of(int64_t f, int64_t slot) const {
    const RaggedRows rows = outer.of(f);
    const int64_t row = slot / keep[f];
    const Kept kept = kept_of(rows.begin(row), rows.end(row), keep[f], drop_left[f] != 0);
    const int64_t j = slot - row * keep[f] - (pad_left[f] != 0 ? keep[f] - kept.count : 0);
    return j >= 0 && j < kept.count ? kept.begin + j : -1;
  }
  __device__ __forceinline__ int64_t size(int64_t f, int64_t slot) const {
    const int64_t list = list_of(f, slot);
    return list < 0 ? 0 : inner.of(f).end(list) - inner.of(f).begin(list);
  }
  // There may be more offsets than slots.
  __device__ __forceinline__ void check(int64_t f, int64_t slot, const ErrorSink& errors) const {
    const int64_t slots = outer.rows[f] * keep[f] + 1;
    for (int64_t i = slot; i <= outer.rows[f]; i += slots) outer.of(f).check(i, f, errors);
    for (int64_t i = slot; i <= inner.rows[f]; i += slots) inner.of(f).check(i, f, errors);
  }
  __device__ __forceinline__ void write_offset(int64_t f, int64_t slot, int64_t offset) const {
    cut_inner[f][slot] = offset;
    const int64_t slots = outer.rows[f] * keep[f] + 1;
    for (int64_t i = slot; i <= outer.rows[f]; i += slots) cut_outer[f][i] = i * keep[f];
  }
  __device__ __forceinline__ void take(int64_t f, int64_t to, int64_t slot, int64_t within) const {
    taken.take(f, to, inner.of(f).begin(list_of(f, slot)) + within);
  }
};

// Slots are the indices.
struct CutIndices {
  RaggedArgs rows;
  const int64_t* k;
  const int64_t* const* indices;
  int64_t* const* cut_offsets;
  TakenArgs taken;

  // Position of a slot's value; -1: none.
  __device__ __forceinline__ int64_t source(int64_t f, int64_t slot) const {
    const RaggedRows of_feature = rows.of(f);
    const int64_t row = slot / k[f];
    const int64_t index = indices[f][slot];
    const int64_t begin = of_feature.begin(row);
    return index >= 0 && index < of_feature.end(row) - begin ? begin + index : -1;
  }
  __device__ __forceinline__ int64_t size(int64_t f, int64_t slot) const {
    return source(f, slot) < 0 ? 0 : 1;
  }
  __device__ __forceinline__ void check(int64_t f, int64_t slot, const ErrorSink& errors) const {
    const int64_t slots = rows.rows[f] * k[f] + 1;
    for (int64_t i = slot; i <= rows.rows[f]; i += slots) rows.of(f).check(i, f, errors);
  }
  __device__ __forceinline__ void write_offset(int64_t f, int64_t slot, int64_t offset) const {
    if (k[f] == 0) {  // one slot
      for (int64_t i = 0; i <= rows.rows[f]; ++i) cut_offsets[f][i] = 0;
    } else if (slot % k[f] == 0) {
      cut_offsets[f][slot / k[f]] = offset;
    }
  }
  __device__ __forceinline__ void take(int64_t f, int64_t to, int64_t slot, int64_t) const {
    taken.take(f, to, source(f, slot));
  }
};

std::tuple<Lists, Lists, Lists> ragged_cutoff_2d(Lists values, Lists offsets, Lists weights,
                                                 std::vector<int64_t> weighted,
                                                 std::vector<int64_t> keep_lengths,
                                                 std::vector<int64_t> drop_left) {
  const Call call("ragged_cutoff_2d", "values[0]", owner_of_list("ragged_cutoff_2d", values));
  const auto weight =
      check_ragged(call, "values", values, "offsets", offsets, "weights", weights, weighted);
  const size_t features = values.size();
  check_numbers(call.op, "keep_lengths", keep_lengths, features, 0);
  check_entries(call.op, "drop_left", drop_left.size(), features);
  Lists cut_offsets =
      empty_offsets(call, features, [&](size_t f) { return offsets[f].size(0) - 1; });
  FeatureWords words;
  const auto begin = words.add(element_begins(offsets));
  const RaggedWords rows(&words, offsets, lengths_of(values));
  const auto keep = words.add(keep_lengths);
  const auto left = words.add(drop_left);
  const auto cut = words.add_addresses<int64_t>(cut_offsets);
  words.upload(call);
  CutRows job{rows.args(words), words.get(keep), words.get(left), words.get(cut), {}};
  const FeatureItems slots = words.items(begin);
  const SizeSums sums(call, slots.count);
  const TakenLists taken(call, values, weights, weight, measure(call, job, slots, sums));
  job.taken = taken.args();
  take(call, job, slots, taken.items(), sums);
  return {taken.values, cut_offsets, taken.weights};
}

std::tuple<Lists, Lists, Lists, Lists> ragged_cutoff_3d(Lists values, Lists outer_offsets,
                                                        Lists inner_offsets, Lists weights,
                                                        std::vector<int64_t> weighted,
                                                        std::vector<int64_t> keep_lengths,
                                                        std::vector<int64_t> drop_left,
                                                        std::vector<int64_t> pad_left) {
  const Call call("ragged_cutoff_3d", "values[0]", owner_of_list("ragged_cutoff_3d", values));
  const auto weight = check_ragged(call, "values", values, "inner_offsets", inner_offsets,
                                   "weights", weights, weighted);
  const size_t features = values.size();
  check_offset_lists(call, "outer_offsets", outer_offsets, features);
  check_numbers(call.op, "keep_lengths", keep_lengths, features, 0);
  check_entries(call.op, "drop_left", drop_left.size(), features);
  check_entries(call.op, "pad_left", pad_left.size(), features);
  const auto rows = RaggedWords::rows_of(outer_offsets);
  for (size_t f = 0; f < features; ++f) {
    const std::string name = entry_name("keep_lengths", f);
    check_padding(call.op, name, keep_lengths[f], inner_offsets[f].size(0) - 1,
                  result_bytes(call.op, name.c_str(), keep_lengths[f],
                               {std::max<int64_t>(rows[f], 1), keep_lengths[f]}, 8));
  }
  Lists cut_outer = empty_offsets(call, features, [&](size_t f) { return rows[f]; });
  Lists cut_inner =
      empty_offsets(call, features, [&](size_t f) { return rows[f] * keep_lengths[f]; });
  FeatureWords words;
  const auto begin = words.add(element_begins(cut_inner));
  const RaggedWords outer(&words, outer_offsets, RaggedWords::rows_of(inner_offsets));
  const RaggedWords inner(&words, inner_offsets, lengths_of(values));
  const auto keep = words.add(keep_lengths);
  const auto drop = words.add(drop_left);
  const auto pad = words.add(pad_left);
  const auto to_outer = words.add_addresses<int64_t>(cut_outer);
  const auto to_inner = words.add_addresses<int64_t>(cut_inner);
  words.upload(call);
  CutLists job{outer.args(words), inner.args(words),   words.get(keep),     words.get(drop),
               words.get(pad),    words.get(to_outer), words.get(to_inner), {}};
  const FeatureItems slots = words.items(begin);
  const SizeSums sums(call, slots.count);
  const TakenLists taken(call, values, weights, weight, measure(call, job, slots, sums));
  job.taken = taken.args();
  take(call, job, slots, taken.items(), sums);
  return {taken.values, cut_outer, cut_inner, taken.weights};
}

std::tuple<Lists, Lists, Lists> ragged_topk_index_cutoff(Lists values, Lists offsets, Lists indices,
                                                         Lists weights,
                                                         std::vector<int64_t> weighted) {
  const char* op = "ragged_topk_index_cutoff";
  const Call call(op, "values[0]", owner_of_list(op, values));
  const auto weight =
      check_ragged(call, "values", values, "offsets", offsets, "weights", weights, weighted);
  const size_t features = values.size();
  check_list(call, "indices", indices, features, ScalarType::Long, 2);
  const auto rows = RaggedWords::rows_of(offsets);
  std::vector<int64_t> k;
  for (size_t f = 0; f < features; ++f) {
    check_size(op, entry_name("indices", f).c_str(), indices[f], 0, rows[f]);
    k.push_back(indices[f].size(1));
  }
  Lists cut_offsets = empty_offsets(call, features, [&](size_t f) { return rows[f]; });
  FeatureWords words;
  const auto begin = words.add(item_begins(features, [&](size_t f) { return rows[f] * k[f] + 1; }));
  const RaggedWords of_rows(&words, offsets, lengths_of(values));
  const auto widths = words.add(k);
  const auto index = words.add_addresses<const int64_t>(indices);
  const auto cut = words.add_addresses<int64_t>(cut_offsets);
  words.upload(call);
  CutIndices job{of_rows.args(words), words.get(widths), words.get(index), words.get(cut), {}};
  const FeatureItems slots = words.items(begin);
  const SizeSums sums(call, slots.count);
  const TakenLists taken(call, values, weights, weight, measure(call, job, slots, sums));
  job.taken = taken.args();
  take(call, job, slots, taken.items(), sums);
  return {taken.values, cut_offsets, taken.weights};
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("ragged_cutoff_2d", TORCH_BOX(&dynemb::cuda::ragged_cutoff_2d));
  m.impl("ragged_cutoff_3d", TORCH_BOX(&dynemb::cuda::ragged_cutoff_3d));
  m.impl("ragged_topk_index_cutoff", TORCH_BOX(&dynemb::cuda::ragged_topk_index_cutoff));
}
