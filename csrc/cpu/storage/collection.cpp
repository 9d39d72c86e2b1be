#include "cpu/storage/collection.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kChunkBytes = int64_t{1} << 20;  // read at a time
constexpr int64_t kPrefetch = 8;                   // records ahead

int64_t largest_record(const std::vector<std::unique_ptr<RecordLog>>& logs) {
  int64_t bytes = kChunkBytes;
  for (const auto& log : logs) {
    if (log) bytes = std::max(bytes, log->block_bytes());
  }
  return bytes;
}

}  // namespace

Collection::Collection(SegmentFiles& files, PendingWrites& writes,
                       std::vector<std::unique_ptr<RecordLog>>& logs)
    : files_(files),
      writes_(writes),
      logs_(logs),
      chunks_{Chunk(largest_record(logs)), Chunk(largest_record(logs)),
              Chunk(largest_record(logs))} {}

Collection::~Collection() { end_reads(); }

double Collection::Victim::live_part() const {
  return static_cast<double>(live()) / static_cast<double>(log->layout().records_per_segment());
}

Collection::Victim Collection::best(bool pinned) const {
  const Victim written = best(pinned, /*pending=*/false);
  return written.log != nullptr ? written : best(pinned, /*pending=*/true);
}

// `pending`: includes segments with writes to wait for.
Collection::Victim Collection::best(bool pinned, bool pending) const {
  Victim best;
  double least = kMostLive;
  for (const auto& log : logs_) {
    if (!log) continue;
    for (int64_t place = 1; place < log->place_count(); ++place) {
      if (!log->is_sealed(place)) continue;
      const Victim victim{log.get(), place};
      if (log->is_pinned(place) && (!pinned || victim.live() == 0)) continue;
      if (victim.live_part() >= least) continue;
      if (!pending && writes_.has(log->slab(), log->file_of(place).number)) continue;
      least = victim.live_part();
      best = victim;
    }
  }
  return best;
}

void Collection::begin(const Victim& victim) {
  victim_ = victim;
  live_part_at_begin_ = victim.live_part();
  next_ = read_until_ = 0;
  chunk_ = 0;
  for (Chunk& chunk : chunks_) chunk.transfer = FileTransfer();
  if (victim.live() == 0) return;
  writes_.wait_for(victim.log->slab(), victim.log->file_of(victim.place).number);
  read_ahead();
}

void Collection::abandon() {
  end_reads();
  victim_ = Victim();
}

// Begins reads of the next pages, to all chunks that are not in use.
void Collection::read_ahead() {
  const RecordLog& log = *victim_.log;
  const SegmentLayout& layout = log.layout();
  const int64_t end = layout.offset(layout.records_per_segment());
  const int64_t a_record = layout.pages_per_record() * kPageBytes;
  if (read_until_ == 0) read_until_ = layout.offset(0);
  for (size_t k = 0; k < chunks_.size() && read_until_ < end; ++k) {
    Chunk& chunk = chunks_[(chunk_ + k) % chunks_.size()];
    if (chunk.end() > layout.offset(next_)) continue;  // to be copied
    const int64_t bytes = std::min(chunk.pages.bytes() / a_record * a_record, end - read_until_);
    files_.begin_read(log.slab(), log.file_of(victim_.place), read_until_, chunk.pages.data(),
                      bytes, chunk.transfer);
    chunk.is_read = false;
    read_until_ += bytes;
    bytes_read_ += bytes;
  }
}

// Waits for the pages of the next record.
void Collection::next_chunk() {
  const int64_t offset = victim_.log->layout().offset(next_);
  while (chunks_[chunk_].end() <= offset) chunk_ = (chunk_ + 1) % chunks_.size();
  read_ahead();
  Chunk& chunk = chunks_[chunk_];
  if (chunk.is_read) return;
  const size_t slab = victim_.log->slab();
  const SegmentFile& file = victim_.log->file_of(victim_.place);
  files_.end_transfer(slab, file.number, chunk.transfer);
  chunk.is_read = true;
  files_.raise_fault(slab, file.number, chunk.transfer);
  files_.forget_pages(slab, file, chunk.transfer.offset, chunk.transfer.bytes);
}

void Collection::end_reads() {
  for (Chunk& chunk : chunks_) {
    if (chunk.is_read) continue;
    files_.end_transfer(victim_.log->slab(), victim_.log->file_of(victim_.place).number,
                        chunk.transfer);
    chunk.is_read = true;
  }
}

int64_t Collection::step(int64_t records) {
  RecordLog& log = *victim_.log;
  const SegmentLayout& layout = log.layout();
  const int64_t first = log.first_record(victim_.place);
  int64_t copied = 0;
  while (victim_.live() > 0 && copied < records) {
    const SegmentFile& file = log.file_of(victim_.place);
    DYNEMB_CHECK(next_ < layout.records_per_segment(),
                 "dynemb: ", files_.name(log.slab(), file.number), " lacks ", victim_.live(),
                 " records that should be there: it is damaged. Load a snapshot, and check "
                 "the disk",
                 kDamagedStoreError);
    const int64_t offset = layout.offset(next_);
    if (offset >= chunks_[chunk_].end() || !chunks_[chunk_].is_read) next_chunk();
    const Chunk& chunk = chunks_[chunk_];
    const char* record = chunk.pages.data() + (offset - chunk.transfer.offset);
    RecordHeader header;
    const int64_t later = layout.offset(next_ + kPrefetch);
    if (later + layout.record <= chunk.end()) {
      std::memcpy(&header, chunk.pages.data() + (later - chunk.transfer.offset), sizeof(header));
      log.prefetch_entry(header.handle);
    }
    std::memcpy(&header, record, sizeof(header));
    if (log.find(header.handle) == first + next_) {
      const std::string fault = log.fault(record, first + next_, header.handle, header.id);
      DYNEMB_CHECK(fault.empty(), fault, kDamagedStoreError);
      log.append(record, header.handle);
      ++copied;
    }
    ++next_;
  }
  collected_ += copied;
  if (victim_.live() == 0) end();
  return copied;
}

void Collection::end() {
  end_reads();
  // a snapshot may need it by now
  if (!victim_.log->is_pinned(victim_.place)) victim_.log->recycle(victim_.place);
  victim_ = Victim();
}

}  // namespace dynemb::cpu
