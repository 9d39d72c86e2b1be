// Runs of a model beside changes of its next version: csrc/serving/versioned_model.h.
#include <new>
#include <string>

#include "checker.h"
#include "serving/versioned_model.h"

namespace {

using namespace dynemb::serving;
using interleavings::require;

alignas(VersionedModel) char memory[sizeof(VersionedModel)];
VersionedModel* model;

void change() {
  for (int64_t version = 1; version <= 2; ++version) {
    for (int64_t row = 0; row < 2; ++row) model->apply("table", {row}, {version});
    model->publish(std::to_string(version));
  }
}

// Versions do not go back.
void run() {
  int64_t last = 0;
  for (int k = 0; k < 2; ++k) {
    const VersionedModel::Outputs outputs = model->run({});
    const int64_t row = outputs.tensors[0].value;
    require(outputs.tensors[1].value == row, "a run has rows of two versions");
    require(outputs.version == std::to_string(row), "a run has the name of another version");
    require(row >= last, "a later run has an earlier version");
    last = row;
  }
}

interleavings::Execution begin() {
  if (model != nullptr) model->~VersionedModel();
  model = new (memory) VersionedModel("package");
  interleavings::share(memory, sizeof memory, interleavings::Access::kGuarded);
  return {{change, run, run}, nullptr};
}

}  // namespace

int main(int argc, char** argv) { return interleavings::explore(argc, argv, begin); }
