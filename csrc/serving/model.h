// Runs a package of torch_dynemb.serving.export in a C++ program; needs libtorch only.
//
//   dynemb::serving::load_ops("torch_dynemb/_C.abi3.so");
//   dynemb::serving::Model model("package");
//   std::vector<at::Tensor> outputs = model.run({ids, offsets});
//   model.apply("users", ids, rows);  // if the package was exported with headroom
//   model.follow("log", DensePart::kKept);  // if it was exported with a base, too
//   model.update();  // applies the rows of new commits of the delta log

#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "serving/constants.h"
#include "serving/delta_log.h"
#include "serving/json.h"
#include "serving/live_tables.h"
#include "serving/manifest.h"

namespace dynemb::serving {

// The size of a dimension: times * symbol + plus, or plus without a symbol.
struct Size {
  std::string symbol;
  int64_t times, plus, least;
  std::optional<int64_t> most;
};

// A tensor that a model takes or returns. A size that is null is not checked.
struct Input {
  std::string name;
  at::ScalarType dtype;
  std::vector<std::optional<Size>> sizes;
};

// A table: number of ids at the export, and columns.
struct ServedTable {
  int64_t ids, embedding_dim;
};

// Treatment of the dense state of a package that follows a delta log. A Model keeps that of the
// export; VersionedModel takes that of each commit, too.
enum class DensePart { kKept };

// A model, ready to run: its constructor loads all constants. Any number of threads may run it;
// `runners` of them at the same time. The memory of the tables is freed with the object; torch
// keeps the compiled code, about 2 MB, in the process.
//
// Rows of a package that was exported with headroom can be updated while threads run: a run reads
// each row from before or from after an update, and different rows may be of both. If all rows of a
// run have to be of one version, use VersionedModel.
class Model {
 public:
  // Throws std::runtime_error, with the file and the reason, if the folder is not a package, or is
  // damaged, or was exported for another version, processor or device, or the ops are not loaded.
  explicit Model(const std::string& folder, size_t runners = 1) {
    const Json manifest = read_manifest(folder);
    check_platform(folder, manifest);
    const std::string code = folder + "/model.pt2";
    detail::ChecksummedFile(code, manifest.at("files").at("model.pt2"))
        .each_block([](size_t, const char*, size_t) {});
    for (const Json& input : manifest.at("inputs").array()) {
      if (!input.at("dtype").is_null()) inputs_.push_back(input_of(input));
    }
    for (const Json& output : manifest.at("outputs").array()) {
      outputs_.push_back(input_of(output));
    }
    if (!manifest.at("missing").is_null()) {
      counted_.emplace();
      for (const Json& table : manifest.at("missing").array())
        counted_->push_back({table.text(), 0});
    }
    for (const auto& [name, table] : manifest.at("tables").object()) {
      tables_[name] = {table.at("ids").integer(), table.at("embedding_dim").integer()};
    }
    if (manifest.has("base")) {
      base_ = manifest.at("base");
      for (const auto& [name, log_name] : base_.at("tables").object()) {
        names_in_log_[name] = log_name.text();
      }
    }
    if (manifest.has("unused")) {
      for (const Json& name : manifest.at("unused").array()) unused_.insert(name.text());
    }
    library_ = manifest.at("library").text();
    const Json& version = manifest.at("version");
    version_ = version.is_text() ? version.text() : std::to_string(version.integer());
    constants_ = std::make_unique<Constants>(folder, manifest);
    loader_ =
        std::make_unique<torch::inductor::AOTIModelPackageLoader>(code, "model", false, runners);
    std::unordered_map<std::string, at::Tensor> asked;
    for (const std::string& name : loader_->get_constant_fqns()) {
      const auto found = constants_->tensors().find(name);
      if (found == constants_->tensors().end()) mixed(code);
      asked.insert(*found);
    }
    for (const auto& [name, tensor] : constants_->tensors()) {
      if (asked.count(name) == 0 && !is_live(manifest, name)) mixed(code);
    }
    live_ = std::make_unique<LiveTables>(manifest, constants_->tensors());
    loader_->load_constants(asked, /*use_inactive=*/false,
                            /*check_full_update=*/true, /*user_managed=*/true);
  }

  // Version of the export; updates of rows do not change it.
  const std::string& version() const { return version_; }
  // Version of torch_dynemb that has exported it.
  const std::string& library() const { return library_; }
  const std::vector<Input>& inputs() const { return inputs_; }
  const std::vector<Input>& outputs() const { return outputs_; }
  const std::map<std::string, ServedTable>& tables() const { return tables_; }

