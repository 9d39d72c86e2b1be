#include "cpu/storage/victims.h"

#include <algorithm>
#include <array>

#include "core/storage/victims.h"
#include "cpu/storage/slots.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kGroup = 8;   // slots of a group, which are skipped together
constexpr int kKept = kWorths;  // worth of a slot that keeps its row, or has none
constexpr size_t kAhead = 16;   // victims between the fetch of a line and its use

int worth_of(const int64_t* words, uint32_t epoch) {
  return may_lose_slot(words, epoch) ? slot_worth(words[kSlotUse], epoch) : kKept;
}

}  // namespace

VictimSearch::VictimSearch(const CacheSlab& cache, int64_t wanted) : cache_(cache) {
  if (wanted == 0) return;
  const int64_t groups = (cache.clock[kTierUsed] + kGroup - 1) / kGroup;
  least_.reset(new uint16_t[static_cast<size_t>(groups)]);
  slots_.reserve(static_cast<size_t>(std::min(wanted, cache.clock[kTierUsed])));
}

// Makes the histogram of the worth of rows. Halves counts of uses from time to time.
void VictimSearch::find_worths(uint32_t epoch, int64_t* counts) {
  int64_t* clock = cache_.clock;
  const bool halves = clock[kTierTouches] >= kUsesBeforeHalving * clock[kTierLimit];
  if (halves) clock[kTierTouches] = 0;
  for (int64_t begin = 0; begin < clock[kTierUsed]; begin += kGroup) {
    const int64_t end = std::min(begin + kGroup, clock[kTierUsed]);
    int least = kKept;
    for (int64_t slot = begin; slot < end; ++slot) {
      int64_t* words = slot_at(cache_, slot);
      if (halves) words[kSlotUse] = halved_use(words[kSlotUse]);
      const int worth = worth_of(words, epoch);
      ++counts[worth];
      least = std::min(least, worth);
    }
    least_[static_cast<size_t>(begin / kGroup)] = static_cast<uint16_t>(least);
  }
}

void VictimSearch::take(uint32_t epoch, int64_t wanted, int64_t job, std::vector<RowMove>* saves) {
  std::array<int64_t, kWorths + 1> counts{};
  find_worths(epoch, counts.data());
  const VictimThreshold threshold = pick_threshold(counts.data(), wanted);
  const int64_t used = cache_.clock[kTierUsed];
  const int64_t begin = cache_.clock[kTierCursor];
  int64_t ties = 0;
  int64_t left = threshold.victims;
  for (int64_t steps = 0; steps < used && left > 0; ++steps) {
    const int64_t slot = slot_after(begin, steps, used);
    if (least_[static_cast<size_t>(slot / kGroup)] > threshold.worth) {
      steps += std::min(kGroup - slot % kGroup, used - slot) - 1;
      continue;
    }
    const int worth = worth_of(slot_at(cache_, slot), epoch);
    if (worth > threshold.worth) continue;
    const bool goes = is_victim(threshold, worth, ties);
    ties += worth == threshold.worth;
    if (!goes) continue;
    slots_.push_back(static_cast<int32_t>(slot));
    --left;
  }
  const size_t count = slots_.size();
  for (size_t i = 0; i < count + 2 * kAhead; ++i) {
    if (i < count) __builtin_prefetch(slot_at(cache_, slots_[i]), 1);
    if (i >= kAhead && i - kAhead < count) {
      const int64_t owner = slot_at(cache_, slots_[i - kAhead])[kSlotOwner] - 1;
      __builtin_prefetch(cache_.places + handle_row(owner), 1);
    }
    if (i >= 2 * kAhead) evict(cache_, slots_[i - 2 * kAhead], job, saves);
  }
  if (!slots_.empty()) cache_.clock[kTierCursor] = slots_.back() + 1;
}

}  // namespace dynemb::cpu
