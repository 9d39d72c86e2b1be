// Layout of the index; other files know keys and handles by these functions only.
//
// A bucket is kBucketWidth keys followed by kBucketWidth stored handles: one 64-byte line at width
// 4, so a probe is one random access (benchmarks/notes/index.md compares widths).
//
// A stored handle is handle + 1, so zero-filled memory is an empty index and no id is reserved:
//   key any, stored > 0   an occupied slot
//   key 0,   stored = 0   an empty slot
//   key != 0, stored = 0  a tombstone: its bucket was full once, so probes must go on past it
// A match is the bitwise OR of (key == id ? stored : 0) over the bucket; empty slots and tombstones
// add nothing to it, whatever their key.
#pragma once

#include "core/index/handle.h"
#include "core/index/hash.h"

#if !defined(DYNEMB_BUCKET_WIDTH)
#define DYNEMB_BUCKET_WIDTH 4
#endif

namespace dynemb {

constexpr int kBucketWidth = DYNEMB_BUCKET_WIDTH;
constexpr int kBucketWords = 2 * kBucketWidth;

// At load 0.70 all but a few keys in a thousand fit into their two candidate buckets.
constexpr int64_t kMaxLoadPercent = 70;
// Tombstones count as used slots here: beyond it the index is rehashed, which removes them.
constexpr int64_t kMaxUsedPercent = 85;
// An index that must grow gets this much larger. More would move fewer ids, but with scores take
// more than 50 bytes an id after a growth.
constexpr int64_t kGrowthPercent = 45;
constexpr int64_t kMinBuckets = 64 / kBucketWidth;
// Bucket counts of larger indexes are multiples of this, so that equal ranges of the hash are whole
// ranges of buckets, before and after a growth: the unit of parallel placement.
constexpr int64_t kPartitions = 64;

DYNEMB_HD int64_t encode_handle(int64_t handle) {  // unsigned: the largest wraps
  return static_cast<int64_t>(static_cast<uint64_t>(handle) + 1);
}
DYNEMB_HD int64_t decode_handle(int64_t stored) {
  return static_cast<int64_t>(static_cast<uint64_t>(stored) - 1);
}

constexpr int64_t kTombstoneKey = 1;  // any key but 0, used when the erased id is 0

DYNEMB_HD int64_t max_ids(int64_t bucket_count) {
  return bucket_count * kBucketWidth * kMaxLoadPercent / 100;
}

DYNEMB_HD int64_t round_bucket_count(int64_t buckets) {
  if (buckets < kMinBuckets) return kMinBuckets;
  const int64_t unit = buckets <= kPartitions ? kMinBuckets : kPartitions;
  return (buckets + unit - 1) / unit * unit;
}

// The fewest buckets that hold `ids` at the maximum load.
DYNEMB_HD int64_t buckets_for(int64_t ids) {
  const int64_t most = int64_t{1} << 56;  // more than any index holds, and no product overflows
  const int64_t bounded = ids < most ? ids : most;
  const int64_t slots = (bounded * 100 + kMaxLoadPercent - 1) / kMaxLoadPercent;
  return round_bucket_count((slots + kBucketWidth - 1) / kBucketWidth);
}

// The bucket count after a usual growth.
DYNEMB_HD int64_t grown_bucket_count(int64_t bucket_count) {
  return round_bucket_count(bucket_count + (bucket_count * kGrowthPercent + 99) / 100);
}

// The bucket count for a table of `size` ids and `tombstones` that takes `incoming` new ids, and
// `replacing` more in place of others. All devices use this rule. A result above region_buckets
// means that the table is full.
struct GrowthDecision {
  bool rehash;
  int64_t bucket_count;
};
DYNEMB_HD GrowthDecision decide_growth(int64_t bucket_count, int64_t region_buckets, int64_t size,
                                       int64_t tombstones, int64_t incoming,
                                       int64_t replacing = 0) {
  const int64_t slots = bucket_count * kBucketWidth;
  const int64_t needed = size + incoming;
  if (needed > max_ids(bucket_count)) {
    const int64_t grown = grown_bucket_count(bucket_count);
    const int64_t bounded = grown < region_buckets ? grown : region_buckets;
    const int64_t exact = buckets_for(needed);
    return {true, exact > bounded ? exact : bounded};
  }
  if (tombstones > 0 && (needed + tombstones + replacing) * 100 > slots * kMaxUsedPercent) {
    return {true, bucket_count};
  }
  return {false, bucket_count};
}

// Walks the buckets that may hold an id: first candidate, second candidate, then the ones after it.
struct ProbeSequence {
  int64_t bucket_count;
  int64_t first;
  int64_t second;
  int64_t visited;

  DYNEMB_HD ProbeSequence(uint64_t hash, int64_t count)
      : bucket_count(count),
        first(bucket_of(hash, count)),
        second(bucket_of(second_hash(hash), count)),
        visited(0) {}

  DYNEMB_HD int64_t at(int64_t probe) const {
    if (probe == 0) return first;
    const int64_t bucket = second + probe - 1;
    return bucket < bucket_count ? bucket : bucket - bucket_count;
  }
  // Every bucket has been seen after bucket_count + 1 probes.
  DYNEMB_HD int64_t length() const { return bucket_count + 1; }
};

}  // namespace dynemb
