// An HTTP server of one model, in C++ with libtorch only.
//
//   server PACKAGE OP_LIBRARY [PORT [ADDRESS]] [--name NAME] [--follow LOG]
//          [--request-bytes N] [--pending-bytes N] [--connections N] [--timeout SECONDS]
//          [--drain-s SECONDS]
//
// Port 0 is one that the system chooses. NAME, of the model in the Open Inference Protocol, is by
// default that of the package's folder.
//
//   POST /run   {"inputs": {"ids": [[1, 2], [3, 4]], ...}}  ->  {"version": ..., "outputs": [...]}
//   POST /rows  {"table": ..., "ids": [7], "rows": [[0.1, 0.2]], "erased": [8]}
//               ->  {"inserted": 1, "updated": 0, "erased": 1}
//   GET /       {"version": ..., "sequence": ..., "dense_behind": 0, "stopped": ...,
//                "inputs": [names], "tables": {name: {...}}}
//   GET /metrics    in the text format of Prometheus
//
// and the Open Inference Protocol, as clients of Triton and KServe speak it:
//
//   GET /v2    /v2/health/live    /v2/health/ready    /v2/models/NAME    /v2/models/NAME/ready
//   POST /v2/models/NAME/infer    {"inputs": [{"name", "shape", "datatype", "data"}]}

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "http_server.h"
#include "inference_protocol.h"
#include "json_tensors.h"
#include "metrics.h"
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
  const std::vector<Input>& outputs() const {
    return model_ ? model_->outputs() : versions_->outputs();
  }
  auto missing() const { return model_ ? model_->missing() : versions_->missing(); }
  const std::map<std::string, ServedTable>& tables() const {
    return model_ ? model_->tables() : versions_->tables();
  }
  const std::string& version() const {
    return model_ ? model_->version() : versions_->package_version();
  }
  const std::string& library() const { return model_ ? model_->library() : versions_->library(); }
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
  int64_t update() {
    const std::lock_guard<std::mutex> lock(changing_);
    return versions_->update();
  }
  std::optional<int64_t> sequence() const {
    return versions_ ? versions_->sequence() : std::nullopt;
  }

 private:
  std::unique_ptr<Model> model_;
  std::unique_ptr<VersionedModel> versions_;
  std::mutex changing_;  // the versions: the thread that makes a version publishes it
};

std::string run(Served& model, const std::string& body) {
  const json_tensors::Document document(body);
  const auto request = json_tensors::fields_of(document.root(), {"inputs"}, "the request");
  std::vector<std::string> names;
  for (const Input& input : model.inputs()) names.push_back(input.name);
  const auto given =
      json_tensors::fields_of(json_tensors::field(request, "inputs"), names, "inputs");
  std::vector<at::Tensor> inputs;
  for (const Input& input : model.inputs()) {
    const auto value = json_tensors::field(given, input.name);
    if (!value) throw std::invalid_argument("inputs lacks '" + input.name + "'");
    inputs.push_back(json_tensors::tensor_of(*value, input));
  }
  std::ostringstream out;
  out << "{\"version\":" << quoted(model.version()) << ",\"outputs\":[";
  int64_t number = 0;
  for (const at::Tensor& output : model.run(std::move(inputs))) {
    if (number > 0) out << ',';
    json_tensors::print(output, "outputs[" + std::to_string(number++) + ']', out);
  }
  out << "]}";
  return out.str();
}

// Runs of other threads go on meanwhile.
std::string update(Served& model, const std::string& body) {
  const json_tensors::Document document(body);
  const auto request =
      json_tensors::fields_of(document.root(), {"table", "ids", "rows", "erased"}, "the request");
  std::string_view name;
  if (request.at_key("table").get(name)) throw std::invalid_argument("table: expected a string");
  const std::string table(name);
  const auto found = model.tables().find(table);
  const int64_t dim = found == model.tables().end() ? 0 : found->second.embedding_dim;
  const auto part = [&](const char* key, at::ScalarType dtype, const std::vector<int64_t>& empty) {
    const auto value = json_tensors::field(request, key);
    return value ? json_tensors::tensor_of(*value, dtype, empty, key) : at::empty(empty, dtype);
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
          if (model.update() > 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            taken_ = std::chrono::steady_clock::now();
          }
          caught_up_ = true;
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

  // Whether the model has the commits that the log had at the start.
  bool caught_up() const { return caught_up_; }

  // Seconds since the last commit was taken; none: there was none.
  std::optional<double> age() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!taken_) return std::nullopt;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - *taken_).count();
  }

 private:
  std::atomic<bool> caught_up_{false};
  mutable std::mutex mutex_;
  std::optional<std::string> stopped_;
  std::optional<std::chrono::steady_clock::time_point> taken_;
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

