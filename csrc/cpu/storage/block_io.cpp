#include "cpu/storage/block_io.h"

#include "core/runtime/check.h"
#include "cpu/storage/thread_reader.h"
#include "cpu/storage/uring_reader.h"

namespace dynemb::cpu {

bool has_uring() {
  static const bool allowed = uring_is_allowed();
  return allowed;
}

std::unique_ptr<BlockReader> block_reader(IoPath path) {
  switch (path) {
    case IoPath::kThreads:
      return thread_reader();
    case IoPath::kUring:
      DYNEMB_CHECK(has_uring(), "io is uring, but ",
                   kBuiltWithUring ? "the kernel does not allow io_uring here, as in many "
                                     "containers"
                                   : "torch_dynemb was built without liburing",
                   ": use threads, or auto");
      return uring_reader();
    case IoPath::kAuto:
      return has_uring() ? uring_reader() : thread_reader();
  }
  DYNEMB_CHECK(false, "io is ", static_cast<int64_t>(path), ", expected 0 to ", kIoPaths - 1);
}

}  // namespace dynemb::cpu
