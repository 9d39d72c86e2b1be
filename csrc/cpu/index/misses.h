// The first two rounds of an insertion: finding known ids, and making new ids distinct.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/index/args.h"
#include "cpu/index/find.h"
#include "cpu/index/policy_args.h"

namespace dynemb::cpu {

// An id that round 1 did not find. `order` counts the misses in order of occurrence.
struct Miss {
  int64_t id;
  int32_t order;
  int32_t table;  // from round 2 on: ~table for all but the first miss of a table and id
};

// All misses of a call, by partition of the hash: a partition's dedupe table and its buckets stay
// in cache. Within a partition the order of occurrence is kept.
struct Misses {
  std::vector<Tile> tiles;
  std::vector<int64_t> tile_begin;  // order of each tile's first miss, and their number at the end
  std::vector<int64_t> tile_padding;  // padding ids of each tile
  std::vector<int32_t> in_tile;       // positions of misses within their tile, from tile.begin on
  std::vector<Miss> items;
  std::vector<int64_t> begin;   // first item of each partition
  std::vector<int32_t> first;   // by order: order of the first miss of the same table and id
  std::vector<int64_t> handle;  // by order, of first misses
  std::vector<int32_t> new_id;  // likewise, under policies: number among the new ids

  int64_t count() const { return tile_begin.back(); }
};

struct ReleaseLarge {
  static constexpr size_t kKeptIds = size_t{1} << 21;
  Misses* misses;

  explicit ReleaseLarge(Misses* target) : misses(target) {}
  ~ReleaseLarge() {
    if (misses->in_tile.capacity() > kKeptIds) *misses = Misses{};
  }
};

// Round 1: handles of known ids; updates the scores of their slots.
void find_all(const IndexArgs& index, const FeatureArgs& features, const PolicyArgs& policies,
              int64_t* handles, Misses* misses);

void partition_misses(const IndexArgs& index, const FeatureArgs& features, Misses* misses);

// Round 2: finds the first occurrence of every new id; returns the number of new ids by table.
std::vector<int64_t> dedupe_misses(int64_t table_count, Misses* misses);

}  // namespace dynemb::cpu
