#include <cub/device/device_scan.cuh>

#include "cuda/ragged/lists.cuh"

namespace dynemb::cuda {
namespace {

// A thread per feature: the sum of its items' sizes.
__global__ void subtract_sums(FeatureItems items, const int64_t* sums, int64_t* totals) {
  const int64_t f = thread_number();
  if (f < items.features) totals[f] = sums[items.begin[f + 1]] - sums[items.begin[f]];
}

}  // namespace

SizeSums::SizeSums(const Call& call, int64_t items) : items_(items) {
  DYNEMB_CHECK(items <= INT32_MAX, "dynemb::", call.op, ": ", items,
               " rows, expected fewer than 2^31: split the batch");
  check_cuda(call.op, "adding sizes",
             cub::DeviceScan::InclusiveSum(nullptr, bytes_, static_cast<const int64_t*>(nullptr),
                                           static_cast<int64_t*>(nullptr), static_cast<int>(items_),
                                           call.stream));
  sums_ = scratch_.add<int64_t>(items + 1);
  temporary_ = scratch_.add<char>(static_cast<int64_t>(bytes_));
  scratch_.allocate(call);
  call.fill(scratch_.get(sums_), 0, 8);
}

void SizeSums::run(const Call& call) const {
  size_t bytes = bytes_;
  check_cuda(call.op, "adding sizes",
             cub::DeviceScan::InclusiveSum(scratch_.get(temporary_), bytes,
                                           static_cast<const int64_t*>(sizes()), sizes(),
                                           static_cast<int>(items_), call.stream));
}

std::vector<int64_t> SizeSums::totals(const Call& call, const FeatureItems& items) const {
  DYNEMB_CHECK(!call.capturing(), "dynemb::", call.op,
               ": the sizes of its results depend on values, so it cannot be captured: call it "
               "before the graph");
  Scratch scratch;
  const auto part = scratch.add<int64_t>(items.features);
  scratch.allocate(call);
  call.launch(subtract_sums, items.features, 0, items, sums(), scratch.get(part));
  return call.read("reading sizes", scratch.get(part), items.features);
}

TakenLists::TakenLists(const Call& call, const std::vector<Tensor>& from,
                       const std::vector<Tensor>& weights_from, const std::vector<int64_t>& weight,
                       const std::vector<int64_t>& sizes) {
  std::vector<int64_t> bytes, weights_read, weights_written;
  for (size_t f = 0; f < from.size(); ++f) {
    values.push_back(call.empty({sizes[f]}, from[f].scalar_type()));
    bytes.push_back(value_bytes(call.op, "values", f, from[f]));
    const auto address = [](const Tensor& tensor) {
      return static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.data_ptr()));
    };
    if (weight[f] >= 0) weights.push_back(call.empty({sizes[f]}, ScalarType::Float));
    // without values the address of weights is not needed either
    const bool weighted = weight[f] >= 0 && sizes[f] > 0;
    weights_read.push_back(weighted ? address(weights_from[weight[f]]) : 0);
    weights_written.push_back(weighted ? address(weights.back()) : 0);
  }
  begin_ = words_.add(item_begins(from.size(), [&](size_t f) { return sizes[f]; }));
  from_ = words_.add_addresses<const char>(from);
  to_ = words_.add_addresses<char>(values);
  bytes_ = words_.add(bytes);
  weights_from_ = words_.add(weights_read);
  weights_to_ = words_.add(weights_written);
  words_.upload(call);
}

TakenArgs TakenLists::args() const {
  return {words_.get(from_), words_.get(to_), words_.get(bytes_),
          reinterpret_cast<const float* const*>(words_.get(weights_from_)),
          reinterpret_cast<float* const*>(words_.get(weights_to_))};
}

}  // namespace dynemb::cuda
