// Threads use a row in a slot of a cache, which must count once: csrc/cpu/storage/find_slots.cpp.
#include <algorithm>

#include "checker.h"
#include "cpu/storage/find_slots.h"
#include "cpu/storage/slots.h"

namespace {

using namespace dynemb;
using namespace dynemb::cpu;
using interleavings::require;

constexpr uint32_t kEpoch = 3;
constexpr int64_t kTable = 6, kJob = 5, kGeneration = 4;

alignas(64) int64_t slot[kSlotColumns];
bool first[3];

void use(int thread, bool changes) {
  StageCall call{};
  call.changes = changes;
  call.counts = true;
  call.epoch = kEpoch;
  first[thread] = touch(call, slot, Threads::kSeveral);
  const int64_t marks = __atomic_load_n(slot + kSlotMarks, __ATOMIC_RELAXED);
  require(!changes || slot_is_dirty(marks), "a change is not marked");
}

interleavings::Execution begin() {
  std::fill(std::begin(slot), std::end(slot), 0);
  slot[kSlotMarks] = slot_marks(kTable, kJob, false, kGeneration);
  slot[kSlotUse] = slot_use(kEpoch - 1, 7);
  interleavings::share(slot, sizeof slot, interleavings::Access::kGuarded);
  const auto check = [] {
    require(first[0] + first[1] + first[2] == 1, "a use counts for several threads, or none");
    require(slot[kSlotUse] == slot_use(kEpoch, 8), "a row is used more or less than once");
    require(slot[kSlotMarks] == slot_marks(kTable, kJob, true, kGeneration), "marks are lost");
  };
  return {{[] { use(0, true); }, [] { use(1, false); }, [] { use(2, true); }}, check};
}

}  // namespace

int main(int argc, char** argv) { return interleavings::explore(argc, argv, begin); }
