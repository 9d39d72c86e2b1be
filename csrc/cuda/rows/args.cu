#include "cuda/rows/args.h"

namespace dynemb::cuda {

Storage storage_of(const Call& call, const char* argument, const Tensor& tensor) {
  check_defined(call.op, argument, tensor);
  const ScalarType type = tensor.scalar_type();
  const Storage storage = type == ScalarType::BFloat16 ? Storage::kBFloat16
                          : type == ScalarType::Half   ? Storage::kFloat16
                                                       : Storage::kFloat32;
  STD_TORCH_CHECK(storage != Storage::kFloat32 || type == ScalarType::Float, "dynemb::", call.op,
                  ": ", argument, " has dtype ", dtype_name(type),
                  ", expected float32, bfloat16 or float16");
  call.check(argument, tensor, type);
  return storage;
}

std::vector<SlabState> slab_state(const Call& call, const std::vector<Tensor>& weights,
                                  const std::vector<Tensor>& state) {
  const size_t slabs = weights.size();
  STD_TORCH_CHECK(slabs > 0 && state.size() % slabs == 0, "dynemb::", call.op, ": state has ",
                  state.size(), " tensors, expected a multiple of the ", slabs, " slabs");
  std::vector<SlabState> result(slabs, SlabState{});
  for (size_t i = 0; i < state.size(); ++i) {
    SlabState& slab = result[i % slabs];
    const Tensor& tensor = state[i];
    const Tensor& rows = weights[i % slabs];
    const int64_t dim = rows.size(1);
    check_defined(call.op, "state", tensor);
    const ScalarType type = tensor.scalar_type();
    check_size(call.op, "state", tensor, 0, rows.size(0));
    STD_TORCH_CHECK(is_aligned(tensor.data_ptr()), "dynemb::", call.op, ": state ", i / slabs,
                    " of slab ", i % slabs, " must begin at a multiple of 16 bytes: clone it");
    if (tensor.dim() == 1 && type == ScalarType::Int) {
      call.check("state", tensor, ScalarType::Int);
      STD_TORCH_CHECK(slab.steps == nullptr, "dynemb::", call.op, ": state of slab ", i % slabs,
                      " has two tensors of steps");
      slab.steps = static_cast<int32_t*>(tensor.data_ptr());
      continue;
    }
    if (tensor.dim() == 1) {
      call.check("state", tensor, ScalarType::Float);
      STD_TORCH_CHECK(slab.row_states < kMaxStates, "dynemb::", call.op, ": state of slab ",
                      i % slabs, " has more than ", kMaxStates, " values per row");
      slab.of_row[slab.row_states++] = static_cast<float*>(tensor.data_ptr());
      continue;
    }
    const int k = slab.element_states++;
    STD_TORCH_CHECK(k < kMaxStates, "dynemb::", call.op, ": state of slab ", i % slabs,
                    " has more than ", kMaxStates, " values per weight");
    if (type == ScalarType::Byte) {
      call.check("state", tensor, ScalarType::Byte);
      slab.storage[k] = Storage::kBlockFloat8;
      slab.row_bytes[k] = block_row_bytes(dim);
      check_size(call.op, "state", tensor, 1, slab.row_bytes[k]);
    } else {
      STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                      "dynemb::", call.op, ": state has dtype ", dtype_name(type),
                      ", expected float32, bfloat16 or uint8");
      slab.storage[k] = storage_of(call, "state", tensor);
      slab.row_bytes[k] = dim * static_cast<int64_t>(tensor.element_size());
      check_size(call.op, "state", tensor, 1, dim);
    }
    slab.element[k] = static_cast<char*>(tensor.data_ptr());
  }
  return result;
}

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
    const Storage storage = storage_of(call, "weights", weights[s]);
    call.check("generations", generations[s], ScalarType::Int);
    STD_TORCH_CHECK(weights[s].dim() == 2 && weights[s].size(1) > 0, "dynemb::", call.op,
                    ": weights must have shape (rows, dim)");
    check_length(call.op, "generations", generations[s], weights[s].size(0));
    const int64_t dim = weights[s].size(1);
    rows.slabs.push_back({static_cast<char*>(weights[s].data_ptr()),
                          static_cast<int32_t*>(generations[s].data_ptr()), weights[s].size(0), dim,
                          storage, dim * static_cast<int64_t>(weights[s].element_size()), true});
    for (size_t other = 0; other < s; ++other) {
      if (rows.slabs[other].dim != dim) continue;
      rows.slabs[other].only_of_dim = rows.slabs[s].only_of_dim = false;
    }
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
  check_length(call.op, "handles", handles, args.features.count);
  const size_t features = feature_tables.size();
  STD_TORCH_CHECK(feature_dims.size() == features, "dynemb::", call.op, ": feature_dims has ",
                  feature_dims.size(), " elements, expected ", features);
  STD_TORCH_CHECK(pooling >= kPoolSum && pooling <= kPoolNone, "dynemb::", call.op, ": pooling is ",
                  pooling, ", expected 0 (sum), 1 (mean) or 2 (none)");
  if (pooling != kPoolNone) check_pooled_offsets(call.op, offsets);
  args.handles = static_cast<const int64_t*>(handles.data_ptr());
  args.id_weights = nullptr;
  if (per_sample_weights.has_value()) {
    call.check("per_sample_weights", *per_sample_weights, ScalarType::Float);
    check_length(call.op, "per_sample_weights", *per_sample_weights, args.features.count);
    args.id_weights = static_cast<const float*>(per_sample_weights->data_ptr());
  }
  args.pooling = pooling;
  args.columns = 0;
  lookup.slab_features.resize(rows.slabs.size());
  lookup.slab_aligned.assign(rows.slabs.size(), true);
  std::vector<int64_t> columns;
  for (size_t f = 0; f < features; ++f) {
    // the dim of a feature names the slab of its table, but where slabs differ in the dtype only:
    // then kernels look into meta
    int64_t slab = -1;
    columns.push_back(pooling == kPoolNone ? 0 : args.columns);
    for (size_t s = 0; s < rows.slabs.size(); ++s) {
      if (rows.slabs[s].dim != feature_dims[f]) continue;
      slab = static_cast<int64_t>(s);
      lookup.slab_features[s].push_back(static_cast<int64_t>(f));
      if (columns.back() % 4 != 0) lookup.slab_aligned[s] = false;
    }
    STD_TORCH_CHECK(slab >= 0, "dynemb::", call.op, ": feature_dims[", f, "] is ", feature_dims[f],
                    ", but no table of the group has that dim");
    STD_TORCH_CHECK(pooling != kPoolNone || feature_dims[f] == feature_dims[0], "dynemb::", call.op,
                    ": features without pooling must have one dim, got ", feature_dims[0], " and ",
                    feature_dims[f]);
    lookup.feature_slab.push_back(
        rows.slabs[static_cast<size_t>(slab)].only_of_dim ? slab : -feature_dims[f]);
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
