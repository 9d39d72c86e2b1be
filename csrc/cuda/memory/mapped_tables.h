// The memory of a group's tables and slabs: what is mapped, which kernels are told, and what is
// given back.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/memory/growing.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {

// Buckets of each table and rows of each slab.
struct TableRoom {
  std::vector<int64_t> buckets;
  std::vector<int64_t> rows;
};

constexpr size_t kGenerationMemory = 1;  // in a slab's Growing::memory

class MappedTables {
 public:
  // `shared`: where the limits are written, and where the device writes what is in use.
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
  // Rows that handles of each slab can name; replays of a captured call may come when there are
  // more than now.
  std::vector<int64_t> handle_rows(bool captured) const;

  // See GroupMemory.
  void add_rows(const Call& call, size_t slab, const RowMemory& part);

  bool is_mapped(const TableRoom& room) const;
  // Maps memory for so much; false: it is not to be had.
  bool map(const Call& call, const TableRoom& room);
  // Raises if it is not to be had. `what`: "... needs", for the error.
  void map_or_raise(const Call& call, const TableRoom& room, const char* what);

  // What is mapped now is not given back.
  void keep();
  void keep_buckets(size_t table) { tables_[table].keep(); }
  // A call needs so much, as long as nobody knows better.
  void need(const TableRoom& room);
  // The end of a step: gives back what calls have not needed for a while, such as rows for ids that
  // were not new after all. `held`: the most that calls under way may leave in use.
  void end_step(const Call& call, const TableRoom& held);
  // Gives memory beyond so many buckets and rows back; generations of rows stay, since handles may
  // be out there. Nothing may run on the device.
  void release(const Call& call, const TableRoom& room);

 private:
  int64_t missing_bytes(const TableRoom& room) const;
  void write_limits();
  static void shrink(const Call& call, Growing* growing, size_t spared, int64_t held,
                     volatile int64_t* limit);

  SharedWords shared_;
  std::vector<Growing> tables_;
  std::vector<size_t> slab_of_table_;
  std::vector<Growing> slabs_;
  int64_t steps_of_period_ = 0;  // since memory was last given back
};

}  // namespace dynemb::cuda
