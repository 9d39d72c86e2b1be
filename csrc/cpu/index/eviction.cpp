#include "cpu/index/eviction.h"

#include <algorithm>

#include "core/policy/counts.h"
#include "cpu/index/moving_entries.h"
#include "cpu/index/probe.h"
#include "cpu/index/victim_search.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLookahead = 16;
constexpr int64_t kSearched = 16;  // new ids searched for ahead of their claims
constexpr int kPlaceBits = 7;

// New ids of small indexes, which may take any victim, go first, in order of occurrence: in another
// order each would displace many. Then come the partitions of the misses.
constexpr int64_t kWalks = 1 + kPartitions;

// A new id that needs a victim.
struct Evictor {
  int64_t bucket;  // first of the buckets that it searches
  int64_t victim;  // number of the slot that it claimed last; two threads may swap this; -1: none
  int32_t table;
  int32_t order;  // of its claim: its number among the new ids
  bool failed;    // all victims are taken by others
};

struct Claims {
  std::vector<TableView> tables;
  std::vector<const int64_t*> policies;  // by table
  // Roughly in the order of their buckets: neighbours share lines and pages.
  std::vector<Evictor> evictors;
  std::vector<int64_t> begin;  // of each walk in `evictors`
  std::vector<int64_t> end;
  std::vector<int32_t> place;  // by order: position in `evictors`; -1: needs no victim
  // By table with a small index: an order that found no victim. Later ones find none either.
  std::vector<int64_t> exhausted;
  int64_t step;

  int64_t bucket(const Evictor& evictor, int64_t k) const {
    const int64_t bucket = evictor.bucket + k;
    const int64_t count = tables[evictor.table].bucket_count;
    return bucket < count ? bucket : bucket - count;
  }
  // `lines`: also those of keys and handles.
  void prefetch(const Evictor& evictor, bool lines) const {
    const TableView& table = tables[evictor.table];
    if (table.bucket_count <= kWholeIndexBuckets) return;  // it is in the cache
    constexpr int64_t kLine = 8;                           // words of a line of the cache
    // past the end of an index the address may be invalid: prefetching is harmless
    const int64_t* line = table.line(evictor.bucket);
    const int64_t line_words = lines ? kVictimBuckets * kBucketWords : 0;
    for (int64_t word = 0; word < line_words; word += kLine) prefetch_line_of(line + word);
    const int64_t* score = table.score(evictor.bucket, 0);
    const int64_t words = kVictimBuckets * kBucketWidth * table.score_words;
    for (int64_t word = 0; word < words; word += kLine) prefetch_line_of(score + word);
    prefetch_line_of(score + words - 1);
  }
};

// Lists the evictors of one partition by their first buckets.
void walk_partition(const Misses& misses, const std::vector<char>& needs_victim, int64_t partition,
                    Claims* claims) {
  const bool all = misses.begin[1] == misses.count();  // then the first partition has all hashes
  const int hash_bits = all ? 0 : 6;
  const int64_t first = misses.begin[partition];
  const int64_t last = misses.begin[partition + 1];
  std::vector<uint64_t> hashes(static_cast<size_t>(last - first));
  const auto place_of = [&](uint64_t hash) { return hash << hash_bits >> (64 - kPlaceBits); };
  int32_t next[(1 << kPlaceBits) + 1] = {};
  const auto for_each_evictor = [&](const auto& visit) {
    for (int64_t i = first; i < last; ++i) {
      const Miss& miss = misses.items[i];
      if (miss.table < 0) continue;
      const int32_t order = misses.new_id[miss.order];
      const TableView& table = claims->tables[miss.table];
      if (needs_victim[order] != 0 && table.bucket_count > kWholeIndexBuckets) {
        visit(i - first, order, miss, table);
      }
    }
  };
  for_each_evictor([&](int64_t i, int32_t, const Miss& miss, const TableView& table) {
    hashes[i] = first_hash(miss.id, table.salt);
    ++next[place_of(hashes[i]) + 1];
  });
  next[0] = static_cast<int32_t>(first + claims->end[0]);
  claims->begin[1 + partition] = next[0];
  for (int p = 0; p < 1 << kPlaceBits; ++p) next[p + 1] += next[p];
  claims->end[1 + partition] = next[1 << kPlaceBits];
  for_each_evictor([&](int64_t i, int32_t order, const Miss& miss, const TableView& table) {
    const int32_t at = next[place_of(hashes[i])]++;
    const int64_t bucket = bucket_of(hashes[i], table.bucket_count);
    claims->evictors[at] = {bucket, -1, miss.table, order, false};
    claims->place[order] = at;
  });
}