  // Number of missing ids in runs since the load, by table; none if the package was exported
  // without missing=True.
  std::optional<std::vector<std::pair<std::string, int64_t>>> missing() const {
    const std::lock_guard<std::mutex> lock(counting_);
    return counted_;
  }

  // The model's outputs, flat, for its inputs, in the order of inputs(). Throws
  // std::invalid_argument for an input of another dtype, shape or device.
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) {
    check(inputs);
    const c10::InferenceMode guard;
    std::vector<at::Tensor> outputs = loader_->boxed_run(std::move(inputs));
    if (counted_) {
      const at::Tensor counts = outputs.back();
      outputs.pop_back();
      const std::lock_guard<std::mutex> lock(counting_);
      for (size_t table = 0; table < counted_->size(); ++table) {
        (*counted_)[table].second += counts.const_data_ptr<int64_t>()[table];
      }
    }
    for (at::Tensor& output : outputs) {
      if (constants_->has(output)) output = output.clone();  // it has to outlive the tables
    }
    return outputs;
  }

  static at::Tensor no_ids() { return at::empty({0}, at::kLong); }

  // Removes ids from a table, then writes rows of others, while threads run; all of it, or nothing.
  // An id in both lists gets its row, and no run misses it meanwhile. `ids` and `erased` int64 [n]
  // and [m]; `rows` float32, bfloat16 or float16 [n, dim], quantized if the package's rows are.
  // Threads that update take turns. Throws NoHeadroom; std::invalid_argument for a wrong argument;
  // std::runtime_error if the package was exported without headroom, for a padding id, and for a
  // row that the format cannot hold.
  LiveUpdate apply(const std::string& table, const at::Tensor& ids, const at::Tensor& rows,
                   const at::Tensor& erased = no_ids()) {
    return live_->apply(table, ids, rows, erased);
  }

  // Removes ids from a table while threads run; returns their number.
  int64_t erase(const std::string& table, const at::Tensor& ids) {
    return live_->erase(table, ids);
  }

  // Ids, free rows and updates of each table; empty if the package has no headroom.
  std::map<std::string, LiveStats> stats() const { return live_->stats(); }

  // From here on, update() reads a delta log: the directory to which DeltaLog publishes. The dense
  // state stays that of the export, so rows and dense state may be of different commits:
  // dense_behind() counts them. Throws std::runtime_error if the package was exported without
  // headroom or without a base.
  void follow(const std::string& log, DensePart) { log_ = reader_of(log); }

  // Applies the commits of the delta log up to a number, each as a whole or not at all, while
  // threads run; returns how many. Runs read the rows of a commit one after another, as with
  // apply(); the dense state stays that of the export (VersionedModel changes both at once). For
  // one thread at a time. Throws NewBaseNeeded if the log does not continue here, DamagedLog,
  // NoHeadroom, and std::runtime_error if the package cannot take a commit: earlier commits have
  // been applied, and nothing of this one.
  int64_t update(std::optional<int64_t> until = std::nullopt) {
    return each_commit(log_, until, [&](const Commit& commit) {
      take(commit, /*dense=*/false);
      dense_behind_ += !commit.dense.empty();
    });
  }

  // Number of commits taken without their changes of the dense state.
  int64_t dense_behind() const { return dense_behind_; }

  // Number of the last commit of its rows; none: they are those of the base, or it follows no log.
  std::optional<int64_t> sequence() const { return log_ ? log_->sequence() : std::nullopt; }

  // A reader of a delta log from the package's commit on.
  std::unique_ptr<LogReader> reader_of(const std::string& log) const {
    if (live_->stats().empty()) {
      throw std::runtime_error(
          "follow: the tables of this package are only read: export the model with headroom=, the "
          "number of further ids for each table, and base=");
    }
    if (base_.is_null()) {
      throw std::runtime_error(
          "follow: the package does not say which commit its rows have: export the model with "
          "base=, the checkpoint that it was loaded from, or DeltaLog.position()");
    }
    return std::make_unique<LogReader>(log, base_);
  }

  // Passes commits up to a number to `take`; returns how many.
  static int64_t each_commit(const std::unique_ptr<LogReader>& log, std::optional<int64_t> until,
                             const std::function<void(const Commit&)>& take) {
    if (!log) throw std::runtime_error("update: this model follows no delta log: call follow()");
    int64_t applied = 0;
    for (; !until || log->sequence().value_or(-1) < *until; ++applied) {
      const auto commit = log->next();
      if (!commit || (until && commit->sequence > *until)) break;
      take(*commit);
      log->taken();
    }
    return applied;
  }

