#include "arguments/rows.h"

#include "core/columns.h"
#include "core/rows/copy_on_write.h"
#include "core/rows/quantized.h"

namespace dynemb {

Storage storage_of(const CallContext& call, const char* name, const Tensor& tensor) {
  check_defined(call.op, name, tensor);
  const ScalarType type = tensor.scalar_type();
  const Storage storage = type == ScalarType::BFloat16 ? Storage::kBFloat16
                          : type == ScalarType::Half   ? Storage::kFloat16
                                                       : Storage::kFloat32;
  DYNEMB_CHECK(storage != Storage::kFloat32 || type == ScalarType::Float, "dynemb::", call.op, ": ",
               name, " has dtype ", dtype_name(type), ", expected float32, bfloat16 or float16");
  check_tensor(call, name, tensor, type);
  return storage;
}

namespace {

SlabTensors slab_tensors(const CallContext& call, const Tensor& weights, const Tensor* generations,
                         int64_t format) {
  Storage storage;
  if (format == kRowsOfFloats) {
    storage = storage_of(call, "weights", weights);
  } else {
    DYNEMB_CHECK(format >= kRowsOfInt8 && format <= kRowsOfFloat8, "dynemb::", call.op,
                 ": formats has ", format,
                 ", expected 0 (rows of floats), 1 (int8), 2 (int4) or 3 (fp8)");
    storage = storage_of_format(format);
    check_tensor(call, "weights", weights, ScalarType::Byte);
  }
  if (generations != nullptr) check_tensor(call, "generations", *generations, ScalarType::Int);
  DYNEMB_CHECK(weights.dim() == 2 && weights.size(1) > 0, "dynemb::", call.op, ": weights has ",
               weights.dim(), " dimensions, expected shape (rows, dim) with a dim of at least 1");
  const int64_t count = weights.size(0);
  const int64_t row_bytes = weights.size(1) * static_cast<int64_t>(weights.element_size());
  const int64_t dim = is_quantized(storage) ? quantized_dim(storage, row_bytes) : weights.size(1);
  DYNEMB_CHECK(dim > 0, "dynemb::", call.op, ": weights.size(1) is ", weights.size(1),
               ", expected more than ", scale_bytes(storage),
               ", the bytes that a quantized row has beside its values");
  if (generations != nullptr) check_length(call.op, "generations", *generations, count);
  return {static_cast<char*>(weights.data_ptr()),
          generations == nullptr ? nullptr : static_cast<int32_t*>(generations->data_ptr()),
          count,
          dim,
          storage,
          row_bytes};
}

// `generations`: one for each of the weights; nullptr: frozen rows have none.
RowTensors slabs_of(const CallContext& call, const std::vector<Tensor>& weights,
                    const std::vector<Tensor>* generations, const Tensor& meta,
                    const Tensor& init_data, const std::vector<int64_t>& formats) {
  check_tensor(call, "meta", meta, ScalarType::Long);
  check_size(call.op, "meta", meta, 1, kMetaColumns);
  check_tensor(call, "init_data", init_data, ScalarType::Double);
  DYNEMB_CHECK(init_data.dim() == 1, "dynemb::", call.op, ": init_data has ", init_data.dim(),
               " dimensions, expected 1");
  if (generations == nullptr) {
    DYNEMB_CHECK(!weights.empty(), "dynemb::", call.op,
                 ": weights is empty, expected a tensor for each slab");
  } else {
    DYNEMB_CHECK(!weights.empty() && weights.size() == generations->size(), "dynemb::", call.op,
                 ": got ", weights.size(), " weights and ", generations->size(),
                 " generations, expected one of each per slab");
  }
  DYNEMB_CHECK(formats.empty() || formats.size() == weights.size(), "dynemb::", call.op,
               ": formats has ", formats.size(), " entries, expected as many as weights, ",
               weights.size());
  RowTensors rows{{},
                  static_cast<const int64_t*>(meta.data_ptr()),
                  meta.size(0),
                  static_cast<const double*>(init_data.data_ptr()),
                  init_data.numel()};
  rows.slabs.reserve(weights.size());
  for (size_t s = 0; s < weights.size(); ++s) {
    const Tensor* of_slab = generations == nullptr ? nullptr : &(*generations)[s];
    const int64_t format = formats.empty() ? int64_t{kRowsOfFloats} : formats[s];
    rows.slabs.push_back(slab_tensors(call, weights[s], of_slab, format));
  }
  return rows;
}

}  // namespace

RowTensors row_tensors(const CallContext& call, const std::vector<Tensor>& weights,
                       const std::vector<Tensor>& generations, const Tensor& meta,
                       const Tensor& init_data, const std::vector<int64_t>& formats) {
  return slabs_of(call, weights, &generations, meta, init_data, formats);
}

RowTensors frozen_row_tensors(const CallContext& call, const std::vector<Tensor>& weights,
                              const Tensor& meta, const Tensor& init_data,
                              const std::vector<int64_t>& formats) {
  return slabs_of(call, weights, nullptr, meta, init_data, formats);
}

namespace {

void check_one_per_slab(const char* op, const char* name, size_t given, size_t slabs) {
  DYNEMB_CHECK(given == slabs, "dynemb::", op, ": ", name, " has ", given,
               " tensors, expected none, or one for each of the ", slabs, " slabs");
}

void add_dirty_bits(const CallContext& call, const std::vector<Tensor>& weights,
                    const std::vector<Tensor>& dirty_bits, std::vector<SlabState>* slabs) {
  check_one_per_slab(call.op, "dirty_bits", dirty_bits.size(), slabs->size());
  for (size_t s = 0; s < slabs->size(); ++s) {
    check_tensor(call, "dirty_bits", dirty_bits[s], ScalarType::Byte);
    check_length(call.op, "dirty_bits", dirty_bits[s], weights[s].size(0));
    (*slabs)[s].dirty_bits = static_cast<uint8_t*>(dirty_bits[s].data_ptr());
  }
}

void add_copy_on_write(const CallContext& call, const std::vector<Tensor>& copy_on_write,
                       std::vector<SlabState>* slabs) {
  check_one_per_slab(call.op, "copy_on_write", copy_on_write.size(), slabs->size());
  DYNEMB_CHECK(call.gpu == CallContext::kOnCpu, "dynemb::", call.op,
               ": copy_on_write is not empty, expected that only on the CPU");
  for (size_t s = 0; s < slabs->size(); ++s) {
    const Tensor& words = copy_on_write[s];
    check_words(call, "copy_on_write", words);
    DYNEMB_CHECK(words.numel() >= kCowColumns, "dynemb::", call.op, ": copy_on_write of slab ", s,
                 " has ", words.numel(), " words, expected at least ", kCowColumns);
    (*slabs)[s].copy_on_write = static_cast<int64_t*>(words.data_ptr());
    (*slabs)[s].copy_on_write_words = words.numel();
  }
}

}  // namespace

std::vector<SlabState> state_tensors(const CallContext& call, const std::vector<Tensor>& weights,
                                     const std::vector<Tensor>& state,
                                     const std::vector<Tensor>& dirty_bits,
                                     const std::vector<Tensor>& copy_on_write) {
  const char* op = call.op;
  const size_t slabs = weights.size();
  DYNEMB_CHECK(slabs > 0 && state.size() % slabs == 0, "dynemb::", op, ": state has ", state.size(),
               " tensors, expected a multiple of the ", slabs, " slabs");
  std::vector<SlabState> result(slabs, SlabState{});
  for (size_t i = 0; i < state.size(); ++i) {
    SlabState& slab = result[i % slabs];
    const Tensor& tensor = state[i];
    const Tensor& rows = weights[i % slabs];
    const int64_t dim = rows.size(1);
    check_defined(op, "state", tensor);
    const ScalarType type = tensor.scalar_type();
    check_size(op, "state", tensor, 0, rows.size(0));
    if (tensor.dim() == 1 && type == ScalarType::Int) {
      check_tensor(call, "state", tensor, ScalarType::Int);
      DYNEMB_CHECK(slab.steps == nullptr, "dynemb::", op, ": state of slab ", i % slabs,
                   " has two tensors of steps");
      slab.steps = static_cast<int32_t*>(tensor.data_ptr());
      continue;
    }
    if (tensor.dim() == 1) {
      check_tensor(call, "state", tensor, ScalarType::Float);
      DYNEMB_CHECK(slab.row_states < kMaxStates, "dynemb::", op, ": state of slab ", i % slabs,
                   " has more than ", kMaxStates, " values per row");
      slab.of_row[slab.row_states++] = static_cast<float*>(tensor.data_ptr());
      continue;
    }
    const int k = slab.element_states++;
    DYNEMB_CHECK(k < kMaxStates, "dynemb::", op, ": state of slab ", i % slabs, " has more than ",
                 kMaxStates, " values per weight");
    if (type == ScalarType::Byte) {
      check_tensor(call, "state", tensor, ScalarType::Byte);
      slab.storage[k] = Storage::kBlockFloat8;
      slab.row_bytes[k] = block_row_bytes(dim);
      check_size(op, "state", tensor, 1, slab.row_bytes[k]);
    } else {
      DYNEMB_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "dynemb::", op,
                   ": state has dtype ", dtype_name(type), ", expected float32, bfloat16 or uint8");
      slab.storage[k] = storage_of(call, "state", tensor);
      slab.row_bytes[k] = dim * static_cast<int64_t>(tensor.element_size());
      check_size(op, "state", tensor, 1, dim);
    }
    slab.element[k] = static_cast<char*>(tensor.data_ptr());
  }
  if (!dirty_bits.empty()) add_dirty_bits(call, weights, dirty_bits, &result);
  if (!copy_on_write.empty()) add_copy_on_write(call, copy_on_write, &result);
  return result;
}

const double* hyper_tensor(const CallContext& call, const Tensor& hyper, int64_t table_count) {
  check_tensor(call, "hyper", hyper, ScalarType::Double);
  check_size(call.op, "hyper", hyper, 0, table_count);
  check_size(call.op, "hyper", hyper, 1, kHyperColumns);
  return static_cast<const double*>(hyper.data_ptr());
}

}  // namespace dynemb
