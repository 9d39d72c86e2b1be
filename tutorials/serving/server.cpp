// An HTTP server of one model, in C++ with libtorch only.
//
//   server PACKAGE OP_LIBRARY [PORT [ADDRESS]] [--follow LOG]     port 0: one that the system
//   chooses
//
//   POST /run   {"inputs": {"ids": [[1, 2], [3, 4]], ...}}  ->  {"version": ..., "outputs": [...]}
//   POST /rows  {"table": ..., "ids": [7], "rows": [[0.1, 0.2]], "erased": [8]}
//               ->  {"inserted": 1, "updated": 0, "erased": 1}
//   GET /       {"version": ..., "sequence": ..., "dense_behind": 0, "stopped": ...,
//                "inputs": [names], "tables": {name: {...}}}

#include <ATen/Parallel.h>

#include <chrono>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "http.h"
#include "serving/json_tensors.h"
#include "serving/versioned_model.h"

using namespace dynemb::serving;

// A package with rows that may be updated; or one that follows a delta log, of which every run
// reads one version of all rows and of the dense part.
class Served {
 public:
  Served(const std::string& package, size_t runners, bool follows) {
    if (follows) {
      versions_ = std::make_unique<VersionedModel>(package, runners);
    } else {
      model_ = std::make_unique<Model>(package, runners);
    }
  }

  const std::vector<Input>& inputs() const {
    return model_ ? model_->inputs() : versions_->inputs();
  }
  const std::map<std::string, ServedTable>& tables() const {
    return model_ ? model_->tables() : versions_->tables();
  }
  const std::string& version() const {
    return model_ ? model_->version() : versions_->package_version();
  }
  std::map<std::string, LiveStats> stats() { return model_ ? model_->stats() : versions_->stats(); }
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) {
    return model_ ? model_->run(std::move(inputs)) : versions_->run(std::move(inputs)).tensors;
  }
  LiveUpdate apply(const std::string& table, const at::Tensor& ids, const at::Tensor& rows,
                   const at::Tensor& erased) {
    if (model_) return model_->apply(table, ids, rows, erased);
    const std::lock_guard<std::mutex> lock(changing_);
    const LiveUpdate done = versions_->apply(table, ids, rows, erased);
    versions_->publish(versions_->version());
    return done;
  }

  void follow(const std::string& log) { versions_->follow(log); }
  void update() {
    const std::lock_guard<std::mutex> lock(changing_);
    versions_->update();
  }
  std::optional<int64_t> sequence() const {
    return versions_ ? versions_->sequence() : std::nullopt;
  }

 private:
  std::unique_ptr<Model> model_;
  std::unique_ptr<VersionedModel> versions_;
  std::mutex changing_;  // the versions: the thread that makes a version publishes it
};

std::string run(Served& model, const Json& request) {
  check_fields(request, {"inputs"}, "the request");
  const Json given = request.has("inputs") ? request.at("inputs") : Json();
  std::vector<std::string> names;
  for (const Input& input : model.inputs()) names.push_back(input.name);
  check_fields(given, names, "inputs");
  std::vector<at::Tensor> inputs;
  for (const Input& input : model.inputs()) {
    if (!given.has(input.name)) throw std::invalid_argument("inputs lacks '" + input.name + "'");
    inputs.push_back(tensor_of(given.at(input.name), input));
  }
  std::ostringstream out;
  out.precision(9);  // every float32 is another text
  out << "{\"version\":" << quoted(model.version()) << ",\"outputs\":[";
  bool first = true;
  for (const at::Tensor& output : model.run(std::move(inputs))) {
    if (!std::exchange(first, false)) out << ',';
    print(output, out);
  }
  out << "]}";
  return out.str();
}

