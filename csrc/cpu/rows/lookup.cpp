// Forward of the lookups: embedding, and those without an autograd formula: embedding_forward,
// embedding_inference, find_and_read.
#include "cpu/rows/lookup.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "arguments/clocks.h"
#include "cpu/index/find.h"
#include "cpu/index/one_writer.h"
#include "cpu/rows/args.h"
#include "cpu/rows/floats.h"
#include "cpu/rows/initial_row.h"
#include "cpu/rows/row_sums.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kPrefetchRows = 64;  // rows prefetched ahead of the one in use

struct BagJob {
  const LookupArgs* lookup;
  const TableRows* table;
  BagTile tile;
  float* output;   // [batch, columns] for pooling, [ids, dim] without
  float* scratch;  // kRowsAtOnce rows and one more
};

// Addresses of the rows of `count` handles; true: all of them are live. Without branches, so that
// the processor reads on while generations are being fetched.
template <Storage kStorage>
DYNEMB_INLINE bool live_rows(const TableRows& table, const int64_t* handles, int64_t count,
                             const Stored<kStorage>** row) {
  int64_t dead = 0;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t handle = handles[r];
    const int64_t number = handle_row(handle & ~(handle >> 63));
    dead |= handle | -static_cast<int64_t>(handle_generation(handle) != table.generations[number]);
    row[r] = reinterpret_cast<const Stored<kStorage>*>(table.row(number));
  }
  return dead >= 0;
}

// Starts loading rows and generations of `count` handles, of a table that has rows.
DYNEMB_INLINE void prefetch_rows(const TableRows& table, const int64_t* handles, int64_t count) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t number = handle_row(handles[r] & ~(handles[r] >> 63));
    prefetch_line_of(table.generations + number);
    prefetch_row_bytes(table.row(number), table.row_bytes);
  }
}

// kStorage: that of the rows if it is of 16 bits, otherwise float32, to which rows are converted.
template <bool kWeighted, class Level, Storage kStorage>
DYNEMB_INLINE void pool_tile(const BagJob& job) {
  const LookupArgs& lookup = *job.lookup;
  const TableRows table = *job.table;  // a copy, so that stores below cannot change it
  const int64_t* const handles = lookup.handles;
  const int64_t first_bag = job.tile.feature * lookup.batch;
  const int64_t feature_end = lookup.features.begin[job.tile.feature + 1];
  const int64_t first_id = lookup.offsets[first_bag + job.tile.begin];
  for (int64_t i = first_id; i < std::min(first_id + kPrefetchRows, feature_end); ++i) {
    prefetch_row(table, handles[i]);
  }
  const Stored<kStorage>* row[kRowsAtOnce];
  float weight[kRowsAtOnce];
  // Whether rows may be summed in place.
  const bool direct = table.storage == kStorage && table.rows > 0;
  for (int64_t b = job.tile.begin; b < job.tile.end; ++b) {
    const int64_t bag = first_bag + b;
    const int64_t bag_end = lookup.offsets[bag + 1];
    float* out = job.output + b * lookup.columns + lookup.column[job.tile.feature];
    std::memset(out, 0, sizeof(float) * static_cast<size_t>(table.dim));
    for (int64_t i = lookup.offsets[bag]; i < bag_end;) {
      const int64_t last = std::min(i + kRowsAtOnce, bag_end);
      if (direct) {
        prefetch_rows(table, handles + i + kPrefetchRows,
                      std::min(last, feature_end - kPrefetchRows) - i);
        if (live_rows<kStorage>(table, handles + i, last - i, row)) {
          const float* weights = kWeighted ? lookup.id_weights + i : nullptr;
          add_rows<kWeighted, Level, kStorage>(row, weights, last - i, table.dim, out);
          i = last;
          continue;
        }
      }
      int64_t rows = 0;
      for (; i < last; ++i) {
        if (!direct && i + kPrefetchRows < feature_end) {
          prefetch_row(table, handles[i + kPrefetchRows]);
        }
        float* scratch = job.scratch + rows * table.dim;
        const int64_t id = lookup.features.ids[i];
        if constexpr (kStorage == Storage::kFloat32) {
          row[rows] = resolve_row<Level>(table, handles[i], id, scratch);
        } else {
          row[rows] = resolve_halves<Level>(table, handles[i], id, scratch + table.dim,
                                            reinterpret_cast<uint16_t*>(scratch));
        }
        if constexpr (kWeighted) weight[rows] = lookup.id_weights[i];
        rows += row[rows] != nullptr;
      }
      add_rows<kWeighted, Level, kStorage>(row, weight, rows, table.dim, out);
    }
    if (lookup.pooling == kPoolMean) {
      const MeanDivisor divisor = bag_divisor(lookup, bag);
      for (int64_t c = 0; c < table.dim; ++c) out[c] = divisor.divide(out[c]);
    }
  }
}
template <bool kWeighted, class Level>
DYNEMB_INLINE void pool_stored(const BagJob& job) {
  switch (job.table->storage) {
    case Storage::kBFloat16:
      return pool_tile<kWeighted, Level, Storage::kBFloat16>(job);
    case Storage::kFloat16:
      return pool_tile<kWeighted, Level, Storage::kFloat16>(job);
    default:
      return pool_tile<kWeighted, Level, Storage::kFloat32>(job);
  }
}
template <class Level>
DYNEMB_INLINE void pool_bags_body(const BagJob& job) {
  job.lookup->id_weights == nullptr ? pool_stored<false, Level>(job)
                                    : pool_stored<true, Level>(job);
}
DYNEMB_SIMD_TYPED_VARIANTS(pool_bags, (const BagJob& job), (job))

