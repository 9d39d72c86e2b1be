// Threads read a table of a file while another one changes it: csrc/cpu/serving/changed_table.h.
//
// The file has a row of ids below kInFile, of version 1; a row is (id, version) twice. Each update
// makes the next version of an id, or removes it.
#include "cpu/serving/changed_table.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "checker.h"

namespace {

using namespace dynemb;
using namespace dynemb::cpu;
using interleavings::require;

constexpr int64_t kWords = 2, kDim = 4, kHeadroom = 2, kInFile = 50;
constexpr int64_t kKnown = 5, kNew = 70;
constexpr int64_t kMissing = -1;

ChangedTable* table;
int64_t ended;                  // updates of the id
std::vector<int64_t> versions;  // of the id, after so many updates; kMissing: it is removed

void update(int64_t id) {
  const int64_t next = ended + 1;
  const int64_t version = versions[next];
  const int64_t word = id << 8 | version;
  const int64_t packed[kWords] = {word, word};
  const bool removes = version == kMissing;
  const LiveUpdate of =
      removes ? LiveUpdate{nullptr, 0, nullptr, &id, 1} : LiveUpdate{&id, 1, packed, nullptr, 0};
  const ChangePlan plan = table->plan(of, [](const std::vector<int64_t>& ids) {
    std::vector<bool> found;
    for (const int64_t one : ids) found.push_back(one < kInFile);
    return found;
  });
  require(plan.fits(), "an update has no room");
  table->apply(of, plan);
  const LiveOutcome& done = plan.outcome;
  const bool was_missing = versions[next - 1] == kMissing;
  require(done.inserted == (!removes && was_missing) && done.erased == removes, "counts are wrong");
  __atomic_store_n(&ended, next, __ATOMIC_RELEASE);
}

int64_t read(int64_t id) {
  int64_t words[kWords] = {};
  ChangedId state{};
  require(table->read(&id, 1, reinterpret_cast<char*>(words), sizeof words, &state),
          "the table seems damaged");
  if (state == ChangedId::kRemoved) return kMissing;
  if (state == ChangedId::kAskFile) return id < kInFile ? 1 : kMissing;
  require(words[0] == words[1], "a row is made of two");
  require(words[0] >> 8 == id, "an id has the row of another");
  return words[0] & 0xff;
}

// What is read does not go back, and ended updates are seen.
void read_twice(int64_t id) {
  int64_t last = 0;
  for (int k = 0; k < 2; ++k) {
    last = std::max(last, __atomic_load_n(&ended, __ATOMIC_ACQUIRE));
    const int64_t found = read(id);
    while (last < static_cast<int64_t>(versions.size()) && versions[last] != found) ++last;
    require(last < static_cast<int64_t>(versions.size()),
            "a row of before an update that has ended, or that was read");
  }
}

void empty(const OwnedLiveTable& of, Storage format, int64_t dim) {
  const auto bytes = static_cast<size_t>(OwnedLiveTable::bytes_of(kHeadroom, format, dim) - 64);
  std::memset(of.writer().counters, 0, bytes);
  of.writer().counters[kLiveTableCapacity] = kHeadroom;
  interleavings::share(of.writer().counters, bytes, interleavings::Access::kGuarded);
}

interleavings::Execution changes(int64_t id, std::vector<int64_t> of_id) {
  if (table == nullptr) {  // once, since addresses stay
    table = new ChangedTable(kHeadroom, Storage::kFloat32, kDim, bucket_salt(7));
  }
  empty(table->changed, Storage::kFloat32, kDim);
  empty(table->removed, Storage::kFloat16, 1);
  table->any_changed = table->any_removed = false;
  versions = std::move(of_id);
  ended = 0;
  const auto write = [id] {
    while (ended + 1 < static_cast<int64_t>(versions.size())) update(id);
  };
  const auto reads = [id] { read_twice(id); };
  return {{write, reads, reads}, nullptr};
}

interleavings::Execution known() { return changes(kKnown, {1, 2, kMissing, 4}); }
interleavings::Execution removed() { return changes(kKnown, {1, kMissing, 3, kMissing}); }
interleavings::Execution fresh() { return changes(kNew, {kMissing, 2, kMissing, 4}); }

}  // namespace

int main(int argc, char** argv) {
  const std::string scene = argc > 1 ? argv[1] : "";
  return interleavings::explore(argc - 1, argv + 1,
                                scene == "known"     ? known
                                : scene == "removed" ? removed
                                                     : fresh);
}
