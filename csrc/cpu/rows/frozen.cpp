// frozen_bag, frozen_rows: lookups in frozen tables. Finding ids and reading their rows is one op,
// so that memory is at work for both at the same time.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "arguments/lookup.h"
#include "cpu/rows/frozen_reader.h"
#include "cpu/rows/initial_row.h"
#include "cpu/rows/row_sums.h"

namespace dynemb::cpu {
namespace {

struct FrozenTile : BagTile {
  int64_t missing = 0;  // ids that are not there, padding aside
  bool damaged = false;
};

struct FrozenCall {
  FeatureArgs features;
  const int64_t* offsets;   // [features * batch + 1]; not without pooling
  const float* id_weights;  // nullptr: all 1
  int64_t batch;
  int64_t pooling;
  OutputColumns columns;
  std::vector<FrozenTable> tables;
  float* output;
};

struct FrozenJob {
  const FrozenCall* call;
  FrozenTile* tile;
  float* scratch;  // kRowsAtOnce rows
};

// The parts of a sink of read_frozen() that bags and single rows share.
struct FrozenSink {
  const FrozenCall& call;
  FrozenTile& tile;
  const FrozenTable& table;
  const int64_t* ids;  // of the tile

  bool has_floats() const { return table.rows.storage == Storage::kFloat32; }
  // The values of id i of the tile, which may be written to `scratch`; nullptr: padding.
  DYNEMB_INLINE const float* values(int64_t i, const char* row, float* scratch) {
    const TableRows& rows = table.rows;
    if (row == nullptr) {
      if (table.index.has_padding && ids[i] == table.index.padding_id) return nullptr;
      ++tile.missing;
      write_initial_row(rows, rows.default_begin, rows.default_count, ids[i], scratch);
      return scratch;
    }
    if (has_floats()) return reinterpret_cast<const float*>(row);
    if (is_quantized(rows.storage)) {
      load_quantized_row(rows.storage, row, rows.dim, scratch);
    } else {
      load_row(rows.storage, row, rows.dim, scratch);
    }
    return scratch;
  }
};

template <bool kWeighted>
struct FrozenBagSink : FrozenSink {
  float* const scratch;
  const int64_t* const offsets;  // of the tile's bags
  const float* const weights;    // of the tile's ids
  int64_t bag = -1;              // of the tile
  int64_t end = 0;               // of the bag's ids in the tile's
  float total = 0.0f;            // of the bag's weights, if there are any
  int64_t ones = 0;              // otherwise: its ids
  float* out = nullptr;

  FrozenBagSink(const FrozenSink& base, float* scratch, const int64_t* offsets)
      : FrozenSink(base),
        scratch(scratch),
        offsets(offsets),
        weights(kWeighted ? call.id_weights + offsets[0] : nullptr) {
    begin_bag();
  }

  DYNEMB_INLINE void begin_bag() {
    if (tile.begin + ++bag >= tile.end) return;
    end = offsets[bag + 1] - offsets[0];
    out = call.output + (tile.begin + bag) * call.columns.count + call.columns.first[tile.feature];
    total = 0.0f;
    ones = 0;
    std::memset(out, 0, sizeof(float) * static_cast<size_t>(table.rows.dim));
  }
  DYNEMB_INLINE void end_bag() {
    if (call.pooling == kPoolMean) {
      // as if ones had been added up as floats
      constexpr int64_t kMostOnes = int64_t{1} << 24;
      const float sum = kWeighted ? total : static_cast<float>(std::min(ones, kMostOnes));
      const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
      for (int64_t c = 0; c < table.rows.dim; ++c) out[c] *= scale;
    }
    begin_bag();
  }
  DYNEMB_INLINE void end_tile() {
    while (tile.begin + bag < tile.end) end_bag();
  }

