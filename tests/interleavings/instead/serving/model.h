// In place of csrc/serving/model.h: a package with two rows and no code of torch's. A model with
// them is what VersionedModel keeps from being read while it changes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace at {
struct Tensor {
  int64_t value = 0;
  bool defined() const { return true; }
  Tensor clone() const { return *this; }
};
}  // namespace at

namespace dynemb::serving {

struct Input {};
struct ServedTable {};
struct LiveUpdate {};
struct LiveStats {};
struct Commit {
  int64_t sequence;
};
struct LogReader {
  std::optional<int64_t> sequence() const { return std::nullopt; }
};

class Model {
 public:
  Model(const std::string&, size_t) {}

  const std::vector<Input>& inputs() const { return inputs_; }
  const std::vector<Input>& outputs() const { return inputs_; }
  const std::map<std::string, ServedTable>& tables() const { return tables_; }
  const std::string& version() const { return version_; }
  const std::string& library() const { return version_; }
  std::vector<at::Tensor> run(std::vector<at::Tensor>) { return {{rows_[0]}, {rows_[1]}}; }
  LiveUpdate apply(const std::string&, const at::Tensor& ids, const at::Tensor& rows,
                   const at::Tensor&) {
    rows_[ids.value] = rows.value;
    return {};
  }
  int64_t erase(const std::string&, const at::Tensor&) { return 0; }
  void set_dense(const std::string&, const at::Tensor&) {}
  void take(const Commit&, bool) {}
  std::map<std::string, LiveStats> stats() { return {}; }
  std::optional<std::vector<std::pair<std::string, int64_t>>> missing() const { return {}; }
  static at::Tensor no_ids() { return {}; }
  std::unique_ptr<LogReader> reader_of(const std::string&) { return nullptr; }
  static int64_t each_commit(const std::unique_ptr<LogReader>&, std::optional<int64_t>,
                             const std::function<void(const Commit&)>&) {
    return 0;
  }

 private:
  int64_t rows_[2] = {};
  std::vector<Input> inputs_;
  std::map<std::string, ServedTable> tables_;
  std::string version_ = "0";
};

}  // namespace dynemb::serving
