// pool_rows and its gradients: sums and means of bags of rows of a plain tensor, as received from
// the ranks that own them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/memory/reserve.h"
#include "cpu/rows/args.h"
#include "cpu/rows/bags.h"

namespace dynemb::cpu {

BagArgs bag_args(const char* op, const Tensor& positions, const Tensor& offsets, int64_t features,
                 const std::optional<Tensor>& weights, int64_t rows, int64_t dim) {
  const BagTensors given = bag_tensors(op, positions, offsets, features, dim);
  check_offsets(op, given.offsets, given.bags, given.count, "positions");
  uint64_t most = 0;
  for (int64_t i = 0; i < given.count; ++i) {
    most = std::max(most, static_cast<uint64_t>(given.positions[i]));
  }
  DYNEMB_CHECK(given.count == 0 || most < static_cast<uint64_t>(rows), "dynemb::", op,
               ": positions has ", static_cast<int64_t>(most), ", expected 0 to ", rows - 1,
               ", positions of rows");
  const float* weight = position_weights(op, weights, given.count);
  return {given.positions, given.offsets, weight, given.count, given.batch, features, dim};
}

namespace {

constexpr int64_t kColumns = 32;  // of a block that stays in registers

// Divisor of a bag's sum.
DYNEMB_INLINE MeanDivisor divisor_of(const BagArgs& bags, int64_t first, int64_t last,
                                     int64_t pooling) {
  if (pooling != kPoolMean) return {1.0f, 1.0f};
  float sum = 0.0f;
  if (bags.weight == nullptr) {
    sum = static_cast<float>(last - first);
  } else {
    for (int64_t i = first; i < last; ++i) sum += bags.weight[i];
  }
  return mean_divisor(sum);
}

struct PoolJob {
  const BagArgs* bags;
  const float* rows;
  float* output;  // [batch, columns]
  int64_t pooling;
  int64_t feature;
  int64_t begin;  // bags of the feature
  int64_t end;
};

template <bool kWeighted>
DYNEMB_INLINE void pool_tile_body(const PoolJob& job, std::bool_constant<kWeighted>) {
  const BagArgs& bags = *job.bags;
  const int64_t dim = bags.dim;
  const int64_t lines = (dim + kColumnsOfUnit - 1) / kColumnsOfUnit;
  const int64_t* offset = bags.offset + job.feature * bags.batch;
  const float* weight = bags.weight;
  for (int64_t b = job.begin; b < job.end; ++b) {
    float* out = job.output + b * bags.columns() + job.feature * dim;
    const int64_t first = offset[b];
    const int64_t last = offset[b + 1];
    for (int64_t i = first; i < last; ++i) {
      if (i + kAheadRows >= bags.ids) break;
      const float* row = job.rows + bags.position[i + kAheadRows] * dim;
      for (int64_t line = 0; line < lines; ++line) {
        __builtin_prefetch(row + line * kColumnsOfUnit);
      }
    }
    int64_t c = 0;
    for (; c + kColumns <= dim; c += kColumns) {
      Floats8 sum0 = {}, sum1 = {}, sum2 = {}, sum3 = {};
      for (int64_t i = first; i < last; ++i) {
        const float* values = job.rows + bags.position[i] * dim + c;
        if constexpr (kWeighted) {
          sum0 += weight[i] * load_floats(values);
          sum1 += weight[i] * load_floats(values + kFloats);
          sum2 += weight[i] * load_floats(values + 2 * kFloats);
          sum3 += weight[i] * load_floats(values + 3 * kFloats);
        } else {
          sum0 += load_floats(values);
          sum1 += load_floats(values + kFloats);
          sum2 += load_floats(values + 2 * kFloats);
          sum3 += load_floats(values + 3 * kFloats);
        }
      }
      store_floats(out + c, sum0);
      store_floats(out + c + kFloats, sum1);
      store_floats(out + c + 2 * kFloats, sum2);
      store_floats(out + c + 3 * kFloats, sum3);
    }
    for (; c + kFloats <= dim; c += kFloats) {
      Floats8 sum = {};
      for (int64_t i = first; i < last; ++i) {
        const Floats8 values = load_floats(job.rows + bags.position[i] * dim + c);
        if constexpr (kWeighted) {
          sum += weight[i] * values;
        } else {
          sum += values;
        }
      }
      store_floats(out + c, sum);
    }
    for (; c < dim; ++c) {
      float sum = 0.0f;
      for (int64_t i = first; i < last; ++i) {
        const float value = job.rows[bags.position[i] * dim + c];
        sum += kWeighted ? weight[i] * value : value;
      }
      out[c] = sum;
    }
    if (job.pooling == kPoolMean) {
      const MeanDivisor divisor = divisor_of(bags, first, last, job.pooling);
      for (int64_t k = 0; k < dim; ++k) out[k] = divisor.divide(out[k]);
    }
  }
}
DYNEMB_SIMD_TEMPLATE_VARIANTS(template <bool kWeighted>, pool_tile,
                              (const PoolJob& job, std::bool_constant<kWeighted> weighted),
                              (job, weighted))

struct GradJob {
  const BagArgs* bags;
  const float* grad;  // [batch, columns]
  float* rows;
  int64_t pooling;
  int64_t begin;  // columns of a row
  int64_t end;
};

template <bool kScaled>
DYNEMB_INLINE void add_grad_body(const GradJob& job, std::bool_constant<kScaled>) {
  const BagArgs& bags = *job.bags;
  const int64_t dim = bags.dim;
  for (int64_t feature = 0; feature < bags.features; ++feature) {
    const int64_t* offset = bags.offset + feature * bags.batch;
    for (int64_t b = 0; b < bags.batch; ++b) {
      const float* grad = job.grad + b * bags.columns() + feature * dim;
      MeanDivisor divisor;
      if constexpr (kScaled) divisor = divisor_of(bags, offset[b], offset[b + 1], job.pooling);
      for (int64_t i = offset[b]; i < offset[b + 1]; ++i) {
        if (i + kAheadRows < bags.ids) {
          const float* next = job.rows + bags.position[i + kAheadRows] * dim;
          for (int64_t c = job.begin; c < job.end; c += kColumnsOfUnit) {
            __builtin_prefetch(next + c, 1);
          }
        }
        float factor = kScaled && bags.weight != nullptr ? bags.weight[i] : 1.0f;
        if constexpr (kScaled) factor = divisor.divide(factor);
        add_columns<kScaled>(job.rows + bags.position[i] * dim, grad, factor, job.begin, job.end);
      }
    }
  }
}
DYNEMB_SIMD_TEMPLATE_VARIANTS(template <bool kScaled>, add_grad,
                              (const GradJob& job, std::bool_constant<kScaled> scaled),
                              (job, scaled))

struct WeightGradJob {
  const BagArgs* bags;
  const float* grad;  // [batch, columns]
  const float* rows;
  float* output;  // [ids]
  int64_t pooling;
  int64_t feature;
  int64_t begin;  // bags of the feature
  int64_t end;
};

// d sum / d w_i = g . e_i;  d mean / d w_i = (g . e_i - g . mean) / sum(w), the mean over weights.
DYNEMB_INLINE void weight_grad_tile_body(const WeightGradJob& job) {
  const BagArgs& bags = *job.bags;
  const int64_t* offset = bags.offset + job.feature * bags.batch;
  for (int64_t b = job.begin; b < job.end; ++b) {
    const float* grad = job.grad + b * bags.columns() + job.feature * bags.dim;
    const int64_t first = offset[b];
    const int64_t last = offset[b + 1];
    float along_output = 0.0f;
    for (int64_t i = first; i < last; ++i) {
      if (i + kAheadRows < bags.ids) {
        prefetch_row(job.rows + bags.position[i + kAheadRows] * bags.dim, bags.dim);
      }
      job.output[i] = dot(grad, job.rows + bags.position[i] * bags.dim, bags.dim);
      along_output += bags.weight[i] * job.output[i];
    }
    if (job.pooling != kPoolMean) continue;
    const MeanDivisor divisor = divisor_of(bags, first, last, job.pooling);
    for (int64_t i = first; i < last; ++i) {
      job.output[i] = divisor.divide(job.output[i] - divisor.divide(along_output));
    }
  }
}
DYNEMB_SIMD_VARIANTS(weight_grad_tile, (const WeightGradJob& job), (job))

Tensor pool_rows(Tensor rows, Tensor positions, Tensor offsets, int64_t features,
                 std::optional<Tensor> weights, int64_t pooling) {
  const char* op = "pool_rows";
  check_matrix(op, "rows", rows);
  check_row_pooling(op, pooling);
  const BagArgs bags =
      bag_args(op, positions, offsets, features, weights, rows.size(0), rows.size(1));
  Tensor output = empty_cpu({bags.batch, bags.columns()}, ScalarType::Float);
  const auto* from = static_cast<const float*>(rows.data_ptr());
  auto* to = static_cast<float*>(output.data_ptr());
  for_each_tile(bags, [&](int64_t feature, int64_t begin, int64_t end) {
    const PoolJob job{&bags, from, to, pooling, feature, begin, end};
    if (bags.weight == nullptr) {
      pool_tile(job, std::false_type{});
    } else {
      pool_tile(job, std::true_type{});
    }
  });
  return output;
}

// BagArgs of an output gradient [batch, features * dim].
BagArgs bag_args_of_grad(const char* op, const Tensor& grad, const Tensor& positions,
                         const Tensor& offsets, int64_t features,
                         const std::optional<Tensor>& weights, int64_t rows, int64_t pooling) {
  const int64_t dim = pooled_dim(op, grad, features, rows, pooling);
  const BagArgs bags = bag_args(op, positions, offsets, features, weights, rows, dim);
  check_size(op, "grad", grad, 0, bags.batch);
  return bags;
}

Tensor pool_rows_grad(Tensor grad, Tensor positions, Tensor offsets, int64_t features, int64_t rows,
                      std::optional<Tensor> weights, int64_t pooling) {
  const BagArgs bags = bag_args_of_grad("pool_rows_grad", grad, positions, offsets, features,
                                        weights, rows, pooling);
  check_result_memory("pool_rows_grad", "rows", rows,
                      result_bytes("pool_rows_grad", "rows", rows, {rows, bags.dim}, 4));
  Tensor sums = empty_cpu({rows, bags.dim}, ScalarType::Float);
  const auto* from = static_cast<const float*>(grad.data_ptr());
  auto* to = static_cast<float*>(sums.data_ptr());
  std::fill_n(to, rows * bags.dim, 0.0f);  // not memset: a tensor without rows has no address
  for_each_column_unit(bags, [&](int64_t begin, int64_t end) {
    const GradJob job{&bags, from, to, pooling, begin, end};
    if (bags.weight == nullptr && pooling == kPoolSum) {
      add_grad(job, std::false_type{});
    } else {
      add_grad(job, std::true_type{});
    }
  });
  return sums;
}

Tensor pool_rows_weight_grad(Tensor grad, Tensor rows, Tensor positions, Tensor offsets,
                             Tensor weights, int64_t features, int64_t pooling) {
  const char* op = "pool_rows_weight_grad";
  check_matrix(op, "rows", rows);
  const BagArgs bags =
      bag_args_of_grad(op, grad, positions, offsets, features, weights, rows.size(0), pooling);
  check_size(op, "rows", rows, 1, bags.dim);
  Tensor result = empty_cpu({bags.ids}, ScalarType::Float);
  for_each_tile(bags, [&](int64_t feature, int64_t begin, int64_t end) {
    weight_grad_tile({&bags, static_cast<const float*>(grad.data_ptr()),
                      static_cast<const float*>(rows.data_ptr()),
                      static_cast<float*>(result.data_ptr()), pooling, feature, begin, end});
  });
  return result;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("pool_rows", TORCH_BOX(&dynemb::cpu::pool_rows));
  m.impl("pool_rows_grad", TORCH_BOX(&dynemb::cpu::pool_rows_grad));
  m.impl("pool_rows_weight_grad", TORCH_BOX(&dynemb::cpu::pool_rows_weight_grad));
}
