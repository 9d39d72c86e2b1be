// Gradients of rows between backward and optimizer step: accumulate_grad_ appends those of one
// lookup, merge_grad_ sums entries of one row.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "arguments/clocks.h"
#include "arguments/update.h"
#include "core/runtime/error_class.h"
#include "cpu/gradient/radix_sort.h"
#include "cpu/gradient/runs.h"
#include "cpu/index/one_writer.h"
#include "cpu/memory/reserve.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {
namespace {

// The pending gradients of one slab.
struct Pending {
  ReducedEntries entries;
  int64_t capacity;
  int64_t dim;
  int64_t* count;     // entries
  int64_t* sections;  // entries of one section have distinct rows

  ReducedEntries after_last() const {
    return {entries.handle + *count, entries.id + *count, entries.table + *count,
            entries.gradient + *count * dim};
  }
};

// Also checks the counts.
std::vector<Pending> pending_slabs(const char* op, const std::vector<PendingTensors>& slabs) {
  std::vector<Pending> result;
  for (const PendingTensors& slab : slabs) {
    const int64_t entries = slab.counts[kPendingEntries];
    DYNEMB_CHECK(entries >= 0 && entries <= slab.capacity, "dynemb::", op, ": pending_counts says ",
                 entries, " entries, but there is room for ", slab.capacity);
    const int64_t sections = slab.counts[kPendingSections];
    DYNEMB_CHECK(sections >= 0 && sections <= (int64_t{1} << 62), "dynemb::", op,
                 ": pending_counts says ", sections, " sections, expected a count");
    result.push_back({{slab.handles, slab.ids, slab.tables, slab.gradients},
                      slab.capacity,
                      slab.dim,
                      slab.counts + kPendingEntries,
                      slab.counts + kPendingSections});
  }
  return result;
}

// Entries sorted[begin .. end) have one handle.
struct SortedRun {
  int64_t begin;
  int64_t end;
};

struct MergeJob {
  const Pending* pending;
  const uint64_t* sorted;
  uint64_t position_mask;
  const SortedRun* run;
  int64_t begin;  // runs
  int64_t end;
  float* sums;  // [runs, dim]
};

DYNEMB_INLINE void merge_runs_body(const MergeJob& job) {
  const int64_t dim = job.pending->dim;
  const float* gradients = job.pending->entries.gradient;
  for (int64_t r = job.begin; r < job.end; ++r) {
    float* sum = job.sums + r * dim;
    const auto first = static_cast<int64_t>(job.sorted[job.run[r].begin] & job.position_mask);
    std::memcpy(sum, gradients + first * dim, sizeof(float) * static_cast<size_t>(dim));
    for (int64_t i = job.run[r].begin + 1; i < job.run[r].end; ++i) {
      const float* next = gradients + static_cast<int64_t>(job.sorted[i] & job.position_mask) * dim;
      for (int64_t c = 0; c < dim; ++c) sum[c] += next[c];
    }
  }
}
DYNEMB_SIMD_VARIANTS(merge_runs, (const MergeJob& job), (job))

// Whether entries already have distinct rows, as after lookups of different tables: each table is
// one stretch of ascending rows. Called for many entries, where sorting would cost more.
bool is_merged(const char* op, const Pending& pending, int64_t table_count) {
  constexpr int64_t kEntries = 1 << 16;
  const int64_t count = *pending.count;
  if (count < kEntries) return false;
  const ReducedEntries& entries = pending.entries;
  std::vector<bool> seen(static_cast<size_t>(table_count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t table = entries.table[i];
    if (i > 0 && entries.table[i] == entries.table[i - 1]) {
      if (handle_row(entries.handle[i]) <= handle_row(entries.handle[i - 1])) return false;
      continue;
    }
    DYNEMB_CHECK(table >= 0 && table < table_count, "dynemb::", op, ": pending_tables: entry ", i,
                 " is of table ", table, ", expected 0 to ", table_count - 1);
    if (seen[static_cast<size_t>(table)]) return false;
    seen[static_cast<size_t>(table)] = true;
  }
  return true;
}

// Sums the entries of each row in order of arrival; ascending by row afterwards. Entries with stale
// handles are dropped; returns their number.
int64_t merge(const char* op, const Pending& pending, int64_t table_count) {
  const int64_t count = *pending.count;
  if (*pending.sections > 1 && is_merged(op, pending, table_count)) *pending.sections = 1;
  if (*pending.sections <= 1) return 0;
  const int position_bits = bits_for(static_cast<uint64_t>(count));
  Scratch<uint64_t> sorted(static_cast<size_t>(count));
  uint64_t highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t handle = pending.entries.handle[i];
    DYNEMB_CHECK(handle >= 0, "dynemb::", op, ": entry ", i, " has handle ", handle,
                 ", expected what accumulate_grad_ has written");
    const auto row = static_cast<uint64_t>(handle_row(handle));
    highest = std::max(highest, row);
    sorted[i] = row << position_bits | static_cast<uint64_t>(i);
  }
  const int row_bits = bits_for(highest + 1);
  DYNEMB_CHECK(row_bits + position_bits <= 64, "dynemb::", op, ": ", count, " gradients of ",
               highest + 1, " rows are too many to merge: call optimizer.step() more often");
  radix_sort(sorted, position_bits, position_bits + row_bits);
  const uint64_t mask = (uint64_t{1} << position_bits) - 1;
  const auto entry_of = [&](int64_t i) { return static_cast<int64_t>(sorted[i] & mask); };
  std::vector<SortedRun> run;
  int64_t stale = 0;
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t handle = pending.entries.handle[entry_of(i)];
    if (run.empty() || handle != last) {
      if (!run.empty() && handle_row(handle) == handle_row(last)) {
        run.pop_back();
        ++stale;
      }
      run.push_back({i, i});
    }
    run.back().end = i + 1;
    last = handle;
  }
  const auto runs = static_cast<int64_t>(run.size());
  // Large vectors are new pages on every call; the space behind the entries has pages from earlier
  // merges.
  constexpr int64_t kLarge = 1 << 16;
  const bool behind = runs * pending.dim >= kLarge && pending.capacity - count >= runs;
  std::vector<float> elsewhere(behind ? 0 : static_cast<size_t>(runs * pending.dim));
  float* sums = behind ? pending.after_last().gradient : elsewhere.data();
  constexpr int64_t kChunk = 256;
  parallel_units((runs + kChunk - 1) / kChunk, count, [&](int64_t begin, int64_t end) {
    merge_runs({&pending, sorted.data(), mask, run.data(), begin * kChunk,
                std::min(end * kChunk, runs), sums});
  });
  std::vector<int64_t> words(static_cast<size_t>(runs));
  for (int64_t* values : {pending.entries.handle, pending.entries.id, pending.entries.table}) {
    for (int64_t r = 0; r < runs; ++r) words[r] = values[entry_of(run[r].begin)];
    std::copy(words.begin(), words.end(), values);
  }
  parallel_units((runs + kChunk - 1) / kChunk, count, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kChunk * pending.dim;
    const int64_t last = std::min(end * kChunk, runs) * pending.dim;
    std::memcpy(pending.entries.gradient + first, sums + first,
                sizeof(float) * static_cast<size_t>(last - first));
  });
  *pending.count = runs;
  *pending.sections = 1;
  return stale;
}

