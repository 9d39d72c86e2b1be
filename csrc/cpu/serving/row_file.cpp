#include "cpu/serving/row_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/index/probe_block.h"
#include "cpu/memory/reserve.h"
#include "cpu/storage/crc32c.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kBatchBytes = int64_t{1} << 20;  // of blocks that a call reads at a time
constexpr int64_t kMostTables = 1 << 16;
constexpr int64_t kMuchLarger = 2;
constexpr int64_t kMostRows = int64_t{1} << 40;

int open_file(const std::string& op, const std::string& path) {
  // past the page cache, if the file system allows it
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT);
  if (file < 0 && errno == EINVAL) file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  DYNEMB_CHECK(file >= 0, "dynemb::", op, ": cannot open ", path,
               ", the file of the rows: ", std::strerror(errno),
               ". It lies where freeze or serving.export has written it, and belongs to the model: "
               "put it back, or freeze or export the model again");
  return file;
}

}  // namespace

RowFile::RowFile(const std::string& op, const std::string& path, RowFileUuid uuid,
                 int64_t cache_bytes, IoPath io)
    : path_(path), io_(io), cache_bytes_(cache_bytes), stats_(std::make_shared<RowFileStats>()) {
  file_ = open_file(op, path);
  try {
    map(op, uuid);
    make_caches(op, cache_bytes);
    readers_.push_back(take_reader());
  } catch (...) {
    close_file();
    throw;
  }
}

RowFile::RowFile(const std::string& op, int file, RowFile& before)
    : path_(before.number_ > 0 ? before.path_ : before.path_ + ", as this process has changed it"),
      io_(before.io_),
      cache_bytes_(before.cache_bytes_),
      file_(file),
      number_(before.number_ + 1),
      caches_(before.caches_),
      stats_(before.stats_) {
  try {
    map(op, before.uuid_);
    int64_t rows = 0, first_rows = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      FileTable& own = tables_[t];
      const FileTable& old = before.tables_[t];
      own.cache = old.cache;
      own.first_key = old.first_key, own.first_rows = old.first_rows;
      own.more_keys = old.more_keys, own.turns = old.turns;
      rows += own.rows, first_rows += own.first_rows;
    }
    // a cache for the few rows that there were first would stay small
    if (rows > kMuchLarger * first_rows) make_caches(op, cache_bytes_);
    readers_.push_back(take_reader());
  } catch (...) {
    close_file();
    throw;
  }
  ++stats_->files;
  for (const auto& cache : caches_) cache->begin_file(number_);
}

void RowFile::map(const std::string& op, RowFileUuid uuid) {
  struct stat status{};
  DYNEMB_CHECK(fstat(file_, &status) == 0 && S_ISREG(status.st_mode), "dynemb::", op, ": ", path_,
               " is not a file", kRowFileRemedy);
  bytes_ = status.st_size;
  DYNEMB_CHECK(bytes_ >= kPageBytes, "dynemb::", op, ": ", path_, " has ", bytes_,
               " bytes, too few for rows", kRowFileRemedy, kDamagedStoreError);
  map_ = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, file_, 0);
  DYNEMB_CHECK(map_ != MAP_FAILED, "dynemb::", op, ": mapping ", path_,
               " failed: ", std::strerror(errno), kHostMemoryError);
  read_header(op, uuid);
}

void RowFile::close_file() {
  if (map_ != nullptr && map_ != MAP_FAILED) munmap(map_, static_cast<size_t>(bytes_));
  close(file_);
}

RowFile::~RowFile() { close_file(); }

void RowFile::check_size(const char* op) const {
  struct stat status{};
  const bool is_whole = fstat(file_, &status) == 0 && status.st_size >= bytes_;
  DYNEMB_CHECK(is_whole, "dynemb::", op, ": ", path_, ": the file has ", status.st_size,
               " bytes, expected ", bytes_, "; it was cut short while it was open", kRowFileRemedy,
               kDamagedStoreError);
}

