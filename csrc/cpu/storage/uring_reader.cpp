#include "cpu/storage/uring_reader.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/runtime/check.h"
#include "cpu/storage/block_progress.h"

#if defined(DYNEMB_HAS_URING)
#include <liburing.h>
#endif

namespace dynemb::cpu {

#if defined(DYNEMB_HAS_URING)
namespace {

constexpr unsigned kDepth = 64;  // blocks in the kernel at a time

// Old kernels, containers, limits of locked memory.
bool is_refusal(int error) {
  return error == ENOSYS || error == EPERM || error == EACCES || error == ENOMEM;
}

class UringReader final : public BlockReader {
 public:
  UringReader() { open(); }
  ~UringReader() override {
    if (process_.is_this()) {
      if (is_open_) io_uring_queue_exit(&ring_);
    } else {
      // The parent goes on with its ring. Its mappings are left, since other memory may lie there
      // in this process.
      close(ring_.ring_fd);
    }
  }
  UringReader(const UringReader&) = delete;
  UringReader& operator=(const UringReader&) = delete;

  std::vector<BlockFailure> read(const std::vector<BlockRead>& blocks,
                                 const std::function<void(size_t)>& done) override {
    process_.check();
    if (!is_open_) open();
    std::vector<BlockFailure> failures;
    for (unsigned slot = 0; slot < kDepth; ++slot) free_[slot] = slot;
    free_count_ = kDepth;
    size_t next = 0;
    int error = 0;
    while (error == 0 && (next < blocks.size() || free_count_ < kDepth)) {
      for (; next < blocks.size() && free_count_ > 0; ++next) {
        const unsigned slot = free_[--free_count_];
        slots_[slot] = {next, {}};
        prepare(slot, blocks[next]);
      }
      error = submit_and_wait();
      if (error == 0) reap(blocks, done, failures);
    }
    if (error != 0) give_up(blocks, done, failures, next, error);
    std::sort(failures.begin(), failures.end(),
              [](const BlockFailure& a, const BlockFailure& b) { return a.block < b.block; });
    return failures;
  }

  IoPath path() const override { return IoPath::kUring; }

 private:
  struct Slot {
    size_t block;
    BlockProgress progress;
  };

  void open() {
    const int error = -io_uring_queue_init(kDepth, &ring_, 0);
    DYNEMB_CHECK(error == 0, "the kernel makes no io_uring: ", std::strerror(error));
    is_open_ = true;
  }

  // The queue has space for all blocks in the kernel.
  void prepare(unsigned slot, const BlockRead& block) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    const int64_t read = slots_[slot].progress.read;
    io_uring_prep_read(entry, block.file, block.to + read,
                       static_cast<unsigned>(std::min(block.bytes - read, kMostBytes)),
                       static_cast<uint64_t>(block.offset + read));
    io_uring_sqe_set_data64(entry, slot);
  }

  // An errno, or 0.
  int submit_and_wait() {
    while (true) {
      const int result = io_uring_submit_and_wait(&ring_, 1);
      if (result >= 0) return 0;
      // the kernel has no memory for more until some of its reads are done
      const bool waits = (result == -EAGAIN || result == -EBUSY) && in_kernel() > 0;
      if (waits) return -wait();
      if (result != -EINTR) return -result;
    }
  }

  int wait() {
    io_uring_cqe* entry;
    int result;
    do {
      result = io_uring_wait_cqe(&ring_, &entry);
    } while (result == -EINTR);
    return result;
  }

  unsigned in_kernel() const { return kDepth - free_count_ - io_uring_sq_ready(&ring_); }

  void reap(const std::vector<BlockRead>& blocks, const std::function<void(size_t)>& done,
            std::vector<BlockFailure>& failures) {
    io_uring_cqe* entry;
    unsigned head;
    unsigned seen = 0;
    io_uring_for_each_cqe(&ring_, head, entry) {
      ++seen;
      const auto slot = static_cast<unsigned>(io_uring_cqe_get_data64(entry));
      const int result = entry->res;
      const size_t i = slots_[slot].block;
      if (result == -EINTR || result == -EAGAIN) {
        prepare(slot, blocks[i]);
        continue;
      }
      BlockProgress& progress = slots_[slot].progress;
      if (result >= 0) progress = progress.after(result, blocks[i]);
      if (result >= 0 && progress.state == BlockProgress::State::kMore) {
        prepare(slot, blocks[i]);
        continue;
      }
      free_[free_count_++] = slot;
      if (progress.state == BlockProgress::State::kWhole) {
        done(i);
      } else {
        failures.push_back({i, result < 0 ? -result : 0});
      }
    }
    io_uring_cq_advance(&ring_, seen);
  }

  // Waits for the reads in the kernel, since it writes to the caller's memory; reads that it has
  // not taken have failed. The next read opens another ring, without leftovers of this one.
  void give_up(const std::vector<BlockRead>& blocks, const std::function<void(size_t)>& done,
               std::vector<BlockFailure>& failures, size_t next, int error) {
    while (in_kernel() > 0 && wait() == 0) reap(blocks, done, failures);
    std::array<bool, kDepth> is_free{};
    for (unsigned i = 0; i < free_count_; ++i) is_free[free_[i]] = true;
    for (unsigned slot = 0; slot < kDepth; ++slot) {
      if (!is_free[slot]) failures.push_back({slots_[slot].block, error});
    }
    for (; next < blocks.size(); ++next) failures.push_back({next, error});
    io_uring_queue_exit(&ring_);
    is_open_ = false;
  }

  static constexpr int64_t kMostBytes = int64_t{1} << 30;  // of one read of the kernel

  OwningProcess process_;
  io_uring ring_{};
  bool is_open_ = false;
  std::array<Slot, kDepth> slots_{};
  std::array<unsigned, kDepth> free_{};
  unsigned free_count_ = kDepth;
};

}  // namespace

bool uring_is_allowed() {
  io_uring ring;
  const int error = -io_uring_queue_init(1, &ring, 0);
  if (is_refusal(error)) return false;
  DYNEMB_CHECK(error == 0,
               "whether the kernel allows io_uring is not known: ", std::strerror(error));
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);  // none before Linux 5.6, as of the reads
  const bool has_reads = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ);
  io_uring_free_probe(probe);
  io_uring_queue_exit(&ring);
  return has_reads;
}

std::unique_ptr<BlockReader> uring_reader() { return std::make_unique<UringReader>(); }

#else

bool uring_is_allowed() { return false; }

std::unique_ptr<BlockReader> uring_reader() {
  DYNEMB_CHECK(false, "torch_dynemb was built without liburing");
}

#endif
}  // namespace dynemb::cpu
