// Entries that a stage of a growth leaves to the next one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/index/args.h"
#include "cpu/runtime/scratch.h"

namespace dynemb::cpu {

// Entries without a place, in the order in which they were moved. A record is key, stored handle,
// its number in that order, and the score words.
class Leftovers {
 public:
  explicit Leftovers(int64_t score_words) : record_words_(kRecordWords + score_words) {}

  int64_t count() const { return static_cast<int64_t>(words_.size()) / record_words_; }
  const int64_t* record(int64_t i) const { return words_.data() + i * record_words_; }
  int64_t record_words() const { return record_words_; }
  static const int64_t* scores(const int64_t* record) { return record + kRecordWords; }
  static int64_t* scores(int64_t* record) { return record + kRecordWords; }

  // The next record, to be filled in.
  int64_t* add() {
    words_.resize(words_.size() + static_cast<size_t>(record_words_));
    return words_.data() + words_.size() - record_words_;
  }
  void clear() { words_.clear(); }

  // Takes the records of `from`, sorted by `parts` equal ranges of their first hashes (stable
  // within a range), and numbers them in that order.
  void take_sorted(const Leftovers& from, const TableView& table, int64_t parts) {
    range_begin_.assign(static_cast<size_t>(parts + 1), 0);
    const auto range_of = [&](int64_t i) {
      return bucket_of(first_hash(from.record(i)[0], table.salt), parts);
    };
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
  // Number of records of other ranges moved before these.
  void set_first_order(int64_t order) { first_order_ = order; }
  int64_t order(const int64_t* record) const { return first_order_ + record[2]; }
  int64_t range_begin(int64_t q) const { return range_begin_[q]; }

 private:
  static constexpr int64_t kRecordWords = 3;  // before the scores

  int64_t record_words_;
  Scratch<int64_t> words_;
  std::vector<int64_t> range_begin_;
  int64_t first_order_ = 0;
};

// Puts the leftovers of a growth into free slots of a table without tombstones: first buckets, then
// second buckets for the rest, then the following buckets. They come by equal ranges of old
// buckets, sorted by equal ranges of first hashes. In each stage a bucket takes them in the order
// of moving, which begins with the last range.
void place_leftovers(const TableView& table, std::vector<Leftovers>* left);

}  // namespace dynemb::cpu
