// Rows that lose their slots so that others get one; see core/storage/victims.h.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tiers.h"
#include "cpu/storage/row_store.h"

namespace dynemb::cpu {

// Takes up to `wanted` rows of least worth out of their slots. Appends the slots to `victims` and
// dirty rows, which job `job` saves, to `saves`, both in the order of the cursor. Raises nothing if
// both have room for `wanted` more.
void take_victims(const CacheSlab& cache, uint32_t epoch, int64_t wanted, int64_t job,
                  std::vector<int32_t>* victims, std::vector<RowMove>* saves);

}  // namespace dynemb::cpu
