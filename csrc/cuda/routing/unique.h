// Distinct ids of groups on the device; the host does not learn their number.
#pragma once

#include "arguments/routing.h"
#include "cuda/runtime/device.cuh"
#include "cuda/runtime/launch.h"

namespace dynemb::cuda {

// Destinations of the results. [N]: as many as there are ids; zeros follow the distinct ids.
struct UniqueResults {
  int64_t* ids;      // [N]
  int64_t* offsets;  // [groups + 1]
  int64_t* inverse;  // [N]
  int64_t* counts;   // [N]
};

// Also checks that 32-bit numbers suffice.
GroupedIds grouped_ids(const Call& call, const Tensor& ids, const Tensor& offsets);

// Launches the kernels that find the distinct ids. Their number is offsets[groups].
void find_unique(const Call& call, const GroupedIds& given, const UniqueResults& results);

// Waits for a word of the device. Raises while the stream is captured; `instead`: the remedy.
int64_t read_word(const Call& call, const int64_t* word, const char* instead);

}  // namespace dynemb::cuda
