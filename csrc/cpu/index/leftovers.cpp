#include "cpu/index/leftovers.h"

#include <cstddef>

#include "cpu/gradient/radix_sort.h"
#include "cpu/index/probe.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLookahead = 16;

uint64_t hash_of(const TableView& table, const int64_t* record) {
  return first_hash(record[0], table.salt);
}

void prefetch_bucket(const TableView& table, int64_t bucket) {
  prefetch_line(table.line(bucket));
  if (table.scores != nullptr) prefetch_line_of(table.score(bucket, 0));
}

// Puts a record into the first free slot of a bucket; false if the bucket is full.
bool put_record(const TableView& table, int64_t bucket, const int64_t* record) {
  int64_t* line = table.line(bucket);
  int free = 0;
  for (int j = 0; j < kBucketWidth; ++j) free += line[kBucketWidth + j] != 0;
  if (free == kBucketWidth) return false;
  line[free] = record[0];
  line[kBucketWidth + free] = record[1];
  for (int64_t w = 0; w < table.score_words; ++w) {
    table.score(bucket, free)[w * kBucketWidth] = Leftovers::scores(record)[w];
  }
  return true;
}

// Each range of first buckets on one thread. Returns the records that find their bucket full, by
// range.
std::vector<Leftovers> place_first(const TableView& table, const std::vector<Leftovers>& left,
                                   int64_t count) {
  const auto parts = static_cast<int64_t>(left.size());
  std::vector<Leftovers> full(left.size(), Leftovers(table.score_words));
  parallel_units(parts, count, [&](int64_t part_begin, int64_t part_end) {
    for (int64_t q = part_begin; q < part_end; ++q) {
      for (int64_t p = parts - 1; p >= 0; --p) {
        const int64_t end = left[p].range_begin(q + 1);
        for (int64_t i = left[p].range_begin(q); i < end; ++i) {
          if (i + kLookahead < end) {
            const uint64_t ahead = hash_of(table, left[p].record(i + kLookahead));
            prefetch_bucket(table, bucket_of(ahead, table.bucket_count));
          }
          const int64_t* record = left[p].record(i);
          const int64_t bucket = bucket_of(hash_of(table, record), table.bucket_count);
          if (put_record(table, bucket, record)) continue;
          int64_t* rest = full[q].add();
          std::copy_n(record, left[p].record_words(), rest);
          rest[2] = left[p].order(record);
        }
      }
    }
  });
  return full;
}

// Items are orders and numbers of records, in this order.
constexpr int kNumberBits = 32;
const int64_t* record_of(const Scratch<int64_t>& records, int64_t record_words, uint64_t item) {
  return records.data() + static_cast<int64_t>(item & UINT32_MAX) * record_words;
}

// Each range of second buckets on one thread. `orders`: upper bound of the orders of records. Calls
// `following(record)` for those that find their bucket full, in order.
template <class Following>
void place_second(const TableView& table, const std::vector<Leftovers>& full, int64_t orders,
                  const Following& following) {
  const auto parts = static_cast<int64_t>(full.size());
  const int64_t record_words = full[0].record_words();
  const auto second_of = [&](const int64_t* record) { return second_hash(hash_of(table, record)); };
  // records sorted by range, and by number of their list
  std::vector<int64_t> next(static_cast<size_t>(parts * parts), 0);
  parallel_units(parts, orders, [&](int64_t begin, int64_t end) {
    for (int64_t q = begin; q < end; ++q) {
      for (int64_t i = 0; i < full[q].count(); ++i) {
        ++next[q * parts + bucket_of(second_of(full[q].record(i)), parts)];
      }
    }
  });
  std::vector<size_t> part(static_cast<size_t>(parts + 1), 0);
  int64_t count = 0;
  for (int64_t s = 0; s < parts; ++s) {
    for (int64_t q = 0; q < parts; ++q) {
      const int64_t records = next[q * parts + s];
      next[q * parts + s] = count;
      count += records;
    }
    part[s + 1] = static_cast<size_t>(count);
  }
  if (count == 0) return;
  Scratch<int64_t> records(static_cast<size_t>(count * record_words));
  Scratch<uint64_t> items(static_cast<size_t>(count));
  parallel_units(parts, count, [&](int64_t begin, int64_t end) {
    for (int64_t q = begin; q < end; ++q) {
      for (int64_t i = 0; i < full[q].count(); ++i) {
        const int64_t* record = full[q].record(i);
        const int64_t to = next[q * parts + bucket_of(second_of(record), parts)]++;
        std::copy_n(record, record_words, records.data() + to * record_words);
        items[to] = static_cast<uint64_t>(record[2]) << kNumberBits | static_cast<uint64_t>(to);
      }
    }
  });
  const int order_bits = 64 - __builtin_clzll(static_cast<uint64_t>(orders));
  radix_sort_parts(items, part, kNumberBits, kNumberBits + order_bits);
  std::vector<Scratch<uint64_t>> rest(static_cast<size_t>(parts));
  parallel_units(parts, count, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      for (size_t i = part[s]; i < part[s + 1]; ++i) {
        if (i + 2 * kLookahead < part[s + 1]) {
          __builtin_prefetch(record_of(records, record_words, items[i + 2 * kLookahead]));
        }
        if (i + kLookahead < part[s + 1]) {
          const int64_t* ahead = record_of(records, record_words, items[i + kLookahead]);
          prefetch_bucket(table, bucket_of(second_of(ahead), table.bucket_count));
        }
        const int64_t* record = record_of(records, record_words, items[i]);
        const int64_t bucket = bucket_of(second_of(record), table.bucket_count);
        if (!put_record(table, bucket, record)) rest[s].push_back(items[i]);
      }
    }
  });
  items.clear();
  for (const auto& list : rest) items.insert(items.end(), list.begin(), list.end());
  radix_sort(items, kNumberBits, kNumberBits + order_bits);
  for (size_t i = 0; i < items.size(); ++i) {
    if (i + 2 * kLookahead < items.size()) {
      __builtin_prefetch(record_of(records, record_words, items[i + 2 * kLookahead]));
    }
    if (i + kLookahead < items.size()) {
      const int64_t* ahead = record_of(records, record_words, items[i + kLookahead]);
      prefetch_bucket(table, ProbeSequence(hash_of(table, ahead), table.bucket_count).at(2));
    }
    following(record_of(records, record_words, items[i]));
  }
}

}  // namespace

void place_leftovers(const TableView& table, std::vector<Leftovers>* left) {
  int64_t count = 0;
  for (auto part = left->rbegin(); part != left->rend(); ++part) {
    part->set_first_order(count);
    count += part->count();
  }
  place_second(table, place_first(table, *left, count), count, [&](const int64_t* record) {
    const ProbeSequence sequence(hash_of(table, record), table.bucket_count);
    int64_t probe = 2;
    while (probe < sequence.length() && !put_record(table, sequence.at(probe), record)) ++probe;
  });
}

}  // namespace dynemb::cpu
