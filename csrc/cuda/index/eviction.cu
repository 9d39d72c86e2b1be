#include "cuda/index/eviction.h"

namespace dynemb::cuda {
namespace {

// The buckets in which a new id looks for a victim, and its policy.
struct Search {
  TableView table;
  const int64_t* policy;
  int64_t first;

  __device__ __forceinline__ Search(const PlacedIds& placed, int64_t order)
      : table(table_view(placed.index, placed.table(order))),
        policy(placed.policies.row(placed.table(order))),
        first(bucket_of(first_hash(placed.id(order), table.salt), table.bucket_count)) {}

  __device__ __forceinline__ int64_t bucket(int k) const {
    const int64_t bucket = first + k;
    return bucket < table.bucket_count ? bucket : bucket - table.bucket_count;
  }
};

constexpr unsigned kWarp = 0xffffffffu;  // all lanes

// A slot among those of a search, and its rank.
struct Victim {
  int at;  // -1: none
  VictimRank rank;

  __device__ __forceinline__ bool goes_before(const Victim& other) const {
    return at >= 0 && (other.at < 0 || dynemb::goes_before(rank, other.rank));
  }
};

// The best victim without an earlier claim. All lanes of a warp call it with one order; each looks
// at every 32nd slot, so all loads of a usual search are in flight at once.
__device__ __forceinline__ Victim best_victim(const PlacedIds& placed, const Search& search,
                                              int64_t order) {
  const int64_t clock = placed.policies.clock[kClockStep];
  const int64_t word = search.policy[kPolicyEvictionWord];
  const int64_t protected_steps = search.policy[kPolicyProtectedSteps];
  const int slots = victim_buckets(search.table.bucket_count) * kBucketWidth;
  Victim best{-1, {}};
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) & 31; at < slots; at += 32) {
    const int64_t bucket = search.bucket(at / kBucketWidth);
    const int slot = at % kBucketWidth;
    const int64_t* line = search.table.line(bucket);
    const int64_t* score = search.table.score(bucket, slot);
    const int64_t key = line[slot];
    const int64_t stored = line[kBucketWidth + slot];
    // The value may be outdated, but step words only ever go from free to earlier and earlier
    // claims.
    const int64_t seen = load_racing(score);
    const int64_t value = word == kStepWord ? 0 : score[word * kBucketWidth];
    if (stored == 0 || (is_eviction_claim(seen) && eviction_claim_order(seen) < order)) continue;
    const int64_t step = step_of(seen, clock);
    if (clock - step < protected_steps) continue;
    const Victim victim{at, {word == kStepWord ? step : value, step, key}};
    if (victim.goes_before(best)) best = victim;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const auto other_lane = [distance](int64_t of) -> int64_t {
      return __shfl_xor_sync(kWarp, static_cast<long long>(of), distance);
    };
    const Victim other{
        __shfl_xor_sync(kWarp, best.at, distance),
        {other_lane(best.rank.score), other_lane(best.rank.step), other_lane(best.rank.id)}};
    if (other.goes_before(best)) best = other;
  }
  return best;
}

// Claims a victim for a new id, then for each id that it displaces. All lanes of a warp call it.
__device__ __forceinline__ void claim_victim(const PlacedIds& placed, int64_t order) {
  const bool leads = (threadIdx.x & 31) == 0;
  for (;;) {
    const Search search(placed, order);
    const Victim victim = best_victim(placed, search, order);
    if (victim.at < 0) {
      if (leads) store_racing(placed.stored_word + order, int64_t{PlacedIds::kRefused});
      return;
    }
    const int64_t claim = make_eviction_claim(order, victim.rank.step);
    long long old = 0;
    if (leads) {
      int64_t* word =
          search.table.score(search.bucket(victim.at / kBucketWidth), victim.at % kBucketWidth);
      old = atomicMin(reinterpret_cast<long long*>(word), static_cast<long long>(claim));
    }
    old = __shfl_sync(kWarp, old, 0);
    if (old <= claim) continue;  // an earlier order won: search again
    if (!is_eviction_claim(old)) return;
    order = eviction_claim_order(old);  // displaced
  }
}

