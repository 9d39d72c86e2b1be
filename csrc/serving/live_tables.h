// The tables of a package that was exported with headroom: their rows are updated while it serves.

#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isin.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/columns.h"
#include "core/rows/pooling.h"
#include "core/rows/quantized.h"
#include "core/serving/live_row.h"
#include "serving/json.h"
#include "serving/manifest.h"
#include "serving/ops.h"
#include "serving/row_forms.h"

namespace dynemb::serving {

// Numbers of ids that an update has inserted, updated and removed.
struct LiveUpdate {
  int64_t inserted, updated, erased;
};

// Counts of a table: ids, rows for new ids, updates since the export.
struct LiveStats {
  int64_t ids, free_rows, updates;
};

// An update with more new ids than a table has free rows. Nothing has changed.
class NoHeadroom : public std::runtime_error {
 public:
  NoHeadroom(const std::string& table, int64_t wanted_rows, int64_t free, bool in_file = false)
      : std::runtime_error(
            in_file
                ? "table '" + table + "' keeps changes of " + std::to_string(free) +
                      " ids in memory, but this update changes or removes " +
                      std::to_string(wanted_rows) +
                      ": nothing has changed. Give smaller updates, or export the model with "
                      "more headroom"
                : "table '" + table + "' has " + std::to_string(free) +
                      " rows free, but new ids of this update need " + std::to_string(wanted_rows) +
                      ": nothing has changed. Erase ids, or export the model with more "
                      "headroom"),
        wanted(wanted_rows),
        free_rows(free) {}

  const int64_t wanted, free_rows;
};

// Changes of a commit of a delta log to a table.
struct LiveChange {
  std::string table;
  at::Tensor ids, rows, removed;
};

// Takes updates. One thread updates at a time, others wait; runs never wait.
class LiveTables {
 public:
  LiveTables(const Json& manifest, const std::unordered_map<std::string, at::Tensor>& tensors) {
    if (!manifest.has("live")) return;
    const auto tensor = [&](const std::string& name) {
      const auto found = tensors.find(name);
      if (found == tensors.end()) {
        detail::damaged("manifest.json", "the tensor " + name +
                                             " is missing: files of different packages were mixed");
      }
      return found->second;
    };
    for (const auto& [path, part] : manifest.at("live").object()) {
      Group group{};
      group.meta = tensor(path + ".meta");
      if (part.has("headroom") && !part.at("headroom").is_null()) {
        group.file = tensor(path + ".file");
        const at::Tensor counts = group.file_counts();
        for (int64_t table = 0; table < counts.size(0); ++table) {
          group.formats.push_back(counts.const_data_ptr<int64_t>()[table * kFileCounts + kFormat]);
        }
      } else {
        group.buckets = tensor(path + ".buckets"), group.tables = tensor(path + ".tables");
        group.free = tensor(path + ".free"), group.init_data = tensor(path + ".init_data");
      }
      for (const Json& format : part.at("formats").array()) {
        group.rows.push_back(tensor(path + ".rows" + std::to_string(group.rows.size())));
        group.formats.push_back(format.integer());
      }
      for (const Json& name : part.at("tables").array()) group.names.push_back(name.text());
      groups_.push_back(std::move(group));
    }
  }

  // Removes ids from a table, then writes rows of others; all of it, or nothing. An id in both
  // lists gets its row, and no run misses it meanwhile. `ids` and `erased` int64 [n] and [m];
  // `rows` float32, bfloat16 or float16 [n, dim]. Throws NoHeadroom; std::invalid_argument for a
  // wrong argument; std::runtime_error if the package has no headroom, for a padding id, and for a
  // row that the format cannot hold.
  LiveUpdate apply(const std::string& table, const at::Tensor& ids, const at::Tensor& rows,
                   const at::Tensor& erased) {
    const auto [group, number] = find("apply", table);
    const int64_t dim = group->meta_of(number, kMetaDim);
    check_ids("apply", "ids", ids);
    check_ids("apply", "erased", erased);
    if (!rows.defined() || !rows.is_cpu() || !rows.is_floating_point() ||
        rows.scalar_type() == at::kDouble || rows.dim() != 2 || rows.size(0) != ids.numel() ||
        rows.size(1) != dim) {
      throw std::invalid_argument("apply: rows should be float32, bfloat16 or float16 [" +
                                  std::to_string(ids.numel()) + ", " + std::to_string(dim) +
                                  "] of the CPU, a row of table '" + table + "' for each id");
    }
    return update(*group, number, ids, rows, erased);
  }

  // Removes ids from a table; returns their number.
  int64_t erase(const std::string& table, const at::Tensor& ids) {
    const auto [group, number] = find("erase", table);
    check_ids("erase", "ids", ids);
    const at::Tensor none = at::empty({0, group->meta_of(number, kMetaDim)}, at::kFloat);
    return update(*group, number, ids.slice(0, 0, 0), none, ids).erased;
  }

