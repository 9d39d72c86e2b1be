// Stable parallel radix sort of 64-bit items by a range of their bits.
#pragma once

#include <cstdint>
#include <vector>

namespace dynemb::cpu {

// Sorts by bits [low_bit, high_bit); items with equal bits keep their order. The result does not
// depend on the number of threads.
void radix_sort(std::vector<uint64_t>& items, int low_bit, int high_bit);

}  // namespace dynemb::cpu
