// Reads records of a log, many at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cpu/storage/block_io.h"
#include "cpu/storage/record_log.h"

namespace dynemb::cpu {

// A record to read, and its owner.
struct WantedRecord {
  int64_t number;
  int64_t handle;
  int64_t id;
  size_t index;  // the caller's
};

class RecordReader {
 public:
  // `largest_block`: the pages of the largest record, in bytes.
  RecordReader(IoPath path, int64_t largest_block);

  // Calls use(index, record) for each, in any order; records in memory are not read from files.
  // Before, for those from files, calls fetch(index) to prefetch the memory that `use` writes to.
  // Raises if one cannot be read or is damaged, after others of its batch have been used.
  void read(const RecordLog& log, std::vector<WantedRecord>& wanted,
            const std::function<void(size_t)>& fetch,
            const std::function<void(size_t, const char*)>& use);

  IoPath path() const { return reader_->path(); }
  int64_t reads() const { return reads_; }  // records
  int64_t bytes_read() const { return bytes_read_; }

 private:
  std::unique_ptr<BlockReader> reader_;
  PageBuffer blocks_;
  int64_t reads_ = 0;
  int64_t bytes_read_ = 0;
};

}  // namespace dynemb::cpu