  // Applies several changes of known tables, each as apply() does; all of them, or none.
  void take(const std::vector<LiveChange>& changes) {
    const std::lock_guard<std::mutex> lock(writing_);
    const c10::InferenceMode guard;
    for (const LiveChange& change : changes) check(change);
    for (const LiveChange& change : changes) {
      const auto [group, number] = find("follow", change.table);
      if (group->file.defined()) check_room(*group, number, change, /*write=*/true);
    }
    // nothing refuses them now
    for (const LiveChange& change : changes) {
      if (change.ids.numel() == 0 && change.removed.numel() == 0) continue;
      const auto [group, number] = find("follow", change.table);
      update_alone(*group, number, change.ids, change.rows, change.removed);
    }
  }

  // Counts of all tables, by name; empty if the package has no headroom.
  std::map<std::string, LiveStats> stats() const {
    const std::lock_guard<std::mutex> lock(writing_);
    std::map<std::string, LiveStats> result;
    for (const Group& group : groups_) {
      const at::Tensor of_file = group.file.defined() ? group.file_counts() : at::Tensor();
      for (size_t table = 0; table < group.names.size(); ++table) {
        if (of_file.defined()) {
          const int64_t* count = of_file.const_data_ptr<int64_t>() + table * kFileCounts;
          result[group.names[table]] = {count[kIds], count[kHeadroom], count[kUpdates]};
          continue;
        }
        const int64_t* counts = group.tables.const_data_ptr<int64_t>() + table * kLiveTableColumns;
        const int64_t ids = counts[kLiveTableSize];
        result[group.names[table]] = {ids, counts[kLiveTableCapacity] - ids,
                                      counts[kLiveTableBatches]};
      }
    }
    return result;
  }

 private:
  // Columns of dynemb::file_counts.
  enum { kIds = 0, kHeadroom = 1, kUpdates = 2, kFormat = 3, kFileCounts = 4 };

  struct Group {
    at::Tensor file;  // names the file of the rows; undefined: they are in memory
    at::Tensor buckets, tables;
    std::vector<at::Tensor> rows;
    at::Tensor free, meta, init_data;
    std::vector<int64_t> formats;  // of slabs; of tables in a file
    std::vector<std::string> names;

    at::Tensor file_counts() const {
      return detail::call("dynemb::file_counts", file, meta.size(0)).toTensor();
    }
    int64_t meta_of(int64_t table, int column) const {
      return meta.const_data_ptr<int64_t>()[table * kMetaColumns + column];
    }
    Storage storage_of(int64_t table) const {
      return static_cast<Storage>(formats.at(file.defined() ? table : meta_of(table, kMetaSlab)));
    }
  };

  std::pair<const Group*, int64_t> find(const char* method, const std::string& table) const {
    if (groups_.empty()) {
      throw std::runtime_error(std::string(method) +
                               ": the tables of this package are only read: export the model with "
                               "headroom=, the number of further ids for each table");
    }
    std::string known;
    for (const Group& group : groups_) {
      for (size_t number = 0; number < group.names.size(); ++number) {
        if (group.names[number] == table) return {&group, static_cast<int64_t>(number)};
        known += (known.empty() ? "'" : ", '") + group.names[number] + "'";
      }
    }
    throw std::invalid_argument(std::string(method) + ": table is '" + table +
                                "', expected one of " + known);
  }

  static void check_ids(const char* method, const char* name, const at::Tensor& ids) {
    if (!ids.defined() || !ids.is_cpu() || ids.scalar_type() != at::kLong || ids.dim() != 1) {
      throw std::invalid_argument(std::string(method) + ": " + name +
                                  " should be a tensor of the CPU of int64 with 1 dimension");
    }
  }

  LiveUpdate update(const Group& group, int64_t number, const at::Tensor& ids,
                    const at::Tensor& rows, const at::Tensor& erased) {
    const std::lock_guard<std::mutex> lock(writing_);
    return update_alone(group, number, ids, rows, erased);
  }

  // Requires the lock.
  static LiveUpdate update_alone(const Group& group, int64_t number, const at::Tensor& ids,
                                 const at::Tensor& rows, const at::Tensor& erased) {
    const c10::InferenceMode guard;
    return apply_stored(group, number, ids.contiguous(),
                        as_stored(group, number, rows).contiguous(), erased.contiguous());
  }

  static LiveUpdate apply_stored(const Group& group, int64_t number, const at::Tensor& ids,
                                 const at::Tensor& rows, const at::Tensor& erased) {
    const at::Tensor counts =
        (group.file.defined()
             ? detail::call("dynemb::file_apply", group.file, number, ids, rows, erased)
             : detail::call("dynemb::serve_apply_", group.buckets, group.tables, group.rows,
                            group.free, group.meta, number, ids, rows, erased, group.formats))
            .toTensor();
    const int64_t* count = counts.const_data_ptr<int64_t>();
    if (count[3] > count[4]) {
      throw NoHeadroom(group.names[number], count[3], count[4], group.file.defined());
    }
    return {count[0], count[1], count[2]};
  }

