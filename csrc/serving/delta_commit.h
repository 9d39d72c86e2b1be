// A commit: the changes of whole tables, from the batches of all ranks with one number.

#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "serving/delta_batch.h"
#include "serving/json.h"
#include "serving/row_forms.h"
#include "serving/safetensors.h"

namespace dynemb::serving {

// Changes of a commit to a table.
struct TableDelta {
  int64_t embedding_dim;
  std::string dtype;   // of its rows, as a checkpoint names it
  at::Tensor ids;      // int64 [n], distinct: new ids, and ids with changed rows
  at::Tensor rows;     // floats [n, embedding_dim]; of one rank with rows="int8": uint8 [n, bytes]
  at::Tensor removed;  // int64 [m], removed ids
};

// Changes of one publish of all ranks.
struct Commit {
  int64_t sequence, step;
  std::map<std::string, TableDelta> tables;  // by name in the log
  std::map<std::string, at::Tensor> dense;   // by name in the state dict of the trained model
};

namespace detail {

// Copies of the tensors in a payload.
inline std::map<std::string, at::Tensor> tensors_of(const LogRecord& record) {
  const size_t header = header_bytes(record.payload, record.bytes);
  const std::string text(record.payload + sizeof(uint64_t), header - sizeof(uint64_t));
  std::map<std::string, at::Tensor> result;
  for (const Section& section : sections_in(text, header, record.bytes)) {
    at::Tensor values = at::empty(section.shape, at::TensorOptions(section.dtype));
    std::memcpy(values.mutable_data_ptr(), record.payload + section.begin, section.bytes);
    result.emplace(section.name, std::move(values));
  }
  return result;
}

// The rows of a record, in the form of its log (DeltaLog(rows=)).
inline at::Tensor rows_in(const std::map<std::string, at::Tensor>& tensors) {
  for (const char* form : {"weight.int8", "weight.fp16"}) {
    const auto found = tensors.find(form);
    if (found != tensors.end()) return found->second;
  }
  return tensors.at("weight");
}

constexpr size_t kMostTablesBytes = size_t{16} << 20;  // of JSON, for a hundred thousand tables

// Changes of some columns of a table, from several ranks; a record each.
struct TablePiece {
  int64_t embedding_dim, columns;
  std::string dtype;
  std::vector<at::Tensor> ids, rows, removed;

  // Adds the ids of another rank for the same columns.
  void join(const TablePiece& more) {
    ids.insert(ids.end(), more.ids.begin(), more.ids.end());
    rows.insert(rows.end(), more.rows.begin(), more.rows.end());
    removed.insert(removed.end(), more.removed.begin(), more.removed.end());
  }

  TableDelta delta() const {
    const at::Tensor none = at::empty({0}, at::kLong);
    return {embedding_dim, dtype, ids.empty() ? none : at::cat(ids),
            rows.empty() ? at::empty({0, columns}) : at::cat(rows),
            removed.empty() ? none : at::cat(removed)};
  }
};

// Joins a table from its pieces, by their first columns.
inline TableDelta whole(const std::string& name, std::map<int64_t, TablePiece> pieces) {
  TableDelta result = pieces.begin()->second.delta();
  int64_t columns = 0;
  for (const auto& [begin, piece] : pieces) columns += piece.columns;
  if (columns != result.embedding_dim) {
    throw std::runtime_error("table '" + name + "' has not all of its " +
                             std::to_string(result.embedding_dim) + " columns");
  }
  if (pieces.size() == 1) return result;
  std::vector<at::Tensor> rows;
  for (const auto& [begin, piece] : pieces) {
    const TableDelta delta = piece.delta();
    const auto [ids, order] = delta.ids.sort();
    if (rows.empty()) result.ids = ids;
    if (!ids.equal(result.ids)) {
      throw std::runtime_error("ranks that share the columns of table '" + name +
                               "' have other ids");
    }
    rows.push_back(as_floats(delta.rows, piece.columns).index_select(0, order));
  }
  result.rows = at::cat(rows, 1);
  return result;
}

// The tables of a batch, by their numbers there.
inline std::vector<std::pair<std::string, std::pair<int64_t, TablePiece>>> pieces_of(
    const Batch& batch) {
  std::vector<std::pair<std::string, std::pair<int64_t, TablePiece>>> pieces;
  for (const LogRecord& record : batch.records) {
    if (record.kind != kTables) continue;
    if (record.bytes > kMostTablesBytes) throw std::runtime_error("it has too many tables");
    const Json tables = Json::parse({record.payload, record.bytes});
    for (const Json& table : tables.array()) {
      const Json& part = table.at("parts").array().at(0);
      TablePiece piece{table.at("embedding_dim").integer(),
                       part.at("columns").integer(),
                       table.at("dtype").text(),
                       {},
                       {},
                       {}};
      pieces.push_back(
          {table.at("name").text(), {part.at("first_column").integer(), std::move(piece)}});
    }
  }
  for (const LogRecord& record : batch.records) {
    if (record.kind == kRows) {
      const auto tensors = tensors_of(record);
      TablePiece& piece = pieces.at(record.table).second.second;
      piece.ids.push_back(tensors.at("id")), piece.rows.push_back(rows_in(tensors));
    } else if (record.kind == kErase) {
      pieces.at(record.table).second.second.removed.push_back(tensors_of(record).at("id"));
    } else if (record.kind < kRows || record.kind == kCommit || record.kind > kChangedCells) {
      throw std::runtime_error("it has a record of kind " + std::to_string(record.kind));
    }
  }
  return pieces;
}

// Throws DamagedLog if the batches are inconsistent.
inline Commit commit_of(const std::vector<Batch>& batches) {
  const BatchHead& head = batches.at(0).head;
  const c10::InferenceMode guard;
  Commit commit{static_cast<int64_t>(head.sequence), static_cast<int64_t>(head.step), {}, {}};
  try {
    std::map<std::string, std::map<int64_t, TablePiece>> tables;
    for (const Batch& batch : batches) {
      for (auto& [name, piece] : pieces_of(batch)) {
        const auto [found, first] = tables[name].insert(piece);
        if (!first) found->second.join(piece.second);
      }
      for (const LogRecord& record : batch.records) {
        if (record.kind == kDense) commit.dense.merge(tensors_of(record));
      }
    }
    for (auto& [name, pieces] : tables) commit.tables.emplace(name, whole(name, std::move(pieces)));
  } catch (const std::exception& error) {
    throw DamagedLog("delta log: commit " + std::to_string(head.sequence) +
                     " cannot be understood: " + error.what());
  }
  return commit;
}

}  // namespace detail
}  // namespace dynemb::serving
