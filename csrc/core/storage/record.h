// A row in files and in the result of `gather_records`: a header, the row's weights, then each
// tensor of optimizer state, and zeros up to a multiple of 8 bytes. Little-endian.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace dynemb {

struct RecordHeader {
  uint32_t crc;    // crc32c of the rest of the record
  int32_t table;   // number of the id's table
  int64_t handle;  // of the row; its generation distinguishes successive owners of the row
  int64_t id;
};
static_assert(sizeof(RecordHeader) == 24, "the header is part of the file format");

constexpr int64_t kRecordAlignment = 8;
constexpr int64_t kPageBytes = 4096;  // files are read and written in pages

// `row_bytes`: of weights and state together.
DYNEMB_HD int64_t record_bytes(int64_t row_bytes) {
  const int64_t bytes = static_cast<int64_t>(sizeof(RecordHeader)) + row_bytes;
  return (bytes + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
}

// Layout of records in a segment: after a page of its own, as many per page as fit. A record larger
// than a page begins at a page.
struct SegmentLayout {
  int64_t record;   // bytes of one
  int64_t segment;  // bytes, a multiple of the page

  DYNEMB_HD int64_t records_per_page() const {
    return record > kPageBytes ? 1 : kPageBytes / record;
  }
  DYNEMB_HD int64_t pages_per_record() const { return (record + kPageBytes - 1) / kPageBytes; }
  DYNEMB_HD int64_t records_per_segment() const {
    const int64_t pages = segment / kPageBytes - 1;
    return record > kPageBytes ? pages / pages_per_record() : pages * records_per_page();
  }
  // Offset in the file of record `k` of its segment.
  DYNEMB_HD int64_t offset(int64_t k) const {
    if (record > kPageBytes) return (1 + k * pages_per_record()) * kPageBytes;
    return (1 + k / records_per_page()) * kPageBytes + k % records_per_page() * record;
  }
};

}  // namespace dynemb
