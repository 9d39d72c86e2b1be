// Checked arguments of ops on files, and on caches of their rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

// Raises unless a tensor is in host memory.
void check_in_host_memory(const char* op, const char* name, const Tensor& tensor);

// crc32c: raises unless `data` is contiguous memory of the CPU and `crc` is 32 bits.
void check_summed_bytes(const char* op, const Tensor& data, int64_t crc);

// A path as bytes, uint8 on the CPU. Raises for an empty path and for zero bytes.
std::string checked_path(const char* op, const Tensor& path);

// read_blocks: raises unless `offsets` are int64 on the CPU, they and `block_bytes` are multiples
// of a page, and the result is addressable.
void check_blocks(const char* op, const Tensor& offsets, int64_t block_bytes);

// Raises unless `tier_clock` is int64 [1 + slabs, kTierColumns] on the CPU.
void check_tier_clock(const char* op, const Tensor& tier_clock);

// The caches of a group's slabs. Slabs in memory have no places, slots and free_slots.
struct CacheTensors {
  std::vector<Tensor> places;       // int32 [rows]
  std::vector<Tensor> slots;        // int64 [slots, kSlotColumns]
  std::vector<Tensor> free_slots;   // int32 [slots]
  std::vector<Tensor> weights;      // [slots, dim]
  std::vector<Tensor> generations;  // int32 [slots]
  std::vector<Tensor> state;        // tensor k of slab s at k * slabs + s, [slots, ...]
};
// Raises unless the tensors of each tiered slab fit each other.
void check_cache_tensors(const char* op, const Tensor& tier_clock, const CacheTensors& cache,
                         const Tensor& tiered);

// The text in a tensor of bytes.
std::string text_of(const char* op, const char* name, const Tensor& text);

// Raises unless `slab` is in [0, slabs).
void check_slab(const char* op, int64_t slab, int64_t slabs);
// Raises unless handles and ids are vectors of one length, with rows below `max_rows`.
void check_stored_rows(const char* op, const Tensor& handles, const Tensor& ids, int64_t max_rows);

}  // namespace dynemb
