#include "cpu/storage/row_store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/storage/forks.h"
#include "cpu/storage/room.h"
#include "cpu/storage/segment_files.h"
#include "cpu/storage/store_worker.h"

namespace dynemb::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// Outcome of a task with a waiting caller.
struct Outcome {
  bool done = false;
  std::exception_ptr error;
};

struct Task {
  std::function<void()> run;
  Outcome* outcome;  // null: no caller waits
  bool is_fatal;     // whether a failure makes the store unusable
};

// The thread, its queue, and its data. A forked child has no such thread and leaves all of this as
// it is.
class StoreThread {
 public:
  StoreThread(const StoreOptions& options, std::vector<CachedSlab> slabs)
      : room_(slabs.size()), worker_(options, std::move(slabs), mutex_, room_) {
    worker_.add_stats(stats_);
    thread_ = std::thread([this] { work(); });
  }

  ~StoreThread() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    queued_.notify_one();
    thread_.join();
  }

  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  StoreWorker& worker() { return worker_; }

  void check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_failure();
  }

  bool has_failed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !failure_.empty();
  }

  bool reserve_ready_space(const std::vector<int64_t>& rows) {
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_failure();
    room_.cancel();
    for (size_t s = 0; s < rows.size(); ++s) {
      if (rows[s] > 0 && !room_.is_enough(s, rows[s])) return false;
    }
    for (size_t s = 0; s < rows.size(); ++s) room_[s].reserved = rows[s];
    return true;
  }

  void expect_space(const std::vector<int64_t>& rows) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t s = 0; s < rows.size(); ++s) {
      room_[s].expected = std::max(room_[s].expected, rows[s]);
    }
    if (is_expecting_) return;
    is_expecting_ = true;
    enqueue({[this] {
               {
                 const std::lock_guard<std::mutex> held(mutex_);
                 is_expecting_ = false;
               }
               worker_.prepare_expected_space();
             },
             nullptr, false});
  }

  void reserve_space(const std::vector<int64_t>& rows) {
    if (reserve_ready_space(rows)) return;
    try {
      call([&] {
        for (size_t s = 0; s < rows.size(); ++s) {
          if (rows[s] > 0) worker_.make_room(s, rows[s]);
        }
      });
    } catch (...) {
      cancel_reservation();
      throw;
    }
  }

  void cancel_reservation() {
    const std::lock_guard<std::mutex> lock(mutex_);
    room_.cancel();
  }

  void submit(std::vector<SlabMoves> job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_failure();
    room_.cancel();
    for (size_t s = 0; s < job.size(); ++s) {
      room_[s].queued += static_cast<int64_t>(job[s].saves.size());
    }
    // by shared_ptr, because a std::function has to be copyable
    auto moves = std::make_shared<std::vector<SlabMoves>>(std::move(job));
    const int64_t number = ++jobs_submitted_;
    enqueue({[this, moves, number] { worker_.run(*moves, [this, number] { moved(number); }); },
             nullptr, true});
  }

  int64_t jobs_submitted() const { return jobs_submitted_; }
  int64_t jobs_done() const { return jobs_done_.load(std::memory_order_acquire); }

  void wait_for(int64_t job) {
    if (jobs_done() >= job) return;
    std::unique_lock<std::mutex> lock(mutex_);
    wait(lock, [&] { return jobs_done() >= job || !failure_.empty(); });
    if (jobs_done() < job) raise_failure();
  }

  void write(size_t slab, const std::vector<RowMove>& rows, const char* records) {
    std::vector<int64_t> of_slabs(room_.size(), 0);
    of_slabs[slab] = static_cast<int64_t>(rows.size());
    reserve_space(of_slabs);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      room_.cancel();
      room_[slab].queued += static_cast<int64_t>(rows.size());
    }
    Outcome outcome;
    std::unique_lock<std::mutex> lock(mutex_);
    raise_failure();
    enqueue({[&] { worker_.write(slab, rows, records); }, &outcome, true});
    // the caller goes on meanwhile
    const int64_t bytes = of_slabs[slab] * worker_.record_bytes(slab);
    enqueue({[this, bytes] { worker_.prepare(bytes); }, nullptr, true});
    wait(lock, [&] { return outcome.done; });
    if (outcome.error) std::rethrow_exception(outcome.error);
  }

  // Runs `f` on the thread, after all jobs, and rethrows its exception.
  void call(std::function<void()> f, bool is_fatal = true) {
    Outcome outcome;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      raise_failure();
      enqueue({std::move(f), &outcome, is_fatal});
      wait(lock, [&] { return outcome.done; });
    }
    if (outcome.error) std::rethrow_exception(outcome.error);
  }

  // Like call(), for a thread beside the training one; its waiting time is not counted.
  void call_aside(std::function<void()> f) {
    Outcome outcome;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      raise_failure();
      enqueue({std::move(f), &outcome, false});
      finished_.wait(lock, [&] { return outcome.done; });
    }
    if (outcome.error) std::rethrow_exception(outcome.error);
  }

  // Waits for the tasks queued so far and their writes: other threads may queue more.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    enqueue({[this] { worker_.finish_writes(); }, nullptr, true});
    const int64_t last = tasks_queued_;
    if (tasks_done_ < last) wait(lock, [&] { return tasks_done_ >= last; });
    raise_failure();
  }

  bool idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_idle();
  }

  StoreStats stats() {
    const std::lock_guard<std::mutex> lock(mutex_);
    StoreStats stats = stats_;
    stats.queued = static_cast<int64_t>(tasks_.size()) + (busy_ ? 1 : 0);
    return stats;
  }

 private:
  void raise_failure() const {
    if (!failure_.empty()) throw std::runtime_error(failure_);
  }
  bool is_idle() const { return tasks_.empty() && !busy_; }

  void enqueue(Task task) {
    tasks_.push_back(std::move(task));
    ++tasks_queued_;
    const auto queued = static_cast<int64_t>(tasks_.size()) + (busy_ ? 1 : 0);
    stats_.most_queued = std::max(stats_.most_queued, queued);
    queued_.notify_one();
  }

  template <class Condition>
  void wait(std::unique_lock<std::mutex>& lock, const Condition& condition) {
    const auto begin = Clock::now();
    finished_.wait(lock, condition);
    const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin);
    stats_.waited_us += waited.count();
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      queued_.wait(lock, [&] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      std::exception_ptr error;
      std::string failure = failure_;
      lock.unlock();
      if (failure.empty()) {
        error = run(task, failure);
      } else {
        error = std::make_exception_ptr(std::runtime_error(failure));
      }
      lock.lock();
      if (failure_.empty()) failure_ = std::move(failure);
      worker_.add_stats(stats_);
      busy_ = false;
      ++tasks_done_;
      if (task.outcome != nullptr) *task.outcome = {true, error};
      finished_.notify_all();
    }
  }

  void moved(int64_t job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_done_.store(job, std::memory_order_release);
    }
    finished_.notify_all();
  }

  // Returns the exception of the task; sets `failure` if it makes the store unusable.
  static std::exception_ptr run(const Task& task, std::string& failure) {
    try {
      task.run();
    } catch (const Refusal&) {
      return std::current_exception();
    } catch (const std::exception& error) {
      if (task.is_fatal) failure = error.what();
      return std::current_exception();
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable finished_;
  std::deque<Task> tasks_;
  int64_t tasks_queued_ = 0;
  int64_t tasks_done_ = 0;
  bool busy_ = false;
  bool ends_ = false;
  bool is_expecting_ = false;  // a task to prepare expected space is queued
  std::string failure_;
  int64_t jobs_submitted_ = 0;  // by callers, one at a time
  std::atomic<int64_t> jobs_done_{0};
  StoreStats stats_{};
  Room room_;
  StoreWorker worker_;
  std::thread thread_;
};

class ThreadedStore : public RowStore {
 public:
  ThreadedStore(const StoreOptions& options, std::vector<CachedSlab> slabs)
      : forks_(forks()), thread_(std::make_unique<StoreThread>(options, std::move(slabs))) {
    in_child_ = at_fork([this] { thread_->worker().files().forked(); });
  }

  ~ThreadedStore() override {
    if (forks() != forks_) {
      static_cast<void>(thread_.release());  // the thread exists in the parent only
      return;
    }
    forget_fork(in_child_);
  }

  void check() override { thread().check(); }
  void reserve_space(const std::vector<int64_t>& rows) override { thread().reserve_space(rows); }
  bool reserve_ready_space(const std::vector<int64_t>& rows) override {
    return thread().reserve_ready_space(rows);
  }
  void expect_space(const std::vector<int64_t>& rows) override { thread().expect_space(rows); }
  void cancel_reservation() override { thread().cancel_reservation(); }
  void submit(std::vector<SlabMoves> job) override { thread().submit(std::move(job)); }
  void drain() override { thread().drain(); }
  bool idle() override { return thread().idle(); }
  int64_t jobs_submitted() override { return thread().jobs_submitted(); }
  int64_t jobs_done() override { return thread().jobs_done(); }
  void wait_for(int64_t job) override { thread().wait_for(job); }
  bool has_record(size_t slab, int64_t handle) override {
    return thread().worker().has_record(slab, handle);
  }
  void prefetch_record(size_t slab, int64_t handle) override {
    thread().worker().prefetch_record(slab, handle);
  }

  void read(size_t slab, const std::vector<RowMove>& rows, char* records, uint8_t* found) override {
    thread().call([&] { thread_->worker().read(slab, rows, records, found); }, /*is_fatal=*/false);
  }
  void write(size_t slab, const std::vector<RowMove>& rows, const char* records) override {
    thread().write(slab, rows, records);
  }
  void erase(size_t slab, const std::vector<int64_t>& handles) override {
    thread().call([&] { thread_->worker().erase(slab, handles); });
  }
  std::vector<SlabSnapshot> sync() override {
    std::vector<SlabSnapshot> snapshot;
    thread().call([&] { snapshot = thread_->worker().sync(); });
    return snapshot;
  }
  void keep(const std::vector<std::vector<int64_t>>& files) override {
    thread().call([&] { thread_->worker().keep(files); }, /*is_fatal=*/false);
  }
  void load(const std::vector<SlabSnapshot>& snapshot) override {
    thread().call([&] { thread_->worker().load(snapshot); });
  }
  int64_t pin() override {
    int64_t number = 0;
    thread().call([&] { number = thread_->worker().pin(); });
    return number;
  }
  void read_pinned(int64_t pin, size_t slab, const std::vector<RowMove>& rows, char* records,
                   uint8_t* found) override {
    thread().call_aside([&] { thread_->worker().read_pinned(pin, slab, rows, records, found); });
  }
  void release(int64_t pin) override {
    if (forks() != forks_) return;
    try {
      thread_->call_aside([&] { thread_->worker().release(pin); });
    } catch (const Refusal&) {
      throw;
    } catch (const std::exception&) {
      if (!thread_->has_failed()) throw;  // otherwise every other call raises it
    }
  }
  StoreStats stats() override { return thread().stats(); }

 private:
  StoreThread& thread() {
    DYNEMB_CHECK(
        forks() == forks_,
        "dynemb: a forked process cannot use the store of its parent, because it lacks "
        "the store's thread: start processes with the method spawn, and give each a path of "
        "its own",
        kForkedProcessError);
    return *thread_;
  }

  int64_t forks_;
  std::unique_ptr<StoreThread> thread_;
  int64_t in_child_ = 0;
};

}  // namespace

std::shared_ptr<RowStore> RowStore::open(const StoreOptions& options,
                                         std::vector<CachedSlab> slabs) {
  return std::make_shared<ThreadedStore>(options, std::move(slabs));
}

}  // namespace dynemb::cpu
