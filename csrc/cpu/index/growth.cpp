#include "cpu/index/growth.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/policy/counts.h"
#include "cpu/index/one_writer.h"
#include "cpu/index/placement.h"
#include "cpu/index/probe_block.h"
#include "cpu/memory/reserve.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLineBytes = kBucketWords * static_cast<int64_t>(sizeof(int64_t));
constexpr int64_t kHugePageBytes = int64_t{4} << 20;

constexpr int64_t kSpreadBuckets = 16;  // taken out of the index together

// What one range of old buckets leaves over when its other entries have been moved: those that did
// not lie in their first bucket, or find the new one full. A record is key, stored handle, number
// in the order of moving within the range, and the score words.
class Leftovers {
 public:
  explicit Leftovers(int64_t score_words) : record_words_(kRecordWords + score_words) {}

  int64_t count() const { return static_cast<int64_t>(words_.size()) / record_words_; }
  const int64_t* record(int64_t i) const { return words_.data() + i * record_words_; }
  static uint64_t hash(const TableView& table, const int64_t* record) {
    return first_hash(record[0], table.salt);
  }

  int64_t* add() {
    words_.resize(words_.size() + static_cast<size_t>(record_words_));
    return words_.data() + words_.size() - record_words_;
  }
  void clear() { words_.clear(); }

  // Takes the records of `from`, sorted by `parts` equal ranges of their first hashes, those of a
  // range in the order in which they were.
  void take_sorted(const Leftovers& from, const TableView& table, int64_t parts) {
    range_begin_.assign(static_cast<size_t>(parts + 1), 0);
    const auto range_of = [&](int64_t i) { return bucket_of(hash(table, from.record(i)), parts); };
    for (int64_t i = 0; i < from.count(); ++i) ++range_begin_[range_of(i) + 1];
    for (int64_t q = 0; q < parts; ++q) range_begin_[q + 1] += range_begin_[q];
    std::vector<int64_t> next(range_begin_.begin(), range_begin_.end() - 1);
    words_.resize(from.words_.size());
    for (int64_t i = 0; i < from.count(); ++i) {
      int64_t* record = words_.data() + next[range_of(i)]++ * record_words_;
      std::copy_n(from.record(i), record_words_, record);
      record[2] = i;
    }
  }
  // How many records of other ranges were moved before these.
  void set_first_order(int64_t order) { first_order_ = order; }
  int64_t order(const int64_t* record) const { return first_order_ + record[2]; }
  int64_t range_begin(int64_t q) const { return range_begin_[q]; }

  static constexpr int64_t kRecordWords = 3;  // before the scores

 private:
  int64_t record_words_;
  std::vector<int64_t> words_;
  std::vector<int64_t> range_begin_;
  int64_t first_order_ = 0;
};

// The first slot that is free, or kBucketWidth: a growth fills a bucket from its first slot on.
DYNEMB_INLINE int first_free(const int64_t* line) {
  int free = 0;
  for (int j = 0; j < kBucketWidth; ++j) free += line[kBucketWidth + j] != 0;
  return free;
}

// Moves the entries of buckets [begin, end) to their first buckets among `bucket_count`. The
// address of a first bucket grows with the hash and with the number of buckets, so targets lie at
// or above `begin`: taken from the last buckets down, they have been emptied already. What was
// displaced before, or finds its bucket full, goes to `rest`.
void spread_buckets(const TableView& table, int64_t begin, int64_t end, int64_t bucket_count,
                    Leftovers* rest) {
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
      const int free = first_free(new_line);
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
    int64_t* record = rest->add();
    record[0] = line[slot];
    record[1] = line[kBucketWidth + slot];
    for (int64_t w = 0; w < words; ++w) {
      record[Leftovers::kRecordWords + w] = scores[(bucket * words + w) * kBucketWidth + slot];
    }
  }
}

struct TidyJob {
  const TableView& table;
  int64_t begin;  // buckets
  int64_t end;
  Leftovers* rest;
};

