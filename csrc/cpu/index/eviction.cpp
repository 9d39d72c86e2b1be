#include "cpu/index/eviction.h"

#include <algorithm>

#include "core/policy/counts.h"
#include "cpu/index/probe.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLookahead = 8;
constexpr int kWalkBits = 12;
constexpr int64_t kPart = 256;  // new ids that one thread deals with at a time

struct Evictor {
  int64_t bucket;  // the first of those that it looks into
  int32_t table;
  int32_t new_id;
};

struct Claims {
  std::vector<TableView> tables;
  std::vector<const int64_t*> policies;  // by table
  std::vector<Evictor> evictors;         // by order
  std::vector<int32_t> walk;             // orders as their buckets lie in the index, roughly
  std::vector<char> failed;              // by order; each is set by one thread, once
  std::vector<int64_t*> victims;         // by order: the step word that it claimed last, or nearly
  // By table whose whole index is looked at: an order that found nothing; nor does any later one.
  std::vector<int64_t> exhausted;
  int64_t step;

  int64_t bucket(const Evictor& evictor, int64_t k) const {
    const int64_t bucket = evictor.bucket + k;
    const int64_t count = tables[evictor.table].bucket_count;
    return bucket < count ? bucket : bucket - count;
  }
  void prefetch(const Evictor& evictor) const {
    const TableView& table = tables[evictor.table];
    if (table.bucket_count <= kWholeIndexBuckets) return;  // it is in the cache
    for (int k = 0; k < kVictimBuckets; ++k) {
      const int64_t at = bucket(evictor, k);
      prefetch_line(table.line(at));
      __builtin_prefetch(table.score(at, 0), 1);
    }
  }
};

// Orders of new ids by the place of their first bucket: neighbours share lines and pages.
std::vector<int32_t> by_place(const std::vector<uint64_t>& hashes) {
  const size_t count = hashes.size();
  int bits = 0;
  while (bits < kWalkBits && (size_t{1} << bits) < count) ++bits;
  std::vector<int32_t> walk(count);
  std::vector<int32_t> next((size_t{1} << bits) + 1, 0);
  const auto part = [&](uint64_t hash) { return (hash >> 1) >> (63 - bits); };
  for (const uint64_t hash : hashes) ++next[part(hash) + 1];
  for (size_t p = 1; p < next.size(); ++p) next[p] += next[p - 1];
  for (size_t i = 0; i < count; ++i) walk[next[part(hashes[i])]++] = static_cast<int32_t>(i);
  return walk;
}

DYNEMB_INLINE Words4 four(int64_t word) { return Words4{word, word, word, word}; }
DYNEMB_INLINE Words4 pick(Words4 mask, Words4 a, Words4 b) { return (mask & a) | (~mask & b); }

struct SearchJob {
  const Claims* claims;
  int64_t order;
  int64_t** best;  // out
};

