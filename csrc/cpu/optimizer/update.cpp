#include "arguments/update.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "arguments/clocks.h"
#include "core/optimizers.h"
#include "core/policy/counts.h"
#include "cpu/gradient/runs.h"
#include "cpu/index/one_writer.h"
#include "cpu/optimizer/kernels.h"
#include "cpu/runtime/prefetch.h"

namespace dynemb::cpu {
namespace {

OptimizerKernels kernels_of(const char* op, int64_t optimizer) {
  check_optimizer(op, optimizer);
  constexpr OptimizerKernels (*kParts[])(int64_t) = {kernels_of_part<0>, kernels_of_part<1>,
                                                     kernels_of_part<2>, kernels_of_part<3>};
  static_assert(std::size(kParts) == kOptimizerParts);
  return kParts[optimizer % kOptimizerParts](optimizer);
}

// The row tensors, checked against the optimizer, and the scalars of this update.
struct UpdateCall {
  OptimizerKernels kernels;
  const char* op;
  std::vector<TableRows> tables;
  std::vector<SlabState> state;  // by slab
  UpdateTensors given;
  std::vector<OptimizerStep> steps;  // by table

  UpdateCall(const char* op, int64_t optimizer, const std::vector<Tensor>& weights,
             const std::vector<Tensor>& generations, const std::vector<Tensor>& states,
             const std::vector<Tensor>& dirty_bits, const std::vector<Tensor>& copy_on_write,
             const Tensor& row_clock, const Tensor& hyper, const Tensor& meta,
             const Tensor& init_data, const Tensor& updates, const char* tables_argument,
             const std::vector<int64_t>& updated_tables)
      : kernels(kernels_of(op, optimizer)),
        op(op),
        tables(group_rows(op, weights, generations, meta, init_data)),
        state(state_tensors(op, weights, states, dirty_bits, copy_on_write)),
        given(update_tensors(op, optimizer, state, meta.size(0), row_clock, hyper, updates,
                             tables_argument, updated_tables)) {
    check_row_clock(op, given.clock, row_clock.numel());
    writer_.emplace(op, weights.empty() ? given.clock : weights[0].data_ptr());
    DYNEMB_CHECK(
        *given.seen == given.extra[kRowClockUpdates], "dynemb::", op,
        ": the rows were updated between this lookup's forward and its backward (update ",
        *given.seen, " then, ", given.extra[kRowClockUpdates],
        " now), so its gradients no longer fit them. Do not look a table up twice before a "
        "backward, nor run backward twice: pass all features of a table to one call, or use split "
        "mode (split=True, then one module.optimizer.step()); where gradients are to come late, "
        "give "
        "the optimizer delayed_gradients=\"apply\"");
    steps.reserve(tables.size());
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t step = given.updated[t] != 0 ? next_count(given.clock[t]) : given.clock[t];
      steps.push_back(optimizer_step(given.hyper + t * kHyperColumns, step));
    }
  }

  // Advances the steps of the tables in this update, after all checks.
  void advance() {
    for (size_t t = 0; t < steps.size(); ++t) {
      if (given.updated[t] != 0 && !steps[t].skip) given.clock[t] = steps[t].step;
    }
    ++given.extra[kRowClockUpdates];
    ++given.extra[kRowClockSinceStep];
  }

  bool updates(int64_t table) const { return given.updated[table] != 0; }

  // Whether a NaN or infinity in a gradient is an error, in a table or in any.
  bool raises(int64_t table) const {
    return steps[table].non_finite == NonFinite::kRaise && !steps[table].skip;
  }
  bool raises() const {
    for (size_t t = 0; t < steps.size(); ++t) {
      if (raises(static_cast<int64_t>(t))) return true;
    }
    return false;
  }
  void check_finite(const RowUpdate& row, const int64_t* ids) const {
    if (!raises(row.table)) return;
    DYNEMB_CHECK(!has_non_finite(row.gradient, tables[row.table].dim), "dynemb::", op,
                 ": the gradient of id ", ids[row.position], " of table ", row.table,
                 " has NaN or infinity, and non_finite is 'raise': no row has been updated");
  }

