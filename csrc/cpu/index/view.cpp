#include "cpu/index/view.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <exception>

#include "arguments/table_constants.h"

namespace dynemb::cpu {
void check_tensor(const char* op, const char* name, const Tensor& tensor, ScalarType dtype) {
  check_defined(op, name, tensor);
  STD_TORCH_CHECK(tensor.is_cpu(), "dynemb::", op, ": ", name,
                  " is on another device than the CPU: move it, or move the table with .to()");
  check_layout(op, name, tensor, dtype);
}

namespace {

// malloc takes tensors of this size from the system afresh and gives them back when they are freed,
// so that every 4 KiB of them are a page fault: several times the cost of writing them once.
constexpr size_t kHugePagesFrom = size_t{16} << 20;

void prefer_huge_pages_if_large(const Tensor& tensor) {
  const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
  if (bytes < kHugePagesFrom) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + bytes) / page * page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // advice: may fail
}

}  // namespace

Tensor empty_cpu(const std::vector<int64_t>& size, ScalarType dtype) {
  try {
    Tensor tensor = torch::stable::empty(size, dtype, std::nullopt,
                                         torch::stable::Device(torch::headeronly::DeviceType::CPU));
    prefer_huge_pages_if_large(tensor);
    return tensor;
  } catch (const std::exception&) {  // whose text is that of a call within this library
    std::string shape;
    for (const int64_t length : size) shape += (shape.empty() ? "" : ", ") + std::to_string(length);
    STD_TORCH_CHECK(false, "dynemb::empty: there is no memory for a result of shape [", shape,
                    "]: give fewer ids, or smaller sizes");
  }
}

Tensor zeros_cpu(const std::vector<int64_t>& size, ScalarType dtype) {
  Tensor tensor = empty_cpu(size, dtype);
  return torch::stable::zero_(tensor);
}

TableView IndexView::table(int64_t table) const {
  const int64_t* m = meta_row(table);
  const int64_t begin = m[kMetaRegionBegin];
  TableView view;
  view.lines = buckets + begin * kBucketWords;
  const bool scored = scores != nullptr && m[kMetaUnscored] == 0;
  view.scores = scored ? scores + begin * kBucketWidth * score_words : nullptr;
  view.score_words = scored ? score_words : 0;
  view.bucket_count = table_row(table)[kTableBucketCount];
  view.salt = bucket_salt(m[kMetaSeed]);
  view.has_padding = m[kMetaHasPadding] != 0;
  view.padding_id = m[kMetaPaddingId];
  return view;
}

IndexView index_view(const char* op, const Tensor& buckets, const Tensor* scores,
                     const Tensor& tables, const Tensor& meta) {
  check_tensor(op, "buckets", buckets, ScalarType::Long);
  check_size(op, "buckets", buckets, 1, kBucketWords);
  check_tensor(op, "tables", tables, ScalarType::Long);
  check_size(op, "tables", tables, 1, kTableColumns);
  check_tensor(op, "meta", meta, ScalarType::Long);
  check_size(op, "meta", meta, 0, tables.size(0));
  check_size(op, "meta", meta, 1, kMetaColumns);
  IndexView view;
  view.op = op;
  view.buckets = static_cast<int64_t*>(buckets.data_ptr());
  view.bucket_capacity = buckets.size(0);
  view.scores = nullptr;
  view.score_words = 0;
  view.tables = static_cast<int64_t*>(tables.data_ptr());
  view.meta = static_cast<const int64_t*>(meta.data_ptr());
  view.table_count = tables.size(0);
  if (scores != nullptr) {
    check_tensor(op, "scores", *scores, ScalarType::Long);
    view.score_words = score_words(op, *scores);
    if (view.score_words > 0) {
      check_size(op, "scores", *scores, 0, view.bucket_capacity);
      view.scores = static_cast<int64_t*>(scores->data_ptr());
    }
  }
  for (int64_t t = 0; t < view.table_count; ++t) {
    check_region(op, t, view.meta_row(t), view.table_row(t), view.bucket_capacity);
  }
  return view;
}

void check_offsets(const char* op, const int64_t* offset, int64_t parts, int64_t count,
                   const char* counted) {
  STD_TORCH_CHECK(offset[0] == 0, "dynemb::", op, ": offsets[0] is ", offset[0], ", expected 0");
  bool decreases = false;
  for (int64_t i = 0; i < parts; ++i) decreases |= offset[i + 1] < offset[i];
  if (decreases) {
    int64_t i = 0;
    while (offset[i + 1] >= offset[i]) ++i;
    STD_TORCH_CHECK(false, "dynemb::", op, ": offsets[", i + 1, "] is ", offset[i + 1],
                    ", less than offsets[", i, "] = ", offset[i], ": offsets must not decrease");
  }
  STD_TORCH_CHECK(offset[parts] == count, "dynemb::", op, ": the last offset is ", offset[parts],
                  ", expected the number of ", counted, ", ", count);
}

FeatureIds feature_ids(const char* op, const Tensor& ids, const Tensor& offsets,
                       const std::vector<int64_t>& feature_tables, int64_t table_count) {
  check_tensor(op, "ids", ids, ScalarType::Long);
  check_tensor(op, "offsets", offsets, ScalarType::Long);
  STD_TORCH_CHECK(ids.dim() == 1, "dynemb::", op, ": ids has ", ids.dim(),
                  " dimensions, expected 1: flatten it");
  const int64_t features = static_cast<int64_t>(feature_tables.size());
  const bool one_bag = is_one_bag(offsets, features);
  const int64_t bags = one_bag ? 1 : offsets.numel() - 1;
  STD_TORCH_CHECK(features > 0, "dynemb::", op, ": feature_tables is empty");
  STD_TORCH_CHECK(offsets.dim() == 1 && bags >= 0 && bags % features == 0, "dynemb::", op,
                  ": offsets has ", offsets.numel(),
                  " elements, expected features * batch + 1 with ", features, " features");
  FeatureIds result;
  result.ids = static_cast<const int64_t*>(ids.data_ptr());
  result.count = ids.numel();
  const int64_t ends[] = {0, result.count};
  const auto* offset = one_bag ? ends : static_cast<const int64_t*>(offsets.data_ptr());
  check_offsets(op, offset, bags, result.count, "ids");
  const int64_t batch = bags / features;
  result.table = feature_tables;
  result.begin.resize(features + 1);
  for (int64_t f = 0; f < features; ++f) {
    STD_TORCH_CHECK(feature_tables[f] >= 0 && feature_tables[f] < table_count, "dynemb::", op,
                    ": feature_tables[", f, "] is ", feature_tables[f], ", expected 0 to ",
                    table_count - 1);
    result.begin[f] = offset[f * batch];
  }
  result.begin[features] = result.count;
  return result;
}

std::vector<Tile> make_tiles(const FeatureIds& features) {
  std::vector<Tile> tiles;
  tiles.reserve(features.table.size() + static_cast<size_t>(features.count / kTileIds));
  for (size_t f = 0; f < features.table.size(); ++f) {
    for (int64_t begin = features.begin[f]; begin < features.begin[f + 1]; begin += kTileIds) {
      tiles.push_back({begin, std::min(begin + kTileIds, features.begin[f + 1]), features.table[f],
                       static_cast<int64_t>(f)});
    }
  }
  return tiles;
}

}  // namespace dynemb::cpu
