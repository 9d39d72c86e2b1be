// Changes of the tables of a file, in memory: rows of changed and of new ids, and removed ids.
//
// Both are live tables, so any number of threads read them while one thread adds to them. A reader
// looks for an id among the removed ones, then among the changed ones, then in the file. A row of
// an id of the file stays here until the file is written anew: a reader that has not seen the id
// among the removed ones would go on to the row in the file, which is older.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cpu/serving/live_writer.h"
#include "cpu/serving/row_file.h"

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

// What all files of live tables have in common, one after another.
struct LiveFile {
  struct Table {
    uint64_t salt;
    bool has_padding;
    int64_t padding_id;
    int64_t headroom;  // changed and new ids in memory, and as many removed ones
    std::atomic<int64_t> ids, updates;
  };

  LiveFile(std::string path, const RowFile& file, const int64_t* meta,
           const std::vector<int64_t>& headroom);
  std::vector<int64_t> headroom() const;

  const std::string path;  // of the first file
  std::vector<std::unique_ptr<Table>> tables;
  std::mutex writing;
};

// Where a reader goes on to look for an id.
enum class ChangedId : uint8_t { kAskFile = 0, kRemoved, kRead };

class FileChanges {
 public:
  FileChanges(std::shared_ptr<LiveFile> live, const RowFile& file);

  LiveFile& live() const { return *live_; }
  const std::shared_ptr<LiveFile>& shared_live() const { return live_; }
  bool has_any() const;  // for the writer
  const LiveTable& format_of(int64_t table) const { return tables_[table]->changed.table(); }

  // Looks for ids, and copies the rows of changed ones: that of id i to `to` + i * `stride`.
  void read(int64_t table, const int64_t* ids, int64_t count, char* to, int64_t stride,
            ChangedId* state) const;

  // For one thread at a time: removes ids, then writes rows of others, as apply_live does. If
  // `wanted` exceeds `free` in the outcome, nothing has changed. Raises if the file's index is
  // damaged; nothing has changed.
  LiveOutcome apply(RowFile& file, int64_t table, const LiveUpdate& update);

  // For the writer: ids with rows, and removed ids of the file.
  std::vector<std::pair<int64_t, const char*>> changed(int64_t table) const;
  std::vector<int64_t> removed(int64_t table) const;

 private:
  struct Table {
    OwnedLiveTable changed, removed;
    // set before the first id is there: most readers need not look
    std::atomic<bool> any_changed = false, any_removed = false;
  };

  const std::shared_ptr<LiveFile> live_;
  std::vector<std::unique_ptr<Table>> tables_;
};

// A file with the rows of another one and their changes, which this process alone has: it has no
// name, and ends with the last descriptor. Takes over the cache. Raises if the disk is full, or a
// file of rows cannot be written beside the first one; nothing has changed.
std::shared_ptr<RowFile> write_anew(const char* op, RowFile& file, const FileChanges& changes);

}  // namespace dynemb::cpu
