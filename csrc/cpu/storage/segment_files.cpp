#include "cpu/storage/segment_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <utility>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "core/storage/record.h"
#include "cpu/storage/crc32c.h"
#include "cpu/storage/file_errors.h"
#include "cpu/storage/store_format.h"

namespace dynemb::cpu {
namespace {

constexpr char kMagic[8] = {'D', 'Y', 'N', 'E', 'M', 'B', 'S', 'G'};

struct SegmentHeader {
  char magic[8];
  uint32_t version;
  uint32_t crc;  // of what follows
  int64_t record_bytes;
  int64_t segment_bytes;
  int64_t number;
};

SegmentHeader segment_header(int64_t record_bytes, int64_t segment_bytes, int64_t number) {
  SegmentHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kStoreVersion;
  header.record_bytes = record_bytes;
  header.segment_bytes = segment_bytes;
  header.number = number;
  header.crc = crc32c(0, &header.record_bytes, 3 * sizeof(int64_t));
  return header;
}

void make_directories(const std::string& name) {
  std::error_code error;
  std::filesystem::create_directories(name, error);
  if (error) raise_file_error("making the directory", name, error.value());
}

bool is_full(int error) { return error == ENOSPC || error == EDQUOT; }

}  // namespace

void raise_file_error(const char* what, const std::string& file, int error) {
  DYNEMB_CHECK(error != EMFILE && error != ENFILE, "dynemb: ", what, " ", file,
               " failed: ", std::strerror(error),
               ": nothing has changed. Raise the limit (ulimit -n), or close files");
  DYNEMB_CHECK(false, "dynemb: ", what, " ", file, " failed: ", std::strerror(error),
               is_full(error) ? kDiskFullError : "");
  std::abort();  // not reached
}

PageBuffer::PageBuffer(int64_t bytes) : bytes_(bytes) {
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(data);
}

PageBuffer::~PageBuffer() { munmap(data_, static_cast<size_t>(bytes_)); }

SegmentFiles::SegmentFiles(const std::string& path, int64_t segment_bytes,
                           std::vector<SlabFormat> slabs)
    : path_(path),
      segment_bytes_(segment_bytes),
      slabs_(std::move(slabs)),
      numbers_(slabs_.size()),
      next_number_(slabs_.size(), 1),
      renamed_(slabs_.size(), true),
      found_(slabs_.size()) {
  open_files_.sync_by([](int descriptor) { return fdatasync(descriptor) == 0 ? 0 : errno; });
  make_directories(path_ + "/rows");
  lock();
  try {
    find_segments();
    const StoreFormat format{segment_bytes_, slabs_};
    check_format(path_, format);
    for (size_t slab = 0; slab < slabs_.size(); ++slab) {
      if (slabs_[slab].record_bytes > 0) make_directories(directory(slab));
    }
    write_format(path_, format);
  } catch (...) {
    close(lock_);
    throw;
  }
}

SegmentFiles::~SegmentFiles() {
  if (lock_ < 0) return;
  flock(lock_, LOCK_UN);  // a child that was just forked may not have closed its copy yet
  close(lock_);
}

void SegmentFiles::forked() {
  if (lock_ >= 0) close(lock_);
  lock_ = -1;
}

std::string SegmentFiles::directory(size_t slab) const {
  return path_ + "/rows/" + slabs_[slab].name;
}

std::string SegmentFiles::name(size_t slab, int64_t number) const {
  char text[24];
  std::snprintf(text, sizeof(text), "/%08llx", static_cast<unsigned long long>(number));
  return directory(slab) + text;
}

void SegmentFiles::lock() {
  const std::string name = path_ + "/LOCK";
  lock_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) raise_file_error("opening", name, errno);
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    char holder[24] = {};
    const ssize_t bytes = pread(lock_, holder, sizeof(holder) - 1, 0);
    close(lock_);
    lock_ = -1;
    if (error != EWOULDBLOCK) raise_file_error("locking", name, error);
    const long pid = bytes > 0 ? std::atol(holder) : 0;
    DYNEMB_CHECK(false, "dynemb: path ", path_, " is in use by process ", pid,
                 pid == getpid() ? " (this one)" : "",
                 ": a store belongs to one process and one group of tables at a time. Give this "
                 "one a path of its own, or end that one first",
                 kInUseError);
  }
  char written[24] = {};
  const ssize_t there = pread(lock_, written, sizeof(written), 0);
  const size_t digits = std::strspn(written, "0123456789");
  if (there != 0 && (there != static_cast<ssize_t>(digits) + 1 || written[digits] != '\n')) {
    close(lock_);
    lock_ = -1;
    DYNEMB_CHECK(false, "dynemb: ", name,
                 " is not a file of a store: nothing has changed. Give the tables another path");
  }
  const std::string pid = std::to_string(getpid()) + "\n";
  if (ftruncate(lock_, 0) != 0 ||
      pwrite(lock_, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    const int error = errno;
    close(lock_);
    lock_ = -1;
    raise_file_error("writing", name, error);
  }
}

