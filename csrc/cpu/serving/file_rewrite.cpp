// write_anew: a file of rows with the changes that were kept in memory.
//
// Rows keep their places, so their records are copied as they are, with their checksums, and the
// cache of rows stays right. New ids get the places of ids that were removed before this file, or
// places at the end: readers of this file use neither.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "core/index/bucket.h"
#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/serving/file_changes.h"
#include "cpu/storage/crc32c.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kCopyBytes = int64_t{1} << 20;

int64_t whole_pages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// A file without a name.
class NamelessFile {
 public:
  // `path`: of a file in the same folder.
  NamelessFile(const char* op, const std::string& path) : op_(op), path_(path) {
    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    file_ = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT)) {
      std::string name = folder + "/.rowsXXXXXX";
      file_ = mkostemp(name.data(), O_CLOEXEC);
      if (file_ >= 0) unlink(name.c_str());
    }
    if (file_ < 0) fail(errno);
  }
  ~NamelessFile() {
    if (file_ >= 0) close(file_);
  }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;

  int descriptor() const { return file_; }
  int release() { return std::exchange(file_, -1); }

  void reserve(int64_t bytes) {
    int error = EINTR;
    while (error == EINTR) error = posix_fallocate(file_, 0, bytes);
    if (error != 0) fail(error);
  }
  void write(const char* from, int64_t bytes, int64_t offset) {
    while (bytes > 0) {
      const ssize_t done = pwrite(file_, from, static_cast<size_t>(bytes), offset);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail(done < 0 ? errno : EIO);
      from += done, offset += done, bytes -= done;
    }
  }
  void finish() {
    if (fdatasync(file_) != 0) fail(errno);
    posix_fadvise(file_, 0, 0, POSIX_FADV_DONTNEED);
    const int flags = fcntl(file_, F_GETFL);
    fcntl(file_, F_SETFL, flags | O_DIRECT);  // reads pass by the page cache, if they can
  }

 private:
  [[noreturn]] void fail(int error) const {
    const bool full = error == ENOSPC || error == EDQUOT;
    DYNEMB_CHECK(false, "dynemb::", op_,
                 ": the headroom in memory is used up, and writing the "
                 "rows anew into a file beside ",
                 path_, " failed: ", std::strerror(error),
                 ". Nothing has changed. Make space there, put the file where this process may "
                 "write, or give the tables more headroom",
                 full ? kDiskFullError : "");
  }

  const char* op_;
  const std::string& path_;
  int file_ = -1;
};

// A part of a file in memory, written back by the system.
class MappedPart {
 public:
  MappedPart(int file, int64_t begin, int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, begin);
    DYNEMB_CHECK(data_ != MAP_FAILED, "dynemb: mapping an index of ", bytes,
                 " bytes failed: ", std::strerror(errno), kHostMemoryError);
  }
  ~MappedPart() { munmap(data_, bytes_); }
  MappedPart(const MappedPart&) = delete;
  MappedPart& operator=(const MappedPart&) = delete;
  int64_t* words() const { return static_cast<int64_t*>(data_); }

 private:
  void* data_;
  size_t bytes_;
};

// What becomes of a table.
struct NewTable {
  FileTable at;                  // in the new file
  std::vector<bool> used, gone;  // by the row's number in the old file
  std::vector<std::pair<int64_t, const char*>> changed;
  std::vector<int64_t> row_of;  // of changed ids, in the new file
  std::vector<bool> is_new;     // changed ids that the old file lacks
};

void check_damage(const char* op, const std::string& wrong) {
  DYNEMB_CHECK(wrong.empty(), "dynemb::", op, ": ", wrong);
}

