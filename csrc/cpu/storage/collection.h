// Garbage collection of segments with mostly dead records: the live ones are appended to the log
// again, and the segment becomes free. Greedy: the segment with the smallest fraction of live
// records goes first, of those without writes on their way if there are any.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/storage/record_log.h"
#include "cpu/storage/segment_files.h"

namespace dynemb::cpu {

class Collection {
 public:
  Collection(SegmentFiles& files, PendingWrites& writes,
             std::vector<std::unique_ptr<RecordLog>>& logs);
  ~Collection();
  Collection(const Collection&) = delete;
  Collection& operator=(const Collection&) = delete;

  // Segments with a larger fraction of live records are not collected.
  static constexpr double kMostLive = 15.0 / 16.0;

  struct Victim {
    RecordLog* log = nullptr;
    int64_t place = 0;
    double live_part() const;
    int64_t live() const { return log == nullptr ? 0 : log->live_of(place); }
  };

  // The next segment to collect; its log is null if there is none. `pinned`: includes segments that
  // snapshots need; these stay, but later snapshots will not need them.
  Victim best(bool pinned = false) const;
  bool is_running() const { return victim_.log != nullptr; }
  const Victim& victim() const { return victim_; }
  void begin(const Victim& victim);
  double live_part_at_begin() const { return live_part_at_begin_; }
  // Copies up to `records` records; ends with the segment. Returns the number of copies. Raises if
  // a record cannot be read.
  int64_t step(int64_t records);
  void abandon();
  int64_t collected() const { return collected_; }
  int64_t bytes_read() const { return bytes_read_; }

 private:
  // Pages of the victim, read on another thread.
  struct Chunk {
    explicit Chunk(int64_t bytes) : pages(bytes) {}
    PageBuffer pages;
    FileTransfer transfer;
    bool is_read = true;  // otherwise the transfer has not ended
    int64_t end() const { return transfer.offset + transfer.bytes; }
  };

  Victim best(bool pinned, bool pending) const;
  void read_ahead();
  void next_chunk();
  void end_reads();
  void end();

  SegmentFiles& files_;
  PendingWrites& writes_;
  std::vector<std::unique_ptr<RecordLog>>& logs_;  // by slab; null for those without a log
  Victim victim_;
  double live_part_at_begin_ = 0;
  int64_t next_ = 0;             // next record of the segment
  std::array<Chunk, 3> chunks_;  // a ring: the one that is copied, then those that are read ahead
  size_t chunk_ = 0;
  int64_t read_until_ = 0;  // offset in the file
  int64_t collected_ = 0;
  int64_t bytes_read_ = 0;
};

}  // namespace dynemb::cpu
