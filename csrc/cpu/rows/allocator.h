// Gives out the rows of a group's slabs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "arguments/table_constants.h"
#include "core/index/row_allocation.h"
#include "cpu/index/view.h"

namespace dynemb::cpu {

// Raises unless slabs and free_rows are those of rows, and each table has its rows in one of them.
inline void check_slabs(const IndexView& index, const Tensor& slabs, const Tensor& free_rows) {
  check_tensor(index.op, "slabs", slabs, ScalarType::Long);
  check_size(index.op, "slabs", slabs, 1, kSlabColumns);
  check_tensor(index.op, "free_rows", free_rows, ScalarType::Long);
  check_size(index.op, "free_rows", free_rows, 0, slabs.size(0));
  STD_TORCH_CHECK(free_rows.dim() == 2, "dynemb::", index.op, ": free_rows has ", free_rows.dim(),
                  " dimensions, expected 2");
  check_slab_counts(index.op, static_cast<const int64_t*>(slabs.data_ptr()), slabs.size(0),
                    free_rows.size(1));
  for (int64_t t = 0; t < index.table_count; ++t) {
    check_slab(index.op, t, index.meta_row(t), slabs.size(0));
  }
}

class RowAllocator {
 public:
  RowAllocator(const IndexView& index, const Tensor& slabs, const Tensor& free_rows)
      : index_(index) {
    check_slabs(index, slabs, free_rows);
    slabs_ = static_cast<int64_t*>(slabs.data_ptr());
    slab_count_ = slabs.size(0);
    free_rows_ = static_cast<int64_t*>(free_rows.data_ptr());
    max_rows_ = free_rows.size(1);
  }

  int64_t* slab(int64_t s) const { return slabs_ + s * kSlabColumns; }

  // Bytes of memory to be had before `rows[s]` more rows of each slab s are given out, 0 while
  // enough has been checked before. Raises if there is no room for that many rows. Changes nothing.
  int64_t check(const std::vector<int64_t>& rows) const {
    int64_t bytes = 0;
    for (int64_t s = 0; s < slab_count_; ++s) {
      const int64_t fresh = std::max<int64_t>(rows[s] - slab(s)[kSlabFreeCount], 0);
      const int64_t needed = slab(s)[kSlabNextRow] + fresh;
      STD_TORCH_CHECK(needed <= max_rows_, "dynemb::", index_.op, ": row slab ", s, " needs ",
                      needed, " rows but has room for ", max_rows_,
                      ": create the table with a larger max_rows, or erase ids");
      if (needed > slab(s)[kSlabCommittedRows]) {
        const int64_t added =
            commit_target(needed, slab(s)[kSlabRowBytes], max_rows_) - slab(s)[kSlabCommittedRows];
        int64_t added_bytes = 0;
        if (__builtin_mul_overflow(added, slab(s)[kSlabRowBytes], &added_bytes) ||
            __builtin_add_overflow(bytes, added_bytes, &bytes)) {
          return INT64_MAX;  // more than any machine has
        }
      }
    }
    return bytes;
  }

  // The next row's handle: freed rows first, last freed first.
  int64_t take(int64_t s) {
    int64_t* row = slab(s);
    if (row[kSlabFreeCount] > 0) return free_rows_[s * max_rows_ + --row[kSlabFreeCount]];
    const int64_t next = row[kSlabNextRow]++;
    if (next >= row[kSlabCommittedRows]) {
      row[kSlabCommittedRows] = commit_target(next + 1, row[kSlabRowBytes], max_rows_);
    }
    return first_owner(next, row[kSlabGeneration]);
  }

 private:
  const IndexView& index_;
  int64_t* slabs_;
  int64_t slab_count_;
  int64_t* free_rows_;
  int64_t max_rows_;
};

}  // namespace dynemb::cpu
