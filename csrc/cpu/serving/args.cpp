#include "cpu/serving/args.h"

namespace dynemb::cpu {

LiveTable live_table(const LiveTensors& live, int64_t table) {
  const int64_t* meta = live.meta_row(table);
  const LiveRows& rows = live.slabs[meta[kMetaSlab]];
  return {live.index.buckets + meta[kMetaRegionBegin] * kBucketWords,
          meta[kMetaRegionBuckets],
          live.table_row(table) + kLiveTableActive,
          bucket_salt(meta[kMetaSeed]),
          rows.words,
          rows.count,
          rows.row_words,
          meta[kMetaDim],
          rows.format};
}

TableRows live_initial_rows(const LiveTensors& live, int64_t table, const double* init_data) {
  const int64_t* meta = live.meta_row(table);
  const Storage format = live.slabs[meta[kMetaSlab]].format;
  TableRows rows{};
  rows.dim = meta[kMetaDim];
  rows.storage = format;
  rows.seed = meta[kMetaSeed];
  rows.first_column = meta[kMetaFirstColumn];
  rows.init_data = init_data;
  rows.default_begin = meta[kMetaDefaultBegin];
  rows.default_count = meta[kMetaDefaultCount];
  return rows;
}

}  // namespace dynemb::cpu
