// Eviction of ids from full tables, in favour of new ones.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/index/admission.h"
#include "cpu/index/policy_args.h"

namespace dynemb::cpu {

// Log of evicted ids; see EvictedColumn.
struct EvictionLog {
  int64_t* words;
  int64_t records;  // capacity
};

// Finds a victim for each new id with `needs_victim`, and sets the new id's handle to the victim's
// row with its next generation. A new id without a victim is refused. Adds the others to
// `inserted`, by table.
void evict(const IndexArgs& index, const PolicyArgs& policies, const EvictionLog& log,
           const Misses& misses, const std::vector<char>& needs_victim, std::vector<NewId>* new_ids,
           std::vector<int64_t>* inserted);

}  // namespace dynemb::cpu