// Runs of other threads go on meanwhile.
std::string update(Served& model, const Json& request) {
  check_fields(request, {"table", "ids", "rows", "erased"}, "the request");
  if (!request.has("table") || !request.at("table").is_text()) {
    throw std::invalid_argument("table: expected a string");
  }
  const std::string& table = request.at("table").text();
  const auto found = model.tables().find(table);
  const int64_t dim = found == model.tables().end() ? 0 : found->second.embedding_dim;
  const auto part = [&](const char* name, at::ScalarType dtype, std::vector<int64_t> empty) {
    return tensor_of(request.has(name) ? request.at(name) : Json(Json::Array{}), dtype, empty,
                     name);
  };
  const LiveUpdate done =
      model.apply(table, part("ids", at::kLong, {0}), part("rows", at::kFloat, {0, dim}),
                  part("erased", at::kLong, {0}));
  std::ostringstream out;
  out << "{\"inserted\":" << done.inserted << ",\"updated\":" << done.updated
      << ",\"erased\":" << done.erased << "}";
  return out.str();
}

// Takes the commits of a delta log as they come, beside the runs. A commit that cannot be taken
// ends it: the rows from before go on being served, and stopped() has the reason.
class Following {
 public:
  void start(Served& model, const std::string& log) {
    model.follow(log);
    thread_ = std::jthread([this, &model](const std::stop_token& stop) {
      try {
        while (!stop.stop_requested()) {
          model.update();
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
      } catch (const std::exception& error) {
        std::cerr << error.what() << std::endl;
        const std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = error.what();
      }
    });
  }

  std::optional<std::string> stopped() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stopped_;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<std::string> stopped_;
  std::jthread thread_;  // ends before the rest goes
};

std::string describe(Served& model, const Following& following) {
  std::ostringstream out;
  const auto sequence = model.sequence();
  const auto stopped = following.stopped();
  out << "{\"version\":" << quoted(model.version())
      << ",\"sequence\":" << (sequence ? std::to_string(*sequence) : "null")
      << ",\"dense_behind\":0,\"stopped\":" << (stopped ? quoted(*stopped) : "null")
      << ",\"inputs\":[";
  bool first = true;
  for (const Input& input : model.inputs()) {
    out << (std::exchange(first, false) ? "" : ",") << quoted(input.name);
  }
  out << "],\"tables\":{";
  first = true;
  const auto stats = model.stats();
  for (const auto& [name, table] : model.tables()) {
    const auto live = stats.find(name);  // tables that are only read have the ids of the export
    const LiveStats now = live == stats.end() ? LiveStats{table.ids, 0, 0} : live->second;
    out << (std::exchange(first, false) ? "" : ",") << quoted(name)
        << ":{\"embedding_dim\":" << table.embedding_dim << ",\"ids\":" << now.ids
        << ",\"free_rows\":" << now.free_rows << ",\"updates\":" << now.updates << "}";
  }
  out << "}}";
  return out.str();
}

int main(int count, char** arguments) try {
  std::optional<std::string> log;
  if (count > 2 && std::string(arguments[count - 2]) == "--follow") {
    log = arguments[count - 1];
    count -= 2;
  }
  if (count < 3) {
    throw std::invalid_argument("usage: server PACKAGE OP_LIBRARY [PORT [ADDRESS]] [--follow LOG]");
  }
  at::set_num_threads(1);  // requests run side by side instead
  load_ops(arguments[2]);
  Served model(arguments[1], std::max(1u, std::thread::hardware_concurrency()), log.has_value());
  Following following;
  if (log) following.start(model, *log);
  const auto answer = [&](const std::string& name,
                          const std::string& body) -> std::optional<std::string> {
    if (name == "GET /") return describe(model, following);
    if (name == "POST /run") return run(model, Json::parse(body));
    if (name == "POST /rows") return update(model, Json::parse(body));
    return std::nullopt;
  };
  const auto port = static_cast<uint16_t>(count > 3 ? std::stoi(arguments[3]) : 8000);
  http::serve(count > 4 ? arguments[4] : "127.0.0.1", port, answer, [&](int opened) {
    std::cout << "serving version " << model.version() << " on port " << opened << std::endl;
  });
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