template <class Level>
DYNEMB_INLINE void gather_rows_body(const BagJob& job) {
  const LookupArgs& lookup = *job.lookup;
  const TableRows& table = *job.table;
  const size_t bytes = sizeof(float) * static_cast<size_t>(table.dim);
  for (int64_t i = job.tile.begin; i < job.tile.end; ++i) {
    if (i + kPrefetchRows < job.tile.end) prefetch_row(table, lookup.handles[i + kPrefetchRows]);
    float* out = job.output + i * table.dim;
    const float* row = resolve_row<Level>(table, lookup.handles[i], lookup.features.ids[i], out);
    if (row == nullptr) {
      std::memset(out, 0, bytes);
    } else if (row != out) {
      std::memcpy(out, row, bytes);
    }
  }
}
DYNEMB_SIMD_TYPED_VARIANTS(gather_rows, (const BagJob& job), (job))

}  // namespace

Tensor run_lookup(const LookupArgs& lookup, const std::vector<TableRows>& tables) {
  const bool pooled = lookup.pooling != kPoolNone;
  Tensor output =
      empty_cpu({pooled ? lookup.batch : lookup.features.count, lookup.columns}, ScalarType::Float);
  auto* out = static_cast<float*>(output.data_ptr());
  std::vector<BagTile> tiles;
  if (pooled) {
    tiles = make_bag_tiles(lookup);
  } else {
    for (size_t f = 0; f < lookup.features.table.size(); ++f) {
      for (int64_t i = lookup.features.begin[f]; i < lookup.features.begin[f + 1]; i += kTileIds) {
        tiles.push_back(
            {static_cast<int64_t>(f), i, std::min(i + kTileIds, lookup.features.begin[f + 1])});
      }
    }
  }
  parallel_units(static_cast<int64_t>(tiles.size()), lookup.features.count,
                 [&](int64_t begin, int64_t end) {
                   std::vector<float> scratch(
                       static_cast<size_t>(pooled ? (kRowsAtOnce + 1) * lookup.columns : 0));
                   for (int64_t i = begin; i < end; ++i) {
                     const TableRows& table = tables[lookup.features.table[tiles[i].feature]];
                     const BagJob job{&lookup, &table, tiles[i], out, scratch.data()};
                     pooled ? pool_bags(job) : gather_rows(job);
                   }
                 });
  return output;
}

Tensor update_count(const char* op, const Tensor& row_clock, const Tensor& meta) {
  const int64_t* extra = row_clock_extra(op, row_clock, meta.size(0));
  Tensor count = empty_cpu({1}, ScalarType::Long);
  *static_cast<int64_t*>(count.data_ptr()) = extra[kRowClockUpdates];
  return count;
}

Tensor read_rows(const char* op, const std::vector<Tensor>& weights,
                 const std::vector<Tensor>& generations, const Tensor& meta,
                 const Tensor& init_data, const Tensor& ids, const Tensor& handles,
                 const Tensor& offsets, const std::optional<Tensor>& per_sample_weights,
                 const std::vector<int64_t>& feature_tables,
                 const std::vector<int64_t>& feature_dims, int64_t pooling,
                 const std::vector<int64_t>& formats) {
  const auto tables =
      group_rows(op, row_tensors(op, weights, generations, meta, init_data, formats));
  return run_lookup(lookup_call(op, tables, ids, handles, offsets, per_sample_weights,
                                feature_tables, feature_dims, pooling),
                    tables);
}

