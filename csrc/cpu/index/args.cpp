#include "cpu/index/args.h"

#include <algorithm>

#include "arguments/table_constants.h"

namespace dynemb::cpu {

TableView IndexArgs::table(int64_t table) const {
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

IndexArgs index_args(const char* op, const Tensor& buckets, const Tensor* scores,
                     const Tensor& tables, const Tensor& meta) {
  const IndexArgs index{index_tensors(op, buckets, scores, tables, meta), op};
  for (int64_t t = 0; t < index.table_count; ++t) {
    check_region(op, t, index.meta_row(t), index.table_row(t), index.bucket_capacity);
  }
  return index;
}

void check_offsets(const char* op, const int64_t* offset, int64_t parts, int64_t count,
                   const char* counted) {
  DYNEMB_CHECK(offset[0] == 0, "dynemb::", op, ": offsets[0] is ", offset[0], ", expected 0");
  bool decreases = false;
  for (int64_t i = 0; i < parts; ++i) decreases |= offset[i + 1] < offset[i];
  if (decreases) {
    int64_t i = 0;
    while (offset[i + 1] >= offset[i]) ++i;
    DYNEMB_CHECK(false, "dynemb::", op, ": offsets[", i + 1, "] is ", offset[i + 1],
                 ", less than offsets[", i, "] = ", offset[i], ": offsets must not decrease");
  }
  DYNEMB_CHECK(offset[parts] == count, "dynemb::", op, ": the last offset is ", offset[parts],
               ", expected the number of ", counted, ", ", count,
               ": offsets have one element per bag and that number at the end");
}

FeatureArgs feature_args(const char* op, const IdTensors& given,
                         const std::vector<int64_t>& feature_tables) {
  const int64_t ends[] = {0, given.count};
  const int64_t* offset = given.offsets == nullptr ? ends : given.offsets;
  check_offsets(op, offset, given.features * given.batch, given.count, "ids");
  FeatureArgs result{given.ids, given.count, {}, feature_tables};
  result.begin.resize(given.features + 1);
  for (int64_t f = 0; f < given.features; ++f) result.begin[f] = offset[f * given.batch];
  result.begin[given.features] = given.count;
  return result;
}

FeatureArgs feature_args(const char* op, const Tensor& ids, const Tensor& offsets,
                         const std::vector<int64_t>& feature_tables, int64_t table_count) {
  return feature_args(op, id_tensors(op, ids, offsets, feature_tables, table_count),
                      feature_tables);
}

std::vector<Tile> make_tiles(const FeatureArgs& features) {
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
