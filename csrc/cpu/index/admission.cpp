#include "cpu/index/admission.h"

#include <algorithm>

#include "core/policy/counts.h"
#include "core/policy/waiting.h"
#include "cpu/index/probe.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLookahead = 16;

// The count of an id before the call.
int32_t sketch_count(const PolicyArgs& policies, const IndexArgs& index, const int32_t* sketch,
                     const NewId& entry) {
  const int64_t* policy = policies.row(entry.policy);
  const uint64_t salt = bucket_salt(index.meta_row(entry.table)[kMetaSeed]);
  int32_t count = kMaxSketchCount;
  for (int row = 0; row < kSketchRows; ++row) {
    const int64_t cell = sketch_cell(entry.id, salt, row, policy[kPolicySketchWidth]);
    count = std::min(count, sketch[policy[kPolicySketchBegin] + cell]);
  }
  return count;
}

// Number of the slot of an id's exact counter, or -1.
int64_t find_counter(const IndexArgs& index, const int64_t* policy, int64_t id) {
  const TableView counters = index.table(policy[kPolicyCounterTable]);
  const SlotPosition at = probe(counters, id, first_hash(id, counters.salt), 0);
  return at.bucket < 0 ? -1 : at.bucket * kBucketWidth + at.slot;
}

// Starts loading the first bucket of an id's exact counter.
void prefetch_counter(const IndexArgs& index, const PolicyArgs& policies, const NewId& entry) {
  const int64_t* policy = policies.row(entry.policy);
  if (policy[kPolicyAdmission] != kAdmitFrequent) return;
  const TableView counters = index.table(policy[kPolicyCounterTable]);
  prefetch_line(
      counters.line(bucket_of(first_hash(entry.id, counters.salt), counters.bucket_count)));
}

int64_t& stored_count(const IndexArgs& index, const int64_t* policy, const NewId& entry) {
  const TableView counters = index.table(policy[kPolicyCounterTable]);
  return counters.line(entry.counter / kBucketWidth)[kBucketWidth + entry.counter % kBucketWidth];
}

void decide(const IndexArgs& index, const PolicyArgs& policies, const int32_t* sketch,
            NewId* entry) {
  const int64_t* policy = policies.row(entry->policy);
  const int64_t threshold = ranked_threshold(entry->threshold_rank);
  bool admitted = true;
  switch (policy[kPolicyAdmission]) {
    case kAdmitFrequent: {
      entry->counter = find_counter(index, policy, entry->id);
      if (entry->has_counter()) entry->counted = stored_count(index, policy, *entry);
      const WaitingNumbers& waiting = policies.waiting[entry->policy];
      const int64_t count = add_waiting(policy, waiting.time, entry->counted, entry->occurrences);
      admitted = count >= (threshold == policy[kPolicyThreshold]
                               ? waiting.least_admitted
                               : least_admitted(policy, waiting.time, threshold));
      break;
    }
    case kAdmitFrequentSketch: {
      const int32_t count = sketch_count(policies, index, sketch, *entry);
      entry->counted = count;
      admitted = add_sketch_count(count, entry->occurrences) >= threshold;
      break;
    }
    case kAdmitByChance:
      admitted = admitted_by_chance(index.meta_row(entry->table)[kMetaSeed], entry->id,
                                    policies.clock[kClockStep], policy[kPolicyChance]);
      break;
    case kAdmitNone:
      admitted = false;
      break;
    default:
      break;
  }
  entry->verdict = admitted
                       ? kVerdictInsert
                       : verdict_without_room(policy, entry->has_counter(), entry->occurrences);
}

void raise_to(uint64_t* word, uint64_t least) {
  uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (seen < least && !__atomic_compare_exchange_n(word, &seen, least, true, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
  }
}

}  // namespace

