// Layout of a slab's copy-on-write vector, for a save that reads rows while training goes on. The
// protocol is in cpu/rows/copy_on_write.h.
#pragma once

#include <cstdint>

namespace dynemb {

// Each counter has a cache line of its own, because threads that write rows change one and the
// thread that reads changes the other.
enum CopyOnWriteColumn : int64_t {
  kCowActive = 0,
  kCowRows = 1,      // number of rows in the save: the first ones of the slab
  kCowPlaces = 2,    // number of places
  kCowRowBytes = 3,  // of a place
  kCowMarks = 4,     // first word of the marks: an int32 for each row, see CopyMark
  kCowFree = 5,      // first word of the ring of free places: an int32 for each place
  kCowBuffer = 6,    // first word of the places
  kCowTaken = 8,     // places taken so far
  kCowGiven = 16,    // places freed so far
  kCowWaits = 24,    // how often a writer has waited for a place
  kCowColumns = 32
};

// Larger marks are the number of a row's place + 1.
enum CopyMark : int32_t {
  kCowRead = -2,     // the save does not need the row any more
  kCowCopying = -1,  // a writer is copying the row
  kCowUnread = 0
};

}  // namespace dynemb
