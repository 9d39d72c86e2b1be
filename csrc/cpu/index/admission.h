// Admission of the new ids of a call, and counts of the others.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/index/misses.h"
#include "cpu/index/policy_args.h"

namespace dynemb::cpu {

// An id that its table does not have, with the policy of the first feature that brings it. In one
// line of the cache, because new ids are visited in the order of their buckets.
struct alignas(64) NewId {
  int64_t id;
  int32_t table;
  int32_t policy;
  int32_t verdict;          // Verdict
  int32_t occurrences;      // in lookups that update scores
  uint64_t expiry_rank;     // over all features that bring it
  uint64_t threshold_rank;  // likewise
  int64_t counted;          // what its counter or sketch has before the call
  int64_t handle;
  int64_t counter;  // number of the slot of its exact counter; -1: none

  bool has_counter() const { return counter >= 0; }
};
static_assert(sizeof(NewId) == 64, "a line");

// Collects new ids in order of first occurrence; sets misses->new_id. `admit`: bool per id of the
// call, or nullptr; an id is refused if it is false at all its occurrences.
void collect_new_ids(const PolicyArgs& policies, const FeatureArgs& features, const bool* admit,
                     Misses* misses, std::vector<NewId>* new_ids);

// Whether the call can neither refuse nor count a new id.
bool admits_all(const PolicyArgs& policies, const bool* admit);

// Sets the verdicts; nothing else changes.
void decide_admission(const IndexArgs& index, const PolicyArgs& policies, const int32_t* sketch,
                      std::vector<NewId>* new_ids);

// Changes the verdict of an admitted id without room: it is counted instead, if ids are counted.
void refuse_without_room(const PolicyArgs& policies, NewId* entry);

// Finds the exact counter of an id again after its counter table was rehashed.
void find_counter_again(const IndexArgs& index, const PolicyArgs& policies, NewId* entry);

// Adds to the count of a counted id, and removes the exact count of an id that gets a row.
void note_admission(const IndexArgs& index, const PolicyArgs& policies, int32_t* sketch,
                    const NewId& entry);

}  // namespace dynemb::cpu