void RowFile::read_header(const std::string& op, RowFileUuid uuid) {
  const auto* word = static_cast<const int64_t*>(map_);
  const auto damaged = [&](bool is_right, const auto&... what) {
    DYNEMB_CHECK(is_right, "dynemb::", op, ": ", path_, ": ", what..., kRowFileRemedy,
                 kDamagedStoreError);
  };
  damaged(
      word[kRowFileMagicWord] == kRowFileMagic,
      "the file does not begin as a file of rows; it was not written to its end, or is another");
  const int64_t count = word[kRowFileTables];
  damaged(count >= 0 && count <= kMostTables, "its header is damaged: it names ", count, " tables");
  const int64_t words = kRowFileWords + count * kRowFileTableWords;
  damaged((words + 1) * 8 <= bytes_ &&
              crc32c(0, word, static_cast<size_t>(words) * 8) == static_cast<uint64_t>(word[words]),
          "the checksum of its header is wrong");
  damaged(word[kRowFileBytes] == bytes_, "the file has ", bytes_, " bytes, expected ",
          word[kRowFileBytes], "; it was cut short or written to");
  const RowFileUuid own{{word[kRowFileUuid], word[kRowFileUuid + 1]}};
  DYNEMB_CHECK(!(own < uuid) && !(uuid < own), "dynemb::", op, ": ", path_,
               " has the rows of another model: put back the file that belongs to this one, or "
               "freeze or export the model again",
               kDamagedStoreError);
  uuid_ = uuid;
  id_sum_ = crc32c(0, word + kRowFileUuid, sizeof uuid.words);
  const int64_t buckets = word[kRowFileIndexBuckets];
  index_bytes_ = buckets * kBucketWords * 8;
  const int64_t blocks = (index_bytes_ + kIndexBlockBytes - 1) / kIndexBlockBytes;
  sums_begin_ = word[kRowFileSumsBegin];
  // a header with its checksum was written so: these are for files of a program that is not ours
  const auto inside = [&](int64_t begin, int64_t size) {
    return begin >= 0 && size >= 0 && begin <= bytes_ && size <= bytes_ - begin;
  };
  bool is_right = buckets >= 0 && buckets <= bytes_ / 64 &&
                  inside(word[kRowFileIndexBegin], index_bytes_) &&
                  word[kRowFileIndexBegin] % kPageBytes == 0 && inside(sums_begin_, blocks * 4) &&
                  sums_begin_ % 4 == 0;
  for (int64_t t = 0; is_right && t < count; ++t) {
    const int64_t* of = word + kRowFileWords + t * kRowFileTableWords;
    FileTable table{};
    table.bucket_begin = of[kRowFileBucketBegin], table.bucket_count = of[kRowFileBucketCount];
    table.dim = of[kRowFileDim], table.storage = static_cast<Storage>(of[kRowFileStorage]);
    table.rows_begin = of[kRowFileRowsBegin], table.rows = of[kRowFileRows];
    table.size = of[kRowFileSize];
    is_right = table.dim > 0 && table.dim < int64_t{1} << 32 && of[kRowFileStorage] >= 0 &&
               of[kRowFileStorage] <= static_cast<int64_t>(Storage::kFloat8) &&
               table.storage != Storage::kBlockFloat8 && table.rows >= 0 &&
               table.rows < kMostRows && table.bucket_begin >= 0 && table.bucket_count > 0 &&
               table.bucket_begin <= buckets && table.bucket_count <= buckets - table.bucket_begin;
    if (!is_right) break;
    table.row_bytes = stored_row_bytes(table.storage, table.dim);
    table.layout = row_file_layout(table.row_bytes);
    is_right = table.rows_begin % kPageBytes == 0 && table.rows <= bytes_ / table.row_bytes &&
               inside(table.rows_begin, row_section_bytes(table.row_bytes, table.rows));
    largest_block_ = std::max(largest_block_, table.layout.pages_per_record() * kPageBytes);
    tables_.push_back(table);
  }
  damaged(is_right, "its header names places that the file does not have");
  index_ = word + word[kRowFileIndexBegin] / 8;
  sums_ = reinterpret_cast<const uint32_t*>(static_cast<const char*>(map_) + sums_begin_);
  checked_.reset(new std::atomic<uint64_t>[static_cast<size_t>(blocks / 64 + 1)]());
  madvise(map_, static_cast<size_t>(bytes_), MADV_RANDOM);
}

void RowFile::make_caches(const std::string& op, int64_t bytes) {
  caches_.clear();
  std::map<int64_t, int64_t> rows, turns;  // by the bytes of a row: rows, tables
  int64_t total = 0;
  for (FileTable& table : tables_) {
    table.first_key = rows[table.row_bytes];
    table.first_rows = table.rows;
    table.more_keys = turns[table.row_bytes]++;
    rows[table.row_bytes] += table.rows;
    total += table.row_bytes * table.rows;
  }
  std::map<int64_t, RowCache*> cache;
  for (const auto& [row_bytes, count] : rows) {
    const auto share =
        static_cast<double>(row_bytes * count) / static_cast<double>(std::max<int64_t>(1, total));
    const auto fits = static_cast<int64_t>(static_cast<double>(bytes) * share) / row_bytes;
    const int64_t held = std::min(fits, count);
    check_available_memory(op.c_str(), RowCache::bytes_of(held, row_bytes));
    caches_.push_back(std::make_shared<RowCache>(held, row_bytes));
    cache[row_bytes] = caches_.back().get();
  }
  for (FileTable& table : tables_) {
    table.cache = cache[table.row_bytes];
    table.more_keys += rows[table.row_bytes];
    table.turns = turns[table.row_bytes];
  }
}

