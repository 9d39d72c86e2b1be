#include <algorithm>
#include <cub/device/device_scan.cuh>

#include "cuda/runtime/device.cuh"
#include "cuda/storage/victims.h"

namespace dynemb::cuda {
namespace {

constexpr int64_t kTile = 32;  // slots that the lanes of a warp look at together

// The last victim, written by its thread.
enum LastVictim : int { kLastCursor = 0, kLastTies = 1, kLastWords = 2 };

struct SearchJob {
  CacheView cache;
  HomePlan* plan;
  int64_t* worths;   // [kWorths], a histogram
  uint64_t* counts;  // [tiles + 1], of a tile, then of those before it: below << 32 | ties
  int64_t* last;     // [kLastWords]
  int32_t* victims;
  TierColumn counted_as;

  __device__ uint32_t now() const { return static_cast<uint32_t>(cache.head[kTierEpoch]); }
};

// Strided over the slots in use: 32 bytes each, once for a portion of victims. A block counts for
// itself first, because most slots have few worths.
__global__ void count_worths(const __grid_constant__ SearchJob job) {
  const HomePlan& plan = *job.plan;
  if (plan.portion == 0) return;
  __shared__ unsigned counts[kWorths];
  for (int64_t worth = threadIdx.x; worth < kWorths; worth += blockDim.x) counts[worth] = 0;
  __syncthreads();
  const uint32_t now = job.now();
  const int64_t used = job.cache.clock[kTierUsed];
  for (int64_t slot = thread_number(); slot < used; slot += thread_total()) {
    int64_t* words = job.cache.slot(slot);
    if (plan.halves != 0) words[kSlotUse] = halved_use(words[kSlotUse]);
    if (!may_lose_slot(words, now)) continue;
    atomicAdd(counts + slot_worth(words[kSlotUse], now), 1U);
  }
  __syncthreads();
  auto* worths = reinterpret_cast<unsigned long long*>(job.worths);
  for (int64_t worth = threadIdx.x; worth < kWorths; worth += blockDim.x) {
    if (counts[worth] != 0) {
      atomicAdd(worths + worth, static_cast<unsigned long long>(counts[worth]));
    }
  }
}

// One thread: reads up to kWorths words, once for a portion of victims.
__global__ void pick_portion(const __grid_constant__ SearchJob job) {
  if (thread_number() == 0 && job.plan->portion != 0) {
    begin_portion(job.worths, *job.plan, job.cache.clock);
  }
}

// A slot that the search reaches after `steps`.
struct Candidate {
  int64_t slot;
  bool below;  // of less worth than the threshold
  bool tie;    // of that worth
};
__device__ __forceinline__ Candidate candidate(const SearchJob& job, int64_t steps) {
  const int64_t* clock = job.cache.clock;
  if (steps >= job.plan->searched) return {0, false, false};
  const int64_t slot = slot_after(clock[kTierCursor], steps, clock[kTierUsed]);
  const int64_t* words = job.cache.slot(slot);
  if (!may_lose_slot(words, job.now())) return {slot, false, false};
  const int64_t worth = slot_worth(words[kSlotUse], job.now());
  return {slot, worth < clock[kTierWorth], worth == clock[kTierWorth]};
}

// A warp per tile of the searched slots, strided: 32 bytes a slot.
__global__ void count_candidates(const __grid_constant__ SearchJob job) {
  const int64_t tiles = (job.plan->searched + kTile - 1) / kTile;
  const int64_t lane = thread_number() % kTile;
  for (int64_t tile = thread_number() / kTile; tile < tiles; tile += thread_total() / kTile) {
    const Candidate found = candidate(job, tile * kTile + lane);
    const unsigned below = __ballot_sync(0xffffffffu, found.below);
    const unsigned ties = __ballot_sync(0xffffffffu, found.tie);
    if (lane == 0) {
      job.counts[tile] =
          static_cast<uint64_t>(__popc(below)) << 32 | static_cast<uint64_t>(__popc(ties));
    }
  }
}

// The same again. Victims are numbered in the order of the cursor.
__global__ void take_victims(const __grid_constant__ SearchJob job) {
  const HomePlan& plan = *job.plan;
  const int64_t tiles = (plan.searched + kTile - 1) / kTile;
  const int64_t most_ties = job.cache.clock[kTierTies];
  const int64_t lane = thread_number() % kTile;
  const unsigned before = (1u << lane) - 1;
  for (int64_t tile = thread_number() / kTile; tile < tiles; tile += thread_total() / kTile) {
    const Candidate found = candidate(job, tile * kTile + lane);
    const unsigned below_mask = __ballot_sync(0xffffffffu, found.below);
    const unsigned tie_mask = __ballot_sync(0xffffffffu, found.tie);
    const auto below = static_cast<int64_t>(job.counts[tile] >> 32) + __popc(below_mask & before);
    const auto ties =
        static_cast<int64_t>(job.counts[tile] & 0xffffffffu) + __popc(tie_mask & before);
    const int64_t number = below + min(ties, most_ties);
    const bool goes = found.below || (found.tie && ties < most_ties);
    if (!goes || number >= plan.victims) continue;
    job.victims[number] = static_cast<int32_t>(found.slot);
    if (number == plan.victims - 1) {
      job.last[kLastCursor] = found.slot + 1;
      job.last[kLastTies] = min(ties, most_ties) + (found.tie ? 1 : 0);
    }
  }
}

// One thread.
__global__ void end_search(const __grid_constant__ SearchJob job) {
  if (thread_number() != 0) return;
  HomePlan* plan = job.plan;
  int64_t* clock = job.cache.clock;
  int64_t found = 0;
  int64_t ties = 0;
  int64_t cursor = clock[kTierCursor];
  if (plan->searched > 0) {
    const uint64_t all = job.counts[(plan->searched + kTile - 1) / kTile];
    ties = min(static_cast<int64_t>(all & 0xffffffffu), clock[kTierTies]);
    found = static_cast<int64_t>(all >> 32) + ties;
    cursor = slot_after(cursor, plan->searched, clock[kTierUsed]);
    if (found >= plan->victims) {
      found = plan->victims;
      ties = job.last[kLastTies];
      cursor = job.last[kLastCursor];
    }
  }
  end_home_plan(clock, found, ties, cursor, plan);
  clock[job.counted_as] += plan->given;
}

}  // namespace

VictimSearch::VictimSearch(const Call& call, Scratch* scratch, const CacheView& cache,
                           int64_t ids) {
  const int64_t most = std::min(cache.most_slots, std::max(kLeastSearched, ids * kSlotsSearched));
  tiles_ = (most + kTile - 1) / kTile;
  check_cuda(call.op, "numbering victims",
             cub::DeviceScan::ExclusiveSum(
                 nullptr, temporary_bytes_, static_cast<uint64_t*>(nullptr),
                 static_cast<uint64_t*>(nullptr), static_cast<int>(tiles_ + 1), call.stream));
  worths_ = scratch->add<int64_t>(kWorths);
  counts_ = scratch->add<uint64_t>(tiles_ + 1);
  last_ = scratch->add<int64_t>(kLastWords);
  temporary_ = scratch->add<char>(static_cast<int64_t>(temporary_bytes_));
}

void VictimSearch::run(const Call& call, const Scratch& scratch, const CacheView& cache,
                       TierColumn counted_as, HomePlan* plan, int32_t* victims) const {
  const SearchJob job{
      cache,   plan,      scratch.get(worths_), scratch.get(counts_), scratch.get(last_),
      victims, counted_as};
  call.fill(job.worths, 0, kWorths * 8);
  call.launch_strided(count_worths, cache.most_slots, job);
  call.launch(pick_portion, 1, 1, job);
  call.launch_strided(count_candidates, tiles_ * kTile, job);
  size_t bytes = temporary_bytes_;
  check_cuda(call.op, "numbering victims",
             cub::DeviceScan::ExclusiveSum(scratch.get(temporary_), bytes, job.counts, job.counts,
                                           static_cast<int>(tiles_ + 1), call.stream));
  call.launch_strided(take_victims, tiles_ * kTile, job);
  call.launch(end_search, 1, 1, job);
}

}  // namespace dynemb::cuda
