#include "cpu/index_eviction.h"

#include <algorithm>

#include "cpu/index_probe.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLookahead = 4;

struct Evictor {
  int64_t bucket;  // the first of those that it looks into
  int32_t table;
  int32_t new_id;
};

struct Claims {
  std::vector<TableView> tables;
  std::vector<const int64_t*> policies;  // by table
  std::vector<Evictor> evictors;         // by order
  std::vector<char> failed;              // by order; each is set by one thread, once
  int64_t step;

  int64_t bucket(const Evictor& evictor, int k) const {
    const int64_t bucket = evictor.bucket + k;
    const int64_t count = tables[evictor.table].bucket_count;
    return bucket < count ? bucket : bucket - count;
  }
};

// The best victim that no earlier order has claimed: its step word, or nullptr.
int64_t* best_victim(const Claims& claims, int64_t order) {
  const Evictor& evictor = claims.evictors[order];
  const TableView& table = claims.tables[evictor.table];
  const int64_t* policy = claims.policies[evictor.table];
  const int64_t word = policy[kPolicyEvictionWord];
  int64_t* best = nullptr;
  VictimRank best_rank{};
  for (int k = 0; k < kVictimBuckets; ++k) {
    const int64_t bucket = claims.bucket(evictor, k);
    const int64_t* line = table.line(bucket);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      if (line[kBucketWidth + slot] == 0) continue;
      int64_t* score = table.score(bucket, slot);
      const int64_t seen = __atomic_load_n(score, __ATOMIC_RELAXED);
      if (is_eviction_claim(seen) && eviction_claim_order(seen) < order) continue;
      const int64_t step = step_of(seen, claims.step);
      if (claims.step - step < policy[kPolicyProtectedSteps]) continue;
      const VictimRank rank{word == kStepWord ? step : score[word * kBucketWidth], step,
                            line[slot]};
      if (best == nullptr || goes_before(rank, best_rank)) {
        best = score;
        best_rank = rank;
      }
    }
  }
  return best;
}

// Claims a victim for the new id of this order, and others for those that it displaces.
void claim_victim(Claims* claims, int64_t order) {
  for (;;) {
    int64_t* word = best_victim(*claims, order);
    if (word == nullptr) {
      claims->failed[order] = 1;
      return;
    }
    int64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    int64_t claim = make_eviction_claim(order, step_of(seen, claims->step));
    while (seen > claim && !__atomic_compare_exchange_n(word, &seen, claim, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED)) {
      claim = make_eviction_claim(order, step_of(seen, claims->step));
    }
    if (seen <= claim) continue;  // an earlier order came first: look again
    if (!is_eviction_claim(seen)) return;
    order = eviction_claim_order(seen);  // displaced
  }
}

SlotPosition claimed_victim(const Claims& claims, int64_t order) {
  const Evictor& evictor = claims.evictors[order];
  const TableView& table = claims.tables[evictor.table];
  for (int k = 0; k < kVictimBuckets; ++k) {
    const int64_t bucket = claims.bucket(evictor, k);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      const int64_t word = *table.score(bucket, slot);
      if (is_eviction_claim(word) && eviction_claim_order(word) == order) return {bucket, slot};
    }
  }
  return {-1, 0};
}

void note_victim(const EvictionLog& log, int64_t table, int64_t id, int64_t handle, int64_t score) {
  if (log.words[kEvictedRecords] == log.records) {
    ++log.words[kEvictedLost];
    return;
  }
  int64_t* record = log.words + ++log.words[kEvictedRecords] * kEvictedColumns;
  record[kEvictedTable] = table;
  record[kEvictedId] = id;
  record[kEvictedHandle] = handle;
  record[kEvictedScore] = score;
}

}  // namespace

void evict(const IndexView& index, const PolicyView& policies, const EvictionLog& log,
           const std::vector<int32_t>& positions, std::vector<NewId>* new_ids) {
  Claims claims;
  for (int64_t t = 0; t < index.table_count; ++t) {
    claims.tables.push_back(index.table(t));
    claims.policies.push_back(policies.row(t));
  }
  claims.step = policies.clock[kClockStep];
  for (const int32_t position : positions) {
    const NewId& entry = (*new_ids)[position];
    const TableView& table = claims.tables[entry.table];
    const int64_t bucket = bucket_of(first_hash(entry.id, table.salt), table.bucket_count);
    claims.evictors.push_back({bucket, entry.table, position});
  }
  const int64_t count = static_cast<int64_t>(positions.size());
  claims.failed.assign(count, 0);
  constexpr int64_t kPart = 256;
  parallel_units((count + kPart - 1) / kPart, count, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin * kPart; e < std::min(end * kPart, count); ++e) {
      if (e + kLookahead < count) {
        const Evictor& ahead = claims.evictors[e + kLookahead];
        const TableView& table = claims.tables[ahead.table];
        for (int k = 0; k < kVictimBuckets; ++k) {
          const int64_t bucket = claims.bucket(ahead, k);
          prefetch_line(table.line(bucket));
          __builtin_prefetch(table.score(bucket, 0), 1);
        }
      }
      claim_victim(&claims, e);
    }
  });
  for (int64_t e = 0; e < count; ++e) {
    const Evictor& evictor = claims.evictors[e];
    NewId& entry = (*new_ids)[evictor.new_id];
    int64_t* row = index.table_row(entry.table);
    if (claims.failed[e] != 0) {
      entry.verdict = kVerdictRefuse;
      ++row[kTableRejected];
      continue;
    }
    const TableView& table = claims.tables[entry.table];
    const SlotPosition at = claimed_victim(claims, e);
    const int64_t* line = table.line(at.bucket);
    const int64_t handle = decode_handle(line[kBucketWidth + at.slot]);
    const int64_t word = claims.policies[entry.table][kPolicyEvictionWord];
    const int64_t* score = table.score(at.bucket, at.slot);
    note_victim(log, entry.table, line[at.slot], handle,
                word == kStepWord ? step_of(*score, claims.step) : score[word * kBucketWidth]);
    entry.handle = next_owner(handle);
    row[kTableTombstones] += clear_slot(table, at.bucket, at.slot);
    --row[kTableSize];
    ++row[kTableEvicted];
  }
}

}  // namespace dynemb::cpu
