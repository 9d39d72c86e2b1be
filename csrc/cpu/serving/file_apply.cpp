// file_apply, file_room, file_counts: live tables with rows in a file.
#include <torch/csrc/stable/library.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "arguments/storage.h"
#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/runtime/interpreter_lock.h"
#include "cpu/runtime/results.h"
#include "cpu/serving/live_codes.h"
#include "cpu/serving/row_files.h"

namespace dynemb::cpu {
namespace {

void check_table(const char* op, int64_t table, const RowFile& file) {
  const auto tables = static_cast<int64_t>(file.tables().size());
  DYNEMB_CHECK(table >= 0 && table < tables, "dynemb::", op, ": table is ", table,
               ", expected 0 to ", tables - 1);
}

// Waits until lookups that have the earlier file have ended, so that this thread frees it, its
// index and its place on the disk, and no lookup takes the time for that. Not forever: a reader may
// have been stopped.
void await_readers(const std::shared_ptr<RowFile>& earlier) {
  constexpr auto kPause = std::chrono::microseconds(200);
  constexpr int kMostPauses = 5000;
  for (int k = 0; k < kMostPauses && earlier.use_count() > 1; ++k) {
    std::this_thread::sleep_for(kPause);
  }
}

// A call of the only thread that changes live tables.
class Writer {
 public:
  Writer(const char* op, const Tensor& file, int64_t table, const Tensor& ids, const Tensor& erased)
      : op_(op),
        file_(file),
        table_(table),
        live_(live_rows(op, file).changes->shared_live()),
        writing_(live_->writing, std::try_to_lock) {
    DYNEMB_CHECK(writing_.owns_lock(), "dynemb::", op,
                 ": another thread is changing these tables: let the threads take turns",
                 kInUseError);
    rows_ = live_rows(op, file);
    check_table(op, table, *rows_.file);
    for (const auto& [name, tensor] : {std::pair{"ids", &ids}, std::pair{"erased", &erased}}) {
      check_in_host_memory(op, name, *tensor);
      check_words(op, name, *tensor);
      check_id_limit(op, tensor->numel());
    }
    rows_.file->check_size(op);
    update = {static_cast<const int64_t*>(ids.data_ptr()), ids.numel(), nullptr,
              static_cast<const int64_t*>(erased.data_ptr()), erased.numel()};
  }

  const LiveFile::Table& live() const { return *live_->tables[table_]; }
  const LiveTable& format() const { return rows_.changes->table(table_).changed.table(); }
  ChangePlan plan() const { return rows_.changes->plan(*rows_.file, table_, update); }
  // The same, with room for it: if the changes in memory leave too little, the file is written anew
  // with them, and they begin anew.
  ChangePlan plan_with_room() {
    ChangePlan plan = this->plan();
    if (plan.fits() || !plan.fits_alone()) return plan;
    auto none = std::make_shared<FileChanges>(live_, *rows_.file);
    OpenedRows anew{write_anew(op_, *rows_.file, *rows_.changes), std::move(none)};
    replace_live_rows(op_, file_, anew);
    std::swap(rows_, anew);
    await_readers(anew.file);
    return this->plan();
  }
  void apply(const ChangePlan& plan) { rows_.changes->apply(table_, update, plan); }

  LiveUpdate update{};

 private:
  const char* op_;
  const Tensor& file_;
  const int64_t table_;
  const std::shared_ptr<LiveFile> live_;
  const std::unique_lock<std::mutex> writing_;
  OpenedRows rows_;
};

// With the ids that it changes or removes as the rows that are wanted.
Tensor counts_of(const ChangePlan& plan) {
  LiveOutcome outcome = plan.outcome;
  outcome.wanted = plan.wanted_alone;
  return outcome_counts(outcome);
}

Tensor file_apply(Tensor file, int64_t table, Tensor ids, Tensor values, Tensor erased) {
  const char* op = "file_apply";
  Writer writer(op, file, table, ids, erased);
  check_in_host_memory(op, "values", values);
  const PackedRows packed(op, writer.format(), table, ids, values,
                          writer.live().has_padding ? &writer.live().padding_id : nullptr);
  writer.update.packed = packed.data();
  const WithoutInterpreterLock unlocked;
  const ChangePlan plan = writer.plan_with_room();
  if (plan.fits()) writer.apply(plan);
  return counts_of(plan);
}

// Whether an update fits into memory; `write`: makes room for it.
Tensor file_room(Tensor file, int64_t table, Tensor ids, Tensor erased, bool write) {
  Writer writer("file_room", file, table, ids, erased);
  const WithoutInterpreterLock unlocked;
  return counts_of(write ? writer.plan_with_room() : writer.plan());
}

// Of each table: ids, headroom, updates, and the number of the rows' format.
Tensor file_counts(Tensor file, int64_t tables) {
  const OpenedRows rows = row_file("file_counts", file);
  const auto expected = static_cast<int64_t>(rows.file->tables().size());
  DYNEMB_CHECK(tables == expected, "dynemb::file_counts: tables is ", tables, ", expected ",
               expected, ", those of the file");
  Tensor result = zeros_cpu({tables, 4}, ScalarType::Long);
  auto* out = static_cast<int64_t*>(result.data_ptr());
  for (int64_t t = 0; t < tables; ++t, out += 4) {
    const FileTable& of = rows.file->tables()[t];
    out[0] = of.size, out[3] = static_cast<int64_t>(of.storage);
    if (rows.changes == nullptr) continue;
    const LiveFile::Table& live = *rows.changes->live().tables[t];
    out[0] = live.ids, out[1] = live.headroom, out[2] = live.updates;
  }
  return result;
}

}  // namespace
}  // namespace dynemb::cpu

#define DYNEMB_LIVE_FILE_OPS                                 \
  m.impl("file_apply", TORCH_BOX(&dynemb::cpu::file_apply)); \
  m.impl("file_room", TORCH_BOX(&dynemb::cpu::file_room));   \
  m.impl("file_counts", TORCH_BOX(&dynemb::cpu::file_counts));

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m){DYNEMB_LIVE_FILE_OPS}
// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  DYNEMB_LIVE_FILE_OPS
}
