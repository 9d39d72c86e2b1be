// ragged_tile and its gradients: the first rows of each bag side by side.
#include "arguments/ragged.h"
#include "cuda/rows/bags.h"

namespace dynemb::cuda {
namespace {

// Tiles of all features, on the device.
struct Tiles {
  float* const* data;  // of each feature [batch, tile_len * dim]
  const int64_t* len;
  const int64_t* pad_left;
};

// Slot of a bag's first row in its tile.
__device__ __forceinline__ int64_t first_slot(const Tiles& tiles, int64_t feature, int64_t length) {
  const int64_t len = tiles.len[feature];
  return tiles.pad_left[feature] != 0 && length < len ? len - length : 0;
}

// The floats of a position in a tile; nullptr if it was left out, or belongs to no bag.
__device__ __forceinline__ float* place_of(const BagArgs& args, const Tiles& tiles, int64_t i) {
  if (args.bags.rows == 0) return nullptr;
  const int64_t bag = args.bags.row_of(i);
  const int64_t begin = args.bags.begin(bag);
  const int64_t end = args.bags.end(bag);
  if (i < begin || i >= end) return nullptr;
  const int64_t feature = bag / args.batch;
  const int64_t len = tiles.len[feature];
  if (i - begin >= len) return nullptr;
  const int64_t slot = first_slot(tiles, feature, end - begin) + i - begin;
  return tiles.data[feature] + ((bag - feature * args.batch) * len + slot) * args.dim;
}

// A group of lanes per row of a tile; `slots` are those of all features. 8 to 12 bytes and a random
// row of 4 * dim bytes read, 4 * dim written.
template <class Group>
__global__ void write_tiles(Group group, BagArgs args, FeatureItems slots, Tiles tiles,
                            const float* rows) {
  constexpr int kWidth = Group::kWidth;
  const int64_t number = group.number();
  if (group.lane() == 0 && number < args.bags.rows) args.check(number);
  if (number >= slots.count) return;
  const FeatureItem item = slots.at(number);
  const int64_t len = tiles.len[item.feature];
  const int64_t bag = item.feature * args.batch + item.index / len;
  const int64_t begin = args.bags.begin(bag);
  const int64_t length = args.bags.end(bag) - begin;
  const int64_t j = item.index % len - first_slot(tiles, item.feature, length);
  const int64_t row = j >= 0 && j < length ? args.row_at(begin + j) : -1;
  const float weight = row >= 0 ? args.weight_at(begin + j) : 0.0f;
  float* to = tiles.data[item.feature] + item.index * args.dim;
  for (int64_t column = group.column(0); column < args.dim; column += group.stride()) {
    Floats<kWidth> value = zero_floats<kWidth>();
    if (row >= 0) {
      value = load_floats<kWidth>(rows + row * args.dim + column);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) value.value[k] *= weight;
    }
    store_floats<kWidth>(to + column, value);
  }
}

// A thread per position, and per bag. A binary search in offsets, 8 bytes read and 20 written.
__global__ void make_tile_terms(BagArgs args, Tiles grads, Terms terms) {
  const int64_t i = thread_number();
  if (i < args.bags.rows) args.check(i);
  if (i >= args.bags.count) return;
  const float* from = place_of(args, grads, i);
  const int64_t row = from == nullptr ? -1 : args.row_at(i);
  terms.position[i] = static_cast<uint32_t>(i);
  terms.key[i] = row < 0 ? terms.missing : static_cast<uint32_t>(row);
  terms.from[i] = from;
  terms.factor[i] = args.weight_at(i);
}

// A group of lanes per position: 4 * dim bytes of a random row and 4 * dim of gradient.
template <class Group>
__global__ void grad_of_tile_weights(Group group, BagArgs args, Tiles grads, const float* rows,
                                     float* output) {
  constexpr int kWidth = Group::kWidth;
  const int64_t i = group.number();
  if (group.lane() == 0 && i < args.bags.rows) args.check(i);
  if (i >= args.bags.count) return;
  const float* grad = place_of(args, grads, i);
  const int64_t row = grad == nullptr ? -1 : args.row_at(i);
  float product = 0.0f;
  for (int64_t column = group.column(0); row >= 0 && column < args.dim; column += group.stride()) {
    add_products(&product, load_floats<kWidth>(grad + column),
                 load_floats<kWidth>(rows + row * args.dim + column));
  }
  product = group.sum(product);
  if (group.lane() == 0) output[i] = product;
}

bool all_aligned(const std::vector<Tensor>& list) {
  bool aligned = true;
  for (const Tensor& tensor : list) aligned = aligned && is_aligned(tensor.data_ptr());
  return aligned;
}

std::vector<Tensor> ragged_tile(Tensor rows, Tensor positions, Tensor offsets,
                                std::optional<Tensor> weights, std::vector<int64_t> tile_lens,
                                std::vector<int64_t> pad_left) {
  const Call call("ragged_tile", "rows", rows);
  check_matrix(call, "rows", rows);
  check_tiles(call.op, tile_lens, pad_left);
  const auto features = static_cast<int64_t>(tile_lens.size());
  const BagArgs args =
      bag_args(call, positions, offsets, features, weights, rows.size(0), rows.size(1));
  check_tile_sizes(call.op, tile_lens, args.batch, args.dim, args.count());
  std::vector<Tensor> tiles;
  for (const int64_t len : tile_lens) {
    tiles.push_back(call.empty({args.batch, len * args.dim}, ScalarType::Float));
  }
  FeatureWords words;
  const auto begin =
      words.add(item_begins(tile_lens.size(), [&](size_t f) { return args.batch * tile_lens[f]; }));
  const auto data = words.add_addresses<float>(tiles);
  const auto lens = words.add(tile_lens);
  const auto left = words.add(pad_left);
  words.upload(call);
  const auto* from = static_cast<const float*>(rows.data_ptr());
  const FeatureItems slots = words.items(begin);
  const int64_t groups = std::max(slots.count, args.bag_total());
  with_lanes(args.dim, is_aligned(from) && all_aligned(tiles), [&](auto group) {
    call.launch(write_tiles<decltype(group)>, groups * group.size(), 0, group, args, slots,
                Tiles{words.get(data), words.get(lens), words.get(left)}, from);
  });
  return tiles;
}

// The gradients of tiles, and their bags.
struct TileGrads {
  TileGrads(const Call& call, const std::vector<Tensor>& grads, const Tensor& positions,
            const Tensor& offsets, const std::optional<Tensor>& weights, int64_t rows,
            const std::vector<int64_t>& tile_lens, const std::vector<int64_t>& pad_left) {
    const int64_t dim = tiled_dim(call, grads, rows, tile_lens, pad_left);
    args = bag_args(call, positions, offsets, static_cast<int64_t>(tile_lens.size()), weights, rows,
                    dim);
    check_tile_grads(call.op, grads, tile_lens, args.batch, dim);
    const auto data = words.add_addresses<float>(grads);
    const auto lens = words.add(tile_lens);
    const auto left = words.add(pad_left);
    words.upload(call);
    tiles = {words.get(data), words.get(lens), words.get(left)};
    aligned = all_aligned(grads);
  }

