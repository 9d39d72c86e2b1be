// Whether there is room in segments for records that are on their way. The thread that submits jobs
// and the one that does them share it; whoever calls holds their mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynemb::cpu {

// Of one slab, in records but for `free`.
struct SlabRoom {
  int64_t a_segment = 0;   // records of a segment; 0: the slab has no log
  int64_t head_room = 0;   // that the last segment still takes
  int64_t free = 0;        // segments that are ready
  int64_t queued = 0;      // in jobs that are not done
  int64_t promised = 0;    // that the next job may bring
  int64_t hoped = 0;       // for which segments are made ready where nothing has to make way
  int64_t collecting = 0;  // still to be copied out of the segment that is being collected
  bool is_collecting = false;
};

class Room {
 public:
  explicit Room(size_t slabs) : slabs_(slabs) {}
  SlabRoom& operator[](size_t slab) { return slabs_[slab]; }
  size_t size() const { return slabs_.size(); }

  // Segments that everything on its way, and `more` records, fill beyond the last one.
  int64_t wanted(size_t slab, int64_t more = 0) const;
  // And one more in which the live records of a segment always fit, so that collecting never stops
  // for want of room; whoever collects is using it.
  int64_t needed(size_t slab, int64_t more = 0) const {
    return wanted(slab, more) + (slabs_[slab].is_collecting ? 0 : 1);
  }
  bool is_enough(size_t slab, int64_t more) const {
    return slabs_[slab].free >= needed(slab, more);
  }
  // Promises nothing any more.
  void withdraw() {
    for (SlabRoom& room : slabs_) room.promised = 0;
  }

 private:
  std::vector<SlabRoom> slabs_;
};

}  // namespace dynemb::cpu