// A warp per new id without a row, a lane per slot: two random ranges of 256 and 512 bytes, and one
// random atomic; more for those that are displaced. Each lane first looks whether one of some ids
// has no row.
__global__ void claim_victims(PlacedIds placed, Plan plan) {
  if (plan.head[kPlanEvictors] == 0) return;
  const int64_t total = plan.head[kPlanTotal];
  const int64_t warps = thread_total() / 32;
  const int64_t part = min(int64_t{32}, max(int64_t{1}, total / warps));
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int64_t first = thread_number() / 32 * part; first < total; first += warps * part) {
    const int64_t e = first + lane;
    const bool is_own = lane < part && e < total;
    // other threads change the word only after this id has claimed a victim
    const bool searches = is_own && load_racing(placed.stored_word + e) == PlacedIds::kNeedsVictim;
    for (unsigned left = __ballot_sync(kWarp, searches); left != 0; left &= left - 1) {
      claim_victim(placed, first + __ffs(static_cast<int>(left)) - 1);
    }
  }
}

// Position of the claim of an order.
__device__ __forceinline__ SlotPlace claimed_victim(const PlacedIds& placed, int64_t order) {
  const Search search(placed, order);
  for (int k = 0;; ++k) {
    const int64_t bucket = search.bucket(k);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      const int64_t word = *search.table.score(bucket, slot);
      if (is_eviction_claim(word) && eviction_claim_order(word) == order) {
        return {bucket, slot, has_empty_slot(load_line(search.table.line(bucket)))};
      }
    }
  }
}

// Counts an id without a victim, unless its counter counts it already.
__device__ __forceinline__ void count_without_victim(const PlacedIds& placed, int64_t e, int64_t t,
                                                     int64_t count, int32_t* sketch) {
  const int64_t f = placed.feature[e];
  const int64_t* policy = placed.policies.feature_row(f);
  if (policy[kPolicyAdmission] == kAdmitFrequentSketch) {
    note_in_sketch(placed.index, policy, t, placed.id(e), placed.occurrences[e], sketch);
  } else if (policy[kPolicyAdmission] == kAdmitFrequent && count < 0) {
    placed.count_instead(e, f);
  }
}

// Position of the exact counter of an id with a victim after a rehash; -1: none.
__device__ __forceinline__ int64_t counter_place(const PlacedIds& placed, const Plan& plan,
                                                 int64_t e, int64_t count) {
  const int64_t* policy = placed.policies.feature_row(placed.feature[e]);
  if (policy[kPolicyAdmission] != kAdmitFrequent || count < 0) return -1;
  const int64_t counters = policy[kPolicyCounterTable];
  if (plan.old_buckets[counters] == 0) return count;
  const FoundSlot at = find_slot(table_view(placed.index, counters), placed.id(e));
  return pack_place({at.bucket, at.slot, at.never_full});
}

// A thread per placed id; for one with a victim up to four random lines of scores and one line of
// the index, and one more if it was counted. Nothing is cleared before every thread knows which
// buckets were full. Ids without a victim are counted.
__global__ void find_victims(PlacedIds placed, Plan plan, int32_t* block_counts, int64_t* victims,
                             int64_t* counts, int32_t* sketch, int64_t* handles) {
  if (plan.head[kPlanEvictors] == 0) return;
  const int64_t e = thread_number();
  const bool is_placed = e < plan.head[kPlanTotal];
  const bool found = is_placed && placed.stored_word[e] == PlacedIds::kNeedsVictim;
  const int64_t t = is_placed ? placed.table(e) : 0;
  if (is_placed) victims[e] = -1;
  // in a table that evicts, ids without a victim are the only refused ones
  if (is_placed && placed.feature[e] >= 0 && placed.stored_word[e] == PlacedIds::kRefused &&
      plan.evicted[t] > 0) {
    count_without_victim(placed, e, t, counts[placed.positions[e]], sketch);
  }
  if (found) {
    const SlotPlace place = claimed_victim(placed, e);
    const int64_t* line = table_view(placed.index, t).line(place.bucket);
    const int64_t handle = next_owner(decode_handle(line[kBucketWidth + place.slot]));
    placed.stored_word[e] = encode_handle(handle);
    handles[placed.positions[e]] = handle;
    victims[e] = pack_place(place);
    int64_t& count = counts[placed.positions[e]];
    count = counter_place(placed, plan, e, count);
  }
  const int count = __syncthreads_count(found);
  if (threadIdx.x == 0) block_counts[blockIdx.x] = count;
  count_by_key(found, t, plan.victims);
}

