#include <algorithm>

#include "core/index/bucket.h"
#include "cuda/memory/insertion_bounds.h"

namespace dynemb::cuda {
namespace {

constexpr int64_t kMaxIds = int64_t{1} << 40;  // more than any table has

}  // namespace

int64_t bucket_bound(int64_t ids) { return grown_bucket_count(buckets_for(ids)); }

std::vector<bool> InsertionBounds::touched_tables(
    const std::vector<int64_t>& feature_tables,
    const std::vector<int64_t>& feature_policies) const {
  return policies_.touched(tables_.table_count(), feature_tables, feature_policies);
}

std::vector<bool> InsertionBounds::touched_slabs(const std::vector<bool>& tables) const {
  std::vector<bool> slabs(tables_.slab_count(), false);
  for (size_t t = 0; t < tables.size(); ++t) {
    if (tables[t] && !policies_.counts(t)) slabs[tables_.slab_of_table(t)] = true;
  }
  return slabs;
}

InsertionNeeds InsertionBounds::needs(const std::vector<bool>& touched, int64_t ids) const {
  InsertionNeeds needs{tables_.no_room(), {true, false, false, 0, 0}};
  std::vector<int64_t> incoming(touched.size(), 0);
  for (size_t t = 0; t < touched.size(); ++t) {
    if (!touched[t]) continue;
    incoming[t] = ids;
    const int64_t size = counts(t)[kSharedSize];
    const int64_t in_flight = calls_.ids_of_table(t);
    const int64_t after = policies_.size_bound(t, size, in_flight + ids);
    const int64_t most_now = held_buckets(t);
    needs.memory.buckets[t] = std::max(most_now, bucket_bound(after));
    if (!may_grow(t, in_flight + ids, in_flight > 0)) continue;
    needs.room.growth = true;
    needs.room.old_buckets += most_now;
    // the batch has many tables: this one will hardly get all of it
    needs.room.expected =
        needs.room.expected || may_grow(t, own_ids_in_flight(t) + own_ids(t, ids), in_flight > 0);
  }
  const std::vector<bool> slabs = touched_slabs(touched);
  for (size_t s = 0; s < slabs.size(); ++s) {
    if (slabs[s]) needs.memory.rows[s] = rows_needed(s, incoming, ids);
  }
  return needs;
}

TableRoom InsertionBounds::held() const {
  TableRoom room = tables_.no_room();
  const std::vector<int64_t> no_ids(tables_.table_count(), 0);
  for (size_t t = 0; t < tables_.table_count(); ++t) room.buckets[t] = held_buckets(t);
  for (size_t s = 0; s < tables_.slab_count(); ++s) room.rows[s] = rows_needed(s, no_ids, 0);
  return room;
}

int64_t InsertionBounds::bucket_count(size_t table) const {
  const int64_t counted = counts(table)[kSharedBucketCount];
  return std::max(counted, calls_.rehashed_buckets(table));
}

int64_t InsertionBounds::held_buckets(size_t table) const {
  const int64_t count = bucket_count(table);
  const int64_t in_flight = calls_.ids_of_table(table);
  if (in_flight == 0) return count;
  const int64_t size = policies_.size_bound(table, counts(table)[kSharedSize], in_flight);
  return std::min(std::max(count, bucket_bound(size)), tables_.bucket_capacity(table));
}

TableRoom InsertionBounds::needs_exactly(const NewIdCounts& new_ids) const {
  TableRoom room = tables_.no_room();
  for (size_t s = 0; s < tables_.slab_count(); ++s) room.rows[s] = next_row(s);
  for (size_t t = 0; t < tables_.table_count(); ++t) {
    const int64_t size = counts(t)[kSharedSize];
    const int64_t added = policies_.size_bound(t, size, new_ids.inserted[t]) - size;
    const GrowthDecision decision =
        decide_growth(bucket_count(t), tables_.bucket_capacity(t), size,
                      counts(t)[kSharedTombstones], added + new_ids.counted[t]);
    room.buckets[t] = decision.bucket_count;
    room.rows[tables_.slab_of_table(t)] += added;
  }
  return room;
}

InsertionRoom InsertionBounds::replay_room(const std::vector<bool>& touched) const {
  InsertionRoom room{true, false, true, 0, 0};
  for (size_t t = 0; t < touched.size(); ++t) {
    if (!touched[t] || !policies_.is_bounded(t)) continue;
    const int64_t most = policies_.size_bound(t, counts(t)[kSharedSize], kMaxIds);
    room.growth = true;
    room.old_buckets +=
        std::min(std::max(bucket_count(t), bucket_bound(most)), tables_.bucket_capacity(t));
  }
  return room;
}

// Whether an index may grow, or drop its tombstones, in a call after so many ids.
bool InsertionBounds::may_grow(size_t table, int64_t incoming, bool calls_before) const {
  const int64_t size = counts(table)[kSharedSize];
  const int64_t count = counts(table)[kSharedBucketCount];  // it may be larger by now: the safe
                                                            // side
  // a new id takes a slot, or leaves a tombstone where it replaces another
  const int64_t tombstones = counts(table)[kSharedTombstones] + calls_.erased_ids();
  const bool has_tombstones = tombstones > 0 || (policies_.replaces(table) && calls_before);
  const bool fills = (size + incoming + tombstones) * 100 > count * kBucketWidth * kMaxUsedPercent;
  return policies_.size_bound(table, size, incoming) > max_ids(count) || (has_tombstones && fills);
}

int64_t InsertionBounds::own_ids(size_t table, int64_t ids) const {
  const int64_t most = counts(table)[kSharedMostIds];
  const int64_t most_of_call = calls_.most_ids();
  if (most == 0 || policies_.counts(table) || most_of_call == 0) return ids;
  return std::min(ids, most * ((ids + most_of_call - 1) / most_of_call));
}

int64_t InsertionBounds::own_ids_in_flight(size_t table) const {
  int64_t ids = 0;
  for (const auto& insertion : calls_.insertions()) {
    ids += insertion.tables[table] ? own_ids(table, insertion.ids) : 0;
  }
  return ids;
}

int64_t InsertionBounds::rows_needed(size_t slab, const std::vector<int64_t>& incoming,
                                     int64_t together) const {
  int64_t added = 0;
  for (size_t t = 0; t < incoming.size(); ++t) {
    if (tables_.slab_of_table(t) != slab || policies_.counts(t)) continue;
    const int64_t size = counts(t)[kSharedSize];
    added += policies_.size_bound(t, size, calls_.ids_of_table(t) + incoming[t]) - size;
  }
  return next_row(slab) + std::min(together + calls_.ids_of_slab(slab), added);
}

}  // namespace dynemb::cuda
