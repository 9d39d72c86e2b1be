// The bytes of a batch of a delta log; see torch_dynemb/changes/batch.py.

#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "serving/manifest.h"

namespace dynemb::serving {

// A delta log is damaged.
class DamagedLog : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

constexpr char kBatchMagic[] =
    "\xd7"
    "DYNDLT"
    "\xd7";
constexpr size_t kMagicBytes = 8, kHeadBytes = 80, kRecordBytes = 40, kCommitBytes = 48;
constexpr uint32_t kBatchVersion = 1, kCommitEnd = 0xD7E5D7E5;
constexpr uint64_t kLargest = (uint64_t{1} << 62) - 1;

enum RecordKind : uint32_t {
  kRows = 1,
  kErase = 2,
  kDense = 3,
  kCommit = 4,
  kTables = 5,
  kCounts = 6,
  kSketch = 7,
  kState = 8,
  kChangedCounts = 9,
  kChangedCells = 10
};

struct BatchHead {
  uint32_t rank, ranks, records;
  std::string base;  // uuid in hexadecimal digits
  uint64_t base_sequence, sequence, step, bytes;
  uint32_t previous;  // chain before the batch
};

struct LogRecord {
  uint32_t kind, table;
  const char* payload;  // in the data of the batch
  size_t bytes;
};

struct Batch {
  BatchHead head;
  std::string data;
  std::vector<LogRecord> records;  // without the commit
  uint32_t chain;                  // after the batch
};

// Bytes that are not a valid batch, and whether the commit at their end is valid.
struct BrokenBatch {
  std::string reason;
  bool commit;
};

// Consecutive numbers, little endian as the processors are.
class Numbers {
 public:
  explicit Numbers(const char* at) : at_(at) {}
  uint32_t word() { return next<uint32_t>(); }
  uint64_t long_word() { return next<uint64_t>(); }
  const char* bytes(size_t count) { return std::exchange(at_, at_ + count); }

