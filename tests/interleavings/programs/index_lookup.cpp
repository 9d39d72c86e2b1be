// Threads look for ids in a bucket that another one changes: csrc/cpu/index/moving_entries.h and
// probe.h. The bucket stays full to readers.
#include <algorithm>

#include "checker.h"
#include "cpu/index/moving_entries.h"
#include "cpu/index/probe_block.h"

namespace {

using namespace dynemb;
using namespace dynemb::cpu;
using interleavings::require;

constexpr int64_t kLasting = 11;
constexpr int64_t kTurns[] = {21, 22, 0};  // one after another in slot 0

alignas(64) int64_t line[kBucketWords];

int64_t stored_of(int64_t id, int64_t change) { return (change << 8 | id) + 1; }
bool may_be_of(int64_t stored, int64_t id) { return stored == 0 || ((stored - 1) & 0xff) == id; }

void change() {
  const TableView table{line, nullptr, 0, 1, 0, false, 0};
  for (int64_t k = 1; k <= 2; ++k) {
    {
      const MovingEntries moving(line);
      clear_slot(table, 0, 0);
    }
    fill_slot(line, line, 0, kTurns[k], stored_of(kTurns[k], k));
  }
}

void read() {
  const int64_t ids[] = {kTurns[0], kTurns[1], kLasting, kTurns[2]};
  const int64_t buckets[4] = {};
  Words4 four;
  bool empty;
  read_unmoved(line, [&] {
    four = match_four(line, buckets, ids);
    empty = has_empty_slot(line);
  });
  require(!empty, "a bucket that was full seems to have an empty slot");
  require(four[2] == stored_of(kLasting, 0), "an id that stays is not found");
  for (int i = 0; i < 4; ++i)
    require(may_be_of(four[i], ids[i]), "an id has the handle of another");
}

void read_one() {
  int64_t stored = 0;
  read_unmoved(line, [&] { stored = match_stored(line, kTurns[1]); });
  require(may_be_of(stored, kTurns[1]), "an id has the handle of another");
}

interleavings::Execution begin() {
  std::fill(std::begin(line), std::end(line), 0);
  fill_slot(line, line, 0, kTurns[0], stored_of(kTurns[0], 0));
  for (int64_t slot = 1; slot < kBucketWidth; ++slot) {
    fill_slot(line, line, slot, kLasting + slot - 1, stored_of(kLasting + slot - 1, 0));
  }
  interleavings::share(line, sizeof line, interleavings::Access::kGuarded);
  return {{change, read, read_one}, nullptr};
}

}  // namespace

int main(int argc, char** argv) { return interleavings::explore(argc, argv, begin); }