// One block: the counts of tables, and space in the log.
__global__ void __launch_bounds__(kPlanBlock)
    plan_eviction(IndexArgs index, Plan plan, EvictionLog log, int32_t* block_counts,
                  int64_t blocks) {
  if (plan.head[kPlanEvictors] == 0) return;
  const int64_t total = scan_counts(block_counts, blocks);
  for (int64_t t = threadIdx.x; t < index.table_count; t += blockDim.x) {
    int64_t* row = index.table_row(t);
    row[kTableInserted] += plan.victims[t];
    row[kTableEvicted] += plan.victims[t];
    row[kTableRejected] += plan.evicted[t] - plan.victims[t];
  }
  if (threadIdx.x != 0) return;
  const int64_t begin = log.words[kEvictedRecords];
  const int64_t noted = min(total, log.records - begin);
  plan.head[kPlanLogBegin] = begin;
  log.words[kEvictedRecords] = begin + noted;
  log.words[kEvictedLost] += total - noted;
}

// A thread per placed id; for one with a victim a random line of the index and its scores are read
// and written, and 32 bytes of the log, and one more line if it was counted.
__global__ void clear_victims(PlacedIds placed, Plan plan, EvictionLog log,
                              const int32_t* block_counts, const int64_t* victims,
                              const int64_t* counts) {
  if (plan.head[kPlanEvictors] == 0) return;
  const int64_t e = thread_number();
  const bool found = e < plan.head[kPlanTotal] && victims[e] >= 0;
  const int64_t rank = block_counts[blockIdx.x] + rank_in_block(found);
  if (!found) return;
  const int64_t t = placed.table(e);
  const TableView table = table_view(placed.index, t);
  const SlotPlace place = unpack_place(victims[e]);
  const int64_t record = plan.head[kPlanLogBegin] + rank;
  if (record < log.records) {
    const int64_t* line = table.line(place.bucket);
    const int64_t* score = table.score(place.bucket, place.slot);
    const int64_t word = placed.policies.row(t)[kPolicyEvictionWord];
    int64_t* to = log.words + (1 + record) * kEvictedColumns;
    to[kEvictedTable] = t;
    to[kEvictedId] = line[place.slot];
    to[kEvictedHandle] = decode_handle(line[kBucketWidth + place.slot]);
    to[kEvictedScore] = word == kStepWord ? step_of(*score, placed.policies.clock[kClockStep])
                                          : score[word * kBucketWidth];
  }
  if (clear_slot(table, place)) add_to_table(placed.index, t, kTableTombstones, 1);
  const int64_t count = counts[placed.positions[e]];
  if (count >= 0) {
    const int64_t* policy = placed.policies.feature_row(placed.feature[e]);
    clear_counter(placed.index, policy[kPolicyCounterTable], unpack_place(count), true);
  }
}

}  // namespace

void evict(const Call& call, const PlannedCall& planned, const EvictionLog& log,
           const PlacedIds& placed, int64_t* victims, int64_t* counts, int32_t* sketch,
           int64_t* handles) {
  const int64_t rank_threads = planned.blocks * kRankBlock;
  // the counts of new ids by block have been used
  int32_t* block_counts = planned.block_counts;
  call.launch_strided(claim_victims, 32 * planned.features.count, placed, planned.plan);
  call.launch(find_victims, rank_threads, kRankBlock, placed, planned.plan, block_counts, victims,
              counts, sketch, handles);
  call.launch(plan_eviction, kPlanBlock, kPlanBlock, placed.index, planned.plan, log, block_counts,
              planned.blocks);
  call.launch(clear_victims, rank_threads, kRankBlock, placed, planned.plan, log, block_counts,
              victims, counts);
}

}  // namespace dynemb::cuda
