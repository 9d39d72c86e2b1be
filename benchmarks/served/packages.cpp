// Runs two packages in turns and prints the microseconds of each call, a line a round and package.
//
//   packages OURS STATIC OP_LIBRARY INPUTS ROUNDS CALLS
//
// INPUTS is a file of torch.save with the inputs of both, as lists of tensors.

#include <ATen/Parallel.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <chrono>
#include <iostream>

#include "serving/model.h"

int main(int count, char** arguments) try {
  if (count < 7) throw std::invalid_argument("packages: expected six arguments");
  at::set_num_threads(1);
  dynemb::serving::load_ops(arguments[3]);
  dynemb::serving::Model ours(arguments[1]);
  torch::inductor::AOTIModelPackageLoader peer(arguments[2]);
  std::ifstream file(arguments[4], std::ios::binary);
  const std::vector<char> data{std::istreambuf_iterator<char>(file), {}};
  const auto inputs = torch::jit::pickle_load(data).toTuple();
  const auto tensors = [&](size_t model) {
    std::vector<at::Tensor> result;
    for (const c10::IValue& value : inputs->elements().at(model).toListRef()) {
      result.push_back(value.toTensor());
    }
    return result;
  };
  const std::vector<at::Tensor> ids = tensors(0), rows = tensors(1);
  const int rounds = std::stoi(arguments[5]), calls = std::stoi(arguments[6]);
  for (int turn = 0; turn < 2 * (rounds + 1); ++turn) {
    const bool is_ours = turn % 2 == (turn / 2) % 2;  // the order changes
    if (turn >= 2) std::cout << (is_ours ? "ours" : "static");
    for (int call = 0; call < calls; ++call) {
      const auto begin = std::chrono::steady_clock::now();
      const auto outputs = is_ours ? ours.run(ids) : peer.run(rows);
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - begin;
      if (turn >= 2) std::cout << ' ' << took.count();
    }
    if (turn >= 2) std::cout << '\n';
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
