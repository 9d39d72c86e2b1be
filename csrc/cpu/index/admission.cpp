#include "cpu/index/admission.h"

#include <algorithm>

#include "core/policy/counts.h"
#include "cpu/index/probe.h"

namespace dynemb::cpu {
namespace {

// The count of an id as it was before the call.
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

SlotPosition find_counter(const IndexArgs& index, const int64_t* policy, int64_t id) {
  const TableView counters = index.table(policy[kPolicyCounterTable]);
  return probe(counters, id, first_hash(id, counters.salt), 0);
}

int64_t& stored_count(const IndexArgs& index, const int64_t* policy, const NewId& entry) {
  const TableView counters = index.table(policy[kPolicyCounterTable]);
  return counters.line(entry.counter_bucket)[kBucketWidth + entry.counter_slot];
}

void decide(const IndexArgs& index, const PolicyArgs& policies, const int32_t* sketch,
            NewId* entry) {
  const int64_t* policy = policies.row(entry->policy);
  const int64_t threshold = ranked_threshold(entry->threshold_rank);
  bool admitted = true;
  switch (policy[kPolicyAdmission]) {
    case kAdmitFrequent: {
      const SlotPosition at = find_counter(index, policy, entry->id);
      if (at.bucket >= 0) {
        entry->counter_bucket = at.bucket;
        entry->counter_slot = at.slot;
        entry->counted = stored_count(index, policy, *entry);
      }
      admitted = entry->counted + entry->occurrences >= threshold;
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

}  // namespace

std::vector<NewId> collect_new_ids(const PolicyArgs& policies, const FeatureArgs& features,
                                   const bool* admit, Misses* found) {
  std::vector<NewId> new_ids;
  const Misses& misses = *found;
  std::vector<int32_t>& number = found->new_id;
  number.resize(static_cast<size_t>(misses.count()));
  for (size_t i = 0; i < misses.tiles.size(); ++i) {
    const Tile& tile = misses.tiles[i];
    const int64_t policy = policies.of_feature[tile.feature];
    const int64_t* row = policies.row(policy);
    const bool counts = row[kPolicyUpdatesScores] != 0;
    const uint64_t expiry = expiry_rank(row, policies.clock);
    const uint64_t threshold = threshold_rank(row);
    for (int64_t m = misses.tile_begin[i]; m < misses.tile_begin[i + 1]; ++m) {
      const int64_t position = tile.begin + misses.in_tile[tile.begin + m - misses.tile_begin[i]];
      const int32_t first = misses.first[m];
      if (first == m) {
        number[m] = static_cast<int32_t>(new_ids.size());
        new_ids.push_back({features.ids[position], first, static_cast<int32_t>(tile.table),
                           static_cast<int32_t>(policy), kVerdictRefuse, 0, 0, 0, 0, kNoHandle, -1,
                           0});
      }
      NewId& entry = new_ids[number[first]];
      entry.expiry_rank = std::max(entry.expiry_rank, expiry);
      entry.threshold_rank = std::max(entry.threshold_rank, threshold);
      entry.occurrences += counts;
      if (admit == nullptr || admit[position]) entry.verdict = kVerdictInsert;
    }
  }
  return new_ids;
}

void decide_admission(const IndexArgs& index, const PolicyArgs& policies, const int32_t* sketch,
                      std::vector<NewId>* new_ids) {
  const int64_t count = static_cast<int64_t>(new_ids->size());
  constexpr int64_t kPart = 512;
  parallel_units((count + kPart - 1) / kPart, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kPart; i < std::min(end * kPart, count); ++i) {
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
  const SlotPosition at = find_counter(index, policies.row(entry->policy), entry->id);
  entry->counter_bucket = at.bucket;
  entry->counter_slot = at.slot;
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
    stored = add_frequency(stored, entry.occurrences);
  } else if (entry.verdict == kVerdictInsert) {
    const TableView counters = index.table(policy[kPolicyCounterTable]);
    int64_t* row = index.table_row(policy[kPolicyCounterTable]);
    row[kTableTombstones] += clear_slot(counters, entry.counter_bucket, entry.counter_slot);
    --row[kTableSize];
    row[kTableErased] = next_count(row[kTableErased]);
  }
}

}  // namespace dynemb::cpu
