// file_open, file_make_live, file_close, file_stats, file_ids, file_pages: files of served tables.
#include "cpu/serving/row_files.h"

#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "arguments/storage.h"
#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/memory/reserve.h"
#include "cpu/runtime/results.h"
#include "cpu/storage/crc32c.h"
#include "cpu/storage/forks.h"

namespace dynemb::cpu {
namespace {

// A file for readers, or live tables of one: each live copy has changes of its own.
struct FileKey {
  RowFileUuid uuid;
  int64_t instance;
  bool operator<(const FileKey& other) const {
    return uuid < other.uuid || (!(other.uuid < uuid) && instance < other.instance);
  }
};

struct OpenFile {
  OpenedRows rows;
  int64_t holders;  // file_open without file_close
  int64_t forks;
};

struct OpenRowFiles {
  std::mutex lock;
  std::map<FileKey, OpenFile> files;
  std::deque<FileKey> unheld;  // opened by lookups alone, the last one last
};

OpenRowFiles& open_files() {
  static OpenRowFiles* files = [] {
    auto* made = new OpenRowFiles;  // never freed: threads may read at the end of a process
    at_fork([made] { new (&made->lock) std::mutex; });  // another thread may have held it
    return made;
  }();
  return *files;
}

// Files that exported programs and scripts have opened: nothing says when these end.
constexpr size_t kMostUnheld = 4;
constexpr int64_t kMostHeadroom = int64_t{1} << 40;

// Closes what was opened by lookups alone, but for the last ones. The lock is held.
void close_unheld(OpenRowFiles& all, std::vector<OpenedRows>& closed) {
  while (all.unheld.size() > kMostUnheld) {
    const auto found = all.files.find(all.unheld.front());
    all.unheld.pop_front();
    if (found == all.files.end() || found->second.holders > 0) continue;
    closed.push_back(std::move(found->second.rows));
    all.files.erase(found);
  }
}

const int64_t* checked_words(const char* op, const Tensor& file) {
  check_in_host_memory(op, "file", file);
  check_words(op, "file", file);
  check_size(op, "file", file, 0, kNamedMostWords);
  const auto* word = static_cast<const int64_t*>(file.data_ptr());
  DYNEMB_CHECK(word[kNamedMagic] == kRowFileMagic && word[kNamedPathBytes] > 0 &&
                   word[kNamedPathBytes] <= (kNamedMostWords - kNamedWords) * 8 &&
                   word[kNamedCacheBytes] >= 0 && word[kNamedIo] >= 0 && word[kNamedIo] < kIoPaths,
               "dynemb::", op,
               ": file does not name a file of rows: it is a tensor of freeze(storage=), which may "
               "be copied, but not changed");
  return word;
}

FileKey key_of(const int64_t* word) {
  return {{{word[kNamedUuid], word[kNamedUuid + 1]}}, word[kNamedInstance]};
}

std::shared_ptr<RowFile> opened_now(const char* op, const int64_t* word) {
  const std::string path(reinterpret_cast<const char*>(word + kNamedWords),
                         static_cast<size_t>(word[kNamedPathBytes]));
  return std::make_shared<RowFile>(op, path, key_of(word).uuid, word[kNamedCacheBytes],
                                   static_cast<IoPath>(word[kNamedIo]));
}

OpenedRows opened(const char* op, const Tensor& file, int64_t holders) {
  const int64_t* word = checked_words(op, file);
  const FileKey key = key_of(word);
  std::vector<OpenedRows> closed;  // freed without the lock
  OpenRowFiles& all = open_files();
  const std::lock_guard<std::mutex> lock(all.lock);
  auto found = all.files.find(key);
  const bool is_here = found != all.files.end() && found->second.forks == forks();
  if (!is_here && key.instance != 0) {
    DYNEMB_CHECK(found == all.files.end(), "dynemb::", op,
                 ": file names live tables of the process from which this one was forked: load "
                 "the package, or make the model live, in this process",
                 kForkedProcessError);
    DYNEMB_CHECK(false, "dynemb::", op,
                 ": file names live tables of another process, or of a model that is gone, with "
                 "their changes: load the package, or make the model live, and keep it while "
                 "programs of it run");
  }
  // a forked process has its parent's file, but neither its threads nor its locks
  if (!is_here) {
    OpenedRows made{opened_now(op, word), nullptr};
    const int64_t held = found == all.files.end() ? 0 : found->second.holders;
    if (found != all.files.end()) closed.push_back(std::move(found->second.rows));
    found = all.files.insert_or_assign(key, OpenFile{std::move(made), held, forks()}).first;
    if (held + holders == 0) {
      all.unheld.push_back(key);
      close_unheld(all, closed);
    }
  }
  found->second.holders += holders;
  return found->second.rows;
}

void file_open(Tensor file) { opened("file_open", file, 1); }

void file_make_live(Tensor file, Tensor meta, std::vector<int64_t> headroom) {
  const char* op = "file_make_live";
  const int64_t* word = checked_words(op, file);
  check_in_host_memory(op, "meta", meta);
  check_layout(op, "meta", meta, ScalarType::Long);
  DYNEMB_CHECK(meta.dim() == 2, "dynemb::", op, ": meta has ", meta.dim(),
               " dimensions, expected 2");
  const FileKey key = key_of(word);
  DYNEMB_CHECK(key.instance != 0, "dynemb::", op,
               ": file has the instance 0, which is that of rows that do not change");
  const auto rows = opened_now(op, word);
  const auto tables = static_cast<int64_t>(rows->tables().size());
  check_size(op, "meta", meta, 0, tables);
  check_size(op, "meta", meta, 1, kMetaColumns);
  DYNEMB_CHECK(static_cast<int64_t>(headroom.size()) == tables, "dynemb::", op, ": headroom has ",
               headroom.size(), " numbers, expected ", tables, ", one for each table");
  for (const int64_t ids : headroom) {
    DYNEMB_CHECK(ids >= 0 && ids <= kMostHeadroom, "dynemb::", op, ": headroom has ", ids,
                 ", expected 0 to ", kMostHeadroom);
  }
  // files are written beside the file itself, not beside a link to it
  const std::unique_ptr<char, decltype(&std::free)> real(realpath(rows->path().c_str(), nullptr),
                                                         &std::free);
  auto live = std::make_shared<LiveFile>(real == nullptr ? rows->path() : real.get(), *rows,
                                         static_cast<const int64_t*>(meta.data_ptr()), headroom);
  const int64_t bytes = FileChanges::bytes_of(*live, *rows);
  DYNEMB_CHECK(has_available_memory(bytes), "dynemb::", op, ": changes of ",
               std::accumulate(headroom.begin(), headroom.end(), int64_t{0}), " ids take ", bytes,
               " bytes of memory, which are not free: give the tables less headroom",
               kHostMemoryError);
  const OpenedRows made{rows, std::make_shared<FileChanges>(std::move(live), *rows)};
  OpenRowFiles& all = open_files();
  const std::lock_guard<std::mutex> lock(all.lock);
  const auto [found, is_new] = all.files.try_emplace(key, OpenFile{made, 0, forks()});
  DYNEMB_CHECK(is_new || (found->second.forks == forks() && found->second.rows.changes != nullptr &&
                          found->second.rows.changes->live().headroom() == headroom),
               "dynemb::", op, ": file has the instance ", key.instance,
               " of live tables with other headroom, or of another process: give each its own");
  ++found->second.holders;
}

void file_close(Tensor file) {
  const int64_t* word = checked_words("file_close", file);
  OpenedRows last;  // freed without the lock
  OpenRowFiles& all = open_files();
  const std::lock_guard<std::mutex> lock(all.lock);
  const auto found = all.files.find(key_of(word));
  if (found == all.files.end()) return;
  if (--found->second.holders > 0) return;
  last = std::move(found->second.rows);
  all.files.erase(found);
}

Tensor file_stats(Tensor file) {
  const auto rows = opened("file_stats", file, 0).file;
  const RowFileStats& stats = rows->stats();
  Tensor result = zeros_cpu({7}, ScalarType::Long);
  auto* out = static_cast<int64_t*>(result.data_ptr());
  out[0] = stats.hits, out[1] = stats.misses, out[2] = stats.reads, out[3] = stats.bytes_read;
  out[4] = rows->cached_rows(), out[5] = rows->index_bytes(), out[6] = stats.files;
  return result;
}

Tensor file_ids(Tensor file, int64_t table, int64_t ids) {
  const auto [rows, changes] = opened("file_ids", file, 0);
  DYNEMB_CHECK(
      changes == nullptr,
      "dynemb::file_ids: file names live tables, which list no ids: list those of the tables "
      "from which they were made");
  const auto tables = static_cast<int64_t>(rows->tables().size());
  DYNEMB_CHECK(table >= 0 && table < tables, "dynemb::file_ids: table is ", table,
               ", expected 0 to ", tables - 1);
  const FileTable& of = rows->tables()[table];
  DYNEMB_CHECK(ids == of.size, "dynemb::file_ids: ids is ", ids, ", expected ", of.size,
               ", those of table ", table);
  rows->check_size("file_ids");
  const int64_t* line = rows->whole_index(table);
  Tensor result = empty_cpu({ids}, ScalarType::Long);
  auto* out = static_cast<int64_t*>(result.data_ptr());
  int64_t found = 0;
  for (int64_t b = 0; b < of.bucket_count; ++b, line += kBucketWords) {
    for (int64_t slot = 0; slot < kBucketWidth; ++slot) {
      if (line[kBucketWidth + slot] > 0 && found++ < ids) *out++ = line[slot];
    }
  }
  DYNEMB_CHECK(found == ids, "dynemb::file_ids: the index of table ", table, " in ", rows->path(),
               " has ", found, " ids, expected ", ids, kRowFileRemedy, kDamagedStoreError);
  return result;
}

// Pages of a file with the rows of ids, which begin a page. `packed`: uint8 [n, bytes]; `crc`: the
// checksum of the file's id.
Tensor file_pages(Tensor ids, Tensor rows, int64_t crc) {
  const char* op = "file_pages";
  check_in_host_memory(op, "ids", ids);
  check_words(op, "ids", ids);
  check_in_host_memory(op, "packed", rows);
  check_layout(op, "packed", rows, ScalarType::Byte);
  DYNEMB_CHECK(rows.dim() == 2, "dynemb::", op, ": packed has ", rows.dim(),
               " dimensions, expected 2");
  check_size(op, "packed", rows, 0, ids.numel());
  DYNEMB_CHECK(rows.size(1) > 0, "dynemb::", op,
               ": packed has rows of 0 bytes, expected at least 1");
  DYNEMB_CHECK(crc >= 0 && crc <= UINT32_MAX, "dynemb::", op, ": crc is ", crc, ", expected 0 to ",
               UINT32_MAX, ", the sum so far");
  const int64_t count = rows.size(0);
  const int64_t row_bytes = rows.size(1);
  const SegmentLayout layout = row_file_layout(row_bytes);
  Tensor result = zeros_cpu({row_section_bytes(row_bytes, count)}, ScalarType::Byte);
  auto* out = static_cast<char*>(result.data_ptr());
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  const auto* row = static_cast<const char*>(rows.data_ptr());
  for (int64_t i = 0; i < count; ++i, row += row_bytes) {
    char* record = out + row_offset(layout, i);
    std::memcpy(record, row, static_cast<size_t>(row_bytes));
    const uint32_t sum = crc32c(crc32c(static_cast<uint32_t>(crc), id + i, sizeof *id), row,
                                static_cast<size_t>(row_bytes));
    std::memcpy(record + row_bytes, &sum, sizeof sum);
  }
  return result;
}

}  // namespace

OpenedRows row_file(const char* op, const Tensor& file) { return opened(op, file, 0); }

OpenedRows live_rows(const char* op, const Tensor& file) {
  OpenedRows rows = opened(op, file, 0);
  DYNEMB_CHECK(rows.changes != nullptr, "dynemb::", op,
               ": file names rows that do not change: give the tables headroom, by "
               "serving.live or serving.export(headroom=)");
  return rows;
}

void replace_live_rows(const char* op, const Tensor& file, OpenedRows rows) {
  const FileKey key = key_of(checked_words(op, file));
  OpenRowFiles& all = open_files();
  const std::lock_guard<std::mutex> lock(all.lock);
  const auto found = all.files.find(key);
  if (found != all.files.end()) std::swap(found->second.rows, rows);
}

}  // namespace dynemb::cpu

#define DYNEMB_FILE_OPS                                              \
  m.impl("file_open", TORCH_BOX(&dynemb::cpu::file_open));           \
  m.impl("file_close", TORCH_BOX(&dynemb::cpu::file_close));         \
  m.impl("file_make_live", TORCH_BOX(&dynemb::cpu::file_make_live)); \
  m.impl("file_stats", TORCH_BOX(&dynemb::cpu::file_stats));         \
  m.impl("file_ids", TORCH_BOX(&dynemb::cpu::file_ids));             \
  m.impl("file_pages", TORCH_BOX(&dynemb::cpu::file_pages));

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m){DYNEMB_FILE_OPS}
// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  DYNEMB_FILE_OPS
}