  RowUpdateJob job(int64_t slab, const int64_t* ids, float* scratch) const {
    return {nullptr, 0, nullptr, 0, ids, tables.data(), steps.data(), &state[slab], scratch, 0, 0};
  }

 private:
  std::optional<OneWriter> writer_;
};

constexpr int64_t kScratchRows = 2 + kMaxStates;

// Rows that were not updated, by chunk, so that threads do not share counters.
struct Dropped {
  std::vector<int64_t> stale;
  std::vector<int64_t> non_finite;

  explicit Dropped(int64_t chunks) : stale(chunks, 0), non_finite(chunks, 0) {}
  void take(int64_t chunk, RowUpdateJob* job) {
    stale[chunk] = job->stale;
    non_finite[chunk] = job->non_finite;
    job->stale = job->non_finite = 0;
  }
  void count(const UpdateCall& call) const {
    for (const int64_t n : stale) call.given.extra[kRowClockStale] += n;
    for (const int64_t n : non_finite) call.given.extra[kRowClockNonFinite] += n;
  }
};

// Runs of a slab with their sums, chunk by chunk.
struct SlabRuns {
  const GradientSource& source;
  const GradientRuns& runs;
  LongRuns long_runs;
  int64_t chunks;

  SlabRuns(const GradientSource& source, const GradientRuns& runs)
      : source(source),
        runs(runs),
        long_runs(sum_long_runs(source, runs)),
        chunks((runs.count() + kRowsPerChunk - 1) / kRowsPerChunk) {}

  // Rows of a chunk without their sums; returns their number.
  int64_t collect(int64_t chunk, RowUpdate* rows) const {
    const LookupArgs& lookup = *source.lookup;
    const int64_t first = chunk * kRowsPerChunk;
    const int64_t last = std::min(first + kRowsPerChunk, runs.count());
    for (int64_t r = first; r < last; ++r) {
      if (!runs.one_generation() && r + kRowsPerChunk < runs.count()) {
        prefetch_line_of(lookup.handles + runs.position(runs.run[r + kRowsPerChunk]));
      }
      const int64_t position = runs.position(runs.run[r]);
      const int64_t table = lookup.features.table[source.feature_of(position)];
      rows[r - first] = {runs.handle(runs.run[r]), position, table, nullptr};
    }
    return last - first;
  }
  // `buffer`: a row for each of a chunk.
  void sum(int64_t chunk, float* buffer, int64_t count, RowUpdate* rows) const {
    const float* sums[kRowsPerChunk];
    const int64_t first = chunk * kRowsPerChunk;
    sum_runs({&source, &runs, &long_runs, first, first + count, buffer, sums});
    for (int64_t k = 0; k < count; ++k) rows[k].gradient = sums[k];
  }
};

void check_runs(const UpdateCall& call, const SlabRuns& slab) {
  std::vector<float> buffer(static_cast<size_t>(kRowsPerChunk * slab.runs.dim));
  RowUpdate rows[kRowsPerChunk];
  for (int64_t chunk = 0; chunk < slab.chunks; ++chunk) {
    const int64_t count = slab.collect(chunk, rows);
    slab.sum(chunk, buffer.data(), count, rows);
    const int64_t* ids = slab.source.lookup->features.ids;
    for (int64_t k = 0; k < count; ++k) call.check_finite(rows[k], ids);
  }
}

// Runs f(begin, end) over pieces of [0, chunks), each on the next free thread. Rows are sorted, and
// new ones often lie together: of equal parts, one would have the initial values of all.
template <class F>
void parallel_pieces(int64_t chunks, int64_t work, const F& f) {
  constexpr int64_t kPiecesPerThread = 8;
  constexpr int64_t kFewestChunks = 8;  // the first chunk of a piece is not prefetched
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t pieces = threads * kPiecesPerThread;
  const int64_t piece = std::max(kFewestChunks, (chunks + pieces - 1) / pieces);
  std::atomic<int64_t> next{0};
  parallel_units(std::min(threads, (chunks + piece - 1) / piece), work, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(piece)) < chunks;) {
      f(begin, std::min(begin + piece, chunks));
    }
  });
}