  FeatureWords words;
  BagArgs args{};
  Tiles tiles{};
  bool aligned = false;
};

Tensor ragged_tile_grad(std::vector<Tensor> grads, Tensor positions, Tensor offsets,
                        std::optional<Tensor> weights, int64_t rows, std::vector<int64_t> tile_lens,
                        std::vector<int64_t> pad_left) {
  const Call call("ragged_tile_grad", "positions", positions);
  const TileGrads given(call, grads, positions, offsets, weights, rows, tile_lens, pad_left);
  result_bytes(call.op, "rows", rows, {rows, given.args.dim}, 4);
  const RowTerms terms(call, given.args);
  const int64_t threads = std::max(given.args.count(), given.args.bag_total());
  call.launch(make_tile_terms, threads, 0, given.args, given.tiles, terms.terms());
  return terms.sum(call, given.aligned);
}

Tensor ragged_tile_weight_grad(std::vector<Tensor> grads, Tensor rows, Tensor positions,
                               Tensor offsets, std::vector<int64_t> tile_lens,
                               std::vector<int64_t> pad_left) {
  const Call call("ragged_tile_weight_grad", "rows", rows);
  check_matrix(call, "rows", rows);
  const TileGrads given(call, grads, positions, offsets, std::nullopt, rows.size(0), tile_lens,
                        pad_left);
  check_size(call.op, "rows", rows, 1, given.args.dim);
  Tensor result = call.empty({given.args.count()}, ScalarType::Float);
  const auto* from = static_cast<const float*>(rows.data_ptr());
  const int64_t groups = std::max(given.args.count(), given.args.bag_total());
  with_lanes(given.args.dim, given.aligned && is_aligned(from), [&](auto group) {
    call.launch(grad_of_tile_weights<decltype(group)>, groups * group.size(), 0, group, given.args,
                given.tiles, from, static_cast<float*>(result.data_ptr()));
  });
  return result;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("ragged_tile", TORCH_BOX(&dynemb::cuda::ragged_tile));
  m.impl("ragged_tile_grad", TORCH_BOX(&dynemb::cuda::ragged_tile_grad));
  m.impl("ragged_tile_weight_grad", TORCH_BOX(&dynemb::cuda::ragged_tile_weight_grad));
}
