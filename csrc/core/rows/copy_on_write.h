// The words in which rows of a slab are preserved for a save that reads them while training goes
// on. The protocol is in cpu/rows/copy_on_write.h.
#pragma once

#include <cstdint>

namespace dynemb {

// The counters have a line of the cache each, because the threads that write rows change the one
// and the thread that reads changes the other.
enum CopyOnWriteColumn : int64_t {
  kCowActive = 0,
  kCowRows = 1,      // rows that are preserved: the first ones of the slab
  kCowPlaces = 2,    // how many rows there is room for
  kCowRowBytes = 3,  // of a place
  kCowMarks = 4,     // the word from which on there is an int32 for each row, see CopyMark
  kCowFree = 5,      // the word from which on there is an int32 for each place: free ones, a ring
  kCowBuffer = 6,    // the word from which on the places lie
  kCowTaken = 8,     // places that have been taken, ever
  kCowGiven = 16,    // places that have been free, ever
  kCowWaits = 24,    // how often a writer has waited for a place
  kCowColumns = 32
};

// Larger marks are the number of a row's place, and 1.
enum CopyMark : int32_t {
  kCowRead = -2,     // the save needs the row no more
  kCowCopying = -1,  // a writer is copying the row
  kCowUnread = 0
};

}  // namespace dynemb
