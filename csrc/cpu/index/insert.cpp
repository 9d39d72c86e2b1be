// find_or_insert_: finds all ids, then gives rows to the new ones, in rounds that keep every
// integer of the state independent of the number of threads.
#include "cpu/index/insert.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "core/policy/waiting.h"
#include "core/runtime/error_class.h"
#include "cpu/index/admission.h"
#include "cpu/index/eviction.h"
#include "cpu/index/growth.h"
#include "cpu/index/misses.h"
#include "cpu/index/one_pass.h"
#include "cpu/index/one_writer.h"
#include "cpu/index/placement.h"
#include "cpu/index/probe.h"
#include "cpu/memory/reserve.h"
#include "cpu/rows/allocator.h"

namespace dynemb::cpu {
namespace {

// Round 3: every new id into its first bucket, partition by partition. A partition is a range of
// the hash, hence a range of buckets if the bucket count allows it. Ids with a full first bucket go
// through the remaining rounds in order of occurrence. `fill(miss, entry)` sets stored handle and
// scores of the entry of a new id; false: it has none.
template <class Fill>
void place_misses(const IndexArgs& index, const Misses& misses, const Fill& fill) {
  constexpr int64_t kLookahead = 16;
  std::vector<TableView> tables;
  for (int64_t t = 0; t < index.table_count; ++t) tables.push_back(index.table(t));
  // Kept between calls, unless large, as `misses` are.
  static thread_local std::vector<std::vector<Entry>> kept(kPartitions);
  std::vector<std::vector<Entry>>& rest = kept;
  for (auto& entries : rest) entries.clear();
  std::vector<int64_t> reused(kPartitions * index.table_count, 0);
  const bool one_partition = misses.count() < kParallelWork;
  parallel_units(kPartitions, misses.count(), [&](int64_t part_begin, int64_t part_end) {
    for (int64_t p = part_begin; p < part_end; ++p) {
      const Miss* items = misses.items.data() + misses.begin[p];
      const int64_t count = misses.begin[p + 1] - misses.begin[p];
      uint64_t hashes[kLookahead] = {};  // of the next ones
      const auto fetch = [&](int64_t i) {
        const Miss& miss = items[i];
        if (miss.table < 0) return;
        const TableView& table = tables[miss.table];
        __builtin_prefetch(&misses.handle[miss.order]);
        const uint64_t hash = first_hash(miss.id, table.salt);
        hashes[i % kLookahead] = hash;
        const int64_t bucket = bucket_of(hash, table.bucket_count);
        prefetch_line(table.line(bucket));
        if (table.scores != nullptr) prefetch_line_of(table.score(bucket, 0));
      };
      for (int64_t i = 0; i < std::min(kLookahead, count); ++i) fetch(i);
      Entry entry{};
      for (int64_t i = 0; i < count; ++i) {
        entry.hash = hashes[i % kLookahead];
        if (i + kLookahead < count) fetch(i + kLookahead);
        const Miss& miss = items[i];
        if (miss.table < 0) continue;
        const TableView& table = tables[miss.table];
        entry.key = miss.id;
        entry.table = miss.table;
        entry.order = miss.order;
        if (!fill(miss, &entry)) continue;
        const bool owned = one_partition || table.bucket_count % kPartitions == 0;
        if (!owned || !put_entry(index.tables, table, bucket_of(entry.hash, table.bucket_count),
                                 entry, &reused[p * index.table_count + miss.table])) {
          rest[p].push_back(entry);
        }
      }
    }
  });
  for (int64_t p = 0; p < kPartitions; ++p) {
    for (int64_t t = 0; t < index.table_count; ++t) {
      index.table_row(t)[kTableTombstones] -= reused[p * index.table_count + t];
    }
  }
  const EntryList list = merge_by_order(rest, misses.count());
  const bool all_owned =
      one_partition || std::all_of(tables.begin(), tables.end(), [](const TableView& table) {
        return table.bucket_count % kPartitions == 0;
      });
  all_owned ? place_displaced(index, list) : place_entries(index, list);
  if (list.size() > ReleaseLarge::kKeptIds / 16) {
    for (auto& entries : rest) std::vector<Entry>().swap(entries);
  }
}

// Changes of a call, by table.
struct Plan {
  std::vector<int64_t> added;    // ids that get a free row
  std::vector<int64_t> evicted;  // ids that need a victim
  std::vector<int64_t> counted;  // upper bound of ids counted for the first time, by counter table
  std::vector<GrowthDecision> growth;
};

// Decides growth and checks memory for the plan. Nothing changes.
void check_plan(const IndexArgs& index, const RowAllocator& allocator, int64_t slabs, Plan* plan) {
  std::vector<int64_t> new_rows(slabs, 0);
  plan->growth.resize(index.table_count);
  int64_t bytes = 0;
  for (int64_t t = 0; t < index.table_count; ++t) {
    const int64_t* row = index.table_row(t);
    new_rows[index.meta_row(t)[kMetaSlab]] += plan->added[t];
    // the slots of victims become tombstones
    plan->growth[t] = decide_growth(row[kTableBucketCount], index.meta_row(t)[kMetaRegionBuckets],
                                    row[kTableSize], row[kTableTombstones],
                                    plan->added[t] + plan->counted[t], plan->evicted[t]);
    if (plan->growth[t].rehash) bytes += check_rehash(index, t, plan->growth[t].bucket_count);
  }
  check_available_memory(index.op, bytes + allocator.check(new_rows));
}

void rehash_tables(const IndexArgs& index, const Plan& plan) {
  for (int64_t t = 0; t < index.table_count; ++t) {
    if (plan.growth[t].rehash) rehash(index, t, plan.growth[t].bucket_count);
  }
}

// Rows and places for all new ids of tables without a policy.
void insert_all(const IndexArgs& index, const PolicyArgs& policies, RowAllocator* allocator,
                int64_t slabs, Misses* misses) {
  Plan plan;
  plan.added = dedupe_misses(index.table_count, misses);
  plan.evicted.assign(index.table_count, 0);
  plan.counted.assign(index.table_count, 0);
  check_plan(index, *allocator, slabs, &plan);
  // So far only the scores of known ids have changed.
  misses->handle.resize(misses->count());
  for (size_t i = 0; i < misses->tiles.size(); ++i) {
    const int64_t slab = index.meta_row(misses->tiles[i].table)[kMetaSlab];
    for (int64_t m = misses->tile_begin[i]; m < misses->tile_begin[i + 1]; ++m) {
      if (misses->first[m] == m) misses->handle[m] = allocator->take(slab);
    }
  }
  rehash_tables(index, plan);
  for (int64_t t = 0; t < index.table_count; ++t) {
    index.table_row(t)[kTableSize] += plan.added[t];
    index.table_row(t)[kTableInserted] += plan.added[t];
  }
  const int64_t step = policies.clock[kClockStep];
  place_misses(index, *misses, [&](const Miss& miss, Entry* entry) {
    entry->stored = encode_handle(misses->handle[miss.order]);
    entry->score[kStepWord] = step;
    return true;
  });
}

// Number of admitted ids of each table that get a free row; the others need a victim, are refused,
// or are too many.
void plan_room(const IndexArgs& index, const PolicyArgs& policies,
               const std::vector<int64_t>& admitted, Plan* plan) {
  int64_t budget = 0;
  for (int64_t t = 0; t < index.table_count; ++t) {
    const int64_t* policy = policies.row(t);
    budget = std::max(budget, policy[kPolicyBudget]);
  }
  for (int64_t t = 0; t < index.table_count; ++t) {
    budget -= budget_share(policies.row(t), index.table_row(t)[kTableSize]);
  }
  const int64_t level = budget_level(budget, index.table_count, [&](int64_t t) {
    return budget_demand(policies.row(t), index.table_row(t)[kTableSize], admitted[t]);
  });
  plan->added.resize(index.table_count);
  plan->evicted.assign(index.table_count, 0);
  for (int64_t t = 0; t < index.table_count; ++t) {
    const int64_t* policy = policies.row(t);
    const int64_t size = index.table_row(t)[kTableSize];
    plan->added[t] = ids_with_room(policy, size, admitted[t], level);
    const int64_t rest = admitted[t] - plan->added[t];
    DYNEMB_CHECK(rest == 0 || policy[kPolicyOnFull] != kFullError, "dynemb::", index.op, ": table ",
                 t, " has ", size, " ids and room for ", plan->added[t],
                 " more, but the call brings ", admitted[t],
                 " new ones: give it a larger capacity or budget, remove ids, or choose "
                 "another on_full than \"error\"",
                 kNoRoomError);
    if (policy[kPolicyOnFull] == kFullEvict) plan->evicted[t] = rest;
  }
}

// Changes of scores by policy, but for what depends on the table or the id.
std::vector<ScoreUpdate> score_updates(const PolicyArgs& policies) {
  std::vector<ScoreUpdate> updates;
  for (size_t p = 0; p < policies.waiting.size(); ++p) {
    updates.push_back(policy_update(policies.row(static_cast<int64_t>(p)), policies.clock, 0));
  }
  return updates;
}

void set_scores(const PolicyArgs& policies, const ScoreUpdate& of_policy, int words,
                const NewId& id, int64_t* score) {
  score[kStepWord] = of_policy.step;
  if (words == 1) return;
  ScoreUpdate update = of_policy;
  update.custom = policies.clock[kClockHead + id.table];
  update.expires = ranked_expiry(id.expiry_rank);
  const int64_t* policy = policies.row(id.policy);
  const int64_t frequency =
      admitted_frequency(policy, id.counted, id.occurrences, ranked_threshold(id.threshold_rank));
  for (int w = 0; w < words; ++w) score[w] = new_score(update, w, frequency);
}

// The first count of an id that is not admitted yet.
Entry counter_of(const IndexArgs& index, const PolicyArgs& policies, const ScoreUpdate& update,
                 const NewId& id) {
  const int64_t* policy = policies.row(id.policy);
  const int64_t counters = policy[kPolicyCounterTable];
  Entry entry{first_hash(id.id, index.table(counters).salt),
              id.id,
              add_waiting(policy, policies.waiting[id.policy].time, 0, id.occurrences),
              static_cast<int32_t>(counters),
              0,
              {}};
  set_scores(policies, update, index.score_words, id, entry.score);
  return entry;
}

// Decides which new ids get a row, and checks that everything fits. Only verdicts change.
// `admitted`: number of ids of each table that the policies admit.
Plan plan_by_policy(const IndexArgs& index, const PolicyArgs& policies,
                    const RowAllocator& allocator, int64_t slabs,
                    const std::vector<int64_t>& admitted, const std::vector<int64_t>& uncounted,
                    const std::vector<int64_t>& counted) {
  Plan plan;
  plan.counted = counted;
  plan_room(index, policies, admitted, &plan);
  // An upper bound: whether an id without a row has a counter is known only when rows are given
  // out.
  int64_t without_room = 0;
  for (int64_t t = 0; t < index.table_count; ++t) without_room += admitted[t] - plan.added[t];
  for (int64_t t = 0; t < index.table_count; ++t) {
    plan.counted[t] += std::min(uncounted[t], without_room);
  }
  check_plan(index, allocator, slabs, &plan);
  return plan;
}

// The plan if some new ids may be refused or counted.
Plan plan_by_admission(const IndexArgs& index, const PolicyArgs& policies,
                       const RowAllocator& allocator, int64_t slabs,
                       const std::vector<NewId>& new_ids) {
  std::vector<int64_t> admitted(index.table_count, 0);
  std::vector<int64_t> uncounted(index.table_count, 0);
  std::vector<int64_t> counted(index.table_count, 0);
  for (const NewId& entry : new_ids) {
    const int64_t* policy = policies.row(entry.policy);
    if (entry.verdict == kVerdictInsert) {
      ++admitted[entry.table];
      if (may_need_counter(policy, entry.has_counter(), entry.occurrences)) {
        ++uncounted[policy[kPolicyCounterTable]];
      }
    } else if (entry.verdict == kVerdictCount) {
      ++counted[policy[kPolicyCounterTable]];
    }
  }
  return plan_by_policy(index, policies, allocator, slabs, admitted, uncounted, counted);
}

// Gives free rows to new ids, and counts the others. Returns by number which ids need a victim.
std::vector<char> give_rows(const IndexArgs& index, const PolicyArgs& policies, int32_t* sketch,
                            const Plan& plan, RowAllocator* allocator,
                            std::vector<NewId>* new_ids) {
  std::vector<int64_t> given(index.table_count, 0);
  std::vector<char> needs_victim(new_ids->size(), 0);
  for (size_t i = 0; i < new_ids->size(); ++i) {
    NewId& entry = (*new_ids)[i];
    int64_t* row = index.table_row(entry.table);
    if (entry.verdict != kVerdictInsert) {
      entry.handle = kRefusedHandle;
      ++row[kTableNotAdmitted];
    } else if (given[entry.table]++ < plan.added[entry.table]) {
      entry.handle = allocator->take(index.meta_row(entry.table)[kMetaSlab]);
    } else if (plan.evicted[entry.table] > 0) {
      needs_victim[i] = 1;
      continue;  // whether it is counted is decided later
    } else {
      refuse_without_room(policies, &entry);
      ++row[kTableRejected];
    }
    note_admission(index, policies, sketch, entry);
  }
  return needs_victim;
}

// Admits the ids that found a victim, and counts the others. Returns those that are counted for the
// first time.
std::vector<Entry> count_new_ids(const IndexArgs& index, const PolicyArgs& policies,
                                 int32_t* sketch, const Plan& plan,
                                 const std::vector<char>& needs_victim,
                                 std::vector<NewId>* new_ids) {
  const std::vector<ScoreUpdate> updates = score_updates(policies);
  std::vector<Entry> counters;
  for (size_t i = 0; i < new_ids->size(); ++i) {
    NewId& entry = (*new_ids)[i];
    if (needs_victim[i] != 0) {
      if (entry.has_counter() &&
          plan.growth[policies.row(entry.policy)[kPolicyCounterTable]].rehash) {
        find_counter_again(index, policies, &entry);
      }
      note_admission(index, policies, sketch, entry);
    }
    if (entry.verdict != kVerdictCount) continue;
    counters.push_back(counter_of(index, policies, updates[entry.policy], entry));
    ++index.table_row(counters.back().table)[kTableSize];
    ++index.table_row(counters.back().table)[kTableInserted];
  }
  return counters;
}

// Rows and places for the new ids that the policies admit.
void insert_by_policy(const IndexArgs& index, const PolicyArgs& policies, int32_t* sketch,
                      const EvictionLog& log, const FeatureArgs& features, const bool* admit,
                      RowAllocator* allocator, int64_t slabs, Misses* misses) {
  const std::vector<int64_t> by_table = dedupe_misses(index.table_count, misses);
  // Kept between calls, unless large, as `misses` are.
  static thread_local std::vector<NewId> kept;
  std::vector<NewId>& new_ids = kept;
  collect_new_ids(policies, features, admit, misses, &new_ids);
  const bool all = admits_all(policies, admit);
  Plan plan;
  if (all) {
    const std::vector<int64_t> none(index.table_count, 0);
    plan = plan_by_policy(index, policies, *allocator, slabs, by_table, none, none);
  } else {
    decide_admission(index, policies, sketch, &new_ids);
    plan = plan_by_admission(index, policies, *allocator, slabs, new_ids);
  }
  // So far only the scores of known ids have changed.
  const auto evictors = std::accumulate(plan.evicted.begin(), plan.evicted.end(), int64_t{0});
  const bool only_evictors = all && evictors == static_cast<int64_t>(new_ids.size());
  const std::vector<char> needs_victim =
      only_evictors ? std::vector<char>(new_ids.size(), 1)
                    : give_rows(index, policies, sketch, plan, allocator, &new_ids);
  rehash_tables(index, plan);
  std::vector<int64_t> inserted = plan.added;
  if (evictors > 0) evict(index, policies, log, *misses, needs_victim, &new_ids, &inserted);
  if (!all) {
    place_entries(index,
                  entry_list(count_new_ids(index, policies, sketch, plan, needs_victim, &new_ids)));
  }
  for (int64_t t = 0; t < index.table_count; ++t) {
    index.table_row(t)[kTableSize] += inserted[t];
    index.table_row(t)[kTableInserted] += inserted[t];
  }
  misses->handle.resize(misses->count());
  const std::vector<ScoreUpdate> updates = score_updates(policies);
  constexpr int64_t kLookahead = 8;
  const Miss* const items_end = misses->items.data() + misses->items.size();
  place_misses(index, *misses, [&](const Miss& miss, Entry* entry) {
    const Miss* ahead = &miss + kLookahead;
    if (ahead < items_end) {
      __builtin_prefetch(new_ids.data() + misses->new_id[ahead->order]);
    }
    const NewId& id = new_ids[misses->new_id[miss.order]];
    misses->handle[miss.order] = id.handle;
    if (id.verdict != kVerdictInsert) return false;
    entry->stored = encode_handle(id.handle);
    set_scores(policies, updates[id.policy], index.score_words, id, entry->score);
    return true;
  });
  if (new_ids.capacity() > ReleaseLarge::kKeptIds / 8) std::vector<NewId>().swap(new_ids);
}

// Handles of the new ids, and counts of ids found, missed and refused.
void finish(const IndexArgs& index, const Misses& misses, int64_t* handles) {
  const auto tile_count = static_cast<int64_t>(misses.tiles.size());
  std::vector<int64_t> refused(static_cast<size_t>(tile_count), 0);
  parallel_units(tile_count, misses.count(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tile_begin = misses.tiles[i].begin;
      for (int64_t m = misses.tile_begin[i]; m < misses.tile_begin[i + 1]; ++m) {
        const int64_t position = misses.in_tile[tile_begin + m - misses.tile_begin[i]];
        const int64_t handle = misses.handle[misses.first[m]];
        handles[tile_begin + position] = handle;
        refused[i] += handle < 0;
      }
    }
  });
  for (int64_t i = 0; i < tile_count; ++i) {
    const Tile& tile = misses.tiles[i];
    const int64_t missed = misses.tile_begin[i + 1] - misses.tile_begin[i];
    int64_t* row = index.table_row(tile.table);
    row[kTableFound] += tile.end - tile.begin - missed - misses.tile_padding[i];
    row[kTableMissed] += missed;
    row[kTableDefaultServed] += refused[i];
  }
}

}  // namespace

