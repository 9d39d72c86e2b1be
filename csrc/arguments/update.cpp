#include "arguments/update.h"

#include "arguments/clocks.h"
#include "arguments/rows.h"
#include "core/columns.h"
#include "core/optimizers.h"

namespace dynemb {
namespace {

// The state tensors of an optimizer.
struct StateKinds {
  int element_states;
  int row_states;
  RowSteps row_steps;
};
#define DYNEMB_KINDS_OF(name, Optimizer) \
  {Optimizer::kElementStates, Optimizer::kRowStates, Optimizer::kRowSteps},
constexpr StateKinds kStateKinds[] = {DYNEMB_FOR_EACH_OPTIMIZER(DYNEMB_KINDS_OF)};
#undef DYNEMB_KINDS_OF

void check_state_kinds(const char* op, int64_t optimizer, const std::vector<SlabState>& state) {
  const StateKinds& kinds = kStateKinds[optimizer];
  for (size_t s = 0; s < state.size(); ++s) {
    const bool counts = state[s].steps != nullptr;
    DYNEMB_CHECK(
        state[s].element_states == kinds.element_states &&
            state[s].row_states == kinds.row_states &&
            (counts ? kinds.row_steps != RowSteps::kNone : kinds.row_steps != RowSteps::kLastSeen),
        "dynemb::", op, ": state of slab ", s, " has ", state[s].element_states,
        " tensors of a value per weight, ", state[s].row_states, " of a value per row and ",
        counts ? 1 : 0, " of steps, expected those of ", kOptimizerNames[optimizer], ": ",
        kinds.element_states, ", ", kinds.row_states, " and ",
        kinds.row_steps == RowSteps::kNone       ? "0"
        : kinds.row_steps == RowSteps::kOptional ? "0 or 1"
                                                 : "1");
  }
}

template <class T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

}  // namespace

void check_optimizer(const char* op, int64_t optimizer) {
  DYNEMB_CHECK(optimizer >= 0 && optimizer < kOptimizers, "dynemb::", op, ": optimizer is ",
               optimizer, ", expected 0 to ", kOptimizers - 1,
               ": a position in what optimizer_names() returns");
}

UpdateTensors update_tensors(const CallContext& call, int64_t optimizer,
                             const std::vector<SlabState>& state, int64_t table_count,
                             const Tensor& row_clock, const Tensor& hyper, const Tensor& updates,
                             const char* tables_argument,
                             const std::vector<int64_t>& updated_tables) {
  check_state_kinds(call.op, optimizer, state);
  UpdateTensors update{};
  update.extra = row_clock_extra(call, row_clock, table_count);
  update.clock = update.extra - table_count;
  update.hyper = hyper_tensor(call, hyper, table_count);
  update.seen = seen_updates(call, updates);
  update.updated.assign(static_cast<size_t>(table_count), 0);
  for (const int64_t t : updated_tables) {
    DYNEMB_CHECK(t >= 0 && t < table_count, "dynemb::", call.op, ": ", tables_argument,
                 " has table ", t, ", expected 0 to ", table_count - 1);
    update.updated[static_cast<size_t>(t)] = 1;
  }
  return update;
}

std::vector<ReducedTensors> reduced_tensors(
    const CallContext& call, const std::vector<Tensor>& weights, const std::vector<Tensor>& handles,
    const std::vector<Tensor>& ids, const std::vector<Tensor>& tables,
    const std::vector<Tensor>& gradients, const Tensor& counts) {
  const size_t slabs = weights.size();
  DYNEMB_CHECK(handles.size() == slabs && ids.size() == slabs && tables.size() == slabs &&
                   gradients.size() == slabs,
               "dynemb::", call.op, ": got ", handles.size(), " handles, ", ids.size(), " ids, ",
               tables.size(), " tables and ", gradients.size(),
               " gradients, expected one tensor of each for each of ", slabs, " slabs");
  check_tensor(call, "counts", counts, ScalarType::Long);
  check_length(call.op, "counts", counts, static_cast<int64_t>(slabs));
  std::vector<ReducedTensors> result;
  result.reserve(slabs);
  for (size_t s = 0; s < slabs; ++s) {
    check_tensor(call, "handles", handles[s], ScalarType::Long);
    check_tensor(call, "ids", ids[s], ScalarType::Long);
    check_tensor(call, "tables", tables[s], ScalarType::Long);
    check_tensor(call, "gradients", gradients[s], ScalarType::Float);
    const int64_t capacity = handles[s].numel();
    check_length(call.op, "handles", handles[s], capacity);
    check_length(call.op, "ids", ids[s], capacity);
    check_length(call.op, "tables", tables[s], capacity);
    check_size(call.op, "gradients", gradients[s], 0, capacity);
    check_size(call.op, "gradients", gradients[s], 1, weights[s].size(1));
    result.push_back({data_of<const int64_t>(handles[s]), data_of<const int64_t>(ids[s]),
                      data_of<const int64_t>(tables[s]), data_of<const float>(gradients[s]),
                      data_of<const int64_t>(counts) + s, capacity});
  }
  return result;
}

std::vector<PendingTensors> pending_tensors(
    const CallContext& call, const std::vector<Tensor>& handles, const std::vector<Tensor>& ids,
    const std::vector<Tensor>& tables, const std::vector<Tensor>& gradients, const Tensor& counts) {
  const size_t slabs = gradients.size();
  DYNEMB_CHECK(
      slabs > 0 && handles.size() == slabs && ids.size() == slabs && tables.size() == slabs,
      "dynemb::", call.op, ": got ", handles.size(), " pending_handles, ", ids.size(),
      " pending_ids, ", tables.size(), " pending_tables and ", slabs,
      " pending_gradients, expected one of each per slab");
  check_tensor(call, "pending_counts", counts, ScalarType::Long);
  check_size(call.op, "pending_counts", counts, 0, static_cast<int64_t>(slabs));
  check_size(call.op, "pending_counts", counts, 1, kPendingColumns);
  std::vector<PendingTensors> result;
  result.reserve(slabs);
  for (size_t s = 0; s < slabs; ++s) {
    check_tensor(call, "pending_gradients", gradients[s], ScalarType::Float);
    DYNEMB_CHECK(gradients[s].dim() == 2, "dynemb::", call.op, ": pending_gradients has ",
                 gradients[s].dim(), " dimensions, expected 2");
    DYNEMB_CHECK(gradients[s].size(1) > 0, "dynemb::", call.op, ": pending_gradients[", s,
                 "] has no columns, expected the dim of its slab");
    const int64_t capacity = gradients[s].size(0);
    const auto words = [&](const char* name, const Tensor& tensor) {
      check_tensor(call, name, tensor, ScalarType::Long);
      check_length(call.op, name, tensor, capacity);
      return data_of<int64_t>(tensor);
    };
    int64_t* of_handles = words("pending_handles", handles[s]);
    int64_t* of_ids = words("pending_ids", ids[s]);
    int64_t* of_tables = words("pending_tables", tables[s]);
    result.push_back({of_handles, of_ids, of_tables, data_of<float>(gradients[s]),
                      data_of<int64_t>(counts) + s * kPendingColumns, capacity,
                      gradients[s].size(1)});
  }
  return result;
}

void check_pending_of(const char* op, const std::vector<PendingTensors>& pending,
                      const std::vector<Tensor>& weights) {
  DYNEMB_CHECK(pending.size() == weights.size(), "dynemb::", op, ": pending is of ", pending.size(),
               " slabs, expected ", weights.size());
  for (size_t s = 0; s < pending.size(); ++s) {
    DYNEMB_CHECK(pending[s].dim == weights[s].size(1), "dynemb::", op,
                 ": pending_gradients of slab ", s, " has dim ", pending[s].dim, ", expected ",
                 weights[s].size(1));
  }
}

}  // namespace dynemb
