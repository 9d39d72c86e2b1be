// Lookups of rows, for ops that stage them first.
#pragma once

#include "cuda/rows/args.h"

namespace dynemb::cuda {

// The rows of a lookup, pooled or one by one.
Tensor run_lookup(const Call& call, const GroupRows& rows, LookupCall lookup);

}  // namespace dynemb::cuda
