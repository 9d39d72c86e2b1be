#include "cpu/storage/open_files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "cpu/storage/file_errors.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kShare = 4;        // a store may use 1 / kShare of the process' descriptors
constexpr int64_t kLeastFiles = 16;  // each store may use so many, whatever others have
constexpr int64_t kMostFiles = 1 << 16;
constexpr int kTries = 4;  // another thread may take the descriptor that was closed for a file

std::atomic<int64_t>& open_in_process() {
  static std::atomic<int64_t> count{0};
  return count;
}

bool has_no_descriptor(int error) { return error == EMFILE || error == ENFILE; }

}  // namespace

int64_t OpenFiles::limit() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return kMostFiles;
  return std::clamp(static_cast<int64_t>(files.rlim_cur) / kShare, kLeastFiles, kMostFiles);
}

OpenFiles::OpenFiles() { reserve(); }

OpenFiles::~OpenFiles() {
  for (const File& file : files_) ::close(file.descriptor);
  open_in_process() -= static_cast<int64_t>(files_.size());
  if (reserve_ >= 0) ::close(reserve_);
}

void OpenFiles::reserve() {
  if (reserve_ < 0) reserve_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
}

bool OpenFiles::close_oldest() {
  const auto last =
      std::find_if(files_.rbegin(), files_.rend(), [](const File& file) { return file.pins == 0; });
  if (last == files_.rend() || last->last_use >= batch_begin_) return false;
  const File& oldest = *last;
  if (oldest.unsynced && sync_) {
    // the system reports a failed write to a descriptor that was open at that time
    const int error = sync_(oldest.descriptor);
    if (error != 0) raise_file_error("fdatasync of", "a segment that is to be closed", error);
  }
  ::close(oldest.descriptor);
  const auto found = by_key_.find(oldest.key);
  files_.erase(found->second);
  by_key_.erase(found);
  --open_in_process();
  return true;
}

int OpenFiles::open_once(const std::function<int()>& open) {
  int descriptor = open();
  for (int k = 0; k < kTries && descriptor < 0 && has_no_descriptor(errno); ++k) {
    const int error = errno;
    if (!close_oldest()) {
      if (reserve_ < 0) {
        errno = error;
        return -1;
      }
      ::close(reserve_);
      reserve_ = -1;
    }
    descriptor = open();
  }
  const int error = errno;
  reserve();
  errno = error;
  return descriptor;
}

int OpenFiles::get(const Key& key, const std::function<int()>& open) {
  while (static_cast<int64_t>(files_.size()) >= kLeastFiles && open_in_process() >= limit()) {
    if (!close_oldest()) {
      errno = EMFILE;
      return -1;
    }
  }
  const int descriptor = open_once(open);
  if (descriptor < 0) return -1;
  files_.push_front({key, descriptor, ++uses_, false, 0});
  by_key_[key] = files_.begin();
  ++open_in_process();
  return descriptor;
}

void OpenFiles::set_unsynced(const Key& key, bool unsynced) {
  const auto found = by_key_.find(key);
  if (found != by_key_.end()) found->second->unsynced = unsynced;
}

void OpenFiles::close(const Key& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return;
  ::close(found->second->descriptor);
  files_.erase(found->second);
  by_key_.erase(found);
  --open_in_process();
}

void OpenFiles::rename(const Key& from, const Key& to) {
  const auto found = by_key_.find(from);
  if (found == by_key_.end()) return;
  const auto file = found->second;
  by_key_.erase(found);
  file->key = to;
  by_key_[to] = file;
}

}  // namespace dynemb::cpu