void collect_new_ids(const PolicyArgs& policies, const FeatureArgs& features, const bool* admit,
                     Misses* found, std::vector<NewId>* new_ids) {
  const Misses& misses = *found;
  std::vector<int32_t>& number = found->new_id;
  number.resize(static_cast<size_t>(misses.count()));
  const auto tile_count = static_cast<int64_t>(misses.tiles.size());
  // By tile: the number of its first new id; at the end, the number of new ids.
  std::vector<int64_t> begin(tile_count + 1, 0);
  const auto for_each_tile = [&](const auto& visit) {
    parallel_units(tile_count, misses.count(), [&](int64_t first_tile, int64_t last_tile) {
      for (int64_t i = first_tile; i < last_tile; ++i) visit(i, misses.tiles[i]);
    });
  };
  for_each_tile([&](int64_t i, const Tile&) {
    for (int64_t m = misses.tile_begin[i]; m < misses.tile_begin[i + 1]; ++m) {
      begin[i + 1] += misses.first[m] == m;
    }
  });
  for (int64_t i = 0; i < tile_count; ++i) begin[i + 1] += begin[i];
  new_ids->resize(static_cast<size_t>(begin[tile_count]));
  const auto position = [&](int64_t i, const Tile& tile, int64_t m) {
    return tile.begin + misses.in_tile[tile.begin + m - misses.tile_begin[i]];
  };
  for_each_tile([&](int64_t i, const Tile& tile) {
    const int64_t policy = policies.of_feature[tile.feature];
    const int64_t* row = policies.row(policy);
    NewId entry{};
    entry.table = static_cast<int32_t>(tile.table);
    entry.policy = static_cast<int32_t>(policy);
    entry.expiry_rank = expiry_rank(row, policies.clock);
    entry.threshold_rank = threshold_rank(row);
    entry.occurrences = row[kPolicyUpdatesScores] != 0;
    entry.handle = kNoHandle;
    entry.counter = -1;
    int64_t next = begin[i];
    for (int64_t m = misses.tile_begin[i]; m < misses.tile_begin[i + 1]; ++m) {
      if (misses.first[m] != m) continue;
      const int64_t at = position(i, tile, m);
      entry.id = features.ids[at];
      entry.verdict = admit == nullptr || admit[at] ? kVerdictInsert : kVerdictRefuse;
      number[m] = static_cast<int32_t>(next);
      (*new_ids)[next++] = entry;
    }
  });
  if (begin[tile_count] == misses.count()) return;
  // The contributions of further occurrences do not depend on their order.
  for_each_tile([&](int64_t i, const Tile& tile) {
    const int64_t* row = policies.row(policies.of_feature[tile.feature]);
    const bool counts = row[kPolicyUpdatesScores] != 0;
    const uint64_t expiry = expiry_rank(row, policies.clock);
    const uint64_t threshold = threshold_rank(row);
    for (int64_t m = misses.tile_begin[i]; m < misses.tile_begin[i + 1]; ++m) {
      if (misses.first[m] == m) continue;
      NewId& entry = (*new_ids)[number[misses.first[m]]];
      raise_to(&entry.expiry_rank, expiry);
      raise_to(&entry.threshold_rank, threshold);
      if (counts) __atomic_fetch_add(&entry.occurrences, 1, __ATOMIC_RELAXED);
      if (admit == nullptr || admit[position(i, tile, m)]) {
        __atomic_store_n(&entry.verdict, int32_t{kVerdictInsert}, __ATOMIC_RELAXED);
      }
    }
  });
}

bool admits_all(const PolicyArgs& policies, const bool* admit) {
  return admit == nullptr &&
         std::all_of(policies.of_feature.begin(), policies.of_feature.end(), [&](int64_t policy) {
           return policies.row(policy)[kPolicyAdmission] == kAdmitAll;
         });
}

void decide_admission(const IndexArgs& index, const PolicyArgs& policies, const int32_t* sketch,
                      std::vector<NewId>* new_ids) {
  const int64_t count = static_cast<int64_t>(new_ids->size());
  constexpr int64_t kPart = 512;
  parallel_units((count + kPart - 1) / kPart, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kPart; i < std::min(end * kPart, count); ++i) {
      if (i + kLookahead < count) prefetch_counter(index, policies, (*new_ids)[i + kLookahead]);
      NewId& entry = (*new_ids)[i];
      if (entry.verdict == kVerdictInsert) decide(index, policies, sketch, &entry);
    }
  });
}

void refuse_without_room(const PolicyArgs& policies, NewId* entry) {
  entry->handle = kRefusedHandle;
  entry->verdict =
      verdict_without_room(policies.row(entry->policy), entry->has_counter(), entry->occurrences);
}

void find_counter_again(const IndexArgs& index, const PolicyArgs& policies, NewId* entry) {
  entry->counter = find_counter(index, policies.row(entry->policy), entry->id);
}

void note_admission(const IndexArgs& index, const PolicyArgs& policies, int32_t* sketch,
                    const NewId& entry) {
  const int64_t* policy = policies.row(entry.policy);
  if (policy[kPolicyAdmission] == kAdmitFrequentSketch && entry.verdict == kVerdictCounted) {
    const int32_t count = add_sketch_count(static_cast<int32_t>(entry.counted), entry.occurrences);
    const uint64_t salt = bucket_salt(index.meta_row(entry.table)[kMetaSeed]);
    for (int row = 0; row < kSketchRows; ++row) {
      int32_t& cell = sketch[policy[kPolicySketchBegin] +
                             sketch_cell(entry.id, salt, row, policy[kPolicySketchWidth])];
      cell = std::max(cell, count);
    }
  }
  if (!entry.has_counter()) return;
  if (entry.verdict == kVerdictCounted) {
    int64_t& stored = stored_count(index, policy, entry);
    stored = add_waiting(policy, policies.waiting[entry.policy].time, stored, entry.occurrences);
  } else if (entry.verdict == kVerdictInsert) {
    const TableView counters = index.table(policy[kPolicyCounterTable]);
    int64_t* row = index.table_row(policy[kPolicyCounterTable]);
    row[kTableTombstones] +=
        clear_slot(counters, entry.counter / kBucketWidth, entry.counter % kBucketWidth);
    --row[kTableSize];
    row[kTableErased] = next_count(row[kTableErased]);
  }
}

}  // namespace dynemb::cpu
