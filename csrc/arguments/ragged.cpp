#include "arguments/ragged.h"

#include <algorithm>
#include <cstring>

#include "arguments/pool_rows.h"
#include "core/rows/storage.h"

namespace dynemb {

int64_t value_bytes(const char* op, const char* name, size_t i, const Tensor& values) {
  check_defined(op, name, i, values);
  switch (values.scalar_type()) {
    case ScalarType::Bool:
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
      return 1;
    case ScalarType::Short:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Int:
    case ScalarType::Float:
      return 4;
    case ScalarType::Long:
    case ScalarType::Double:
      return 8;
    default:
      DYNEMB_CHECK(false, "dynemb::", op, ": ", entry_name(name, i),
                   " has a dtype that is not of 1, 2, 4 or 8 bytes");
  }
}

std::vector<int64_t> check_values(const CallContext& call, const char* name,
                                  const std::vector<Tensor>& list, int64_t dims) {
  check_entries(call.op, name, list.size(), list.size());
  std::vector<int64_t> bytes;
  bytes.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor& tensor = list[i];
    bytes.push_back(value_bytes(call.op, name, i, tensor));
    DYNEMB_CHECK(tensor.is_contiguous(), "dynemb::", call.op, ": ", entry_name(name, i),
                 " is not contiguous: call .contiguous()");
    DYNEMB_CHECK(dims == kAnyDims || tensor.dim() == dims, "dynemb::", call.op, ": ",
                 entry_name(name, i), " has ", tensor.dim(), " dimensions, expected ", dims);
  }
  check_devices(call, name, list);
  return bytes;
}

namespace {

// Name of the list of the features that `name` belongs to: "x_weighted" for "x_weights".
std::string weighted_name(const char* name) {
  std::string result = name;
  return result.replace(result.rfind("weights"), std::string::npos, "weighted");
}

// The position of each feature's weights in `weights`, or -1.
std::vector<int64_t> check_weights(const CallContext& call, const char* name,
                                   const std::vector<Tensor>& weights,
                                   const std::vector<int64_t>& weighted,
                                   const std::vector<Tensor>& values) {
  std::vector<int64_t> of_feature(values.size(), -1);
  DYNEMB_CHECK(weights.size() == weighted.size(), "dynemb::", call.op, ": ", name, " has ",
               weights.size(), " entries, expected one for each of the ", weighted.size(), " in ",
               weighted_name(name));
  for (size_t k = 0; k < weights.size(); ++k) {
    const int64_t f = weighted[k];
    DYNEMB_CHECK(f >= 0 && f < static_cast<int64_t>(values.size()), "dynemb::", call.op, ": ",
                 weighted_name(name), " has feature ", f, ", expected 0 to ",
                 static_cast<int64_t>(values.size()) - 1);
    const std::string entry = entry_name(name, static_cast<size_t>(f));
    check_tensor(call, entry.c_str(), weights[k], ScalarType::Float);
    DYNEMB_CHECK(weights[k].dim() == 1 && weights[k].size(0) == values[f].size(0),
                 "dynemb::", call.op, ": ", entry, " has ", weights[k].numel(),
                 " elements, expected one for each of ", values[f].size(0), " values");
    of_feature[f] = static_cast<int64_t>(k);
  }
  return of_feature;
}

}  // namespace

void check_offset_lists(const CallContext& call, const char* name,
                        const std::vector<Tensor>& offsets, size_t features) {
  check_list(call, name, offsets, features, ScalarType::Long, 1);
  for (size_t i = 0; i < offsets.size(); ++i) {
    DYNEMB_CHECK(offsets[i].size(0) > 0, "dynemb::", call.op, ": ", entry_name(name, i),
                 " is empty, expected [rows + 1]");
  }
}

std::vector<int64_t> check_ragged(const CallContext& call, const char* values_name,
                                  const std::vector<Tensor>& values, const char* offsets_name,
                                  const std::vector<Tensor>& offsets, const char* weights_name,
                                  const std::vector<Tensor>& weights,
                                  const std::vector<int64_t>& weighted) {
  check_values(call, values_name, values, 1);
  check_offset_lists(call, offsets_name, offsets, values.size());
  return check_weights(call, weights_name, weights, weighted, values);
}

void check_numbers(const char* op, const char* name, const std::vector<int64_t>& numbers,
                   size_t features, int64_t least) {
  check_entries(op, name, numbers.size(), features);
  for (size_t i = 0; i < numbers.size(); ++i) {
    DYNEMB_CHECK(numbers[i] >= least, "dynemb::", op, ": ", entry_name(name, i), " is ", numbers[i],
                 ", expected at least ", least);
  }
}

void check_same_rows(const char* op, const std::vector<Tensor>& x_offsets,
                     const std::vector<Tensor>& y_offsets) {
  for (size_t f = 0; f < x_offsets.size(); ++f) {
    DYNEMB_CHECK(x_offsets[f].size(0) == y_offsets[f].size(0), "dynemb::", op, ": ",
                 entry_name("y_offsets", f), " has ", y_offsets[f].size(0) - 1,
                 " rows, expected those of ", entry_name("x_offsets", f), ", ",
                 x_offsets[f].size(0) - 1);
  }
}

void check_padding(const char* op, const std::string& name, int64_t value, int64_t most,
                   int64_t bytes) {
  constexpr int64_t kMostBytes = int64_t{1} << 30;
  DYNEMB_CHECK(value <= most || bytes <= kMostBytes, "dynemb::", op, ": ", name, " is ", value,
               ", with which the result takes ", bytes >> 20,
               " MiB, nearly all of it padding, because no row can have more than ", most,
               ". Give at most ", most, ", or a value for at most ", kMostBytes >> 20, " MiB");
}

