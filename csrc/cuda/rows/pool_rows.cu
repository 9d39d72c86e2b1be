// pool_rows and its gradients: sums and means of bags of rows of a plain tensor.
#include "cuda/rows/bags.h"

namespace dynemb::cuda {
namespace {

// Divisor of a bag's sum.
__device__ __forceinline__ MeanDivisor divisor_of(const BagArgs& args, int64_t begin, int64_t end) {
  float sum = 0.0f;
  if (args.weights == nullptr) {
    sum = static_cast<float>(end - begin);
  } else {
    for (int64_t i = begin; i < end; ++i) sum += args.weights[i];
  }
  return mean_divisor(sum);
}

// A group of lanes per bag: 8 to 12 bytes a position in order and a random row of 4 * dim bytes;
// 4 * dim written a bag.
template <class Group>
__global__ void pool_plain_bags(Group group, BagArgs args, const float* rows, bool mean,
                                float* output) {
  constexpr int kWidth = Group::kWidth;
  struct Position {
    int64_t row;  // -1: none
    float weight;
  };
  struct Row {
    bool known;
    float weight;
    Floats<kWidth> values;
  };
  const int64_t bag = group.number();
  if (bag >= args.bags.rows) return;
  if (group.lane() == 0) args.check(bag);
  const int64_t begin = args.bags.begin(bag);
  const int64_t end = args.bags.end(bag);
  float* to = output + args.pooled_offset(bag);
  for (int64_t base = 0; base < args.dim; base += group.stride()) {
    const int64_t column = group.column(base);
    Floats<kWidth> sum = zero_floats<kWidth>();
    stream_items(
        group, begin, end,
        [&](int64_t i) {
          return i < end ? Position{args.row_at(i), args.weight_at(i)} : Position{-1, 0.0f};
        },
        [&](const Position& position, int lane, bool wanted) {
          const int64_t number = group.broadcast(static_cast<long long>(position.row), lane);
          Row row{number >= 0, group.broadcast(position.weight, lane), zero_floats<kWidth>()};
          if (wanted && row.known && column < args.dim) {
            row.values = load_floats<kWidth>(rows + number * args.dim + column);
          }
          return row;
        },
        [&](const Row& row, int64_t) {
          if (row.known) add_scaled(&sum, row.weight, row.values);
        });
    if (mean) {
      const MeanDivisor divisor = divisor_of(args, begin, end);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum.value[k] = divisor.divide(sum.value[k]);
    }
    if (column < args.dim) store_floats<kWidth>(to + column, sum);
  }
}

// A thread per bag: 4 bytes of weights a position.
__global__ void scale_plain_bags(BagArgs args, MeanDivisor* divisor) {
  const int64_t bag = thread_number();
  if (bag >= args.bags.rows) return;
  divisor[bag] = divisor_of(args, args.bags.begin(bag), args.bags.end(bag));
}

// A thread per position, and per bag: the gradient for the position's row. A binary search in
// offsets, 8 bytes read and 20 written a position.
__global__ void make_pool_terms(BagArgs args, const float* grad, const MeanDivisor* divisor,
                                Terms terms) {
  const int64_t i = thread_number();
  if (i < args.bags.rows) args.check(i);
  if (i >= args.bags.count) return;
  const int64_t bag = args.bags.row_of(i);
  const bool inside = args.bags.rows > 0 && i >= args.bags.begin(bag) && i < args.bags.end(bag);
  const int64_t row = inside ? args.row_at(i) : -1;
  terms.position[i] = static_cast<uint32_t>(i);
  terms.key[i] = row < 0 ? terms.missing : static_cast<uint32_t>(row);
  if (row < 0) return;
  terms.from[i] = grad + args.pooled_offset(bag);
  const float factor = args.weight_at(i);
  terms.factor[i] = divisor == nullptr ? factor : divisor[bag].divide(factor);
}

// d sum / d w_i = g . e_i;  d mean / d w_i = (g . e_i - g . mean) / sum(w), the mean over weights.
// A group of lanes per bag: bytes as in pool_plain_bags, and 4 * dim of gradient a position, from
// the caches.
template <class Group>
__global__ void grad_of_plain_weights(Group group, BagArgs args, const float* grad,
                                      const float* rows, bool mean, float* output) {
  constexpr int kWidth = Group::kWidth;
  const int64_t bag = group.number();
  if (bag >= args.bags.rows) return;
  if (group.lane() == 0) args.check(bag);
  const int64_t begin = args.bags.begin(bag);
  const int64_t end = args.bags.end(bag);
  const float* gradient = grad + args.pooled_offset(bag);
  float along_output = 0.0f;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = args.row_at(i);
    float product = 0.0f;
    for (int64_t column = group.column(0); row >= 0 && column < args.dim;
         column += group.stride()) {
      add_products(&product, load_floats<kWidth>(gradient + column),
                   load_floats<kWidth>(rows + row * args.dim + column));
    }
    product = group.sum(product);
    along_output += args.weight_at(i) * product;
    if (group.lane() == 0) output[i] = product;
  }
  if (!mean) return;
  const MeanDivisor divisor = divisor_of(args, begin, end);
  __syncwarp(group.mask());  // lane 0 has written the products
  for (int64_t i = begin + group.lane(); i < end; i += group.size()) {
    output[i] = divisor.divide(output[i] - divisor.divide(along_output));
  }
}

Tensor pool_rows(Tensor rows, Tensor positions, Tensor offsets, int64_t features,
                 std::optional<Tensor> weights, int64_t pooling) {
  const Call call("pool_rows", "rows", rows);
  check_matrix(call, "rows", rows);
  check_row_pooling(call.op, pooling);
  const BagArgs args =
      bag_args(call, positions, offsets, features, weights, rows.size(0), rows.size(1));
  Tensor output = call.empty({args.batch, features * args.dim}, ScalarType::Float);
  const auto* from = static_cast<const float*>(rows.data_ptr());
  auto* to = static_cast<float*>(output.data_ptr());
  if (args.bag_total() == 0) return output;
  with_lanes(args.dim, is_aligned(from) && is_aligned(to), [&](auto group) {
    call.launch(pool_plain_bags<decltype(group)>, args.bag_total() * group.size(), 0, group, args,
                from, pooling == kPoolMean, to);
  });
  return output;
}

BagArgs bag_args_of_grad(const Call& call, const Tensor& grad, const Tensor& positions,
                         const Tensor& offsets, int64_t features,
                         const std::optional<Tensor>& weights, int64_t rows, int64_t pooling) {
  const int64_t dim = pooled_dim(call, grad, features, rows, pooling);
  const BagArgs args = bag_args(call, positions, offsets, features, weights, rows, dim);
  check_size(call.op, "grad", grad, 0, args.batch);
  return args;
}

Tensor pool_rows_grad(Tensor grad, Tensor positions, Tensor offsets, int64_t features, int64_t rows,
                      std::optional<Tensor> weights, int64_t pooling) {
  const Call call("pool_rows_grad", "grad", grad);
  const BagArgs args =
      bag_args_of_grad(call, grad, positions, offsets, features, weights, rows, pooling);
  result_bytes(call.op, "rows", rows, {rows, args.dim}, 4);
  const auto* from = static_cast<const float*>(grad.data_ptr());
  const RowTerms terms(call, args);
  Scratch scratch;
  const auto divisor = scratch.add<MeanDivisor>(pooling == kPoolMean ? args.bag_total() : 0);
  scratch.allocate(call);
  const bool mean = pooling == kPoolMean && args.bag_total() > 0;
  if (mean) call.launch(scale_plain_bags, args.bag_total(), 0, args, scratch.get(divisor));
  const int64_t threads = std::max(args.count(), args.bag_total());
  call.launch(make_pool_terms, threads, 0, args, from, mean ? scratch.get(divisor) : nullptr,
              terms.terms());
  return terms.sum(call, is_aligned(from));
}

Tensor pool_rows_weight_grad(Tensor grad, Tensor rows, Tensor positions, Tensor offsets,
                             Tensor weights, int64_t features, int64_t pooling) {
  const Call call("pool_rows_weight_grad", "grad", grad);
  check_matrix(call, "rows", rows);
  const BagArgs args =
      bag_args_of_grad(call, grad, positions, offsets, features, weights, rows.size(0), pooling);
  check_size(call.op, "rows", rows, 1, args.dim);
  Tensor result = call.empty({args.count()}, ScalarType::Float);
  // positions beyond the last offset (an error) belong to no bag
  call.fill(result.data_ptr(), 0, args.count() * 4);
  if (args.bag_total() == 0) return result;
  const auto* g = static_cast<const float*>(grad.data_ptr());
  const auto* r = static_cast<const float*>(rows.data_ptr());
  with_lanes(args.dim, is_aligned(g) && is_aligned(r), [&](auto group) {
    call.launch(grad_of_plain_weights<decltype(group)>, args.bag_total() * group.size(), 0, group,
                args, g, r, pooling == kPoolMean, static_cast<float*>(result.data_ptr()));
  });
  return result;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("pool_rows", TORCH_BOX(&dynemb::cuda::pool_rows));
  m.impl("pool_rows_grad", TORCH_BOX(&dynemb::cuda::pool_rows_grad));
  m.impl("pool_rows_weight_grad", TORCH_BOX(&dynemb::cuda::pool_rows_weight_grad));
}
