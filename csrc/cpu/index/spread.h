// The first stage of a growth: entries that lie in their first buckets go to their new ones.
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
// at least as many as before. The address of a first bucket grows with the hash and with the number
// of buckets, so targets lie at or above `begin`: taken from the last buckets down, they have been
// read already. What was displaced before, or finds its bucket full, goes to `rest`. The first
// targets of `begin` and `end` must be those of no other bucket below them.
void spread_buckets(const SpreadJob& job);

// The same where the number of buckets stays.
void tidy_buckets(const TableView& table, int64_t begin, int64_t end, Leftovers* rest);

}  // namespace dynemb::cpu
