// serve_bag, serve_rows: lookups in live tables. Finding ids and reading their rows is one op,
// because a handle is good only until the next update.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "arguments/lookup.h"
#include "cpu/rows/initial_row.h"
#include "cpu/rows/row_sums.h"
#include "cpu/serving/args.h"
#include "cpu/serving/live_codes.h"
#include "cpu/serving/live_reader.h"

namespace dynemb::cpu {
namespace {

// Bags, or ids where they are not pooled, of one feature: the unit of parallel work.
struct ServeTile {
  int64_t feature;
  int64_t begin;
  int64_t end;
  int64_t missing;  // ids that are not there, padding aside
  int64_t damaged;  // position of an id whose row is damaged; -1: none
};

struct ServeCall {
  FeatureArgs features;
  const int64_t* offsets;   // [features * batch + 1]; not without pooling
  const float* id_weights;  // nullptr: all 1
  int64_t batch;
  int64_t pooling;
  OutputColumns columns;
  std::vector<LiveTable> tables;
  std::vector<TableRows> initial;  // how rows begin that are not there
  std::vector<bool> has_padding;   // of each table
  std::vector<int64_t> padding_id;
  float* output;
};

// Where rows are until they are summed or copied to the output: as they are stored, then room for
// their floats.
struct RowSlots {
  int64_t stored_bytes;
  int64_t slot_bytes;
  std::vector<float> memory;

  RowSlots(const std::vector<LiveTable>& tables, int64_t count) : stored_bytes(0), slot_bytes(0) {
    int64_t dim = 0;
    for (const LiveTable& table : tables) {
      stored_bytes = std::max(stored_bytes, 8 * (table.row_words - kLiveHeaderWords));
      dim = std::max(dim, table.dim);
    }
    slot_bytes = stored_bytes + (4 * dim + 15) / 16 * 16;
    memory.resize(static_cast<size_t>(count * slot_bytes / 4));
  }
  char* stored(int64_t slot) { return reinterpret_cast<char*>(memory.data()) + slot * slot_bytes; }
  float* values(int64_t slot) { return reinterpret_cast<float*>(stored(slot) + stored_bytes); }
};

struct ServeJob {
  const ServeCall* call;
  ServeTile* tile;
  RowSlots* slots;
};

// The parts of a sink of read_live() that bags and single rows share.
struct RowSink {
  const ServeCall& call;
  ServeTile& tile;
  RowSlots& slots;
  const LiveTable& table;
  const TableRows& initial;
  bool has_padding;
  int64_t padding_id;
  const int64_t* ids;  // of the tile

  DYNEMB_INLINE const float* decoded(int64_t slot) {
    return decode_live_row(table.format, table.dim, slots.stored(slot), slots.values(slot));
  }
  // What an id reads that is not there; nullptr: padding.
  DYNEMB_INLINE const float* missing_row(int64_t i, int64_t slot) {
    if (has_padding && ids[i] == padding_id) return nullptr;
    ++tile.missing;
    write_initial_row(initial, initial.default_begin, initial.default_count, ids[i],
                      slots.values(slot));
    return slots.values(slot);
  }
};

struct BagSink : RowSink {
  int64_t bag = -1;    // of the tile
  int64_t rows = 0;    // waiting to be summed
  float total = 0.0f;  // of the bag's weights
  float* out = nullptr;
  int64_t end = 0;  // of the bag's ids in the tile's
  const int64_t first_id;
  const float* row[kRowsAtOnce];
  float weight[kRowsAtOnce];

  BagSink(const RowSink& base, int64_t first_id) : RowSink(base), first_id(first_id) {
    begin_bag();
  }