namespace {

Tensor embedding_inference(std::vector<Tensor> weights, std::vector<Tensor> generations,
                           Tensor meta, Tensor init_data, Tensor ids, Tensor handles,
                           Tensor offsets, std::optional<Tensor> per_sample_weights,
                           std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
                           int64_t pooling, std::vector<int64_t> formats) {
  return read_rows("embedding_inference", weights, generations, meta, init_data, ids, handles,
                   offsets, per_sample_weights, feature_tables, feature_dims, pooling, formats);
}

std::tuple<Tensor, Tensor> read_with_count(
    const char* op, const std::vector<Tensor>& weights, const std::vector<Tensor>& generations,
    const Tensor& row_clock, const Tensor& meta, const Tensor& init_data, const Tensor& ids,
    const Tensor& handles, const Tensor& offsets, const std::optional<Tensor>& per_sample_weights,
    const std::vector<int64_t>& feature_tables, const std::vector<int64_t>& feature_dims,
    int64_t pooling) {
  Tensor output = read_rows(op, weights, generations, meta, init_data, ids, handles, offsets,
                            per_sample_weights, feature_tables, feature_dims, pooling);
  return {output, update_count(op, row_clock, meta)};
}

std::tuple<Tensor, Tensor> embedding_forward(std::vector<Tensor> weights,
                                             std::vector<Tensor> generations, Tensor row_clock,
                                             Tensor meta, Tensor init_data, Tensor ids,
                                             Tensor handles, Tensor offsets,
                                             std::optional<Tensor> per_sample_weights,
                                             std::vector<int64_t> feature_tables,
                                             std::vector<int64_t> feature_dims, int64_t pooling) {
  return read_with_count("embedding_forward", weights, generations, row_clock, meta, init_data, ids,
                         handles, offsets, per_sample_weights, feature_tables, feature_dims,
                         pooling);
}

// state, dirty_bits, copy_on_write, hyper, pending, grad_anchor and optimizer are for the autograd
// formula.
std::tuple<Tensor, Tensor> embedding(
    std::vector<Tensor> weights, std::vector<Tensor> generations, std::vector<Tensor> /*state*/,
    std::vector<Tensor> /*dirty_bits*/, std::vector<Tensor> /*copy_on_write*/, Tensor row_clock,
    Tensor /*hyper*/, Tensor meta, Tensor init_data, std::vector<Tensor> /*pending*/, Tensor ids,
    Tensor handles, Tensor offsets, std::optional<Tensor> per_sample_weights,
    Tensor /*grad_anchor*/, std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
    int64_t pooling, int64_t /*optimizer*/) {
  return read_with_count("embedding", weights, generations, row_clock, meta, init_data, ids,
                         handles, offsets, per_sample_weights, feature_tables, feature_dims,
                         pooling);
}

// One table and one feature, if the op got none.
void fill_in_feature(const char* op, const Tensor& tables, const std::vector<Tensor>& weights,
                     std::vector<int64_t>* feature_tables, std::vector<int64_t>* feature_dims) {
  if (!feature_tables->empty() || !feature_dims->empty()) return;
  DYNEMB_CHECK(tables.dim() == 2 && tables.size(0) == 1, "dynemb::", op,
               ": feature_tables is empty, expected the table of each feature: it may be left "
               "out where there is one table");
  DYNEMB_CHECK(weights.size() == 1 && weights[0].dim() == 2, "dynemb::", op, ": weights has ",
               weights.size(), " entries, expected one of shape (rows, dim) for one table");
  *feature_tables = {0};
  *feature_dims = {weights[0].size(1)};
}

// Offsets with the number of ids at their end.
Tensor with_last_offset(const char* op, const Tensor& offsets, const Tensor& ids,
                        const std::vector<int64_t>& feature_tables, int64_t pooling) {
  check_is_pooled(op, pooling, "leave out include_last_offset");
  check_tensor(op, "offsets", offsets, ScalarType::Long);
  DYNEMB_CHECK(offsets.dim() == 1 && feature_tables.size() == 1, "dynemb::", op,
               ": include_last_offset is False, and offsets has ", offsets.dim(),
               " dimensions with ", feature_tables.size(),
               " features, expected where the bags of one feature begin");
  const int64_t bags = offsets.numel();
  Tensor result = empty_cpu({bags + 1}, ScalarType::Long);
  auto* words = static_cast<int64_t*>(result.data_ptr());
  std::memcpy(words, offsets.data_ptr(), sizeof(int64_t) * static_cast<size_t>(bags));
  words[bags] = ids.numel();
  return result;
}

Tensor find_and_read(Tensor buckets, Tensor tables, Tensor meta, std::vector<Tensor> weights,
                     std::vector<Tensor> generations, Tensor init_data, Tensor ids, Tensor offsets,
                     std::optional<Tensor> per_sample_weights, std::vector<int64_t> feature_tables,
                     std::vector<int64_t> feature_dims, int64_t pooling, bool include_last_offset) {
  const char* op = "find_and_read";
  fill_in_feature(op, tables, weights, &feature_tables, &feature_dims);
  if (!include_last_offset) offsets = with_last_offset(op, offsets, ids, feature_tables, pooling);
  Tensor output;
  const void* memory = tables.defined() ? tables.data_ptr() : nullptr;  // find_handles checks it
  read_between_moves(op, memory, [&] {
    const Tensor handles = find_handles(op, buckets, tables, meta, ids, offsets, feature_tables);
    output = read_rows(op, weights, generations, meta, init_data, ids, handles, offsets,
                       per_sample_weights, feature_tables, feature_dims, pooling);
  });
  return output;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("embedding", TORCH_BOX(&dynemb::cpu::embedding));
  m.impl("embedding_forward", TORCH_BOX(&dynemb::cpu::embedding_forward));
  m.impl("find_and_read", TORCH_BOX(&dynemb::cpu::find_and_read));
  m.impl("embedding_inference", TORCH_BOX(&dynemb::cpu::embedding_inference));
}
