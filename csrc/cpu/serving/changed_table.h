// Changes of a table of a file, in memory: rows of changed and of new ids, and removed ids.
//
// Both are live tables, so any number of threads read them while one thread adds to them. A reader
// looks for an id among the removed ones, then among the changed ones, then in the file. A row of
// an id of the file stays here until the file is written anew: a reader that has not seen the id
// among the removed ones would go on to the row in the file, which is older.
#pragma once

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/serving/live_writer.h"

namespace dynemb::cpu {

// A live table with memory of its own.
class OwnedLiveTable {
 public:
  OwnedLiveTable(int64_t ids, Storage format, int64_t dim, uint64_t salt);

  static int64_t bytes_of(int64_t ids, Storage format, int64_t dim);
  const LiveWriter& writer() const { return writer_; }
  const LiveTable& table() const { return writer_.table; }
  int64_t size() const { return writer_.counters[kLiveTableSize]; }  // for the writer
  bool has(int64_t id) const;
  // For the writer: ids, and their rows.
  std::vector<std::pair<int64_t, const char*>> list() const;

 private:
  std::unique_ptr<void, decltype(&std::free)> memory_;
  LiveWriter writer_;
};

// Where a reader goes on to look for an id.
enum class ChangedId : uint8_t { kAskFile = 0, kRemoved, kRead };

// What an update will do, if nothing else changes the table before.
struct ChangePlan {
  LiveOutcome outcome;           // `wanted`: ids in memory after it, changed or removed ones
  int64_t wanted_alone;          // the same if no other changes are in memory
  std::vector<int64_t> hidden;   // ids of the file that go
  std::vector<int64_t> dropped;  // ids that are here alone and go
  std::vector<int64_t> shown;    // removed ids that come back

  bool fits() const { return outcome.wanted <= outcome.free; }
  bool fits_alone() const { return wanted_alone <= outcome.free; }
};

struct ChangedTable {
  ChangedTable(int64_t ids, Storage format, int64_t dim, uint64_t salt);
  static int64_t bytes_of(int64_t headroom, Storage format, int64_t dim);

  // For the writer: ids with rows; removed ids of the file.
  std::vector<std::pair<int64_t, const char*>> changed_rows() const;
  std::vector<int64_t> removed_ids() const;

  // Looks for ids, and copies the rows of changed ones: that of id i to `to` + i * `stride`. False
  // if the table is damaged.
  bool read(const int64_t* ids, int64_t count, char* to, int64_t stride, ChangedId* state) const;

  // For one thread at a time: removes ids, then writes rows of others, as apply_live does.
  // `in_file`: whether the file has each of some ids. The plan has to fit.
  ChangePlan plan(
      const LiveUpdate& update,
      const std::function<std::vector<bool>(const std::vector<int64_t>&)>& in_file) const;
  void apply(const LiveUpdate& update, const ChangePlan& plan);

  const int64_t headroom;
  OwnedLiveTable changed, removed;
  // set before the first id is there: most readers need not look
  std::atomic<bool> any_changed = false, any_removed = false;
};

}  // namespace dynemb::cpu