  DYNEMB_INLINE void begin_bag() {
    if (tile.begin + ++bag >= tile.end) return;
    end = call.offsets[tile.feature * call.batch + tile.begin + bag + 1] - first_id;
    out = call.output + (tile.begin + bag) * call.columns.count + call.columns.first[tile.feature];
    total = 0.0f;
    std::memset(out, 0, sizeof(float) * static_cast<size_t>(table.dim));
  }
  DYNEMB_INLINE void sum_rows() {
    add_rows(row, weight, rows, table.dim, out);
    rows = 0;
  }
  DYNEMB_INLINE void end_bag() {
    sum_rows();
    if (call.pooling == kPoolMean) {
      const float scale = total == 0.0f ? 0.0f : 1.0f / total;
      for (int64_t c = 0; c < table.dim; ++c) out[c] *= scale;
    }
    begin_bag();
  }
  DYNEMB_INLINE void end_tile() {
    while (tile.begin + bag < tile.end) end_bag();
  }
  DYNEMB_INLINE void take(int64_t i, const float* values) {
    if (values == nullptr) return;
    row[rows] = values;
    weight[rows] = call.id_weights == nullptr ? 1.0f : call.id_weights[first_id + i];
    total += weight[rows];
    if (++rows == kRowsAtOnce) sum_rows();
  }
  DYNEMB_INLINE char* begin(int64_t i) {
    while (i >= end) end_bag();
    return slots.stored(rows);
  }
  DYNEMB_INLINE void read(int64_t i) { take(i, decoded(rows)); }
  DYNEMB_INLINE void missing(int64_t i) { take(i, missing_row(i, rows)); }
};

struct SequenceSink : RowSink {
  DYNEMB_INLINE void end_tile() {}
  DYNEMB_INLINE void take(int64_t i, const float* values) {
    float* out = call.output + (tile.begin + i) * table.dim;
    const size_t bytes = sizeof(float) * static_cast<size_t>(table.dim);
    if (values == nullptr) {
      std::memset(out, 0, bytes);
    } else {
      std::memcpy(out, values, bytes);
    }
  }
  DYNEMB_INLINE char* begin(int64_t) { return slots.stored(0); }
  DYNEMB_INLINE void read(int64_t i) { take(i, decoded(0)); }
  DYNEMB_INLINE void missing(int64_t i) { take(i, missing_row(i, 0)); }
};

template <class Sink>
DYNEMB_INLINE void serve_ids(const ServeJob& job, Sink& sink, int64_t first, int64_t end) {
  const int64_t* ids = job.call->features.ids + first;
  const int64_t damaged = read_live<true>(sink.table, ids, end - first, sink);
  job.tile->damaged = damaged < 0 ? -1 : first + damaged;
  if (damaged < 0) sink.end_tile();
}

DYNEMB_INLINE RowSink row_sink(const ServeJob& job, int64_t first) {
  const ServeCall& call = *job.call;
  const int64_t t = call.features.table[job.tile->feature];
  return {call,
          *job.tile,
          *job.slots,
          call.tables[t],
          call.initial[t],
          call.has_padding[t],
          call.padding_id[t],
          call.features.ids + first};
}

DYNEMB_INLINE void serve_bags_body(const ServeJob& job) {
  const ServeTile& tile = *job.tile;
  const int64_t* offsets = job.call->offsets + tile.feature * job.call->batch;
  BagSink sink(row_sink(job, offsets[tile.begin]), offsets[tile.begin]);
  serve_ids(job, sink, offsets[tile.begin], offsets[tile.end]);
}
DYNEMB_SIMD_VARIANTS(serve_bags, (const ServeJob& job), (job))

DYNEMB_INLINE void serve_sequence_body(const ServeJob& job) {
  SequenceSink sink{row_sink(job, job.tile->begin)};
  serve_ids(job, sink, job.tile->begin, job.tile->end);
}
DYNEMB_SIMD_VARIANTS(serve_sequence, (const ServeJob& job), (job))

std::vector<ServeTile> serve_tiles(const ServeCall& call) {
  constexpr int64_t kIdsPerTile = 4096;
  const FeatureArgs& features = call.features;
  std::vector<ServeTile> tiles;
  for (size_t f = 0; f < features.table.size(); ++f) {
    const auto feature = static_cast<int64_t>(f);
    const bool pooled = call.pooling != kPoolNone;
    const int64_t ids = features.begin[f + 1] - features.begin[f];
    const int64_t first = pooled ? 0 : features.begin[f];
    const int64_t end = pooled ? call.batch : features.begin[f + 1];
    const int64_t per_bag = pooled && call.batch > 0 ? std::max<int64_t>(1, ids / call.batch) : 1;
    const int64_t step = std::max<int64_t>(1, kIdsPerTile / per_bag);
    for (int64_t begin = first; begin < end; begin += step) {
      tiles.push_back({feature, begin, std::min(begin + step, end), 0, -1});
    }
  }
  return tiles;
}

struct ServeArguments {
  const Tensor& buckets;
  const Tensor& tables;
  const Tensor& meta;
  const std::vector<Tensor>& rows;
  const Tensor& init_data;
  const Tensor& ids;
  const Tensor& offsets;
  const std::optional<Tensor>& per_sample_weights;
  const std::vector<int64_t>& feature_tables;
  const std::vector<int64_t>& feature_dims;
  const std::vector<int64_t>& formats;
};

std::tuple<Tensor, Tensor> serve(const char* op, const ServeArguments& given, int64_t pooling) {
  const LiveTensors live =
      live_tensors(op, given.buckets, given.tables, given.meta, given.rows, given.formats);
  const double* init_data = live_defaults(op, live, given.init_data);
  const int64_t table_count = live.index.table_count;
  const IdTensors ids = id_tensors(op, given.ids, given.offsets, given.feature_tables, table_count);
  const float* weights =
      bag_weights(op, ids, given.per_sample_weights, given.feature_dims, pooling);
  ServeCall call{feature_args(op, ids, given.feature_tables),
                 ids.offsets,
                 weights,
                 ids.batch,
                 pooling,
                 output_columns(given.feature_dims, pooling),
                 {},
                 {},
                 {},
                 {},
                 nullptr};
  for (int64_t t = 0; t < table_count; ++t) {
    call.tables.push_back(live_table(live, t));
    call.initial.push_back(live_initial_rows(live, t, init_data));
    call.has_padding.push_back(live.meta_row(t)[kMetaHasPadding] != 0);
    call.padding_id.push_back(live.meta_row(t)[kMetaPaddingId]);
  }
  for (size_t f = 0; f < given.feature_tables.size(); ++f) {
    const int64_t dim = call.tables[given.feature_tables[f]].dim;
    DYNEMB_CHECK(given.feature_dims[f] == dim, "dynemb::", op, ": feature_dims[", f, "] is ",
                 given.feature_dims[f], ", but its table has dim ", dim);
  }
  const bool pooled = pooling != kPoolNone;
  Tensor output =
      empty_cpu({pooled ? ids.batch : ids.count, call.columns.count}, ScalarType::Float);
  call.output = static_cast<float*>(output.data_ptr());
  std::vector<ServeTile> tiles = serve_tiles(call);
  parallel_units(static_cast<int64_t>(tiles.size()), ids.count, [&](int64_t begin, int64_t end) {
    RowSlots slots(call.tables, pooled ? kRowsAtOnce : 1);
    for (int64_t i = begin; i < end; ++i) {
      const ServeJob job{&call, &tiles[i], &slots};
      pooled ? serve_bags(job) : serve_sequence(job);
    }
  });
  Tensor missing = zeros_cpu({table_count}, ScalarType::Long);
  auto* count = static_cast<int64_t*>(missing.data_ptr());
  for (const ServeTile& tile : tiles) {
    const int64_t t = call.features.table[tile.feature];
    DYNEMB_CHECK(tile.damaged < 0, "dynemb::", op, ": table ", t,
                 " is damaged: its index leads from id ",
                 tile.damaged < 0 ? 0 : ids.ids[tile.damaged],
                 " to a row that is another's. Make the table again from the model");
    count[t] += tile.missing;
  }
  return {output, missing};
}

std::tuple<Tensor, Tensor> serve_bag(Tensor buckets, Tensor tables, Tensor meta,
                                     std::vector<Tensor> rows, Tensor init_data, Tensor ids,
                                     Tensor offsets, std::optional<Tensor> per_sample_weights,
                                     std::vector<int64_t> feature_tables,
                                     std::vector<int64_t> feature_dims,
                                     std::vector<int64_t> formats, int64_t pooling) {
  const char* op = "serve_bag";
  check_is_pooled(op, pooling, "use serve_rows");
  return serve(op,
               {buckets, tables, meta, rows, init_data, ids, offsets, per_sample_weights,
                feature_tables, feature_dims, formats},
               pooling);
}

std::tuple<Tensor, Tensor> serve_rows(Tensor buckets, Tensor tables, Tensor meta,
                                      std::vector<Tensor> rows, Tensor init_data, Tensor ids,
                                      Tensor offsets, std::vector<int64_t> feature_tables,
                                      int64_t dim, std::vector<int64_t> formats) {
  const std::vector<int64_t> dims(feature_tables.size(), dim);
  return serve("serve_rows",
               {buckets, tables, meta, rows, init_data, ids, offsets, std::nullopt, feature_tables,
                dims, formats},
               kPoolNone);
}

}  // namespace
}  // namespace dynemb::cpu

#define DYNEMB_SERVE_OPS(m)                                \
  m.impl("serve_bag", TORCH_BOX(&dynemb::cpu::serve_bag)); \
  m.impl("serve_rows", TORCH_BOX(&dynemb::cpu::serve_rows))

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { DYNEMB_SERVE_OPS(m); }
// To say of a GPU's tensors what is wrong, also where no CUDA kernel has been built.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) { DYNEMB_SERVE_OPS(m); }
