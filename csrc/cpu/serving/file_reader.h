// Reads the rows of ids of a call from a file, its cache, and its changes in memory.
#pragma once

#include <cstdint>

#include "cpu/index/args.h"
#include "cpu/runtime/scratch.h"
#include "cpu/serving/file_changes.h"

namespace dynemb::cpu {

// The rows of all ids of a call. A thread keeps their memory for its next call, unless it is large:
// new pages take as long as the copies of rows.
struct CallRows {
  static constexpr size_t kMostKept = size_t{8} << 20;

  const int64_t* ids = nullptr;
  Scratch<const char*> row;  // nullptr: missing
  Scratch<char> values;

  CallRows() { values.swap(kept()); }
  ~CallRows() {
    if (values.capacity() <= kMostKept) values.swap(kept());
  }
  CallRows(const CallRows&) = delete;
  CallRows& operator=(const CallRows&) = delete;

 private:
  static Scratch<char>& kept() {
    static thread_local Scratch<char> memory;
    return memory;
  }
};

struct FileRows {
  RowFile& file;
  const FileChanges* changes;  // nullptr: none
  const uint64_t* salts;       // of all tables
};

// Reads the rows of all ids; raises if one cannot be read or is damaged.
void read_rows(const char* op, const FileRows& from, const FeatureArgs& features, CallRows& out);

}  // namespace dynemb::cpu