http::Response metrics_of(const Metrics& requests, Served& model, const Following& following,
                          bool follows) {
  std::ostringstream out;
  requests.print(out);
  std::map<std::string, int64_t> ids, free, updates;
  const auto stats = model.stats();
  for (const auto& [name, table] : model.tables()) {
    const auto live = stats.find(name);
    ids[name] = live == stats.end() ? table.ids : live->second.ids;
    free[name] = live == stats.end() ? 0 : live->second.free_rows;
    updates[name] = live == stats.end() ? 0 : live->second.updates;
  }
  Metrics::by_table(out, "dynemb_rows", "gauge", "Ids with a row", ids);
  Metrics::by_table(out, "dynemb_free_rows", "gauge", "Rows for new ids", free);
  Metrics::by_table(out, "dynemb_updates_total", "counter", "Updates of rows", updates);
  if (const auto missing = model.missing()) {
    Metrics::by_table(out, "dynemb_missing_ids_total", "counter", "Ids of requests without a row",
                      {missing->begin(), missing->end()});
  }
  const auto gauge = [&](const std::string& name, const std::string& help, auto value) {
    Metrics::head(out, name, "gauge", help);
    out << name << ' ' << value << '\n';
  };
  if (follows) {
    gauge("dynemb_following", "1 while commits are taken, else 0", following.stopped() ? 0 : 1);
    if (const auto sequence = model.sequence()) {
      gauge("dynemb_commit_sequence", "Number of the last commit", *sequence);
    }
    if (const auto age = following.age()) {
      gauge("dynemb_commit_age_seconds", "Time since the last commit was taken", *age);
    }
  }
  return {out.str(), "text/plain; version=0.0.4; charset=utf-8"};
}

// A loaded model, and what it answers.
class Service {
 public:
  Service(const std::string& package, const std::optional<std::string>& name,
          const std::optional<std::string>& log, const http::Draining& draining)
      : model_(package, std::max(1u, std::thread::hardware_concurrency()), log.has_value()),
        follows_(log.has_value()),
        draining_(draining),
        named_{name.value_or(std::filesystem::canonical(package).filename()),
               model_.version(),
               model_.inputs(),
               model_.outputs(),
               [this](std::vector<at::Tensor> inputs) { return model_.run(std::move(inputs)); },
               [this] { return ready(); }} {
    if (log) following_.start(model_, *log);
  }

  const std::string& version() const { return model_.version(); }

  std::optional<http::Response> answer(const http::Request& request, const Metrics& metrics) {
    const std::string call = request.method + ' ' + request.path;
    if (call == "GET /") return http::Response{describe(model_, following_)};
    if (call == "POST /run") return http::Response{run(model_, request.body)};
    if (call == "POST /rows") return http::Response{update(model_, request.body)};
    if (call == "GET /metrics") return metrics_of(metrics, model_, following_, follows_);
    if (call == "GET /v2") return inference_protocol::server_metadata(model_.library());
    if (call == "GET /v2/health/ready") return ready();
    return inference_protocol::answer(named_, request);
  }

 private:
  // After an error in a later commit the rows from before are served.
  http::Response ready() const {
    if (draining_) return http::refusal(503, http::kDrains);
    if (follows_ && !following_.caught_up()) {
      return http::refusal(503, "the model lacks commits of the log");
    }
    return {};
  }

  Served model_;
  const bool follows_;
  const http::Draining& draining_;
  const inference_protocol::NamedModel named_;
  Following following_;
};

