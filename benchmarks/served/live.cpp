// Runs a package by one thread and by two, or by one beside a thread that updates rows, in turns.
//
//   live PACKAGE OP_LIBRARY INPUTS ROUNDS CALLS runners
//   live PACKAGE OP_LIBRARY INPUTS ROUNDS CALLS writer TABLES IDS ROWS_A_SECOND
//
// INPUTS is a file of torch.save: tensors by model, of which the first are taken. `runners` prints
// a line a round and number of threads: how many, and the microseconds in which they made CALLS
// calls each. `writer` prints a line a round, "idle" or "updated", and the microseconds of each
// call; then "rows" and how many were updated a second. Ids of each of the TABLES are 12345 + row *
// 0x9E3779B97F4A7C1.

#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <fstream>
#include <iostream>
#include <optional>
#include <thread>

#include "serving/model.h"

using Clock = std::chrono::steady_clock;
using dynemb::serving::Model;

constexpr int64_t kAtOnce = 100;  // rows of an update

double microseconds(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}

// How long `threads` take to make `calls` calls each.
double run_by(Model& model, const std::vector<at::Tensor>& inputs, int threads, int calls) {
  std::barrier together(threads + 1);
  std::vector<std::thread> running;
  for (int thread = 0; thread < threads; ++thread) {
    running.emplace_back([&] {
      at::set_num_threads(1);  // each thread has a number of its own
      model.run(inputs);
      together.arrive_and_wait();
      for (int call = 0; call < calls; ++call) model.run(inputs);
      together.arrive_and_wait();
    });
  }
  together.arrive_and_wait();
  const auto begin = Clock::now();
  together.arrive_and_wait();
  const auto end = Clock::now();
  for (std::thread& thread : running) thread.join();
  return microseconds(begin, end);
}

// Replaces rows of known ids at an even pace, in small updates of one table after another.
class Writer {
 public:
  Writer(Model& model, int64_t tables, int64_t ids, int64_t rows_a_second)
      : thread_([this, &model, tables, ids, rows_a_second] {
          at::set_num_threads(1);
          const at::Tensor rows = at::randn({kAtOnce, 16});
          const auto begin = Clock::now();
          for (int64_t update = 0; !stop_; ++update) {
            at::Tensor known = at::empty({kAtOnce}, at::kLong);
            for (int64_t i = 0; i < kAtOnce; ++i) {
              const int64_t row = (update / tables * kAtOnce + i) * 7919 % ids;
              known.mutable_data_ptr<int64_t>()[i] = row * 0x9E3779B97F4A7C1 + 12345;
            }
            model.apply("bags.f" + std::to_string(update % tables), known, rows);
            updated_ += kAtOnce;
            const std::chrono::duration<double> due{static_cast<double>(updated_) /
                                                    static_cast<double>(rows_a_second)};
            std::this_thread::sleep_until(begin + due);
          }
          seconds_ = microseconds(begin, Clock::now()) / 1e6;
        }) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Rows a second.
  double stop() {
    stop_ = true;
    thread_.join();
    return static_cast<double>(updated_) / seconds_;
  }

 private:
  std::atomic<bool> stop_ = false;
  int64_t updated_ = 0;
  double seconds_ = 0.0;
  std::thread thread_;
};

int main(int count, char** arguments) try {
  const bool runs_two = count == 7 && std::string(arguments[6]) == "runners";
  const bool writes = count == 10 && std::string(arguments[6]) == "writer";
  if (!runs_two && !writes) throw std::invalid_argument("live: expected six or nine arguments");
  at::set_num_threads(1);
  dynemb::serving::load_ops(arguments[2]);
  Model model(arguments[1], 2);
  std::ifstream file(arguments[3], std::ios::binary);
  const std::vector<char> data{std::istreambuf_iterator<char>(file), {}};
  const auto saved = torch::jit::pickle_load(data).toTuple();
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& value : saved->elements().at(0).toListRef()) {
    inputs.push_back(value.toTensor());
  }
  const int rounds = std::stoi(arguments[4]), calls = std::stoi(arguments[5]);
  for (int turn = 0; turn < 2 * (rounds + 1); ++turn) {
    const bool second = turn % 2 == (turn / 2) % 2;  // what goes first changes
    const bool counts = turn >= 2;
    if (runs_two) {
      const int threads = second ? 2 : 1;
      const double took = run_by(model, inputs, threads, calls);
      if (counts) std::cout << threads << ' ' << took << '\n';
      continue;
    }
    std::optional<Writer> writer;
    if (second) {
      writer.emplace(model, std::stoll(arguments[7]), std::stoll(arguments[8]),
                     std::stoll(arguments[9]));
    }
    std::vector<double> taken;
    for (int call = 0; call < calls; ++call) {
      const auto begin = Clock::now();
      const auto outputs = model.run(inputs);
      taken.push_back(microseconds(begin, Clock::now()));
    }
    const double rate = writer ? writer->stop() : 0.0;
    if (!counts) continue;
    std::cout << (second ? "updated" : "idle");
    for (const double took : taken) std::cout << ' ' << took;
    std::cout << '\n';
    if (second) std::cout << "rows " << rate << '\n';
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
