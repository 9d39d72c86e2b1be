// Caches of rows in HBM: above homes of all rows in host memory (core/storage/homes.h), or above a
// store, from which the caller of take_slots_ loads rows.
//
// Programs pass tensors around but not caches, so the caches of a group are found by the address of
// its `tier_clock`. Copies of a group's tensors have none.
#pragma once

#include <memory>
#include <vector>

#include "core/columns.h"
#include "core/rows/slab_state.h"
#include "cuda/memory/group_memory.h"
#include "cuda/memory/reservation.h"

namespace dynemb::cuda {

// A tensor of rows: slots, then homes, if rows have some.
struct MovedTensor {
  char* data;
  int64_t row_bytes;
  int64_t unit;  // bytes that are copied at a time
};

constexpr int kMostMoved = 2 * kMaxStates + 2;  // weights, and state of elements, rows and steps

// A slab's cache for kernels.
struct CacheView {
  int32_t* places;  // [max_rows]
  int64_t max_rows;
  int64_t* slots;  // [most_slots, kSlotColumns]
  int32_t* free_slots;
  int64_t most_slots;
  int64_t* head;         // the first row of tier_clock
  int64_t* clock;        // the slab's row
  int32_t* generations;  // [most_slots + max_rows], or [most_slots] without homes
  uint8_t* dirty_bits;   // the same, for readers of changes; nullptr: there are none
  bool has_homes;
  MovedTensor moved[kMostMoved];
  int moved_count;

  __host__ __device__ int64_t* slot(int64_t number) const { return slots + number * kSlotColumns; }
};

// Words of host memory in which kernels of take_slots_ report moves. Used by one call at a time.
struct MoveReports {
  std::unique_ptr<PinnedWords> words;
  int64_t count = 0;
};

struct CachedGroup {
  std::weak_ptr<GroupMemory> memory;
  std::vector<CacheView> slabs;  // most_slots 0: the slab has no cache
  double fraction;               // of the rows that get a slot; 0: there are limits
  std::vector<int64_t> limits;   // by slab: slots that the cache should have
  int64_t* head;                 // the first row of tier_clock
  bool has_homes;                // of all slabs with a cache
  std::shared_ptr<MoveReports> reports = std::make_shared<MoveReports>();
};

struct CacheTensors {
  const std::vector<Tensor>& places;
  const std::vector<Tensor>& slots;
  const std::vector<Tensor>& free_slots;
  const Tensor& tier_clock;
};

// Raises unless bind_tiers was called with these tensors.
std::shared_ptr<const CachedGroup> cached_group(const Call& call, const CacheTensors& tiers);

}  // namespace dynemb::cuda
