#include "cpu/index_admission.h"

#include <algorithm>

#include "cpu/index_probe.h"

namespace dynemb::cpu {
namespace {

// The count of an id as it was before the call.
int32_t sketch_count(const PolicyView& policies, const IndexView& index, const int32_t* sketch,
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

void decide(const IndexView& index, const PolicyView& policies, const int32_t* sketch,
            NewId* entry) {
  const int64_t* policy = policies.row(entry->policy);
  bool admitted = true;
  switch (policy[kPolicyAdmission]) {
    case kAdmitFrequent: {
      const TableView counters = index.table(policy[kPolicyCounterTable]);
      const SlotPosition at = probe(counters, entry->id, first_hash(entry->id, counters.salt), 0);
      int64_t count = entry->occurrences;
      if (at.bucket >= 0) {
        entry->counter_bucket = at.bucket;
        entry->counter_slot = at.slot;
        count += counters.line(at.bucket)[kBucketWidth + at.slot];
      }
      admitted = count >= policy[kPolicyThreshold];
      if (admitted) entry->occurrences = counted_frequency(count);
      if (!admitted && entry->occurrences > 0) {
        entry->verdict = at.bucket >= 0 ? kVerdictCounted : kVerdictCount;
        return;
      }
      break;
    }
    case kAdmitFrequentSketch: {
      const int32_t count = sketch_count(policies, index, sketch, *entry);
      const int32_t sum = add_sketch_count(count, entry->occurrences);
      admitted = sum >= policy[kPolicyThreshold];
      if (admitted) entry->occurrences = counted_frequency(sum);
      if (!admitted && entry->occurrences > 0) {
        entry->verdict = kVerdictCounted;
        entry->handle = count;  // until rows are given out
        return;
      }
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
  entry->verdict = admitted ? kVerdictInsert : kVerdictRefuse;
}

}  // namespace

std::vector<NewId> collect_new_ids(const PolicyView& policies, const FeatureIds& features,
                                   const Misses& misses, const bool* admit) {
  std::vector<NewId> new_ids;
  std::vector<int32_t> number(static_cast<size_t>(misses.count()));  // of an id, by first order
  for (size_t i = 0; i < misses.tiles.size(); ++i) {
    const Tile& tile = misses.tiles[i];
    const int64_t policy = policies.of_feature[tile.feature];
    const bool counts = policies.row(policy)[kPolicyUpdatesScores] != 0;
    for (int64_t m = misses.tile_begin[i]; m < misses.tile_begin[i + 1]; ++m) {
      const int64_t position = tile.begin + misses.in_tile[tile.begin + m - misses.tile_begin[i]];
      const int32_t first = misses.first[m];
      if (first == m) {
        number[m] = static_cast<int32_t>(new_ids.size());
        new_ids.push_back({features.ids[position], first, static_cast<int32_t>(tile.table),
                           static_cast<int32_t>(policy), kVerdictRefuse, 0, kNoHandle, -1, 0});
      }
      NewId& entry = new_ids[number[first]];
      entry.occurrences += counts;
      if (admit == nullptr || admit[position]) entry.verdict = kVerdictInsert;
    }
  }
  return new_ids;
}

void decide_admission(const IndexView& index, const PolicyView& policies, const int32_t* sketch,
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

void note_admission(const IndexView& index, const PolicyView& policies, int32_t* sketch,
                    const std::vector<NewId>& new_ids) {
  for (const NewId& entry : new_ids) {
    const int64_t* policy = policies.row(entry.policy);
    if (policy[kPolicyAdmission] == kAdmitFrequentSketch && entry.verdict == kVerdictCounted) {
      const int32_t count = add_sketch_count(static_cast<int32_t>(entry.handle), entry.occurrences);
      const uint64_t salt = bucket_salt(index.meta_row(entry.table)[kMetaSeed]);
      for (int row = 0; row < kSketchRows; ++row) {
        int32_t& cell = sketch[policy[kPolicySketchBegin] +
                               sketch_cell(entry.id, salt, row, policy[kPolicySketchWidth])];
        cell = std::max(cell, count);
      }
    }
    if (entry.counter_bucket < 0) continue;
    const TableView counters = index.table(policy[kPolicyCounterTable]);
    if (entry.verdict == kVerdictCounted) {
      int64_t& stored = counters.line(entry.counter_bucket)[kBucketWidth + entry.counter_slot];
      stored = add_frequency(stored, entry.occurrences);
    } else if (entry.verdict == kVerdictInsert) {
      int64_t* row = index.table_row(policy[kPolicyCounterTable]);
      row[kTableTombstones] += clear_slot(counters, entry.counter_bucket, entry.counter_slot);
      --row[kTableSize];
      ++row[kTableErased];
    }
  }
}

}  // namespace dynemb::cpu
