#include "cpu/index/growth.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/policy/counts.h"
#include "cpu/index/one_writer.h"
#include "cpu/index/placement.h"
#include "cpu/memory/reserve.h"
namespace dynemb::cpu {
namespace {

constexpr int64_t kLineBytes = kBucketWords * static_cast<int64_t>(sizeof(int64_t));
constexpr int64_t kHugePageBytes = int64_t{4} << 20;

constexpr int64_t kSpreadBuckets = 16;  // taken out of the index together

// One in so many slots holds, at the maximum load, an id that a growth by a quarter finds no place
// for in its first bucket, or a few more.
constexpr int64_t kRestShare = 8;

// Moves the entries of buckets [begin, end) to their first buckets among `bucket_count`. The
// address of a first bucket grows with the hash and with the number of buckets, so targets lie at
// or above `begin`: taken from the last buckets down, they have been emptied already. What was
// displaced before, or finds its bucket full, goes to `rest`.
void spread_buckets(const TableView& table, int64_t table_number, int64_t begin, int64_t end,
                    int64_t bucket_count, std::vector<Entry>* rest) {
  int64_t lines[kSpreadBuckets * kBucketWords];
  int64_t scores[kSpreadBuckets * kBucketWidth * kMaxScoreWords];
  const int64_t words = table.score_words;
  const size_t buckets = static_cast<size_t>(end - begin);
  std::memcpy(lines, table.line(begin), buckets * sizeof(int64_t) * kBucketWords);
  std::memset(table.line(begin), 0, buckets * sizeof(int64_t) * kBucketWords);
  if (table.scores != nullptr) {
    const size_t bytes = buckets * sizeof(int64_t) * kBucketWidth * static_cast<size_t>(words);
    std::memcpy(scores, table.score(begin, 0), bytes);
    std::memset(table.score(begin, 0), 0, bytes);
  }
  int32_t occupied[kSpreadBuckets * kBucketWidth];
  int64_t count = 0;
  for (int32_t bucket = static_cast<int32_t>(buckets) - 1; bucket >= 0; --bucket) {
    for (int32_t slot = 0; slot < kBucketWidth; ++slot) {
      occupied[count] = bucket * kBucketWidth + slot;
      count += lines[bucket * kBucketWords + kBucketWidth + slot] != 0;
    }
  }
  for (int64_t k = 0; k < count; ++k) {
    const int32_t bucket = occupied[k] / kBucketWidth;
    const int32_t slot = occupied[k] % kBucketWidth;
    const int64_t* line = lines + bucket * kBucketWords;
    const uint64_t hash = first_hash(line[slot], table.salt);
    if (bucket_of(hash, table.bucket_count) == begin + bucket) {
      const int64_t target = bucket_of(hash, bucket_count);
      int64_t* new_line = table.line(target);
      int free = 0;  // a bucket is filled from its first slot on
      for (int j = 0; j < kBucketWidth; ++j) free += new_line[kBucketWidth + j] != 0;
      if (free < kBucketWidth) {
        new_line[free] = line[slot];
        new_line[kBucketWidth + free] = line[kBucketWidth + slot];
        for (int64_t w = 0; w < words; ++w) {
          table.score(target, free)[w * kBucketWidth] =
              scores[(bucket * words + w) * kBucketWidth + slot];
        }
        continue;
      }
    }
    Entry entry{hash, line[slot], line[kBucketWidth + slot], static_cast<int32_t>(table_number),
                0,    {}};
    for (int64_t w = 0; w < words; ++w) {
      entry.score[w] = scores[(bucket * words + w) * kBucketWidth + slot];
    }
    rest->push_back(entry);
  }
}

// Grows the index of one table so that it takes `ids` ids without another growth.
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

// Places all entries of one table again, in as few buckets as take `ids` ids.
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
  // in the order of moving: from the last bucket down, those in their first bucket before others
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
    if (!put_entry(view, bucket_of(entry.hash, wanted), entry, &reused)) rest.push_back(entry);
  }
  std::sort(rest.begin(), rest.end(),
            [](const Entry& a, const Entry& b) { return a.order < b.order; });
  place_entries(index, entry_list(rest));
}

}  // namespace

int64_t check_rehash(const IndexArgs& index, int64_t table, int64_t bucket_count) {
  const int64_t region = index.meta_row(table)[kMetaRegionBuckets];
  STD_TORCH_CHECK(bucket_count <= region, "dynemb::", index.op, ": table ", table, " needs ",
                  bucket_count, " buckets for its ids but has room for ", region,
                  ": create the table with a larger max_rows, or erase ids");
  const int64_t added = bucket_count - index.table_row(table)[kTableBucketCount];
  return added * (kLineBytes + index.table(table).score_words * kBucketWidth * 8);
}

void rehash(const IndexArgs& index, int64_t table, int64_t bucket_count) {
  int64_t* row = index.table_row(table);
  const TableView view = index.table(table);
  if (bucket_count * kLineBytes >= kHugePageBytes) {
    prefer_huge_pages(view.lines, static_cast<size_t>(bucket_count * kLineBytes));
    if (view.scores != nullptr) {
      prefer_huge_pages(view.scores,
                        static_cast<size_t>(bucket_count * view.score_words * kBucketWidth * 8));
    }
  }
  // Equal ranges of the hash are whole ranges of buckets before and after, where both counts allow
  // it. Ranges [first, last) are independent once the targets of the first lie above the sources of
  // the last; so they go in waves from the top, each wave on all threads.
  const bool ranges = view.bucket_count % kPartitions == 0 && bucket_count % kPartitions == 0;
  const int64_t parts = ranges ? kPartitions : 1;
  std::vector<std::vector<Entry>> rest(parts);
  for (int64_t last = parts; last > 0;) {
    const int64_t above = (last * view.bucket_count + bucket_count - 1) / bucket_count;
    // nobody leaves his range where the count stays: tombstones only
    const int64_t first = bucket_count == view.bucket_count ? 0 : std::min(above, last - 1);
    const auto spread_parts = [&](int64_t part_begin, int64_t part_end) {
      for (int64_t p = first + part_begin; p < first + part_end; ++p) {
        const int64_t begin = view.bucket_count * p / parts;
        int64_t end = view.bucket_count * (p + 1) / parts;
        rest[p].reserve(static_cast<size_t>((end - begin) * kBucketWidth / kRestShare));
        for (; end > begin; end -= kSpreadBuckets) {
          spread_buckets(view, table, std::max(end - kSpreadBuckets, begin), end, bucket_count,
                         &rest[p]);
        }
      }
    };
    parallel_units(last - first, view.bucket_count / parts * (last - first) * kBucketWidth,
                   spread_parts);
    last = first;
  }
  EntryList entries;
  size_t count = 0;
  for (const auto& part : rest) count += part.size();
  entries.reserve(count);
  // in the order of moving: from the last bucket down
  for (auto part = rest.rbegin(); part != rest.rend(); ++part) {
    for (const Entry& entry : *part) entries.push_back(&entry);
  }
  row[kTableBucketCount] = bucket_count;
  row[kTableTombstones] = 0;
  row[kTableGrowths] = next_count(row[kTableGrowths]);
  place_entries(index, entries);
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("grow_", TORCH_BOX(&dynemb::cpu::grow_));
  m.impl("shrink_", TORCH_BOX(&dynemb::cpu::shrink_));
}
