// Gradients of rows between backward and optimizer step: accumulate_grad_ appends those of one
// lookup, merge_grad_ sums entries of one row.
//
// The host knows only upper bounds of their number. Memory is mapped before the launch, and kernels
// refuse what does not fit.
#include <memory>
#include <optional>

#include "arguments/clocks.h"
#include "arguments/update.h"
#include "cuda/gradient/runs.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

// The pending gradients of one slab.
struct Pending : PendingTensors {
  int64_t slab;
};

// One thread: reserves space for the runs of a lookup after the entries of every slab, or of none.
// Writes where they begin, or -1.
__global__ void begin_append(int64_t* counts, const int64_t* slab_first, const int64_t* capacity,
                             int64_t slabs, SharedWords shared, int64_t* extra,
                             const int64_t* updates, int64_t* before, ErrorSink errors) {
  bool fits = true;
  if (updates != nullptr && *updates != extra[kRowClockUpdates]) {
    errors.report(kErrorWeightsUpdated, *updates);
    fits = false;
  }
  for (int64_t s = 0; s < slabs && fits; ++s) {
    const int64_t runs = slab_first[s + 1] - slab_first[s];
    int64_t limit = capacity[s];
    if (shared.words != nullptr) {
      limit = min(limit, static_cast<int64_t>(shared.slab(s)[kSharedPendingLimit]));
    }
    if (runs == 0 || counts[s * kPendingColumns + kPendingEntries] + runs <= limit) continue;
    errors.report(kErrorPending, s);
    fits = false;
  }
  for (int64_t s = 0; s < slabs; ++s) {
    const int64_t runs = slab_first[s + 1] - slab_first[s];
    int64_t* of_slab = counts + s * kPendingColumns;
    before[s] = fits ? of_slab[kPendingEntries] : -1;
    if (!fits || runs == 0) continue;
    of_slab[kPendingEntries] += runs;
    ++of_slab[kPendingSections];
  }
  if (fits) ++extra[kRowClockSinceStep];
}

// Whether entries must be merged. `incoming`: first runs of this slab and the next; then only if
// space is short.
__device__ __forceinline__ bool must_merge(const Pending& pending, const int64_t* incoming) {
  if (pending.counts[kPendingSections] <= 1) return false;
  return incoming == nullptr ||
         pending.counts[kPendingEntries] + incoming[1] - incoming[0] > pending.capacity;
}

// A thread for each of `items` entries: 8 bytes of handle in order; writes key and position.
__global__ void make_entry_keys(Pending pending, int64_t items, uint64_t missing,
                                const int64_t* incoming, ErrorSink errors, uint64_t* keys,
                                uint32_t* positions) {
  const int64_t i = thread_number();
  if (i >= items) return;
  uint64_t key = missing;
  if (must_merge(pending, incoming)) {
    const int64_t count = pending.counts[kPendingEntries];
    if (count > items) {
      if (i == 0) errors.report(kErrorPending, pending.slab);
    } else if (i < count) {
      const auto row = static_cast<uint64_t>(handle_row(pending.handles[i]));
      key = row < missing ? row : missing;
    }
  }
  keys[i] = key;
  positions[i] = static_cast<uint32_t>(i);
}

// Entries sorted by row, and the destinations of their sums.
struct EntryRuns {
  const uint32_t* positions;
  const int32_t* begin;
  const int64_t* head;
  Pending sums;
};

// A group of lanes per row: 4 * dim bytes read an entry, 4 * dim + 24 written. Entries with stale
// handles are dropped and counted.
template <class Group>
__global__ void sum_entries(Group group, Pending pending, EntryRuns runs, int64_t* stale) {
  constexpr int kWidth = Group::kWidth;
  const int lane = group.lane();
  const int64_t dim = pending.dim;
  const int64_t count = runs.head[kRunCount];
  const int64_t stride = group.total();
  for (int64_t r = group.number(); r < count; r += stride) {
    const int64_t begin = runs.begin[r];
    const int64_t end = runs.begin[r + 1];
    const int64_t last = runs.positions[end - 1];
    int64_t from = begin;
    int64_t dropped = 0;
    int64_t next_handle = pending.handles[last];
    for (int64_t i = end - 2; i >= begin; --i) {
      const int64_t handle = pending.handles[runs.positions[i]];
      if (handle == next_handle) continue;
      if (dropped == 0) from = i + 1;
      ++dropped;
      next_handle = handle;
    }
    if (lane == 0) {
      if (dropped > 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(stale),
                  static_cast<unsigned long long>(dropped));
      }
      runs.sums.handles[r] = pending.handles[last];
      runs.sums.ids[r] = pending.ids[last];
      runs.sums.tables[r] = pending.tables[last];
    }
    for (int64_t column = group.column(0); column < dim; column += group.stride()) {
      Floats<kWidth> sum =
          load_floats<kWidth>(pending.gradients + runs.positions[from] * dim + column);
      for (int64_t i = from + 1; i < end; ++i) {
        const Floats<kWidth> next =
            load_floats<kWidth>(pending.gradients + runs.positions[i] * dim + column);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum.value[k] += next.value[k];
      }
      store_floats<kWidth>(runs.sums.gradients + r * dim + column, sum);
    }
  }
}

