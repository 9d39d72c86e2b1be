// Reads of many blocks of files at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/storage/record.h"

namespace dynemb::cpu {

// One block. Offset, bytes and address are multiples of kPageBytes.
struct BlockRead {
  int file;  // descriptor
  int64_t offset;
  char* to;
  int64_t bytes;
};

enum class IoPath : int64_t {
  kAuto = 0,     // io_uring if this build has it and the kernel allows it, otherwise threads
  kUring = 1,    // raises if io_uring is unavailable
  kThreads = 2,  // pread on threads of its own
};
constexpr int64_t kIoPaths = 3;

// A block that could not be read: `error` is an errno, or 0 if the file ended too soon.
struct BlockFailure {
  size_t block;
  int error;
};

// For one thread at a time. A forked process cannot use its parent's reader, but may destroy it.
class BlockReader {
 public:
  virtual ~BlockReader() = default;
  // Reads all blocks, as many at a time as the path allows. Calls `done(i)` on this thread when
  // block i has arrived, in any order; it must not throw. Returns the failed blocks, ascending,
  // after all others have arrived; their memory is undefined.
  virtual std::vector<BlockFailure> read(const std::vector<BlockRead>& blocks,
                                         const std::function<void(size_t)>& done) = 0;
  virtual IoPath path() const = 0;
};

// A reader for a path; raises if it is unavailable. Messages have no op's name.
std::unique_ptr<BlockReader> block_reader(IoPath path);

// Whether this build has io_uring and the kernel allows it. Asks once.
bool has_uring();

}  // namespace dynemb::cpu