void check_tiles(const char* op, const std::vector<int64_t>& tile_lens,
                 const std::vector<int64_t>& pad_left) {
  check_numbers(op, "tile_lens", tile_lens, tile_lens.size(), 1);
  check_entries(op, "pad_left", pad_left.size(), tile_lens.size());
}

void check_tile_sizes(const char* op, const std::vector<int64_t>& tile_lens, int64_t batch,
                      int64_t dim, int64_t positions) {
  for (size_t f = 0; f < tile_lens.size(); ++f) {
    int64_t columns = 0;
    int64_t bytes = 0;
    // a row has to be addressable even if the batch is empty
    const bool fits =
        !__builtin_mul_overflow(tile_lens[f], std::max<int64_t>(4 * dim, 1), &columns) &&
        !__builtin_mul_overflow(columns, std::max<int64_t>(batch, 1), &bytes);
    DYNEMB_CHECK(fits, "dynemb::", op, ": ", entry_name("tile_lens", f), " is ", tile_lens[f],
                 ", with which tiles of ", batch, " bags and dim ", dim,
                 " are larger than an address space");
    check_padding(op, entry_name("tile_lens", f), tile_lens[f], positions, batch > 0 ? bytes : 0);
  }
}

int64_t tiled_dim(const CallContext& call, const std::vector<Tensor>& grads, int64_t rows,
                  const std::vector<int64_t>& tile_lens, const std::vector<int64_t>& pad_left) {
  check_tiles(call.op, tile_lens, pad_left);
  check_row_count(call.op, rows);
  check_list(call, "grads", grads, tile_lens.size(), ScalarType::Float, 2);
  return grads[0].size(1) / tile_lens[0];
}

void check_tile_grads(const char* op, const std::vector<Tensor>& grads,
                      const std::vector<int64_t>& tile_lens, int64_t batch, int64_t dim) {
  for (size_t f = 0; f < grads.size(); ++f) {
    const std::string entry = entry_name("grads", f);
    check_size(op, entry.c_str(), grads[f], 0, batch);
    int64_t columns = 0;
    DYNEMB_CHECK(!__builtin_mul_overflow(tile_lens[f], dim, &columns), "dynemb::", op, ": ",
                 entry_name("tile_lens", f), " is ", tile_lens[f], ", with which a row of dim ",
                 dim, " is larger than an address space");
    check_size(op, entry.c_str(), grads[f], 1, columns);
  }
}

Depths check_depths(const CallContext& call, const std::vector<Tensor>& values,
                    const std::vector<Tensor>& offsets, const std::vector<int64_t>& depths,
                    const std::vector<int64_t>& lengths) {
  check_values(call, "values", values, 1);
  check_entries(call.op, "depths", depths.size(), values.size());
  check_offset_lists(call, "offsets", offsets, offsets.size());
  check_numbers(call.op, "depths", depths, values.size(), 1);
  Depths result{{0}};
  // depths are bounded by the number of offsets, so sums stay small
  const auto most = static_cast<int64_t>(offsets.size());
  for (size_t f = 0; f < depths.size(); ++f) {
    DYNEMB_CHECK(depths[f] <= most, "dynemb::", call.op, ": ", entry_name("depths", f), " is ",
                 depths[f], ", but there are ", most, " offsets");
    result.first.push_back(result.first.back() + depths[f]);
  }
  const auto total = static_cast<size_t>(result.first.back());
  DYNEMB_CHECK(offsets.size() == total && lengths.size() == total, "dynemb::", call.op, ": ",
               offsets.size(), " offsets and ", lengths.size(), " lengths, expected ", total,
               ", one for each depth of a feature");
  check_numbers(call.op, "lengths", lengths, total, 0);
  return result;
}

std::vector<int64_t> check_dense(const CallContext& call, const std::vector<Tensor>& dense) {
  std::vector<int64_t> bytes = check_values(call, "dense", dense, kAnyDims);
  for (size_t f = 0; f < dense.size(); ++f) {
    DYNEMB_CHECK(dense[f].dim() >= 2, "dynemb::", call.op, ": ", entry_name("dense", f), " has ",
                 dense[f].dim(), " dimensions, expected at least 2");
  }
  return bytes;
}

namespace {

template <class T>
int64_t bits_of(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return static_cast<int64_t>(bits);
}

bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

int64_t bytes_of(ScalarType dtype) {
  return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2;
}

}  // namespace

int64_t value_bits(ScalarType dtype, double floating, int64_t integer) {
  switch (dtype) {
    case ScalarType::Double:
      return bits_of(floating);
    case ScalarType::Float:
      return bits_of(static_cast<float>(floating));
    case ScalarType::Half:
      return bits_of(float16_nearest(static_cast<float>(floating)));
    case ScalarType::BFloat16:
      return bits_of(bfloat16_nearest(static_cast<float>(floating)));
    case ScalarType::Bool:
      return integer != 0 ? 1 : 0;
    default:
      return integer;
  }
}

int64_t equal_mask(ScalarType dtype, double floating) {
  if (!is_floating(dtype) || floating != 0.0) return -1;
  return ~static_cast<int64_t>(uint64_t{1} << (bytes_of(dtype) * 8 - 1));
}

}  // namespace dynemb
