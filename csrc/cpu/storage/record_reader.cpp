#include "cpu/storage/record_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/storage/prefetch.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kBatchBytes = int64_t{8} << 20;  // of blocks that are read at a time
// Blocks between the arrival of a block and its use, in which its bytes and those that they replace
// come into the processor's cache.
constexpr size_t kDelay = 4;

// Ends the batch of files on every path.
class Batch {
 public:
  explicit Batch(SegmentFiles& files) : files_(files) {}
  ~Batch() { files_.end_batch(); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

 private:
  SegmentFiles& files_;
};

}  // namespace

RecordReader::RecordReader(IoPath path, int64_t largest_block)
    : reader_(block_reader(path)), blocks_(std::max(kBatchBytes, largest_block)) {}

void RecordReader::read(const RecordLog& log, std::vector<WantedRecord>& wanted,
                        const std::function<void(size_t)>& fetch,
                        const std::function<void(size_t, const char*)>& use) {
  // in order of files: records of one page are read once
  std::sort(wanted.begin(), wanted.end(), [](const WantedRecord& a, const WantedRecord& b) {
    return a.number != b.number ? a.number < b.number : a.index < b.index;
  });
  std::string fault;
  const auto check_and_use = [&](const WantedRecord& record, const char* bytes) {
    std::string wrong = log.fault(bytes, record.number, record.handle, record.id);
    if (wrong.empty()) {
      use(record.index, bytes);
    } else if (fault.empty()) {
      fault = std::move(wrong);
    }
  };
  const int64_t block_bytes = log.block_bytes();
  const auto most = static_cast<size_t>(blocks_.bytes() / block_bytes);
  std::vector<BlockRead> blocks;
  std::vector<size_t> first;  // of `wanted`, in each block
  SegmentFiles& files = log.files();
  const Batch batch(files);
  for (size_t next = 0; next < wanted.size();) {
    blocks.clear();
    first.clear();
    files.begin_batch();
    for (; next < wanted.size(); ++next) {
      const WantedRecord& record = wanted[next];
      if (const char* bytes = log.in_memory(record.number)) {
        check_and_use(record, bytes);
        continue;
      }
      const BlockRead block = log.block(
          record.number, blocks_.data() + static_cast<int64_t>(blocks.size()) * block_bytes);
      if (!blocks.empty() && blocks.back().file == block.file &&
          blocks.back().offset == block.offset) {
        continue;
      }
      if (blocks.size() == most) break;
      if (block.file < 0) {  // at the limit of open files: read those that are open first
        DYNEMB_CHECK(!blocks.empty(), "dynemb: opening the file of the record at ",
                     log.place_of(record.number, record.id),
                     " failed: the process has no descriptor left: raise the limit (ulimit "
                     "-n), or close files");
        break;
      }
      blocks.push_back(block);
      first.push_back(next);
    }
    // records in memory, of buffers that are not written yet, may follow those of a block
    const auto for_records = [&](size_t i, const auto& f) {
      const size_t end = i + 1 < first.size() ? first[i + 1] : next;
      for (size_t k = first[i]; k < end; ++k) {
        if (log.in_memory(wanted[k].number) != nullptr) continue;
        f(wanted[k], blocks[i].to + log.offset_in_block(wanted[k].number));
      }
    };
    std::array<size_t, kDelay> arrived;
    size_t count = 0;
    const auto failures = reader_->read(blocks, [&](size_t i) {
      for_records(i, [&](const WantedRecord& record, const char* bytes) {
        prefetch_bytes(bytes, log.layout().record);
        fetch(record.index);
      });
      if (count >= kDelay) for_records(arrived[count % kDelay], check_and_use);
      arrived[count++ % kDelay] = i;
    });
    for (size_t k = count - std::min(count, kDelay); k < count; ++k) {
      for_records(arrived[k % kDelay], check_and_use);
    }
    bytes_read_ += static_cast<int64_t>(blocks.size()) * block_bytes;
    for (const BlockFailure& failure : failures) {
      const WantedRecord& record = wanted[first[failure.block]];
      const std::string where = log.place_of(record.number, record.id);
      DYNEMB_CHECK(failure.error != 0, "dynemb: the record at ", where,
                   " is behind the end of the file, which has been cut: load a snapshot",
                   kDamagedStoreError);
      DYNEMB_CHECK(false, "dynemb: reading the record at ", where,
                   " failed: ", std::strerror(failure.error));
    }
    DYNEMB_CHECK(fault.empty(), fault, kDamagedStoreError);
  }
  DYNEMB_CHECK(fault.empty(), fault, kDamagedStoreError);
  reads_ += static_cast<int64_t>(wanted.size());
}

}  // namespace dynemb::cpu
