// Changes of the tables of a file, in memory, and the file that is written anew with them.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/serving/changed_table.h"
#include "cpu/serving/row_file.h"

namespace dynemb::cpu {

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

class FileChanges {
 public:
  // Memory is taken when it is used. While a file is written anew, there are two of these, one of
  // which is empty.
  FileChanges(std::shared_ptr<LiveFile> live, const RowFile& file);
  static int64_t bytes_of(const LiveFile& live, const RowFile& file);

  LiveFile& live() const { return *live_; }
  const std::shared_ptr<LiveFile>& shared_live() const { return live_; }
  const ChangedTable& table(int64_t number) const { return *tables_[number]; }

  // As ChangedTable::read; raises if the changes are damaged.
  void read(int64_t table, const int64_t* ids, int64_t count, char* to, int64_t stride,
            ChangedId* state) const;

  // As those of ChangedTable; plan() raises if the file's index is damaged.
  ChangePlan plan(RowFile& file, int64_t table, const LiveUpdate& update) const;
  void apply(int64_t table, const LiveUpdate& update, const ChangePlan& plan);

 private:
  const std::shared_ptr<LiveFile> live_;
  std::vector<std::unique_ptr<ChangedTable>> tables_;
};

// A file with the rows of another one and their changes, which this process alone has: it has no
// name, and ends with the last descriptor. Takes over the cache. Raises if the disk is full, or a
// file of rows cannot be written beside the first one; nothing has changed.
std::shared_ptr<RowFile> write_anew(const char* op, RowFile& file, const FileChanges& changes);

}  // namespace dynemb::cpu
