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

void sync_directory(const std::string& name) {
  const int directory = ::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) raise_file_error("opening", name, errno);
  const int error = fsync(directory) == 0 ? 0 : errno;
  close(directory);
  if (error != 0) raise_file_error("fsync of", name, error);
}

void make_directories(const std::string& name) {
  std::error_code error;
  std::filesystem::create_directories(name, error);
  if (error) raise_file_error("making the directory", name, error.value());
}

bool is_full(int error) { return error == ENOSPC || error == EDQUOT; }

}  // namespace

void raise_file_error(const char* what, const std::string& file, int error) {
  DYNEMB_CHECK(false, "dynemb: ", what, " ", file, " failed: ", std::strerror(error));
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
      renamed_(slabs_.size(), true) {
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
                 "one a path of its own, or end that one first");
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
    while (const dirent* entry = readdir(entries)) {
      char* end = nullptr;
      const long long number = std::strtoll(entry->d_name, &end, 16);
      if (*end != '\0' || number <= 0 || std::strlen(entry->d_name) < 8) continue;
      numbers_[slab].insert(number);
      next_number_[slab] = std::max<int64_t>(next_number_[slab], number + 1);
      ++count_;
    }
    closedir(entries);
  }
}

int64_t SegmentFiles::available_bytes() const {
  struct statvfs system{};
  if (statvfs(path_.c_str(), &system) != 0) return 0;
  return static_cast<int64_t>(system.f_bavail) * static_cast<int64_t>(system.f_frsize);
}

// With O_DIRECT, or without it on file systems that have none.
int SegmentFiles::open_file(const std::string& name, int flags) const {
  if (direct_) {
    const int file = ::open(name.c_str(), flags | O_DIRECT | O_CLOEXEC, 0666);
    if (file >= 0 || errno != EINVAL) return file;
    direct_ = false;
  }
  // without O_EXCL: some have made the file before they refused
  const int file = ::open(name.c_str(), (flags & ~O_EXCL) | O_CLOEXEC, 0666);
  if (file >= 0) posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
  return file;
}

SegmentFile SegmentFiles::create(size_t slab) {
  const int64_t number = next_number_[slab];
  const std::string file_name = name(slab, number);
  const int file = open_file(file_name, O_RDWR | O_CREAT | O_EXCL);
  if (file < 0) {
    if (is_full(errno)) return {-1, 0};
    raise_file_error("making", file_name, errno);
  }
  const int error = posix_fallocate(file, 0, segment_bytes_);
  if (error != 0) {
    close(file);
    unlink(file_name.c_str());
    if (is_full(error)) return {-1, 0};
    raise_file_error("reserving bytes of", file_name, error);
  }
  ++next_number_[slab];
  ++count_;
  numbers_[slab].insert(number);
  renamed_[slab] = true;
  return {file, number};
}

SegmentFile SegmentFiles::open(size_t slab, int64_t number) const {
  const std::string file_name = name(slab, number);
  const int file = open_file(file_name, O_RDWR);
  DYNEMB_CHECK(file >= 0 || errno != ENOENT, "dynemb: the snapshot needs ", file_name,
               ", which is missing: copy it back, or load another snapshot");
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
  if (!same) close(file);
  DYNEMB_CHECK(whole, "dynemb: the snapshot needs ", file_name, ", which has ", status.st_size,
               " bytes, expected ", segment_bytes_, ": copy it back, or load another snapshot");
  DYNEMB_CHECK(same, "dynemb: the snapshot needs ", file_name,
               ", whose first page is damaged or another file's: copy it back, or load another "
               "snapshot");
  return {file, number};
}

void SegmentFiles::rename(size_t from, SegmentFile& file, size_t to) {
  const std::string old_name = name(from, file.number);
  const std::string new_name = name(to, next_number_[to]);
  if (::rename(old_name.c_str(), new_name.c_str()) != 0) {
    raise_file_error("renaming", old_name, errno);
  }
  numbers_[from].erase(file.number);
  file.number = next_number_[to]++;
  numbers_[to].insert(file.number);
  renamed_[from] = renamed_[to] = true;
}

void SegmentFiles::remove(size_t slab, int64_t number) {
  const std::string file_name = name(slab, number);
  if (unlink(file_name.c_str()) != 0 && errno != ENOENT) {
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

void SegmentFiles::write(size_t slab, const SegmentFile& file, int64_t offset, const char* from,
                         int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t written = pwrite(file.descriptor, from + done, static_cast<size_t>(bytes - done),
                                   static_cast<off_t>(offset + done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error = written < 0 ? errno : EIO;
      raise_file_error(("writing " + std::to_string(bytes) + " bytes at offset " +
                        std::to_string(offset) + " of")
                           .c_str(),
                       name(slab, file.number), error);
    }
    done += written;
  }
  bytes_written_ += bytes;
  // begins now, so that a later fsync finds little to do and the pages can be dropped
  if (!direct_) sync_file_range(file.descriptor, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void SegmentFiles::sync(size_t slab, const SegmentFile& file) const {
  if (fdatasync(file.descriptor) != 0) {
    raise_file_error("fdatasync of", name(slab, file.number), errno);
  }
}

void SegmentFiles::sync_names() {
  for (size_t slab = 0; slab < slabs_.size(); ++slab) {
    if (renamed_[slab] && slabs_[slab].record_bytes > 0) sync_directory(directory(slab));
    renamed_[slab] = false;
  }
  sync_directory(path_ + "/rows");
  sync_directory(path_);
}

void SegmentFiles::forget_pages(const SegmentFile& file, int64_t offset, int64_t bytes) const {
  if (!direct_) posix_fadvise(file.descriptor, offset, bytes, POSIX_FADV_DONTNEED);
}

}  // namespace dynemb::cpu
