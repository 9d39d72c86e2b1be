// The files of a store: a directory that one process holds, and segments of one size in it.
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

#include "cpu/storage/open_files.h"

namespace dynemb::cpu {

// Memory for files that are opened with O_DIRECT: it begins with a page.
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
  int64_t record_bytes;  // 0: the slab has no files
};

class SegmentFiles {
 public:
  // Makes the directory where there is none, locks it and finds the segments that are there.
  // Raises where another process has it, or where segments have another format.
  SegmentFiles(const std::string& path, int64_t segment_bytes, std::vector<SlabFormat> slabs);
  ~SegmentFiles();
  SegmentFiles(const SegmentFiles&) = delete;
  SegmentFiles& operator=(const SegmentFiles&) = delete;

  int64_t segment_bytes() const { return segment_bytes_; }
  const std::string& path() const { return path_; }
  // Of all segments, also of those that this store has not written.
  int64_t bytes() const { return count_ * segment_bytes_; }
  // Bytes that the file system still has for this process.
  int64_t available_bytes() const;
  // Whether reads and writes go past the page cache; where they cannot, pages are dropped from it
  // after they have been used.
  bool direct() const { return direct_; }
  std::string name(size_t slab, int64_t number) const;
  const std::set<int64_t>& numbers(size_t slab) const { return numbers_[slab]; }

  // A segment with the next number, whose bytes are reserved. Its number is 0 where the disk is
  // full; raises for any other failure.
  SegmentFile create(size_t slab);
  // A segment that is there. Raises where it is missing, short, or not one of this slab.
  SegmentFile open(size_t slab, int64_t number);
  // A descriptor, until another one is asked for; within a batch, until its end. -1 where the
  // batch has all that may be open.
  int descriptor(size_t slab, const SegmentFile& file);
  void begin_batch() { open_files_.begin_batch(); }
  void end_batch() { open_files_.end_batch(); }
  // Gives a segment that nothing needs to a slab, under the slab's next number.
  void rename(size_t from, SegmentFile& file, size_t to);
  // Deletes a segment. A file that no store has written is left alone.
  void remove(size_t slab, int64_t number);

  // The first page of a segment.
  void write_header(size_t slab, int64_t number, char* page) const;
  // Writes pages. Raises what the system says.
  void write(size_t slab, const SegmentFile& file, int64_t offset, const char* from, int64_t bytes);
  // Makes the content of a segment durable.
  void sync(size_t slab, const SegmentFile& file);
  // Makes the names of all segments durable.
  void sync_names();
  // Tells the system that pages of a segment will not be read soon. Does nothing for direct files.
  void forget_pages(size_t slab, const SegmentFile& file, int64_t offset, int64_t bytes);

  int64_t bytes_written() const { return bytes_written_; }
  // In a forked child: lets the lock go without a word.
  void forked();

 private:
  std::string directory(size_t slab) const;
  void lock();
  void find_segments();
  int open_file(const std::string& name, int flags) const;
  int open_segment(size_t slab, int64_t number);
  int needed_descriptor(size_t slab, const SegmentFile& file);
  bool is_of_a_store(size_t slab, int64_t number);
  void sync_directory(const std::string& name);

  std::string path_;
  int64_t segment_bytes_;
  std::vector<SlabFormat> slabs_;
  std::vector<std::set<int64_t>> numbers_;  // that are there
  std::vector<int64_t> next_number_;
  std::vector<bool> renamed_;  // whether names of the slab have changed since sync_names()
  std::vector<std::set<int64_t>> found_;  // of numbers_, those of an earlier process
  int64_t count_ = 0;
  int64_t bytes_written_ = 0;
  int lock_ = -1;
  OpenFiles open_files_;
  mutable bool direct_ = true;
};

}  // namespace dynemb::cpu
