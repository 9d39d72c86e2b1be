// Serves versions of a package one after another: a run reads all its rows and its dense state from
// one version, while the next one is made.
//
//   dynemb::serving::VersionedModel model("package");
//   model.apply("users", ids, rows);        // rows of the next version
//   model.set_dense("top.weight", weight);  // its dense state
//   model.publish("tuesday");               // from here on, runs read it
//
//   model.follow("log");                    // or each commit of a delta log becomes a version
//   model.update();

#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "serving/model.h"

namespace dynemb::serving {

// Two copies of a package's tensors: runs read one while the other one is changed. Takes twice the
// memory of a Model, which suffices if a run may read rows of several versions.
//
// Any number of threads may run, and they never wait for changes. A change of one copy is repeated
// in the other one before that is changed again, after the runs on it have ended. Each copy has
// code of its own, because torch's swap of constants waits until nothing runs, which may be never.
class VersionedModel {
 public:
  struct Outputs {
    std::vector<at::Tensor> tensors;
    std::string version;
  };

  // As Model; `runners`: how many threads may run one version at the same time.
  explicit VersionedModel(const std::string& folder, size_t runners = 1)
      : sides_{{folder, runners}, {folder, runners}} {}

  const std::vector<Input>& inputs() const { return sides_[0].model.inputs(); }
  const std::vector<Input>& outputs() const { return sides_[0].model.outputs(); }
  const std::map<std::string, ServedTable>& tables() const { return sides_[0].model.tables(); }
  // Of the export, whatever version runs.
  const std::string& package_version() const { return sides_[0].model.version(); }

  const std::string& library() const { return sides_[0].model.library(); }

  // The version that runs read; before the first publish() that of the package.
  std::string version() {
    const Reading reading(*this);
    return reading.side().version;
  }

  // The outputs of Model::run, and their version.
  Outputs run(std::vector<at::Tensor> inputs) {
    const Reading reading(*this);
    Outputs outputs{reading.side().model.run(std::move(inputs)), reading.side().version};
    return outputs;
  }

  // Changes rows of the next version, as Model::apply does, with its arguments and errors. A
  // refused update has no effect.
  LiveUpdate apply(const std::string& table, const at::Tensor& ids, const at::Tensor& rows,
                   const at::Tensor& erased = Model::no_ids()) {
    LiveUpdate done{};
    change([&done, table, ids = copy(ids), rows = copy(rows), erased = copy(erased)](
               Model& model, bool is_first) {
      const LiveUpdate counts = model.apply(table, ids, rows, erased);
      if (is_first) done = counts;  // later, the caller has returned
    });
    return done;
  }

  // Removes ids from the next version; returns their number.
  int64_t erase(const std::string& table, const at::Tensor& ids) {
    int64_t done = 0;
    change([&done, table, ids = copy(ids)](Model& model, bool is_first) {
      const int64_t count = model.erase(table, ids);
      if (is_first) done = count;
    });
    return done;
  }

  // Sets a tensor of the dense state in the next version, as Model::set_dense does.
  void set_dense(const std::string& name, const at::Tensor& values) {
    change([name, values = copy(values)](Model& model, bool) { model.set_dense(name, values); });
  }

  // Publishes the next version under this name: later runs read it. Running ones end on theirs, and
  // this does not wait for them.
  void publish(std::string version) {
    const std::lock_guard<std::mutex> lock(changing_);
    Side& next = next_side();
    next.version = std::move(version);
    active_.store(1 - active_.load());
    behind_.swap(changes_);
  }

  // From here on, update() reads a delta log, rows and dense state, with the errors of
  // Model::follow.
  void follow(const std::string& log) { log_ = sides_[0].model.reader_of(log); }

  // Makes a version of each commit of the delta log up to a number, and publishes it; returns how
  // many. A version has the rows and the dense state of the trained model at the commit, as far as
  // the log has the dense state. Its name is VERSION+COMMIT, after the package and the commit. A
  // dense tensor of the log that the package lacks is an error. Unpublished changes by apply() and
  // the like are part of the next version. For one thread at a time. Throws as Model::update does.
  int64_t update(std::optional<int64_t> until = std::nullopt) {
    return Model::each_commit(log_, until, [&](const Commit& commit) {
      change([commit](Model& model, bool) { model.take(commit, /*dense=*/true); });
      publish(sides_[0].model.version() + "+" + std::to_string(commit.sequence));
    });
  }

  // Number of the last published commit; none: there is none since the base, or it follows no log.
  std::optional<int64_t> sequence() const { return log_ ? log_->sequence() : std::nullopt; }

  // Ids, free rows and updates of the tables in the version that runs.
  std::map<std::string, LiveStats> stats() {
    const std::lock_guard<std::mutex> lock(changing_);
    return sides_[active_.load()].model.stats();
  }

  // Number of missing ids in runs of all versions; none if the package does not count them.
  std::optional<std::vector<std::pair<std::string, int64_t>>> missing() const {
    auto counts = sides_[0].model.missing();
    const auto others = sides_[1].model.missing();
    for (size_t table = 0; counts && table < counts->size(); ++table) {
      (*counts)[table].second += (*others)[table].second;
    }
    return counts;
  }

 private:
  using Change = std::function<void(Model&, bool is_first)>;

  struct Side {
    Side(const std::string& folder, size_t runners)
        : model(folder, runners), version(model.version()) {}

    Model model;
    std::string version;  // changes while nothing runs here
    alignas(64) std::atomic<int> running{0};
  };

  // Keeps the active copy from being changed.
  class Reading {
   public:
    explicit Reading(VersionedModel& model) {
      for (;;) {
        side_ = &model.sides_[model.active_.load()];
        side_->running.fetch_add(1);
        // a writer that changes this copy sees every reader counted before the switch
        if (side_ == &model.sides_[model.active_.load()]) return;
        leave();
      }
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    ~Reading() { leave(); }

    Side& side() const { return *side_; }

   private:
    void leave() {
      if (side_->running.fetch_sub(1) == 1) side_->running.notify_all();
    }

    Side* side_;
  };

  static at::Tensor copy(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.clone() : tensor;
  }

  // The copy without runs, with all changes of the active one.
  Side& next_side() {
    Side& next = sides_[1 - active_.load()];
    for (int running; (running = next.running.load()) != 0;) next.running.wait(running);
    for (; !behind_.empty(); behind_.pop_front()) behind_.front()(next.model, false);
    return next;
  }

  void change(Change change) {
    const std::lock_guard<std::mutex> lock(changing_);
    Side& next = next_side();
    changes_.push_back(std::move(change));
    try {
      changes_.back()(next.model, true);
    } catch (...) {
      changes_.pop_back();  // a model that throws has changed nothing
      throw;
    }
  }

  Side sides_[2];
  std::unique_ptr<LogReader> log_;
  std::atomic<int> active_{0};
  std::mutex changing_;
  std::deque<Change> changes_;  // of the next version
  std::deque<Change> behind_;   // changes that only the active version has
};

}  // namespace dynemb::serving
