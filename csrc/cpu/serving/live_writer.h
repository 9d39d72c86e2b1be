// Updates a live table while other threads read it. One thread at a time may.
#pragma once

#include <cstdint>

#include "core/columns.h"
#include "cpu/serving/live_table.h"

namespace dynemb::cpu {

struct LiveWriter {
  LiveTable table;
  int64_t* counters;  // [kLiveTableColumns]
  int64_t* slab;      // [kLiveSlabColumns]
};

// Rows that are written one after another: first `erased` are taken out, then ids get theirs. An id
// in both keeps its place and gets its row, so that no reader misses it. Of an id that is there
// several times, the last row stays.
struct LiveUpdate {
  const int64_t* ids;
  int64_t count;
  const int64_t* packed;  // [count, row_words]: rows whose ids and generations are not looked at
  const int64_t* erased;
  int64_t erased_count;
};

struct LiveOutcome {
  int64_t inserted;
  int64_t updated;
  int64_t erased;
  int64_t wanted;  // rows for ids that are not there
  int64_t free;    // rows that they can have; if fewer are free, nothing has changed
};

LiveOutcome apply_live(const LiveWriter& writer, const LiveUpdate& update);

// Moves all ids to the other range of buckets, without tombstones.
void rehash_live(const LiveWriter& writer);

}  // namespace dynemb::cpu
