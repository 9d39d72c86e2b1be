// The stores of groups of tables. Programs pass tensors around but not stores, so a store is found
// by the address of the group's `tier_clock`.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "arguments/tensors.h"
#include "cpu/storage/row_store.h"

namespace dynemb::cpu {

// Address and size of a tensor that a store was opened with. The store does not own it.
struct TensorPlace {
  void* data;
  std::vector<int64_t> size;
};
TensorPlace place_of(const Tensor& tensor);

struct RegisteredStore {
  std::shared_ptr<RowStore> store;
  std::vector<TensorPlace> places;       // by slab
  std::vector<TensorPlace> slots;        // by slab
  std::vector<TensorPlace> free_slots;   // by slab
  std::vector<TensorPlace> weights;      // by slab
  std::vector<TensorPlace> generations;  // by slab
  std::vector<TensorPlace> state;        // tensor k of slab s at k * slabs + s
  std::vector<int64_t> record_bytes;     // by slab; 0: no log

  int64_t slabs() const { return static_cast<int64_t>(record_bytes.size()); }
};

// Raises if the group has a store already.
void register_store(const char* op, const Tensor& tier_clock, RegisteredStore store);
// Raises if the group has no store: copies of a group's tensors have none.
std::shared_ptr<RegisteredStore> registered_store(const char* op, const Tensor& tier_clock);
RowStore* store_of(const char* op, const Tensor& tier_clock);
// Removes the entry; the store is closed with its last user.
std::shared_ptr<RegisteredStore> unregister_store(const char* op, const Tensor& tier_clock);

}  // namespace dynemb::cpu