// A group of lanes per sum: 4 * dim + 24 bytes read and written, in order.
template <class Group>
__global__ void write_merged(Group group, Pending pending, EntryRuns runs) {
  constexpr int kWidth = Group::kWidth;
  const int lane = group.lane();
  const int64_t dim = pending.dim;
  const int64_t count = runs.head[kRunCount];
  const int64_t stride = group.total();
  for (int64_t r = group.number(); r < count; r += stride) {
    if (lane == 0) {
      pending.handles[r] = runs.sums.handles[r];
      pending.ids[r] = runs.sums.ids[r];
      pending.tables[r] = runs.sums.tables[r];
    }
    for (int64_t column = group.column(0); column < dim; column += group.stride()) {
      store_floats<kWidth>(pending.gradients + r * dim + column,
                           load_floats<kWidth>(runs.sums.gradients + r * dim + column));
    }
  }
  if (thread_number() == 0 && count > 0) {
    pending.counts[kPendingEntries] = count;
    pending.counts[kPendingSections] = 1;
  }
}

// Sums the entries of each row in order of arrival; ascending by row afterwards. `items`: upper
// bound of their number. `incoming`: see must_merge.
void merge(const Call& call, const Pending& pending, int64_t items, int64_t rows,
           const int64_t* incoming, int64_t* extra) {
  if (items <= 0) return;
  DYNEMB_CHECK(items <= INT32_MAX, "dynemb::", call.op, ": ", items,
               " gradients are too many to merge: call optimizer.step() more often");
  const auto missing = static_cast<uint64_t>(rows);
  const RunSort<uint64_t> sort(call, items, bits_for(rows + 1));
  Scratch scratch;
  const auto position_part = scratch.add<uint32_t>(items);
  const auto begin_part = scratch.add<int32_t>(items + 1);
  const auto head_part = scratch.add<int64_t>(kRunHeadWords);
  const auto handle_part = scratch.add<int64_t>(items);
  const auto id_part = scratch.add<int64_t>(items);
  const auto table_part = scratch.add<int64_t>(items);
  const auto sum_part = scratch.add<float>(items * pending.dim);
  scratch.allocate(call);
  call.fill(scratch.get(head_part), 0, kRunHeadWords * 8);
  call.launch(make_entry_keys, items, 0, pending, items, missing, incoming, error_sink(call),
              sort.keys(), sort.unsorted());
  sort.find(call, missing, scratch.get(position_part), scratch.get(begin_part),
            scratch.get(head_part));
  Pending sums = pending;
  sums.handles = scratch.get(handle_part);
  sums.ids = scratch.get(id_part);
  sums.tables = scratch.get(table_part);
  sums.gradients = scratch.get(sum_part);
  const EntryRuns runs{scratch.get(position_part), scratch.get(begin_part), scratch.get(head_part),
                       sums};
  with_lanes(pending.dim, is_aligned(pending.gradients), [&](auto group) {
    call.launch_strided(sum_entries<decltype(group)>, items * group.size(), group, pending, runs,
                        extra + kRowClockStale);
    call.launch_strided(write_merged<decltype(group)>, items * group.size(), group, pending, runs);
  });
}

std::vector<Pending> pending_slabs(const std::vector<PendingTensors>& slabs) {
  std::vector<Pending> result;
  for (const PendingTensors& slab : slabs) {
    result.push_back({slab, static_cast<int64_t>(result.size())});
  }
  return result;
}

// Unreserved tensors: handles may have any row.
constexpr int64_t kAnyRow = int64_t{1} << (63 - kGenerationBits);

