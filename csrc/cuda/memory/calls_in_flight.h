// Insertions and erasures that the device may not have done yet, which the counts of the tables
// lack.
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

  // The device writes the number of the last finished insertion to `finished`.
  explicit CallsInFlight(const volatile int64_t* finished) : finished_(finished) {}

  // Returns the number of the insertion.
  int64_t add(int64_t ids, std::vector<bool> tables, std::vector<bool> slabs);
  void drop_last() {
    insertions_.pop_back();
  }  // for an op that ends before its kernels are
     // launched
  void note_erasure(int64_t ids);
  // Records a rehash of the table into so many buckets; the host does not wait for it. It has been
  // done after `steps` calls of end_step().
  void note_rehash(size_t table, int64_t buckets, int64_t steps);
  void end_step();
  void forget();  // the stream has been waited for

  // Drops what the device has finished.
  void confirm();
  // Waits until the device has done the oldest insertion. false: the stream is idle without it,
  // because the insertion failed before its launch or is on another stream.
  bool wait_for_oldest(const Call& call);

  const std::deque<Insertion>& insertions() const { return insertions_; }
  int64_t ids_of_table(size_t table) const;
  int64_t ids_of_slab(size_t slab) const;
  // Erased ids that may be missing in the tables' counts of tombstones.
  int64_t erased_ids() const;
  // Buckets that a pending rehash gives a table; 0: none is pending.
  int64_t rehashed_buckets(size_t table) const;
  // Largest number of ids of an insertion so far.
  int64_t most_ids() const { return most_ids_; }

 private:
  struct Erasure {
    int64_t before;  // number of the following insertion
    int64_t ids;
  };

  struct Rehash {
    int64_t buckets;
    int64_t steps;  // until it has been done
  };

  const volatile int64_t* finished_;
  std::deque<Insertion> insertions_;
  std::deque<Erasure> erasures_;
  std::map<size_t, Rehash> rehashes_;  // by table
  int64_t last_number_ = 0;
  int64_t most_ids_ = 0;
};

}  // namespace dynemb::cuda
