#include "cuda/rows/bags.h"

namespace dynemb::cuda {
namespace {

// A group of lanes per run of one row: 4 * dim random bytes a position, in order; 4 * dim written.
template <class Group>
__global__ void sum_terms(Group group, Terms terms, const uint32_t* positions, const int32_t* begin,
                          const int64_t* head, int64_t dim, float* sums) {
  constexpr int kWidth = Group::kWidth;
  constexpr int kInFlight = 4;
  const int64_t runs = head[kRunCount];
  for (int64_t r = group.number(); r < runs; r += group.total()) {
    const int64_t first = begin[r];
    const int64_t end = begin[r + 1];
    float* to = sums + terms.key[positions[first]] * dim;
    for (int64_t base = 0; base < dim; base += group.size() * kWidth) {
      const int64_t column = base + group.lane() * kWidth;
      Floats<kWidth> sum = zero_floats<kWidth>();
      for (int64_t i = first; i < end; i += group.size()) {
        const int64_t own = i + group.lane();
        const uint32_t position = own < end ? positions[own] : positions[first];
        const auto from = reinterpret_cast<intptr_t>(terms.from[position]);
        const float own_factor = terms.factor[position];
        const int count = static_cast<int>(min(static_cast<int64_t>(group.size()), end - i));
        for (int j = 0; j < count; j += kInFlight) {
          Floats<kWidth> values[kInFlight];
          float factor[kInFlight];
#pragma unroll
          for (int u = 0; u < kInFlight; ++u) {
            const int lane = j + u < count ? j + u : count - 1;
            const auto* row =
                reinterpret_cast<const float*>(group.broadcast(static_cast<long long>(from), lane));
            factor[u] = group.broadcast(own_factor, lane);
            values[u] = j + u < count && column < dim ? load_floats<kWidth>(row + column)
                                                      : zero_floats<kWidth>();
          }
#pragma unroll
          for (int u = 0; u < kInFlight; ++u) {
            if (j + u >= count) break;
#pragma unroll
            for (int k = 0; k < kWidth; ++k) sum.value[k] += factor[u] * values[u].value[k];
          }
        }
      }
      if (column < dim) store_floats<kWidth>(to + column, sum);
    }
  }
}

}  // namespace

BagArgs bag_args(const Call& call, const Tensor& positions, const Tensor& offsets, int64_t features,
                 const std::optional<Tensor>& weights, int64_t rows, int64_t dim) {
  call.check("positions", positions, ScalarType::Long);
  call.check("offsets", offsets, ScalarType::Long);
  check_words(call.op, "positions", positions);
  check_words(call.op, "offsets", offsets);
  STD_TORCH_CHECK(features >= 1, "dynemb::", call.op, ": features is ", features,
                  ", expected at least 1");
  const int64_t bags = offsets.size(0) - 1;
  STD_TORCH_CHECK(bags >= 0 && bags % features == 0, "dynemb::", call.op, ": offsets has ",
                  bags + 1, " elements, expected one more than a multiple of features, ", features);
  result_bytes(call.op, "features", features, {features, dim}, 4);
  const int64_t count = positions.size(0);
  const float* weight = nullptr;
  if (weights.has_value()) {
    call.check("weights", *weights, ScalarType::Float);
    STD_TORCH_CHECK(weights->dim() == 1, "dynemb::", call.op, ": weights has ", weights->dim(),
                    " dimensions, expected 1");
    check_length(call.op, "weights", *weights, count);
    weight = static_cast<const float*>(weights->data_ptr());
  }
  return {{static_cast<const int64_t*>(offsets.data_ptr()), bags, count},
          static_cast<const int64_t*>(positions.data_ptr()),
          weight,
          bags / features,
          features,
          rows,
          dim,
          error_sink(call)};
}

void check_matrix(const Call& call, const char* name, const Tensor& rows) {
  call.check(name, rows, ScalarType::Float);
  STD_TORCH_CHECK(rows.dim() == 2, "dynemb::", call.op, ": ", name, " has ", rows.dim(),
                  " dimensions, expected 2");
}

RowTerms::RowTerms(const Call& call, const BagArgs& bags)
    : count_(bags.count()),
      rows_(bags.rows),
      dim_(bags.dim),
      sort_(call, bags.count(), bits_for(bags.rows + 1)) {
  STD_TORCH_CHECK(rows_ < UINT32_MAX && count_ <= INT32_MAX, "dynemb::", call.op, ": ", rows_,
                  " rows and ", count_, " positions, expected fewer than 2^32 and 2^31");
  const auto from = scratch_.add<const float*>(count_);
  const auto factor = scratch_.add<float>(count_);
  scratch_.allocate(call);
  terms_ = {scratch_.get(from), scratch_.get(factor), sort_.keys(), sort_.unsorted(),
            static_cast<uint32_t>(rows_)};
}

Tensor RowTerms::sum(const Call& call, bool aligned) const {
  Tensor sums = call.empty({rows_, dim_}, ScalarType::Float);
  call.fill(sums.data_ptr(), 0, rows_ * dim_ * 4);
  if (count_ == 0 || rows_ == 0 || dim_ == 0) return sums;
  Scratch scratch;
  const auto positions = scratch.add<uint32_t>(count_);
  const auto begin = scratch.add<int32_t>(count_ + 1);
  const auto head = scratch.add<int64_t>(kRunHeadWords);
  scratch.allocate(call);
  call.fill(scratch.get(head), 0, kRunHeadWords * 8);
  sort_.find(call, terms_.missing, scratch.get(positions), scratch.get(begin), scratch.get(head));
  auto* to = static_cast<float*>(sums.data_ptr());
  with_lanes(dim_, aligned && is_aligned(to), [&](auto group) {
    call.launch_strided(sum_terms<decltype(group)>, count_ * group.size(), group, terms_,
                        scratch.get(positions), scratch.get(begin), scratch.get(head), dim_, to);
  });
  return sums;
}

}  // namespace dynemb::cuda
