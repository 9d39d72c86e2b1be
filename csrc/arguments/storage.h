// Arguments of ops on what files hold, and on caches of it, checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

// crc32c: raises unless `data` is contiguous memory of the CPU and `crc` is 32 bits.
void check_summed_bytes(const char* op, const Tensor& data, int64_t crc);

// A path as bytes, uint8 of the CPU. Raises for what no path is: no bytes, or zeros among them.
std::string checked_path(const char* op, const Tensor& path);

// read_blocks: raises unless `offsets` are int64 of the CPU, they and `block_bytes` are multiples
// of a page, and a tensor may be as large as the result.
void check_blocks(const char* op, const Tensor& offsets, int64_t block_bytes);

// `tier_clock`: raises unless it is int64 [1 + slabs, kTierColumns] of the CPU.
void check_tier_clock(const char* op, const Tensor& tier_clock);

// The caches of a group's slabs. Slabs that are all in memory have no places and slots.
struct CacheTensors {
  std::vector<Tensor> places;       // int32 [rows]
  std::vector<Tensor> slots;        // int64 [slots, kSlotColumns]
  std::vector<Tensor> weights;      // [slots, dim]
  std::vector<Tensor> generations;  // int32 [slots]
  std::vector<Tensor> state;        // tensor k of slab s at k * slabs + s, [slots, ...]
};
// Raises unless the tensors of each slab for which `tiered` is not 0 fit each other.
void check_cache_tensors(const char* op, const Tensor& tier_clock, const CacheTensors& cache,
                         const Tensor& tiered);

// The bytes of a tensor of text.
std::string text_of(const char* op, const char* name, const Tensor& text);

// Raises unless `slab` is one of `slabs`.
void check_slab(const char* op, int64_t slab, int64_t slabs);
// handles and ids of rows of a store: vectors of one length; handles of rows less than `max_rows`.
void check_stored_rows(const char* op, const Tensor& handles, const Tensor& ids, int64_t max_rows);

}  // namespace dynemb
