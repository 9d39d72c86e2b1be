#include "cpu/storage/room.h"

#include <algorithm>

namespace dynemb::cpu {

int64_t Room::wanted(size_t slab, int64_t more) const {
  const SlabRoom& room = slabs_[slab];
  const int64_t records = room.queued + room.reserved + room.collecting + more - room.head_room;
  return records <= 0 ? 0 : (records + room.a_segment - 1) / room.a_segment;
}

}  // namespace dynemb::cpu
