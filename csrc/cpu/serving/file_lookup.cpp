// file_lookup: lookups in tables of a file.
//
// 1. Threads find the row numbers of all ids, and copy the rows that the cache has.
// 2. One thread reads the others, many at a time.
// 3. Threads make bags of them, or single rows, as for tables in memory.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments/storage.h"
#include "arguments/table_constants.h"
#include "core/runtime/check.h"
#include "cpu/serving/file_reader.h"
#include "cpu/serving/row_files.h"
#include "cpu/serving/serve_call.h"

namespace dynemb::cpu {
namespace {

struct FileSource {
  TableRows rows;
  const CallRows* of_call;

  int64_t slot_bytes() const { return 0; }
  template <class Sink>
  DYNEMB_INLINE int64_t read(const int64_t* some, int64_t count, char*, Sink& sink) const {
    constexpr int64_t kAtOnce = 64;
    const char* const* row = of_call->row.data() + (some - of_call->ids);
    for (int64_t i = 0; i < count; i += kAtOnce) {
      const int64_t size = std::min(kAtOnce, count - i);
      bool complete = true;
      for (int64_t k = 0; k < size; ++k) complete &= row[i + k] != nullptr;
      sink.take(i, row + i, size, complete);
    }
    return -1;
  }
  std::string damage(int64_t) const { return {}; }
};

std::tuple<Tensor, Tensor> file_lookup(Tensor file, Tensor tables, Tensor meta, Tensor init_data,
                                       Tensor ids, Tensor offsets,
                                       std::optional<Tensor> per_sample_weights,
                                       std::vector<int64_t> feature_tables,
                                       std::vector<int64_t> feature_dims, int64_t pooling) {
  const char* op = "file_lookup";
  const auto [rows, changes] = row_file(op, file);
  rows->check_size(op);
  for (const auto& [name, tensor] : {std::pair{"tables", &tables}, std::pair{"meta", &meta}}) {
    check_in_host_memory(op, name, *tensor);
    check_layout(op, name, *tensor, ScalarType::Long);
    DYNEMB_CHECK(tensor->dim() == 2, "dynemb::", op, ": ", name, " has ", tensor->dim(),
                 " dimensions, expected 2");
    check_size(op, name, *tensor, 0, static_cast<int64_t>(rows->tables().size()));
    check_size(op, name, *tensor, 1, kMetaColumns);
  }
  static_assert(int{kMetaColumns} == int{kTableColumns}, "both have as many columns");
  check_in_host_memory(op, "init_data", init_data);
  check_layout(op, "init_data", init_data, ScalarType::Double);
  const auto* constants = static_cast<const int64_t*>(meta.data_ptr());
  CallRows read;
  std::vector<FileSource> sources;
  std::vector<uint64_t> salts;
  for (size_t t = 0; t < rows->tables().size(); ++t) {
    const int64_t* of = constants + static_cast<int64_t>(t) * kMetaColumns;
    const FileTable& table = rows->tables()[t];
    const int64_t size = static_cast<const int64_t*>(
        tables.data_ptr())[static_cast<int64_t>(t) * kTableColumns + kTableSize];
    DYNEMB_CHECK(size == table.size || changes != nullptr, "dynemb::", op, ": tables of table ", t,
                 " has ", size, " ids, but that of ", rows->path(), " has ", table.size);
    DYNEMB_CHECK(of[kMetaDim] == table.dim, "dynemb::", op, ": meta of table ", t, " has dim ",
                 of[kMetaDim], ", but that of ", rows->path(), " has dim ", table.dim);
    check_initializers(op, static_cast<int64_t>(t), of, table.dim,
                       static_cast<const double*>(init_data.data_ptr()), init_data.numel());
    TableRows initial{};
    initial.dim = table.dim;
    initial.storage = table.storage;
    initial.seed = of[kMetaSeed];
    initial.first_column = of[kMetaFirstColumn];
    initial.init_data = static_cast<const double*>(init_data.data_ptr());
    initial.default_begin = of[kMetaDefaultBegin];
    initial.default_count = of[kMetaDefaultCount];
    sources.push_back({initial, &read});
    salts.push_back(bucket_salt(of[kMetaSeed]));
  }
  const ServeArguments given{tables,         meta,         ids,    offsets, per_sample_weights,
                             feature_tables, feature_dims, pooling};
  return serve(op, given, sources,
               [&, &rows = *rows, changes = changes.get()](const FeatureArgs& features) {
                 read_rows(op, {rows, changes, salts.data()}, features, read);
               });
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("file_lookup", TORCH_BOX(&dynemb::cpu::file_lookup));
}
// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  m.impl("file_lookup", TORCH_BOX(&dynemb::cpu::file_lookup));
}
