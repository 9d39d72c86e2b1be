// changed_ids_: ids of the tables of a slab that are new, or have changed rows or scores.
//
// A pass over the index writes the owner of each row, which is its only random access. Then a pass
// over the rows compares owners with those of before, and reads generations and dirty bits in
// order.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "core/index/handle.h"
#include "cpu/index/args.h"
#include "cpu/runtime/prefetch.h"

namespace dynemb::cpu {
namespace {

// Record of a row's owner: its id; the number of its table plus 1, and the generation; its scores.
constexpr int64_t kOwnerId = 0;
constexpr int64_t kOwnerTable = 1;  // table + 1 : 36 | generation : 28
constexpr int64_t kOwnerScores = 2;

constexpr int64_t kBucketsPerUnit = 4096;
constexpr int64_t kBucketsAhead = 16;
constexpr int64_t kRowsPerUnit = 1 << 14;

struct Changes {
  const int32_t* generations;  // [rows]
  const uint8_t* dirty_bits;   // [rows]
  uint8_t reader;
  const int64_t* before;  // [rows, columns]
  int64_t* now;           // [rows, columns]
  int64_t rows;
  int64_t columns;

  int64_t* owner(int64_t row) const { return now + row * columns; }
};

void prefetch_owners(const Changes& changes, const int64_t* line) {
  for (int slot = 0; slot < kBucketWidth; ++slot) {
    const int64_t row = handle_row(decode_handle(line[kBucketWidth + slot]));
    if (row >= 0 && row < changes.rows) prefetch_line_of(changes.owner(row));
  }
}

// Writes the owners of rows; returns a row that does not exist, or -1.
int64_t write_owners(const Changes& changes, const TableView& table, int64_t number, int64_t begin,
                     int64_t end) {
  for (int64_t bucket = begin; bucket < end; ++bucket) {
    if (bucket + kBucketsAhead < end) prefetch_owners(changes, table.line(bucket + kBucketsAhead));
    const int64_t* line = table.line(bucket);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      if (line[kBucketWidth + slot] == 0) continue;
      const int64_t handle = decode_handle(line[kBucketWidth + slot]);
      const int64_t row = handle_row(handle);
      if (row < 0 || row >= changes.rows) return row;
      int64_t* owner = changes.owner(row);
      owner[kOwnerId] = line[slot];
      owner[kOwnerTable] = make_handle(number + 1, handle_generation(handle));
      for (int64_t w = 0; w < changes.columns - kOwnerScores; ++w) {
        owner[kOwnerScores + w] =
            w < table.score_words ? table.score(bucket, slot)[w * kBucketWidth] : int64_t{0};
      }
    }
  }
  return -1;
}

// Whether a row with an owner is another's, or anything of it has changed.
bool has_changed(const Changes& changes, int64_t row) {
  const int64_t* now = changes.owner(row);
  // a row that was never written has no dirty bit
  return (changes.dirty_bits[row] & changes.reader) != 0 ||
         changes.generations[row] != handle_generation(now[kOwnerTable]) ||
         !std::equal(now, now + changes.columns, changes.before + row * changes.columns);
}

// The table of a row's owner; -1: none.
int64_t table_of(const Changes& changes, int64_t row) {
  return handle_row(changes.owner(row)[kOwnerTable]) - 1;
}

std::vector<int64_t> changed_rows(const Changes& changes, int64_t begin, int64_t end) {
  std::vector<int64_t> found;
  for (int64_t row = begin; row < end; ++row) {
    if (table_of(changes, row) >= 0 && has_changed(changes, row)) found.push_back(row);
  }
  return found;
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

// Calls f(begin, end) for ranges of rows, on torch's threads.
template <class F>
void each_range(const Changes& changes, const F& f) {
  const int64_t units = (changes.rows + kRowsPerUnit - 1) / kRowsPerUnit;
  parallel_units(units, changes.rows, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      f(unit * kRowsPerUnit, std::min((unit + 1) * kRowsPerUnit, changes.rows));
    }
  });
}

