// file_apply, file_rows, file_counts: live tables with rows in a file.
#include <torch/csrc/stable/library.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments/storage.h"
#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/rows/quantized_rows.h"
#include "cpu/rows/storage.h"
#include "cpu/runtime/interpreter_lock.h"
#include "cpu/runtime/results.h"
#include "cpu/serving/file_reader.h"
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

// If the changes in memory leave too little room, the file is written anew with them, and they
// begin anew.
Tensor file_apply(Tensor file, int64_t table, Tensor ids, Tensor values, Tensor erased) {
  const char* op = "file_apply";
  const auto live = live_rows(op, file).changes->shared_live();
  const std::unique_lock<std::mutex> writing(live->writing, std::try_to_lock);
  DYNEMB_CHECK(writing.owns_lock(), "dynemb::", op,
               ": another thread is changing these tables: let the threads take turns",
               kInUseError);
  OpenedRows rows = live_rows(op, file);
  check_table(op, table, *rows.file);
  for (const auto& [name, tensor] : {std::pair{"ids", &ids}, std::pair{"erased", &erased}}) {
    check_in_host_memory(op, name, *tensor);
    check_words(op, name, *tensor);
    check_id_limit(op, tensor->numel());
  }
  check_in_host_memory(op, "values", values);
  const LiveFile::Table& of = *live->tables[table];
  const PackedRows packed(op, rows.changes->table(table).changed.table(), table, ids, values,
                          of.has_padding ? &of.padding_id : nullptr);
  const LiveUpdate update{static_cast<const int64_t*>(ids.data_ptr()), ids.numel(), packed.data(),
                          static_cast<const int64_t*>(erased.data_ptr()), erased.numel()};
  rows.file->check_size(op);
  const WithoutInterpreterLock unlocked;
  ChangeOutcome outcome = rows.changes->apply(*rows.file, table, update);
  if (outcome.wanted_alone > outcome.free) {
    outcome.wanted = outcome.wanted_alone;
  } else if (outcome.wanted > outcome.free) {
    auto none = std::make_shared<FileChanges>(live, *rows.file);
    const OpenedRows anew{write_anew(op, *rows.file, *rows.changes), std::move(none)};
    replace_live_rows(op, file, anew);
    await_readers(rows.file);
    outcome = anew.changes->apply(*anew.file, table, update);
  }
  return outcome_counts(outcome);
}

// Rows as file_apply takes them: uint8 of quantized rows, otherwise float32.
std::tuple<Tensor, Tensor> file_rows(Tensor file, int64_t table, Tensor ids, int64_t columns,
                                     bool quantized) {
  const char* op = "file_rows";
  const OpenedRows rows = live_rows(op, file);
  check_table(op, table, *rows.file);
  check_in_host_memory(op, "ids", ids);
  check_words(op, "ids", ids);
  check_id_limit(op, ids.numel());
  const FileTable& of = rows.file->tables()[table];
  const bool is_quantized_table = is_quantized(of.storage);
  DYNEMB_CHECK(quantized == is_quantized_table, "dynemb::", op, ": quantized is ", quantized,
               ", but the rows of table ", table, " are ", is_quantized_table ? "" : "not ",
               "quantized");
  const int64_t expected = quantized ? of.row_bytes : of.dim;
  DYNEMB_CHECK(columns == expected, "dynemb::", op, ": columns is ", columns, ", expected ",
               expected, ", those of table ", table);
  rows.file->check_size(op);
  const int64_t count = ids.numel();
  CallRows read;
  std::vector<uint64_t> salts;
  for (const auto& live : rows.changes->live().tables) salts.push_back(live->salt);
  read_rows(op, {*rows.file, rows.changes.get(), salts.data()},
            {static_cast<const int64_t*>(ids.data_ptr()), count, {0, count}, {table}}, read);
  Tensor result = zeros_cpu({count, columns}, quantized ? ScalarType::Byte : ScalarType::Float);
  Tensor found = zeros_cpu({count}, ScalarType::Bool);
  auto* out = static_cast<char*>(result.data_ptr());
  const int64_t bytes = columns * (quantized ? 1 : static_cast<int64_t>(sizeof(float)));
  for (int64_t i = 0; i < count; ++i, out += bytes) {
    const char* row = read.row[i];
    static_cast<bool*>(found.data_ptr())[i] = row != nullptr;
    if (row == nullptr) continue;
    if (quantized) {
      std::memcpy(out, row, static_cast<size_t>(bytes));
    } else {
      load_row(of.storage, row, of.dim, reinterpret_cast<float*>(out));
    }
  }
  return {result, found};
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
  m.impl("file_rows", TORCH_BOX(&dynemb::cpu::file_rows));   \
  m.impl("file_counts", TORCH_BOX(&dynemb::cpu::file_counts));

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m){DYNEMB_LIVE_FILE_OPS}
// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  DYNEMB_LIVE_FILE_OPS
}
