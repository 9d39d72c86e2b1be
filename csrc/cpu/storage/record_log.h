// The log of one slab: records are appended to segments, and a map says where each row's last
// record is. Owned by the storage thread.
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
#include "cpu/storage/record_map.h"
#include "cpu/storage/segment_files.h"

namespace dynemb::cpu {

class RecordLog {
 public:
  RecordLog(SegmentFiles& files, size_t slab, int64_t record_bytes, int64_t max_rows);
  RecordLog(const RecordLog&) = delete;
  RecordLog& operator=(const RecordLog&) = delete;

  size_t slab() const { return slab_; }
  const SegmentLayout& layout() const { return layout_; }
  int64_t live() const { return live_; }  // records that the map leads to
  int64_t head_room() const;              // records that can be appended to the last segment
  int64_t segments() const { return used_; }
  int64_t max_rows() const { return map_.max_rows(); }

  // Segments without content, to which the log goes on.
  int64_t free_segments() const { return static_cast<int64_t>(free_.size()); }
  void add_free(SegmentFile file) { free_.push_back(file); }
  SegmentFile take_free();

  // Memory of the next record, layout().record bytes. There has to be room: in the last segment,
  // or a free one.
  char* begin_record();
  // Fills in the header of the record, and makes it the row's. Bytes of the payload come first.
  void end_record(int64_t handle, int64_t id, int32_t table);
  // Makes the row one without a record, if its owner has one.
  void erase(int64_t handle);
  // Writes what is in memory. The log goes on with the next page, so what has been written stays.
  void flush();
  // Makes all records durable.
  void sync();

  // The number of the record of the row's owner, or RecordMap::kNone.
  int64_t find(int64_t handle) const { return map_.find(handle); }
  bool has_record(int64_t handle) const { return map_.has(handle); }  // also for other threads
  // The record, where it has not been written yet; else null.
  const char* in_memory(int64_t number) const;
  // The pages that have a record, to be read to `to`. The file is -1 where a batch of
  // files() has as many open as it may.
  BlockRead block(int64_t number, char* to) const;
  SegmentFiles& files() const { return files_; }
  int64_t block_bytes() const { return layout_.pages_per_record() * kPageBytes; }
  int64_t offset_in_block(int64_t number) const;
  // What is wrong with bytes that should be the record; empty: nothing.
  std::string fault(const char* record, int64_t number, int64_t handle, int64_t id) const;
  // "offset 4096 of PATH/rows/..., id 7": where a record is, for errors.
  std::string place_of(int64_t number, int64_t id) const;

  // Places of segments in record numbers begin at 1.
  int64_t place_count() const { return static_cast<int64_t>(places_.size()); }
  bool is_sealed(int64_t place) const { return places_[place].state == PlaceState::kSealed; }
  bool is_pinned(int64_t place) const;
  int64_t live_of(int64_t place) const { return places_[place].live; }
  const SegmentFile& file_of(int64_t place) const { return places_[place].file; }
  int64_t first_record(int64_t place) const { return place * layout_.records_per_segment(); }
  int64_t pinned_segments() const { return pinned_there_; }
  // Deletes the segments that are there, but neither the log's nor a snapshot's.
  void delete_others();
  // Takes a segment without live records out of the log, and makes it a free one.
  void recycle(int64_t place);

  // What a snapshot needs: entries of the map; places and file numbers of segments.
  std::vector<int64_t> entries() const { return map_.entries(); }
  std::vector<int64_t> live_segments() const;
  int64_t holding_segments() const;  // that have live records
  // The files of snapshots: they are neither changed nor taken for something else.
  const std::set<int64_t>& pinned() const { return pinned_; }
  void pin(std::set<int64_t> numbers);

  // Keeps what the map leads to now, under a number of the caller's: it can be read, whatever is
  // appended, and its segments are as those of snapshots until release(). Needs a flush before.
  void hold(int64_t number);
  bool has_hold(int64_t number) const { return held_.count(number) != 0; }
  bool is_held() const { return !held_.empty(); }
  void release(int64_t number);
  // As find(), for what a hold keeps.
  int64_t find_held(int64_t number, int64_t handle) const;

  // A state of the log to go back to: its files are there, its places checked.
  struct Restored {
    std::vector<int64_t> entries;
    std::vector<SegmentFile> segments;  // by place, from 1
    std::vector<int64_t> live;          // of these segments
  };
  // Opens what a snapshot needs; raises where something is missing or wrong. Changes nothing.
  Restored open_snapshot(const std::vector<int64_t>& entries,
                         const std::vector<int64_t>& segments) const;
  // Goes back. Segments that no snapshot needs are deleted.
  void restore(const Restored& state);

 private:
  enum class PlaceState { kVacant, kHead, kSealed };
  struct Place {
    SegmentFile file{0};
    PlaceState state = PlaceState::kVacant;
    int64_t live = 0;
    bool unsynced = false;
  };

  struct Held {
    std::vector<int64_t> entries;  // of the map
    std::set<int64_t> files;
  };

  void count_pinned();
  void next_segment();
  void seal();
  void write_buffer();
  int64_t page_of_next() const;  // first page of the next record

  SegmentFiles& files_;
  size_t slab_;
  SegmentLayout layout_;
  RecordMap map_;
  std::vector<Place> places_;
  std::vector<SegmentFile> free_;
  std::set<int64_t> pinned_;
  std::map<int64_t, Held> held_;
  int64_t pinned_there_ = 0;  // files that there are and that are pinned or held
  int64_t live_ = 0;
  int64_t used_ = 0;  // places that are not vacant
  int64_t head_ = 0;  // place of the last segment; 0: none
  int64_t next_ = 0;  // record of it to be appended
  // Pages [buffer_page_, end) of the last segment, of which some have content.
  PageBuffer buffer_;
  int64_t buffer_page_ = 0;
};

}  // namespace dynemb::cpu
