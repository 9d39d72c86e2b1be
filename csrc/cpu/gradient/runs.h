// The backward's dedupe: occurrences of ids sorted by row, so that each row's gradients form a run,
// summed in the order of occurrence. No atomics; the sums do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/optimizer/summation.h"
#include "cpu/rows/args.h"
#include "cpu/runtime/scratch.h"

namespace dynemb::cpu {

// Length of all bags of a lookup, if they are equal.
struct BagLength {
  uint64_t inverse = 0;  // 2^64 / length, rounded up; 0: lengths differ, or are below 2

  int64_t bag_of(int64_t position) const {
    return static_cast<int64_t>(static_cast<unsigned __int128>(position) * inverse >> 64);
  }
};

// Gradients of occurrences, from the output gradient of one lookup.
struct GradientSource {
  const float* gradient;  // [batch or ids, columns]
  const LookupArgs* lookup;
  Scratch<int32_t> bag;  // of each occurrence; empty where equal_length says it, or no pooling
  std::vector<MeanDivisor> divisor;  // of each bag under mean pooling; empty otherwise
  BagLength equal_length;

  // With pooling. Occurrences come in the order of rows, so each read of `bag` misses the
  // first-level cache.
  int64_t bag_of(int64_t position) const {
    return equal_length.inverse != 0 ? equal_length.bag_of(position) : bag[position];
  }

  int64_t feature_of(int64_t position) const {
    const auto& begin = lookup->features.begin;
    if (begin.size() == 2) return 0;
    return std::upper_bound(begin.begin(), begin.end() - 1, position) - begin.begin() - 1;
  }
};

GradientSource gradient_source(const char* op, const LookupArgs& lookup, const Tensor& gradient);

// Occurrences of one slab's rows. Run r is the sorted occurrences [run[r], run[r + 1]).
struct GradientRuns {
  Scratch<uint64_t> sorted;  // row << position_bits | position
  int position_bits;
  Scratch<int64_t> run;
  const int64_t* handles;  // of the lookup
  int64_t generation;      // of all handles here, or -1 if they differ
  int64_t slab;
  int64_t dim;

  int64_t count() const { return static_cast<int64_t>(run.size()) - 1; }
  int64_t position(int64_t sorted_index) const {
    return static_cast<int64_t>(sorted[sorted_index] & ((uint64_t{1} << position_bits) - 1));
  }
  int64_t row(int64_t sorted_index) const {
    return static_cast<int64_t>(sorted[sorted_index] >> position_bits);
  }
  // If rows have never changed owners, as in tables without eviction, handles follow from rows and
  // need not be read.
  bool one_generation() const { return generation >= 0; }
  int64_t handle(int64_t sorted_index) const {
    if (!one_generation()) return handles[position(sorted_index)];
    return make_handle(row(sorted_index), generation);
  }
};

// Skips occurrences without a row (missing and padding ids). Runs ascend by row; for many
// occurrences, by table and then by row.
GradientRuns gradient_runs(const char* op, const LookupArgs& lookup,
                           const std::vector<TableRows>& tables, int64_t slab, int64_t dim);

// Very long runs are summed in pieces of fixed length first, by all threads.
struct LongRuns {
  std::vector<int64_t> run;          // indices of runs longer than kPieceLength, ascending
  std::vector<int64_t> first_piece;  // of each of them
  std::vector<float> sums;           // [pieces, dim]
};
LongRuns sum_long_runs(const GradientSource& source, const GradientRuns& runs);

// Sums runs [begin, end) into rows of `sums`; for a run of one unscaled occurrence, uses its
// gradient row instead. `sum[r - begin]` points to the result.
struct RunSumJob {
  const GradientSource* source;
  const GradientRuns* runs;
  const LongRuns* long_runs;
  int64_t begin;
  int64_t end;
  float* buffer;      // [end - begin, dim]
  const float** sum;  // out
};
void sum_runs(const RunSumJob& job);

// Rows with their gradients, entry by entry.
struct ReducedEntries {
  int64_t* handle;
  int64_t* id;
  int64_t* table;
  float* gradient;  // [entries, dim]
};
// One entry per run, in their order.
void reduce_runs(const GradientSource& source, const GradientRuns& runs,
                 const ReducedEntries& entries);

int bits_for(uint64_t values);  // bits that hold 0 .. values - 1

}  // namespace dynemb::cpu