Tensor insert_handles(const char* op, const Tensor& buckets, const Tensor& scores,
                      const Tensor& tables, const Tensor& slabs, const Tensor& free_rows,
                      const Tensor& sketch, const Tensor& evicted, const Tensor& meta,
                      const Tensor& policy, const Tensor& clock, const Tensor& ids,
                      const Tensor& offsets, const std::optional<Tensor>& admit,
                      const std::vector<int64_t>& feature_tables,
                      const std::vector<int64_t>& feature_policies) {
  const IndexArgs index = index_args(op, buckets, &scores, tables, meta);
  RowAllocator allocator(index, slabs, free_rows);
  const FeatureArgs features = feature_args(op, ids, offsets, feature_tables, index.table_count);
  const PolicyArgs policies = policy_args(index, features, policy, clock, sketch, feature_policies);
  const int64_t* head = evicted_tensor(op, evicted);
  DYNEMB_CHECK(head[kEvictedRecords] >= 0 && head[kEvictedRecords] < evicted.size(0) &&
                   head[kEvictedLost] >= 0 && head[kEvictedLost] <= INT64_MAX / 2,
               "dynemb::", op, ": evicted[0] counts ", head[kEvictedRecords], " records and ",
               head[kEvictedLost], " lost ones, but has space for ", evicted.size(0) - 1);
  const bool* admitted = admit_tensor(op, admit, features.count, !policies.empty());
  check_id_limit(op, features.count);
  Tensor handles = empty_cpu({features.count}, ScalarType::Long);
  auto* handle = static_cast<int64_t*>(handles.data_ptr());
  const OneWriter writer(op, index.tables);
  const auto threads = torch::stable::get_num_threads();
  const bool one_thread = features.count < kParallelWork || threads == 1 ||
                          (threads == 2 && one_thread_beats_two(index, features));
  if (one_thread && fits_one_pass(index, features, policies, allocator)) {
    insert_in_one_pass(index, features, policies, &allocator, handle);
    return handles;
  }
  // Kept between calls, unless large: fresh memory would cost page faults in every call.
  static thread_local Misses kept;
  Misses& misses = kept;  // a lambda that used `kept` would see that of its own thread
  const ReleaseLarge release(&misses);
  find_all(index, features, policies, handle, &misses);
  if (misses.count() > 0) {
    partition_misses(index, features, &misses);
    if (policies.empty()) {
      insert_all(index, policies, &allocator, slabs.size(0), &misses);
    } else {
      insert_by_policy(index, policies, static_cast<int32_t*>(sketch.data_ptr()),
                       {static_cast<int64_t*>(evicted.data_ptr()), evicted.size(0) - 1}, features,
                       admitted, &allocator, slabs.size(0), &misses);
    }
  }
  finish(index, misses, handle);
  return handles;
}

namespace {

Tensor find_or_insert_(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows,
                       Tensor sketch, Tensor evicted, Tensor meta, Tensor policy, Tensor clock,
                       Tensor ids, Tensor offsets, std::optional<Tensor> admit,
                       std::vector<int64_t> feature_tables, std::vector<int64_t> feature_policies) {
  return insert_handles("find_or_insert_", buckets, scores, tables, slabs, free_rows, sketch,
                        evicted, meta, policy, clock, ids, offsets, admit, feature_tables,
                        feature_policies);
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("find_or_insert_", TORCH_BOX(&dynemb::cpu::find_or_insert_));
}
