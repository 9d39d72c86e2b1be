#include "arguments/tensors.h"

namespace dynemb {
namespace {

std::string gpu_name(int32_t number) {
  return number == CallContext::kOnCpu ? "the CPU" : "cuda:" + std::to_string(number);
}

}  // namespace

std::string device_name(const Tensor& tensor) {
  if (tensor.is_cuda()) return gpu_name(tensor.get_device_index());
  return tensor.is_cpu() ? gpu_name(CallContext::kOnCpu) : "another device";
}

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
  DYNEMB_CHECK(tensor.defined(), "dynemb::", op, ": ", name, " is None, expected a tensor");
}

void check_defined(const char* op, const char* name, size_t i, const Tensor& tensor) {
  if (!tensor.defined()) check_defined(op, entry_name(name, i).c_str(), tensor);
}

void check_layout(const char* op, const char* name, const Tensor& tensor, ScalarType dtype) {
  check_defined(op, name, tensor);
  DYNEMB_CHECK(tensor.scalar_type() == dtype, "dynemb::", op, ": ", name, " has dtype ",
               dtype_name(tensor.scalar_type()), ", expected ", dtype_name(dtype));
  DYNEMB_CHECK(tensor.is_contiguous(), "dynemb::", op, ": ", name,
               " is not contiguous: call .contiguous()");
}

void check_tensor(const CallContext& call, const char* name, const Tensor& tensor,
                  ScalarType dtype) {
  check_defined(call.op, name, tensor);
  DYNEMB_CHECK(call.has(tensor), "dynemb::", call.op, ": ", name, " is on ", device_name(tensor),
               ", but the table is on ", gpu_name(call.gpu),
               ": move it, or move the table with .to()");
  check_layout(call.op, name, tensor, dtype);
}

void check_size(const char* op, const char* name, const Tensor& tensor, int64_t dim,
                int64_t expected) {
  // tensors have at most two dimensions: a further one of size 0 would leave the tensor without
  // memory
  DYNEMB_CHECK(tensor.dim() > dim && tensor.dim() <= 2, "dynemb::", op, ": ", name, " has ",
               tensor.dim(), " dimensions, expected ", dim == 1 ? "2" : "1 or 2");
  DYNEMB_CHECK(tensor.size(dim) == expected, "dynemb::", op, ": ", name, ".size(", dim, ") is ",
               tensor.size(dim), ", expected ", expected);
}

void check_length(const char* op, const char* name, const Tensor& tensor, int64_t expected) {
  DYNEMB_CHECK(tensor.dim() == 1, "dynemb::", op, ": ", name, " has ", tensor.dim(),
               " dimensions, expected 1");
  check_size(op, name, tensor, 0, expected);
}

void check_words(const CallContext& call, const char* name, const Tensor& tensor) {
  check_tensor(call, name, tensor, ScalarType::Long);
  DYNEMB_CHECK(tensor.dim() == 1, "dynemb::", call.op, ": ", name, " has ", tensor.dim(),
               " dimensions, expected 1");
}

std::string entry_name(const char* name, size_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

void check_entries(const char* op, const char* name, size_t entries, size_t features) {
  DYNEMB_CHECK(features > 0, "dynemb::", op, ": the lists are empty, also ", name,
               ", expected an entry for each feature");
  DYNEMB_CHECK(entries == features, "dynemb::", op, ": ", name, " has ", entries,
               " entries, expected one for each of ", features, " features");
}

void check_devices(const CallContext& call, const char* name, const std::vector<Tensor>& list) {
  for (size_t i = 0; i < list.size(); ++i) {
    check_defined(call.op, name, i, list[i]);
    DYNEMB_CHECK(call.has(list[i]), "dynemb::", call.op, ": ", entry_name(name, i), " is on ",
                 device_name(list[i]), ", expected ", gpu_name(call.gpu), ", as the first tensor");
  }
}

void check_list(const CallContext& call, const char* name, const std::vector<Tensor>& list,
                size_t features, ScalarType dtype, int64_t dims) {
  check_entries(call.op, name, list.size(), features);
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor& tensor = list[i];
    check_defined(call.op, name, i, tensor);
    const bool right_dims = dims == kAnyDims || tensor.dim() == dims;
    if (tensor.scalar_type() == dtype && tensor.is_contiguous() && right_dims) continue;
    const std::string entry = entry_name(name, i);
    check_layout(call.op, entry.c_str(), tensor, dtype);
    DYNEMB_CHECK(right_dims, "dynemb::", call.op, ": ", entry, " has ", tensor.dim(),
                 " dimensions, expected ", dims);
  }
  check_devices(call, name, list);
}

int64_t result_bytes(const char* op, const char* name, int64_t value,
                     const std::vector<int64_t>& sizes, int64_t value_bytes) {
  constexpr int64_t kAddressSpace = int64_t{1} << 47;
  int64_t bytes = value_bytes;
  bool fits = true;
  for (const int64_t size : sizes) {
    // a size of 0 does not excuse the others: strides are made of them
    fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, size > 1 ? size : 1, &bytes) &&
           bytes <= kAddressSpace;
  }
  DYNEMB_CHECK(fits, "dynemb::", op, ": ", name, " is ", value,
               ", with which the result is larger than an address space");
  for (const int64_t size : sizes) bytes = size == 0 ? 0 : bytes;
  return bytes;
}

}  // namespace dynemb