void walk_small_indexes(const std::vector<NewId>& new_ids, const std::vector<char>& needs_victim,
                        Claims* claims) {
  const auto is_small = [](const TableView& table) {
    return table.bucket_count <= kWholeIndexBuckets;
  };
  if (std::none_of(claims->tables.begin(), claims->tables.end(), is_small)) return;
  for (size_t i = 0; i < new_ids.size(); ++i) {
    const TableView& table = claims->tables[new_ids[i].table];
    if (needs_victim[i] == 0 || !is_small(table)) continue;
    const uint64_t hash = first_hash(new_ids[i].id, table.salt);
    const int64_t at = claims->end[0]++;
    const int64_t bucket = bucket_of(hash, table.bucket_count);
    claims->evictors[at] = {bucket, -1, new_ids[i].table, static_cast<int32_t>(i), false};
    claims->place[i] = static_cast<int32_t>(at);
  }
}

struct SearchJob {
  const Claims* claims;
  const Evictor* evictors;
  int64_t count;  // at most kSearched
  int64_t ahead;  // number of evictors after these to prefetch buckets for
  bool* lines;    // in: whether to prefetch their lines, too; out: whether lines were read
  int64_t* best;  // out: slots, or -1
};

DYNEMB_INLINE void search_victims_body(const SearchJob& job) {
  constexpr bool kOneGroup = kVictimBuckets == kGroupBuckets;
  const Claims& claims = *job.claims;
  const bool prefetch_lines = *job.lines;
  bool any_lines = false;
  uint64_t slots[kSearched];  // the best ones, by evictor
  const auto searches_group = [](const TableView& table) {
    return kOneGroup && table.bucket_count > kWholeIndexBuckets;
  };
  for (int64_t i = 0; i < job.count; ++i) {
    if (i < job.ahead) claims.prefetch(job.evictors[job.count + i], prefetch_lines);
    const Evictor& evictor = job.evictors[i];
    const TableView& table = claims.tables[evictor.table];
    const int64_t* policy = claims.policies[evictor.table];
    const VictimSearch search{table, claims.step, evictor.order,
                              claims.step - policy[kPolicyProtectedSteps],
                              policy[kPolicyEvictionWord]};
    const bool by_step = search.word == kStepWord;
    if (!searches_group(table)) {
      const int buckets = victim_buckets(table.bucket_count);
      job.best[i] = by_step ? search_buckets<true>(search, evictor.bucket, buckets)
                            : search_buckets<false>(search, evictor.bucket, buckets);
      any_lines = true;
      continue;
    }
    const GroupBuckets buckets = group_buckets(table, evictor.bucket);
    bool lines;
    slots[i] = by_step ? best_of_group<true>(search, buckets, &lines)
                       : best_of_group<false>(search, buckets, &lines);
    any_lines |= lines;
    // their ids are compared below
    if (lines || (slots[i] & (slots[i] - 1)) == 0) continue;
    for (uint64_t left = slots[i]; left != 0; left &= left - 1) {
      prefetch_line(table.line(buckets.bucket[__builtin_ctzll(left) / kBucketWidth]));
    }
  }
  for (int64_t i = 0; i < job.count; ++i) {
    const Evictor& evictor = job.evictors[i];
    const TableView& table = claims.tables[evictor.table];
    if (!searches_group(table)) continue;
    job.best[i] = least_id(table, group_buckets(table, evictor.bucket), slots[i]);
  }
  *job.lines = any_lines;
}
DYNEMB_SIMD_VARIANTS(search_victims, (const SearchJob& job), (job))

int64_t next_victim(const Claims& claims, const Evictor& evictor) {
  const int64_t exhausted = __atomic_load_n(&claims.exhausted[evictor.table], __ATOMIC_RELAXED);
  if (evictor.order > exhausted) return -1;
  int64_t best;
  bool lines = false;
  search_victims({&claims, &evictor, 1, 0, &lines, &best});
  return best;
}

// The new id that made a claim, or nullptr: the word was negative before the call.
Evictor* displaced_evictor(Claims* claims, int64_t word) {
  const int64_t order = eviction_claim_order(word);
  if (order >= static_cast<int64_t>(claims->place.size())) return nullptr;
  const int32_t place = claims->place[order];
  return place < 0 ? nullptr : &claims->evictors[place];
}