// The same where the number of buckets stays: entries that lie in their first bucket stay there,
// moved to its first slots. A bucket of such entries alone, without a tombstone, is only read.
DYNEMB_INLINE void tidy_buckets_body(const TidyJob& job) {
  const TableView table = job.table;
  const auto bucket_count = static_cast<uint64_t>(table.bucket_count);
  const int64_t words = table.score_words;
  for (int64_t bucket = job.end - 1; bucket >= job.begin; --bucket) {
    int64_t* line = table.line(bucket);
    uint32_t used = 0;      // a bit for each slot
    uint32_t occupied = 0;  // not a tombstone
    uint32_t kept = 0;
#pragma GCC unroll 8
    for (int j = 0; j < kBucketWidth; j += 4) {
      const Words4 keys = load_words(line + j);
      const Words4 stored = load_words(line + kBucketWidth + j);
      const UnsignedWords4 hash = fmix64_words(reinterpret_cast<UnsignedWords4>(keys) ^ table.salt);
      const Words4 own = reinterpret_cast<Words4>(buckets_of_words(hash, bucket_count)) == bucket;
      const Words4 bit{1, 2, 4, 8};
      used |= static_cast<uint32_t>(or_words(((keys | stored) != 0) & bit)) << j;
      occupied |= static_cast<uint32_t>(or_words((stored != 0) & bit)) << j;
      kept |= static_cast<uint32_t>(or_words((stored != 0) & own & bit)) << j;
    }
    // all that is used is kept, in the first slots
    if (used == kept && (kept & (kept + 1)) == 0) continue;
    for (uint32_t left = occupied & ~kept; left != 0; left &= left - 1) {
      const int slot = __builtin_ctz(left);
      int64_t* record = job.rest->add();
      record[0] = line[slot];
      record[1] = line[kBucketWidth + slot];
      for (int64_t w = 0; w < words; ++w) {
        record[Leftovers::kRecordWords + w] = table.score(bucket, slot)[w * kBucketWidth];
      }
    }
    int free = 0;
    for (; kept != 0; kept &= kept - 1, ++free) {
      const int slot = __builtin_ctz(kept);
      line[free] = line[slot];
      line[kBucketWidth + free] = line[kBucketWidth + slot];
      for (int64_t w = 0; w < words; ++w) {
        table.score(bucket, free)[w * kBucketWidth] = table.score(bucket, slot)[w * kBucketWidth];
      }
    }
    for (; free < kBucketWidth; ++free) {
      line[free] = line[kBucketWidth + free] = 0;
      for (int64_t w = 0; w < words; ++w) table.score(bucket, free)[w * kBucketWidth] = 0;
    }
  }
}
DYNEMB_SIMD_VARIANTS(tidy_buckets, (const TidyJob& job), (job))

// Puts what is left over into first buckets, each range of buckets on one thread, in the order of
// moving. Returns what finds its first bucket full, by range of buckets.
std::vector<std::vector<Entry>> place_leftovers(const TableView& table, int64_t table_number,
                                                const std::vector<Leftovers>& left, int64_t count) {
  constexpr int64_t kLookahead = 16;
  const auto parts = static_cast<int64_t>(left.size());
  std::vector<std::vector<Entry>> displaced(left.size());
  parallel_units(parts, count, [&](int64_t part_begin, int64_t part_end) {
    for (int64_t q = part_begin; q < part_end; ++q) {
      for (int64_t p = parts - 1; p >= 0; --p) {
        const int64_t end = left[p].range_begin(q + 1);
        for (int64_t i = left[p].range_begin(q); i < end; ++i) {
          if (i + kLookahead < end) {
            const uint64_t ahead = Leftovers::hash(table, left[p].record(i + kLookahead));
            const int64_t bucket = bucket_of(ahead, table.bucket_count);
            prefetch_line(table.line(bucket));
            if (table.scores != nullptr) prefetch_line_of(table.score(bucket, 0));
          }
          const int64_t* record = left[p].record(i);
          const uint64_t hash = Leftovers::hash(table, record);
          const int64_t bucket = bucket_of(hash, table.bucket_count);
          int64_t* line = table.line(bucket);
          const int free = first_free(line);
          const int64_t* scores = record + Leftovers::kRecordWords;
          if (free < kBucketWidth) {
            line[free] = record[0];
            line[kBucketWidth + free] = record[1];
            for (int64_t w = 0; w < table.score_words; ++w) {
              table.score(bucket, free)[w * kBucketWidth] = scores[w];
            }
            continue;
          }
          Entry entry{hash,
                      record[0],
                      record[1],
                      static_cast<int32_t>(table_number),
                      static_cast<int32_t>(left[p].order(record)),
                      {}};
          std::copy_n(scores, table.score_words, entry.score);
          displaced[q].push_back(entry);
        }
      }
    }
  });
  return displaced;
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
  std::vector<Leftovers> left(static_cast<size_t>(parts), Leftovers(view.score_words));
  const bool stays = bucket_count == view.bucket_count;
  const bool in_place = stays && bucket_count < int64_t{1} << 32;  // so buckets_of_words asks
  for (int64_t last = parts; last > 0;) {
    const int64_t above = (last * view.bucket_count + bucket_count - 1) / bucket_count;
    // nobody leaves his range where the count stays: tombstones only
    const int64_t first = stays ? 0 : std::min(above, last - 1);
    const auto spread_parts = [&](int64_t part_begin, int64_t part_end) {
      Leftovers in_order(view.score_words);
      for (int64_t p = first + part_begin; p < first + part_end; ++p) {
        const int64_t begin = view.bucket_count * p / parts;
        int64_t end = view.bucket_count * (p + 1) / parts;
        in_order.clear();
        if (in_place) {
          tidy_buckets({view, begin, end, &in_order});
          end = begin;
        }
        for (; end > begin; end -= kSpreadBuckets) {
          spread_buckets(view, std::max(end - kSpreadBuckets, begin), end, bucket_count, &in_order);
        }
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
  int64_t count = 0;
  for (auto part = left.rbegin(); part != left.rend(); ++part) {
    part->set_first_order(count);
    count += part->count();
  }
  const auto displaced = place_leftovers(index.table(table), table, left, count);
  place_displaced(index, merge_by_order(displaced, count));
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("grow_", TORCH_BOX(&dynemb::cpu::grow_));
  m.impl("shrink_", TORCH_BOX(&dynemb::cpu::shrink_));
}
