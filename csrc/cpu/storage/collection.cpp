#include "cpu/storage/collection.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/storage/file_errors.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kChunkBytes = int64_t{1} << 20;  // read at a time

int64_t largest_record(const std::vector<std::unique_ptr<RecordLog>>& logs) {
  int64_t bytes = kChunkBytes;
  for (const auto& log : logs) {
    if (log) bytes = std::max(bytes, log->block_bytes());
  }
  return bytes;
}

}  // namespace

Collection::Collection(SegmentFiles& files, std::vector<std::unique_ptr<RecordLog>>& logs)
    : files_(files), logs_(logs), chunk_(largest_record(logs)) {}

double Collection::Victim::live_part() const {
  return static_cast<double>(live()) / static_cast<double>(log->layout().records_per_segment());
}

Collection::Victim Collection::best(bool pinned) const {
  Victim best;
  double least = kMostLive;
  for (const auto& log : logs_) {
    if (!log) continue;
    for (int64_t place = 1; place < log->place_count(); ++place) {
      if (!log->is_sealed(place)) continue;
      const Victim victim{log.get(), place};
      if (log->is_pinned(place) && (!pinned || victim.live() == 0)) continue;
      if (victim.live_part() >= least) continue;
      least = victim.live_part();
      best = victim;
    }
  }
  return best;
}

void Collection::begin(const Victim& victim) {
  victim_ = victim;
  live_part_at_begin_ = victim.live_part();
  next_ = chunk_begin_ = chunk_end_ = 0;
}

void Collection::abandon() { victim_ = Victim(); }

// Reads the pages from the next record on.
void Collection::read_chunk() {
  const SegmentLayout& layout = victim_.log->layout();
  const SegmentFile& file = victim_.log->file_of(victim_.place);
  chunk_begin_ = layout.offset(next_) / kPageBytes * kPageBytes;
  const int64_t records_pages = layout.pages_per_record() * kPageBytes;
  const int64_t bytes = std::min(chunk_.bytes() / records_pages * records_pages,
                                 layout.offset(layout.records_per_segment()) - chunk_begin_);
  const int descriptor = files_.descriptor(victim_.log->slab(), file);
  if (descriptor < 0) {
    raise_file_error("opening", files_.name(victim_.log->slab(), file.number), errno);
  }
  for (int64_t done = 0; done < bytes;) {
    const ssize_t got = pread(descriptor, chunk_.data() + done, static_cast<size_t>(bytes - done),
                              chunk_begin_ + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      const std::string what = "reading " + std::to_string(bytes) + " bytes at offset " +
                               std::to_string(chunk_begin_) + " of";
      raise_file_error(what.c_str(), files_.name(victim_.log->slab(), file.number),
                       got < 0 ? errno : EIO);
    }
    done += got;
  }
  files_.forget_pages(victim_.log->slab(), file, chunk_begin_, bytes);
  chunk_end_ = chunk_begin_ + bytes;
  bytes_read_ += bytes;
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
    if (layout.offset(next_) >= chunk_end_) read_chunk();
    const char* record = chunk_.data() + (layout.offset(next_) - chunk_begin_);
    RecordHeader header;
    std::memcpy(&header, record, sizeof(header));
    if (log.find(header.handle) == first + next_) {
      const std::string fault = log.fault(record, first + next_, header.handle, header.id);
      DYNEMB_CHECK(fault.empty(), fault, kDamagedStoreError);
      std::memcpy(log.begin_record(), record, static_cast<size_t>(layout.record));
      log.end_record(header.handle, header.id, header.table);
      ++copied;
    }
    ++next_;
  }
  collected_ += copied;
  if (victim_.live() == 0) end();
  return copied;
}

void Collection::end() {
  // a snapshot may need it by now
  if (!victim_.log->is_pinned(victim_.place)) victim_.log->recycle(victim_.place);
  victim_ = Victim();
}

}  // namespace dynemb::cpu
