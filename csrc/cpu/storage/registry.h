// Which store a group of tables has. Tensors travel through programs, stores do not: a store is
// found by the address of the group's `tier_clock`.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "arguments/tensors.h"
#include "cpu/storage/row_store.h"

namespace dynemb::cpu {

// Where a tensor is that a store was opened with. The store does not hold it.
struct TensorPlace {
  void* data;
  std::vector<int64_t> size;
};
TensorPlace place_of(const Tensor& tensor);

struct RegisteredStore {
  std::shared_ptr<RowStore> store;
  std::vector<TensorPlace> places;       // by slab
  std::vector<TensorPlace> slots;        // by slab
  std::vector<TensorPlace> weights;      // by slab
  std::vector<TensorPlace> generations;  // by slab
  std::vector<TensorPlace> state;        // tensor k of slab s at k * slabs + s
  std::vector<int64_t> record_bytes;     // by slab; 0: it has no log

  int64_t slabs() const { return static_cast<int64_t>(record_bytes.size()); }
};

// Raises where there is one already.
void register_store(const char* op, const Tensor& tier_clock, RegisteredStore store);
// Raises where there is none: tensors that are copies of a group's own have no store.
std::shared_ptr<RegisteredStore> registered_store(const char* op, const Tensor& tier_clock);
RowStore* store_of(const char* op, const Tensor& tier_clock);
// Takes it out; it ends when nobody uses it any more.
std::shared_ptr<RegisteredStore> unregister_store(const char* op, const Tensor& tier_clock);

}  // namespace dynemb::cpu
