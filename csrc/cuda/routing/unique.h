// Distinct ids of groups on the device, whose number the host does not learn.
#pragma once

#include "arguments/routing.h"
#include "cuda/runtime/device.cuh"
#include "cuda/runtime/launch.h"

namespace dynemb::cuda {

// Where the results go. [N]: as many as ids are given; after the distinct ids come zeros.
struct UniqueResults {
  int64_t* ids;      // [N]
  int64_t* offsets;  // [groups + 1]
  int64_t* inverse;  // [N]
  int64_t* counts;   // [N]
};

// Checks also that their number can be counted.
GroupedIds grouped_ids(const Call& call, const Tensor& ids, const Tensor& offsets);

// Launches the kernels that find the distinct ids. Their number is offsets[groups].
void find_unique(const Call& call, const GroupedIds& given, const UniqueResults& results);

// Waits for a word of the device. Raises while the stream is captured; `instead`: what to do.
int64_t read_word(const Call& call, const int64_t* word, const char* instead);

}  // namespace dynemb::cuda
