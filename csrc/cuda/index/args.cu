#include "cuda/index/args.h"

namespace dynemb::cuda {

IndexArgs index_args(const Call& call, const Tensor& buckets, const Tensor* scores,
                     const Tensor& tables, const Tensor& meta) {
  const IndexTensors given = index_tensors(call, buckets, scores, tables, meta);
  return {given.buckets, given.scores,      given.tables,
          given.meta,    given.table_count, given.score_words};
}

FeatureArgs feature_args(const Call& call, const IdTensors& ids, const int64_t* table) {
  check_id_limit(call.op, ids.count);
  return {ids.ids, ids.count, ids.offsets, ids.batch, ids.features, table};
}

FeatureArgs feature_args(const Call& call, const Tensor& ids, const Tensor& offsets,
                         const std::vector<int64_t>& feature_tables, int64_t table_count,
                         const int64_t* table) {
  return feature_args(call, id_tensors(call, ids, offsets, feature_tables, table_count), table);
}

}  // namespace dynemb::cuda
