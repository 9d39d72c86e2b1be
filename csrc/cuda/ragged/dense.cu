// ragged_to_dense, dense_to_ragged, ragged_indices: ragged rows as parts of a dense tensor.
#include <tuple>

#include "core/features/ragged.h"
#include "cuda/ragged/lists.cuh"

namespace dynemb::cuda {
namespace {

using Lists = std::vector<Tensor>;

// Rows of several depths, of all features.
struct NestedArgs {
  RaggedArgs depths;       // of all offsets
  FeatureItems entries;    // of all offsets
  const int64_t* length;   // of each depth's dense dimension
  const int64_t* feature;  // of each depth
  const int64_t* first;    // [features + 1] first depth of each feature

  // Called for every entry of all offsets.
  __device__ __forceinline__ void check(int64_t number, const ErrorSink& errors) const {
    const FeatureItem item = entries.at(number);
    const RaggedRows rows = depths.of(item.feature);
    rows.check(item.index, feature[item.feature], errors);
    if (item.index < rows.rows &&
        rows.end(item.index) - rows.begin(item.index) > length[item.feature]) {
      errors.report(kErrorRowLength, feature[item.feature]);
    }
  }
};

struct DenseArgs {
  const char* const* values;
  char* const* dense;
  const int64_t* bytes;
  const int64_t* padding;  // its bits, of each feature
  const int64_t* row_size;
};

__device__ __forceinline__ void write_bits(char* to, int64_t at, int64_t bits, int64_t bytes) {
  switch (bytes) {
    case 1:
      reinterpret_cast<uint8_t*>(to)[at] = static_cast<uint8_t>(bits);
      return;
    case 2:
      reinterpret_cast<uint16_t*>(to)[at] = static_cast<uint16_t>(bits);
      return;
    case 4:
      reinterpret_cast<uint32_t*>(to)[at] = static_cast<uint32_t>(bits);
      return;
    default:
      reinterpret_cast<uint64_t*>(to)[at] = static_cast<uint64_t>(bits);
  }
}

// A thread per dense value, and per entry of offsets: 16 bytes of offsets a depth, from the caches;
// a value read nearly in order and written in order.
__global__ void write_dense(NestedArgs nested, DenseArgs args, FeatureItems cells,
                            ErrorSink errors) {
  const int64_t number = thread_number();
  if (number < nested.entries.count) nested.check(number, errors);
  if (number >= cells.count) return;
  const FeatureItem item = cells.at(number);
  const int64_t f = item.feature;
  int64_t size = args.row_size[f];
  int64_t at = item.index / size;  // a row of the outermost offsets
  int64_t within = item.index % size;
  bool inside = true;
  for (int64_t d = nested.first[f]; d < nested.first[f + 1]; ++d) {
    size /= nested.length[d];
    const int64_t index = within / size;
    within %= size;
    const RaggedRows rows = nested.depths.of(d);
    if (at >= rows.rows || index >= rows.end(at) - rows.begin(at)) {
      inside = false;
      break;
    }
    at = rows.begin(at) + index;
  }
  if (inside) {
    copy_value(args.dense[f], item.index, args.values[f], at, args.bytes[f]);
  } else {
    write_bits(args.dense[f], item.index, args.padding[f], args.bytes[f]);
  }
}

// A thread per value, and per entry of offsets: a binary search a depth, 8 bytes written for each
// and 8 more.
__global__ void write_indices(NestedArgs nested, FeatureItems values, int64_t* const* indices,
                              ErrorSink errors) {
  const int64_t number = thread_number();
  if (number < nested.entries.count) nested.check(number, errors);
  if (number >= values.count) return;
  const FeatureItem item = values.at(number);
  const int64_t f = item.feature;
  const int64_t count = values.begin[f + 1] - values.begin[f];
  const int64_t first = nested.first[f];
  int64_t at = item.index;
  for (int64_t d = nested.first[f + 1] - 1; d >= first; --d) {
    const RaggedRows rows = nested.depths.of(d);
    const int64_t row = rows.rows > 0 ? rows.row_of(at) : 0;
    indices[f][(d - first + 1) * count + item.index] = rows.rows > 0 ? at - rows.begin(row) : 0;
    at = row;
  }
  indices[f][item.index] = at;
}

// The words of NestedArgs.
class NestedWords {
 public:
  NestedWords(const Call& call, FeatureWords* words, const Lists& values, const Lists& offsets,
              const std::vector<int64_t>& depths, const std::vector<int64_t>& lengths)
      : at(check_depths(call, values, offsets, depths, lengths)),
        rows_(words, offsets, counts(values, offsets, at)),
        entries_(words->add(element_begins(offsets))),
        length_(words->add(lengths)),
        feature_(words->add(features_of(depths))),
        first_(words->add(at.first)) {}

