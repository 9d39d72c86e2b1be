// Checks of a group's constants against the tensors that they point into: once per call, for each
// table or slab, on the CPU. On a GPU the constants lie in its memory and are not checked.
#pragma once

#include <cstdint>

#include "arguments/tensors.h"

namespace dynemb {

// Upper bound of counts of rows, ids or bytes: sums and products of some of them stay far from
// overflow.
constexpr int64_t kMostCounted = int64_t{1} << 48;

// Raises unless the buckets of table `t` lie in a tensor of `buckets` rows, and have room for the
// ids and tombstones that `row` counts.
void check_region(const char* op, int64_t t, const int64_t* meta, const int64_t* row,
                  int64_t buckets);
// Raises unless the slab of table `t` is in [0, slabs).
void check_slab(const char* op, int64_t t, const int64_t* meta, int64_t slabs);
// Raises unless the counts of each of `slabs` [count, kSlabColumns] fit `max_rows` rows.
void check_slab_counts(const char* op, const int64_t* slabs, int64_t count, int64_t max_rows);
// Raises unless the initializers of table `t`, of `dim` columns, are records in `init_data`
// [numel], and their vectors lie there, too.
void check_initializers(const char* op, int64_t t, const int64_t* meta, int64_t dim,
                        const double* init_data, int64_t numel);

}  // namespace dynemb