NewTable planned(const char* op, RowFile& file, const FileChanges& changes, int64_t t) {
  const FileTable& old = file.tables()[t];
  const uint64_t salt = changes.live().tables[t]->salt;
  NewTable plan{old,
                std::vector<bool>(static_cast<size_t>(old.rows)),
                std::vector<bool>(static_cast<size_t>(old.rows)),
                changes.table(t).changed_rows(),
                {},
                {}};
  const int64_t* line = file.whole_index(t);
  int64_t ids_before = 0;
  for (int64_t b = 0; b < old.bucket_count; ++b, line += kBucketWords) {
    for (int64_t j = 0; j < kBucketWidth; ++j) {
      const int64_t stored = line[kBucketWidth + j];
      if (stored <= 0 || stored > old.rows) continue;
      plan.used[static_cast<size_t>(stored - 1)] = true;
      ++ids_before;
    }
  }
  DYNEMB_CHECK(ids_before == old.size, "dynemb::", op, ": the index of table ", t, " in ",
               file.path(), " has ", ids_before, " ids with rows, expected ", old.size,
               kRowFileRemedy, kDamagedStoreError);
  const std::vector<int64_t> removed = changes.table(t).removed_ids();
  std::vector<int64_t> rows(removed.size());
  check_damage(
      op, file.find(t, salt, removed.data(), static_cast<int64_t>(removed.size()), rows.data()));
  for (const int64_t row : rows) {
    if (row < 0) continue;
    plan.gone[static_cast<size_t>(row)] = true;
    --plan.at.size;
  }
  std::vector<int64_t> ids;
  for (const auto& [id, row] : plan.changed) ids.push_back(id);
  plan.row_of.resize(ids.size()), plan.is_new.resize(ids.size());
  check_damage(
      op, file.find(t, salt, ids.data(), static_cast<int64_t>(ids.size()), plan.row_of.data()));
  int64_t next = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    plan.is_new[i] = plan.row_of[i] < 0;
    if (!plan.is_new[i]) continue;
    while (next < old.rows && plan.used[static_cast<size_t>(next)]) ++next;
    plan.row_of[i] = next++;
    plan.at.rows = std::max(plan.at.rows, next);
    ++plan.at.size;
  }
  if (plan.at.size > max_ids(plan.at.bucket_count)) {
    plan.at.bucket_count =
        std::max(grown_bucket_count(plan.at.bucket_count), buckets_for(plan.at.size));
  }
  return plan;
}

void place(const FileTable& table, int64_t* lines, uint64_t salt, int64_t id, int64_t stored) {
  const ProbeSequence sequence(first_hash(id, salt), table.bucket_count);
  for (int64_t probe = 0; probe < sequence.length(); ++probe) {
    int64_t* line = lines + sequence.at(probe) * kBucketWords;
    for (int64_t j = 0; j < kBucketWidth; ++j) {
      if (line[kBucketWidth + j] != 0) continue;
      line[j] = id, line[kBucketWidth + j] = stored;
      return;
    }
  }
  DYNEMB_CHECK(false, "dynemb: the index of a file has no slot for id ", id,
               ": load the package, or make the model live, again", kDamagedStoreError);
}

}  // namespace