void SegmentFiles::find_segments() {
  for (size_t slab = 0; slab < slabs_.size(); ++slab) {
    if (slabs_[slab].record_bytes == 0) continue;
    DIR* entries = opendir(directory(slab).c_str());
    if (entries == nullptr) {
      if (errno == ENOENT) continue;
      raise_file_error("opening", directory(slab), errno);
    }
    errno = 0;
    while (const dirent* entry = readdir(entries)) {
      char* end = nullptr;
      const long long number = std::strtoll(entry->d_name, &end, 16);
      if (*end != '\0' || number <= 0 || number == INT64_MAX) continue;
      if (name(slab, number) != directory(slab) + "/" + entry->d_name) continue;
      numbers_[slab].insert(number);
      next_number_[slab] = std::max<int64_t>(next_number_[slab], number + 1);
      ++count_;
      errno = 0;
    }
    const int error = errno;
    closedir(entries);
    if (error != 0) raise_file_error("listing", directory(slab), error);
    found_[slab] = numbers_[slab];
  }
}

int64_t SegmentFiles::available_bytes() const {
  struct statvfs system{};
  if (statvfs(path_.c_str(), &system) != 0) return 0;
  return static_cast<int64_t>(system.f_bavail) * static_cast<int64_t>(system.f_frsize);
}

// With O_DIRECT, or without it on file systems that lack it.
int SegmentFiles::open_file(const std::string& name, int flags) const {
  if (direct_) {
    const int file = ::open(name.c_str(), flags | O_DIRECT | O_CLOEXEC, 0666);
    if (file >= 0 || errno != EINVAL) return file;
    direct_ = false;
  }
  // without O_EXCL: some file systems create the file before they refuse
  const int file = ::open(name.c_str(), (flags & ~O_EXCL) | O_CLOEXEC, 0666);
  if (file >= 0) posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
  return file;
}

SegmentFile SegmentFiles::create(size_t slab) {
  const int64_t number = next_number_[slab];
  const std::string file_name = name(slab, number);
  const int file = open_files_.get({slab, number},
                                   [&] { return open_file(file_name, O_RDWR | O_CREAT | O_EXCL); });
  if (file < 0) {
    if (is_full(errno)) return {0};
    raise_file_error("making", file_name, errno);
  }
  const int error = posix_fallocate(file, 0, segment_bytes_);
  if (error != 0) {
    open_files_.close({slab, number});
    unlink(file_name.c_str());
    if (is_full(error)) return {0};
    raise_file_error("reserving bytes of", file_name, error);
  }
  ++next_number_[slab];
  ++count_;
  numbers_[slab].insert(number);
  renamed_[slab] = true;
  return {number};
}

int SegmentFiles::open_segment(size_t slab, int64_t number) {
  const int there = open_files_.find({slab, number});
  if (there >= 0) return there;
  return open_files_.get({slab, number}, [&] { return open_file(name(slab, number), O_RDWR); });
}

int SegmentFiles::descriptor(size_t slab, const SegmentFile& file) {
  const int descriptor = open_segment(slab, file.number);
  if (descriptor < 0 && errno != EMFILE && errno != ENFILE) {
    raise_file_error("opening", name(slab, file.number), errno);
  }
  return descriptor;
}

int SegmentFiles::needed_descriptor(size_t slab, const SegmentFile& file) {
  const int descriptor = this->descriptor(slab, file);
  if (descriptor < 0) raise_file_error("opening", name(slab, file.number), errno);
  return descriptor;
}

SegmentFile SegmentFiles::open(size_t slab, int64_t number) {
  const std::string file_name = name(slab, number);
  const int file = open_segment(slab, number);
  DYNEMB_CHECK(file >= 0 || errno != ENOENT, "dynemb: the snapshot needs ", file_name,
               ", which is missing: copy it back, or load another snapshot", kDamagedStoreError);
  if (file < 0) raise_file_error("opening", file_name, errno);
  struct stat status{};
  PageBuffer page(kPageBytes);
  const bool known = fstat(file, &status) == 0;
  const ssize_t bytes = pread(file, page.data(), kPageBytes, 0);
  SegmentHeader header;
  std::memcpy(&header, page.data(), sizeof(header));
  const SegmentHeader expected = segment_header(slabs_[slab].record_bytes, segment_bytes_, number);
  const bool whole = known && status.st_size == segment_bytes_ && bytes == kPageBytes;
  const bool same = whole && std::memcmp(&header, &expected, sizeof(header)) == 0;
  if (!same) open_files_.close({slab, number});
  DYNEMB_CHECK(whole, "dynemb: the snapshot needs ", file_name, ", which has ", status.st_size,
               " bytes, expected ", segment_bytes_, ": copy it back, or load another snapshot",
               kDamagedStoreError);
  DYNEMB_CHECK(same, "dynemb: the snapshot needs ", file_name,
               ", but its first page is damaged or of another file: copy it back, or load another "
               "snapshot",
               kDamagedStoreError);
  return {number};
}

