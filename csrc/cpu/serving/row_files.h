// The open files of rows. A program passes a tensor around that names one, so copies of the tensor,
// in exported programs and in packages, name the same file.
#pragma once

#include <memory>

#include "arguments/tensors.h"
#include "cpu/serving/file_changes.h"

namespace dynemb::cpu {

// Words of the tensor; the path's bytes follow, and zeros.
enum RowFileName : int {
  kNamedMagic = 0,
  kNamedUuid = 1,  // two words
  kNamedCacheBytes = 3,
  kNamedIo = 4,  // an IoPath
  kNamedPathBytes = 5,
  kNamedInstance = 6,  // of live tables; 0: the rows do not change
  kNamedWords = 7,
  kNamedMostWords = kNamedWords + 512
};

// A file, with its changes in memory.
struct OpenedRows {
  std::shared_ptr<RowFile> file;
  std::shared_ptr<FileChanges> changes;  // nullptr: the rows do not change
};

// What a tensor names: an open file, or one opened now. Raises if that fails, or for live tables
// that are gone.
OpenedRows row_file(const char* op, const Tensor& file);
// The same for live tables alone.
OpenedRows live_rows(const char* op, const Tensor& file);
// Later calls get these in place of those that live tables have.
void replace_live_rows(const char* op, const Tensor& file, OpenedRows rows);

}  // namespace dynemb::cpu