int64_t RowFile::cached_rows() const {
  int64_t rows = 0;
  for (const auto& cache : caches_) rows += cache->rows();
  return rows;
}

std::unique_ptr<RowFile::Reader> RowFile::take_reader() {
  {
    const std::lock_guard<std::mutex> lock(readers_lock_);
    if (!readers_.empty()) {
      auto reader = std::move(readers_.back());
      readers_.pop_back();
      return reader;
    }
  }
  return std::unique_ptr<Reader>(
      new Reader{block_reader(io_), PageBuffer(std::max(kBatchBytes, largest_block_))});
}

std::string RowFile::check_block(int64_t block) {
  char* begin = static_cast<char*>(map_) +
                (reinterpret_cast<const char*>(index_) - static_cast<const char*>(map_)) +
                block * kIndexBlockBytes;
  const auto size =
      static_cast<size_t>(std::min(kIndexBlockBytes, index_bytes_ - block * kIndexBlockBytes));
  madvise(begin, size, MADV_WILLNEED);  // one read, not one for each page
  if (crc32c(0, begin, size) != sums_[block]) {
    return path_ + ": block " + std::to_string(block) + " of the index, at offset " +
           std::to_string(begin - static_cast<char*>(map_)) + ", has a wrong checksum" +
           kRowFileRemedy + kDamagedStoreError;
  }
  checked_[block / 64].fetch_or(uint64_t{1} << (block % 64), std::memory_order_relaxed);
  return {};
}

std::string RowFile::find(int64_t table, uint64_t salt, const int64_t* ids, int64_t count,
                          int64_t* rows) {
  const FileTable& of = tables_[table];
  TableView view{};
  view.lines = const_cast<int64_t*>(index_) + of.bucket_begin * kBucketWords;
  view.bucket_count = of.bucket_count;
  view.salt = salt;
  uint64_t hash[kProbeBlock];
  int64_t bucket[kProbeBlock];
  for (int64_t begin = 0; begin < count; begin += kProbeBlock) {
    const int64_t size = std::min(kProbeBlock, count - begin);
    fetch_lines(view, ids + begin, size, hash, bucket);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t id = ids[begin + i];
      const ProbeSequence sequence(hash[i], of.bucket_count);
      int64_t stored = 0;
      for (int64_t probe = 0; probe < sequence.length(); ++probe) {
        const int64_t* line = view.line(sequence.at(probe));
        std::string wrong = check_line(line);
        if (!wrong.empty()) return wrong;
        stored = match_stored(line, id);
        if (stored != 0 || has_empty_slot(line)) break;
      }
      if (stored < 0 || stored > of.rows) {
        return path_ + ": the index leads from id " + std::to_string(id) + " to row " +
               std::to_string(stored - 1) + ", but the table has " + std::to_string(of.rows) +
               kRowFileRemedy + kDamagedStoreError;
      }
      rows[begin + i] = stored - 1;
    }
  }
  return {};
}

void RowFile::take_cached(std::vector<FileRow>& rows) {
  constexpr size_t kAtOnce = 32;
  RowCache::Search wanted[kAtOnce];
  size_t missed = 0;
  for (size_t begin = 0; begin < rows.size(); begin += kAtOnce) {
    const size_t count = std::min(kAtOnce, rows.size() - begin);
    const auto table = [&](size_t i) -> const FileTable& { return tables_[rows[begin + i].table]; };
    for (size_t i = 0; i < count; ++i) {
      wanted[i] = table(i).cache->begin(table(i).key(rows[begin + i].row));
    }
    for (size_t i = 0; i < count; ++i) table(i).cache->fetch_row(wanted[i]);
    for (size_t i = 0; i < count; ++i) {
      const FileRow row = rows[begin + i];
      if (!tables_[row.table].cache->copy(wanted[i], row.to, number_)) rows[missed++] = row;
    }
  }
  stats_->hits += static_cast<int64_t>(rows.size() - missed);
  stats_->misses += static_cast<int64_t>(missed);
  rows.resize(missed);
}

