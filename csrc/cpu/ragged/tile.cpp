// ragged_tile and its gradients: the first rows of each bag side by side.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "arguments/ragged.h"
#include "cpu/features/lists.h"
#include "cpu/memory/reserve.h"
#include "cpu/rows/bags.h"

namespace dynemb::cpu {
namespace {

// The places of a bag's rows in a tile: positions [first, first + count) at `slot` and after it.
struct Placed {
  int64_t first;
  int64_t count;
  int64_t slot;
};
DYNEMB_INLINE Placed placed(const int64_t* offset, int64_t b, int64_t tile_len, bool pad_left) {
  const int64_t length = offset[b + 1] - offset[b];
  const int64_t count = length < tile_len ? length : tile_len;
  return {offset[b], count, pad_left ? tile_len - count : 0};
}

struct TileJob {
  const BagArgs* bags;
  const float* rows;
  float* output;  // [batch, tile_len * dim]
  int64_t tile_len;
  bool pad_left;
  int64_t feature;
  int64_t begin;  // bags of the feature
  int64_t end;
};

DYNEMB_INLINE void write_tiles_body(const TileJob& job) {
  const BagArgs& bags = *job.bags;
  const int64_t dim = bags.dim;
  const int64_t* offset = bags.offset + job.feature * bags.batch;
  const size_t row_bytes = sizeof(float) * static_cast<size_t>(dim);
  if (row_bytes == 0) return;  // tensors without elements have no memory
  for (int64_t b = job.begin; b < job.end; ++b) {
    const Placed place = placed(offset, b, job.tile_len, job.pad_left);
    float* out = job.output + b * job.tile_len * dim;
    const size_t empty = row_bytes * static_cast<size_t>(job.tile_len - place.count);
    std::memset(job.pad_left ? out : out + place.count * dim, 0, empty);
    out += place.slot * dim;
    for (int64_t j = 0; j < place.count; ++j, out += dim) {
      const int64_t i = place.first + j;
      if (i + kAheadRows < bags.ids) {
        prefetch_row(job.rows + bags.position[i + kAheadRows] * dim, dim);
      }
      const float* row = job.rows + bags.position[i] * dim;
      if (bags.weight == nullptr) {
        std::memcpy(out, row, row_bytes);
      } else {
        for (int64_t c = 0; c < dim; ++c) out[c] = bags.weight[i] * row[c];
      }
    }
  }
}
DYNEMB_SIMD_VARIANTS(write_tiles, (const TileJob& job), (job))

std::vector<Tensor> ragged_tile(Tensor rows, Tensor positions, Tensor offsets,
                                std::optional<Tensor> weights, std::vector<int64_t> tile_lens,
                                std::vector<int64_t> pad_left) {
  const char* op = "ragged_tile";
  check_matrix(op, "rows", rows);
  check_tiles(op, tile_lens, pad_left);
  const auto features = static_cast<int64_t>(tile_lens.size());
  const BagArgs bags =
      bag_args(op, positions, offsets, features, weights, rows.size(0), rows.size(1));
  check_tile_sizes(op, tile_lens, bags.batch, bags.dim, bags.ids);
  std::vector<Tensor> tiles;
  for (int64_t f = 0; f < features; ++f) {
    check_result_memory(op, entry_name("tile_lens", static_cast<size_t>(f)).c_str(), tile_lens[f],
                        4 * bags.batch * tile_lens[f] * bags.dim);
    tiles.push_back(empty_cpu({bags.batch, tile_lens[f] * bags.dim}, ScalarType::Float));
  }
  const auto* from = static_cast<const float*>(rows.data_ptr());
  for_each_tile(bags, [&](int64_t f, int64_t begin, int64_t end) {
    write_tiles({&bags, from, static_cast<float*>(tiles[f].data_ptr()), tile_lens[f],
                 pad_left[f] != 0, f, begin, end});
  });
  return tiles;
}

BagArgs bag_args_of_grads(const char* op, const std::vector<Tensor>& grads, const Tensor& positions,
                          const Tensor& offsets, const std::optional<Tensor>& weights, int64_t rows,
                          const std::vector<int64_t>& tile_lens,
                          const std::vector<int64_t>& pad_left) {
  const int64_t dim = tiled_dim(op, grads, rows, tile_lens, pad_left);
  const BagArgs bags =
      bag_args(op, positions, offsets, static_cast<int64_t>(tile_lens.size()), weights, rows, dim);
  check_tile_grads(op, grads, tile_lens, bags.batch, dim);
  return bags;
}

struct TileGradJob {
  const BagArgs* bags;
  const std::vector<const float*>* grads;  // [batch, tile_len * dim] of each feature
  const int64_t* tile_lens;
  const int64_t* pad_left;
  float* rows;
  int64_t begin;  // columns of a row
  int64_t end;
};

DYNEMB_INLINE void add_tile_grads_body(const TileGradJob& job) {
  const BagArgs& bags = *job.bags;
  const int64_t dim = bags.dim;
  for (int64_t f = 0; f < bags.features; ++f) {
    const int64_t* offset = bags.offset + f * bags.batch;
    for (int64_t b = 0; b < bags.batch; ++b) {
      const Placed place = placed(offset, b, job.tile_lens[f], job.pad_left[f] != 0);
      const float* grad = (*job.grads)[f] + (b * job.tile_lens[f] + place.slot) * dim;
      for (int64_t j = 0; j < place.count; ++j, grad += dim) {
        const int64_t i = place.first + j;
        float* row = job.rows + bags.position[i] * dim;
        if (bags.weight == nullptr) {
          add_columns<false>(row, grad, 1.0f, job.begin, job.end);
        } else {
          add_columns<true>(row, grad, bags.weight[i], job.begin, job.end);
        }
      }
    }
  }
}
DYNEMB_SIMD_VARIANTS(add_tile_grads, (const TileGradJob& job), (job))

std::vector<const float*> float_data(const std::vector<Tensor>& list) {
  std::vector<const float*> data;
  for (const Tensor& tensor : list) data.push_back(static_cast<const float*>(tensor.data_ptr()));
  return data;
}

Tensor ragged_tile_grad(std::vector<Tensor> grads, Tensor positions, Tensor offsets,
                        std::optional<Tensor> weights, int64_t rows, std::vector<int64_t> tile_lens,
                        std::vector<int64_t> pad_left) {
  const BagArgs bags = bag_args_of_grads("ragged_tile_grad", grads, positions, offsets, weights,
                                         rows, tile_lens, pad_left);
  const std::vector<const float*> from = float_data(grads);
  check_result_memory("ragged_tile_grad", "rows", rows,
                      result_bytes("ragged_tile_grad", "rows", rows, {rows, bags.dim}, 4));
  Tensor sums = empty_cpu({rows, bags.dim}, ScalarType::Float);
  auto* to = static_cast<float*>(sums.data_ptr());
  std::fill_n(to, rows * bags.dim, 0.0f);  // not memset: a tensor without rows has no address
  for_each_column_unit(bags, [&](int64_t begin, int64_t end) {
    add_tile_grads({&bags, &from, tile_lens.data(), pad_left.data(), to, begin, end});
  });
  return sums;
}

struct TileWeightGradJob {
  const BagArgs* bags;
  const float* grad;  // [batch, tile_len * dim]
  const float* rows;
  float* output;  // [ids]
  int64_t tile_len;
  bool pad_left;
  int64_t feature;
  int64_t begin;  // bags of the feature
  int64_t end;
};

DYNEMB_INLINE void tile_weight_grads_body(const TileWeightGradJob& job) {
  const BagArgs& bags = *job.bags;
  const int64_t dim = bags.dim;
  const int64_t* offset = bags.offset + job.feature * bags.batch;
  for (int64_t b = job.begin; b < job.end; ++b) {
    const Placed place = placed(offset, b, job.tile_len, job.pad_left);
    const float* grad = job.grad + (b * job.tile_len + place.slot) * dim;
    for (int64_t i = offset[b]; i < offset[b + 1]; ++i) {
      const int64_t j = i - place.first;
      job.output[i] =
          j < place.count ? dot(grad + j * dim, job.rows + bags.position[i] * dim, dim) : 0.0f;
    }
  }
}
DYNEMB_SIMD_VARIANTS(tile_weight_grads, (const TileWeightGradJob& job), (job))

Tensor ragged_tile_weight_grad(std::vector<Tensor> grads, Tensor rows, Tensor positions,
                               Tensor offsets, std::vector<int64_t> tile_lens,
                               std::vector<int64_t> pad_left) {
  const char* op = "ragged_tile_weight_grad";
  check_matrix(op, "rows", rows);
  const BagArgs bags = bag_args_of_grads(op, grads, positions, offsets, std::nullopt, rows.size(0),
                                         tile_lens, pad_left);
  check_size(op, "rows", rows, 1, bags.dim);
  Tensor result = empty_cpu({bags.ids}, ScalarType::Float);
  for_each_tile(bags, [&](int64_t f, int64_t begin, int64_t end) {
    tile_weight_grads({&bags, static_cast<const float*>(grads[f].data_ptr()),
                       static_cast<const float*>(rows.data_ptr()),
                       static_cast<float*>(result.data_ptr()), tile_lens[f], pad_left[f] != 0, f,
                       begin, end});
  });
  return result;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("ragged_tile", TORCH_BOX(&dynemb::cpu::ragged_tile));
  m.impl("ragged_tile_grad", TORCH_BOX(&dynemb::cpu::ragged_tile_grad));
  m.impl("ragged_tile_weight_grad", TORCH_BOX(&dynemb::cpu::ragged_tile_weight_grad));
}
