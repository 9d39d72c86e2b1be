// Growth of a table's index, in place.
#pragma once

#include <cstdint>

#include "cpu/index/args.h"

namespace dynemb::cpu {

// Bytes that `bucket_count` buckets take beyond the present ones. Raises if the table's region of
// the tensor is too small. Nothing changes.
int64_t check_rehash(const IndexArgs& index, int64_t table, int64_t bucket_count);

// Spreads all entries over `bucket_count` buckets, at least as many as before. Rows and handles do
// not change. check_rehash and check_available_memory must have passed.
void rehash(const IndexArgs& index, int64_t table, int64_t bucket_count);

}  // namespace dynemb::cpu
