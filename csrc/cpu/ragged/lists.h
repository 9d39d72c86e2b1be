// Lists of ragged values, shared by the ragged_* ops.
#pragma once

#include <cstring>
#include <vector>

#include "arguments/ragged.h"
#include "cpu/features/lists.h"

namespace dynemb::cpu {

// The rows of one feature.
struct Ragged {
  const char* values;
  int64_t bytes;  // of a value
  const int64_t* offset;
  int64_t rows;
  int64_t count;
  bool weighted;
  const float* weight;  // nullptr: no weights, or no values
};

inline int64_t* words_of(const Tensor& tensor) { return static_cast<int64_t*>(tensor.data_ptr()); }

// Also checks the values of offsets.
inline std::vector<Ragged> ragged_of(const char* op, const char* values_name,
                                     const std::vector<Tensor>& values, const char* offsets_name,
                                     const std::vector<Tensor>& offsets, const char* weights_name,
                                     const std::vector<Tensor>& weights,
                                     const std::vector<int64_t>& weighted) {
  const std::vector<int64_t> weight =
      check_ragged(op, values_name, values, offsets_name, offsets, weights_name, weights, weighted);
  std::vector<Ragged> result;
  result.reserve(values.size());
  for (size_t f = 0; f < values.size(); ++f) {
    const int64_t count = values[f].size(0);
    check_list_offsets(op, offsets_name, f, offsets[f], count);
    result.push_back(
        {static_cast<const char*>(values[f].data_ptr()), value_bytes(op, values_name, f, values[f]),
         words_of(offsets[f]), offsets[f].size(0) - 1, count, weight[f] >= 0,
         weight[f] < 0 ? nullptr : static_cast<const float*>(weights[weight[f]].data_ptr())});
  }
  return result;
}

// Output values and weights of an op.
struct TakenValues {
  char* values;
  float* weight;  // nullptr: none
};

// Storage for sizes[f] values and weights of each feature.
struct TakenLists {
  std::vector<Tensor> values;
  std::vector<Tensor> weights;
  std::vector<TakenValues> to;
};
inline TakenLists taken_lists(const std::vector<Tensor>& values, const std::vector<Ragged>& lists,
                              const std::vector<int64_t>& sizes) {
  TakenLists result;
  for (size_t f = 0; f < lists.size(); ++f) {
    result.values.push_back(empty_cpu({sizes[f]}, values[f].scalar_type()));
    float* weight = nullptr;
    if (lists[f].weighted) {
      result.weights.push_back(empty_cpu({sizes[f]}, ScalarType::Float));
      weight = static_cast<float*>(result.weights.back().data_ptr());
    }
    result.to.push_back({static_cast<char*>(result.values.back().data_ptr()), weight});
  }
  return result;
}

// Where the rows of each feature begin among all rows [features + 1].
inline std::vector<int64_t> row_begins(const std::vector<Ragged>& lists) {
  return item_begins(lists.size(), [&](size_t f) { return lists[f].rows; });
}
// The work of a row, in values.
inline int64_t row_work(const std::vector<Ragged>& lists) {
  int64_t rows = 1;
  int64_t count = 1;
  for (const Ragged& list : lists) {
    rows += list.rows;
    count += list.count;
  }
  return count / rows + 1;
}

// Copies ranges of values; adjacent ranges are copied together.
class RangeCopy {
 public:
  RangeCopy(const Ragged& from, const TakenValues& to) : from_(from), to_(to) {}
  ~RangeCopy() { flush(); }

  void add(int64_t begin, int64_t to, int64_t count) {
    if (count == 0) return;
    if (begin != begin_ + count_ || to != target_ + count_) {
      flush();
      begin_ = begin;
      target_ = to;
    }
    count_ += count;
  }

 private:
  void flush() {
    if (count_ > 0) {
      std::memcpy(to_.values + target_ * from_.bytes, from_.values + begin_ * from_.bytes,
                  static_cast<size_t>(count_ * from_.bytes));
      if (to_.weight != nullptr) {
        std::memcpy(to_.weight + target_, from_.weight + begin_,
                    static_cast<size_t>(count_) * sizeof(float));
      }
    }
    count_ = 0;
  }

  const Ragged& from_;
  const TakenValues& to_;
  int64_t begin_ = 0;
  int64_t target_ = 0;
  int64_t count_ = 0;
};

// Calls f(T{}) with an unsigned integer of so many bytes.
template <class F>
void with_bytes(int64_t bytes, const F& f) {
  switch (bytes) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    default:
      return f(uint64_t{});
  }
}

}  // namespace dynemb::cpu
