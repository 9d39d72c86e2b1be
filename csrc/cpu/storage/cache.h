// Which rows are in the slots of a cache, and which have to move for a call.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "arguments/tiers.h"
#include "cpu/index/args.h"
#include "cpu/storage/row_store.h"

namespace dynemb::cpu {

// Which jobs of a store the cache has to mind. Jobs are numbered from 1.
struct Jobs {
  int64_t done;  // all up to this one are
  int64_t next;  // the number of the one that moves what the call wants moved
  // Whether the store has a record of the row, as far as finished jobs have written it.
  std::function<bool(size_t slab, int64_t handle)> has_record;
};

// What ids of a call want of the cache.
struct StageCall {
  const char* op;
  const TierTensors* tiers;
  const FeatureArgs* features;
  std::vector<int64_t> slab_of;  // by table
  const int64_t* handles;        // of rows; negative: the id has none
  bool changes;                  // the rows will be changed
  bool counts;                   // this is a use that says something about later ones
  uint32_t epoch;                // until which the rows keep their slots
  TierColumn counted_as;         // kTierMisses or kTierPrefetched
  const Jobs* jobs;              // nullptr: everything has moved before the next call
};

struct Plan {
  std::vector<SlabMoves> moves;  // of slab s at s
  int64_t wait_for;              // the job after which the rows may be read and changed
};

// How many rows may have to be saved so that `wanted` others get slots.
int64_t most_saves(const CacheSlab& cache, int64_t wanted);

// Is told how many rows of slab s may have to be saved, at s, before anything has changed; raises
// where there is no room for them.
using RoomCheck = std::function<void(const std::vector<int64_t>& rows)>;

// Gives slots to the rows of a call: their handles to `slot_handles` [ids], what has to move to the
// result. Places and slots are changed as if everything had moved. Raises before
// they are, but for when rows were used last where `check_room` raises, or memory is short.
Plan plan_moves(const StageCall& call, const RoomCheck& check_room, int64_t* slot_handles);

// The rows of slots from `begin` on that have been changed since they were saved, up to `most` of
// them; they count as saved from now on, but for those that a backward of this step may change.
std::vector<RowMove> take_dirty(const TierTensors& tiers, const CacheSlab& cache, int64_t begin,
                                int64_t most);

// Takes the rows out of all slots from `limit` on; returns what has to be saved.
std::vector<RowMove> shrink(const CacheSlab& cache, int64_t limit);

// Takes rows out of the cache, with what was changed there.
void forget(const char* op, const CacheSlab& cache, const int64_t* handles, int64_t count);

}  // namespace dynemb::cpu
