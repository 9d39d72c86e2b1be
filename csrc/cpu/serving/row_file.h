// Read-only tables in a file: the index is mapped, rows are read when they are asked for, and a
// cache keeps those that are used most. Every piece is compared with its checksum: blocks of the
// index at their first use, rows at each read from the file.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/serving/row_file.h"
#include "cpu/index/args.h"
#include "cpu/serving/row_cache.h"
#include "cpu/storage/block_io.h"
#include "cpu/storage/segment_files.h"

namespace dynemb::cpu {

struct RowFileUuid {
  int64_t words[2];
  bool operator<(const RowFileUuid& other) const {
    return words[0] != other.words[0] ? words[0] < other.words[0] : words[1] < other.words[1];
  }
};

struct FileTable {
  int64_t bucket_begin, bucket_count, size, dim, rows_begin, rows, row_bytes;
  Storage storage;
  SegmentLayout layout;
  RowCache* cache;  // shared by the tables with rows of so many bytes

  // Keys of its rows in the cache. Those that a later file adds follow those of all tables, in
  // turns: a row keeps its key.
  int64_t first_key, first_rows, more_keys, turns;

  int64_t key(int64_t row) const {
    return row < first_rows ? first_key + row : more_keys + (row - first_rows) * turns;
  }
  int64_t offset(int64_t row) const { return rows_begin + row_offset(layout, row); }
};

// A row to read, and where it goes.
struct FileRow {
  int64_t table, row, id;
  char* to;
};

struct RowFileStats {
  std::atomic<int64_t> hits = 0, misses = 0, reads = 0, bytes_read = 0;  // reads: blocks
  std::atomic<int64_t> files = 0;  // written since, with changes
};

class RowFile {
 public:
  // Raises if the file is missing, damaged, of another version, or another file than that of the
  // id. Messages begin with the name of the op.
  RowFile(const std::string& op, const std::string& path, RowFileUuid uuid, int64_t cache_bytes,
          IoPath io);
  // An open file that write_anew has written, with the cache and the counts of the one before it.
  RowFile(const std::string& op, int file, RowFile& before);
  ~RowFile();
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;

  // Raises if the file was cut short since it was opened: the mapped index would end the process.
  void check_size(const char* op) const;
  const std::vector<FileTable>& tables() const { return tables_; }
  const std::string& path() const { return path_; }
  int64_t cached_rows() const;
  int64_t index_bytes() const { return index_bytes_; }
  const RowFileStats& stats() const { return *stats_; }
  RowFileUuid uuid() const { return uuid_; }
  uint32_t id_sum() const { return id_sum_; }

  // Row numbers of ids, -1 for those that a table lacks. Returns what is damaged; empty: nothing.
  std::string find(int64_t table, uint64_t salt, const int64_t* ids, int64_t count, int64_t* rows);
  // Copies rows that the cache has, and keeps the others in `rows`.
  void take_cached(std::vector<FileRow>& rows);
  // Reads rows from the file into their places and the cache; several reads are in flight. Raises
  // if one cannot be read or is damaged.
  void read(std::vector<FileRow>& rows);
  // Lines of the index of a table, after all of them were compared with their checksums.
  const int64_t* whole_index(int64_t table);
  // Reads whole pages of the file, without a check.
  void read_pages(const char* op, int64_t offset, char* to, int64_t bytes) const;
  // Puts a row into the cache that differs from that of the file before this one.
  void cache_changed(int64_t table, int64_t row, const char* values);

 private:
  struct Reader {
    std::unique_ptr<BlockReader> blocks;
    PageBuffer pages;
  };

  void map(const std::string& op, RowFileUuid uuid);
  void close_file();
  void read_header(const std::string& op, RowFileUuid uuid);
  void make_caches(const std::string& op, int64_t bytes);
  std::unique_ptr<Reader> take_reader();
  // Empty, or what is wrong with the block of the index that has a line.
  std::string check_line(const int64_t* line) {
    const int64_t block = (line - index_) / (kIndexBlockBytes / 8);
    const uint64_t bit = uint64_t{1} << (block % 64);
    if (checked_[block / 64].load(std::memory_order_relaxed) & bit) return {};
    return check_block(block);
  }
  std::string check_block(int64_t block);
  std::string fault(const FileRow& row, const char* record) const;
  std::string place_of(const FileRow& row) const;

  const std::string path_;
  const IoPath io_;
  const int64_t cache_bytes_;
  int file_ = -1;
  int64_t bytes_ = 0, index_bytes_ = 0, sums_begin_ = 0;
  RowFileUuid uuid_{};
  uint32_t id_sum_ = 0;  // of the file's id
  void* map_ = nullptr;
  const int64_t* index_ = nullptr;
  const uint32_t* sums_ = nullptr;
  std::unique_ptr<std::atomic<uint64_t>[]> checked_;  // a bit for each block of the index
  std::vector<FileTable> tables_;
  int64_t number_ = 0;  // of the files that the cache has had
  std::vector<std::shared_ptr<RowCache>> caches_;
  std::mutex readers_lock_;
  std::vector<std::unique_ptr<Reader>> readers_;  // idle
  int64_t largest_block_ = kPageBytes;
  std::shared_ptr<RowFileStats> stats_;
};

// The text that all errors of a damaged file end with.
inline constexpr const char* kRowFileRemedy =
    ": copy the file or the package again, or write it again by freeze or serving.export";

}  // namespace dynemb::cpu
