// Upper bounds of the memory for insertions, from the host's knowledge: the counts of the last
// finished insertion, policies, and the ids since then.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/index/policy_bounds.h"
#include "cuda/memory/calls_in_flight.h"
#include "cuda/memory/mapped_tables.h"

namespace dynemb::cuda {

// Upper bound of the buckets of a table that grew to `ids` ids (decide_growth).
int64_t bucket_bound(int64_t ids);

struct InsertionNeeds {
  TableRoom memory;
  InsertionRoom room;
};

class InsertionBounds {
 public:
  // Reads all three on every call.
  InsertionBounds(SharedWords shared, const MappedTables& tables, const CallsInFlight& calls)
      : shared_(shared), tables_(tables), calls_(calls) {}
  void set_policies(PolicyBounds policies) { policies_ = std::move(policies); }
  const PolicyBounds& policies() const { return policies_; }

  // The tables that a call changes, and the slabs with tables that may take rows.
  std::vector<bool> touched_tables(const std::vector<int64_t>& feature_tables,
                                   const std::vector<int64_t>& feature_policies) const;
  std::vector<bool> touched_slabs(const std::vector<bool>& tables) const;

  // For a call, if its ids and those of unfinished calls are all new.
  InsertionNeeds needs(const std::vector<bool>& touched, int64_t ids) const;
  // Upper bound of use after the unfinished calls.
  TableRoom held() const;
  // For exactly these new ids, without unfinished calls.
  TableRoom needs_exactly(const NewIdCounts& new_ids) const;
  // Limits for a captured call: replays rehash only tables with ids that replace each other,
  // because their size is known beforehand.
  InsertionRoom replay_room(const std::vector<bool>& touched) const;

  // Probable number of the table's ids in a call: as many as any call has had, if calls do not get
  // larger.
  int64_t own_ids(size_t table, int64_t ids) const;
  // Rows of a slab after the unfinished calls and new ones, if all their ids are new: `incoming` by
  // table, `together` of all tables.
  int64_t rows_needed(size_t slab, const std::vector<int64_t>& incoming, int64_t together) const;

 private:
  bool may_grow(size_t table, int64_t incoming, bool calls_before) const;
  int64_t own_ids_in_flight(size_t table) const;
  int64_t bucket_count(size_t table) const;
  // Upper bound of a table's buckets after the unfinished calls.
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
