// ragged_to_dense, dense_to_ragged, ragged_indices: ragged rows as parts of a dense tensor.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "core/features/ragged.h"
#include "cpu/memory/reserve.h"
#include "cpu/ragged/lists.h"

namespace dynemb::cpu {
namespace {

using Lists = std::vector<Tensor>;

// Ragged rows of several depths.
struct Nested {
  std::vector<const int64_t*> offset;  // from outermost to innermost
  std::vector<int64_t> length;         // of dense dimensions 1, 2, ...
  std::vector<int64_t> parts;          // of all rows of a depth
  std::vector<int64_t> size;           // of a dense part below each depth, in values
  int64_t rows;
  int64_t count;

  size_t depth() const { return offset.size(); }
};

// Also checks that no row is longer than its dense dimension.
std::vector<Nested> nested_of(const char* op, const Lists& values, const Lists& offsets,
                              const std::vector<int64_t>& depths,
                              const std::vector<int64_t>& lengths) {
  const Depths at = check_depths(op, values, offsets, depths, lengths);
  std::vector<Nested> result;
  for (size_t f = 0; f < values.size(); ++f) {
    Nested nested;
    nested.count = values[f].size(0);
    nested.rows = offsets[at.first[f]].size(0) - 1;
    for (int64_t d = at.first[f]; d < at.first[f + 1]; ++d) {
      const bool last = d + 1 == at.first[f + 1];
      const int64_t parts = last ? nested.count : offsets[d + 1].size(0) - 1;
      const std::string name =
          depths[f] == 1 ? "offsets" : entry_name("offsets", f);  // offsets[f][d]
      const size_t number = depths[f] == 1 ? f : static_cast<size_t>(d - at.first[f]);
      check_list_offsets(op, name.c_str(), number, offsets[d], parts);
      const int64_t* offset = words_of(offsets[d]);
      const int64_t rows = offsets[d].size(0) - 1;
      int64_t longest = 0;
      for (int64_t r = 0; r < rows; ++r) longest = std::max(longest, offset[r + 1] - offset[r]);
      DYNEMB_CHECK(longest <= lengths[d], "dynemb::", op, ": ", entry_name(name.c_str(), number),
                   " has a row of ", longest, ", expected at most ", lengths[d],
                   ", the length of the dense dimension");
      nested.offset.push_back(offset);
      nested.length.push_back(lengths[d]);
      nested.parts.push_back(parts);
    }
    nested.size.assign(nested.depth(), 1);
    for (size_t d = nested.depth() - 1; d > 0; --d) {
      DYNEMB_CHECK(!__builtin_mul_overflow(nested.size[d], nested.length[d], &nested.size[d - 1]),
                   "dynemb::", op, ": lengths[", at.first[f] + static_cast<int64_t>(d), "] is ",
                   nested.length[d], ", with which a row is larger than an address space");
    }
    result.push_back(nested);
  }
  return result;
}

template <class T>
void write_row(const Nested& nested, size_t depth, int64_t row, const T* from, T padding, T* to) {
  const int64_t begin = nested.offset[depth][row];
  const int64_t count = nested.offset[depth][row + 1] - begin;
  const int64_t size = nested.size[depth];
  if (depth + 1 == nested.depth()) {
    std::memcpy(to, from + begin, static_cast<size_t>(count) * sizeof(T));
  } else {
    for (int64_t i = 0; i < count; ++i) {
      write_row(nested, depth + 1, begin + i, from, padding, to + i * size);
    }
  }
  std::fill(to + count * size, to + nested.length[depth] * size, padding);
}

Lists ragged_to_dense(Lists values, Lists offsets, std::vector<int64_t> depths,
                      std::vector<int64_t> lengths, double padding, int64_t integer_padding) {
  const char* op = "ragged_to_dense";
  const auto nested = nested_of(op, values, offsets, depths, lengths);
  Lists dense;
  int64_t rows = 1;
  int64_t size = 1;
  size_t at = 0;  // position among all lengths
  for (size_t f = 0; f < nested.size(); ++f) {
    std::vector<int64_t> shape{nested[f].rows};
    for (size_t d = 0; d < nested[f].depth(); ++d, ++at) {
      const int64_t length = nested[f].length[d];
      shape.push_back(length);
      const std::string name = entry_name("lengths", at);
      const int64_t bytes =
          result_bytes(op, name.c_str(), length, shape, value_bytes(op, "values", f, values[f]));
      check_padding(op, name, length, nested[f].parts[d], bytes);
      check_result_memory(op, name.c_str(), length, bytes);
    }
    dense.push_back(empty_cpu(shape, values[f].scalar_type()));
    rows += nested[f].rows;
    size += dense.back().numel();
  }
  const auto begins = item_begins(nested.size(), [&](size_t f) { return nested[f].rows; });
  for_each_range(begins, size / rows + 1, [&](size_t f, int64_t first, int64_t last) {
    const int64_t bits = value_bits(values[f].scalar_type(), padding, integer_padding);
    with_bytes(value_bytes(op, "values", f, values[f]), [&](auto type) {
      using T = decltype(type);
      const int64_t row = nested[f].size[0] * nested[f].length[0];
      auto* to = static_cast<T*>(dense[f].data_ptr());
      const auto* from = static_cast<const T*>(values[f].data_ptr());
      for (int64_t r = first; r < last; ++r) {
        write_row(nested[f], 0, r, from, static_cast<T>(bits), to + r * row);
      }
    });
  });
  return dense;
}

// The dense indices of the values of one feature [depth + 1, count].
void write_indices(const Nested& nested, int64_t* to) {
  const int64_t count = nested.count;
  int64_t* index = to + static_cast<int64_t>(nested.depth()) * count;
  for (int64_t i = 0; i < count; ++i) index[i] = i;
  for (size_t d = nested.depth(); d > 0; --d, index -= count) {
    const int64_t* offset = nested.offset[d - 1];
    int64_t row = 0;
    for (int64_t i = 0; i < count; ++i) {
      while (offset[row + 1] <= index[i]) ++row;
      index[i - count] = row;
      index[i] -= offset[row];
    }
  }
}

Lists ragged_indices(Lists values, Lists offsets, std::vector<int64_t> depths,
                     std::vector<int64_t> lengths) {
  const auto nested = nested_of("ragged_indices", values, offsets, depths, lengths);
  Lists indices;
  int64_t work = 0;
  for (const Nested& feature : nested) {
    const auto rows = static_cast<int64_t>(feature.depth()) + 1;
    indices.push_back(empty_cpu({rows, feature.count}, ScalarType::Long));
    work += feature.count * rows;
  }
  parallel_units(static_cast<int64_t>(nested.size()), work, [&](int64_t first, int64_t last) {
    for (int64_t f = first; f < last; ++f) write_indices(nested[f], words_of(indices[f]));
  });
  return indices;
}

// All offsets but the innermost are multiples of a size.
std::tuple<Lists, Lists> dense_to_ragged(Lists dense, bool trim, double invalid,
                                         int64_t integer_invalid) {
  const char* op = "dense_to_ragged";
  const std::vector<int64_t> bytes = check_dense(op, dense);
  Lists values, offsets;
  std::vector<int64_t> rows, innermost;
  int64_t elements = 1;
  for (size_t f = 0; f < dense.size(); ++f) {
    const Tensor& tensor = dense[f];
    int64_t parts = 1;
    for (int64_t d = 0; d + 1 < tensor.dim(); ++d) {
      parts *= tensor.size(d);
      Tensor regular = empty_cpu({parts + 1}, ScalarType::Long);
      int64_t* offset = words_of(regular);
      for (int64_t i = 0; i <= parts; ++i) offset[i] = i * tensor.size(d + 1);
      offsets.push_back(regular);
    }
    rows.push_back(parts);
    innermost.push_back(static_cast<int64_t>(offsets.size()) - 1);
    elements += tensor.numel();
  }
  const auto begins = item_begins(rows.size(), [&](size_t f) { return rows[f]; });
  const int64_t work = elements / (begins.back() + 1) + 1;
  if (trim) {
    for_each_range(begins, work, [&](size_t f, int64_t first, int64_t last) {
      const int64_t length = dense[f].size(dense[f].dim() - 1);
      const ScalarType dtype = dense[f].scalar_type();
      with_bytes(bytes[f], [&](auto type) {
        using T = decltype(type);
        const auto bits = static_cast<T>(value_bits(dtype, invalid, integer_invalid));
        const auto mask = static_cast<T>(equal_mask(dtype, invalid));
        const auto* from = static_cast<const T*>(dense[f].data_ptr());
        int64_t* offset = words_of(offsets[innermost[f]]);
        for (int64_t r = first; r < last; ++r) {
          offset[r + 1] = without_trailing(from + r * length, length, bits, mask);
        }
      });
    });
    for (size_t f = 0; f < dense.size(); ++f) {
      int64_t* offset = words_of(offsets[innermost[f]]);
      for (int64_t r = 0; r < rows[f]; ++r) offset[r + 1] += offset[r];
    }
  }
  for (size_t f = 0; f < dense.size(); ++f) {
    const int64_t size = words_of(offsets[innermost[f]])[rows[f]];
    values.push_back(empty_cpu({size}, dense[f].scalar_type()));
  }
  for_each_range(begins, work, [&](size_t f, int64_t first, int64_t last) {
    const int64_t length = dense[f].size(dense[f].dim() - 1);
    const int64_t* offset = words_of(offsets[innermost[f]]);
    const Ragged from{
        static_cast<const char*>(dense[f].data_ptr()), bytes[f], nullptr, 0, 0, false, nullptr};
    const TakenValues to{static_cast<char*>(values[f].data_ptr()), nullptr};
    RangeCopy copy(from, to);
    for (int64_t r = first; r < last; ++r) {
      copy.add(r * length, offset[r], offset[r + 1] - offset[r]);
    }
  });
  return {values, offsets};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("ragged_to_dense", TORCH_BOX(&dynemb::cpu::ragged_to_dense));
  m.impl("ragged_indices", TORCH_BOX(&dynemb::cpu::ragged_indices));
  m.impl("dense_to_ragged", TORCH_BOX(&dynemb::cpu::dense_to_ragged));
}
