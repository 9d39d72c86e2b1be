// Insertions and erasures that the device may not have done yet: what the host cannot see in the
// counts of the tables.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "cuda/runtime/launch.h"

namespace dynemb::cuda {

class CallsInFlight {
 public:
  struct Insertion {
    int64_t number;
    int64_t ids;
    std::vector<bool> tables;  // that get ids
    std::vector<bool> slabs;   // that give rows
  };

  // The device writes the number of the last insertion that it has done to `finished`.
  explicit CallsInFlight(const volatile int64_t* finished) : finished_(finished) {}

  // Returns the number of the insertion.
  int64_t add(int64_t ids, std::vector<bool> tables, std::vector<bool> slabs);
  void drop_last() { insertions_.pop_back(); }  // it ends before its kernels are launched
  void note_erasure(int64_t ids);
  // The host has launched a rehash of the table into so many buckets, whose end it does not wait
  // for. It is known to have been done after `steps` calls of end_step().
  void note_rehash(size_t table, int64_t buckets, int64_t steps);
  void end_step();
  void forget();  // the stream has been waited for

  // Drops what the device has finished.
  void confirm();
  // Waits until the device has done the oldest insertion. false: the stream is idle without it,
  // because it failed before it was launched or is on another stream.
  bool wait_for_oldest(const Call& call);

  const std::deque<Insertion>& insertions() const { return insertions_; }
  int64_t ids_of_table(size_t table) const;
  int64_t ids_of_slab(size_t slab) const;
  // Erased ids whose tombstones the tables' counts may lack.
  int64_t erased_ids() const;
  // Buckets that a table gets by a rehash under way; 0: none is.
  int64_t rehashed_buckets(size_t table) const;
  // The most ids that an insertion has brought so far.
  int64_t most_ids() const { return most_ids_; }

 private:
  struct Erasure {
    int64_t before;  // the insertion that comes next
    int64_t ids;
  };

  struct Rehash {
    int64_t buckets;
    int64_t steps;  // until it is known to have been done
  };

  const volatile int64_t* finished_;
  std::deque<Insertion> insertions_;
  std::deque<Erasure> erasures_;
  std::map<size_t, Rehash> rehashes_;  // by table
  int64_t last_number_ = 0;
  int64_t most_ids_ = 0;
};

}  // namespace dynemb::cuda
