#include "arguments/table_constants.h"

#include <algorithm>

#include "core/columns.h"
#include "core/index/bucket.h"
#include "core/rows/initializer.h"

namespace dynemb {
namespace {

// Largest column of a record: a double below it holds integers exactly.
constexpr double kMostColumns = 4503599627370496.0;  // 2^52

bool is_count(double number) { return number >= 0.0 && number <= kMostColumns; }

struct RecordList {
  const char* begin_name;
  const char* count_name;
  MetaColumn begin;
  MetaColumn count;
};

constexpr RecordList kRecordLists[] = {
    {"INIT_BEGIN", "INIT_COUNT", kMetaInitBegin, kMetaInitCount},
    {"DEFAULT_BEGIN", "DEFAULT_COUNT", kMetaDefaultBegin, kMetaDefaultCount},
    {"REFUSED_BEGIN", "REFUSED_COUNT", kMetaRefusedBegin, kMetaRefusedCount},
};

// The error in a record; nullptr: it is valid.
const char* wrong_record(const double* record, int64_t dim, int64_t numel) {
  const double first = record[kInitFirstColumn];
  if (!is_count(first) || !is_count(record[kInitEndColumn])) return "columns";
  const double kind = record[kInitKindColumn];
  if (!(kind >= kInitConstant && kind <= kInitVector)) return "kind";
  if (static_cast<int>(kind) != kInitVector) return nullptr;
  const double values = record[kInitParameters];
  const double end = std::min(record[kInitEndColumn], static_cast<double>(dim));
  if (!is_count(values)) return "vector";
  return end > first && values + (end - first) > static_cast<double>(numel) ? "vector" : nullptr;
}

}  // namespace

void check_region(const char* op, int64_t t, const int64_t* meta, const int64_t* row,
                  int64_t buckets) {
  const int64_t begin = meta[kMetaRegionBegin];
  const int64_t region = meta[kMetaRegionBuckets];
  const int64_t count = row[kTableBucketCount];
  DYNEMB_CHECK(begin >= 0 && begin <= buckets && region > 0 && region <= buckets - begin &&
                   count > 0 && count <= region,
               "dynemb::", op, ": the descriptor of table ", t, " does not fit into buckets with ",
               buckets, " rows: meta[", t, ", REGION_BEGIN] is ", begin, ", meta[", t,
               ", REGION_BUCKETS] is ", region, " and tables[", t, ", BUCKET_COUNT] is ", count);
  const int64_t slots = count * kBucketWidth;
  const int64_t size = row[kTableSize];
  const int64_t tombstones = row[kTableTombstones];
  DYNEMB_CHECK(size >= 0 && size <= slots && tombstones >= 0 && tombstones <= slots, "dynemb::", op,
               ": tables[", t, ", SIZE] is ", size, " and tables[", t, ", TOMBSTONES] is ",
               tombstones, ", expected 0 to ", slots, ", its slots");
}

void check_slab(const char* op, int64_t t, const int64_t* meta, int64_t slabs) {
  const int64_t slab = meta[kMetaSlab];
  DYNEMB_CHECK(slab >= 0 && slab < slabs, "dynemb::", op, ": meta of table ", t, " names slab ",
               slab, ", expected 0 to ", slabs - 1);
}

void check_slab_counts(const char* op, const int64_t* slabs, int64_t count, int64_t max_rows) {
  const struct {
    SlabColumn column;
    const char* name;
    int64_t most;
  } columns[] = {
      {kSlabNextRow, "NEXT_ROW", max_rows},
      {kSlabFreeCount, "FREE_COUNT", max_rows},
      {kSlabCommittedRows, "COMMITTED_ROWS", max_rows},
      {kSlabRowBytes, "ROW_BYTES", kMostCounted},
      {kSlabGeneration, "GENERATION", kMostCounted},
  };
  for (int64_t s = 0; s < count; ++s) {
    for (const auto& of : columns) {
      const int64_t number = slabs[s * kSlabColumns + of.column];
      DYNEMB_CHECK(number >= 0 && number <= of.most, "dynemb::", op, ": slabs[", s, ", ", of.name,
                   "] is ", number, ", expected 0 to ", of.most);
    }
  }
}

void check_initializers(const char* op, int64_t t, const int64_t* meta, int64_t dim,
                        const double* init_data, int64_t numel) {
  DYNEMB_CHECK(meta[kMetaFirstColumn] >= 0 && meta[kMetaFirstColumn] <= kMostCounted,
               "dynemb::", op, ": meta[", t, ", FIRST_COLUMN] is ", meta[kMetaFirstColumn],
               ", expected 0 to ", kMostCounted + 0);
  for (const RecordList& list : kRecordLists) {
    const int64_t begin = meta[list.begin];
    const int64_t count = meta[list.count];
    DYNEMB_CHECK(
        begin >= 0 && begin <= numel && count > 0 && count <= (numel - begin) / kInitRecordColumns,
        "dynemb::", op, ": meta of table ", t,
        " names records outside init_data: ", list.begin_name, " is ", begin, " and ",
        list.count_name, " is ", count, ", but init_data has ", numel, " numbers, ",
        kInitRecordColumns + 0, " for a record");
    for (int64_t r = 0; r < count; ++r) {
      const char* wrong = wrong_record(init_data + begin + r * kInitRecordColumns, dim, numel);
      DYNEMB_CHECK(wrong == nullptr, "dynemb::", op, ": init_data: the ", wrong, " of record ", r,
                   " of ", list.begin_name, " of table ", t,
                   " are not those of an initializer, or point outside of it");
    }
  }
}

}  // namespace dynemb
