#include "cpu/rows/args.h"

#include <algorithm>
#include <utility>

#include "arguments/table_constants.h"
#include "cpu/runtime/parallel.h"

namespace dynemb::cpu {

std::vector<TableRows> group_rows(const char* op, const RowTensors& rows) {
  std::vector<TableRows> tables;
  tables.reserve(static_cast<size_t>(rows.table_count));
  for (int64_t t = 0; t < rows.table_count; ++t) {
    const int64_t* m = rows.meta + t * kMetaColumns;
    const int64_t s = m[kMetaSlab];
    DYNEMB_CHECK(
        s >= 0 && s < static_cast<int64_t>(rows.slabs.size()) && rows.slabs[s].dim == m[kMetaDim],
        "dynemb::", op, ": meta of table ", t, " names slab ", s, " of dim ", m[kMetaDim],
        ", which does not match weights");
    check_initializers(op, t, m, m[kMetaDim], rows.init_data, rows.init_numel);
    const SlabTensors& slab = rows.slabs[s];
    tables.push_back({slab.weights, slab.generations, slab.rows, slab.dim, slab.storage,
                      slab.row_bytes, s, m[kMetaSeed], m[kMetaFirstColumn], rows.init_data,
                      m[kMetaInitBegin], m[kMetaInitCount], m[kMetaDefaultBegin],
                      m[kMetaDefaultCount], m[kMetaRefusedBegin], m[kMetaRefusedCount]});
  }
  return tables;
}

namespace {

struct HandlesJob {
  const int64_t* handles;
  int64_t count;
  int64_t* highest;
};
DYNEMB_INLINE void find_highest_body(const HandlesJob& job) {
  int64_t highest = -1;
  for (int64_t i = 0; i < job.count; ++i) highest = std::max(highest, job.handles[i]);
  *job.highest = highest;
}
DYNEMB_SIMD_VARIANTS(find_highest, (const HandlesJob& job), (job))

// -1: no handle has a row.
int64_t highest_handle(const int64_t* handles, int64_t count) {
  constexpr int64_t kHandlesPerUnit = 1 << 13;
  int64_t highest = -1;
  if (count <= kHandlesPerUnit) {
    find_highest({handles, count, &highest});
    return highest;
  }
  const int64_t units = (count + kHandlesPerUnit - 1) / kHandlesPerUnit;
  std::vector<int64_t> of_unit(static_cast<size_t>(units));
  parallel_units(units, count, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const int64_t first = u * kHandlesPerUnit;
      find_highest({handles + first, std::min(kHandlesPerUnit, count - first), &of_unit[u]});
    }
  });
  return *std::max_element(of_unit.begin(), of_unit.end());
}

}  // namespace

LookupArgs lookup_before_handles(const char* op, const std::vector<TableRows>& tables,
                                 const Tensor& ids, const Tensor& offsets,
                                 const std::optional<Tensor>& per_sample_weights,
                                 const std::vector<int64_t>& feature_tables,
                                 const std::vector<int64_t>& feature_dims, int64_t pooling) {
  const IdTensors given =
      id_tensors(op, ids, offsets, feature_tables, static_cast<int64_t>(tables.size()));
  FeatureArgs features = feature_args(op, given, feature_tables);
  const float* id_weights = bag_weights(op, given, per_sample_weights, feature_dims, pooling);
  for (size_t f = 0; f < feature_tables.size(); ++f) {
    const TableRows& table = tables[feature_tables[f]];
    DYNEMB_CHECK(feature_dims[f] == table.dim, "dynemb::", op, ": feature_dims[", f, "] is ",
                 feature_dims[f], ", but its table has dim ", table.dim);
  }
  OutputColumns columns = output_columns(feature_dims, pooling);
  return {std::move(features),      nullptr,      given.offsets, id_weights, given.batch, pooling,
          std::move(columns.first), columns.count};
}

void set_handles(const char* op, const std::vector<TableRows>& tables, const Tensor& handles,
                 LookupArgs* lookup) {
  const FeatureArgs& features = lookup->features;
  const int64_t* handle = id_words(op, "handles", handles, features.count);
  for (size_t f = 0; f < features.table.size(); ++f) {
    const TableRows& table = tables[features.table[f]];
    const int64_t highest =
        highest_handle(handle + features.begin[f], features.begin[f + 1] - features.begin[f]);
    DYNEMB_CHECK(highest < 0 || handle_row(highest) < table.rows, "dynemb::", op,
                 ": a handle names row ", handle_row(highest), ", but the table has ", table.rows,
                 " rows: handles must come from find or find_or_insert_");
  }
  lookup->handles = handle;
}

LookupArgs lookup_call(const char* op, const std::vector<TableRows>& tables, const Tensor& ids,
                       const Tensor& handles, const Tensor& offsets,
                       const std::optional<Tensor>& per_sample_weights,
                       const std::vector<int64_t>& feature_tables,
                       const std::vector<int64_t>& feature_dims, int64_t pooling) {
  LookupArgs lookup = lookup_before_handles(op, tables, ids, offsets, per_sample_weights,
                                            feature_tables, feature_dims, pooling);
  set_handles(op, tables, handles, &lookup);
  return lookup;
}

std::vector<BagTile> make_bag_tiles(const LookupArgs& lookup) {
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

MeanDivisor bag_divisor(const LookupArgs& lookup, int64_t bag) {
  float sum = 0.0f;
  for (int64_t i = lookup.offsets[bag]; i < lookup.offsets[bag + 1]; ++i) {
    if (lookup.handles[i] == kPaddingHandle) continue;
    sum += lookup.id_weights == nullptr ? 1.0f : lookup.id_weights[i];
  }
  return mean_divisor(sum);
}

}  // namespace dynemb::cpu
