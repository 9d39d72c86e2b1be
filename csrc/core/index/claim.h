// Claims on free slots: many threads place entries at once, with the result of placing them one
// after another in a given order.
//
// An entry proposes to the free slots of its probe sequence in turn. A slot keeps the earliest
// proposal and rejects the later one, which proposes to the next slot (deferred acceptance: Gale
// and Shapley 1962). Slots prefer earlier stages, then earlier orders. So the outcome is that of
// serving entries stage by stage in order, whatever the order of the proposals.
//
// A claim lives in the word of the slot's stored handle: handles are positive, a free slot is 0,
// and claims are negative, so "keep the earliest" is one atomic minimum.
#pragma once

#include "core/host_device.h"

namespace dynemb {

enum ClaimStage : int {
  kClaimKept = 0,    // growth: the entry was in its first bucket and goes to its new first bucket
  kClaimFirst = 1,   // first candidate bucket
  kClaimSecond = 2,  // second candidate bucket
  kClaimFollowing = 3,  // the buckets after it
};

constexpr int kClaimOrderBits = 48;
constexpr int64_t kClaimBase = -(int64_t{1} << 62);

DYNEMB_HD int64_t make_claim(int stage, int64_t order) {
  return kClaimBase + (static_cast<int64_t>(stage) << kClaimOrderBits) + order;
}
DYNEMB_HD int claim_stage(int64_t claim) {
  return static_cast<int>((claim - kClaimBase) >> kClaimOrderBits);
}
DYNEMB_HD int64_t claim_order(int64_t claim) {
  return (claim - kClaimBase) & ((int64_t{1} << kClaimOrderBits) - 1);
}

// Next proposal of an entry: a bucket, and the stage in which the entry reaches it.
struct ClaimProbe {
  int64_t bucket;
  int stage;
};
DYNEMB_HD ClaimProbe next_claim_probe(ClaimProbe at, int64_t second_bucket, int64_t bucket_count) {
  if (at.stage <= kClaimFirst) return {second_bucket, kClaimSecond};
  const int64_t next = at.bucket + 1;
  return {next < bucket_count ? next : 0, kClaimFollowing};
}

// Growth: the place of an old slot in the order of moving, which goes from the last bucket down.
DYNEMB_HD int64_t move_order(int64_t bucket, int slot, int64_t old_bucket_count, int width) {
  return (old_bucket_count - 1 - bucket) * width + slot;
}

}  // namespace dynemb