std::shared_ptr<RowFile> write_anew(const char* op, RowFile& file, const FileChanges& changes) {
  const auto count = static_cast<int64_t>(file.tables().size());
  std::vector<NewTable> tables;
  for (int64_t t = 0; t < count; ++t) tables.push_back(planned(op, file, changes, t));
  const int64_t words = kRowFileWords + count * kRowFileTableWords;
  int64_t end = whole_pages((words + 1) * 8), buckets = 0;
  for (NewTable& table : tables) {
    table.at.rows_begin = end;
    end += row_section_bytes(table.at.row_bytes, table.at.rows);
    table.at.bucket_begin = buckets;
    buckets += table.at.bucket_count;
  }
  const int64_t index_begin = end;
  const int64_t index_bytes = buckets * kBucketWords * 8;
  const int64_t blocks = (index_bytes + kIndexBlockBytes - 1) / kIndexBlockBytes;
  end += index_bytes + blocks * 4;
  NamelessFile out(op, changes.live().path);
  out.reserve(end);
  const PageBuffer buffer(kCopyBytes);
  for (int64_t t = 0; t < count; ++t) {
    const FileTable& old = file.tables()[t];
    const int64_t bytes = row_section_bytes(old.row_bytes, old.rows);
    for (int64_t at = 0; at < bytes; at += kCopyBytes) {
      const int64_t size = std::min(kCopyBytes, bytes - at);
      file.read_pages(op, old.rows_begin + at, buffer.data(), size);
      out.write(buffer.data(), size, tables[t].at.rows_begin + at);
    }
    const auto row_bytes = static_cast<size_t>(old.row_bytes);
    std::vector<char> record(row_bytes + sizeof(uint32_t));
    for (size_t i = 0; i < tables[t].changed.size(); ++i) {
      const auto& [id, row] = tables[t].changed[i];
      std::memcpy(record.data(), row, row_bytes);
      const uint32_t sum = crc32c(crc32c(file.id_sum(), &id, sizeof id), row, row_bytes);
      std::memcpy(record.data() + row_bytes, &sum, sizeof sum);
      out.write(record.data(), static_cast<int64_t>(record.size()),
                tables[t].at.offset(tables[t].row_of[i]));
    }
  }
  if (end > index_begin) {
    const MappedPart part(out.descriptor(), index_begin, end - index_begin);
    for (int64_t t = 0; t < count; ++t) {
      const NewTable& table = tables[t];
      const uint64_t salt = changes.live().tables[t]->salt;
      int64_t* lines = part.words() + table.at.bucket_begin * kBucketWords;
      // in the order of hashes, so places ascend, too
      const int64_t* line = file.whole_index(t);
      for (int64_t b = 0; b < file.tables()[t].bucket_count; ++b, line += kBucketWords) {
        for (int64_t j = 0; j < kBucketWidth; ++j) {
          const int64_t stored = line[kBucketWidth + j];
          if (stored <= 0 || stored > file.tables()[t].rows) continue;
          if (table.gone[static_cast<size_t>(stored - 1)]) continue;
          place(table.at, lines, salt, line[j], stored);
        }
      }
      for (size_t i = 0; i < table.changed.size(); ++i) {
        if (table.is_new[i]) {
          place(table.at, lines, salt, table.changed[i].first, table.row_of[i] + 1);
        }
      }
    }
    auto* sums = reinterpret_cast<uint32_t*>(part.words() + index_bytes / 8);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kIndexBlockBytes;
      sums[block] = crc32c(0, reinterpret_cast<const char*>(part.words()) + begin,
                           static_cast<size_t>(std::min(kIndexBlockBytes, index_bytes - begin)));
    }
  }
  std::vector<int64_t> header(static_cast<size_t>(words + 1));
  header[kRowFileMagicWord] = kRowFileMagic;
  header[kRowFileUuid] = file.uuid().words[0], header[kRowFileUuid + 1] = file.uuid().words[1];
  header[kRowFileBytes] = end, header[kRowFileTables] = count;
  header[kRowFileIndexBegin] = index_begin, header[kRowFileIndexBuckets] = buckets;
  header[kRowFileSumsBegin] = index_begin + index_bytes;
  for (int64_t t = 0; t < count; ++t) {
    int64_t* of = header.data() + kRowFileWords + t * kRowFileTableWords;
    const FileTable& table = tables[t].at;
    of[kRowFileBucketBegin] = table.bucket_begin, of[kRowFileBucketCount] = table.bucket_count;
    of[kRowFileDim] = table.dim, of[kRowFileStorage] = static_cast<int64_t>(table.storage);
    of[kRowFileRowsBegin] = table.rows_begin, of[kRowFileRows] = table.rows;
    of[kRowFileSize] = table.size;
  }
  header[words] = crc32c(0, header.data(), static_cast<size_t>(words) * 8);
  out.write(reinterpret_cast<const char*>(header.data()), (words + 1) * 8, 0);
  out.finish();
  auto written = std::make_shared<RowFile>(op, out.release(), file);
  for (int64_t t = 0; t < count; ++t) {
    for (size_t i = 0; i < tables[t].changed.size(); ++i) {
      written->cache_changed(t, tables[t].row_of[i], tables[t].changed[i].second);
    }
  }
  return written;
}

}  // namespace dynemb::cpu