  NestedArgs args(const FeatureWords& words) const {
    return {rows_.args(words), words.items(entries_), words.get(length_), words.get(feature_),
            words.get(first_)};
  }

  const Depths at;

 private:
  static std::vector<int64_t> features_of(const std::vector<int64_t>& depths) {
    std::vector<int64_t> features;
    for (size_t f = 0; f < depths.size(); ++f) {
      features.insert(features.end(), static_cast<size_t>(depths[f]), static_cast<int64_t>(f));
    }
    return features;
  }
  // The counts that each depth's offsets divide: the rows of the next one, or values.
  static std::vector<int64_t> counts(const Lists& values, const Lists& offsets, const Depths& at) {
    std::vector<int64_t> counts;
    for (size_t f = 0; f < values.size(); ++f) {
      for (int64_t d = at.first[f] + 1; d < at.first[f + 1]; ++d) {
        counts.push_back(offsets[d].size(0) - 1);
      }
      counts.push_back(values[f].size(0));
    }
    return counts;
  }

  RaggedWords rows_;
  FeatureWords::Part<const int64_t> entries_;
  FeatureWords::Part<const int64_t> length_;
  FeatureWords::Part<const int64_t> feature_;
  FeatureWords::Part<const int64_t> first_;
};

Lists ragged_to_dense(Lists values, Lists offsets, std::vector<int64_t> depths,
                      std::vector<int64_t> lengths, double padding, int64_t integer_padding) {
  const Call call("ragged_to_dense", "values[0]", owner_of_list("ragged_to_dense", values));
  FeatureWords words;
  const NestedWords nested(call, &words, values, offsets, depths, lengths);
  Lists dense;
  std::vector<int64_t> bytes, bits, row_size;
  for (size_t f = 0; f < values.size(); ++f) {
    const int64_t first = nested.at.first[f];
    std::vector<int64_t> shape{offsets[first].size(0) - 1};
    int64_t size = 1;
    for (int64_t d = first; d < nested.at.first[f + 1]; ++d) {
      shape.push_back(lengths[d]);
      const std::string name = entry_name("lengths", static_cast<size_t>(d));
      const bool last = d + 1 == nested.at.first[f + 1];
      check_padding(call.op, name, lengths[d],
                    last ? values[f].size(0) : offsets[d + 1].size(0) - 1,
                    result_bytes(call.op, name.c_str(), lengths[d], shape,
                                 value_bytes(call.op, "values", f, values[f])));
      size *= lengths[d];
    }
    dense.push_back(call.empty(shape, values[f].scalar_type()));
    bytes.push_back(value_bytes(call.op, "values", f, values[f]));
    bits.push_back(value_bits(values[f].scalar_type(), padding, integer_padding));
    row_size.push_back(size);
  }
  const auto cells = words.add(element_begins(dense));
  const auto from = words.add_addresses<const char>(values);
  const auto to = words.add_addresses<char>(dense);
  const auto sizes = words.add(bytes);
  const auto paddings = words.add(bits);
  const auto row_sizes = words.add(row_size);
  words.upload(call);
  const NestedArgs args = nested.args(words);
  const DenseArgs dense_args{words.get(from), words.get(to), words.get(sizes), words.get(paddings),
                             words.get(row_sizes)};
  const FeatureItems items = words.items(cells);
  call.launch(write_dense, std::max(items.count, args.entries.count), 0, args, dense_args, items,
              error_sink(call));
  return dense;
}

Lists ragged_indices(Lists values, Lists offsets, std::vector<int64_t> depths,
                     std::vector<int64_t> lengths) {
  const Call call("ragged_indices", "values[0]", owner_of_list("ragged_indices", values));
  FeatureWords words;
  const NestedWords nested(call, &words, values, offsets, depths, lengths);
  Lists indices;
  for (size_t f = 0; f < values.size(); ++f) {
    indices.push_back(call.empty({depths[f] + 1, values[f].size(0)}, ScalarType::Long));
  }
  const auto begin = words.add(element_begins(values));
  const auto to = words.add_addresses<int64_t>(indices);
  words.upload(call);
  const NestedArgs args = nested.args(words);
  const FeatureItems items = words.items(begin);
  call.launch(write_indices, std::max(items.count, args.entries.count), 0, args, items,
              words.get(to), error_sink(call));
  return indices;
}

// Slots are rows of the last dimension.
struct TrimRows {
  const int64_t* length;
  const int64_t* bits;
  const int64_t* mask;
  const char* const* dense;
  const int64_t* bytes;
  bool trim;
  int64_t* const* offsets;
  TakenArgs taken;

