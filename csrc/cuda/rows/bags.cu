#include "cuda/rows/bags.h"

namespace dynemb::cuda {
namespace {

// A group of lanes per run of one row: 4 * dim random bytes a position, in order; 4 * dim written.
template <class Group>
__global__ void sum_terms(Group group, Terms terms, const uint32_t* positions, const int32_t* begin,
                          const int64_t* head, int64_t dim, float* sums) {
  constexpr int kWidth = Group::kWidth;
  struct Term {
    const float* from;
    float factor;
  };
  struct Row {
    float factor;
    Floats<kWidth> values;
  };
  const int64_t runs = head[kRunCount];
  for (int64_t r = group.number(); r < runs; r += group.total()) {
    const int64_t first = begin[r];
    const int64_t end = begin[r + 1];
    float* to = sums + terms.key[positions[first]] * dim;
    for (int64_t base = 0; base < dim; base += group.stride()) {
      const int64_t column = group.column(base);
      Floats<kWidth> sum = zero_floats<kWidth>();
      stream_items(
          group, first, end,
          [&](int64_t i) {
            const uint32_t position = positions[i < end ? i : first];
            return Term{terms.from[position], terms.factor[position]};
          },
          [&](const Term& term, int lane, bool wanted) {
            const auto address = static_cast<long long>(reinterpret_cast<intptr_t>(term.from));
            const auto* from = reinterpret_cast<const float*>(group.broadcast(address, lane));
            Row row{group.broadcast(term.factor, lane), zero_floats<kWidth>()};
            if (wanted && column < dim) row.values = load_floats<kWidth>(from + column);
            return row;
          },
          [&](const Row& row, int64_t) { add_scaled(&sum, row.factor, row.values); });
      if (column < dim) store_floats<kWidth>(to + column, sum);
    }
  }
}

}  // namespace

BagArgs bag_args(const Call& call, const Tensor& positions, const Tensor& offsets, int64_t features,
                 const std::optional<Tensor>& weights, int64_t rows, int64_t dim) {
  const BagTensors given = bag_tensors(call, positions, offsets, features, dim);
  return {{given.offsets, given.bags, given.count},
          given.positions,
          position_weights(call, weights, given.count),
          given.batch,
          features,
          rows,
          dim,
          error_sink(call)};
}

RowTerms::RowTerms(const Call& call, const BagArgs& bags)
    : count_(bags.count()),
      rows_(bags.rows),
      dim_(bags.dim),
      sort_(call, bags.count(), bits_for(bags.rows + 1)) {
  DYNEMB_CHECK(rows_ < UINT32_MAX && count_ <= INT32_MAX, "dynemb::", call.op, ": ", rows_,
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
