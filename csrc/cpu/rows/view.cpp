#include "cpu/rows/view.h"

#include <algorithm>

#include "arguments/table_constants.h"

namespace dynemb::cpu {

Storage storage_of(const char* op, const char* argument, const Tensor& tensor) {
  check_defined(op, argument, tensor);
  const ScalarType type = tensor.scalar_type();
  const Storage storage = type == ScalarType::BFloat16 ? Storage::kBFloat16
                          : type == ScalarType::Half   ? Storage::kFloat16
                                                       : Storage::kFloat32;
  STD_TORCH_CHECK(storage != Storage::kFloat32 || type == ScalarType::Float, "dynemb::", op, ": ",
                  argument, " has dtype ", dtype_name(type),
                  ", expected float32, bfloat16 or float16");
  check_tensor(op, argument, tensor, type);
  return storage;
}

int64_t storage_bytes(Storage storage) { return storage == Storage::kFloat32 ? 4 : 2; }

std::vector<TableRows> table_rows(const char* op, const std::vector<Tensor>& weights,
                                  const std::vector<Tensor>& generations, const Tensor& meta,
                                  const Tensor& init_data) {
  check_tensor(op, "meta", meta, ScalarType::Long);
  check_size(op, "meta", meta, 1, kMetaColumns);
  check_tensor(op, "init_data", init_data, ScalarType::Double);
  STD_TORCH_CHECK(init_data.dim() == 1, "dynemb::", op, ": init_data has ", init_data.dim(),
                  " dimensions, expected 1");
  STD_TORCH_CHECK(!weights.empty() && weights.size() == generations.size(), "dynemb::", op,
                  ": got ", weights.size(), " weights and ", generations.size(),
                  " generations, expected one of each per slab");
  for (size_t s = 0; s < weights.size(); ++s) {
    storage_of(op, "weights", weights[s]);
    check_tensor(op, "generations", generations[s], ScalarType::Int);
    STD_TORCH_CHECK(weights[s].dim() == 2 && weights[s].size(1) > 0, "dynemb::", op,
                    ": weights must have shape (rows, dim)");
    check_length(op, "generations", generations[s], weights[s].size(0));
  }
  const auto* m = static_cast<const int64_t*>(meta.data_ptr());
  std::vector<TableRows> tables;
  for (int64_t t = 0; t < meta.size(0); ++t, m += kMetaColumns) {
    const int64_t s = m[kMetaSlab];
    STD_TORCH_CHECK(
        s >= 0 && s < static_cast<int64_t>(weights.size()) && weights[s].size(1) == m[kMetaDim],
        "dynemb::", op, ": meta of table ", t, " names slab ", s, " of dim ", m[kMetaDim],
        ", which does not match weights");
    check_initializers(op, t, m, m[kMetaDim], static_cast<const double*>(init_data.data_ptr()),
                       init_data.numel());
    const Storage storage = storage_of(op, "weights", weights[s]);
    tables.push_back({static_cast<char*>(weights[s].data_ptr()),
                      static_cast<int32_t*>(generations[s].data_ptr()), weights[s].size(0),
                      m[kMetaDim], storage, m[kMetaDim] * storage_bytes(storage), s, m[kMetaSeed],
                      m[kMetaFirstColumn], static_cast<const double*>(init_data.data_ptr()),
                      m[kMetaInitBegin], m[kMetaInitCount], m[kMetaDefaultBegin],
                      m[kMetaDefaultCount], m[kMetaRefusedBegin], m[kMetaRefusedCount]});
  }
  return tables;
}

Lookup lookup_call(const char* op, const std::vector<TableRows>& tables, const Tensor& ids,
                   const Tensor& handles, const Tensor& offsets,
                   const std::optional<Tensor>& per_sample_weights,
                   const std::vector<int64_t>& feature_tables,
                   const std::vector<int64_t>& feature_dims, int64_t pooling) {
  Lookup lookup;
  lookup.features =
      feature_ids(op, ids, offsets, feature_tables, static_cast<int64_t>(tables.size()));
  check_tensor(op, "handles", handles, ScalarType::Long);
  check_length(op, "handles", handles, lookup.features.count);
  const int64_t features = static_cast<int64_t>(feature_tables.size());
  STD_TORCH_CHECK(static_cast<int64_t>(feature_dims.size()) == features, "dynemb::", op,
                  ": feature_dims has ", feature_dims.size(), " elements, expected ", features);
  STD_TORCH_CHECK(pooling >= kPoolSum && pooling <= kPoolNone, "dynemb::", op, ": pooling is ",
                  pooling, ", expected 0 (sum), 1 (mean) or 2 (none)");
  lookup.handles = static_cast<const int64_t*>(handles.data_ptr());
  lookup.offsets = static_cast<const int64_t*>(offsets.data_ptr());
  lookup.id_weights = nullptr;
  if (per_sample_weights.has_value()) {
    check_tensor(op, "per_sample_weights", *per_sample_weights, ScalarType::Float);
    check_length(op, "per_sample_weights", *per_sample_weights, lookup.features.count);
    lookup.id_weights = static_cast<const float*>(per_sample_weights->data_ptr());
  }
  if (pooling != kPoolNone) check_pooled_offsets(op, offsets);
  lookup.batch = (offsets.numel() - 1) / features;
  lookup.pooling = pooling;
  lookup.columns = 0;
  for (int64_t f = 0; f < features; ++f) {
    const TableRows& table = tables[feature_tables[f]];
    STD_TORCH_CHECK(feature_dims[f] == table.dim, "dynemb::", op, ": feature_dims[", f, "] is ",
                    feature_dims[f], ", but its table has dim ", table.dim);
    STD_TORCH_CHECK(pooling != kPoolNone || table.dim == feature_dims[0], "dynemb::", op,
                    ": features without pooling must have one dim, got ", feature_dims[0], " and ",
                    table.dim);
    lookup.column.push_back(pooling == kPoolNone ? 0 : lookup.columns);
    lookup.columns = pooling == kPoolNone ? table.dim : lookup.columns + table.dim;
    int64_t highest = -1;
    for (int64_t i = lookup.features.begin[f]; i < lookup.features.begin[f + 1]; ++i) {
      highest = std::max(highest, lookup.handles[i]);
    }
    STD_TORCH_CHECK(highest < 0 || handle_row(highest) < table.rows, "dynemb::", op,
                    ": a handle names row ", handle_row(highest), ", but the table has ",
                    table.rows, " rows: handles must come from find or find_or_insert_");
  }
  return lookup;
}

std::vector<BagTile> make_bag_tiles(const Lookup& lookup) {
  constexpr int64_t kIdsPerTile = 1024;
  const int64_t bags = lookup.batch * static_cast<int64_t>(lookup.features.table.size());
  const int64_t ids_per_bag = bags == 0 ? 1 : std::max<int64_t>(1, lookup.features.count / bags);
  const int64_t bags_per_tile = std::max<int64_t>(1, kIdsPerTile / ids_per_bag);
  std::vector<BagTile> tiles;
  for (size_t f = 0; f < lookup.features.table.size(); ++f) {
    for (int64_t begin = 0; begin < lookup.batch; begin += bags_per_tile) {
      tiles.push_back(
          {static_cast<int64_t>(f), begin, std::min(begin + bags_per_tile, lookup.batch)});
    }
  }
  return tiles;
}

void bag_scale(const Lookup& lookup, int64_t bag, float* scale) {
  float sum = 0.0f;
  for (int64_t i = lookup.offsets[bag]; i < lookup.offsets[bag + 1]; ++i) {
    if (lookup.handles[i] == kPaddingHandle) continue;
    sum += lookup.id_weights == nullptr ? 1.0f : lookup.id_weights[i];
  }
  *scale = sum == 0.0f ? 0.0f : 1.0f / sum;
}

}  // namespace dynemb::cpu