std::string RowFile::place_of(const FileRow& row) const {
  return "the row of id " + std::to_string(row.id) + " in table " + std::to_string(row.table) +
         ", at offset " + std::to_string(tables_[row.table].offset(row.row)) + " of " + path_;
}

std::string RowFile::fault(const FileRow& row, const char* record) const {
  const auto bytes = static_cast<size_t>(tables_[row.table].row_bytes);
  uint32_t sum;
  std::memcpy(&sum, record + bytes, sizeof sum);
  if (crc32c(crc32c(id_sum_, &row.id, sizeof row.id), record, bytes) == sum) return {};
  return place_of(row) + ", has a wrong checksum" + kRowFileRemedy + kDamagedStoreError;
}

void RowFile::read(std::vector<FileRow>& rows) {
  if (rows.empty()) return;
  // in the order of the file: rows of one page are read once
  std::sort(rows.begin(), rows.end(), [&](const FileRow& a, const FileRow& b) {
    return a.table != b.table ? a.table < b.table : a.row < b.row;
  });
  std::unique_ptr<Reader> reader = take_reader();
  std::vector<BlockRead> blocks;
  std::vector<size_t> first;  // of `rows`, in each block
  std::string wrong;
  for (size_t next = 0; next < rows.size() && wrong.empty();) {
    blocks.clear(), first.clear();
    int64_t used = 0;
    for (; next < rows.size(); ++next) {
      const FileTable& table = tables_[rows[next].table];
      const int64_t begin = table.offset(rows[next].row) / kPageBytes * kPageBytes;
      if (!blocks.empty() && blocks.back().offset == begin) continue;
      const int64_t bytes = table.layout.pages_per_record() * kPageBytes;
      if (used + bytes > reader->pages.bytes()) break;
      blocks.push_back({file_, begin, reader->pages.data() + used, bytes});
      first.push_back(next);
      used += bytes;
    }
    const auto use = [&](size_t b) {
      const size_t end = b + 1 < first.size() ? first[b + 1] : next;
      for (size_t i = first[b]; i < end; ++i) {
        const FileRow& row = rows[i];
        const FileTable& table = tables_[row.table];
        const char* record = blocks[b].to + table.offset(row.row) - blocks[b].offset;
        const bool again = i > first[b] && rows[i - 1].row == row.row;
        if (!again) {
          std::string is_wrong = fault(row, record);
          if (!is_wrong.empty()) {
            if (wrong.empty()) wrong = std::move(is_wrong);
            continue;
          }
          table.cache->put(table.key(row.row), record, number_);
        }
        std::memcpy(row.to, record, static_cast<size_t>(table.row_bytes));
      }
    };
    const auto failures = reader->blocks->read(blocks, use);
    stats_->reads += static_cast<int64_t>(blocks.size());
    stats_->bytes_read += used;
    for (const BlockFailure& failure : failures) {
      if (!wrong.empty()) break;
      const FileRow& row = rows[first[failure.block]];
      wrong = failure.error == 0
                  ? place_of(row) + ", is behind the end of the file, which was cut short" +
                        kRowFileRemedy + kDamagedStoreError
                  : "reading " + place_of(row) + ", failed: " + std::strerror(failure.error);
    }
  }
  {
    const std::lock_guard<std::mutex> lock(readers_lock_);
    readers_.push_back(std::move(reader));
  }
  DYNEMB_CHECK(wrong.empty(), "dynemb: ", wrong);
}

void RowFile::read_pages(const char* op, int64_t offset, char* to, int64_t bytes) const {
  while (bytes > 0) {
    const ssize_t done = pread(file_, to, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    DYNEMB_CHECK(done > 0, "dynemb::", op, ": reading ", path_, " at offset ", offset,
                 " failed: ", done < 0 ? std::strerror(errno) : "the file was cut short",
                 kRowFileRemedy);
    offset += done, to += done, bytes -= done;
  }
}

void RowFile::cache_changed(int64_t table, int64_t row, const char* values) {
  const FileTable& of = tables_[table];
  of.cache->replace(of.key(row), values, number_);
}

const int64_t* RowFile::whole_index(int64_t table) {
  const FileTable& of = tables_[table];
  const int64_t* begin = index_ + of.bucket_begin * kBucketWords;
  for (int64_t b = 0; b < of.bucket_count; ++b) {
    const std::string wrong = check_line(begin + b * kBucketWords);
    DYNEMB_CHECK(wrong.empty(), "dynemb: ", wrong);
  }
  return begin;
}

}  // namespace dynemb::cpu
