// changed_ids_: ids of a table that are new, or have changed rows or scores.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/index/handle.h"
#include "cpu/index/args.h"

namespace dynemb::cpu {
namespace {

// Record of a row's owner: its id, the number of its table plus 1, and the id's scores.
constexpr int64_t kOwnerId = 0;
constexpr int64_t kOwnerTable = 1;
constexpr int64_t kOwnerScores = 2;

constexpr int64_t kBucketsPerUnit = 4096;
constexpr int64_t kBucketsAhead = 8;

struct Changes {
  const int32_t* generations;  // [rows]
  const uint8_t* dirty_bits;   // [rows]
  uint8_t reader;
  const int64_t* before;  // [rows, columns]
  int64_t* now;           // [rows, columns]
  int64_t rows;
  int64_t columns;
};

struct Found {
  std::vector<int64_t> ids;
  std::vector<int64_t> handles;
  int64_t beyond = -1;  // a row that does not exist
};

// Writes the owner of a row; returns whether the id is new there, or anything of it has changed.
bool has_changed(const Changes& changes, const TableView& table, int64_t table_number,
                 int64_t bucket, int slot, int64_t handle) {
  const int64_t row = handle_row(handle);
  const int64_t* before = changes.before + row * changes.columns;
  int64_t* now = changes.now + row * changes.columns;
  now[kOwnerId] = table.line(bucket)[slot];
  now[kOwnerTable] = table_number + 1;
  // a row that was never written has no dirty bit
  bool changed = (changes.dirty_bits[row] & changes.reader) != 0 ||
                 changes.generations[row] != handle_generation(handle) ||
                 before[kOwnerId] != now[kOwnerId] || before[kOwnerTable] != now[kOwnerTable];
  for (int64_t w = 0; w < changes.columns - kOwnerScores; ++w) {
    const int64_t score =
        w < table.score_words ? table.score(bucket, slot)[w * kBucketWidth] : int64_t{0};
    now[kOwnerScores + w] = score;
    changed = changed || before[kOwnerScores + w] != score;
  }
  return changed;
}

void prefetch_bucket(const Changes& changes, const int64_t* line) {
  for (int slot = 0; slot < kBucketWidth; ++slot) {
    const int64_t row = handle_row(decode_handle(line[kBucketWidth + slot]));
    if (line[kBucketWidth + slot] == 0 || row >= changes.rows) continue;
    __builtin_prefetch(changes.before + row * changes.columns);
    __builtin_prefetch(changes.now + row * changes.columns, 1);
    __builtin_prefetch(changes.generations + row);
    __builtin_prefetch(changes.dirty_bits + row);
  }
}

void scan(const Changes& changes, const TableView& table, int64_t table_number, int64_t begin,
          int64_t end, Found* found) {
  for (int64_t bucket = begin; bucket < end; ++bucket) {
    if (bucket + kBucketsAhead < end) prefetch_bucket(changes, table.line(bucket + kBucketsAhead));
    const int64_t* line = table.line(bucket);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      if (line[kBucketWidth + slot] == 0) continue;
      const int64_t handle = decode_handle(line[kBucketWidth + slot]);
      if (handle_row(handle) < 0 || handle_row(handle) >= changes.rows) {
        found->beyond = handle_row(handle);
        return;
      }
      if (!has_changed(changes, table, table_number, bucket, slot, handle)) continue;
      found->ids.push_back(line[slot]);
      found->handles.push_back(handle);
    }
  }
}

Changes changes_of(const char* op, const Tensor& generations, const Tensor& dirty_bits,
                   const Tensor& before, const Tensor& now, int64_t score_words, int64_t reader) {
  check_tensor(op, "generations", generations, ScalarType::Int);
  check_tensor(op, "dirty_bits", dirty_bits, ScalarType::Byte);
  check_tensor(op, "before", before, ScalarType::Long);
  check_tensor(op, "now", now, ScalarType::Long);
  DYNEMB_CHECK(before.dim() == 2 && now.dim() == 2, "dynemb::", op, ": before has ", before.dim(),
               " dimensions and now ", now.dim(), ", expected shape (rows, columns) of both");
  const int64_t rows = now.size(0);
  const int64_t columns = now.size(1);
  DYNEMB_CHECK(columns == kOwnerScores || columns == kOwnerScores + score_words, "dynemb::", op,
               ": now has ", columns, " columns, expected 2, or ", kOwnerScores + score_words,
               " with the scores that the index keeps");
  DYNEMB_CHECK(before.size(0) == rows && before.size(1) == columns, "dynemb::", op, ": before has ",
               before.size(0), " rows of ", before.size(1), " columns, expected as many as now, ",
               rows, " of ", columns);
  DYNEMB_CHECK(generations.numel() >= rows && dirty_bits.numel() >= rows, "dynemb::", op,
               ": generations has ", generations.numel(), " rows and dirty_bits has ",
               dirty_bits.numel(), ", expected at least those of now, ", rows);
  DYNEMB_CHECK(reader > 0 && reader <= 255, "dynemb::", op, ": reader is ", reader,
               ", expected bits of a byte, 1 to 255");
  return {static_cast<const int32_t*>(generations.data_ptr()),
          static_cast<const uint8_t*>(dirty_bits.data_ptr()),
          static_cast<uint8_t>(reader),
          static_cast<const int64_t*>(before.data_ptr()),
          static_cast<int64_t*>(now.data_ptr()),
          rows,
          columns};
}

Tensor joined(const std::vector<Found>& units, std::vector<int64_t> Found::* values) {
  int64_t count = 0;
  for (const Found& unit : units) count += static_cast<int64_t>((unit.*values).size());
  Tensor result = empty_cpu({count}, ScalarType::Long);
  auto* to = static_cast<int64_t*>(result.data_ptr());
  for (const Found& unit : units) to = std::copy((unit.*values).begin(), (unit.*values).end(), to);
  return result;
}

// Ids and handles in the order of the index; `now` receives the owners of rows. `before`: the
// owners at the reader's last call.
std::tuple<Tensor, Tensor> changed_ids_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta,
                                        Tensor generations, Tensor dirty_bits, Tensor before,
                                        Tensor now, int64_t table, int64_t reader) {
  const char* op = "changed_ids_";
  const IndexArgs index = index_args(op, buckets, &scores, tables, meta);
  check_table_number(op, table, index.table_count);
  const TableView view = index.table(table);
  const Changes given =
      changes_of(op, generations, dirty_bits, before, now, index.score_words, reader);
  const int64_t units = (view.bucket_count + kBucketsPerUnit - 1) / kBucketsPerUnit;
  std::vector<Found> found(static_cast<size_t>(units));
  parallel_units(units, view.bucket_count * kBucketWidth, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      scan(given, view, table, unit * kBucketsPerUnit,
           std::min((unit + 1) * kBucketsPerUnit, view.bucket_count),
           &found[static_cast<size_t>(unit)]);
    }
  });
  for (const Found& unit : found) {
    DYNEMB_CHECK(unit.beyond < 0, "dynemb::", op, ": an id of table ", table, " has row ",
                 unit.beyond, ", but now has ", given.rows, ": give it all rows in use");
  }
  return {joined(found, &Found::ids), joined(found, &Found::handles)};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("changed_ids_", TORCH_BOX(&dynemb::cpu::changed_ids_));
}
