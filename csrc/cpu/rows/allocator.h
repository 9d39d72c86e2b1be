// Allocation of rows in a group's slabs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "arguments/table_constants.h"
#include "core/index/row_allocation.h"
#include "core/runtime/error_class.h"
#include "cpu/index/args.h"
#include "cpu/memory/reserve.h"

namespace dynemb::cpu {

// Also checks the counts of rows, and that each table has a valid slab.
inline AllocationTensors slab_rows(const IndexArgs& index, const Tensor& slabs,
                                   const Tensor& free_rows) {
  const AllocationTensors given = allocation_tensors(index.op, slabs, free_rows);
  check_slab_counts(index.op, given.slabs, given.slab_count, given.max_rows);
  for (int64_t t = 0; t < index.table_count; ++t) {
    check_slab(index.op, t, index.meta_row(t), given.slab_count);
  }
  return given;
}

class RowAllocator {
 public:
  RowAllocator(const IndexArgs& index, const Tensor& slabs, const Tensor& free_rows)
      : index_(index), given_(slab_rows(index, slabs, free_rows)) {}

  int64_t slab_count() const { return given_.slab_count; }
  int64_t* slab(int64_t s) const { return given_.slabs + s * kSlabColumns; }

  // Bytes of memory needed before `rows[s]` more rows of each slab s are given out; 0 if enough has
  // been checked before. Raises if the slab has too few rows. Nothing changes.
  int64_t check(const std::vector<int64_t>& rows) const {
    for (int64_t s = 0; s < given_.slab_count; ++s) {
      const int64_t needed = next_row_after(s, rows[s]);
      DYNEMB_CHECK(needed <= given_.max_rows, "dynemb::", index_.op, ": row slab ", s, " needs ",
                   needed, " rows but has room for ", given_.max_rows,
                   ": create the table with a larger max_rows, or erase ids", kNoRoomError);
    }
    return bytes_for(rows);
  }

  // Whether that many rows could be given out, all of them for the first time.
  bool fits_fresh(const std::vector<int64_t>& rows) const {
    for (int64_t s = 0; s < given_.slab_count; ++s) {
      if (rows[s] == 0) continue;
      if (slab(s)[kSlabFreeCount] > 0 || next_row_after(s, rows[s]) > given_.max_rows) return false;
    }
    return has_available_memory(bytes_for(rows));
  }

  // Upper bound of handles of rows that were given out for the first time.
  int64_t first_fresh(int64_t s) const { return make_handle(slab(s)[kSlabNextRow], 0); }

  // The next row's handle: freed rows first, last freed first.
  int64_t take(int64_t s) {
    int64_t* row = slab(s);
    if (row[kSlabFreeCount] > 0)
      return given_.free_rows[s * given_.max_rows + --row[kSlabFreeCount]];
    const int64_t next = row[kSlabNextRow]++;
    if (next >= row[kSlabCommittedRows]) {
      row[kSlabCommittedRows] = commit_target(next + 1, row[kSlabRowBytes], given_.max_rows);
    }
    return first_owner(next, row[kSlabGeneration]);
  }

 private:
  int64_t next_row_after(int64_t s, int64_t rows) const {
    return slab(s)[kSlabNextRow] + std::max<int64_t>(rows - slab(s)[kSlabFreeCount], 0);
  }

  int64_t bytes_for(const std::vector<int64_t>& rows) const {
    int64_t bytes = 0;
    for (int64_t s = 0; s < given_.slab_count; ++s) {
      const int64_t needed = next_row_after(s, rows[s]);
      if (needed <= slab(s)[kSlabCommittedRows]) continue;
      const int64_t added = commit_target(needed, slab(s)[kSlabRowBytes], given_.max_rows) -
                            slab(s)[kSlabCommittedRows];
      int64_t added_bytes = 0;
      if (__builtin_mul_overflow(added, slab(s)[kSlabRowBytes], &added_bytes) ||
          __builtin_add_overflow(bytes, added_bytes, &bytes)) {
        return INT64_MAX;  // more than any machine has
      }
    }
    return bytes;
  }

  const IndexArgs& index_;
  AllocationTensors given_;
};

}  // namespace dynemb::cpu