// The best victim that no earlier order has claimed: its step word, or nullptr. Four slots at a
// time; other threads may claim meanwhile, which whoever claims finds out.
DYNEMB_INLINE void search_victim_body(const SearchJob& job) {
  const Claims& claims = *job.claims;
  const Evictor& evictor = claims.evictors[job.order];
  const TableView& table = claims.tables[evictor.table];
  const int64_t* policy = claims.policies[evictor.table];
  const int64_t word = policy[kPolicyEvictionWord];
  const Words4 now = four(claims.step);
  const Words4 newest = four(claims.step - policy[kPolicyProtectedSteps]);
  const int buckets = victim_buckets(table.bucket_count);
  Words4 best_score = four(0), best_step = four(0), best_id = four(0), best_at = four(-1);
  for (int k = 0; k < buckets; ++k) {
    const int64_t bucket = claims.bucket(evictor, k);
    const int64_t* line = table.line(bucket);
    const int64_t* scores = table.score(bucket, 0);
    for (int j = 0; j < kBucketWidth; j += 4) {
      const Words4 id = load_words(line + j);
      const Words4 seen = load_words(scores + j);
      const Words4 claimed = seen < 0;
      const Words4 order = (seen ^ four(INT64_MIN)) >> 32;  // eviction_claim_order
      // step_of, of a claim only; unsigned, because claims are close to the least number
      const auto ages =
          reinterpret_cast<UnsignedWords4>(now) - reinterpret_cast<UnsignedWords4>(seen);
      const Words4 age = reinterpret_cast<Words4>(ages) & four(0xffffffff);
      const Words4 step = pick(claimed, now - age, seen);
      const Words4 score = word == kStepWord ? step : load_words(scores + word * kBucketWidth + j);
      const Words4 free = (load_words(line + kBucketWidth + j) != 0) & (step <= newest) &
                          ~(claimed & (order < four(job.order)));
      // goes_before
      const Words4 before =
          (best_at < 0) | (score < best_score) |
          ((score == best_score) & ((step < best_step) | ((step == best_step) & (id < best_id))));
      const Words4 take = free & before;
      const int64_t at = k * kBucketWidth + j;
      best_score = pick(take, score, best_score);
      best_step = pick(take, step, best_step);
      best_id = pick(take, id, best_id);
      best_at = pick(take, Words4{at, at + 1, at + 2, at + 3}, best_at);
    }
  }
  int64_t best = -1;
  VictimRank best_rank{};
  for (int j = 0; j < 4; ++j) {
    if (best_at[j] < 0) continue;
    const VictimRank rank{best_score[j], best_step[j], best_id[j]};
    if (best < 0 || goes_before(rank, best_rank)) {
      best = best_at[j];
      best_rank = rank;
    }
  }
  *job.best = nullptr;
  if (best >= 0) {
    const int64_t bucket = claims.bucket(evictor, best / kBucketWidth);
    *job.best = table.score(bucket, best % kBucketWidth);
  }
}
DYNEMB_SIMD_VARIANTS(search_victim, (const SearchJob& job), (job))

// Claims a victim for the new id of this order, and others for those that it displaces.
void claim_victim(Claims* claims, int64_t order) {
  for (;;) {
    const int32_t t = claims->evictors[order].table;
    int64_t* word = nullptr;
    if (order <= __atomic_load_n(&claims->exhausted[t], __ATOMIC_RELAXED)) {
      search_victim({claims, order, &word});
    }
    if (word == nullptr) {
      claims->failed[order] = 1;
      if (claims->tables[t].bucket_count <= kWholeIndexBuckets) {
        __atomic_store_n(&claims->exhausted[t], order, __ATOMIC_RELAXED);
      }
      return;
    }
    int64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    int64_t claim = make_eviction_claim(order, step_of(seen, claims->step));
    while (seen > claim && !__atomic_compare_exchange_n(word, &seen, claim, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED)) {
      claim = make_eviction_claim(order, step_of(seen, claims->step));
    }
    if (seen <= claim) continue;  // an earlier order came first: look again
    __atomic_store_n(&claims->victims[order], word, __ATOMIC_RELAXED);
    if (!is_eviction_claim(seen)) return;
    order = eviction_claim_order(seen);  // displaced
    // no claim of this call, but a step word that was negative before it
    if (order >= static_cast<int64_t>(claims->evictors.size())) return;
  }
}

bool holds(const int64_t* word, int64_t order) {
  return is_eviction_claim(*word) && eviction_claim_order(*word) == order;
}

// Where the claim of an order was kept. Two threads may have claimed for it one after another and
// noted it the other way round; then it is searched for.
SlotPosition claimed_victim(const Claims& claims, int64_t order) {
  const Evictor& evictor = claims.evictors[order];
  const TableView& table = claims.tables[evictor.table];
  const int64_t* word = claims.victims[order];
  for (int i = 0; word == nullptr || !holds(word, order); ++i) {
    if (i == kVictimBuckets * kBucketWidth) return {-1, -1};  // step words were negative before
    word = table.score(claims.bucket(evictor, i / kBucketWidth), i % kBucketWidth);
  }
  const int64_t stride = kBucketWidth * table.score_words;
  const int64_t place = word - table.scores;
  return {place / stride, place % stride};
}

