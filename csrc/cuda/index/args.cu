#include "cuda/index/args.h"

namespace dynemb::cuda {

IndexArgs index_args(const Call& call, const Tensor& buckets, const Tensor* scores,
                     const Tensor& tables, const Tensor& meta) {
  call.check("buckets", buckets, ScalarType::Long);
  check_size(call.op, "buckets", buckets, 1, kBucketWords);
  call.check("tables", tables, ScalarType::Long);
  check_size(call.op, "tables", tables, 1, kTableColumns);
  call.check("meta", meta, ScalarType::Long);
  check_size(call.op, "meta", meta, 0, tables.size(0));
  check_size(call.op, "meta", meta, 1, kMetaColumns);
  IndexArgs args{static_cast<int64_t*>(buckets.data_ptr()),
                 nullptr,
                 static_cast<int64_t*>(tables.data_ptr()),
                 static_cast<const int64_t*>(meta.data_ptr()),
                 tables.size(0),
                 0};
  if (scores != nullptr) {
    call.check("scores", *scores, ScalarType::Long);
    args.score_words = score_words(call.op, *scores);
    if (args.score_words > 0) {
      check_size(call.op, "scores", *scores, 0, buckets.size(0));
      args.scores = static_cast<int64_t*>(scores->data_ptr());
    }
  }
  return args;
}

FeatureArgs feature_args(const Call& call, const Tensor& ids, const Tensor& offsets,
                         const std::vector<int64_t>& feature_tables, int64_t table_count,
                         const int64_t* table) {
  call.check("ids", ids, ScalarType::Long);
  call.check("offsets", offsets, ScalarType::Long);
  STD_TORCH_CHECK(ids.dim() == 1, "dynemb::", call.op, ": ids has ", ids.dim(),
                  " dimensions, expected 1: flatten it");
  const int64_t features = static_cast<int64_t>(feature_tables.size());
  const bool one_bag = is_one_bag(offsets, features);
  const int64_t bags = one_bag ? 1 : offsets.numel() - 1;
  STD_TORCH_CHECK(features > 0, "dynemb::", call.op, ": feature_tables is empty");
  STD_TORCH_CHECK(offsets.dim() == 1 && bags >= 0 && bags % features == 0, "dynemb::", call.op,
                  ": offsets has ", offsets.numel(),
                  " elements, expected features * batch + 1 with ", features, " features");
  STD_TORCH_CHECK(ids.numel() < (int64_t{1} << 31), "dynemb::", call.op, ": ids has ", ids.numel(),
                  " elements, expected fewer than 2^31: split the batch");
  for (int64_t f = 0; f < features; ++f) {
    STD_TORCH_CHECK(feature_tables[f] >= 0 && feature_tables[f] < table_count, "dynemb::", call.op,
                    ": feature_tables[", f, "] is ", feature_tables[f], ", expected 0 to ",
                    table_count - 1);
  }
  return {static_cast<const int64_t*>(ids.data_ptr()),
          ids.numel(),
          one_bag ? nullptr : static_cast<const int64_t*>(offsets.data_ptr()),
          bags / features,
          features,
          table};
}

}  // namespace dynemb::cuda
