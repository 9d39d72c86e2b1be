// Shared parts of both ways of reading blocks.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "cpu/storage/block_io.h"

namespace dynemb::cpu {

// Progress of a block's read: systems may return less than requested.
struct BlockProgress {
  enum class State : int8_t {
    kMore,   // of the block remains, from `read` on
    kWhole,  // all of it has arrived
    kEnded,  // the file is shorter
  };

  int64_t read = 0;  // bytes, whole pages
  int64_t end = -1;  // where the last read has ended
  State state = State::kMore;

  // Updates the progress after a read from `read` on has returned `got` bytes, 0 at the end of the
  // file.
  BlockProgress after(int64_t got, const BlockRead& block) const;
};

// The process that an object was made in. A fork of it has neither its threads nor its io_uring.
class OwningProcess {
 public:
  OwningProcess();
  bool is_this() const;
  void check() const;  // raises in another process

 private:
  pid_t pid_;
};

}  // namespace dynemb::cpu
