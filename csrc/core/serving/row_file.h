// A file of read-only tables: their index, and a record for each row. Little-endian.
//
//   header    whole pages: the words below, then kRowFileTableWords for each table, then the crc32c
//             of these words
//   rows      of each table, as many records in a page as fit: the row, then the crc32c of the
//             file's id (16 bytes), of the row's id (8 bytes), and of the row
//   index     buckets of all tables, of which handles are row numbers
//   sums      uint32 for each kIndexBlockBytes of the index: its crc32c
//
// The header is written last: a file that is not complete has none.
#pragma once

#include <cstdint>

#include "core/rows/quantized.h"
#include "core/storage/record.h"

namespace dynemb {

constexpr int64_t kRowFileMagic = 0x31656c6966776f72;  // "rowfile1"
constexpr int64_t kIndexBlockBytes = int64_t{1} << 16;

enum RowFileWord : int {
  kRowFileMagicWord = 0,
  kRowFileUuid = 1,  // two words
  kRowFileBytes = 3,
  kRowFileTables = 4,
  kRowFileIndexBegin = 5,
  kRowFileIndexBuckets = 6,
  kRowFileSumsBegin = 7,
  kRowFileWords = 8
};

enum RowFileTableWord : int {
  kRowFileBucketBegin = 0,
  kRowFileBucketCount = 1,
  kRowFileDim = 2,
  kRowFileStorage = 3,
  kRowFileRowsBegin = 4,
  kRowFileRows = 5,
  kRowFileSize = 6,  // ids
  kRowFileTableWords = 8
};

DYNEMB_HD int64_t stored_row_bytes(Storage storage, int64_t dim) {
  if (is_quantized(storage)) return code_bytes(storage, dim) + scale_bytes(storage);
  return dim * (storage == Storage::kFloat32 ? 4 : 2);
}

DYNEMB_HD SegmentLayout row_file_layout(int64_t row_bytes) {
  return {row_bytes + static_cast<int64_t>(sizeof(uint32_t)), int64_t{1} << 62};
}

// Bytes of the section with the rows of a table, whole pages.
DYNEMB_HD int64_t row_section_bytes(int64_t row_bytes, int64_t rows) {
  const SegmentLayout layout = row_file_layout(row_bytes);
  const int64_t per_page = layout.records_per_page();
  return (rows + per_page - 1) / per_page * layout.pages_per_record() * kPageBytes;
}

// Offset of a row in the section of its table.
DYNEMB_HD int64_t row_offset(const SegmentLayout& layout, int64_t row) {
  return layout.offset(row) - kPageBytes;  // segments begin with a page of their own
}

}  // namespace dynemb
