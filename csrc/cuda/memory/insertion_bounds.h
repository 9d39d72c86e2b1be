// What insertions may need at the most, by what the host knows: the counts of the last insertion
// that has finished, policies, and the ids of those since.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/index/policy_bounds.h"
#include "cuda/memory/calls_in_flight.h"
#include "cuda/memory/mapped_tables.h"

namespace dynemb::cuda {

// The most buckets that a table of `ids` ids can have got by growing (decide_growth).
int64_t bucket_bound(int64_t ids);

struct InsertionNeeds {
  TableRoom memory;
  InsertionRoom room;
};

class InsertionBounds {
 public:
  // Looks at all three whenever it is asked.
  InsertionBounds(SharedWords shared, const MappedTables& tables, const CallsInFlight& calls)
      : shared_(shared), tables_(tables), calls_(calls) {}
  void set_policies(PolicyBounds policies) { policies_ = std::move(policies); }
  const PolicyBounds& policies() const { return policies_; }

  // The tables that a call changes, and the slabs of which tables may take rows.
  std::vector<bool> touched_tables(const std::vector<int64_t>& feature_tables,
                                   const std::vector<int64_t>& feature_policies) const;
  std::vector<bool> touched_slabs(const std::vector<bool>& tables) const;

  // For a call whose ids, and those of the calls before it, are all new.
  InsertionNeeds needs(const std::vector<bool>& touched, int64_t ids) const;
  // What is in use at the most when the calls under way have been done.
  TableRoom held() const;
  // For exactly these new ids, where no call is under way.
  TableRoom needs_exactly(const NewIdCounts& new_ids) const;
  // What a captured call must know: replays rehash only tables whose ids replace each other,
  // because their size is known beforehand.
  InsertionRoom replay_room(const std::vector<bool>& touched) const;

  // Ids of a call that are probably the table's: as many as the most that a call has had of it,
  // where calls are not larger than they were.
  int64_t own_ids(size_t table, int64_t ids) const;
  // Rows of a slab once the calls under way and new ones have been done, if all their ids are new:
  // `incoming` by table, `together` of all tables.
  int64_t rows_needed(size_t slab, const std::vector<int64_t>& incoming, int64_t together) const;

 private:
  bool may_grow(size_t table, int64_t incoming, bool calls_before) const;
  int64_t own_ids_in_flight(size_t table) const;
  int64_t bucket_count(size_t table) const;
  // The most buckets that a table has when the calls under way have been done.
  int64_t held_buckets(size_t table) const;
  const volatile int64_t* counts(size_t table) const {
    return shared_.table(static_cast<int64_t>(table));
  }
  int64_t next_row(size_t slab) const {
    return shared_.slab(static_cast<int64_t>(slab))[kSharedNextRow];
  }

  SharedWords shared_;
  const MappedTables& tables_;
  const CallsInFlight& calls_;
  PolicyBounds policies_;
};

}  // namespace dynemb::cuda
