// Ops with results of sizes that only the device knows: slots (rows, lists, positions) of all
// features are measured, their sizes summed, and the sums of features copied to the host once; then
// one kernel writes offsets and takes values. A Job defines the slots:
//
//   int64_t size(feature, slot)                values of a slot
//   void check(feature, slot, errors)          called for every slot and once more, slot = slots
//   void write_offset(feature, slot, offset)   the same
//   void take(feature, to, slot, within)       writes value `to` of the feature, `within` a slot
#pragma once

#include <vector>

#include "arguments/ragged.h"
#include "cuda/features/lists.h"
#include "cuda/index/args.h"

namespace dynemb::cuda {

// A thread per slot, and one more per feature: 8 to 24 bytes read in order, 8 written.
template <class Job>
__global__ void measure_slots(Job job, FeatureItems slots, ErrorSink errors, int64_t* sizes) {
  const int64_t number = thread_number();
  if (number >= slots.count) return;
  const FeatureItem item = slots.at(number);
  const int64_t last = slots.begin[item.feature + 1] - slots.begin[item.feature] - 1;
  job.check(item.feature, item.index, errors);
  sizes[number] = item.index < last ? job.size(item.feature, item.index) : 0;
}

// A thread per value that is taken, and per slot: binary searches for feature and slot, which stay
// in the caches; a value read and written, nearly in order.
template <class Job>
__global__ void take_values(Job job, FeatureItems slots, FeatureItems values, const int64_t* sums) {
  const int64_t number = thread_number();
  if (number < slots.count) {
    const FeatureItem item = slots.at(number);
    job.write_offset(item.feature, item.index, sums[number] - sums[slots.begin[item.feature]]);
  }
  if (number < values.count) {
    const FeatureItem item = values.at(number);
    const int64_t* of_feature = sums + slots.begin[item.feature];
    const int64_t parts = slots.begin[item.feature + 1] - slots.begin[item.feature] - 1;
    const int64_t position = of_feature[0] + item.index;
    const int64_t slot = part_of(of_feature, parts, position);
    job.take(item.feature, item.index, slot, position - of_feature[slot]);
  }
}

// Sums of sizes: of an item, those of all items before it.
class SizeSums {
 public:
  SizeSums(const Call& call, int64_t items);
  int64_t* sizes() const { return scratch_.get(sums_) + 1; }   // output of the caller
  void run(const Call& call) const;                            // turns sizes into sums
  const int64_t* sums() const { return scratch_.get(sums_); }  // [items + 1]
  // The sums of the items of each feature. Waits for the device.
  std::vector<int64_t> totals(const Call& call, const FeatureItems& items) const;

 private:
  int64_t items_;
  size_t bytes_ = 0;
  Scratch scratch_;
  Scratch::Part<int64_t> sums_;
  Scratch::Part<char> temporary_;
};

// Measures the slots of `job`; waits for their sums.
template <class Job>
std::vector<int64_t> measure(const Call& call, const Job& job, const FeatureItems& slots,
                             const SizeSums& sums) {
  call.launch(measure_slots<Job>, slots.count, 0, job, slots, error_sink(call), sums.sizes());
  sums.run(call);
  return sums.totals(call, slots);
}
template <class Job>
void take(const Call& call, const Job& job, const FeatureItems& slots, const FeatureItems& values,
          const SizeSums& sums) {
  call.launch(take_values<Job>, std::max(slots.count, values.count), 0, job, slots, values,
              sums.sums());
}

__device__ __forceinline__ void copy_value(char* to, int64_t at, const char* from, int64_t source,
                                           int64_t bytes) {
  switch (bytes) {
    case 1:
      to[at] = from[source];
      return;
    case 2:
      reinterpret_cast<uint16_t*>(to)[at] = reinterpret_cast<const uint16_t*>(from)[source];
      return;
    case 4:
      reinterpret_cast<uint32_t*>(to)[at] = reinterpret_cast<const uint32_t*>(from)[source];
      return;
    default:
      reinterpret_cast<uint64_t*>(to)[at] = reinterpret_cast<const uint64_t*>(from)[source];
  }
}

// Input values and weights of features for a job.
struct TakenArgs {
  const char* const* from;
  char* const* to;
  const int64_t* bytes;
  const float* const* weights_from;  // nullptr for a feature without weights
  float* const* weights_to;

  __device__ __forceinline__ void take(int64_t feature, int64_t to_index, int64_t source) const {
    copy_value(to[feature], to_index, from[feature], source, bytes[feature]);
    if (weights_from[feature] != nullptr) {
      weights_to[feature][to_index] = weights_from[feature][source];
    }
  }
};

// The results of such an op: their tensors and addresses.
class TakenLists {
 public:
  // `weight`: from check_ragged.
  TakenLists(const Call& call, const std::vector<Tensor>& from,
             const std::vector<Tensor>& weights_from, const std::vector<int64_t>& weight,
             const std::vector<int64_t>& sizes);
  TakenArgs args() const;
  FeatureItems items() const { return words_.items(begin_); }

  std::vector<Tensor> values;
  std::vector<Tensor> weights;

 private:
  FeatureWords words_;
  FeatureWords::Part<const int64_t> begin_;
  FeatureWords::Part<const char* const> from_;
  FeatureWords::Part<char* const> to_;
  FeatureWords::Part<const int64_t> bytes_;
  FeatureWords::Part<const int64_t> weights_from_;
  FeatureWords::Part<const int64_t> weights_to_;
};

inline std::vector<int64_t> lengths_of(const std::vector<Tensor>& list) {
  std::vector<int64_t> lengths;
  for (const Tensor& tensor : list) lengths.push_back(tensor.size(0));
  return lengths;
}

// Rows of all features, on the device.
struct RaggedArgs {
  const int64_t* const* offsets;
  const int64_t* rows;
  const int64_t* count;

  __device__ __forceinline__ RaggedRows of(int64_t feature) const {
    return {offsets[feature], rows[feature], count[feature]};
  }
};
class RaggedWords {
 public:
  // `count`: the number of items that the rows divide.
  RaggedWords(FeatureWords* words, const std::vector<Tensor>& offsets,
              const std::vector<int64_t>& count)
      : offsets_(words->add_addresses<const int64_t>(offsets)),
        rows_(words->add(rows_of(offsets))),
        count_(words->add(count)) {}
  RaggedArgs args(const FeatureWords& words) const {
    return {words.get(offsets_), words.get(rows_), words.get(count_)};
  }
  static std::vector<int64_t> rows_of(const std::vector<Tensor>& offsets) {
    std::vector<int64_t> rows;
    for (const Tensor& tensor : offsets) rows.push_back(tensor.size(0) - 1);
    return rows;
  }

 private:
  FeatureWords::Part<const int64_t* const> offsets_;
  FeatureWords::Part<const int64_t> rows_;
  FeatureWords::Part<const int64_t> count_;
};

// New offsets for each feature [size + 1].
template <class Size>
std::vector<Tensor> empty_offsets(const Call& call, size_t features, const Size& size) {
  std::vector<Tensor> result;
  for (size_t f = 0; f < features; ++f) {
    const std::vector<int64_t> shape{size(f) + 1};  // named: nvcc would drop the braces
    result.push_back(call.empty(shape, ScalarType::Long));
  }
  return result;
}

}  // namespace dynemb::cuda
