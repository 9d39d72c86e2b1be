// Threads read a live table while another one updates it: csrc/cpu/serving/live_reader.h.
//
// A row is (id, version) twice. Ids share the line of their first bucket, and the table has one row
// more than ids, so rows are used again at once.
#include <algorithm>
#include <cstring>
#include <vector>

#include "checker.h"
#include "cpu/serving/live_reader.h"
#include "cpu/serving/live_writer.h"

namespace {

using namespace dynemb;
using namespace dynemb::cpu;
using interleavings::require;

constexpr int64_t kWords = 2, kMost = 4, kRows = kMost + 1;
constexpr int64_t kMostBuckets = 2;
// their first bucket is the first one, also of two
constexpr int64_t kChanged = 5, kLasting = 7, kNew = 1, kMissing = 13, kOthers[] = {10, 12};

alignas(64) int64_t lines[2 * kMostBuckets * kBucketWords], rows[kRows * kWords];
int64_t counters[kLiveTableColumns], slab[kLiveSlabColumns];
int64_t buckets;
int64_t ended[16];  // by id: the last version of which the update has ended

LiveTable table() {
  return {lines, buckets,          counters + kLiveTableActive, bucket_salt(7), rows, kRows, kWords,
          4,     Storage::kFloat32};
}
LiveWriter writer() { return {table(), counters, slab}; }

int64_t word_of(int64_t id, int64_t version) { return id << 8 | version; }

void update(std::vector<int64_t> ids, int64_t version, std::vector<int64_t> erased = {}) {
  std::vector<int64_t> packed;
  for (const int64_t id : ids) packed.insert(packed.end(), kWords, word_of(id, version));
  const LiveOutcome done =
      apply_live(writer(), {ids.data(), static_cast<int64_t>(ids.size()), packed.data(),
                            erased.data(), static_cast<int64_t>(erased.size())});
  require(done.wanted <= done.free, "an update has no room");
  erased.insert(erased.end(), ids.begin(), ids.end());
  for (const int64_t id : erased) __atomic_store_n(ended + id, version, __ATOMIC_RELEASE);
}

struct Found {
  int64_t version[kMost];  // -1: the id is missing
};
struct Sink {
  const int64_t* ids;
  Found found;
  void take(int64_t first, const char* const* row, int64_t count, bool) {
    for (int64_t i = 0; i < count; ++i) {
      found.version[first + i] = -1;
      if (row[i] == nullptr) continue;
      int64_t words[kWords];
      std::memcpy(words, row[i], sizeof words);
      require(words[0] == words[1], "a row is made of two");
      require(words[0] >> 8 == ids[first + i], "an id has the row of another");
      found.version[first + i] = words[0] & 0xff;
    }
  }
};

Found read(std::vector<int64_t> ids) {
  Sink sink{ids.data(), {}};
  char slots[kLiveSlots * 8 * kWords];
  const auto count = static_cast<int64_t>(ids.size());
  require(read_live<true>(table(), ids.data(), count, slots, sink) < 0, "the table seems damaged");
  return sink.found;
}

// A reader of an id that is never erased: versions do not go back, and ended ones are seen.
void read_twice(int64_t id) {
  int64_t last = 0;
  for (int k = 0; k < 2; ++k) {
    const int64_t least = std::max(last, __atomic_load_n(ended + id, __ATOMIC_ACQUIRE));
    last = read({id}).version[0];
    require(last >= 0, "an id that stays is not found");
    require(last >= least, "a row of before an update that has ended");
  }
}

// Four ids at once: as vectors.
void read_four() {
  const int64_t least = __atomic_load_n(ended + kNew, __ATOMIC_ACQUIRE);
  const Found found = read({kLasting, kChanged, kNew, kMissing});
  require(found.version[0] >= 0, "an id that stays is not found");
  require(found.version[3] < 0, "an id is found that never was there");
  if (least >= 2) require(found.version[1] < 0 && found.version[2] >= 2, "an update is not seen");
}

// Sets the state before threads begin. `full`: no slot of the first bucket is free.
void fill(int64_t bucket_count, bool full) {
  std::fill(std::begin(lines), std::end(lines), 0);
  std::fill(std::begin(rows), std::end(rows), 0);
  std::fill(std::begin(counters), std::end(counters), 0);
  std::fill(std::begin(slab), std::end(slab), 0);
  std::fill(std::begin(ended), std::end(ended), 0);
  buckets = bucket_count;
  counters[kLiveTableCapacity] = kMost;
  std::vector<int64_t> ids = {kChanged, kLasting};
  if (full) ids.insert(ids.end(), std::begin(kOthers), std::end(kOthers));
  update(ids, 1);
  interleavings::share(lines, sizeof lines, interleavings::Access::kGuarded);
  interleavings::share(rows, sizeof rows, interleavings::Access::kGuarded);
  interleavings::share(counters, sizeof counters, interleavings::Access::kGuarded);
}

interleavings::Execution updates() {
  fill(1, true);
  const auto write = [] { update({kChanged}, 2), update({kChanged}, 3); };
  return {{write, [] { read_twice(kChanged); }}, nullptr};
}

// A new id takes the slot that another one leaves, and then its row.
interleavings::Execution takes_over() {
  fill(2, true);
  const auto write = [] { update({kNew}, 2, {kChanged}), update({kLasting}, 3); };
  return {{write, [] { read_twice(kLasting); }, read_four}, nullptr};
}

interleavings::Execution rehashes() {
  fill(1, false);
  const auto write = [] {
    rehash_live(writer());
    rehash_live(writer());
    update({kNew}, 2, {kChanged});
    update({kLasting}, 3);
  };
  const auto read = [] {
    read_twice(kLasting);
    read_four();
  };
  return {{write, read}, nullptr};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string scene = argc > 1 ? argv[1] : "";
  return interleavings::explore(argc - 1, argv + 1,
                                scene == "updates"      ? updates
                                : scene == "takes-over" ? takes_over
                                                        : rehashes);
}
