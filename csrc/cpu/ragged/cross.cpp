// feature_cross_ragged: ids of all pairs of the distinct ids of two rows.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "core/features/murmurhash.h"
#include "core/index/hash.h"
#include "cpu/ragged/lists.h"

namespace dynemb::cpu {
namespace {

using Lists = std::vector<Tensor>;

// The distinct ids of rows in order of first occurrence, each with its weight. The distinct ids of
// a row begin at the row's offset.
struct DistinctRows {
  std::vector<int64_t> id;
  std::vector<float> weight;
  std::vector<int64_t> count;  // of each row
};

class RowTable {
 public:
  // The distinct ids of a row, by linear probing; few ids are compared with each other.
  int64_t distinct(const Ragged& list, int64_t row, int64_t* id, float* weight) {
    const auto* ids = reinterpret_cast<const int64_t*>(list.values);
    const int64_t first = list.offset[row];
    const int64_t last = list.offset[row + 1];
    constexpr int64_t kFew = 16;
    if (last - first > kFew) clear(last - first);
    int64_t found = 0;
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = last - first > kFew ? place(ids[i], found, id) : search(ids[i], found, id);
      if (at < found) continue;
      id[found] = ids[i];
      weight[found++] = list.weight == nullptr ? 1.0f : list.weight[i];
    }
    return found;
  }

 private:
  static int64_t search(int64_t wanted, int64_t found, const int64_t* id) {
    int64_t at = 0;
    while (at < found && id[at] != wanted) ++at;
    return at;
  }
  void clear(int64_t count) {
    shift_ = 63;
    while (shift_ > 0 && (int64_t{1} << (64 - shift_)) < 2 * count) --shift_;
    number_.assign(size_t{1} << (64 - shift_), -1);
  }
  int64_t place(int64_t wanted, int64_t found, const int64_t* id) {
    const size_t mask = number_.size() - 1;
    size_t slot = fmix64(static_cast<uint64_t>(wanted)) >> shift_;
    while (number_[slot] >= 0 && id[number_[slot]] != wanted) slot = (slot + 1) & mask;
    if (number_[slot] < 0) number_[slot] = found;
    return number_[slot];
  }

  int shift_ = 63;
  std::vector<int64_t> number_;
};

std::vector<DistinctRows> distinct_rows(const std::vector<Ragged>& lists) {
  std::vector<DistinctRows> result(lists.size());
  for (size_t f = 0; f < lists.size(); ++f) {
    result[f].id.resize(lists[f].count);
    result[f].weight.resize(lists[f].count);
    result[f].count.resize(lists[f].rows);
  }
  for_each_range(row_begins(lists), row_work(lists), [&](size_t f, int64_t first, int64_t last) {
    RowTable table;
    for (int64_t r = first; r < last; ++r) {
      const int64_t begin = lists[f].offset[r];
      result[f].count[r] =
          table.distinct(lists[f], r, result[f].id.data() + begin, result[f].weight.data() + begin);
    }
  });
  return result;
}

std::tuple<Lists, Lists, Lists> feature_cross_ragged(
    Lists x_values, Lists x_offsets, Lists y_values, Lists y_offsets, Lists x_weights,
    std::vector<int64_t> x_weighted, Lists y_weights, std::vector<int64_t> y_weighted) {
  const char* op = "feature_cross_ragged";
  check_list(op, "x_values", x_values, x_values.size(), ScalarType::Long, 1);
  check_list(op, "y_values", y_values, x_values.size(), ScalarType::Long, 1);
  const auto x = ragged_of(op, "x_values", x_values, "x_offsets", x_offsets, "x_weights", x_weights,
                           x_weighted);
  const auto y = ragged_of(op, "y_values", y_values, "y_offsets", y_offsets, "y_weights", y_weights,
                           y_weighted);
  check_same_rows(op, x_offsets, y_offsets);
  const auto of_x = distinct_rows(x);
  const auto of_y = distinct_rows(y);
  Lists values, offsets, weights;
  int64_t pairs = 1;
  for (size_t f = 0; f < x.size(); ++f) {
    offsets.push_back(empty_cpu({x[f].rows + 1}, ScalarType::Long));
    int64_t* offset = words_of(offsets[f]);
    offset[0] = 0;
    for (int64_t r = 0; r < x[f].rows; ++r) {
      offset[r + 1] = offset[r] + of_x[f].count[r] * of_y[f].count[r];
    }
    const int64_t size = offset[x[f].rows];
    pairs += size;
    values.push_back(empty_cpu({size}, ScalarType::Long));
    weights.push_back(empty_cpu({size}, ScalarType::Float));
  }
  const auto begins = row_begins(x);
  for_each_range(begins, pairs / (begins.back() + 1) + 1,
                 [&](size_t f, int64_t first, int64_t last) {
                   const int64_t* offset = words_of(offsets[f]);
                   for (int64_t r = first; r < last; ++r) {
                     int64_t* id = words_of(values[f]) + offset[r];
                     auto* weight = static_cast<float*>(weights[f].data_ptr()) + offset[r];
                     const int64_t at_x = x[f].offset[r];
                     const int64_t at_y = y[f].offset[r];
                     for (int64_t i = at_x; i < at_x + of_x[f].count[r]; ++i) {
                       for (int64_t j = at_y; j < at_y + of_y[f].count[r]; ++j) {
                         *id++ = crossed_id(of_x[f].id[i], of_y[f].id[j]);
                         *weight++ = of_x[f].weight[i] * of_y[f].weight[j];
                       }
                     }
                   }
                 });
  return {values, offsets, weights};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("feature_cross_ragged", TORCH_BOX(&dynemb::cpu::feature_cross_ragged));
}
