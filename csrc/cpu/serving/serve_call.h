// A lookup in served tables: the call, its parts, and what is made of the rows.
//
// A source finds the rows of ids, some at a time; a sink makes bags of them, or single rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments/lookup.h"
#include "cpu/rows/initial_row.h"
#include "cpu/rows/row_sums.h"
#include "cpu/runtime/interpreter_lock.h"

namespace dynemb::cpu {

// -- a call, and the parts of it that threads take
// -------------------------------------------------

// Bags of one feature, or ids without pooling.
struct ServeTile : BagTile {
  int64_t missing = 0;   // missing ids, padding aside
  int64_t damaged = -1;  // position of an id with a damaged row, or of one before it; -1: none
};

struct ServeCall {
  FeatureArgs features;
  const int64_t* offsets;   // [features * batch + 1]; unused without pooling
  const float* id_weights;  // nullptr: all 1
  int64_t batch;
  int64_t pooling;
  OutputColumns columns;
  const int64_t* meta;
  float* output;

  bool pooled() const { return pooling != kPoolNone; }
};

template <class Source>
struct ServeJob {
  const ServeCall* call;
  ServeTile* tile;
  const Source* source;
  float* scratch;  // kRowsAtOnce rows
  char* slots;     // kRowsAtOnce stored rows
};

// -- sinks ----------------------------------------------------------------------------------------

// The parts of a sink that bags and single rows share.
struct RowSink {
  const ServeCall& call;
  ServeTile& tile;
  const TableRows& rows;
  const int64_t* ids;  // of the tile
  bool has_padding;
  int64_t padding_id;

  template <class Source>
  RowSink(const ServeJob<Source>& job, int64_t first)
      : call(*job.call), tile(*job.tile), rows(job.source->rows), ids(call.features.ids + first) {
    const int64_t* meta = call.meta + call.features.table[tile.feature] * kMetaColumns;
    has_padding = meta[kMetaHasPadding] != 0;
    padding_id = meta[kMetaPaddingId];
  }

  bool has_floats() const { return rows.storage == Storage::kFloat32; }
  // The values of id i of the tile; `scratch` may hold them; nullptr: padding. `row`: nullptr if
  // the id is missing.
  DYNEMB_INLINE const float* values(int64_t i, const char* row, float* scratch) {
    if (row == nullptr) {
      if (has_padding && ids[i] == padding_id) return nullptr;
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
struct BagSink : RowSink {
  float* const scratch;
  const int64_t* const offsets;  // of the tile's bags
  const float* const weights;    // of the tile's ids
  int64_t bag = -1;              // of the tile
  int64_t end = 0;               // of the bag's ids in the tile's
  float total = 0.0f;            // of the bag's weights, if any
  int64_t ones = 0;              // otherwise: its ids
  float* out = nullptr;

  template <class Source>
  BagSink(const ServeJob<Source>& job, const int64_t* offsets)
      : RowSink(job, offsets[0]),
        scratch(job.scratch),
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
    std::memset(out, 0, sizeof(float) * static_cast<size_t>(rows.dim));
  }
  DYNEMB_INLINE void end_bag() {
    if (call.pooling == kPoolMean) {
      // up to here a sum of ones in floats is exact
      constexpr int64_t kMostOnes = int64_t{1} << 24;
      const float sum = kWeighted ? total : static_cast<float>(std::min(ones, kMostOnes));
      const MeanDivisor divisor = mean_divisor(sum);
      for (int64_t c = 0; c < rows.dim; ++c) out[c] = divisor.divide(out[c]);
    }
    begin_bag();
  }
  DYNEMB_INLINE void end_tile() {
    while (tile.begin + bag < tile.end) end_bag();
  }

  // Ids [first, first + count) of the tile, which are in one bag.
  DYNEMB_INLINE void take_floats(int64_t first, const char* const* row, int64_t count) {
    const float* weight = kWeighted ? weights + first : nullptr;
    add_rows<kWeighted>(reinterpret_cast<const float* const*>(row), weight, count, rows.dim, out);
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
      value[taken] = values(first + i, row[i], scratch + taken * rows.dim);
      if (value[taken] == nullptr) continue;
      if (kWeighted) {
        weight[taken] = weights[first + i];
        total += weight[taken];
      }
      ++ones;
      if (++taken == kRowsAtOnce) {
        add_rows<kWeighted>(value, weight, taken, rows.dim, out);
        taken = 0;
      }
    }
    add_rows<kWeighted>(value, weight, taken, rows.dim, out);
  }
  DYNEMB_INLINE void take(int64_t first, const char* const* row, int64_t count, bool complete) {
    const bool stored_floats = has_floats() && complete;
    for (int64_t i = 0; i < count;) {
      const int64_t at = first + i;
      while (at >= end) end_bag();
      const int64_t of_bag = std::min(count - i, end - at);
      if (stored_floats) {
        take_floats(at, row + i, of_bag);
      } else {
        take_any(at, row + i, of_bag);
      }
      i += of_bag;
    }
  }
};

struct SequenceSink : RowSink {
  using RowSink::RowSink;

