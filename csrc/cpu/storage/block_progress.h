// What both ways of reading blocks have in common.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "cpu/storage/block_io.h"

namespace dynemb::cpu {

// How far the read of a block has come: systems may give less than they are asked for.
struct BlockProgress {
  enum class State : int8_t {
    kMore,   // of the block is to be read, from `read` on
    kWhole,  // all of it has arrived
    kEnded,  // the file is shorter
  };

  int64_t read = 0;  // bytes, whole pages
  int64_t end = -1;  // where the last read has ended
  State state = State::kMore;

  // After a read of the bytes from `read` on has brought `got` of them, 0 at the end of the file.
  BlockProgress after(int64_t got, const BlockRead& block) const;
};

// The process that an object was made in. One that is forked from it has neither its threads nor
// an io_uring of its own.
class OwningProcess {
 public:
  OwningProcess();
  bool is_this() const;
  void check() const;  // raises in another process

 private:
  pid_t pid_;
};

}  // namespace dynemb::cpu