  // Ids [first, first + count) of the tile, which are in one bag.
  DYNEMB_INLINE void take_floats(int64_t first, const char* const* row, int64_t count) {
    const float* weight = kWeighted ? weights + first : nullptr;
    add_rows<kWeighted>(reinterpret_cast<const float* const*>(row), weight, count, table.rows.dim,
                        out);
    ones += count;
    if (kWeighted) {
      for (int64_t i = 0; i < count; ++i) total += weight[i];
    }
  }
  DYNEMB_INLINE void take_any(int64_t first, const char* const* row, int64_t count) {
    const float* value[kRowsAtOnce];
    float weight[kRowsAtOnce];
    int64_t taken = 0;
    for (int64_t i = 0; i < count; ++i) {
      value[taken] = values(first + i, row[i], scratch + taken * table.rows.dim);
      if (value[taken] == nullptr) continue;
      if (kWeighted) {
        weight[taken] = weights[first + i];
        total += weight[taken];
      }
      ++ones;
      if (++taken == kRowsAtOnce) {
        add_rows<kWeighted>(value, weight, taken, table.rows.dim, out);
        taken = 0;
      }
    }
    add_rows<kWeighted>(value, weight, taken, table.rows.dim, out);
  }
  DYNEMB_INLINE void take(const FrozenBlock& block) {
    const bool stored_floats = has_floats() && block.complete;
    for (int64_t i = 0; i < block.count;) {
      const int64_t first = block.begin + i;
      while (first >= end) end_bag();
      const int64_t count = std::min(block.count - i, end - first);
      if (stored_floats) {
        take_floats(first, block.row + i, count);
      } else {
        take_any(first, block.row + i, count);
      }
      i += count;
    }
  }
};

struct FrozenRowSink : FrozenSink {
  DYNEMB_INLINE void take(const FrozenBlock& block) {
    const int64_t dim = table.rows.dim;
    const size_t bytes = sizeof(float) * static_cast<size_t>(dim);
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t at = block.begin + i;
      float* out = call.output + (tile.begin + at) * dim;
      const float* value = values(at, block.row[i], out);
      if (value == nullptr) {
        std::memset(out, 0, bytes);
      } else if (value != out) {
        std::memcpy(out, value, bytes);
      }
    }
  }
};

DYNEMB_INLINE FrozenSink sink_of(const FrozenJob& job, int64_t first) {
  const FeatureArgs& features = job.call->features;
  return {*job.call, *job.tile, job.call->tables[features.table[job.tile->feature]],
          features.ids + first};
}

template <bool kWeighted>
DYNEMB_INLINE void pool_frozen_as(const FrozenJob& job) {
  const FrozenTile& tile = *job.tile;
  const int64_t* offsets = job.call->offsets + tile.feature * job.call->batch + tile.begin;
  const int64_t count = offsets[tile.end - tile.begin] - offsets[0];
  FrozenBagSink<kWeighted> sink(sink_of(job, offsets[0]), job.scratch, offsets);
  job.tile->damaged = !read_frozen(sink.table, sink.ids, count, sink);
  if (!tile.damaged) sink.end_tile();
}

DYNEMB_INLINE void pool_frozen_body(const FrozenJob& job) {
  if (job.call->id_weights != nullptr) {
    pool_frozen_as<true>(job);
  } else {
    pool_frozen_as<false>(job);
  }
}
DYNEMB_SIMD_VARIANTS(pool_frozen, (const FrozenJob& job), (job))

DYNEMB_INLINE void gather_frozen_body(const FrozenJob& job) {
  FrozenRowSink sink{sink_of(job, job.tile->begin)};
  const int64_t count = job.tile->end - job.tile->begin;
  job.tile->damaged = !read_frozen(sink.table, sink.ids, count, sink);
}
DYNEMB_SIMD_VARIANTS(gather_frozen, (const FrozenJob& job), (job))

// Bags of a feature, or its ids where they are not pooled.
std::vector<FrozenTile> frozen_tiles(const FrozenCall& call) {
  const FeatureArgs& features = call.features;
  const bool pooled = call.pooling != kPoolNone;
  std::vector<FrozenTile> tiles;
  for (size_t f = 0; f < features.table.size(); ++f) {
    const int64_t ids = features.begin[f + 1] - features.begin[f];
    const int64_t first = pooled ? 0 : features.begin[f];
    const int64_t end = pooled ? call.batch : features.begin[f + 1];
    const int64_t per_bag = pooled && call.batch > 0 ? std::max<int64_t>(1, ids / call.batch) : 1;
    const int64_t step = std::max<int64_t>(1, kTileIds / per_bag);
    for (int64_t begin = first; begin < end; begin += step) {
      tiles.push_back({{static_cast<int64_t>(f), begin, std::min(begin + step, end)}});
    }
  }
  return tiles;
}

struct FrozenArguments {
  const Tensor& buckets;
  const Tensor& tables;
  const Tensor& meta;
  const std::vector<Tensor>& weights;
  const Tensor& init_data;
  const Tensor& ids;
  const Tensor& offsets;
  const std::optional<Tensor>& per_sample_weights;
  const std::vector<int64_t>& feature_tables;
  const std::vector<int64_t>& feature_dims;
  const std::vector<int64_t>& formats;
};

void check_memory(const char* op, const char* name, const Tensor& tensor) {
  check_defined(op, name, tensor);
  DYNEMB_CHECK(tensor.is_cpu(), "dynemb::", op, ": ", name, " is on ", device_name(tensor),
               ", but ", op,
               " works on host memory: on a GPU, ids are found by find, and rows "
               "read by a lookup");
}

std::tuple<Tensor, Tensor> look_up(const char* op, const FrozenArguments& given, int64_t pooling) {
  check_memory(op, "buckets", given.buckets);
  check_memory(op, "tables", given.tables);
  for (const Tensor& weights : given.weights) check_memory(op, "weights", weights);
  const IndexArgs index = index_args(op, given.buckets, nullptr, given.tables, given.meta);
  const std::vector<TableRows> rows = group_rows(
      op, frozen_row_tensors(op, given.weights, given.meta, given.init_data, given.formats));
  const IdTensors ids =
      id_tensors(op, given.ids, given.offsets, given.feature_tables, index.table_count);
  const float* weights =
      bag_weights(op, ids, given.per_sample_weights, given.feature_dims, pooling);
  FrozenCall call{
      feature_args(op, ids, given.feature_tables), ids.offsets, weights, ids.batch, pooling,
      output_columns(given.feature_dims, pooling), {},          nullptr};
  int64_t widest = 0;
  for (int64_t t = 0; t < index.table_count; ++t) {
    call.tables.push_back({index.table(t), rows[t]});
    widest = std::max(widest, rows[t].dim);
  }
  for (size_t f = 0; f < given.feature_tables.size(); ++f) {
    const int64_t dim = rows[given.feature_tables[f]].dim;
    DYNEMB_CHECK(given.feature_dims[f] == dim, "dynemb::", op, ": feature_dims[", f, "] is ",
                 given.feature_dims[f], ", but its table has dim ", dim);
  }
  const bool pooled = pooling != kPoolNone;
  Tensor output =
      empty_cpu({pooled ? ids.batch : ids.count, call.columns.count}, ScalarType::Float);
  call.output = static_cast<float*>(output.data_ptr());
  std::vector<FrozenTile> tiles = frozen_tiles(call);
  parallel_units(static_cast<int64_t>(tiles.size()), ids.count, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(pooled ? kRowsAtOnce * widest : 0));
    for (int64_t i = begin; i < end; ++i) {
      const FrozenJob job{&call, &tiles[i], scratch.data()};
      pooled ? pool_frozen(job) : gather_frozen(job);
    }
  });
  Tensor missing = zeros_cpu({index.table_count}, ScalarType::Long);
  auto* count = static_cast<int64_t*>(missing.data_ptr());
  for (const FrozenTile& tile : tiles) {
    const int64_t t = call.features.table[tile.feature];
    DYNEMB_CHECK(!tile.damaged, "dynemb::", op, ": table ", t,
                 " is damaged: its index leads to a row beyond the ", rows[t].rows,
                 " that there are. Freeze the model again");
    count[t] += tile.missing;
  }
  return {output, missing};
}