  template <class T>
  __device__ __forceinline__ int64_t trimmed(int64_t f, int64_t row) const {
    const T* from = reinterpret_cast<const T*>(dense[f]) + row * length[f];
    return without_trailing(from, length[f], static_cast<T>(bits[f]), static_cast<T>(mask[f]));
  }
  __device__ __forceinline__ int64_t size(int64_t f, int64_t row) const {
    if (!trim) return length[f];
    switch (bytes[f]) {
      case 1:
        return trimmed<uint8_t>(f, row);
      case 2:
        return trimmed<uint16_t>(f, row);
      case 4:
        return trimmed<uint32_t>(f, row);
      default:
        return trimmed<uint64_t>(f, row);
    }
  }
  __device__ __forceinline__ void check(int64_t, int64_t, const ErrorSink&) const {}
  __device__ __forceinline__ void write_offset(int64_t f, int64_t row, int64_t offset) const {
    offsets[f][row] = offset;
  }
  __device__ __forceinline__ void take(int64_t f, int64_t to, int64_t row, int64_t within) const {
    taken.take(f, to, row * length[f] + within);
  }
};

// A thread per entry of the outer offsets: 8 bytes written.
__global__ void write_regular(FeatureItems entries, int64_t* const* offsets, const int64_t* step) {
  const int64_t number = thread_number();
  if (number >= entries.count) return;
  const FeatureItem item = entries.at(number);
  offsets[item.feature][item.index] = item.index * step[item.feature];
}

std::tuple<Lists, Lists> dense_to_ragged(Lists dense, bool trim, double invalid,
                                         int64_t integer_invalid) {
  const Call call("dense_to_ragged", "dense[0]", owner_of_list("dense_to_ragged", dense));
  const std::vector<int64_t> bytes = check_dense(call, dense);
  Lists offsets, outer, inner;
  std::vector<int64_t> step, length, bits, mask, sizes;
  for (size_t f = 0; f < dense.size(); ++f) {
    const Tensor& tensor = dense[f];
    int64_t parts = 1;
    for (int64_t d = 0; d + 1 < tensor.dim(); ++d) {
      parts *= tensor.size(d);
      offsets.push_back(call.empty({parts + 1}, ScalarType::Long));
      const bool last = d + 2 == tensor.dim();
      (last ? inner : outer).push_back(offsets.back());
      if (!last) step.push_back(tensor.size(d + 1));
    }
    const ScalarType dtype = tensor.scalar_type();
    length.push_back(tensor.size(tensor.dim() - 1));
    bits.push_back(value_bits(dtype, invalid, integer_invalid));
    mask.push_back(equal_mask(dtype, invalid));
    sizes.push_back(tensor.numel());
  }
  FeatureWords words;
  const auto begin = words.add(element_begins(inner));
  const auto lengths = words.add(length);
  const auto all_bits = words.add(bits);
  const auto masks = words.add(mask);
  const auto from = words.add_addresses<const char>(dense);
  const auto all_bytes = words.add(bytes);
  const auto to = words.add_addresses<int64_t>(inner);
  const auto entries = words.add(element_begins(outer));
  const auto to_outer = words.add_addresses<int64_t>(outer);
  const auto steps = words.add(step);
  words.upload(call);
  TrimRows job{words.get(lengths),   words.get(all_bits),
               words.get(masks),     words.get(from),
               words.get(all_bytes), trim,
               words.get(to),        {}};
  const FeatureItems slots = words.items(begin);
  const SizeSums sums(call, slots.count);
  if (trim) {
    sizes = measure(call, job, slots, sums);
  } else {  // the host knows the sizes
    call.launch(measure_slots<TrimRows>, slots.count, 0, job, slots, error_sink(call),
                sums.sizes());
    sums.run(call);
  }
  const TakenLists taken(call, dense, {}, std::vector<int64_t>(dense.size(), -1), sizes);
  job.taken = taken.args();
  take(call, job, slots, taken.items(), sums);
  if (!outer.empty()) {
    const FeatureItems regular = words.items(entries);
    call.launch(write_regular, regular.count, 0, regular, words.get(to_outer), words.get(steps));
  }
  return {taken.values, offsets};
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("ragged_to_dense", TORCH_BOX(&dynemb::cuda::ragged_to_dense));
  m.impl("ragged_indices", TORCH_BOX(&dynemb::cuda::ragged_indices));
  m.impl("dense_to_ragged", TORCH_BOX(&dynemb::cuda::dense_to_ragged));
}