void accumulate_grad_(std::vector<Tensor> pending_handles, std::vector<Tensor> pending_ids,
                      std::vector<Tensor> pending_tables, std::vector<Tensor> pending_gradients,
                      Tensor pending_counts, Tensor row_clock, std::vector<Tensor> weights,
                      std::vector<Tensor> generations, Tensor meta, Tensor init_data,
                      Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets,
                      std::optional<Tensor> per_sample_weights, Tensor updates,
                      std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
                      int64_t pooling) {
  const char* op = "accumulate_grad_";
  const auto tables = group_rows(op, weights, generations, meta, init_data);
  const std::vector<PendingTensors> given = pending_tensors(
      op, pending_handles, pending_ids, pending_tables, pending_gradients, pending_counts);
  check_pending_of(op, given, weights);
  const std::vector<Pending> pending = pending_slabs(op, given);
  const OneWriter writer(op, pending_counts.data_ptr());
  const auto table_count = static_cast<int64_t>(tables.size());
  int64_t* extra = row_clock_extra(op, row_clock, table_count);
  const int64_t seen = *seen_updates(op, updates);
  check_row_clock(op, extra - table_count, row_clock.numel());
  const LookupArgs lookup = lookup_call(op, tables, ids, handles, offsets, per_sample_weights,
                                        feature_tables, feature_dims, pooling);
  const GradientSource source = gradient_source(op, lookup, grad_output);
  DYNEMB_CHECK(lookup.id_weights == nullptr || seen == extra[kRowClockUpdates], "dynemb::", op,
               ": the rows were updated between this lookup's forward and its backward (update ",
               seen, " then, ", extra[kRowClockUpdates],
               " now), so the gradients of per_sample_weights no longer fit them: call backward "
               "before optimizer.step()");
  std::vector<GradientRuns> slabs;
  int64_t bytes = 0;
  for (size_t s = 0; s < pending.size(); ++s) {
    const int64_t dim = pending[s].dim;
    slabs.push_back(gradient_runs(op, lookup, tables, static_cast<int64_t>(s), dim));
    bytes += slabs[s].count() * (dim * 4 + 24);
  }
  check_available_memory(op, bytes);
  for (size_t s = 0; s < pending.size(); ++s) {
    const int64_t count = slabs[s].count();
    if (*pending[s].count + count > pending[s].capacity) {
      extra[kRowClockStale] += merge(op, pending[s], table_count);
    }
    DYNEMB_CHECK(*pending[s].count + count <= pending[s].capacity, "dynemb::", op, ": ",
                 *pending[s].count, " pending gradients and ", count,
                 " more, but there is room for ", pending[s].capacity,
                 ": call optimizer.step() or zero_grad()", kNoRoomError);
  }
  for (size_t s = 0; s < pending.size(); ++s) {
    if (slabs[s].count() == 0) continue;
    reduce_runs(source, slabs[s], pending[s].after_last());
    *pending[s].count += slabs[s].count();
    ++*pending[s].sections;
  }
  ++extra[kRowClockSinceStep];
}

void merge_grad_(std::vector<Tensor> pending_handles, std::vector<Tensor> pending_ids,
                 std::vector<Tensor> pending_tables, std::vector<Tensor> pending_gradients,
                 Tensor pending_counts, Tensor row_clock) {
  const char* op = "merge_grad_";
  int64_t* extra = row_clock_extra(op, row_clock);
  check_row_clock(op, static_cast<const int64_t*>(row_clock.data_ptr()), row_clock.numel());
  const std::vector<Pending> slabs =
      pending_slabs(op, pending_tensors(op, pending_handles, pending_ids, pending_tables,
                                        pending_gradients, pending_counts));
  const OneWriter writer(op, pending_counts.data_ptr());
  for (const Pending& slab : slabs) {
    extra[kRowClockStale] += merge(op, slab, row_clock.numel() - kRowClockExtra);
  }
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("accumulate_grad_", TORCH_BOX(&dynemb::cpu::accumulate_grad_));
  m.impl("merge_grad_", TORCH_BOX(&dynemb::cpu::merge_grad_));
}
