// pool_rows, pool_rows_grad: sums of bags of rows that lie in a plain tensor, as they come back
// from the ranks that own them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/floats.h"
#include "cpu/index_view.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kAhead = 16;          // rows on their way ahead of the one in use
constexpr int64_t kBagsOfTile = 256;    // of one feature: the unit of work of the forward
constexpr int64_t kColumns = 32;        // of a block that stays in registers
constexpr int64_t kColumnsOfUnit = 16;  // one cache line: the unit of work of the backward

struct Bags {
  const int64_t* position;
  const int64_t* offset;
  int64_t ids;
  int64_t batch;
  int64_t features;
  int64_t dim;

  int64_t columns() const { return features * dim; }
};

// Checks all values: the rows are read and written without.
Bags bags_of(const char* op, const Tensor& positions, const Tensor& offsets, int64_t features,
             int64_t rows, int64_t dim) {
  check_words(op, "positions", positions);
  check_words(op, "offsets", offsets);
  STD_TORCH_CHECK(features >= 1, "dynemb::", op, ": features is ", features,
                  ", expected at least 1");
  const int64_t bags = offsets.size(0) - 1;
  STD_TORCH_CHECK(bags >= 0 && bags % features == 0, "dynemb::", op, ": offsets has ", bags + 1,
                  " elements, expected one more than a multiple of features, ", features);
  const int64_t count = positions.size(0);
  const auto* offset = static_cast<const int64_t*>(offsets.data_ptr());
  check_offsets(op, offset, bags, count, "positions");
  const auto* position = static_cast<const int64_t*>(positions.data_ptr());
  uint64_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    most = std::max(most, static_cast<uint64_t>(position[i]));
  }
  STD_TORCH_CHECK(count == 0 || most < static_cast<uint64_t>(rows), "dynemb::", op,
                  ": positions has ", static_cast<int64_t>(most), ", expected 0 to ", rows - 1,
                  ", positions of rows");
  return {position, offset, count, bags / features, features, dim};
}

struct PoolJob {
  const Bags* bags;
  const float* rows;
  float* output;  // [batch, columns]
  int64_t feature;
  int64_t begin;  // bags of the feature
  int64_t end;
};

DYNEMB_INLINE void pool_tile_body(const PoolJob& job) {
  const Bags& bags = *job.bags;
  const int64_t dim = bags.dim;
  const int64_t lines = (dim + kColumnsOfUnit - 1) / kColumnsOfUnit;
  const int64_t* offset = bags.offset + job.feature * bags.batch;
  for (int64_t b = job.begin; b < job.end; ++b) {
    float* out = job.output + b * bags.columns() + job.feature * dim;
    const int64_t first = offset[b];
    const int64_t last = offset[b + 1];
    for (int64_t i = first; i < last; ++i) {
      if (i + kAhead >= bags.ids) break;
      const float* row = job.rows + bags.position[i + kAhead] * dim;
      for (int64_t line = 0; line < lines; ++line) {
        __builtin_prefetch(row + line * kColumnsOfUnit);
      }
    }
    int64_t c = 0;
    for (; c + kColumns <= dim; c += kColumns) {
      Floats8 sum0 = {}, sum1 = {}, sum2 = {}, sum3 = {};
      for (int64_t i = first; i < last; ++i) {
        const float* values = job.rows + bags.position[i] * dim + c;
        sum0 += load_floats(values);
        sum1 += load_floats(values + kFloats);
        sum2 += load_floats(values + 2 * kFloats);
        sum3 += load_floats(values + 3 * kFloats);
      }
      store_floats(out + c, sum0);
      store_floats(out + c + kFloats, sum1);
      store_floats(out + c + 2 * kFloats, sum2);
      store_floats(out + c + 3 * kFloats, sum3);
    }
    for (; c < dim; ++c) {
      float sum = 0.0f;
      for (int64_t i = first; i < last; ++i) sum += job.rows[bags.position[i] * dim + c];
      out[c] = sum;
    }
  }
}
DYNEMB_SIMD_VARIANTS(pool_tile, (const PoolJob& job), (job))

