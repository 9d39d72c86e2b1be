#include "cpu/storage/thread_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/runtime/check.h"
#include "cpu/storage/block_progress.h"
#include "cpu/storage/own_threads.h"

namespace dynemb::cpu {
namespace {

constexpr size_t kThreads = 32;
// Finished reads per wake-up of the caller: waking it for each costs 15 to 40 % of the reads per
// second.
constexpr size_t kOutcomes = 32;

// Result of a block's read.
struct Outcome {
  size_t block;
  bool is_whole;
  int error;
};

Outcome read_block(size_t i, const BlockRead& block) {
  BlockProgress progress;
  while (progress.state == BlockProgress::State::kMore) {
    const int64_t read = progress.read;
    const ssize_t got = pread(block.file, block.to + read, static_cast<size_t>(block.bytes - read),
                              block.offset + read);
    if (got >= 0) {
      progress = progress.after(got, block);
    } else if (errno != EINTR) {
      return {i, false, errno};
    }
  }
  return {i, progress.state == BlockProgress::State::kWhole, 0};
}

// Threads that take blocks from a list, each the next one.
class Pool {
 public:
  Pool() {
    const int error = start_threads(threads_, kThreads, [this] { work(); });
    if (error == 0) return;
    end();
    DYNEMB_CHECK(false, "the system starts ", threads_.size(), " of ", kThreads,
                 " threads that read files: ", std::generic_category().message(error),
                 ". Raise the limit of processes (ulimit -u) or of memory (ulimit -v)");
  }
  ~Pool() { end(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void begin(const std::vector<BlockRead>& blocks) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      blocks_ = &blocks;
      next_ = 0;
      outcomes_.reserve(blocks.size());
    }
    for (size_t i = std::min(blocks.size(), kThreads); i > 0; --i) work_.notify_one();
  }

  // Waits for many of the `left` outstanding outcomes, and swaps them into `outcomes`.
  void take(size_t left, std::vector<Outcome>& outcomes) {
    outcomes.clear();
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = std::min(left, kOutcomes);
    arrived_.wait(lock, [this] { return outcomes_.size() >= wanted_; });
    outcomes_.swap(outcomes);
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return ends_ || blocks_ != nullptr; });
      if (ends_) return;
      const size_t i = next_++;
      const BlockRead block = (*blocks_)[i];
      if (next_ == blocks_->size()) blocks_ = nullptr;
      lock.unlock();
      const Outcome outcome = read_block(i, block);
      lock.lock();
      outcomes_.push_back(outcome);
      if (outcomes_.size() == wanted_) arrived_.notify_one();
    }
  }

  void end() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable arrived_;
  const std::vector<BlockRead>* blocks_ = nullptr;  // some are not taken yet
  size_t next_ = 0;                                 // of them
  std::vector<Outcome> outcomes_;                   // not collected yet
  size_t wanted_ = 0;                               // number the caller waits for
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

class ThreadReader final : public BlockReader {
 public:
  ThreadReader() = default;
  ~ThreadReader() override {
    // A forked process has the pool without its threads, which cannot be joined.
    if (!process_.is_this()) (void)pool_.release();
  }
  ThreadReader(const ThreadReader&) = delete;
  ThreadReader& operator=(const ThreadReader&) = delete;

  std::vector<BlockFailure> read(const std::vector<BlockRead>& blocks,
                                 const std::function<void(size_t)>& done) override {
    process_.check();
    std::vector<BlockFailure> failures;
    const auto finish = [&](const Outcome& outcome) {
      if (outcome.is_whole) {
        done(outcome.block);
      } else {
        failures.push_back({outcome.block, outcome.error});
      }
    };
    if (blocks.size() == 1) {
      finish(read_block(0, blocks[0]));
      return failures;
    }
    if (blocks.empty()) return failures;
    if (pool_ == nullptr) pool_ = std::make_unique<Pool>();
    pool_->begin(blocks);
    std::vector<Outcome> outcomes;
    outcomes.reserve(blocks.size());  // the pool's threads must not allocate
    for (size_t finished = 0; finished < blocks.size(); finished += outcomes.size()) {
      pool_->take(blocks.size() - finished, outcomes);
      for (const Outcome& outcome : outcomes) finish(outcome);
    }
    std::sort(failures.begin(), failures.end(),
              [](const BlockFailure& a, const BlockFailure& b) { return a.block < b.block; });
    return failures;
  }

  IoPath path() const override { return IoPath::kThreads; }

 private:
  OwningProcess process_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace

std::unique_ptr<BlockReader> thread_reader() { return std::make_unique<ThreadReader>(); }

}  // namespace dynemb::cpu
