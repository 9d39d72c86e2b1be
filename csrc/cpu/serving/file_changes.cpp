#include "cpu/serving/file_changes.h"

#include <algorithm>
#include <utility>

#include "core/runtime/check.h"

namespace dynemb::cpu {

LiveFile::LiveFile(std::string first, const RowFile& file, const int64_t* meta,
                   const std::vector<int64_t>& headroom)
    : path(std::move(first)) {
  for (size_t t = 0; t < headroom.size(); ++t, meta += kMetaColumns) {
    tables.push_back(std::unique_ptr<Table>(new Table{bucket_salt(meta[kMetaSeed]),
                                                      meta[kMetaHasPadding] != 0,
                                                      meta[kMetaPaddingId],
                                                      headroom[t],
                                                      {file.tables()[t].size},
                                                      {0}}));
  }
}

std::vector<int64_t> LiveFile::headroom() const {
  std::vector<int64_t> result;
  for (const auto& table : tables) result.push_back(table->headroom);
  return result;
}

int64_t FileChanges::bytes_of(const LiveFile& live, const RowFile& file) {
  int64_t bytes = 0;
  for (size_t t = 0; t < live.tables.size(); ++t) {
    const FileTable& rows = file.tables()[t];
    bytes += ChangedTable::bytes_of(live.tables[t]->headroom, rows.storage, rows.dim);
  }
  return bytes;
}

FileChanges::FileChanges(std::shared_ptr<LiveFile> live, const RowFile& file)
    : live_(std::move(live)) {
  for (size_t t = 0; t < live_->tables.size(); ++t) {
    const LiveFile::Table& of = *live_->tables[t];
    const FileTable& rows = file.tables()[t];
    tables_.push_back(std::make_unique<ChangedTable>(of.headroom, rows.storage, rows.dim, of.salt));
  }
}

void FileChanges::read(int64_t table, const int64_t* ids, int64_t count, char* to, int64_t stride,
                       ChangedId* state) const {
  DYNEMB_CHECK(tables_[table]->read(ids, count, to, stride, state), "dynemb: the changes of table ",
               table, " in memory are damaged: load the package, or make the model live, again");
}

ChangePlan FileChanges::plan(RowFile& file, int64_t table, const LiveUpdate& update) const {
  const auto in_file = [&](const std::vector<int64_t>& ids) {
    std::vector<int64_t> rows(ids.size());
    const std::string wrong = file.find(table, live_->tables[table]->salt, ids.data(),
                                        static_cast<int64_t>(ids.size()), rows.data());
    DYNEMB_CHECK(wrong.empty(), "dynemb: ", wrong);
    std::vector<bool> found;
    for (const int64_t row : rows) found.push_back(row >= 0);
    return found;
  };
  return tables_[table]->plan(update, in_file);
}

void FileChanges::apply(int64_t table, const LiveUpdate& update, const ChangePlan& plan) {
  tables_[table]->apply(update, plan);
  LiveFile::Table& live = *live_->tables[table];
  live.ids += plan.outcome.inserted - plan.outcome.erased;
  ++live.updates;
}

}  // namespace dynemb::cpu
