#include "cuda/rows_args.h"

namespace dynemb::cuda {

GroupRows group_rows(const Call& call, const std::vector<Tensor>& weights,
                     const std::vector<Tensor>& generations, const Tensor& meta,
                     const Tensor& init_data) {
  call.check("meta", meta, ScalarType::Long);
  check_size(call.op, "meta", meta, 1, kMetaColumns);
  call.check("init_data", init_data, ScalarType::Double);
  STD_TORCH_CHECK(init_data.dim() == 1, "dynemb::", call.op, ": init_data has ", init_data.dim(),
                  " dimensions, expected 1");
  STD_TORCH_CHECK(!weights.empty() && weights.size() == generations.size(), "dynemb::", call.op,
                  ": got ", weights.size(), " weights and ", generations.size(),
                  " generations, expected one of each per slab");
  GroupRows rows;
  for (size_t s = 0; s < weights.size(); ++s) {
    call.check("weights", weights[s], ScalarType::Float);
    call.check("generations", generations[s], ScalarType::Int);
    STD_TORCH_CHECK(weights[s].dim() == 2 && weights[s].size(1) > 0, "dynemb::", call.op,
                    ": weights must have shape (rows, dim)");
    check_size(call.op, "generations", generations[s], 0, weights[s].size(0));
    rows.slabs.push_back({static_cast<float*>(weights[s].data_ptr()),
                          static_cast<int32_t*>(generations[s].data_ptr()), weights[s].size(0),
                          weights[s].size(1)});
  }
  rows.args = {static_cast<const int64_t*>(meta.data_ptr()),
               static_cast<const double*>(init_data.data_ptr())};
  rows.table_count = meta.size(0);
  return rows;
}

LookupCall lookup_call(const Call& call, const GroupRows& rows, const Tensor& ids,
                       const Tensor& handles, const Tensor& offsets,
                       const std::optional<Tensor>& per_sample_weights,
                       const std::vector<int64_t>& feature_tables,
                       const std::vector<int64_t>& feature_dims, int64_t pooling) {
  LookupCall lookup;
  LookupArgs& args = lookup.args;
  args.features = feature_args(call, ids, offsets, feature_tables, rows.table_count, nullptr);
  call.check("handles", handles, ScalarType::Long);
  check_size(call.op, "handles", handles, 0, args.features.count);
  const size_t features = feature_tables.size();
  STD_TORCH_CHECK(feature_dims.size() == features, "dynemb::", call.op, ": feature_dims has ",
                  feature_dims.size(), " elements, expected ", features);
  STD_TORCH_CHECK(pooling >= kPoolSum && pooling <= kPoolNone, "dynemb::", call.op, ": pooling is ",
                  pooling, ", expected 0 (sum), 1 (mean) or 2 (none)");
  args.handles = static_cast<const int64_t*>(handles.data_ptr());
  args.id_weights = nullptr;
  if (per_sample_weights.has_value()) {
    call.check("per_sample_weights", *per_sample_weights, ScalarType::Float);
    check_size(call.op, "per_sample_weights", *per_sample_weights, 0, args.features.count);
    args.id_weights = static_cast<const float*>(per_sample_weights->data_ptr());
  }
  args.pooling = pooling;
  args.columns = 0;
  lookup.slab_features.resize(rows.slabs.size());
  lookup.slab_aligned.assign(rows.slabs.size(), true);
  std::vector<int64_t> columns;
  for (size_t f = 0; f < features; ++f) {
    // one slab per dim, so the dim of a feature names the slab of its table
    size_t slab = 0;
    while (slab < rows.slabs.size() && rows.slabs[slab].dim != feature_dims[f]) ++slab;
    STD_TORCH_CHECK(slab < rows.slabs.size(), "dynemb::", call.op, ": feature_dims[", f, "] is ",
                    feature_dims[f], ", but no table of the group has that dim");
    STD_TORCH_CHECK(pooling != kPoolNone || feature_dims[f] == feature_dims[0], "dynemb::", call.op,
                    ": features without pooling must have one dim, got ", feature_dims[0], " and ",
                    feature_dims[f]);
    lookup.feature_slab.push_back(static_cast<int64_t>(slab));
    lookup.slab_features[slab].push_back(static_cast<int64_t>(f));
    columns.push_back(pooling == kPoolNone ? 0 : args.columns);
    if (columns.back() % 4 != 0) lookup.slab_aligned[slab] = false;
    args.columns = pooling == kPoolNone ? feature_dims[f] : args.columns + feature_dims[f];
  }
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    if (args.columns % 4 != 0 || !is_aligned(rows.slabs[s].weights)) lookup.slab_aligned[s] = false;
  }
  lookup.output_rows = pooling == kPoolNone ? args.features.count : args.features.batch;
  lookup.output_columns = args.columns;
  // words: table, column and slab of each feature, then the features of each slab
  lookup.words = feature_tables;
  lookup.words.insert(lookup.words.end(), columns.begin(), columns.end());
  lookup.words.insert(lookup.words.end(), lookup.feature_slab.begin(), lookup.feature_slab.end());
  for (const auto& of_slab : lookup.slab_features) {
    lookup.words.insert(lookup.words.end(), of_slab.begin(), of_slab.end());
  }
  return lookup;
}

LookupWords upload_lookup(const Call& call, LookupCall* lookup, int64_t* to) {
  upload_words(call, lookup->words, to);
  const int64_t features = lookup->args.features.features;
  lookup->args.features.table = to;
  lookup->args.column = to + features;
  lookup->args.slab = to + 2 * features;
  LookupWords words;
  const int64_t* at = to + 3 * features;
  for (const auto& of_slab : lookup->slab_features) {
    words.slab_features.push_back(at);
    at += of_slab.size();
  }
  return words;
}

}  // namespace dynemb::cuda
