// Rows that lose their slots so that others get one; see core/storage/victims.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "arguments/tiers.h"
#include "cpu/storage/row_store.h"

namespace dynemb::cpu {

// A search for victims in one slab.
class VictimSearch {
 public:
  // Allocates all memory, so that take() raises nothing. `wanted`: of take(), at most; may be 0.
  VictimSearch(const CacheSlab& cache, int64_t wanted);
  // Takes up to `wanted` rows of least worth out of their slots. Appends dirty rows, which job
  // `job` saves, to `saves`, in the order of the cursor; `saves` must have room for them.
  void take(uint32_t epoch, int64_t wanted, int64_t job, std::vector<RowMove>* saves);
  // Their slots, in the same order.
  const std::vector<int32_t>& slots() const { return slots_; }

 private:
  void find_worths(uint32_t epoch, int64_t* counts);

  const CacheSlab& cache_;
  std::unique_ptr<uint16_t[]> least_;  // worth in each group of slots
  std::vector<int32_t> slots_;
};

}  // namespace dynemb::cpu