// What a request calls, where it is counted; empty elsewhere.
std::string call_of(const http::Request& request) {
  if (request.method != "POST") return "";
  if (request.path == "/run" || request.path == "/rows") return request.path.substr(1);
  const bool is_model = request.path.rfind("/v2/models/", 0) == 0;
  return is_model && request.path.ends_with("/infer") ? "infer" : "";
}

// The value of an option, which is taken out of the arguments.
std::optional<std::string> option(std::vector<std::string>& arguments, const std::string& name) {
  const auto found = std::find(arguments.begin(), arguments.end(), name);
  if (found == arguments.end() || found + 1 == arguments.end()) return std::nullopt;
  const std::string value = *(found + 1);
  arguments.erase(found, found + 2);
  return value;
}

// The whole number that an argument has.
size_t number_of(const std::string& text, const std::string& name, size_t least, size_t most) {
  size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < least || number > most) {
    throw std::invalid_argument(name + " is '" + text + "', expected a whole number from " +
                                std::to_string(least) + " to " + std::to_string(most));
  }
  return number;
}

// The limits that the arguments have, which are taken out of them.
http::Limits limits_of(std::vector<std::string>& arguments) {
  http::Limits limits;
  const auto take = [&](const std::string& name, size_t& limit) {
    if (const auto given = option(arguments, name)) {
      limit = number_of(*given, name, 1, size_t{1} << 40);
    }
  };
  take("--request-bytes", limits.request_bytes);
  take("--pending-bytes", limits.pending_bytes);
  take("--connections", limits.connections);
  take("--timeout", limits.seconds);
  if (const auto given = option(arguments, "--drain-s")) {
    limits.drain_seconds = number_of(*given, "--drain-s", 0, size_t{1} << 30);
  }
  if (limits.pending_bytes < limits.request_bytes) {
    throw std::invalid_argument("--pending-bytes is " + std::to_string(limits.pending_bytes) +
                                ", expected at least the " + std::to_string(limits.request_bytes) +
                                " of --request-bytes");
  }
  return limits;
}

int main(int count, char** given) try {
  std::vector<std::string> arguments(given + 1, given + count);
  const auto log = option(arguments, "--follow"), name = option(arguments, "--name");
  const http::Limits limits = limits_of(arguments);
  const bool has_others = std::any_of(arguments.begin(), arguments.end(),
                                      [](const auto& word) { return word.rfind("--", 0) == 0; });
  if (arguments.size() < 2 || arguments.size() > 4 || has_others) {
    throw std::invalid_argument(
        "usage: server PACKAGE OP_LIBRARY [PORT [ADDRESS]] [--name NAME] [--follow LOG] "
        "[--request-bytes N] [--pending-bytes N] [--connections N] [--timeout SECONDS] "
        "[--drain-s SECONDS]");
  }
  const auto port = static_cast<uint16_t>(
      arguments.size() > 2 ? number_of(arguments[2], "PORT", 0, 65535) : 8000);
  const std::string& package = arguments[0];
  at::set_num_threads(1);  // requests run side by side instead
  load_ops(arguments[1]);
  Metrics metrics;
  http::Draining draining{false};
  std::atomic<Service*> service{nullptr};
  const auto answer = [&](const http::Request& request) -> std::optional<http::Response> {
    Service* const loaded = service;
    if (request.method + ' ' + request.path == "GET /v2/health/live") return http::Response{};
    if (!loaded) return http::refusal(503, "the model is being loaded: ask again later");
    return loaded->answer(request, metrics);
  };
  const auto answered = [&](const http::Request& request, int status, double seconds) {
    const std::string call_name = call_of(request);
    if (!call_name.empty()) metrics.answered(call_name, status, seconds);
  };
  const auto load = [&](int port) {
    try {
      service = new Service(package, name, log, draining);  // threads use it until the process ends
      std::cout << "serving version " << service.load()->version() << " on port " << port
                << std::endl;
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
      std::_Exit(1);
    }
  };
  http::serve(arguments.size() > 3 ? arguments[3] : "127.0.0.1", port, answer, answered, limits,
              draining, [&](int opened) { std::thread(load, opened).detach(); });
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