void update_runs(const UpdateCall& call, const SlabRuns& slab) {
  const int64_t dim = slab.runs.dim;
  Dropped dropped(slab.chunks);
  const auto occurrences = static_cast<int64_t>(slab.runs.sorted.size());
  parallel_pieces(slab.chunks, occurrences, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(static_cast<size_t>(kRowsPerChunk * dim));
    std::vector<float> scratch(static_cast<size_t>(kScratchRows * dim));
    RowUpdate two_chunks[2][kRowsPerChunk];  // of one chunk and of the next one, alternating
    RowUpdateJob job = call.job(slab.runs.slab, slab.source.lookup->features.ids, scratch.data());
    job.next = two_chunks[begin % 2];
    job.next_count = slab.collect(begin, two_chunks[begin % 2]);
    call.kernels.prefetch_rows(job);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      RowUpdate* rows = two_chunks[chunk % 2];
      RowUpdate* next = two_chunks[(chunk + 1) % 2];
      job.rows = rows;
      job.count = job.next_count;
      job.next = next;
      job.next_count = chunk + 1 < end ? slab.collect(chunk + 1, next) : 0;
      slab.sum(chunk, buffer.data(), job.count, rows);
      call.kernels.update_rows(job);
      dropped.take(chunk, &job);
    }
  });
  dropped.count(call);
}

// Whether `is_right` holds for all `count` entries.
template <class F>
bool all_entries(int64_t count, const F& is_right) {
  constexpr int64_t kEntriesPerUnit = 1 << 12;
  const int64_t units = (count + kEntriesPerUnit - 1) / kEntriesPerUnit;
  std::atomic<bool> all{true};
  parallel_units(units, count, [&](int64_t begin, int64_t end) {
    bool right = true;
    for (int64_t u = begin * kEntriesPerUnit; u < std::min(end * kEntriesPerUnit, count); ++u) {
      right &= is_right(u);
    }
    if (!right) all = false;
  });
  return all;
}

// Reduces the output gradient of a lookup and applies it in the same pass, without writing the
// reduced gradients.
void embedding_backward_(std::vector<Tensor> weights, std::vector<Tensor> generations,
                         std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
                         std::vector<Tensor> copy_on_write, Tensor row_clock, Tensor hyper,
                         Tensor meta, Tensor init_data, Tensor grad_output, Tensor ids,
                         Tensor handles, Tensor offsets, std::optional<Tensor> per_sample_weights,
                         Tensor updates, std::vector<int64_t> feature_tables,
                         std::vector<int64_t> feature_dims, int64_t pooling, int64_t optimizer) {
  const char* op = "embedding_backward_";
  UpdateCall call(op, optimizer, weights, generations, state, dirty_bits, copy_on_write, row_clock,
                  hyper, meta, init_data, updates, "feature_tables", feature_tables);
  const LookupArgs lookup = lookup_call(op, call.tables, ids, handles, offsets, per_sample_weights,
                                        feature_tables, feature_dims, pooling);
  const GradientSource source = gradient_source(op, lookup, grad_output);
  std::vector<GradientRuns> slabs;
  for (size_t s = 0; s < weights.size(); ++s) {
    slabs.push_back(
        gradient_runs(op, lookup, call.tables, static_cast<int64_t>(s), weights[s].size(1)));
  }
  std::vector<SlabRuns> sums;
  for (const GradientRuns& runs : slabs) sums.emplace_back(source, runs);
  if (call.raises()) {
    for (const SlabRuns& slab : sums) check_runs(call, slab);
  }
  call.advance();
  for (const SlabRuns& slab : sums) update_runs(call, slab);
}

