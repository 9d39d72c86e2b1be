// The open files of rows. A program passes a tensor around that names one, so copies of the tensor,
// in exported programs and in packages, name the same file.
#pragma once

#include <memory>

#include "arguments/tensors.h"
#include "cpu/serving/row_file.h"

namespace dynemb::cpu {

// Words of the tensor; the path's bytes follow, and zeros.
enum RowFileName : int {
  kNamedMagic = 0,
  kNamedUuid = 1,  // two words
  kNamedCacheBytes = 3,
  kNamedIo = 4,  // an IoPath
  kNamedPathBytes = 5,
  kNamedWords = 6,
  kNamedMostWords = kNamedWords + 512
};

// The file that a tensor names: an open one, or opened now. Raises if that fails.
std::shared_ptr<RowFile> row_file(const char* op, const Tensor& file);

}  // namespace dynemb::cpu