// Takes the rows of victims for new ids of some orders; returns tombstones by table.
void take_victims(const Claims& claims, const EvictionLog& log, const int64_t* records,
                  int64_t begin, int64_t end, std::vector<NewId>* new_ids, int64_t* tombstones) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t e = claims.walk[i];
    const int64_t ahead = i + kLookahead < end ? claims.walk[i + kLookahead] : -1;
    if (ahead >= 0 && claims.failed[ahead] == 0) {
      const TableView& table = claims.tables[claims.evictors[ahead].table];
      const int64_t* word = claims.victims[ahead];
      __builtin_prefetch(word, 1);
      __builtin_prefetch(&(*new_ids)[claims.evictors[ahead].new_id].handle, 1);
      prefetch_line(table.line((word - table.scores) / (kBucketWidth * table.score_words)));
    }
    if (claims.failed[e] != 0) continue;
    const Evictor& evictor = claims.evictors[e];
    const TableView& table = claims.tables[evictor.table];
    const SlotPosition at = claimed_victim(claims, e);
    if (at.bucket < 0) {
      (*new_ids)[evictor.new_id].verdict = kVerdictRefuse;
      continue;
    }
    const int64_t* line = table.line(at.bucket);
    const int64_t handle = decode_handle(line[kBucketWidth + at.slot]);
    if (records[e] < log.records) {
      const int64_t word = claims.policies[evictor.table][kPolicyEvictionWord];
      const int64_t* score = table.score(at.bucket, at.slot);
      int64_t* record = log.words + (1 + records[e]) * kEvictedColumns;
      record[kEvictedTable] = evictor.table;
      record[kEvictedId] = line[at.slot];
      record[kEvictedHandle] = handle;
      record[kEvictedScore] =
          word == kStepWord ? step_of(*score, claims.step) : score[word * kBucketWidth];
    }
    (*new_ids)[evictor.new_id].handle = next_owner(handle);
    tombstones[evictor.table] += clear_slot(table, at.bucket, at.slot);
  }
}

}  // namespace

void evict(const IndexArgs& index, const PolicyArgs& policies, const EvictionLog& log,
           const std::vector<int32_t>& positions, std::vector<NewId>* new_ids) {
  Claims claims;
  for (int64_t t = 0; t < index.table_count; ++t) {
    claims.tables.push_back(index.table(t));
    claims.policies.push_back(policies.row(t));
  }
  claims.exhausted.assign(index.table_count, INT64_MAX);
  claims.step = policies.clock[kClockStep];
  std::vector<uint64_t> hashes;
  hashes.reserve(positions.size());
  for (const int32_t position : positions) {
    const NewId& entry = (*new_ids)[position];
    const TableView& table = claims.tables[entry.table];
    const uint64_t hash = first_hash(entry.id, table.salt);
    // who may take any victim goes in order: the other way round each would displace many
    hashes.push_back(table.bucket_count <= kWholeIndexBuckets ? 0 : hash);
    const int64_t bucket = bucket_of(hash, table.bucket_count);
    claims.evictors.push_back({bucket, entry.table, position});
  }
  const int64_t count = static_cast<int64_t>(positions.size());
  claims.walk = by_place(hashes);
  const int64_t parts = (count + kPart - 1) / kPart;
  claims.failed.assign(count, 0);
  claims.victims.assign(count, nullptr);
  parallel_units(parts, count, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin * kPart; e < std::min(end * kPart, count); ++e) {
      if (e + kLookahead < count) {
        claims.prefetch(claims.evictors[claims.walk[e + kLookahead]]);
      }
      claim_victim(&claims, claims.walk[e]);
    }
  });
  std::vector<int64_t> records(count);
  int64_t next = log.words[kEvictedRecords];
  for (int64_t e = 0; e < count; ++e) {
    NewId& entry = (*new_ids)[positions[e]];
    int64_t* row = index.table_row(entry.table);
    records[e] = next;
    if (claims.failed[e] != 0) {
      refuse_without_room(policies, &entry);
      ++row[kTableRejected];
    } else {
      ++next;
      --row[kTableSize];
      row[kTableEvicted] = next_count(row[kTableEvicted]);
    }
  }
  // Slots are cleared side by side: what clear_slot asks of a bucket does not change meanwhile.
  std::vector<int64_t> tombstones(parts * index.table_count, 0);
  parallel_units(parts, count, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      take_victims(claims, log, records.data(), p * kPart, std::min((p + 1) * kPart, count),
                   new_ids, tombstones.data() + p * index.table_count);
    }
  });
  for (int64_t p = 0; p < parts; ++p) {
    for (int64_t t = 0; t < index.table_count; ++t) {
      index.table_row(t)[kTableTombstones] += tombstones[p * index.table_count + t];
    }
  }
  const int64_t kept = std::min(next, log.records);
  log.words[kEvictedLost] += next - kept;
  log.words[kEvictedRecords] = kept;
}

}  // namespace dynemb::cpu