// Applies reduced gradients to rows.
void apply_grad_(std::vector<Tensor> weights, std::vector<Tensor> generations,
                 std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
                 std::vector<Tensor> copy_on_write, Tensor row_clock, Tensor hyper, Tensor meta,
                 Tensor init_data, std::vector<Tensor> handles, std::vector<Tensor> ids,
                 std::vector<Tensor> tables, std::vector<Tensor> gradients, Tensor counts,
                 Tensor updates, std::vector<int64_t> updated_tables, int64_t optimizer) {
  const char* op = "apply_grad_";
  UpdateCall call(op, optimizer, weights, generations, state, dirty_bits, copy_on_write, row_clock,
                  hyper, meta, init_data, updates, "updated_tables", updated_tables);
  const std::vector<ReducedTensors> reduced =
      reduced_tensors(op, weights, handles, ids, tables, gradients, counts);
  const auto table_count = static_cast<int64_t>(call.tables.size());
  std::vector<int64_t> dims;
  for (const Tensor& of_slab : weights) dims.push_back(of_slab.size(1));
  // computed on demand: there may be millions of entries
  const auto entry = [&](size_t s, int64_t u) -> RowUpdate {
    const ReducedTensors& of = reduced[s];
    return {of.handles[u], u, of.tables[u], of.gradients + u * dims[s]};
  };
  for (size_t s = 0; s < reduced.size(); ++s) {
    const int64_t count = *reduced[s].count;
    DYNEMB_CHECK(count >= 0 && count <= reduced[s].capacity, "dynemb::", op, ": counts[", s,
                 "] is ", count, ", more than handles, ids, tables or gradients hold");
    const int64_t* handle = reduced[s].handles;
    const int64_t* table = reduced[s].tables;
    const int64_t rows = weights[s].size(0);
    const auto names_row = [&](int64_t u) {
      return handle[u] >= 0 && handle_row(handle[u]) < rows && table[u] >= 0 &&
             table[u] < table_count && call.tables[table[u]].slab == static_cast<int64_t>(s);
    };
    // threads look for a wrong entry, then one of them reports it
    const auto is_right = [&](int64_t u) { return names_row(u) && call.updates(table[u]); };
    if (!call.raises() && all_entries(count, is_right)) continue;
    for (int64_t u = 0; u < count; ++u) {
      DYNEMB_CHECK(names_row(u), "dynemb::", op, ": entry ", u, " of slab ", s, " has handle ",
                   handle[u], " and table ", table[u], ", expected what reduce_grad returned");
      DYNEMB_CHECK(call.updates(table[u]), "dynemb::", op, ": entry ", u, " of slab ", s,
                   " belongs to table ", table[u],
                   ", which updated_tables lacks: give all "
                   "tables of the lookup");
      if (call.raises(table[u])) call.check_finite(entry(s, u), reduced[s].ids);
    }
  }
  call.advance();
  for (size_t s = 0; s < reduced.size(); ++s) {
    const int64_t total = *reduced[s].count;
    const int64_t chunks = (total + kRowsPerChunk - 1) / kRowsPerChunk;
    Dropped dropped(chunks);
    parallel_pieces(chunks, total, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(static_cast<size_t>(kScratchRows * dims[s]));
      RowUpdateJob job = call.job(static_cast<int64_t>(s), reduced[s].ids, scratch.data());
      std::vector<RowUpdate> rows;
      std::vector<RowUpdate> next;
      const auto collect = [&](int64_t chunk, std::vector<RowUpdate>* to) {
        to->clear();
        const int64_t last = chunk < end ? std::min((chunk + 1) * kRowsPerChunk, total) : 0;
        for (int64_t u = chunk * kRowsPerChunk; u < last; ++u) {
          to->push_back(entry(s, u));
          prefetch_row_bytes(reinterpret_cast<const char*>(to->back().gradient),
                             dims[s] * static_cast<int64_t>(sizeof(float)));
        }
      };
      collect(begin, &next);
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        rows.swap(next);
        collect(chunk + 1, &next);
        job.rows = rows.data();
        job.count = static_cast<int64_t>(rows.size());
        job.next = next.data();
        job.next_count = static_cast<int64_t>(next.size());
        call.kernels.update_rows(job);
        dropped.take(chunk, &job);
      }
    });
    dropped.count(call);
  }
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("embedding_backward_", TORCH_BOX(&dynemb::cpu::embedding_backward_));
  m.impl("apply_grad_", TORCH_BOX(&dynemb::cpu::apply_grad_));
}
