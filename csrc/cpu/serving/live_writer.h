// Updates of a live table while other threads read it. One thread at a time may update.
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

// Rows written one after another: first `erased` are removed, then ids get their rows. An id in
// both keeps its slot and gets its row, so that no reader misses it. The last row counts if an id
// occurs several times.
struct LiveUpdate {
  const int64_t* ids;
  int64_t count;
  const void* packed;  // [count, row_words] words
  const int64_t* erased;
  int64_t erased_count;
};

struct LiveOutcome {
  int64_t inserted;
  int64_t updated;
  int64_t erased;
  int64_t wanted;  // rows that new ids need
  int64_t free;    // rows available for them; if fewer, nothing has changed
};

LiveOutcome apply_live(const LiveWriter& writer, const LiveUpdate& update);

// Moves all ids to the other range of buckets, without tombstones.
void rehash_live(const LiveWriter& writer);

}  // namespace dynemb::cpu