 private:
  template <typename Number>
  Number next() {
    Number value;
    std::memcpy(&value, bytes(sizeof value), sizeof value);
    return value;
  }
  const char* at_;
};

// Whether the bytes end with the checksum of the bytes before it.
inline bool has_sum(const char* text, size_t bytes) {
  const size_t body = bytes - sizeof(uint32_t);
  return Numbers(text + body).word() == crc32c(text, body);
}

// The chain excludes these checksums: the checksum of bytes together with their checksum is
// constant.
inline uint32_t chained(const char* text, size_t bytes, uint32_t chain) {
  return crc32c(text, bytes - sizeof(uint32_t), chain);
}

// The head in kHeadBytes bytes; none: it is damaged. Throws std::runtime_error if its format
// version is unknown, or a number is out of range.
inline std::optional<BatchHead> head_of(const char* text) {
  if (std::memcmp(text, kBatchMagic, kMagicBytes) != 0 || !has_sum(text, kHeadBytes)) return {};
  Numbers numbers(text + kMagicBytes);
  const uint32_t version = numbers.word();
  if (version != kBatchVersion) {
    throw std::runtime_error("its format version is " + std::to_string(version) +
                             ", and this program reads " + std::to_string(kBatchVersion));
  }
  BatchHead head{};
  head.rank = numbers.word(), head.ranks = numbers.word(), head.records = numbers.word();
  const char* const uuid = numbers.bytes(16);
  for (int byte = 0; byte < 16; ++byte) {
    constexpr char kDigits[] = "0123456789abcdef";
    const auto value = static_cast<unsigned char>(uuid[byte]);
    head.base += {kDigits[value >> 4], kDigits[value & 15]};
  }
  head.base_sequence = numbers.long_word(), head.sequence = numbers.long_word();
  head.step = numbers.long_word(), head.bytes = numbers.long_word();
  head.previous = numbers.word();
  if (head.bytes < kHeadBytes + kCommitBytes || head.bytes % 8 != 0 || head.bytes > kLargest) {
    throw std::runtime_error("its head says that the batch has " + std::to_string(head.bytes) +
                             " bytes, which no batch has");
  }
  if (head.rank >= head.ranks || head.base_sequence >= head.sequence || head.sequence > kLargest) {
    throw std::runtime_error("its head says that it is batch " + std::to_string(head.sequence) +
                             " of rank " + std::to_string(head.rank) + " of " +
                             std::to_string(head.ranks) + " after a base with commit " +
                             std::to_string(head.base_sequence) + ", which no batch is");
  }
  return head;
}

struct RecordHeader {
  uint32_t kind, table;
  uint64_t bytes;
  uint32_t sum;  // of the payload
};

// The header of a record of a batch; none: it is damaged.
inline std::optional<RecordHeader> record_of(const char* text, const BatchHead& head) {
  Numbers numbers(text);
  const uint64_t sequence = numbers.long_word(), step = numbers.long_word();
  if (!has_sum(text, kRecordBytes) || sequence != head.sequence || step != head.step) return {};
  RecordHeader record{};
  record.kind = numbers.word(), record.table = numbers.word();
  record.bytes = numbers.long_word(), record.sum = numbers.word();
  return record;
}

// The chain in the commit at the end of a batch; none: it is damaged.
inline std::optional<uint32_t> committed_chain(const char* text, const BatchHead& head) {
  const auto record = record_of(text, head);
  const char* const payload = text + kRecordBytes;
  constexpr size_t kBytes = kCommitBytes - kRecordBytes;
  if (!record || record->kind != kCommit || record->table != 0 || record->bytes != kBytes ||
      record->sum != crc32c(payload, kBytes)) {
    return {};
  }
  Numbers numbers(payload);
  const uint32_t chain = numbers.word();
  return numbers.word() == kCommitEnd ? std::optional(chain) : std::nullopt;
}

// Decodes a batch and checks all its bytes. Throws BrokenBatch.
inline Batch decoded(std::string data) {
  const auto head = data.size() < kHeadBytes ? std::nullopt : head_of(data.data());
  if (!head || head->bytes != data.size()) {
    throw BrokenBatch{"its head is damaged", false};
  }
  const std::string number = std::to_string(head->sequence);
  const size_t end = data.size() - kCommitBytes;
  const auto committed = committed_chain(data.data() + end, *head);
  if (!committed) throw BrokenBatch{"the commit of batch " + number + " is damaged", false};
  Batch batch{*head, std::move(data), {}, 0};
  const char* const first = batch.data.data();
  batch.chain = chained(first, kHeadBytes, head->previous);
  size_t at = kHeadBytes;
  for (uint32_t i = 0; i + 1 < head->records; ++i) {
    const std::string where = "record " + std::to_string(i) + " of batch " + number;
    const auto record = end - at < kRecordBytes ? std::nullopt : record_of(first + at, *head);
    if (!record) throw BrokenBatch{where + " has a damaged header", true};
    const char* const payload = first + at + kRecordBytes;
    const size_t room = end - at - kRecordBytes;
    const size_t filled = record->bytes > room ? 0 : (record->bytes + 7) / 8 * 8;
    if (record->bytes > room || filled > room || crc32c(payload, record->bytes) != record->sum) {
      throw BrokenBatch{where + " does not have its checksum", true};
    }
    for (size_t byte = record->bytes; byte < filled; ++byte) {
      if (payload[byte] != 0) {
        throw BrokenBatch{where + " is followed by other bytes than zeros", true};
      }
    }
    batch.chain = chained(first + at, kRecordBytes, batch.chain);
    batch.records.push_back({record->kind, record->table, payload, record->bytes});
    at += kRecordBytes + filled;
  }
  if (at != end || batch.chain != *committed) {
    throw BrokenBatch{"batch " + number + " is not what was committed", true};
  }
  return batch;
}

}  // namespace detail
}  // namespace dynemb::serving
