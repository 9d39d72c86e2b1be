// Reads and writes of pages that threads do while their caller goes on.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace dynemb::cpu {

// A read or write. Neither it nor its memory may move or end before it is done.
struct FileTransfer {
  bool writes = false;
  bool cached = false;  // the file is in the page cache: a write begins the way to the disk
  int file = -1;
  int64_t offset = 0;
  char* data = nullptr;
  int64_t bytes = 0;
  int error = 0;     // an errno; EIO if the file ends too soon
  bool done = true;  // for FileThreads
};

// For one caller. A forked process has no such threads and must leave the object as it is.
class FileThreads {
 public:
  FileThreads() = default;
  ~FileThreads();  // all transfers are done
  FileThreads(const FileThreads&) = delete;
  FileThreads& operator=(const FileThreads&) = delete;

  // Begins a transfer; the first one starts the threads.
  void begin(FileTransfer& transfer);
  void wait(const FileTransfer& transfer);
  bool is_done(const FileTransfer& transfer);

 private:
  void start();
  void work();

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<FileTransfer*> queue_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace dynemb::cpu
