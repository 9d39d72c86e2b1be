// file_open, file_close, file_stats, file_ids, file_pages: files of read-only tables.
#include "cpu/serving/row_files.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "arguments/storage.h"
#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/runtime/results.h"
#include "cpu/storage/crc32c.h"
#include "cpu/storage/forks.h"

namespace dynemb::cpu {
namespace {

struct OpenFile {
  std::shared_ptr<RowFile> file;
  int64_t holders;  // file_open without file_close
  int64_t forks;
};

struct OpenFiles {
  std::mutex lock;
  std::map<RowFileUuid, OpenFile> files;
  std::deque<RowFileUuid> unheld;  // opened by lookups alone, the last one last
};

OpenFiles& open_files() {
  static OpenFiles* files = [] {
    auto* made = new OpenFiles;  // never freed: threads may read at the end of a process
    at_fork([made] { new (&made->lock) std::mutex; });  // another thread may have held it
    return made;
  }();
  return *files;
}

// Files that exported programs and scripts have opened: nothing says when these end.
constexpr size_t kMostUnheld = 4;

// Closes what was opened by lookups alone, but for the last ones. The lock is held.
void close_unheld(OpenFiles& all, std::vector<std::shared_ptr<RowFile>>& closed) {
  while (all.unheld.size() > kMostUnheld) {
    const auto found = all.files.find(all.unheld.front());
    all.unheld.pop_front();
    if (found == all.files.end() || found->second.holders > 0) continue;
    closed.push_back(std::move(found->second.file));
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

std::shared_ptr<RowFile> opened(const char* op, const Tensor& file, int64_t holders) {
  const int64_t* word = checked_words(op, file);
  const RowFileUuid uuid{{word[kNamedUuid], word[kNamedUuid + 1]}};
  std::vector<std::shared_ptr<RowFile>> closed;  // freed without the lock
  OpenFiles& all = open_files();
  const std::lock_guard<std::mutex> lock(all.lock);
  auto found = all.files.find(uuid);
  // a forked process has its parent's file, but neither its threads nor its locks
  if (found == all.files.end() || found->second.forks != forks()) {
    const std::string path(reinterpret_cast<const char*>(word + kNamedWords),
                           static_cast<size_t>(word[kNamedPathBytes]));
    auto made = std::make_shared<RowFile>(op, path, uuid, word[kNamedCacheBytes],
                                          static_cast<IoPath>(word[kNamedIo]));
    const int64_t held = found == all.files.end() ? 0 : found->second.holders;
    if (found != all.files.end()) closed.push_back(std::move(found->second.file));
    found = all.files.insert_or_assign(uuid, OpenFile{std::move(made), held, forks()}).first;
    if (held + holders == 0) {
      all.unheld.push_back(uuid);
      close_unheld(all, closed);
    }
  }
  found->second.holders += holders;
  return found->second.file;
}

void file_open(Tensor file) { opened("file_open", file, 1); }

void file_close(Tensor file) {
  const int64_t* word = checked_words("file_close", file);
  std::shared_ptr<RowFile> last;  // freed without the lock
  OpenFiles& all = open_files();
  const std::lock_guard<std::mutex> lock(all.lock);
  const auto found = all.files.find({{word[kNamedUuid], word[kNamedUuid + 1]}});
  if (found == all.files.end()) return;
  if (--found->second.holders > 0) return;
  last = std::move(found->second.file);
  all.files.erase(found);
}

Tensor file_stats(Tensor file) {
  const auto rows = opened("file_stats", file, 0);
  const RowFileStats& stats = rows->stats();
  Tensor result = zeros_cpu({6}, ScalarType::Long);
  auto* out = static_cast<int64_t*>(result.data_ptr());
  out[0] = stats.hits, out[1] = stats.misses, out[2] = stats.reads, out[3] = stats.bytes_read;
  out[4] = rows->cached_rows(), out[5] = rows->index_bytes();
  return result;
}

Tensor file_ids(Tensor file, int64_t table, int64_t ids) {
  const auto rows = opened("file_ids", file, 0);
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

std::shared_ptr<RowFile> row_file(const char* op, const Tensor& file) {
  return opened(op, file, 0);
}

}  // namespace dynemb::cpu

#define DYNEMB_FILE_OPS                                      \
  m.impl("file_open", TORCH_BOX(&dynemb::cpu::file_open));   \
  m.impl("file_close", TORCH_BOX(&dynemb::cpu::file_close)); \
  m.impl("file_stats", TORCH_BOX(&dynemb::cpu::file_stats)); \
  m.impl("file_ids", TORCH_BOX(&dynemb::cpu::file_ids));     \
  m.impl("file_pages", TORCH_BOX(&dynemb::cpu::file_pages));

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m){DYNEMB_FILE_OPS}
// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  DYNEMB_FILE_OPS
}
