// Insertions and erasures that the device may not have done yet: what the host cannot see in the
// counts of the tables.
#pragma once

#include <cstdint>
#include <deque>
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
  // The most ids that an insertion has brought so far.
  int64_t most_ids() const { return most_ids_; }

 private:
  struct Erasure {
    int64_t before;  // the insertion that comes next
    int64_t ids;
  };

  const volatile int64_t* finished_;
  std::deque<Insertion> insertions_;
  std::deque<Erasure> erasures_;
  int64_t last_number_ = 0;
  int64_t most_ids_ = 0;
};

}  // namespace dynemb::cuda
