// The words in which rows of a slab are preserved for a save that reads them while training goes
// on. The protocol is in cpu/rows/undo.h.
#pragma once

#include <cstdint>

namespace dynemb {

// The counters have a line of the cache each, because the threads that write rows change the one
// and the thread that reads changes the other.
enum UndoColumn : int64_t {
  kUndoActive = 0,
  kUndoRows = 1,      // rows that are preserved: the first ones of the slab
  kUndoPlaces = 2,    // how many rows there is room for
  kUndoRowBytes = 3,  // of a place
  kUndoMarks = 4,     // the word from which on there is an int32 for each row, see UndoMark
  kUndoFree = 5,      // the word from which on there is an int32 for each place: free ones, a ring
  kUndoBuffer = 6,    // the word from which on the places lie
  kUndoTaken = 8,     // places that have been taken, ever
  kUndoGiven = 16,    // places that have been free, ever
  kUndoWaits = 24,    // how often a writer has waited for a place
  kUndoColumns = 32
};

// Larger marks are the number of a row's place, and 1.
enum UndoMark : int32_t {
  kUndoRead = -2,     // the save needs the row no more
  kUndoCopying = -1,  // a writer is copying the row
  kUndoUnread = 0
};

}  // namespace dynemb
