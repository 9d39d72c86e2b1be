#include "arguments/tensors.h"

#include "core/columns.h"
#include "core/policy/decisions.h"

namespace dynemb {

const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

void check_defined(const char* op, const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.defined(), "dynemb::", op, ": ", name, " is None, expected a tensor");
}

void check_defined(const char* op, const char* name, size_t i, const Tensor& tensor) {
  if (!tensor.defined()) check_defined(op, entry_name(name, i).c_str(), tensor);
}

void check_layout(const char* op, const char* name, const Tensor& tensor, ScalarType dtype) {
  check_defined(op, name, tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, "dynemb::", op, ": ", name, " has dtype ",
                  dtype_name(tensor.scalar_type()), ", expected ", dtype_name(dtype));
  STD_TORCH_CHECK(tensor.is_contiguous(), "dynemb::", op, ": ", name,
                  " is not contiguous: call .contiguous()");
}

void check_size(const char* op, const char* name, const Tensor& tensor, int64_t dim,
                int64_t expected) {
  // no tensor has more than two: a further dimension of size 0 would leave it without memory
  STD_TORCH_CHECK(tensor.dim() > dim && tensor.dim() <= 2, "dynemb::", op, ": ", name, " has ",
                  tensor.dim(), " dimensions, expected ", dim == 1 ? "2" : "1 or 2");
  STD_TORCH_CHECK(tensor.size(dim) == expected, "dynemb::", op, ": ", name, ".size(", dim, ") is ",
                  tensor.size(dim), ", expected ", expected);
}

void check_length(const char* op, const char* name, const Tensor& tensor, int64_t expected) {
  STD_TORCH_CHECK(tensor.dim() == 1, "dynemb::", op, ": ", name, " has ", tensor.dim(),
                  " dimensions, expected 1");
  check_size(op, name, tensor, 0, expected);
}

void check_words(const char* op, const char* name, const Tensor& tensor) {
  check_layout(op, name, tensor, ScalarType::Long);
  STD_TORCH_CHECK(tensor.dim() == 1, "dynemb::", op, ": ", name, " has ", tensor.dim(),
                  " dimensions, expected 1");
}

void check_part(const char* op, int64_t parts, int64_t part) {
  STD_TORCH_CHECK(parts >= 1, "dynemb::", op, ": parts is ", parts, ", expected at least 1");
  STD_TORCH_CHECK(part >= 0 && part < parts, "dynemb::", op, ": part is ", part, ", expected 0 to ",
                  parts - 1);
}

std::string entry_name(const char* name, size_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

void check_entries(const char* op, const char* name, size_t entries, size_t features) {
  STD_TORCH_CHECK(features > 0, "dynemb::", op, ": the lists are empty, also ", name,
                  ", expected an entry for each feature");
  STD_TORCH_CHECK(entries == features, "dynemb::", op, ": ", name, " has ", entries,
                  " entries, expected one for each of ", features, " features");
}

void check_list_layout(const char* op, const char* name, const std::vector<Tensor>& list,
                       ScalarType dtype, int64_t dims) {
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor& tensor = list[i];
    check_defined(op, name, i, tensor);
    const bool right_dims = dims == kAnyDims || tensor.dim() == dims;
    if (tensor.scalar_type() == dtype && tensor.is_contiguous() && right_dims) continue;
    const std::string entry = entry_name(name, i);
    check_layout(op, entry.c_str(), tensor, dtype);
    STD_TORCH_CHECK(right_dims, "dynemb::", op, ": ", entry, " has ", tensor.dim(),
                    " dimensions, expected ", dims);
  }
}

void check_divisors(const char* op, const char* name, const std::vector<int64_t>& divisors,
                    size_t features) {
  check_entries(op, name, divisors.size(), features);
  for (size_t i = 0; i < divisors.size(); ++i) {
    STD_TORCH_CHECK(divisors[i] >= 1, "dynemb::", op, ": ", entry_name(name, i), " is ",
                    divisors[i], ", expected at least 1");
  }
}

bool is_one_bag(const Tensor& offsets, int64_t features) {
  return features == 1 && offsets.dim() == 1 && offsets.numel() == 0;
}

void check_pooled_offsets(const char* op, const Tensor& offsets) {
  STD_TORCH_CHECK(offsets.numel() > 0, "dynemb::", op,
                  ": offsets is empty, expected where each of the bags that are pooled begins, and "
                  "the number of ids");
}

void check_clocks(const char* op, const Tensor& tables, const Tensor& row_clock,
                  const Tensor& clock) {
  check_size(op, "tables", tables, 1, kTableColumns);
  STD_TORCH_CHECK(row_clock.dim() == 1 && row_clock.size(0) > kRowClockExtra, "dynemb::", op,
                  ": row_clock has ", row_clock.numel(), " elements, expected more than ",
                  kRowClockExtra + 0);
  check_length(op, "clock", clock, kClockHead + tables.size(0));
}

void check_row_clock(const char* op, const int64_t* words, int64_t count) {
  constexpr int64_t kMostSteps = INT64_MAX - (int64_t{1} << 32);
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(words[i] >= 0 && words[i] <= kMostSteps, "dynemb::", op, ": row_clock[", i,
                    "] is ", words[i], ", expected a count from 0 to ", kMostSteps + 0);
  }
}

int64_t result_bytes(const char* op, const char* name, int64_t value,
                     const std::vector<int64_t>& sizes, int64_t value_bytes) {
  constexpr int64_t kAddressSpace = int64_t{1} << 47;
  int64_t bytes = value_bytes;
  bool fits = true;
  for (const int64_t size : sizes) {
    // a size of 0 does not make others right: strides are made of them
    fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, size > 1 ? size : 1, &bytes) &&
           bytes <= kAddressSpace;
  }
  STD_TORCH_CHECK(fits, "dynemb::", op, ": ", name, " is ", value,
                  ", with which the result is larger than an address space");
  for (const int64_t size : sizes) bytes = size == 0 ? 0 : bytes;
  return bytes;
}

int64_t score_words(const char* op, const Tensor& scores) {
  check_layout(op, "scores", scores, ScalarType::Long);
  STD_TORCH_CHECK(scores.dim() == 2, "dynemb::", op, ": scores has ", scores.dim(),
                  " dimensions, expected 2");
  const int64_t words = scores.size(1) / kBucketWidth;
  STD_TORCH_CHECK(scores.size(1) == words * kBucketWidth && words >= 1 && words <= kMaxScoreWords,
                  "dynemb::", op, ": scores.size(1) is ", scores.size(1), ", expected 1 to ",
                  kMaxScoreWords, " words for each of ", kBucketWidth, " slots");
  return scores.size(0) > 0 ? words : 0;
}

}  // namespace dynemb
