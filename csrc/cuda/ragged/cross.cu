// feature_cross_ragged: ids of all pairs of the distinct ids of two rows.
#include <tuple>

#include "core/features/murmurhash.h"
#include "cuda/ragged/lists.cuh"

namespace dynemb::cuda {
namespace {

using Lists = std::vector<Tensor>;

// Ids of all x, then of all y, as lists of one kind.
struct CrossLists {
  FeatureItems items;
  RaggedArgs rows;
  const int64_t* const* ids;
  const float* const* weights;  // nullptr for a list without weights
};

// A thread per id: 1 at its first occurrence in the row. Compares it with the ids before it in the
// row, from the caches; the result of a row has as many pairs.
__global__ void flag_first(CrossLists lists, int64_t* flags) {
  const int64_t number = thread_number();
  if (number >= lists.items.count) return;
  const FeatureItem item = lists.items.at(number);
  const RaggedRows rows = lists.rows.of(item.feature);
  const int64_t* ids = lists.ids[item.feature];
  int64_t first = 0;
  if (rows.rows > 0) {
    const int64_t row = rows.row_of(item.index);
    int64_t i = rows.begin(row);
    while (i < item.index && ids[i] != ids[item.index]) ++i;
    first = i == item.index && item.index < rows.end(row) ? 1 : 0;
  }
  flags[number] = first;
}

// A thread per id: writes distinct ids, one after another, with their weights, in order of
// occurrence. `sums` are those of the flags.
__global__ void write_distinct(CrossLists lists, const int64_t* sums, int64_t* distinct,
                               float* weights) {
  const int64_t number = thread_number();
  if (number >= lists.items.count || sums[number] == sums[number + 1]) return;
  const FeatureItem item = lists.items.at(number);
  const float* given = lists.weights[item.feature];
  distinct[sums[number]] = lists.ids[item.feature][item.index];
  weights[sums[number]] = given == nullptr ? 1.0f : given[item.index];
}

// Slots are rows; feature f has lists f and features + f.
struct CrossRows {
  CrossLists lists;
  int64_t features;
  const int64_t* sums;  // of the flags
  const int64_t* distinct;
  const float* weights;
  int64_t* const* offsets;
  int64_t* const* values;
  float* const* values_weights;

  struct Range {
    int64_t begin;
    int64_t count;
  };
  // The distinct ids of a row.
  __device__ __forceinline__ Range distinct_of(int64_t list, int64_t row) const {
    const RaggedRows rows = lists.rows.of(list);
    const int64_t* of_list = sums + lists.items.begin[list];
    const int64_t begin = of_list[rows.begin(row)];
    return {begin, of_list[rows.end(row)] - begin};
  }
  __device__ __forceinline__ int64_t size(int64_t f, int64_t row) const {
    return distinct_of(f, row).count * distinct_of(features + f, row).count;
  }
  __device__ __forceinline__ void check(int64_t f, int64_t row, const ErrorSink& errors) const {
    lists.rows.of(f).check(row, f, errors);
    lists.rows.of(features + f).check(row, f, errors);
  }
  __device__ __forceinline__ void write_offset(int64_t f, int64_t row, int64_t offset) const {
    offsets[f][row] = offset;
  }
  __device__ __forceinline__ void take(int64_t f, int64_t to, int64_t row, int64_t within) const {
    const Range y = distinct_of(features + f, row);
    const int64_t i = distinct_of(f, row).begin + within / y.count;
    const int64_t j = y.begin + within % y.count;
    values[f][to] = crossed_id(distinct[i], distinct[j]);
    values_weights[f][to] = weights[i] * weights[j];
  }
};

std::vector<int64_t> addresses_of(const std::vector<int64_t>& weight, const Lists& weights) {
  std::vector<int64_t> result;
  for (const int64_t k : weight) {
    result.push_back(
        k < 0 ? 0 : static_cast<int64_t>(reinterpret_cast<intptr_t>(weights[k].data_ptr())));
  }
  return result;
}

template <class T>
void append(std::vector<T>* to, const std::vector<T>& more) {
  to->insert(to->end(), more.begin(), more.end());
}

std::tuple<Lists, Lists, Lists> feature_cross_ragged(
    Lists x_values, Lists x_offsets, Lists y_values, Lists y_offsets, Lists x_weights,
    std::vector<int64_t> x_weighted, Lists y_weights, std::vector<int64_t> y_weighted) {
  const char* op = "feature_cross_ragged";
  const Call call(op, "x_values[0]", owner_of_list(op, x_values));
  const size_t features = x_values.size();
  check_list(call, "x_values", x_values, features, ScalarType::Long, 1);
  check_list(call, "y_values", y_values, features, ScalarType::Long, 1);
  std::vector<int64_t> weights =
      addresses_of(check_ragged(call, "x_values", x_values, "x_offsets", x_offsets, "x_weights",
                                x_weights, x_weighted),
                   x_weights);
  append(&weights, addresses_of(check_ragged(call, "y_values", y_values, "y_offsets", y_offsets,
                                             "y_weights", y_weights, y_weighted),
                                y_weights));
  check_same_rows(op, x_offsets, y_offsets);
  Lists ids = x_values;
  append(&ids, y_values);
  Lists of_rows = x_offsets;
  append(&of_rows, y_offsets);
  Lists offsets = empty_offsets(call, features, [&](size_t f) { return x_offsets[f].size(0) - 1; });
  FeatureWords words;
  const auto items = words.add(element_begins(ids));
  const RaggedWords rows(&words, of_rows, lengths_of(ids));
  const auto id = words.add_addresses<const int64_t>(ids);
  const auto weight = words.add(weights);
  const auto row_items = words.add(element_begins(offsets));
  const auto offset = words.add_addresses<int64_t>(offsets);
  words.upload(call);
  const CrossLists lists{words.items(items), rows.args(words), words.get(id),
                         reinterpret_cast<const float* const*>(words.get(weight))};
  const int64_t count = lists.items.count;
  const SizeSums flags(call, count);
  Scratch scratch;
  const auto distinct = scratch.add<int64_t>(count);
  const auto distinct_weights = scratch.add<float>(count);
  scratch.allocate(call);
  call.launch(flag_first, count, 0, lists, flags.sizes());
  flags.run(call);
  call.launch(write_distinct, count, 0, lists, flags.sums(), scratch.get(distinct),
              scratch.get(distinct_weights));
  CrossRows job{lists,
                static_cast<int64_t>(features),
                flags.sums(),
                scratch.get(distinct),
                scratch.get(distinct_weights),
                words.get(offset),
                nullptr,
                nullptr};
  const FeatureItems slots = words.items(row_items);
  const SizeSums sums(call, slots.count);
  const std::vector<int64_t> sizes = measure(call, job, slots, sums);
  Lists values, values_weights;
  for (const int64_t size : sizes) {
    values.push_back(call.empty({size}, ScalarType::Long));
    values_weights.push_back(call.empty({size}, ScalarType::Float));
  }
  FeatureWords results;
  const auto begin = results.add(element_begins(values));
  const auto to = results.add_addresses<int64_t>(values);
  const auto weights_to = results.add_addresses<float>(values_weights);
  results.upload(call);
  job.values = results.get(to);
  job.values_weights = results.get(weights_to);
  take(call, job, slots, results.items(begin), sums);
  return {values, offsets, values_weights};
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("feature_cross_ragged", TORCH_BOX(&dynemb::cuda::feature_cross_ragged));
}
