// The files of a store: a directory that one process holds, and segments of one size in it.
//
//   PATH/LOCK                          held by flock; has the process' id
//   PATH/FORMAT                        JSON: version, bytes of a segment, bytes of a slab's records
//   PATH/rows/<slab>/<number:08x>      segments; a number is not used twice
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

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
  int descriptor;
  int64_t number;
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

  // A segment with the next number, whose bytes are reserved. Its descriptor is -1 where the disk
  // is full; raises for any other failure.
  SegmentFile create(size_t slab);
  // A segment that is there. Raises where it is missing, short, or not one of this slab.
  SegmentFile open(size_t slab, int64_t number) const;
  // Gives a segment that nothing needs to a slab, under the slab's next number.
  void rename(size_t from, SegmentFile& file, size_t to);
  // Deletes a segment that is not open.
  void remove(size_t slab, int64_t number);

  // The first page of a segment.
  void write_header(size_t slab, int64_t number, char* page) const;
  // Writes pages. Raises what the system says.
  void write(size_t slab, const SegmentFile& file, int64_t offset, const char* from, int64_t bytes);
  // Makes the content of a segment durable.
  void sync(size_t slab, const SegmentFile& file) const;
  // Makes the names of all segments durable.
  void sync_names();
  // Tells the system that pages of a segment will not be read soon. Does nothing for direct files.
  void forget_pages(const SegmentFile& file, int64_t offset, int64_t bytes) const;

  int64_t bytes_written() const { return bytes_written_; }
  // In a forked child: lets the lock go without a word.
  void forked();

 private:
  std::string directory(size_t slab) const;
  void lock();
  void find_segments();
  int open_file(const std::string& name, int flags) const;

  std::string path_;
  int64_t segment_bytes_;
  std::vector<SlabFormat> slabs_;
  std::vector<std::set<int64_t>> numbers_;  // that are there
  std::vector<int64_t> next_number_;
  std::vector<bool> renamed_;  // whether names of the slab have changed since sync_names()
  int64_t count_ = 0;
  int64_t bytes_written_ = 0;
  int lock_ = -1;
  mutable bool direct_ = true;
};

}  // namespace dynemb::cpu
