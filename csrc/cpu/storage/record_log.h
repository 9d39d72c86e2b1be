// The log of one slab: records are appended to segments, and a map leads from each row to its last
// record. Owned by the storage thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/storage/record.h"
#include "cpu/storage/block_io.h"
#include "cpu/storage/pending_writes.h"
#include "cpu/storage/record_map.h"
#include "cpu/storage/segment_files.h"

namespace dynemb::cpu {

class RecordLog {
 public:
  // `writes` has buffers of at least buffer_bytes().
  RecordLog(SegmentFiles& files, PendingWrites& writes, size_t slab, int64_t record_bytes,
            int64_t max_rows);
  RecordLog(const RecordLog&) = delete;
  RecordLog& operator=(const RecordLog&) = delete;

  // Of the buffer that a log of such records needs.
  static int64_t buffer_bytes(const SegmentLayout& layout);

  size_t slab() const { return slab_; }
  const SegmentLayout& layout() const { return layout_; }
  int64_t live() const { return live_; }  // records in the map
  int64_t head_room() const;              // records that can be appended to the last segment
  int64_t segments() const { return used_; }
  int64_t max_rows() const { return map_.max_rows(); }

  // Empty segments for the log to continue in.
  int64_t free_segments() const { return static_cast<int64_t>(free_.size()); }
  void add_free(SegmentFile file) { free_.push_back(file); }
  SegmentFile take_free();

  // Memory of the next record, layout().record bytes. Requires space: in the last segment, or a
  // free one.
  char* begin_record();
  // Fills in the header of the record, and makes it the row's record. Write the payload first.
  void end_record(int64_t handle, int64_t id, int32_t table);
  // Appends a whole record of the row's owner, with its checksum.
  void append(const char* record, int64_t handle);
  // Drops the record of a row, if it is of this owner.
  void erase(int64_t handle);
  // Begins to write the buffer. The log goes on with the next page, so written pages do not change.
  void flush();
  // Makes all records durable.
  void sync();

  // The number of the record of the row's owner, or RecordMap::kNone.
  int64_t find(int64_t handle) const { return map_.find(handle); }
  bool has_record(int64_t handle) const { return map_.has(handle); }    // also for other threads
  void prefetch_entry(int64_t handle) const { map_.prefetch(handle); }  // likewise
  // The record, if it has not been written yet; otherwise null.
  const char* in_memory(int64_t number) const;
  // The pages of a record, to be read to `to`. The file is -1 if a batch of files() has reached its
  // limit.
  BlockRead block(int64_t number, char* to) const;
  SegmentFiles& files() const { return files_; }
  int64_t block_bytes() const { return layout_.pages_per_record() * kPageBytes; }
  int64_t offset_in_block(int64_t number) const;
  // The fault in bytes that should be the record; empty: none.
  std::string fault(const char* record, int64_t number, int64_t handle, int64_t id) const;
  // "offset 4096 of PATH/rows/..., id 7": position of a record, for errors.
  std::string place_of(int64_t number, int64_t id) const;

  // Places of segments in record numbers begin at 1.
  int64_t place_count() const { return static_cast<int64_t>(places_.size()); }
  bool is_sealed(int64_t place) const { return places_[place].state == PlaceState::kSealed; }
  bool is_pinned(int64_t place) const;
  int64_t live_of(int64_t place) const { return places_[place].live; }
  const SegmentFile& file_of(int64_t place) const { return places_[place].file; }
  int64_t first_record(int64_t place) const { return place * layout_.records_per_segment(); }
  int64_t pinned_segments() const { return pinned_there_; }
  // Deletes existing segments that neither the log nor a snapshot needs.
  void delete_others();
  // Removes a segment without live records from the log, and makes it a free one.
  void recycle(int64_t place);

  // Content of a snapshot: entries of the map; places and file numbers of segments.
  std::vector<int64_t> entries() const { return map_.entries(); }
  std::vector<int64_t> live_segments() const;
  int64_t holding_segments() const;  // segments with live records
  // The files of snapshots: they are neither changed nor reused.
  const std::set<int64_t>& pinned() const { return pinned_; }
  void pin(std::set<int64_t> numbers);

  // Pins the present entries of the map under a number chosen by the caller: they stay readable,
  // and their segments are kept like those of snapshots until release(). Flush first.
  void pin_rows(int64_t number);
  bool has_pin(int64_t number) const { return pins_.count(number) != 0; }
  bool has_pins() const { return !pins_.empty(); }
  void release(int64_t number);
  // Like find(), for a pin.
  int64_t find_pinned(int64_t number, int64_t handle) const;

  // A state of the log to return to, with open files and checked places.
  struct Restored {
    std::vector<int64_t> entries;
    std::vector<SegmentFile> segments;  // by place, from 1
    std::vector<int64_t> live;          // of these segments
  };
  // Opens the segments of a snapshot; raises if something is missing or wrong. Nothing changes.
  Restored open_snapshot(const std::vector<int64_t>& entries,
                         const std::vector<int64_t>& segments) const;
  // Returns to the state. Segments that no snapshot needs are deleted.
  void restore(const Restored& state);

 private:
  enum class PlaceState { kVacant, kHead, kSealed };
  struct Place {
    SegmentFile file{0};
    PlaceState state = PlaceState::kVacant;
    int64_t live = 0;
    bool unsynced = false;
  };

  struct Pin {
    std::vector<int64_t> entries;  // of the map
    std::set<int64_t> files;
  };

  void count_pinned();
  void next_segment();
  void seal();
  void write_buffer();
  void set_record(int64_t handle);
  char* next_memory() const {
    return buffer_->data() + (layout_.offset(next_) - buffer_page_ * kPageBytes);
  }
  int64_t page_of_next() const;  // first page of the next record

  SegmentFiles& files_;
  PendingWrites& writes_;
  size_t slab_;
  SegmentLayout layout_;
  RecordMap map_;
  std::vector<Place> places_;
  std::vector<SegmentFile> free_;
  std::set<int64_t> pinned_;
  std::map<int64_t, Pin> pins_;
  int64_t pinned_there_ = 0;  // existing files that are pinned by snapshots or row pins
  int64_t live_ = 0;
  int64_t used_ = 0;  // places in use
  int64_t head_ = 0;  // place of the last segment; 0: none
  int64_t next_ = 0;  // next record to append there
  // Pages [buffer_page_, end) of the last segment, of which some have content.
  std::unique_ptr<PageBuffer> buffer_;
  int64_t buffer_page_ = 0;
};

}  // namespace dynemb::cpu
