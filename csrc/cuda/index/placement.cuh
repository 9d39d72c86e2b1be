// Placement of entries by claims (core/index/claim.h): one kernel makes the claims, the next one
// settles them.
#pragma once

#include "core/index/claim.h"
#include "cuda/index/tensors.cuh"

namespace dynemb::cuda {

// An entry to be placed in a table.
struct Entry {
  TableView table;
  int64_t key;
  uint64_t hash;
  int first_stage;  // kClaimKept or kClaimFirst
};

// Finds a place for the entry with this order, and for those that it displaces. `entries(order)`
// gives an entry of the same table.
template <class Entries>
__device__ void claim_place(const Entries& entries, int64_t order) {
  Entry entry = entries(order);
  const int64_t bucket_count = entry.table.bucket_count;
  ClaimProbe at{bucket_of(entry.hash, bucket_count), entry.first_stage};
  int64_t second = bucket_of(second_hash(entry.hash), bucket_count);
  int64_t claim = make_claim(at.stage, order);
  int slot = 0;
  for (;;) {
    int64_t* stored = entry.table.line(at.bucket) + kBucketWidth;
    for (; slot < kBucketWidth; ++slot) {
      // The value may be outdated, but slots only ever go from free to earlier and earlier claims.
      const int64_t seen = *const_cast<volatile int64_t*>(stored + slot);
      if (seen > 0 || seen < claim) continue;
      const int64_t old =
          atomicMin(reinterpret_cast<long long*>(stored + slot), static_cast<long long>(claim));
      if (old == 0) return;
      if (old <= claim) continue;
      claim = old;  // displaced: it continues from the next slot
      at.stage = claim_stage(old);
      entry = entries(claim_order(old));
      second = bucket_of(second_hash(entry.hash), bucket_count);
    }
    slot = 0;
    const int64_t claimed_order = claim_order(claim);
    at = next_claim_probe(at, second, bucket_count);
    claim = make_claim(at.stage, claimed_order);
  }
}

// Position of the claim of an entry.
struct ClaimedSlot {
  int64_t bucket;
  int slot;
};
__device__ __forceinline__ ClaimedSlot claimed_slot(const Entry& entry, int64_t order) {
  const int64_t bucket_count = entry.table.bucket_count;
  const int64_t second = bucket_of(second_hash(entry.hash), bucket_count);
  ClaimProbe at{bucket_of(entry.hash, bucket_count), entry.first_stage};
  for (;;) {
    const int64_t claim = make_claim(at.stage, order);
    const int64_t* stored = entry.table.line(at.bucket) + kBucketWidth;
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      if (*const_cast<const volatile int64_t*>(stored + slot) == claim) return {at.bucket, slot};
    }
    at = next_claim_probe(at, second, bucket_count);
  }
}

// Turns the claim of an entry into an occupied slot with score words score(word); true if the slot
// was a tombstone.
template <class Score>
__device__ __forceinline__ bool settle_claim(const Entry& entry, int64_t order, int64_t stored,
                                             const Score& score) {
  const ClaimedSlot place = claimed_slot(entry, order);
  int64_t* line = entry.table.line(place.bucket);
  const bool tombstone = line[place.slot] != 0;
  line[place.slot] = entry.key;
  // threads that look for their claims see this one or a handle, neither of which is theirs
  store_racing(line + kBucketWidth + place.slot, stored);
  for (int64_t w = 0; w < entry.table.score_words; ++w) {
    entry.table.score(place.bucket, place.slot)[w * kBucketWidth] = score(w);
  }
  return tombstone;
}

}  // namespace dynemb::cuda
