// The first stage of a growth: entries in their first buckets go to their new ones.
#pragma once

#include <cstdint>

#include "cpu/index/args.h"
#include "cpu/index/leftovers.h"

namespace dynemb::cpu {

struct SpreadJob {
  const TableView& table;
  int64_t begin;  // old buckets
  int64_t end;
  int64_t bucket_count;  // new ones
  Leftovers* rest;
};

// Moves the entries of buckets [begin, end) to their first buckets among `bucket_count`, which are
// at least as many as before. First buckets grow with the hash and with the number of buckets, so
// targets lie at or above `begin`: if buckets are taken from the last down, targets have been read
// already. Entries that were displaced before, or find their bucket full, go to `rest`. No lower
// bucket may share the first targets of `begin` and `end`.
void spread_buckets(const SpreadJob& job);

// The same for an unchanged number of buckets.
void tidy_buckets(const TableView& table, int64_t begin, int64_t end, Leftovers* rest);

}  // namespace dynemb::cpu