  // Takes a commit, or throws and changes nothing. The dense state changes only while nothing runs.
  void take(const Commit& commit, bool dense) {
    std::vector<LiveChange> changes;
    std::set<std::string> known;
    for (const auto& [name, log_name] : names_in_log_) {
      known.insert(log_name);
      const auto delta = commit.tables.find(log_name);
      if (delta == commit.tables.end()) continue;
      changes.push_back({name, delta->second.ids, delta->second.rows, delta->second.removed});
    }
    for (const auto& [name, delta] : commit.tables) {
      if (known.count(name) == 0 && delta.ids.numel() + delta.removed.numel() > 0) {
        throw std::runtime_error("follow: commit " + std::to_string(commit.sequence) +
                                 " changes table '" + name +
                                 "', which the package lacks: export a package of the published "
                                 "model");
      }
    }
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
    for (const auto& [name, values] : commit.dense) {
      if (!dense) break;
      if (dense_name(name)) {
        copies.emplace_back(dense_tensor("follow", name, values), values);
      } else if (unused_.count(name) + unused_.count("model." + name) == 0) {
        throw std::runtime_error("follow: commit " + std::to_string(commit.sequence) +
                                 " changes the dense tensor '" + name +
                                 "', which the package lacks: export a package of the published "
                                 "model, or follow with a Model, which keeps its dense state");
      }
    }
    live_->take(changes);
    const c10::InferenceMode guard;
    for (auto& [tensor, values] : copies) tensor.copy_(values);
  }

  // Sets a tensor of the dense state to values of the same dtype and shape. Only while nothing
  // runs, as in VersionedModel. Throws std::invalid_argument.
  void set_dense(const std::string& name, const at::Tensor& values) {
    const at::Tensor tensor = dense_tensor("set_dense", name, values);
    const c10::InferenceMode guard;
    tensor.copy_(values);
  }

 private:
  [[noreturn]] static void mixed(const std::string& code) {
    detail::damaged(code,
                    "the code asks for other tensors than the package has: files of different "
                    "packages were mixed");
  }

  // Whether a tensor belongs to live tables; runs need only some of these.
  static bool is_live(const Json& manifest, const std::string& name) {
    if (!manifest.has("live")) return false;
    for (const auto& [path, part] : manifest.at("live").object()) {
      if (name.rfind(path + ".", 0) == 0) return true;
    }
    return false;
  }

  static Input input_of(const Json& entry) {
    static const std::map<std::string, at::ScalarType> kTypes = {
        {"float64", at::kDouble},    {"float32", at::kFloat}, {"float16", at::kHalf},
        {"bfloat16", at::kBFloat16}, {"int64", at::kLong},    {"int32", at::kInt},
        {"int16", at::kShort},       {"int8", at::kChar},     {"uint8", at::kByte},
        {"bool", at::kBool}};
    const std::string& dtype = entry.at("dtype").text();
    if (kTypes.count(dtype) == 0) {
      detail::damaged("manifest.json", "an input has the unknown dtype " + dtype);
    }
    Input input{entry.at("name").text(), kTypes.at(dtype), {}};
    for (const Json& size : entry.at("sizes").array()) {
      if (size.is_null()) {
        input.sizes.emplace_back();
        continue;
      }
      const Json &symbol = size.at("symbol"), &most = size.at("most");
      if (!symbol.is_null() && size.at("times").integer() == 0) {
        detail::damaged("manifest.json", "a size of an input is 0 times a symbol");
      }
      input.sizes.push_back(
          Size{symbol.is_null() ? "" : symbol.text(), size.at("times").integer(),
               size.at("plus").integer(), size.at("least").integer(),
               most.is_null() ? std::nullopt : std::optional<int64_t>(most.integer())});
    }
    return input;
  }

