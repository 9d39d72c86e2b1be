// Checked arguments: steps of tables and counts of updates, as pointers into memory of their
// device.
#pragma once

#include <cstdint>
#include <optional>

#include "arguments/tensors.h"

namespace dynemb {

// The columns of row_clock behind the steps of `tables` tables, or of all of them.
int64_t* row_clock_extra(const CallContext& call, const Tensor& row_clock, int64_t table_count);
int64_t* row_clock_extra(const CallContext& call, const Tensor& row_clock);
// Raises unless the `count` words of row_clock are counts below the limit. A replaced table's clock
// raises, too.
void check_row_clock(const char* op, const int64_t* words, int64_t count);

// Raises unless `step`, of a clock, is below the limit of counts.
void check_step(const char* op, int64_t step);

// Number of updates of the rows at the time of the lookup.
const int64_t* seen_updates(const CallContext& call, const Tensor& updates);

// Raises unless these are tables [tables, kTableColumns] and row_clock of a group with `buckets`.
void check_counts(const CallContext& call, const Tensor& buckets, const Tensor& tables,
                  const Tensor& row_clock);

// The clocks that end_step_ advances.
struct ClockTensors {
  int64_t* clock;  // nullptr: the step is not counted
  int64_t* extra;  // of row_clock
};
ClockTensors clock_tensors(const CallContext& call, const Tensor& buckets, const Tensor& tables,
                           const Tensor& row_clock, const std::optional<Tensor>& clock,
                           const std::optional<int64_t>& now);

}  // namespace dynemb
