// serve_ids and serve_rows: all ids of a live table, and the rows of those that it still has, for a
// search beside a thread that updates the table.
//
// Ids are listed at once, so that no rehash comes between two parts of a list. Rows are then read
// by id, as in serve_lookup: each is that of one version.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/rows/quantized_rows.h"
#include "cpu/rows/storage.h"
#include "cpu/serving/args.h"
#include "cpu/serving/live_reader.h"

namespace dynemb::cpu {
namespace {

struct ListedIds {
  int64_t* ids;  // of each slot
  bool* found;   // whether the slot has an id
};

// False if the range may have been cleared meanwhile. A slot may give the key of a new id beside
// the handle of an earlier one: that id is listed a moment before its row is in the index.
bool list_range(const LiveTable& table, const ListedIds& list) {
  const int64_t active = load_word_acquire(table.active);
  int64_t* range = table.range(active);
  for (int64_t bucket = 0; bucket < table.range_buckets; ++bucket) {
    const int64_t* line = line_of(range, bucket);
    for (int64_t slot = 0; slot < kBucketWidth; ++slot) {
      const int64_t at = bucket * kBucketWidth + slot;
      list.found[at] = load_word_acquire(line + kBucketWidth + slot) > 0;
      list.ids[at] = list.found[at] ? load_word(line + slot) : 0;
    }
  }
  acquire_fence();
  return load_word(table.active) == active;
}

// Keeps one of the slots of an id that has moved between two of them while they were listed.
void drop_repeated(const ListedIds& list, int64_t slots) {
  std::vector<std::pair<int64_t, int64_t>> sorted;
  for (int64_t at = 0; at < slots; ++at) {
    if (list.found[at]) sorted.emplace_back(list.ids[at], at);
  }
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i].first == sorted[i - 1].first) list.found[sorted[i].second] = false;
  }
}

LiveTensors searched_tensors(const char* op, const Tensor& buckets, const Tensor& tables,
                             const Tensor& meta, const std::vector<Tensor>& weights,
                             const std::vector<int64_t>& formats, int64_t table) {
  check_served_memory(op, "buckets", buckets);
  check_served_memory(op, "tables", tables);
  for (const Tensor& rows : weights) check_served_memory(op, "weights", rows);
  LiveTensors live = live_tensors(op, buckets, tables, meta, weights, formats);
  check_table_number(op, table, live.index.table_count);
  return live;
}

std::tuple<Tensor, Tensor> serve_ids(Tensor buckets, Tensor tables, Tensor meta,
                                     std::vector<Tensor> weights, std::vector<int64_t> formats,
                                     int64_t table, int64_t slots) {
  const char* op = "serve_ids";
  const LiveTensors live = searched_tensors(op, buckets, tables, meta, weights, formats, table);
  const LiveTable view = live_table(live, table);
  DYNEMB_CHECK(slots == view.range_buckets * kBucketWidth, "dynemb::", op, ": slots is ", slots,
               ", expected ", view.range_buckets * kBucketWidth, ", those of a range of table ",
               table);
  Tensor ids = empty_cpu({slots}, ScalarType::Long);
  Tensor found = empty_cpu({slots}, ScalarType::Bool);
  const ListedIds list{static_cast<int64_t*>(ids.data_ptr()), static_cast<bool*>(found.data_ptr())};
  // an id moves by two updates: one removes it, a later one inserts it
  const int64_t* updates = live.table_row(table) + kLiveTableBatches;
  const int64_t before = load_word_acquire(updates);
  while (!list_range(view, list)) {
  }
  if (load_word(updates) != before) drop_repeated(list, slots);
  return {ids, found};
}

constexpr int64_t kTile = 1024;  // ids

struct RowsCall {
  const LiveTable* table;
  const int64_t* ids;
  const bool* wanted;  // nullptr: all
  float* rows;
  bool* found;
};

// Writes rows where their ids were given.
struct RowsSink {
  const RowsCall& call;
  const int64_t* places;  // of the ids of the tile