  void check(std::vector<at::Tensor>& given) const {
    if (given.size() != inputs_.size()) {
      std::ostringstream says;
      says << "run: got " << given.size() << " inputs, expected " << inputs_.size();
      for (size_t number = 0; number < inputs_.size(); ++number)
        says << (number == 0 ? ": '" : ", '") << inputs_[number].name << '\'';
      throw std::invalid_argument(says.str());
    }
    std::map<std::string, int64_t> symbols;
    for (size_t number = 0; number < given.size(); ++number) {
      const Input& wanted = inputs_[number];
      at::Tensor& tensor = given[number];
      std::ostringstream says;
      says << "run: the input '" << wanted.name << "' ";
      if (!tensor.defined()) {
        says << "is an undefined tensor, expected one of dtype " << wanted.dtype;
        throw std::invalid_argument(says.str());
      }
      if (tensor.scalar_type() != wanted.dtype) {
        says << "has dtype " << tensor.scalar_type() << ", expected " << wanted.dtype;
        throw std::invalid_argument(says.str());
      }
      if (!tensor.is_cpu() || tensor.layout() != at::kStrided) {
        says << "is a tensor of " << tensor.device() << " and of layout " << tensor.layout()
             << ", expected a dense one of the CPU";
        throw std::invalid_argument(says.str());
      }
      if (!fits(tensor.sizes(), wanted, symbols)) {
        says << "has shape " << tensor.sizes() << ", expected " << shape_text(wanted);
        for (const auto& [name, size] : symbols)
          says << ", where " << name << " is " << size << " by now";
        throw std::invalid_argument(says.str());
      }
      tensor = tensor.contiguous();
    }
  }

  // Such as "[batch, 3]"; an unchecked size is "any".
  static std::string shape_text(const Input& wanted) {
    std::ostringstream text;
    for (const auto& size : wanted.sizes) {
      text << (text.tellp() == 0 ? "" : ", ");
      if (!size) {
        text << "any";
      } else if (size->symbol.empty()) {
        text << size->plus;
      } else {
        if (size->times != 1) text << size->times << " * ";
        text << size->symbol;
        if (size->plus != 0) text << (size->plus > 0 ? " + " : " - ") << std::abs(size->plus);
        if (size->least > 0) text << " [>= " << size->least << ']';
        if (size->most) text << " [<= " << *size->most << ']';
      }
    }
    return '[' + text.str() + ']';
  }

  static bool fits(at::IntArrayRef shape, const Input& wanted,
                   std::map<std::string, int64_t>& symbols) {
    if (shape.size() != wanted.sizes.size()) return false;
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      if (!wanted.sizes[dim]) continue;
      const Size& size = *wanted.sizes[dim];
      const int64_t rest = shape[dim] - size.plus;
      if (size.symbol.empty()) {
        if (rest != 0) return false;
        continue;
      }
      const int64_t value = symbols.emplace(size.symbol, rest / size.times).first->second;
      if (value * size.times != rest || value < size.least || value > size.most.value_or(value)) {
        return false;
      }
    }
    return true;
  }

  // Name of a tensor of the dense state in the package; none: the package lacks it.
  std::optional<std::string> dense_name(const std::string& name) const {
    if (constants_->dense().count(name) != 0) return name;
    // a wrapper that counts missing ids has the model as a part
    if (counted_ && constants_->dense().count("model." + name) != 0) return "model." + name;
    return std::nullopt;
  }

  // A tensor of the dense state that can take such values.
  at::Tensor dense_tensor(const char* method, const std::string& name,
                          const at::Tensor& values) const {
    const auto whole_name = dense_name(name);
    if (!whole_name) {
      throw std::invalid_argument(std::string(method) + ": the dense state has no tensor " + name);
    }
    const at::Tensor& tensor = constants_->tensors().at(*whole_name);
    if (!values.defined() || values.scalar_type() != tensor.scalar_type() ||
        values.sizes() != tensor.sizes()) {
      std::ostringstream says;
      says << method << ": " << name << " should be " << tensor.scalar_type() << ' '
           << tensor.sizes();
      throw std::invalid_argument(says.str());
    }
    return tensor;
  }

  std::string version_, library_;
  Json base_;                                        // null: none
  std::map<std::string, std::string> names_in_log_;  // of its tables
  std::set<std::string> unused_;                     // dense tensors that the code does not use
  std::atomic<int64_t> dense_behind_{0};
  std::unique_ptr<LogReader> log_;
  mutable std::mutex counting_;
  std::optional<std::vector<std::pair<std::string, int64_t>>> counted_;
  std::vector<Input> inputs_, outputs_;
  std::map<std::string, ServedTable> tables_;
  std::unique_ptr<Constants> constants_;  // freed after the loader, which uses them
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
  std::unique_ptr<LiveTables> live_;
};

}  // namespace dynemb::serving
