// The files of a store: a directory that one process has locked, and segments of one size in it.
//
//   PATH/LOCK                          held by flock; has the process' id
//   PATH/FORMAT                        JSON: version, bytes of a segment, bytes of a slab's records
//   PATH/rows/<slab>/<number:08x>      segments; a number is not used twice
//
// Other files in these folders are left alone.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "cpu/storage/file_threads.h"
#include "cpu/storage/open_files.h"

namespace dynemb::cpu {

// Memory for files opened with O_DIRECT, aligned to pages.
class PageBuffer {
 public:
  explicit PageBuffer(int64_t bytes);
  ~PageBuffer();
  PageBuffer(const PageBuffer&) = delete;
  PageBuffer& operator=(const PageBuffer&) = delete;
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_;
  int64_t bytes_;
};

struct SegmentFile {
  int64_t number;  // 0: none
};

struct SlabFormat {
  std::string name;      // of its directory
  int64_t record_bytes;  // 0: no files
};

class SegmentFiles {
 public:
  // Creates the directory if needed, locks it and lists the existing segments. Raises if another
  // process has it, or if segments have another format.
  SegmentFiles(const std::string& path, int64_t segment_bytes, std::vector<SlabFormat> slabs);
  ~SegmentFiles();
  SegmentFiles(const SegmentFiles&) = delete;
  SegmentFiles& operator=(const SegmentFiles&) = delete;

  int64_t segment_bytes() const { return segment_bytes_; }
  const std::string& path() const { return path_; }
  // Of all segments, including those of earlier processes.
  int64_t bytes() const { return count_ * segment_bytes_; }
  // Bytes that the file system has left for this process.
  int64_t available_bytes() const;
  // Whether reads and writes bypass the page cache; otherwise pages are dropped from it after use.
  bool direct() const { return direct_; }
  std::string name(size_t slab, int64_t number) const;
  const std::set<int64_t>& numbers(size_t slab) const { return numbers_[slab]; }

  // Creates a segment with the next number, and reserves its bytes. The number is 0 if the disk is
  // full; raises for any other failure.
  SegmentFile create(size_t slab);
  // Opens an existing segment. Raises if it is missing, short, or of another slab.
  SegmentFile open(size_t slab, int64_t number);
  // A descriptor, valid until the next call; within a batch, until its end. -1 if the batch has
  // reached the limit of open files.
  int descriptor(size_t slab, const SegmentFile& file);
  void begin_batch() { open_files_.begin_batch(); }
  void end_batch() { open_files_.end_batch(); }
  // Gives an unused segment to a slab, under the slab's next number.
  void rename(size_t from, SegmentFile& file, size_t to);
  // Deletes a segment. Leaves files alone that no store has written.
  void remove(size_t slab, int64_t number);

  // Fills in the first page of a segment.
  void write_header(size_t slab, int64_t number, char* page) const;
  // Begins to write or to read pages on another thread. Until the transfer has ended, its memory
  // stays, and the segment is neither renamed nor deleted.
  void begin_write(size_t slab, const SegmentFile& file, int64_t offset, char* from, int64_t bytes,
                   FileTransfer& transfer);
  void begin_read(size_t slab, const SegmentFile& file, int64_t offset, char* to, int64_t bytes,
                  FileTransfer& transfer);
  bool is_done(const FileTransfer& transfer) { return threads_.is_done(transfer); }
  // Waits for a transfer. Each one that has begun ends here once.
  void end_transfer(size_t slab, int64_t number, const FileTransfer& transfer);
  // Raises the error of a transfer that has ended, if it has one.
  void raise_fault(size_t slab, int64_t number, const FileTransfer& transfer) const;
  // Makes the content of a segment durable.
  void sync(size_t slab, const SegmentFile& file);
  // Makes the names of all segments durable.
  void sync_names();
  // Drops pages of a segment from the page cache. Does nothing for direct files.
  void forget_pages(size_t slab, const SegmentFile& file, int64_t offset, int64_t bytes);

  int64_t bytes_written() const { return bytes_written_; }
  // In a forked child: closes the lock without unlocking it.
  void forked();

 private:
  std::string directory(size_t slab) const;
  void lock();
  void find_segments();
  int open_file(const std::string& name, int flags) const;
  int open_segment(size_t slab, int64_t number);
  int needed_descriptor(size_t slab, const SegmentFile& file);
  void begin(bool writes, size_t slab, const SegmentFile& file, int64_t offset, char* data,
             int64_t bytes, FileTransfer& transfer);
  bool is_of_a_store(size_t slab, int64_t number);
  void sync_directory(const std::string& name);

  std::string path_;
  int64_t segment_bytes_;
  std::vector<SlabFormat> slabs_;
  std::vector<std::set<int64_t>> numbers_;  // of existing segments
  std::vector<int64_t> next_number_;
  std::vector<bool> renamed_;  // whether names of the slab have changed since sync_names()
  std::vector<std::set<int64_t>> found_;  // segments in numbers_ from an earlier process
  int64_t count_ = 0;
  int64_t bytes_written_ = 0;
  int lock_ = -1;
  OpenFiles open_files_;
  mutable bool direct_ = true;
  FileThreads threads_;
};

}  // namespace dynemb::cpu
