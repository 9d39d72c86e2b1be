#include "cpu/storage/pending_writes.h"

#include <algorithm>
#include <utility>

namespace dynemb::cpu {
namespace {

constexpr size_t kMostWrites = 4;

}  // namespace

PendingWrites::PendingWrites(SegmentFiles& files, int64_t buffer_bytes)
    : files_(files), buffer_bytes_(buffer_bytes) {}

PendingWrites::~PendingWrites() {
  for (const Write& write : writes_) files_.end_transfer(write.slab, write.number, write.transfer);
}

std::unique_ptr<PageBuffer> PendingWrites::new_buffer() {
  if (spare_.empty()) return std::make_unique<PageBuffer>(buffer_bytes_);
  std::unique_ptr<PageBuffer> buffer = std::move(spare_.back());
  spare_.pop_back();
  return buffer;
}

void PendingWrites::finish_first() {
  Write& first = writes_.front();
  files_.end_transfer(first.slab, first.number, first.transfer);
  const FileTransfer transfer = first.transfer;
  const std::pair<size_t, int64_t> of{first.slab, first.number};
  spare_.push_back(std::move(first.buffer));
  writes_.pop_front();
  files_.raise_fault(of.first, of.second, transfer);
}

void PendingWrites::write(size_t slab, const SegmentFile& file, int64_t offset,
                          std::unique_ptr<PageBuffer>& buffer, int64_t bytes) {
  while (writes_.size() >= kMostWrites) finish_first();
  std::unique_ptr<PageBuffer> next = new_buffer();
  writes_.push_back({slab, file.number, nullptr, {}});
  try {
    files_.begin_write(slab, file, offset, buffer->data(), bytes, writes_.back().transfer);
  } catch (...) {
    writes_.pop_back();
    throw;
  }
  writes_.back().buffer = std::exchange(buffer, std::move(next));
}

const char* PendingWrites::find(size_t slab, int64_t number, int64_t offset) const {
  for (const Write& write : writes_) {
    if (write.slab != slab || write.number != number) continue;
    const int64_t begin = write.transfer.offset;
    if (offset >= begin && offset < begin + write.transfer.bytes) {
      return write.transfer.data + (offset - begin);
    }
  }
  return nullptr;
}

bool PendingWrites::has(size_t slab, int64_t number) const {
  return std::any_of(writes_.begin(), writes_.end(), [&](const Write& write) {
    return write.slab == slab && write.number == number;
  });
}

void PendingWrites::wait_for(size_t slab, int64_t number) {
  while (has(slab, number)) finish_first();
}

void PendingWrites::wait_for_all() {
  while (!writes_.empty()) finish_first();
}

void PendingWrites::check() {
  while (!writes_.empty() && files_.is_done(writes_.front().transfer)) finish_first();
}

}  // namespace dynemb::cpu
