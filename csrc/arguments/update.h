// Checked arguments of ops that apply gradients to rows, or keep them for an optimizer, as pointers
// into memory of their device.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tensors.h"
#include "core/optimizer/step.h"
#include "core/rows/slab_state.h"

namespace dynemb {

// Raises unless `optimizer` is the number of one.
void check_optimizer(const char* op, int64_t optimizer);

struct UpdateTensors {
  int64_t* clock;                // row_clock
  int64_t* extra;                // its columns behind the steps of tables
  const double* hyper;           // [tables, kHyperColumns]
  const int64_t* seen;           // [1] see seen_updates
  std::vector<int64_t> updated;  // [tables] 1: the table is updated
};
// `optimizer`: a known number. `state`: of state_tensors. `tables_argument` names `updated_tables`
// in messages.
UpdateTensors update_tensors(const CallContext& call, int64_t optimizer,
                             const std::vector<SlabState>& state, int64_t table_count,
                             const Tensor& row_clock, const Tensor& hyper, const Tensor& updates,
                             const char* tables_argument,
                             const std::vector<int64_t>& updated_tables);

// Output of reduce_grad for a slab.
struct ReducedTensors {
  const int64_t* handles;
  const int64_t* ids;
  const int64_t* tables;
  const float* gradients;  // [capacity, dim]
  const int64_t* count;
  int64_t capacity;
};
// By slab. Does not read counts and entries.
std::vector<ReducedTensors> reduced_tensors(
    const CallContext& call, const std::vector<Tensor>& weights, const std::vector<Tensor>& handles,
    const std::vector<Tensor>& ids, const std::vector<Tensor>& tables,
    const std::vector<Tensor>& gradients, const Tensor& counts);

// Columns of pending_counts.
enum PendingColumn : int {
  kPendingEntries = 0,
  kPendingSections = 1,  // lookups that appended entries since the last merge
  kPendingColumns = 2
};
// The gradients of a slab that wait for the optimizer.
struct PendingTensors {
  int64_t* handles;
  int64_t* ids;
  int64_t* tables;
  float* gradients;  // [capacity, dim]
  int64_t* counts;   // [kPendingColumns]
  int64_t capacity;
  int64_t dim;
};
// By slab.
std::vector<PendingTensors> pending_tensors(
    const CallContext& call, const std::vector<Tensor>& handles, const std::vector<Tensor>& ids,
    const std::vector<Tensor>& tables, const std::vector<Tensor>& gradients, const Tensor& counts);
// Raises unless pending gradients have the dims of the rows.
void check_pending_of(const char* op, const std::vector<PendingTensors>& pending,
                      const std::vector<Tensor>& weights);

}  // namespace dynemb
