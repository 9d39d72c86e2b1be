// erase_: removes ids from the index and adds their rows to the free list. set_handles_: gives ids
// other rows.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "core/policy/counts.h"
#include "cpu/index/args.h"
#include "cpu/index/one_writer.h"
#include "cpu/index/probe.h"
#include "cpu/rows/allocator.h"

namespace dynemb::cpu {
namespace {

// Returns the number of removed ids, per table. An id given twice counts once.
Tensor erase_(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows,
              Tensor meta, Tensor ids, Tensor offsets, std::vector<int64_t> feature_tables) {
  const char* op = "erase_";
  const IndexArgs index = index_args(op, buckets, &scores, tables, meta);
  const AllocationTensors allocation = slab_rows(index, slabs, free_rows);
  const FeatureArgs features = feature_args(op, ids, offsets, feature_tables, index.table_count);
  int64_t* slab = allocation.slabs;
  int64_t* free_row = allocation.free_rows;
  const int64_t max_rows = allocation.max_rows;
  Tensor erased = zeros_cpu({index.table_count}, ScalarType::Long);
  auto* count = static_cast<int64_t*>(erased.data_ptr());
  const OneWriter writer(op, index.tables);
  const MovingEntries moving(index.tables);
  for (size_t f = 0; f < features.table.size(); ++f) {
    const int64_t t = features.table[f];
    const TableView table = index.table(t);
    const int64_t s = index.meta_row(t)[kMetaSlab];
    const bool has_rows = index.meta_row(t)[kMetaUnscored] == 0;
    int64_t* row = index.table_row(t);
    for (int64_t i = features.begin[f]; i < features.begin[f + 1]; ++i) {
      const int64_t id = features.ids[i];
      const SlotPosition position = probe(table, id, first_hash(id, table.salt), 0);
      if (position.bucket < 0) continue;
      if (has_rows) {
        const int64_t stored = table.line(position.bucket)[kBucketWidth + position.slot];
        DYNEMB_CHECK(slab[s * kSlabColumns + kSlabFreeCount] < max_rows, "dynemb::", op,
                     ": free_rows has room for ", max_rows, " rows of slab ", s,
                     ", and all are free: the index and slabs are not of one group");
        free_row[s * max_rows + slab[s * kSlabColumns + kSlabFreeCount]++] =
            next_owner(decode_handle(stored));
      }
      row[kTableTombstones] += clear_slot(table, position.bucket, position.slot);
      --row[kTableSize];
      row[kTableErased] = next_count(row[kTableErased]);
      ++count[t];
    }
  }
  return erased;
}

// Gives the ids in the tables other rows; returns which ids are there. Ids must be distinct.
Tensor set_handles_(Tensor buckets, Tensor tables, Tensor meta, Tensor ids, Tensor offsets,
                    std::vector<int64_t> feature_tables, Tensor handles) {
  const char* op = "set_handles_";
  const IndexArgs index = index_args(op, buckets, nullptr, tables, meta);
  const FeatureArgs features = feature_args(op, ids, offsets, feature_tables, index.table_count);
  const int64_t* handle = id_words(op, "handles", handles, features.count);
  for (int64_t i = 0; i < features.count; ++i) {
    DYNEMB_CHECK(handle[i] >= 0, "dynemb::", op, ": handles[", i, "] is ", handle[i],
                 ", expected a handle");
  }
  Tensor found = zeros_cpu({features.count}, ScalarType::Bool);
  const OneWriter writer(op, index.tables);
  auto* is_found = static_cast<bool*>(found.data_ptr());
  for (const Tile& tile : make_tiles(features)) {
    const TableView table = index.table(tile.table);
    for (int64_t i = tile.begin; i < tile.end; ++i) {
      const int64_t id = features.ids[i];
      const SlotPosition at = probe(table, id, first_hash(id, table.salt), 0);
      is_found[i] = at.bucket >= 0;
      if (is_found[i]) table.line(at.bucket)[kBucketWidth + at.slot] = encode_handle(handle[i]);
    }
  }
  return found;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("erase_", TORCH_BOX(&dynemb::cpu::erase_));
  m.impl("set_handles_", TORCH_BOX(&dynemb::cpu::set_handles_));
}
