// Takes ids out of full tables, so that new ones get their rows.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/index/admission.h"
#include "cpu/index/policy_args.h"

namespace dynemb::cpu {

// Where evicted ids are noted; see EvictedColumn.
struct EvictionLog {
  int64_t* words;
  int64_t records;  // that have a place
};

// Finds a victim for each of the new ids of which `needs_victim` says so, and sets the new id's
// handle to the victim's row with its next generation. A new id that finds none is refused. Adds
// to `inserted`, by table, those that have found one.
void evict(const IndexArgs& index, const PolicyArgs& policies, const EvictionLog& log,
           const Misses& misses, const std::vector<char>& needs_victim, std::vector<NewId>* new_ids,
           std::vector<int64_t>* inserted);

}  // namespace dynemb::cpu