struct GradJob {
  const Bags* bags;
  const float* grad;  // [batch, columns]
  float* rows;
  int64_t begin;  // columns of a row
  int64_t end;
};

DYNEMB_INLINE void add_grad_body(const GradJob& job) {
  const Bags& bags = *job.bags;
  const int64_t dim = bags.dim;
  for (int64_t feature = 0; feature < bags.features; ++feature) {
    const int64_t* offset = bags.offset + feature * bags.batch;
    for (int64_t b = 0; b < bags.batch; ++b) {
      const float* grad = job.grad + b * bags.columns() + feature * dim;
      for (int64_t i = offset[b]; i < offset[b + 1]; ++i) {
        if (i + kAhead < bags.ids) {
          const float* next = job.rows + bags.position[i + kAhead] * dim;
          for (int64_t c = job.begin; c < job.end; c += kColumnsOfUnit) {
            __builtin_prefetch(next + c, 1);
          }
        }
        float* row = job.rows + bags.position[i] * dim;
        int64_t c = job.begin;
        for (; c + kFloats <= job.end; c += kFloats) {
          store_floats(row + c, load_floats(row + c) + load_floats(grad + c));
        }
        for (; c < job.end; ++c) row[c] += grad[c];
      }
    }
  }
}
DYNEMB_SIMD_VARIANTS(add_grad, (const GradJob& job), (job))

void check_rows(const char* op, const char* name, const Tensor& rows) {
  check_tensor(op, name, rows, ScalarType::Float);
  STD_TORCH_CHECK(rows.dim() == 2, "dynemb::", op, ": ", name, " has ", rows.dim(),
                  " dimensions, expected 2");
}

Tensor pool_rows(Tensor rows, Tensor positions, Tensor offsets, int64_t features) {
  const char* op = "pool_rows";
  check_rows(op, "rows", rows);
  const Bags bags = bags_of(op, positions, offsets, features, rows.size(0), rows.size(1));
  Tensor output = empty_cpu({bags.batch, bags.columns()}, ScalarType::Float);
  const auto* from = static_cast<const float*>(rows.data_ptr());
  auto* to = static_cast<float*>(output.data_ptr());
  const int64_t tiles = (bags.batch + kBagsOfTile - 1) / kBagsOfTile;
  parallel_units(tiles * features, bags.ids, [&](int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t begin = unit % tiles * kBagsOfTile;
      const int64_t end = std::min(begin + kBagsOfTile, bags.batch);
      pool_tile(PoolJob{&bags, from, to, unit / tiles, begin, end});
    }
  });
  return output;
}

// Threads have columns of their own, so that sums keep the order of bags.
Tensor pool_rows_grad(Tensor grad, Tensor positions, Tensor offsets, int64_t features,
                      int64_t rows) {
  const char* op = "pool_rows_grad";
  check_rows(op, "grad", grad);
  STD_TORCH_CHECK(rows >= 0, "dynemb::", op, ": rows is ", rows, ", expected at least 0");
  STD_TORCH_CHECK(features >= 1 && grad.size(1) % features == 0, "dynemb::", op, ": grad has ",
                  grad.size(1), " columns, expected a multiple of features, ", features);
  const Bags bags = bags_of(op, positions, offsets, features, rows, grad.size(1) / features);
  check_size(op, "grad", grad, 0, bags.batch);
  Tensor sums = empty_cpu({rows, bags.dim}, ScalarType::Float);
  const auto* from = static_cast<const float*>(grad.data_ptr());
  auto* to = static_cast<float*>(sums.data_ptr());
  std::memset(to, 0, sizeof(float) * static_cast<size_t>(rows * bags.dim));
  const int64_t units = (bags.dim + kColumnsOfUnit - 1) / kColumnsOfUnit;
  parallel_units(units, bags.ids, [&](int64_t first, int64_t last) {
    add_grad(GradJob{&bags, from, to, first * kColumnsOfUnit,
                     std::min(last * kColumnsOfUnit, bags.dim)});
  });
  return sums;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("pool_rows", TORCH_BOX(&dynemb::cpu::pool_rows));
  m.impl("pool_rows_grad", TORCH_BOX(&dynemb::cpu::pool_rows_grad));
}
