#include "cpu/index/growth.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/policy/counts.h"
#include "core/runtime/error_class.h"
#include "cpu/index/leftovers.h"
#include "cpu/index/one_writer.h"
#include "cpu/index/placement.h"
#include "cpu/index/spread.h"
#include "cpu/memory/reserve.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLineBytes = kBucketWords * static_cast<int64_t>(sizeof(int64_t));
constexpr int64_t kHugePageBytes = int64_t{4} << 20;

// Grows the index of one table for `ids` ids.
void grow_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, int64_t table, int64_t ids) {
  const IndexArgs index = index_args("grow_", buckets, &scores, tables, meta);
  check_table_number(index.op, table, index.table_count);
  check_room(index.op, ids);
  const OneWriter writer(index.op, index.tables);
  const int64_t wanted = buckets_for(ids);
  if (wanted <= index.table_row(table)[kTableBucketCount]) return;
  check_available_memory(index.op, check_rehash(index, table, wanted));
  rehash(index, table, wanted);
}

// Places all entries of one table again, in the fewest buckets for `ids` ids.
void shrink_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, int64_t table,
             int64_t ids) {
  const IndexArgs index = index_args("shrink_", buckets, &scores, tables, meta);
  check_table_number(index.op, table, index.table_count);
  check_room(index.op, ids);
  const OneWriter writer(index.op, index.tables);
  int64_t* row = index.table_row(table);
  const TableView old = index.table(table);
  const int64_t wanted = buckets_for(std::max(ids, row[kTableSize]));
  if (wanted >= old.bucket_count) return;
  // in the order of moving: from the last bucket down, entries in their first bucket before others
  std::vector<Entry> kept, rest;
  for (int64_t bucket = old.bucket_count - 1; bucket >= 0; --bucket) {
    const int64_t* line = old.line(bucket);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      if (line[kBucketWidth + slot] == 0) continue;
      Entry entry{first_hash(line[slot], old.salt),
                  line[slot],
                  line[kBucketWidth + slot],
                  static_cast<int32_t>(table),
                  static_cast<int32_t>((old.bucket_count - 1 - bucket) * kBucketWidth + slot),
                  {}};
      for (int64_t w = 0; w < old.score_words; ++w) {
        entry.score[w] = old.score(bucket, slot)[w * kBucketWidth];
      }
      (bucket_of(entry.hash, old.bucket_count) == bucket ? kept : rest).push_back(entry);
    }
  }
  const MovingEntries moving(index.tables);
  std::memset(old.line(0), 0, static_cast<size_t>(old.bucket_count * kLineBytes));
  if (old.scores != nullptr) {
    std::memset(old.scores, 0,
                static_cast<size_t>(old.bucket_count * old.score_words * kBucketWidth * 8));
  }
  row[kTableBucketCount] = wanted;
  row[kTableTombstones] = 0;
  row[kTableGrowths] = next_count(row[kTableGrowths]);
  const TableView view = index.table(table);
  int64_t reused = 0;
  for (const Entry& entry : kept) {
    if (!put_entry(index.tables, view, bucket_of(entry.hash, wanted), entry, &reused))
      rest.push_back(entry);
  }
  std::sort(rest.begin(), rest.end(),
            [](const Entry& a, const Entry& b) { return a.order < b.order; });
  place_entries(index, entry_list(rest));
}

}  // namespace

int64_t check_rehash(const IndexArgs& index, int64_t table, int64_t bucket_count) {
  const int64_t region = index.meta_row(table)[kMetaRegionBuckets];
  DYNEMB_CHECK(bucket_count <= region, "dynemb::", index.op, ": table ", table, " needs ",
               bucket_count, " buckets for its ids but has room for ", region,
               ": create the table with a larger max_rows, or erase ids", kNoRoomError);
  const int64_t added = bucket_count - index.table_row(table)[kTableBucketCount];
  return added * (kLineBytes + index.table(table).score_words * kBucketWidth * 8);
}

void rehash(const IndexArgs& index, int64_t table, int64_t bucket_count) {
  int64_t* row = index.table_row(table);
  const TableView view = index.table(table);
  const MovingEntries moving(index.tables);
  if (bucket_count * kLineBytes >= kHugePageBytes) {
    prefer_huge_pages(view.lines, static_cast<size_t>(bucket_count * kLineBytes));
    if (view.scores != nullptr) {
      prefer_huge_pages(view.scores,
                        static_cast<size_t>(bucket_count * view.score_words * kBucketWidth * 8));
    }
  }
  // Equal ranges of the hash are whole ranges of buckets before and after, if both counts allow it.
  // Ranges [first, last) are independent if the targets of the first lie above the sources of the
  // last. So ranges are moved in waves from the top, each wave on all threads.
  const bool ranges = view.bucket_count % kPartitions == 0 && bucket_count % kPartitions == 0;
  const int64_t parts = ranges ? kPartitions : 1;
  std::vector<Leftovers> left(static_cast<size_t>(parts), Leftovers(view.score_words));
  const bool stays = bucket_count == view.bucket_count;
  for (int64_t last = parts; last > 0;) {
    const int64_t above = (last * view.bucket_count + bucket_count - 1) / bucket_count;
    // with the same count, entries stay within their range: only tombstones go
    const int64_t first = stays ? 0 : std::min(above, last - 1);
    const auto spread_parts = [&](int64_t part_begin, int64_t part_end) {
      Leftovers in_order(view.score_words);
      for (int64_t p = first + part_begin; p < first + part_end; ++p) {
        const int64_t begin = view.bucket_count * p / parts;
        const int64_t end = view.bucket_count * (p + 1) / parts;
        in_order.clear();
        stays ? tidy_buckets(view, begin, end, &in_order)
              : spread_buckets({view, begin, end, bucket_count, &in_order});
        left[p].take_sorted(in_order, view, parts);
      }
    };
    parallel_units(last - first, view.bucket_count / parts * (last - first) * kBucketWidth,
                   spread_parts);
    last = first;
  }
  row[kTableBucketCount] = bucket_count;
  row[kTableTombstones] = 0;
  row[kTableGrowths] = next_count(row[kTableGrowths]);
  place_leftovers(index.table(table), &left);
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("grow_", TORCH_BOX(&dynemb::cpu::grow_));
  m.impl("shrink_", TORCH_BOX(&dynemb::cpu::shrink_));
}