  // Throws NoHeadroom if a change does not fit into memory beside a file; `write`: makes room for
  // it.
  static void check_room(const Group& group, int64_t number, const LiveChange& change, bool write) {
    const at::Tensor counts =
        detail::call("dynemb::file_room", group.file, number, change.ids.contiguous(),
                     change.removed.contiguous(), write)
            .toTensor();
    const int64_t* count = counts.const_data_ptr<int64_t>();
    if (count[3] > count[4]) {
      throw NoHeadroom(change.table, count[3], count[4], /*in_file=*/true);
    }
  }

  // Rows as the op takes them: those of a log with rows="int8" as they are, if the table stores
  // such rows; others as floats.
  static at::Tensor as_stored(const Group& group, int64_t number, const at::Tensor& rows) {
    const bool same = group.storage_of(number) == Storage::kInt8;
    if (same && detail::is_quantized_rows(rows)) return rows;
    return detail::as_floats(rows, group.meta_of(number, kMetaDim)).to(at::kFloat);
  }

  // Throws if apply() would refuse a change, before any change is made.
  void check(const LiveChange& change) const {
    const auto [group, number] = find("follow", change.table);
    const int64_t dim = group->meta_of(number, kMetaDim);
    check_ids("follow", "ids", change.ids);
    check_ids("follow", "removed", change.removed);
    const bool packed = detail::is_quantized_rows(change.rows);
    if ((!packed && !change.rows.is_floating_point()) || change.rows.dim() != 2 ||
        change.rows.size(0) != change.ids.numel() ||
        change.rows.size(1) != (packed ? live_value_bytes(Storage::kInt8, dim) : dim)) {
      throw std::runtime_error("follow: the rows of table '" + change.table +
                               "' should be floats, " + std::to_string(dim) + " for each id");
    }
    const int64_t padding = group->meta_of(number, kMetaPaddingId);
    if (group->meta_of(number, kMetaHasPadding) != 0 && change.ids.eq(padding).any().item<bool>()) {
      throw std::runtime_error("follow: table '" + change.table + "' has the padding id " +
                               std::to_string(padding) +
                               ", which has no row, but the commit has one for it: export the "
                               "model that is published");
    }
    if (group->file.defined()) {
      check_room(*group, number, change, /*write=*/false);
    } else if (const int64_t free = free_rows(*group, number); change.ids.numel() > free) {
      // an id in both lists keeps its row
      const at::Tensor removed =
          change.removed.masked_select(at::isin(change.removed, change.ids).logical_not());
      const int64_t gone = removed.numel() - missing(*group, number, removed);
      const int64_t wanted = missing(*group, number, change.ids) - gone;
      if (wanted > free) throw NoHeadroom(change.table, wanted, free);
    }
    const Storage storage = group->storage_of(number);
    const at::Tensor values = detail::as_floats(change.rows, dim);
    const bool held = packed && storage == Storage::kInt8 ? values.isfinite().all().item<bool>()
                                                          : can_hold(storage, values);
    if (!held) {
      throw std::runtime_error("follow: the commit has rows of table '" + change.table +
                               "' with NaN, infinity, or a range that no scale of quantized rows "
                               "holds (int4: values up to 65504): nothing has been applied. "
                               "Export with rows='bf16', or find out why they diverge");
    }
  }

  static int64_t free_rows(const Group& group, int64_t number) {
    const int64_t* counts = group.tables.const_data_ptr<int64_t>() + number * kLiveTableColumns;
    return counts[kLiveTableCapacity] - counts[kLiveTableSize];
  }

  // Whether rows are finite after they are stored.
  static bool can_hold(Storage storage, const at::Tensor& rows) {
    if (!is_quantized(storage)) return true;
    const int64_t format = storage == Storage::kInt8   ? kRowsOfInt8
                           : storage == Storage::kInt4 ? kRowsOfInt4
                                                       : kRowsOfFloat8;
    const at::Tensor packed =
        detail::call("dynemb::quantize_rows", rows.to(at::kFloat).contiguous(), format).toTensor();
    const at::Tensor back =
        detail::call("dynemb::dequantize_rows", packed, format, rows.size(1)).toTensor();
    return back.isfinite().all().item<bool>();
  }

  // Number of ids that a table lacks.
  static int64_t missing(const Group& group, int64_t number, const at::Tensor& ids) {
    const auto results = detail::call_all(
        "dynemb::serve_lookup", group.buckets, group.tables, group.meta, group.rows,
        group.init_data, ids, at::empty({0}, at::kLong), c10::IValue(),
        std::vector<int64_t>{number}, std::vector<int64_t>{group.meta_of(number, kMetaDim)},
        int64_t{kPoolNone}, group.formats, true);
    return results.at(1).toTensor().sum().item<int64_t>();
  }

  mutable std::mutex writing_;
  std::vector<Group> groups_;
};

}  // namespace dynemb::serving
