// Runs a package once: package_check PACKAGE OP_LIBRARY INPUTS OUTPUTS, with files of torch.save.

#include <torch/csrc/api/include/torch/serialize.h>

#include <fstream>
#include <iterator>

#include "serving/model.h"

int main(int, char** arguments) {
  dynemb::serving::load_ops(arguments[2]);
  dynemb::serving::Model model(arguments[1]);
  std::ifstream given(arguments[3], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(given)), {});
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& input : torch::pickle_load(bytes).toList()) {
    inputs.push_back(input.toTensor());
  }
  const std::vector<char> found = torch::pickle_save(model.run(std::move(inputs)));
  std::ofstream(arguments[4], std::ios::binary).write(found.data(), found.size());
}
