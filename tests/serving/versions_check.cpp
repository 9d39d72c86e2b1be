// Runs the live package of these tests in threads while another thread updates it, and prints what
// went wrong as JSON. Every row of version k is k, so is what runs read of the dense part.
//
//   versions_check PACKAGE OP_LIBRARY VERSIONS
//
// Or follows a delta log while a thread runs the package: takes the commits up to the number that
// it reads in a line, and prints what the model says then.
//
//   versions_check PACKAGE OP_LIBRARY follow LOG

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <fstream>
#include <iostream>
#include <thread>

#include "serving/versioned_model.h"

using namespace dynemb::serving;

constexpr int64_t kIds = 100, kBags = 512, kPerBag = 4;

at::Tensor ids_from(int64_t first, int64_t count) {
  return at::arange(first, first + count, at::kLong);
}

std::vector<at::Tensor> batch(int64_t ids = kIds) {
  return {ids_from(0, kBags * kPerBag).remainder(ids), ids_from(0, kBags + 1).mul(kPerBag),
          ids_from(0, kBags * 3).remainder(ids).reshape({kBags, 3}), at::zeros({kBags, 1})};
}

bool all(const at::Tensor& values, float expected) {
  const at::Tensor whole = values.contiguous();
  const float* value = whole.const_data_ptr<float>();
  return std::all_of(value, value + whole.numel(), [&](float one) { return one == expected; });
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

// Whether outputs are those of one version.
bool of_one_version(const VersionedModel::Outputs& outputs) {
  const float k = std::stof(outputs.version);
  const at::Tensor& pooled = outputs.tensors.at(1);
  const float sum = 8 * kPerBag * k + 4 * 3 * k;  // all weights are 1
  return all(pooled.slice(1, 0, 8), kPerBag * k) && all(pooled.slice(1, 8), 3 * k) &&
         all(outputs.tensors.at(2), k) && all(outputs.tensors.at(0), (sum + k) * k);
}

// Rows and the dense part of the next version, and ids that come and go.
void make(VersionedModel& model, int64_t version) {
  const auto k = static_cast<float>(version);
  constexpr int64_t kOthers = 50;
  const int64_t other = 10000 + version * kOthers;
  model.apply("bags.u", at::cat({ids_from(0, kIds), ids_from(other, kOthers)}),
              at::full({kIds + kOthers, 8}, k), ids_from(other - kOthers, kOthers));
  model.apply("bags.v", ids_from(0, kIds), at::full({kIds, 4}, k));
  model.erase("bags.u", ids_from(other + 10, 5));
  model.set_dense("scale", at::full({1}, k));
  model.set_dense("top.bias", at::full({1}, k));
  model.publish(std::to_string(version));
}

struct Seen {
  const int64_t crowded;  // how many versions are made while readers are busy
  std::atomic<int64_t> runs{0}, mixed{0}, backwards{0};
};

void read(VersionedModel& model, const std::atomic<bool>& stop, Seen& seen) {
  for (int64_t last = 0; !stop;) {
    const VersionedModel::Outputs outputs = model.run(batch());
    seen.mixed += !of_one_version(outputs);
    const int64_t version = std::stoll(outputs.version);
    seen.backwards += version < last;
    last = version;
    ++seen.runs;
    seen.runs.notify_one();
    // readers that never let go of a processor meet most changes, and take most time
    if (version >= seen.crowded) std::this_thread::yield();
  }
}

void check_versions(const char* package, int64_t versions) {
  VersionedModel model(package, /*runners=*/2);
  const std::string first = model.version();
  model.set_dense("top.weight", at::ones({1, 12}));
  make(model, 0);
  Seen seen{versions / 5};
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) readers.emplace_back([&] { read(model, stop, seen); });
  int64_t before = 0;
  for (int64_t version = 1; version <= versions; ++version) {
    make(model, version);
    // the first ones follow each other at once, so that runs of older ones still go on
    if (version > seen.crowded) seen.runs.wait(seen.runs);
    if (version == seen.crowded) before = resident_bytes();
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  bool refused = false;
  try {
    model.apply("bags.u", ids_from(0, 1000), at::full({1000, 8}, -1.0f));
  } catch (const NoHeadroom& error) {
    refused = error.wanted > error.free_rows;
  }
  model.publish(std::to_string(versions));  // without the refused update
  seen.mixed += !of_one_version(model.run(batch()));
  std::cout << "{\"first\": \"" << first << "\", \"runs\": " << seen.runs
            << ", \"mixed\": " << seen.mixed << ", \"backwards\": " << seen.backwards
            << ", \"refused\": " << refused << ", \"ids\": " << model.stats().at("bags.u").ids
            << ", \"grown\": " << resident_bytes() - before;
}

// One set of tables: outputs of two threads, then rows while they are updated.
void check_rows(const char* package, int64_t updates) {
  Model model(package, /*runners=*/2);
  const at::Tensor expected = model.run(batch()).at(0);
  std::atomic<int64_t> different{0}, torn{0};
  std::atomic<bool> stop{false};
  const auto both = [](const std::function<void()>& work) {
    std::thread other(work);
    work();
    other.join();
  };
  both([&] {
    for (int run = 0; run < 50; ++run) different += !model.run(batch()).at(0).equal(expected);
  });
  // bags of one id
  const std::vector<at::Tensor> single{ids_from(0, kBags).remainder(kIds), ids_from(0, kBags + 1),
                                       batch()[2], batch()[3]};
  model.apply("bags.u", ids_from(0, kIds), at::zeros({kIds, 8}));
  std::thread reader([&] {
    while (!stop) {
      const at::Tensor rows = model.run(single).at(1).slice(1, 0, 8);
      torn += !rows.equal(rows.slice(1, 0, 1).expand({kBags, 8}));
    }
  });
  for (int64_t k = 1; k <= updates; ++k) {
    model.apply("bags.u", ids_from(0, kIds), at::full({kIds, 8}, static_cast<float>(k)));
  }
  stop = true;
  reader.join();
  const bool last = all(model.run(single).at(1).slice(1, 0, 8), static_cast<float>(updates));
  std::cout << ", \"different\": " << different << ", \"torn\": " << torn << ", \"last\": " << last;
}

// What the errors of wrong arguments say.
void check_errors(const char* package) {
  Model model(package);
  const at::Tensor ids = ids_from(0, 2), rows = at::zeros({2, 8});
  const std::function<void()> wrong[] = {
      [&] { model.apply("u", ids, rows); },
      [&] { model.apply("bags.u", ids, rows.slice(1, 0, 4)); },
      [&] { model.apply("bags.u", rows, rows); },
      [&] { model.erase("bags.u", at::Tensor()); },
      [&] { model.set_dense("bags.u", rows); },
      [&] { model.set_dense("scale", rows); },
  };
  std::cout << ", \"errors\": [";
  for (const auto& call : wrong) {
    if (&call != wrong) std::cout << ", ";
    try {
      call();
      std::cout << "null";
    } catch (const std::invalid_argument& error) {
      std::cout << quoted(error.what());
    }
  }
  std::cout << "]}" << std::endl;
}

// A sum of the bits of outputs.
int64_t sum_of(const std::vector<at::Tensor>& outputs) {
  uint32_t sum = 0;
  for (const at::Tensor& output : outputs) {
    const at::Tensor whole = output.contiguous();
    sum = detail::crc32c(whole.const_data_ptr(), whole.nbytes(), sum);
  }
  return sum;
}

// Prints how many commits were taken, or the error, and where a model is then.
template <typename SomeModel>
void update(SomeModel& model, int64_t until) {
  try {
    const int64_t applied = model.update(until);
    std::cout << "\"applied\": " << applied;
  } catch (const NewBaseNeeded& error) {
    std::cout << "\"new base\": " << quoted(error.what());
  } catch (const DamagedLog& error) {
    std::cout << "\"damaged\": " << quoted(error.what());
  } catch (const NoHeadroom& error) {
    std::cout << "\"headroom\": " << quoted(error.what());
  } catch (const std::runtime_error& error) {
    std::cout << "\"refused\": " << quoted(error.what());
  }
  if constexpr (std::is_same_v<SomeModel, Model>) {
    std::cout << ", \"behind\": " << model.dense_behind();
  }
  const auto sequence = model.sequence();
  std::cout << ", \"sequence\": " << (sequence ? std::to_string(*sequence) : "null");
}

void follow(const char* package, const char* log) {
  constexpr int64_t kMoreIds = 250;  // there are no more than 200
  Model model(package);
  VersionedModel versions(package, /*runners=*/2);
  model.follow(log, DensePart::kKept);
  versions.follow(log);
  std::atomic<bool> stop{false};
  int64_t mixed = 0;
  std::map<std::string, int64_t> sums;  // of what runs of a version gave
  std::thread reader([&] {
    while (!stop) {
      const auto outputs = versions.run(batch(kMoreIds));
      const int64_t sum = sum_of(outputs.tensors);
      mixed += sums.emplace(outputs.version, sum).first->second != sum;
    }
  });
  for (int64_t until; std::cin >> until;) {
    std::cout << "{\"model\": {";
    update(model, until);
    std::cout << ", \"pooled\": " << sum_of({model.run(batch(kMoreIds)).at(1)})
              << "}, \"versions\": {";
    update(versions, until);
    const auto outputs = versions.run(batch(kMoreIds));
    std::cout << ", \"version\": " << quoted(outputs.version)
              << ", \"outputs\": " << sum_of(outputs.tensors) << "}}" << std::endl;
  }
  stop = true;
  reader.join();
  std::cout << "{\"mixed\": " << mixed << ", \"sums\": {";
  for (const auto& [version, sum] : sums) {
    std::cout << (version == sums.begin()->first ? "" : ", ") << quoted(version) << ": " << sum;
  }
  std::cout << "}}" << std::endl;
}

int main(int count, char** arguments) {
  if (count != 4 && count != 5) return 2;
  at::set_num_threads(1);
  load_ops(arguments[2]);
  if (count == 5) {
    follow(arguments[1], arguments[4]);
    return 0;
  }
  check_versions(arguments[1], std::stoll(arguments[3]));
  check_rows(arguments[1], std::stoll(arguments[3]));
  check_errors(arguments[1]);
}