// Claims a victim for a new id, then for each id that it displaces. `slot`: the best victim of an
// earlier search, or -1.
void claim_victim(Claims* claims, Evictor* evictor, int64_t slot) {
  for (;;) {
    if (slot < 0) {
      evictor->failed = true;
      if (claims->tables[evictor->table].bucket_count <= kWholeIndexBuckets) {
        __atomic_store_n(&claims->exhausted[evictor->table], int64_t{evictor->order},
                         __ATOMIC_RELAXED);
      }
      return;
    }
    int64_t* word = step_word(claims->tables[evictor->table], slot);
    int64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    int64_t claim = make_eviction_claim(evictor->order, step_of(seen, claims->step));
    while (seen > claim && !__atomic_compare_exchange_n(word, &seen, claim, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED)) {
      claim = make_eviction_claim(evictor->order, step_of(seen, claims->step));
    }
    if (seen > claim) {
      __atomic_store_n(&evictor->victim, slot, __ATOMIC_RELAXED);
      if (!is_eviction_claim(seen)) return;
      evictor = displaced_evictor(claims, seen);
      if (evictor == nullptr) return;
    }  // otherwise an earlier order came first
    slot = next_victim(*claims, *evictor);
  }
}

// Claims victims for the new ids of small indexes, one after another: they compete for the same
// ones.
void claim_in_order(Claims* claims, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    Evictor* evictor = &claims->evictors[i];
    claim_victim(claims, evictor, next_victim(*claims, *evictor));
  }
}

// Claims victims for the new ids of a partition.
void claim_victims(Claims* claims, int64_t begin, int64_t end) {
  Evictor* evictors = claims->evictors.data();
  int64_t best[kSearched];
  bool lines = true;  // of the next ones are needed, if those of the last ones were
  for (int64_t i = begin; i < std::min(begin + kSearched, end); ++i) {
    claims->prefetch(evictors[i], lines);
  }
  for (int64_t block = begin; block < end; block += kSearched) {
    const int64_t count = std::min(kSearched, end - block);
    search_victims({claims, evictors + block, count, end - block - count, &lines, best});
    for (int64_t i = 0; i < count; ++i) claim_victim(claims, evictors + block + i, best[i]);
  }
}

bool holds(const int64_t* word, int64_t order) {
  return is_eviction_claim(*word) && eviction_claim_order(*word) == order;
}

// The slot that an order has claimed. Two threads may have claimed for it in turn and recorded the
// earlier slot last; then it is searched for.
int64_t claimed_victim(const Claims& claims, const Evictor& evictor) {
  const TableView& table = claims.tables[evictor.table];
  int64_t slot = evictor.victim;
  for (int i = 0; slot < 0 || !holds(step_word(table, slot), evictor.order); ++i) {
    if (i == kVictimBuckets * kBucketWidth) return -1;  // step words were negative before
    slot = claims.bucket(evictor, i / kBucketWidth) * kBucketWidth + i % kBucketWidth;
  }
  return slot;
}

// Result for the new ids of a walk, by table.
struct Outcome {
  int64_t refused;
  int64_t evicted;
  int64_t inserted;
  int64_t tombstones;
};

// Gives the rows of victims to the new ids of one walk. `records`: by order, place in the log;
// empty: nothing is logged.
void take_victims(const Claims& claims, const PolicyArgs& policies, const EvictionLog& log,
                  const std::vector<int64_t>& records, int64_t begin, int64_t end,
                  std::vector<NewId>* new_ids, Outcome* outcomes) {
  for (int64_t i = begin; i < end; ++i) {
    if (i + kLookahead < end) {
      const Evictor& ahead = claims.evictors[i + kLookahead];
      __builtin_prefetch(&(*new_ids)[ahead.order], 1);
      if (ahead.victim >= 0) {
        const TableView& table = claims.tables[ahead.table];
        prefetch_line_of(step_word(table, ahead.victim));
        prefetch_line(table.line(ahead.victim / kBucketWidth));
      }
    }
    const Evictor& evictor = claims.evictors[i];
    const int32_t order = evictor.order;
    NewId& entry = (*new_ids)[order];
    Outcome* outcome = &outcomes[evictor.table];
    if (evictor.failed) {
      refuse_without_room(policies, &entry);
      ++outcome->refused;
      continue;
    }
    ++outcome->evicted;
    const TableView& table = claims.tables[evictor.table];
    const int64_t victim = claimed_victim(claims, evictor);
    if (victim < 0) {
      entry.verdict = kVerdictRefuse;
      continue;
    }
    const SlotPosition at{victim / kBucketWidth, victim % kBucketWidth};
    const int64_t* line = table.line(at.bucket);
    const int64_t handle = decode_handle(line[kBucketWidth + at.slot]);
    if (!records.empty() && records[order] < log.records) {
      const int64_t word = claims.policies[evictor.table][kPolicyEvictionWord];
      const int64_t* score = table.score(at.bucket, at.slot);
      int64_t* record = log.words + (1 + records[order]) * kEvictedColumns;
      record[kEvictedTable] = evictor.table;
      record[kEvictedId] = line[at.slot];
      record[kEvictedHandle] = handle;
      record[kEvictedScore] =
          word == kStepWord ? step_of(*score, claims.step) : score[word * kBucketWidth];
    }
    entry.handle = next_owner(handle);
    ++outcome->inserted;
    outcome->tombstones += clear_slot(table, at.bucket, at.slot);
  }
}

