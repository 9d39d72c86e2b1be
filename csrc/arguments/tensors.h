// Checks of tensor arguments that all devices share.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <string>
#include <vector>

namespace dynemb {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// As in Python, without "torch.".
const char* dtype_name(ScalarType dtype);

// Raises unless there is a tensor: lists may have None in place of one.
void check_defined(const char* op, const char* name, const Tensor& tensor);
void check_defined(const char* op, const char* name, size_t i, const Tensor& tensor);
// Raises unless `tensor` is contiguous and of the dtype.
void check_layout(const char* op, const char* name, const Tensor& tensor, ScalarType dtype);
// Raises unless `tensor` is a vector of `expected` elements.
void check_length(const char* op, const char* name, const Tensor& tensor, int64_t expected);
// Raises unless size(dim) of a matrix, or of a vector where `dim` is 0, is `expected`.
void check_size(const char* op, const char* name, const Tensor& tensor, int64_t dim,
                int64_t expected);
// Raises unless `tensor` is a contiguous vector of int64.
void check_words(const char* op, const char* name, const Tensor& tensor);
// Raises unless `part` is one of `parts`.
void check_part(const char* op, int64_t parts, int64_t part);
// "name[i]": an entry of a list, in messages.
std::string entry_name(const char* name, size_t i);
// Raises unless `list` has an entry for each of `features`, and there are any.
void check_entries(const char* op, const char* name, size_t entries, size_t features);
// Raises unless all tensors of `list` are contiguous, of the dtype and, where `dims` is not
// kAnyDims, of so many dimensions.
constexpr int64_t kAnyDims = -1;
void check_list_layout(const char* op, const char* name, const std::vector<Tensor>& list,
                       ScalarType dtype, int64_t dims);
// Raises unless each of `features` has a divisor of at least 1.
void check_divisors(const char* op, const char* name, const std::vector<int64_t>& divisors,
                    size_t features);
// Whether `offsets` are the empty ones that a call of one feature may give: all ids are in one bag.
bool is_one_bag(const Tensor& offsets, int64_t features);
// Raises for empty offsets of bags that are pooled.
void check_pooled_offsets(const char* op, const Tensor& offsets);
// Raises unless row_clock has the step of a table, and clock that of each of `tables`.
void check_clocks(const char* op, const Tensor& tables, const Tensor& row_clock,
                  const Tensor& clock);
// Raises unless the words of row_clock are counts to which more can be added.
void check_row_clock(const char* op, const int64_t* words, int64_t count);
// The bytes of a result of `sizes`, one of which argument `name` has set to `value`, with
// `value_bytes` for each element. Raises for what is negative or larger than an address space.
int64_t result_bytes(const char* op, const char* name, int64_t value,
                     const std::vector<int64_t>& sizes, int64_t value_bytes);
// Words that `scores` keeps of an id; 0 if it has no rows. Raises for a wrong layout.
int64_t score_words(const char* op, const Tensor& scores);

}  // namespace dynemb
