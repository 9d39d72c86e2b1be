// The shard of a table that owns an id: a bijection of the id, modulo the number of shards. A shard
// receives the quotient and recovers the id from it, so no id is reserved, and ids in tables, seeds
// and dumps are raw. Without the bijection, ids that are multiples of 8 would fall to one of 8
// shards.
#pragma once

#include "core/features/divisor.h"

namespace dynemb {

// splitmix64's finaliser (Steele, Lea, Flood 2014; constants: Stafford's variant 13). Its constants
// differ from those of the bucket hash, so that the ids of a shard fill its buckets evenly.
DYNEMB_HD uint64_t mix_id(uint64_t id) {
  uint64_t x = id + 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The inverse: multiplications by the inverses modulo 2^64.
DYNEMB_HD uint64_t unmix_id(uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642b2d24d8ec3ULL;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089ULL;
  x = x ^ (x >> 30) ^ (x >> 60);
  return x - 0x9e3779b97f4a7c15ULL;
}

// The id that part `part` of `parts` has received as a quotient.
DYNEMB_HD uint64_t routed_id(uint64_t quotient, uint64_t parts, uint64_t part) {
  return unmix_id(quotient * parts + part);
}

// Division of slots among parts: contiguous ranges, the first `longer` of them one slot longer.
struct SlotRanges {
  Divisor slots;
  Divisor length;  // of the shorter ranges
  Divisor longer_length;
  uint64_t longer;
};
DYNEMB_HD SlotRanges make_slot_ranges(uint64_t parts, uint64_t slots) {
  const uint64_t length = slots / parts;
  return {make_divisor(slots), make_divisor(length), make_divisor(length + 1), slots % parts};
}

// The part that owns an id.
DYNEMB_HD uint64_t owner_of(uint64_t id, const SlotRanges& ranges) {
  const uint64_t slot = ranges.slots.remainder(mix_id(id));
  const uint64_t in_longer = ranges.longer * ranges.longer_length.value;
  if (slot < in_longer) return ranges.longer_length.quotient(slot);
  return ranges.longer + ranges.length.quotient(slot - in_longer);
}

// The id of a table as an id among all tables: for each table a bijection of the 64-bit words.
DYNEMB_HD uint64_t encoded_id(uint64_t id, uint64_t mixed_table) {
  return mix_id(id ^ mixed_table);
}

}  // namespace dynemb