std::tuple<Tensor, Tensor> frozen_bag(Tensor buckets, Tensor tables, Tensor meta,
                                      std::vector<Tensor> weights, Tensor init_data, Tensor ids,
                                      Tensor offsets, std::optional<Tensor> per_sample_weights,
                                      std::vector<int64_t> feature_tables,
                                      std::vector<int64_t> feature_dims,
                                      std::vector<int64_t> formats, int64_t pooling) {
  const char* op = "frozen_bag";
  check_is_pooled(op, pooling, "use frozen_rows");
  return look_up(op,
                 {buckets, tables, meta, weights, init_data, ids, offsets, per_sample_weights,
                  feature_tables, feature_dims, formats},
                 pooling);
}

std::tuple<Tensor, Tensor> frozen_rows(Tensor buckets, Tensor tables, Tensor meta,
                                       std::vector<Tensor> weights, Tensor init_data, Tensor ids,
                                       Tensor offsets, std::vector<int64_t> feature_tables,
                                       int64_t dim, std::vector<int64_t> formats) {
  const std::vector<int64_t> dims(feature_tables.size(), dim);
  return look_up("frozen_rows",
                 {buckets, tables, meta, weights, init_data, ids, offsets, std::nullopt,
                  feature_tables, dims, formats},
                 kPoolNone);
}

}  // namespace
}  // namespace dynemb::cpu

#define DYNEMB_FROZEN_OPS(m)                                 \
  m.impl("frozen_bag", TORCH_BOX(&dynemb::cpu::frozen_bag)); \
  m.impl("frozen_rows", TORCH_BOX(&dynemb::cpu::frozen_rows))

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { DYNEMB_FROZEN_OPS(m); }
// To say of a GPU's tensors what is wrong, also where no CUDA kernel has been built.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) { DYNEMB_FROZEN_OPS(m); }