// By order, the log record of a new id's victim; empty: nothing is logged.
std::vector<int64_t> number_records(const Claims& claims, const EvictionLog& log) {
  int64_t next = log.words[kEvictedRecords];
  if (next >= log.records) return {};
  std::vector<int64_t> records(claims.place.size());
  for (size_t order = 0; order < records.size(); ++order) {
    records[order] = next;
    next += claims.place[order] >= 0 && !claims.evictors[claims.place[order]].failed;
  }
  return records;
}

}  // namespace

void evict(const IndexArgs& index, const PolicyArgs& policies, const EvictionLog& log,
           const Misses& misses, const std::vector<char>& needs_victim, std::vector<NewId>* new_ids,
           std::vector<int64_t>* inserted) {
  // Kept between calls, unless large, as `misses` are.
  static thread_local Claims kept;
  Claims& claims = kept;
  claims.tables.clear();
  claims.policies.clear();
  for (int64_t t = 0; t < index.table_count; ++t) {
    claims.tables.push_back(index.table(t));
    claims.policies.push_back(policies.row(t));
  }
  claims.exhausted.assign(index.table_count, INT64_MAX);
  claims.step = policies.clock[kClockStep];
  const int64_t count = misses.count();
  claims.evictors.resize(static_cast<size_t>(count) + new_ids->size());
  claims.place.assign(new_ids->size(), -1);
  claims.begin.assign(kWalks, 0);
  claims.end.assign(kWalks, 0);
  walk_small_indexes(*new_ids, needs_victim, &claims);
  parallel_units(kPartitions, count, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) walk_partition(misses, needs_victim, p, &claims);
  });
  const auto for_each_walk = [&](const auto& visit) {
    parallel_units(kWalks, count, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) visit(w, claims.begin[w], claims.end[w]);
    });
  };
  for_each_walk([&](int64_t w, int64_t begin, int64_t end) {
    w == 0 ? claim_in_order(&claims, begin, end) : claim_victims(&claims, begin, end);
  });
  const std::vector<int64_t> records = number_records(claims, log);
  // Slots are cleared in parallel: the properties of a bucket that clear_slot reads do not change
  // meanwhile.
  std::vector<Outcome> outcomes(kWalks * index.table_count, Outcome{});
  const MovingEntries moving(index.tables);
  for_each_walk([&](int64_t w, int64_t begin, int64_t end) {
    take_victims(claims, policies, log, records, begin, end, new_ids,
                 outcomes.data() + w * index.table_count);
  });
  int64_t evicted = 0;
  for (int64_t w = 0; w < kWalks; ++w) {
    for (int64_t t = 0; t < index.table_count; ++t) {
      const Outcome& outcome = outcomes[w * index.table_count + t];
      int64_t* row = index.table_row(t);
      row[kTableSize] -= outcome.evicted;
      row[kTableEvicted] = add_count(row[kTableEvicted], outcome.evicted);
      row[kTableRejected] += outcome.refused;
      row[kTableTombstones] += outcome.tombstones;
      (*inserted)[t] += outcome.inserted;
      evicted += outcome.evicted;
    }
  }
  const int64_t noted = std::min(evicted, log.records - log.words[kEvictedRecords]);
  log.words[kEvictedRecords] += noted;
  log.words[kEvictedLost] += evicted - noted;
  if (claims.evictors.capacity() > ReleaseLarge::kKeptIds / 4) claims = Claims{};
}

}  // namespace dynemb::cpu
