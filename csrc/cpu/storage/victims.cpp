#include "cpu/storage/victims.h"

#include <array>

#include "core/storage/victims.h"
#include "cpu/storage/slots.h"

namespace dynemb::cpu {
namespace {

using WorthCounts = std::array<int64_t, kWorths>;

// Histogram of the rows that may lose their slots. Halves counts of uses from time to time.
WorthCounts worth_histogram(const CacheSlab& cache, uint32_t epoch) {
  WorthCounts counts{};
  int64_t* clock = cache.clock;
  const bool halves = clock[kTierTouches] >= kUsesBeforeHalving * clock[kTierLimit];
  if (halves) clock[kTierTouches] = 0;
  for (int64_t slot = 0; slot < clock[kTierUsed]; ++slot) {
    int64_t* words = slot_at(cache, slot);
    if (halves) words[kSlotUse] = halved_use(words[kSlotUse]);
    if (!may_lose_slot(words, epoch)) continue;
    ++counts[static_cast<size_t>(slot_worth(words[kSlotUse], epoch))];
  }
  return counts;
}

}  // namespace

void take_victims(const CacheSlab& cache, uint32_t epoch, int64_t wanted, int64_t job,
                  std::vector<int32_t>* victims, std::vector<RowMove>* saves) {
  const VictimThreshold threshold = pick_threshold(worth_histogram(cache, epoch).data(), wanted);
  const int64_t used = cache.clock[kTierUsed];
  const int64_t begin = cache.clock[kTierCursor];
  int64_t ties = 0;
  int64_t left = threshold.victims;
  for (int64_t steps = 0; steps < used && left > 0; ++steps) {
    const int64_t slot = slot_after(begin, steps, used);
    const int64_t* words = slot_at(cache, slot);
    if (!may_lose_slot(words, epoch)) continue;
    const int worth = slot_worth(words[kSlotUse], epoch);
    const bool goes = is_victim(threshold, worth, ties);
    ties += worth == threshold.worth;
    if (!goes) continue;
    evict(cache, slot, job, saves);
    victims->push_back(static_cast<int32_t>(slot));
    cache.clock[kTierCursor] = slot + 1;
    --left;
  }
}

}  // namespace dynemb::cpu
