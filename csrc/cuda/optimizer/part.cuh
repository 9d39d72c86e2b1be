// Included by each part_<n>.cu, which instantiates launch_of_part.
#pragma once

#include "cuda/optimizer/row_update.cuh"

namespace dynemb::cuda {

template <int kPart>
LaunchUpdate launch_of_part(int64_t optimizer) {
  LaunchUpdate launch = nullptr;
  for_optimizers_of_part<kPart, kOptimizerParts>([&](int64_t number, auto of) {
    if (number == optimizer) launch = launch_update<decltype(of)>;
  });
  return launch;
}

}  // namespace dynemb::cuda