void accumulate_grad_(std::vector<Tensor> pending_handles, std::vector<Tensor> pending_ids,
                      std::vector<Tensor> pending_tables, std::vector<Tensor> pending_gradients,
                      Tensor pending_counts, Tensor row_clock, std::vector<Tensor> weights,
                      std::vector<Tensor> generations, Tensor meta, Tensor init_data,
                      Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets,
                      std::optional<Tensor> per_sample_weights, Tensor updates,
                      std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
                      int64_t pooling) {
  const Call call("accumulate_grad_", "pending_counts", pending_counts);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  const std::vector<PendingTensors> given = pending_tensors(
      call, pending_handles, pending_ids, pending_tables, pending_gradients, pending_counts);
  check_pending_of(call.op, given, weights);
  const std::vector<Pending> pending = pending_slabs(given);
  const size_t slabs = pending.size();
  int64_t* extra = row_clock_extra(call, row_clock, rows.table_count);
  const int64_t* seen = seen_updates(call, updates);
  LookupCall lookup = lookup_call(call, rows, ids, handles, offsets, per_sample_weights,
                                  feature_tables, feature_dims, pooling);
  output_gradient(call, grad_output, lookup.output_rows, lookup.output_columns);
  std::vector<bool> touched;
  std::vector<int64_t> capacity;
  for (size_t s = 0; s < slabs; ++s) {
    touched.push_back(!lookup.slab_features[s].empty());
    capacity.push_back(pending[s].capacity);
  }
  const int64_t count = lookup.args.features.count;
  const auto group = group_of_pending(call, pending_handles[0]);
  const std::vector<int64_t> merges =
      group == nullptr ? capacity : prepare_append(call, group.get(), touched, count);
  const GradientSort sort(call, rows, &lookup, grad_output);
  const int64_t* slab_first = sort.runs().slab_first;
  for (size_t s = 0; s < slabs; ++s) {
    if (!touched[s]) continue;
    // the host's bound decides when a group must merge; merging too early changes no sum
    merge(call, pending[s], merges[s], rows.slabs[s].rows,
          group == nullptr ? slab_first + s : nullptr, extra);
  }
  Scratch scratch;
  const auto capacity_part = scratch.add<int64_t>(static_cast<int64_t>(slabs));
  const auto before_part = scratch.add<int64_t>(static_cast<int64_t>(slabs));
  scratch.allocate(call);
  upload_words(call, capacity, scratch.get(capacity_part));
  const int64_t* before = scratch.get(before_part);
  call.launch(begin_append, 1, 1, static_cast<int64_t*>(pending_counts.data_ptr()), slab_first,
              scratch.get(capacity_part), static_cast<int64_t>(slabs), shared_words(group.get()),
              extra, per_sample_weights.has_value() ? seen : nullptr, scratch.get(before_part),
              error_sink(call));
  for (size_t s = 0; s < slabs; ++s) {
    if (!touched[s] || count == 0) continue;
    const Pending& of_slab = pending[s];
    write_reduced_rows(
        call, sort, s, of_slab.dim, count,
        {of_slab.handles, of_slab.ids, of_slab.tables, of_slab.gradients, nullptr, before + s});
  }
}

void merge_grad_(std::vector<Tensor> pending_handles, std::vector<Tensor> pending_ids,
                 std::vector<Tensor> pending_tables, std::vector<Tensor> pending_gradients,
                 Tensor pending_counts, Tensor row_clock) {
  const Call call("merge_grad_", "pending_counts", pending_counts);
  int64_t* extra = row_clock_extra(call, row_clock);
  const std::vector<Pending> pending = pending_slabs(pending_tensors(
      call, pending_handles, pending_ids, pending_tables, pending_gradients, pending_counts));
  const auto group = group_of_pending(call, pending_handles[0]);
  std::vector<int64_t> entries;
  std::vector<int64_t> rows;
  if (group != nullptr) {
    entries = prepare_merge(call, group.get());
    rows = handle_rows(call, *group);
  }
  for (size_t s = 0; s < pending.size(); ++s) {
    merge(call, pending[s], group == nullptr ? pending[s].capacity : entries[s],
          group == nullptr ? kAnyRow : rows[s], nullptr, extra);
  }
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("accumulate_grad_", TORCH_BOX(&dynemb::cuda::accumulate_grad_));
  m.impl("merge_grad_", TORCH_BOX(&dynemb::cuda::merge_grad_));
}
