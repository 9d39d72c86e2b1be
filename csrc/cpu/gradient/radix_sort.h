// Stable parallel radix sort of 64-bit items by a range of their bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/runtime/scratch.h"

namespace dynemb::cpu {

// Sorts by bits [low_bit, high_bit); items with equal bits keep their order. The result does not
// depend on the number of threads.
void radix_sort(Scratch<uint64_t>& items, int low_bit, int high_bit);

// Sorts each part [part[p], part[p + 1]) separately, within the caches if it is small.
void radix_sort_parts(Scratch<uint64_t>& items, const std::vector<size_t>& part, int low_bit,
                      int high_bit);

}  // namespace dynemb::cpu
