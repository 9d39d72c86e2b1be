#include "cpu/storage/block_progress.h"

#include <unistd.h>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"

namespace dynemb::cpu {

BlockProgress BlockProgress::after(int64_t got, const BlockRead& block) const {
  if (got <= 0) return {read, end, State::kEnded};
  const int64_t new_end = read + got;
  if (new_end >= block.bytes) return {block.bytes, new_end, State::kWhole};
  // Reads with O_DIRECT begin at pages, so some bytes are read again. The file ends here if that
  // brings no more.
  if (new_end == end) return {read, end, State::kEnded};
  return {new_end / kPageBytes * kPageBytes, new_end, State::kMore};
}

OwningProcess::OwningProcess() : pid_(getpid()) {}

bool OwningProcess::is_this() const { return getpid() == pid_; }

void OwningProcess::check() const {
  DYNEMB_CHECK(is_this(), "process ", getpid(), " was forked from process ", pid_,
               " and cannot read files with its reader: start processes by spawn, or open the "
               "files in each of them",
               kForkedProcessError);
}

}  // namespace dynemb::cpu