void write_owners_of_table(const char* op, const Changes& changes, const TableView& table,
                           int64_t number) {
  const int64_t units = (table.bucket_count + kBucketsPerUnit - 1) / kBucketsPerUnit;
  std::vector<int64_t> beyond(static_cast<size_t>(units), -1);
  parallel_units(units, table.bucket_count * kBucketWidth, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      beyond[static_cast<size_t>(unit)] =
          write_owners(changes, table, number, unit * kBucketsPerUnit,
                       std::min((unit + 1) * kBucketsPerUnit, table.bucket_count));
    }
  });
  for (const int64_t row : beyond) {
    DYNEMB_CHECK(row == -1, "dynemb::", op, ": an id of table ", number, " has row ", row,
                 ", but now has ", changes.rows, ": give it all rows in use");
  }
}

// Ids, handles and counts of the changed rows, which are given by range.
std::tuple<Tensor, Tensor, Tensor> by_table(const Changes& changes,
                                            const std::vector<std::vector<int64_t>>& found,
                                            int64_t tables) {
  Tensor counts = zeros_cpu({tables}, ScalarType::Long);
  auto* count = static_cast<int64_t*>(counts.data_ptr());
  for (const auto& range : found) {
    for (const int64_t row : range) ++count[table_of(changes, row)];
  }
  std::vector<int64_t> next(static_cast<size_t>(tables));
  std::exclusive_scan(count, count + tables, next.begin(), int64_t{0});
  const int64_t total = std::accumulate(count, count + tables, int64_t{0});
  Tensor ids = empty_cpu({total}, ScalarType::Long);
  Tensor handles = empty_cpu({total}, ScalarType::Long);
  auto* id = static_cast<int64_t*>(ids.data_ptr());
  auto* handle = static_cast<int64_t*>(handles.data_ptr());
  for (const auto& range : found) {
    for (const int64_t row : range) {
      const int64_t* owner = changes.owner(row);
      const int64_t at = next[static_cast<size_t>(table_of(changes, row))]++;
      id[at] = owner[kOwnerId];
      handle[at] = make_handle(row, handle_generation(owner[kOwnerTable]));
    }
  }
  return {ids, handles, counts};
}

// Ids and handles by table, those of a table in the order of their rows, and their number by table.
// `now` receives the owners of rows. `before`: the owners at the reader's last call.
std::tuple<Tensor, Tensor, Tensor> changed_ids_(Tensor buckets, Tensor scores, Tensor tables,
                                                Tensor meta, Tensor generations, Tensor dirty_bits,
                                                Tensor before, Tensor now, int64_t slab,
                                                int64_t reader) {
  const char* op = "changed_ids_";
  const IndexArgs index = index_args(op, buckets, &scores, tables, meta);
  const Changes given =
      changes_of(op, generations, dirty_bits, before, now, index.score_words, reader);
  std::vector<int64_t> of_slab;
  for (int64_t t = 0; t < index.table_count; ++t) {
    const int64_t* row = index.meta_row(t);
    const bool has_rows = row[kMetaUnscored] == 0;
    if (row[kMetaSlab] == slab && has_rows) of_slab.push_back(t);
  }
  DYNEMB_CHECK(!of_slab.empty(), "dynemb::", op, ": slab is ", slab, ", expected one with tables");
  each_range(given, [&](int64_t begin, int64_t end) {
    std::fill(given.owner(begin), given.owner(end), 0);
  });
  for (const int64_t t : of_slab) write_owners_of_table(op, given, index.table(t), t);
  std::vector<std::vector<int64_t>> found(
      static_cast<size_t>((given.rows + kRowsPerUnit - 1) / kRowsPerUnit));
  each_range(given, [&](int64_t begin, int64_t end) {
    found[static_cast<size_t>(begin / kRowsPerUnit)] = changed_rows(given, begin, end);
  });
  return by_table(given, found, index.table_count);
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("changed_ids_", TORCH_BOX(&dynemb::cpu::changed_ids_));
}
