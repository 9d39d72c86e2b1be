// The index of a live table: buckets as in core/index/bucket.h, but one thread may find ids while
// another one inserts and erases.
//
// The stored handle alone decides the state of a slot, because key and handle are two words that
// change one after the other:
//   stored > 0    the slot of the id that is its key; the handle is stored - 1
//   stored = 0    an empty slot: its bucket was never full, so no probe goes past it
//   stored = -1   a tombstone: probes go on past it
// A writer changes the key of a slot only while the slot has no id. A reader loads the stored
// handle and then the key, so it may see the handle of an earlier id beside a new key. It detects
// this by the id in the row.
//
// A table has two ranges of buckets. A rehash fills the unused one and publishes it by adding 1 to
// the number of rehashes, the last bit of which selects the range. The other one stays as it was
// until the next rehash, for readers that still use it.
#pragma once

#include "core/index/bucket.h"

namespace dynemb {

constexpr int64_t kLiveTombstone = -1;

// Of buckets * kBucketWidth slots: largest number of ids, and of ids or tombstones.
DYNEMB_HD int64_t live_capacity(int64_t buckets) { return max_ids(buckets); }
DYNEMB_HD bool needs_live_rehash(int64_t buckets, int64_t size, int64_t tombstones,
                                 int64_t incoming) {
  return tombstones > 0 &&
         (size + tombstones + incoming) * 100 > buckets * kBucketWidth * kMaxUsedPercent;
}

}  // namespace dynemb