  DYNEMB_INLINE void end_tile() {}
  DYNEMB_INLINE void take(int64_t first, const char* const* row, int64_t count, bool complete) {
    const int64_t dim = rows.dim;
    float* out = call.output + (tile.begin + first) * dim;
    if (has_floats() && complete) {
      for (int64_t i = 0; i < count; ++i, out += dim) copy(row[i], dim, out);
      return;
    }
    for (int64_t i = 0; i < count; ++i, out += dim) {
      const float* value = values(first + i, row[i], out);
      if (value == nullptr) {
        std::memset(out, 0, sizeof(float) * static_cast<size_t>(dim));
      } else if (value != out) {
        copy(value, dim, out);
      }
    }
  }

 private:
  // Faster than memcpy for narrow rows.
  static DYNEMB_INLINE void copy(const void* from, int64_t dim, float* out) {
    const auto* values = static_cast<const float*>(from);
    int64_t c = 0;
    for (; c + kFloats <= dim; c += kFloats) store_floats(out + c, load_floats(values + c));
    for (; c < dim; ++c) out[c] = values[c];
  }
};

// -- tiles ----------------------------------------------------------------------------------------

template <class Source, class Sink>
DYNEMB_INLINE void read_tile(const ServeJob<Source>& job, Sink& sink, int64_t first, int64_t end) {
  const int64_t damaged = job.source->read(sink.ids, end - first, job.slots, sink);
  job.tile->damaged = damaged < 0 ? -1 : first + damaged;
  if (damaged < 0) sink.end_tile();
}

template <class Source>
DYNEMB_INLINE void serve_sequence_body(const ServeJob<Source>& job) {
  SequenceSink sink(job, job.tile->begin);
  read_tile(job, sink, job.tile->begin, job.tile->end);
}
DYNEMB_SIMD_TEMPLATE_VARIANTS(template <class Source>, serve_sequence,
                              (const ServeJob<Source>& job), (job))

template <bool kWeighted, class Source>
DYNEMB_INLINE void serve_bags_as(const ServeJob<Source>& job) {
  const ServeTile& tile = *job.tile;
  const int64_t* offsets = job.call->offsets + tile.feature * job.call->batch + tile.begin;
  BagSink<kWeighted> sink(job, offsets);
  read_tile(job, sink, offsets[0], offsets[tile.end - tile.begin]);
}
template <class Source>
DYNEMB_INLINE void serve_bags_body(const ServeJob<Source>& job) {
  job.call->id_weights == nullptr ? serve_bags_as<false>(job) : serve_bags_as<true>(job);
}
DYNEMB_SIMD_TEMPLATE_VARIANTS(template <class Source>, serve_bags, (const ServeJob<Source>& job),
                              (job))

inline std::vector<ServeTile> serve_tiles(const ServeCall& call) {
  const FeatureArgs& features = call.features;
  std::vector<ServeTile> tiles;
  for (size_t f = 0; f < features.table.size(); ++f) {
    const int64_t ids = features.begin[f + 1] - features.begin[f];
    const int64_t first = call.pooled() ? 0 : features.begin[f];
    const int64_t end = call.pooled() ? call.batch : features.begin[f + 1];
    const int64_t per_bag =
        call.pooled() && call.batch > 0 ? std::max<int64_t>(1, ids / call.batch) : 1;
    const int64_t step = std::max<int64_t>(1, kTileIds / per_bag);
    for (int64_t begin = first; begin < end; begin += step) {
      tiles.push_back({{static_cast<int64_t>(f), begin, std::min(begin + step, end)}});
    }
  }
  return tiles;
}

// -- the op ---------------------------------------------------------------------------------------

struct ServeArguments {
  const Tensor& tables;  // checked
  const Tensor& meta;
  const Tensor& ids;
  const Tensor& offsets;
  const std::optional<Tensor>& per_sample_weights;
  const std::vector<int64_t>& feature_tables;
  const std::vector<int64_t>& feature_dims;
  int64_t pooling;
};

// Whether threads that hold Python's lock may release it.
inline bool may_unlock(const Tensor& tables) {
  return static_cast<const int64_t*>(tables.data_ptr())[kServedUnlocks] == 1;
}

// `begin_reading(features)` comes after all checks of arguments, and before rows are read.
template <class Source, class Begin>
std::tuple<Tensor, Tensor> serve(const char* op, const ServeArguments& given,
                                 const std::vector<Source>& sources, const Begin& begin_reading) {
  const auto table_count = static_cast<int64_t>(sources.size());
  const IdTensors ids = id_tensors(op, given.ids, given.offsets, given.feature_tables, table_count);
  const float* weights =
      bag_weights(op, ids, given.per_sample_weights, given.feature_dims, given.pooling);
  ServeCall call{feature_args(op, ids, given.feature_tables),
                 ids.offsets,
                 weights,
                 ids.batch,
                 given.pooling,
                 output_columns(given.feature_dims, given.pooling),
                 static_cast<const int64_t*>(given.meta.data_ptr()),
                 nullptr};
  for (size_t f = 0; f < given.feature_tables.size(); ++f) {
    const int64_t dim = sources[given.feature_tables[f]].rows.dim;
    DYNEMB_CHECK(given.feature_dims[f] == dim, "dynemb::", op, ": feature_dims[", f, "] is ",
                 given.feature_dims[f], ", but its table has dim ", dim);
  }
  int64_t floats = 0, slot_bytes = 0;  // memory per row that is read
  for (const Source& source : sources) {
    if (call.pooled()) floats = std::max(floats, source.rows.dim);
    slot_bytes = std::max(slot_bytes, source.slot_bytes());
  }
  Tensor output =
      empty_cpu({call.pooled() ? ids.batch : ids.count, call.columns.count}, ScalarType::Float);
  call.output = static_cast<float*>(output.data_ptr());
  std::vector<ServeTile> tiles = serve_tiles(call);
  // To take the lock back costs a call of few ids more than other threads gain.
  constexpr int64_t kUnlockedIds = 1024;
  std::optional<WithoutInterpreterLock> unlocked;
  if (ids.count >= kUnlockedIds && may_unlock(given.tables)) unlocked.emplace();
  begin_reading(call.features);
  parallel_units(static_cast<int64_t>(tiles.size()), ids.count, [&](int64_t begin, int64_t end) {
    std::vector<float> memory(static_cast<size_t>(kRowsAtOnce * (floats + slot_bytes / 4)));
    float* scratch = memory.data() + kRowsAtOnce * slot_bytes / 4;
    for (int64_t i = begin; i < end; ++i) {
      const Source& source = sources[call.features.table[tiles[i].feature]];
      const ServeJob<Source> job{&call, &tiles[i], &source, scratch,
                                 reinterpret_cast<char*>(memory.data())};
      call.pooled() ? serve_bags(job) : serve_sequence(job);
    }
  });
  unlocked.reset();
  Tensor missing = zeros_cpu({table_count}, ScalarType::Long);
  auto* count = static_cast<int64_t*>(missing.data_ptr());
  for (const ServeTile& tile : tiles) {
    const int64_t t = call.features.table[tile.feature];
    DYNEMB_CHECK(tile.damaged < 0, "dynemb::", op, ": table ", t,
                 " is damaged: ", sources[t].damage(ids.ids[std::max<int64_t>(tile.damaged, 0)]));
    count[t] += tile.missing;
  }
  return {output, missing};
}

}  // namespace dynemb::cpu
