// The index of a live table: buckets as those of core/index/bucket.h, in which a thread finds ids
// while another one inserts and erases.
//
// The stored handle alone says what a slot is, because key and handle are two words that change one
// after the other:
//   stored > 0    the slot of the id that is its key; the handle is stored - 1
//   stored = 0    an empty slot: its bucket was never full, so no probe goes past it
//   stored = -1   a tombstone: probes go on past it
// A writer changes the key of a slot only while it is not that of an id. A reader that loads the
// stored handle and then the key may still see the handle of an earlier id beside a new key: the
// row, which names its id, tells.
//
// A table has two ranges of buckets. A rehash fills the one that is not in use and publishes it by
// adding 1 to the number of rehashes, the last bit of which says which range is in use. The other
// one stays as it was until the next rehash, for readers that are still in it.
#pragma once

#include "core/index/bucket.h"

namespace dynemb {

constexpr int64_t kLiveTombstone = -1;

// Of buckets * kBucketWidth slots, as many are ids at most, and as many ids or tombstones.
DYNEMB_HD int64_t live_capacity(int64_t buckets) { return max_ids(buckets); }
DYNEMB_HD bool needs_live_rehash(int64_t buckets, int64_t size, int64_t tombstones,
                                 int64_t incoming) {
  return tombstones > 0 &&
         (size + tombstones + incoming) * 100 > buckets * kBucketWidth * kMaxUsedPercent;
}

}  // namespace dynemb
