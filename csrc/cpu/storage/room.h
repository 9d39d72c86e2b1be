// Reservation of space in segments for records that will be written. Shared by the thread that
// submits jobs and the one that does them; callers hold their mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynemb::cpu {

// Of one slab; in records, except `free`.
struct SlabRoom {
  int64_t a_segment = 0;   // records of a segment; 0: the slab has no log
  int64_t head_room = 0;   // space in the last segment
  int64_t free = 0;        // free segments
  int64_t queued = 0;      // in unfinished jobs
  int64_t reserved = 0;    // for the next job
  int64_t expected = 0;    // prepared ahead if nothing has to be moved for it
  int64_t collecting = 0;  // still to be copied out of the segment under garbage collection
  bool is_collecting = false;
};

class Room {
 public:
  explicit Room(size_t slabs) : slabs_(slabs) {}
  SlabRoom& operator[](size_t slab) { return slabs_[slab]; }
  size_t size() const { return slabs_.size(); }

  // Segments needed beyond the last one, for all pending records and `more`.
  int64_t wanted(size_t slab, int64_t more = 0) const;
  // Plus one in which the live records of any segment fit, so that garbage collection never lacks
  // space. A running collection is using it.
  int64_t needed(size_t slab, int64_t more = 0) const {
    return wanted(slab, more) + (slabs_[slab].is_collecting ? 0 : 1);
  }
  bool is_enough(size_t slab, int64_t more) const {
    return slabs_[slab].free >= needed(slab, more);
  }
  // Cancels all reservations.
  void cancel() {
    for (SlabRoom& room : slabs_) room.reserved = 0;
  }

 private:
  std::vector<SlabRoom> slabs_;
};

}  // namespace dynemb::cpu
