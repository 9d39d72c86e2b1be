// The memory of a group's tables and slabs: mapping it, passing the limits to kernels, and giving
// it back.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/memory/growing.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {

// Buckets of each table and rows of each slab.
struct TableRoom {
  std::vector<int64_t> buckets;
  std::vector<int64_t> rows;
};

// In a slab's Growing::memory.
constexpr size_t kWeightMemory = 0;
constexpr size_t kGenerationMemory = 1;
constexpr size_t kFreeRowMemory = 2;
constexpr size_t kFirstStateMemory = 3;

// Bytes a row of a tensor that may lie in host memory: less is not worth a transfer.
constexpr int64_t kLeastSplitBytes = 16;

// Memory of the cache of a slab's rows. Slots are the first rows of the slab's tensors.
struct CacheMemory {
  size_t slab;
  int64_t slots;                   // as many as the cache may ever have
  int64_t rows;                    // as many as the slab may ever have
  bool has_homes;                  // false: the slab's tensors have slots alone
  RowMemory places;                // grows with the rows
  std::vector<RowMemory> of_slot;  // grow with the slots
};

class MappedTables {
 public:
  // `shared`: the host writes the limits there, and the device writes what is in use.
  MappedTables(SharedWords shared, std::vector<Growing> tables, std::vector<int64_t> slab_of_table,
               std::vector<Growing> slabs);

  size_t table_count() const { return tables_.size(); }
  size_t slab_count() const { return slabs_.size(); }
  TableRoom no_room() const {
    return {std::vector<int64_t>(table_count(), 0), std::vector<int64_t>(slab_count(), 0)};
  }
  size_t slab_of_table(size_t table) const { return slab_of_table_[table]; }
  int64_t bucket_capacity(size_t table) const { return tables_[table].capacity; }
  int64_t mapped_rows(size_t slab) const { return slabs_[slab].mapped; }
  // Upper bounds of the rows in handles of each slab; for captured calls, also at the time of later
  // replays.
  std::vector<int64_t> handle_rows(bool captured) const;

  // See GroupMemory.
  void add_rows(const Call& call, size_t slab, const RowMemory& part);

  // Rows of the slabs lie in HBM within the budget, then in host memory. Rows of at most
  // kLeastSplitBytes, and all words of rows such as generations, stay in HBM.
  void split_rows(const std::vector<size_t>& slabs, std::shared_ptr<RowBudget> budget);
  const RowBudget* budget() const { return budget_.get(); }

  // The first rows of the slabs become slots in HBM, later ones are homes of rows, if there are
  // any: in host memory within the budget, except the words of rows. Called once, before there are
  // rows.
  void cache_rows(const Call& call, const std::vector<CacheMemory>& caches,
                  std::shared_ptr<RowBudget> budget);
  // Slots of a slab with memory, and as many as there may be; 0: the slab has no cache.
  int64_t mapped_slots(size_t slab) const { return slots_.empty() ? 0 : slots_[slab].mapped; }
  int64_t most_slots(size_t slab) const { return slots_.empty() ? 0 : slots_[slab].capacity; }
  // Maps memory for so many slots; false: memory is short.
  bool map_slots(const Call& call, size_t slab, int64_t slots);
  void map_first_slots(const Call& call, size_t slab, int64_t slots);  // raises
  // Gives back memory of later slots. Nothing may run on the device.
  void release_slots(const Call& call, size_t slab, int64_t slots);

  bool is_mapped(const TableRoom& room) const;
  // Maps memory for `room`; false: memory is short.
  bool map(const Call& call, const TableRoom& room);
  // Raises if memory is short. `what`: "... needs", for the error.
  void map_or_raise(const Call& call, const TableRoom& room, const char* what);

  // Keeps the memory that is mapped now.
  void keep();
  void keep_buckets(size_t table) { tables_[table].keep(); }
  // Records the upper bound of a call's need.
  void need(const TableRoom& room);
  // Called at the end of a step: gives back memory that calls have not needed for a while, such as
  // rows for ids that were not new. `held`: upper bound of use after the unfinished calls.
  void end_step(const Call& call, const TableRoom& held);
  // Gives back memory beyond so many buckets and rows; generations of rows stay, since handles may
  // exist. Nothing may run on the device.
  void release(const Call& call, const TableRoom& room);

 private:
  int64_t missing_bytes(const TableRoom& room) const;
  [[noreturn]] void raise_short_memory(const Call& call, int64_t bytes, const char* what) const;
  void write_limits();
  static void shrink(const Call& call, Growing* growing, size_t spared, int64_t held,
                     volatile int64_t* limit);

  SharedWords shared_;
  std::vector<Growing> tables_;
  std::vector<size_t> slab_of_table_;
  std::vector<Growing> slabs_;
  std::vector<Growing> slots_;         // of the caches of slabs; empty: there are none
  bool has_homes_ = false;             // beneath the caches
  std::shared_ptr<RowBudget> budget_;  // nullptr: all rows lie in HBM
  Mapped last_attempt_ = Mapped::kYes;
  int64_t steps_of_period_ = 0;  // since memory was last given back
};

}  // namespace dynemb::cuda
