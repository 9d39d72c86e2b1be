#include "cpu/storage/file_threads.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/runtime/check.h"
#include "cpu/storage/own_threads.h"

namespace dynemb::cpu {
namespace {

constexpr size_t kThreads = 4;

// An errno, or 0.
int transfer_pages(const FileTransfer& t) {
  for (int64_t done = 0; done < t.bytes;) {
    const auto left = static_cast<size_t>(t.bytes - done);
    const auto at = static_cast<off_t>(t.offset + done);
    const ssize_t some =
        t.writes ? pwrite(t.file, t.data + done, left, at) : pread(t.file, t.data + done, left, at);
    if (some < 0 && errno == EINTR) continue;
    if (some <= 0) return some < 0 ? errno : EIO;
    done += some;
  }
  // so that a later fsync is short and the pages can be dropped
  if (t.writes && t.cached) sync_file_range(t.file, t.offset, t.bytes, SYNC_FILE_RANGE_WRITE);
  return 0;
}

}  // namespace

FileThreads::~FileThreads() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// One thread is enough to go on, so a limit of threads only makes transfers slower.
void FileThreads::start() {
  const int error = start_threads(threads_, kThreads, [this] { work(); });
  DYNEMB_CHECK(!threads_.empty(), "dynemb: the system starts no thread that writes files: ",
               std::generic_category().message(error),
               ". Raise the limit of processes (ulimit -u) or of memory (ulimit -v)");
}

void FileThreads::begin(FileTransfer& transfer) {
  if (threads_.empty()) start();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(&transfer);
    transfer.done = false;
    transfer.error = 0;
  }
  work_.notify_one();
}

void FileThreads::wait(const FileTransfer& transfer) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return transfer.done; });
}

bool FileThreads::is_done(const FileTransfer& transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return transfer.done;
}

void FileThreads::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) return;
    FileTransfer& transfer = *queue_.front();
    queue_.pop_front();
    lock.unlock();
    const int error = transfer_pages(transfer);
    lock.lock();
    transfer.error = error;
    transfer.done = true;
    done_.notify_one();
  }
}

}  // namespace dynemb::cpu
