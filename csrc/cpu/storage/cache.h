// The rows in the slots of a cache, and the moves that a call needs.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "arguments/tiers.h"
#include "cpu/index/args.h"
#include "cpu/storage/row_store.h"

namespace dynemb::cpu {

// Jobs of a store that matter to the cache. Jobs are numbered from 1.
struct Jobs {
  int64_t done;  // jobs up to this one are done
  int64_t next;  // number of the job that will do the call's moves
  // Whether the store has a record of the row, as written by finished jobs.
  std::function<bool(size_t slab, int64_t handle)> has_record;
  // Prefetches what has_record() reads.
  std::function<void(size_t slab, int64_t handle)> prefetch_record;
};

// Requirements of the ids of a call on the cache.
struct StageCall {
  const char* op;
  const TierTensors* tiers;
  const FeatureArgs* features;
  std::vector<int64_t> slab_of;       // by table
  const int64_t* handles;             // of rows; negative: the id has none
  bool changes;                       // whether the rows will be changed
  bool counts;                        // whether this use predicts later ones
  uint32_t epoch;                     // the rows keep their slots up to this epoch
  TierColumn counted_as;              // kTierMisses or kTierPrefetched
  const Jobs* jobs;                   // nullptr: all moves are done before the next call
  const bool* overwritten = nullptr;  // [ids], rows that are not loaded; nullptr: none
};

struct Plan {
  std::vector<SlabMoves> moves;  // of slab s at s
  int64_t wait_for;              // the job after which the rows may be read and changed
};

// Upper bound of rows to be saved so that `wanted` others get slots.
int64_t most_saves(const CacheSlab& cache, int64_t wanted);

// Called with the number of rows of slab s that may have to be saved, at s, before anything has
// changed; raises if the store lacks space for them.
using RoomCheck = std::function<void(const std::vector<int64_t>& rows)>;

// Gives slots to the rows of a call: their handles to `slot_handles` [ids], the moves to the
// result. Places and slots change as if everything had moved. Raises before that; only the last use
// of rows changes then, if `check_room` raises or memory is short.
Plan plan_moves(const StageCall& call, const RoomCheck& check_room, int64_t* slot_handles);

// Up to `most` dirty rows of slots from `begin` on. They count as saved from now on, except those
// that a backward of this step may change.
std::vector<RowMove> take_dirty(const TierTensors& tiers, const CacheSlab& cache, int64_t begin,
                                int64_t most);

// Takes the rows out of all slots from `limit` on; returns those to be saved.
std::vector<RowMove> shrink(const CacheSlab& cache, int64_t limit);

// Removes rows from the cache without saving them.
void forget(const char* op, const CacheSlab& cache, const int64_t* handles, int64_t count);

}  // namespace dynemb::cpu