void SegmentFiles::rename(size_t from, SegmentFile& file, size_t to) {
  const std::string old_name = name(from, file.number);
  const std::string new_name = name(to, next_number_[to]);
  if (::rename(old_name.c_str(), new_name.c_str()) != 0) {
    raise_file_error("renaming", old_name, errno);
  }
  numbers_[from].erase(file.number);
  found_[from].erase(file.number);
  open_files_.rename({from, file.number}, {to, next_number_[to]});
  file.number = next_number_[to]++;
  numbers_[to].insert(file.number);
  renamed_[from] = renamed_[to] = true;
}

// Also true for a file of zeros: its store ended before it wrote the header.
bool SegmentFiles::is_of_a_store(size_t slab, int64_t number) {
  const std::string file_name = name(slab, number);
  const int file = open_segment(slab, number);
  if (file < 0 && errno == ENOENT) return true;
  if (file < 0) raise_file_error("opening", file_name, errno);
  PageBuffer page(kPageBytes);
  std::memset(page.data(), 0, kPageBytes);
  if (pread(file, page.data(), kPageBytes, 0) < 0) raise_file_error("reading", file_name, errno);
  constexpr char kZeros[sizeof(kMagic)] = {};
  return std::memcmp(page.data(), kMagic, sizeof(kMagic)) == 0 ||
         std::memcmp(page.data(), kZeros, sizeof(kZeros)) == 0;
}

void SegmentFiles::remove(size_t slab, int64_t number) {
  const std::string file_name = name(slab, number);
  const bool delete_it = found_[slab].count(number) == 0 || is_of_a_store(slab, number);
  open_files_.close({slab, number});
  found_[slab].erase(number);
  if (delete_it && unlink(file_name.c_str()) != 0 && errno != ENOENT) {
    raise_file_error("deleting", file_name, errno);
  }
  count_ -= static_cast<int64_t>(numbers_[slab].erase(number));
  renamed_[slab] = true;
}

void SegmentFiles::write_header(size_t slab, int64_t number, char* page) const {
  const SegmentHeader header = segment_header(slabs_[slab].record_bytes, segment_bytes_, number);
  std::memset(page, 0, kPageBytes);
  std::memcpy(page, &header, sizeof(header));
}

void SegmentFiles::begin(bool writes, size_t slab, const SegmentFile& file, int64_t offset,
                         char* data, int64_t bytes, FileTransfer& transfer) {
  const int descriptor = needed_descriptor(slab, file);
  transfer = {writes, !direct_, descriptor, offset, data, bytes};
  threads_.begin(transfer);
  open_files_.pin({slab, file.number});
}

void SegmentFiles::begin_write(size_t slab, const SegmentFile& file, int64_t offset, char* from,
                               int64_t bytes, FileTransfer& transfer) {
  begin(true, slab, file, offset, from, bytes, transfer);
  open_files_.set_unsynced({slab, file.number}, !direct_);
  bytes_written_ += bytes;
}

void SegmentFiles::begin_read(size_t slab, const SegmentFile& file, int64_t offset, char* to,
                              int64_t bytes, FileTransfer& transfer) {
  begin(false, slab, file, offset, to, bytes, transfer);
}

void SegmentFiles::end_transfer(size_t slab, int64_t number, const FileTransfer& transfer) {
  threads_.wait(transfer);
  open_files_.unpin({slab, number});
}

void SegmentFiles::raise_fault(size_t slab, int64_t number, const FileTransfer& transfer) const {
  if (transfer.error == 0) return;
  const std::string what = std::string(transfer.writes ? "writing " : "reading ") +
                           std::to_string(transfer.bytes) + " bytes at offset " +
                           std::to_string(transfer.offset) + " of";
  raise_file_error(what.c_str(), name(slab, number), transfer.error);
}

void SegmentFiles::sync(size_t slab, const SegmentFile& file) {
  if (fdatasync(needed_descriptor(slab, file)) != 0) {
    raise_file_error("fdatasync of", name(slab, file.number), errno);
  }
  open_files_.set_unsynced({slab, file.number}, false);
}

void SegmentFiles::sync_directory(const std::string& name) {
  const int directory = open_files_.open_once(
      [&] { return ::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (directory < 0) raise_file_error("opening", name, errno);
  const int error = fsync(directory) == 0 ? 0 : errno;
  close(directory);
  if (error != 0) raise_file_error("fsync of", name, error);
}

void SegmentFiles::sync_names() {
  for (size_t slab = 0; slab < slabs_.size(); ++slab) {
    if (renamed_[slab] && slabs_[slab].record_bytes > 0) sync_directory(directory(slab));
    renamed_[slab] = false;
  }
  sync_directory(path_ + "/rows");
  sync_directory(path_);
}

void SegmentFiles::forget_pages(size_t slab, const SegmentFile& file, int64_t offset,
                                int64_t bytes) {
  if (direct_) return;
  posix_fadvise(needed_descriptor(slab, file), offset, bytes, POSIX_FADV_DONTNEED);
}

}  // namespace dynemb::cpu
