#include "cpu/index_growth.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "cpu/index_placement.h"
#include "cpu/index_probe.h"
#include "cpu/memory.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLineBytes = kBucketWords * static_cast<int64_t>(sizeof(int64_t));
// Reading the system's free memory costs microseconds; below this size it is not asked for.
constexpr int64_t kCheckedBytes = int64_t{16} << 20;
constexpr int64_t kHugePageBytes = int64_t{4} << 20;

// Moves the entries of old buckets [begin, end) that lie in their first bucket to their new first
// bucket. Both are addressed by the hash's high bits, so reads and writes run through memory in the
// same order. What lies elsewhere or finds its bucket full goes to `rest`.
void move_range(const TableView& from, const TableView& to, int64_t table, int64_t begin,
                int64_t end, std::vector<Entry>* rest) {
  for (int64_t bucket = begin; bucket < end; ++bucket) {
    const int64_t* line = from.line(bucket);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      const int64_t stored = line[kBucketWidth + slot];
      if (stored == 0) continue;
      const int64_t key = line[slot];
      const uint64_t hash = first_hash(key, from.salt);
      const int64_t score = from.scores == nullptr ? 0 : from.scores[bucket * kBucketWidth + slot];
      if (bucket_of(hash, from.bucket_count) == bucket) {
        const int64_t target = bucket_of(hash, to.bucket_count);
        int64_t* new_line = to.line(target);
        int free = 0;
        while (free < kBucketWidth && new_line[kBucketWidth + free] != 0) ++free;
        if (free < kBucketWidth) {
          new_line[free] = key;
          new_line[kBucketWidth + free] = stored;
          if (to.scores != nullptr) to.scores[target * kBucketWidth + free] = score;
          continue;
        }
      }
      rest->push_back({hash, key, stored, score, table});
    }
  }
}

void clear_range(const TableView& view, int64_t begin, int64_t end) {
  clear_memory(view.line(begin), static_cast<size_t>((end - begin) * kLineBytes));
  if (view.scores != nullptr) {
    clear_memory(view.scores + begin * kBucketWidth,
                 static_cast<size_t>((end - begin) * kBucketWidth * 8));
  }
}

// Grows the index of one table so that it takes `ids` ids without another growth.
void grow_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, int64_t table, int64_t ids) {
  const IndexView index = index_view("grow_", buckets, &scores, tables, meta);
  STD_TORCH_CHECK(table >= 0 && table < index.table_count, "dynemb::grow_: table is ", table,
                  ", expected 0 to ", index.table_count - 1);
  STD_TORCH_CHECK(ids >= 0, "dynemb::grow_: ids is ", ids, ", expected a count of at least 0");
  const int64_t wanted = buckets_for(ids);
  if (wanted <= index.table_row(table)[kTableBucketCount]) return;
  check_rehash(index, table, wanted);
  rehash(index, table, wanted);
}

}  // namespace

void check_rehash(const IndexView& index, int64_t table, int64_t bucket_count) {
  const int64_t region = index.meta_row(table)[kMetaRegionBuckets];
  STD_TORCH_CHECK(bucket_count <= region, "dynemb::", index.op, ": table ", table, " needs ",
                  bucket_count, " buckets for its ids but has room for ", region,
                  ": create the table with a larger max_rows, or erase ids");
  const int64_t bytes =
      bucket_count * (kLineBytes + (index.scores == nullptr ? 0 : kBucketWidth * 8));
  if (bytes < kCheckedBytes) return;
  const int64_t available = available_memory();
  STD_TORCH_CHECK(bytes <= available, "dynemb::", index.op, ": growing the index of table ", table,
                  " takes ", bytes >> 20, " MiB, but only ", available >> 20,
                  " MiB of memory are available; nothing was changed. Erase ids or use a machine "
                  "with more memory");
}

void rehash(const IndexView& index, int64_t table, int64_t bucket_count) {
  int64_t* row = index.table_row(table);
  const int64_t other = 1 - row[kTableActiveHalf];
  const TableView from = index.table(table);
  const TableView to = index.half(table, other, bucket_count);
  if (bucket_count * kLineBytes >= kHugePageBytes) {
    prefer_huge_pages(to.lines, static_cast<size_t>(bucket_count * kLineBytes));
    if (to.scores != nullptr) {
      prefer_huge_pages(to.scores, static_cast<size_t>(bucket_count * kBucketWidth * 8));
    }
  }
  // Equal ranges of the hash are whole ranges of buckets on both sides: they move independently.
  const bool parallel = from.bucket_count % kPartitions == 0 && bucket_count % kPartitions == 0;
  const int64_t parts = parallel ? kPartitions : 1;
  std::vector<std::vector<Entry>> rest(parts);
  const auto move_parts = [&](int64_t part_begin, int64_t part_end) {
    for (int64_t p = part_begin; p < part_end; ++p) {
      const int64_t begin = from.bucket_count / parts * p;
      const int64_t end = p + 1 == parts ? from.bucket_count : from.bucket_count / parts * (p + 1);
      move_range(from, to, table, begin, end, &rest[p]);
      clear_range(from, begin, end);
    }
  };
  parallel_units(parts, from.bucket_count * kBucketWidth, move_parts);
  row[kTableBucketCount] = bucket_count;
  row[kTableActiveHalf] = other;
  row[kTableTombstones] = 0;
  ++row[kTableGrowths];
  std::vector<Entry> entries;
  for (auto& part : rest) entries.insert(entries.end(), part.begin(), part.end());
  place_entries(index, std::move(entries));
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { m.impl("grow_", TORCH_BOX(&dynemb::cpu::grow_)); }
