// Full buffers of logs on their way to files. The logs go on meanwhile; records of these buffers
// are read from memory. Used by the storage thread alone.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "cpu/storage/segment_files.h"

namespace dynemb::cpu {

class PendingWrites {
 public:
  // `buffer_bytes`: of every buffer.
  PendingWrites(SegmentFiles& files, int64_t buffer_bytes);
  ~PendingWrites();  // waits for all, whether they succeed or not
  PendingWrites(const PendingWrites&) = delete;
  PendingWrites& operator=(const PendingWrites&) = delete;

  // A buffer with any content.
  std::unique_ptr<PageBuffer> new_buffer();
  // Begins to write the first `bytes` of a buffer, and replaces it by another one. Waits if many
  // are on their way; raises errors of these.
  void write(size_t slab, const SegmentFile& file, int64_t offset,
             std::unique_ptr<PageBuffer>& buffer, int64_t bytes);
  // The memory of bytes of a file that are in a buffer; null: they are in the file.
  const char* find(size_t slab, int64_t number, int64_t offset) const;
  // Whether a file has writes on their way.
  bool has(size_t slab, int64_t number) const;
  // Waits for the writes to a file. Raises errors of these and of earlier ones.
  void wait_for(size_t slab, int64_t number);
  void wait_for_all();
  // Raises the error of a write that has failed meanwhile; does not wait.
  void check();

 private:
  struct Write {
    size_t slab;
    int64_t number;
    std::unique_ptr<PageBuffer> buffer;
    FileTransfer transfer;
  };

  void finish_first();

  SegmentFiles& files_;
  int64_t buffer_bytes_;
  std::deque<Write> writes_;  // oldest first
  std::vector<std::unique_ptr<PageBuffer>> spare_;
};

}  // namespace dynemb::cpu