  DYNEMB_INLINE void take(int64_t first, const char* const* row, int64_t count, bool) {
    const LiveTable& table = *call.table;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = places[first + i];
      float* out = call.rows + place * table.dim;
      call.found[place] = row[i] != nullptr;
      if (row[i] == nullptr) {
        std::fill_n(out, table.dim, 0.0f);
      } else if (is_quantized(table.format)) {
        load_quantized_row(table.format, row[i], table.dim, out);
      } else {
        load_row(table.format, row[i], table.dim, out);
      }
    }
  }
};

struct RowsTile {
  const RowsCall* call;
  int64_t begin;
  int64_t end;
  char* slots;          // kLiveSlots stored rows
  int64_t damaged = 0;  // an id with a damaged row
  bool is_damaged = false;
};

DYNEMB_INLINE void read_tile_body(RowsTile* tile) {
  const RowsCall& call = *tile->call;
  int64_t ids[kTile];
  int64_t places[kTile];
  int64_t count = 0;
  for (int64_t i = tile->begin; i < tile->end; ++i) {
    if (call.wanted != nullptr && !call.wanted[i]) {
      call.found[i] = false;
      std::fill_n(call.rows + i * call.table->dim, call.table->dim, 0.0f);
      continue;
    }
    ids[count] = call.ids[i];
    places[count++] = i;
  }
  RowsSink sink{call, places};
  const int64_t damaged = read_live<true>(*call.table, ids, count, tile->slots, sink);
  tile->is_damaged = damaged >= 0;
  if (tile->is_damaged) tile->damaged = ids[damaged];
}
DYNEMB_SIMD_VARIANTS(read_tile, (RowsTile * tile), (tile))

std::tuple<Tensor, Tensor> serve_rows(Tensor buckets, Tensor tables, Tensor meta,
                                      std::vector<Tensor> weights, std::vector<int64_t> formats,
                                      int64_t table, int64_t dim, Tensor ids,
                                      std::optional<Tensor> wanted) {
  const char* op = "serve_rows";
  const LiveTensors live = searched_tensors(op, buckets, tables, meta, weights, formats, table);
  const LiveTable view = live_table(live, table);
  DYNEMB_CHECK(dim == view.dim, "dynemb::", op, ": dim is ", dim, ", expected ", view.dim,
               ", that of table ", table);
  check_words(op, "ids", ids);
  check_id_limit(op, ids.numel());
  if (wanted) {
    check_tensor(op, "wanted", *wanted, ScalarType::Bool);
    check_length(op, "wanted", *wanted, ids.numel());
  }
  const int64_t count = ids.numel();
  Tensor rows = empty_cpu({count, dim}, ScalarType::Float);
  Tensor found = empty_cpu({count}, ScalarType::Bool);
  const RowsCall call{&view, static_cast<const int64_t*>(ids.data_ptr()),
                      wanted ? static_cast<const bool*>(wanted->data_ptr()) : nullptr,
                      static_cast<float*>(rows.data_ptr()), static_cast<bool*>(found.data_ptr())};
  std::vector<RowsTile> tiles;
  for (int64_t begin = 0; begin < count; begin += kTile) {
    tiles.push_back({&call, begin, std::min(begin + kTile, count), nullptr});
  }
  parallel_units(static_cast<int64_t>(tiles.size()), count, [&](int64_t begin, int64_t end) {
    std::vector<float> slots(static_cast<size_t>(kLiveSlots * live_slot_bytes(view) / 4));
    for (int64_t i = begin; i < end; ++i) {
      tiles[i].slots = reinterpret_cast<char*>(slots.data());
      read_tile(&tiles[i]);
    }
  });
  for (const RowsTile& tile : tiles) {
    DYNEMB_CHECK(!tile.is_damaged, "dynemb::", op, ": table ", table,
                 " is damaged: its index leads from id ", tile.damaged, " to a row beyond the ",
                 view.row_count, " of its slab. Make the table again from the model");
  }
  return {rows, found};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("serve_ids", TORCH_BOX(&dynemb::cpu::serve_ids));
  m.impl("serve_rows", TORCH_BOX(&dynemb::cpu::serve_rows));
}
// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  m.impl("serve_ids", TORCH_BOX(&dynemb::cpu::serve_ids));
  m.impl("serve_rows", TORCH_BOX(&dynemb::cpu::serve_rows));
}
