// Lists with an entry for each feature of a call, sent to the device in one upload. One launch
// works on them; its threads find their features:
//
//   check_list(call, "values", values, features, ScalarType::Long, kAnyDims);
//   FeatureWords words;
//   const auto begin = words.add(element_begins(values));
//   const auto from = words.add_addresses<int64_t>(values);
//   words.upload(call);
//   const FeatureItems items = words.items(begin);
//   call.launch(kernel, items.count, 0, items, words.get(from), ...);
#pragma once

#include <string>
#include <vector>

#include "arguments/features.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/offsets.cuh"

namespace dynemb::cuda {

// Tensors of the same shapes and of the dtype.
std::vector<Tensor> empty_like_list(const Call& call, const std::vector<Tensor>& list,
                                    ScalarType dtype);
// A tensor of the list, for the device of the call. Raises for an empty list.
const Tensor& owner_of_list(const char* op, const std::vector<Tensor>& list);

// Where the items of each feature begin among all items [features + 1].
template <class Count>
std::vector<int64_t> item_begins(size_t features, const Count& count) {
  std::vector<int64_t> begin(features + 1, 0);
  for (size_t f = 0; f < features; ++f) begin[f + 1] = begin[f] + count(f);
  return begin;
}
inline std::vector<int64_t> element_begins(const std::vector<Tensor>& list) {
  return item_begins(list.size(), [&](size_t f) { return list[f].numel(); });
}

// An item of a feature: an element, a row, a string.
struct FeatureItem {
  int64_t feature;
  int64_t index;  // among the items of the feature
};

// The items of all features, in one numbering.
struct FeatureItems {
  const int64_t* begin;  // [features + 1], on the device
  int64_t features;
  int64_t count;

  __device__ __forceinline__ FeatureItem at(int64_t number) const {
    const int64_t feature = features == 1 ? 0 : part_of(begin, features, number);
    return {feature, number - begin[feature]};
  }
};

// Rows of a feature, of different length: offsets [rows + 1] of values [count]. Wrong offsets are
// clamped to the range.
struct RaggedRows {
  const int64_t* offsets;
  int64_t rows;
  int64_t count;

  __device__ __forceinline__ int64_t begin(int64_t row) const {
    return clipped_offset(offsets[row], count);
  }
  __device__ __forceinline__ int64_t end(int64_t row) const {
    const int64_t first = begin(row);
    const int64_t last = begin(row + 1);
    return last < first ? first : last;
  }
  // The row of a value.
  __device__ __forceinline__ int64_t row_of(int64_t value) const {
    return part_of(offsets, rows, value);
  }
  // Called for every row, at least for row 0.
  __device__ __forceinline__ void check(int64_t row, int64_t feature,
                                        const ErrorSink& errors) const {
    check_list_offset(offsets, rows, count, row, feature, errors);
  }
};

// Data that a call sends to the device: words, added part by part, then uploaded together.
class FeatureWords {
 public:
  template <class T>
  struct Part {
    int64_t offset;
    int64_t count;
  };

  Part<const int64_t> add(const std::vector<int64_t>& words) {
    const Part<const int64_t> part{static_cast<int64_t>(words_.size()),
                                   static_cast<int64_t>(words.size())};
    words_.insert(words_.end(), words.begin(), words.end());
    return part;
  }
  // Addresses of the tensors' data.
  template <class T>
  Part<T* const> add_addresses(const std::vector<Tensor>& list) {
    const Part<T* const> part{static_cast<int64_t>(words_.size()),
                              static_cast<int64_t>(list.size())};
    for (const Tensor& tensor : list) {
      words_.push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.data_ptr())));
    }
    return part;
  }
  void upload(const Call& call) {
    part_ = scratch_.add<int64_t>(static_cast<int64_t>(words_.size()));
    scratch_.allocate(call);
    upload_words(call, words_, scratch_.get(part_));
  }

  template <class T>
  T* get(Part<T> part) const {
    return reinterpret_cast<T*>(scratch_.get(part_) + part.offset);
  }
  // A part of item_begins().
  FeatureItems items(Part<const int64_t> begin) const {
    return {get(begin), begin.count - 1,
            words_[static_cast<size_t>(begin.offset + begin.count - 1)]};
  }

 private:
  std::vector<int64_t> words_;
  Scratch scratch_;
  Scratch::Part<int64_t> part_{};
};

}  // namespace dynemb::cuda
