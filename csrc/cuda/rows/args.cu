#include "cuda/rows/args.h"

namespace dynemb::cuda {

std::vector<SlabState> slab_states(const Call& call, const std::vector<Tensor>& weights,
                                   const std::vector<Tensor>& state,
                                   const std::vector<Tensor>& dirty_bits,
                                   const std::vector<Tensor>& copy_on_write) {
  std::vector<SlabState> result = state_tensors(call, weights, state, dirty_bits, copy_on_write);
  for (size_t i = 0; i < state.size(); ++i) {
    DYNEMB_CHECK(is_aligned(state[i].data_ptr()), "dynemb::", call.op, ": state ",
                 i / weights.size(), " of slab ", i % weights.size(),
                 " must begin at a multiple of 16 bytes: clone it");
  }
  return result;
}

GroupRows group_rows(const RowTensors& given) {
  GroupRows rows;
  for (size_t s = 0; s < given.slabs.size(); ++s) {
    const SlabTensors& slab = given.slabs[s];
    rows.slabs.push_back(
        {slab.weights, slab.generations, slab.rows, slab.dim, slab.storage, slab.row_bytes, true});
    for (size_t other = 0; other < s; ++other) {
      if (rows.slabs[other].dim != slab.dim) continue;
      rows.slabs[other].only_of_dim = rows.slabs[s].only_of_dim = false;
    }
  }
  rows.args = {given.meta, given.init_data};
  rows.table_count = given.table_count;
  return rows;
}

LookupCall lookup_call(const Call& call, const GroupRows& rows, const Tensor& ids,
                       const Tensor& handles, const Tensor& offsets,
                       const std::optional<Tensor>& per_sample_weights,
                       const std::vector<int64_t>& feature_tables,
                       const std::vector<int64_t>& feature_dims, int64_t pooling) {
  const IdTensors given_ids = id_tensors(call, ids, offsets, feature_tables, rows.table_count);
  const LookupTensors given =
      lookup_tensors(call, given_ids, handles, per_sample_weights, feature_dims, pooling);
  LookupCall lookup;
  lookup.slab_features.resize(rows.slabs.size());
  for (size_t f = 0; f < feature_dims.size(); ++f) {
    // the dim of a feature determines its slab, except if slabs differ in the dtype only: then
    // kernels read meta
    int64_t slab = -1;
    for (size_t s = 0; s < rows.slabs.size(); ++s) {
      if (rows.slabs[s].dim != feature_dims[f]) continue;
      slab = static_cast<int64_t>(s);
      lookup.slab_features[s].push_back(static_cast<int64_t>(f));
    }
    DYNEMB_CHECK(slab >= 0, "dynemb::", call.op, ": feature_dims[", f, "] is ", feature_dims[f],
                 ", but no table of the group has that dim");
    lookup.feature_slab.push_back(
        rows.slabs[static_cast<size_t>(slab)].only_of_dim ? slab : -feature_dims[f]);
  }
  const OutputColumns columns = output_columns(feature_dims, pooling);
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    bool aligned = columns.count % 4 == 0 && is_aligned(rows.slabs[s].weights);
    for (const int64_t f : lookup.slab_features[s]) {
      aligned = aligned && columns.first[static_cast<size_t>(f)] % 4 == 0;
    }
    lookup.slab_aligned.push_back(aligned);
  }
  lookup.args = {feature_args(call, given_ids, nullptr),
                 given.handles,
                 given.id_weights,
                 pooling,
                 columns.count,
                 nullptr,
                 nullptr};
  lookup.output_rows = pooling == kPoolNone ? given_ids.count : given_ids.batch;
  lookup.output_columns = columns.count;
  // words: table, column and slab of each feature, then the features of each slab
  lookup.words = feature_tables;
  lookup.words.insert(lookup.words.end(), columns.first.begin(), columns.first.end());
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
