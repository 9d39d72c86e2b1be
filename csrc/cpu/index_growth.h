// Growth of a table's index, in place.
#pragma once

#include <cstdint>

#include "cpu/index_view.h"

namespace dynemb::cpu {

// Raises a message that says what to do if the table cannot have `bucket_count` buckets: region of
// the tensor too small, or not enough memory. Changes nothing.
void check_rehash(const IndexView& index, int64_t table, int64_t bucket_count);

// Spreads all entries over `bucket_count` buckets, at least as many as before. Rows and handles do
// not change. check_rehash must have passed.
void rehash(const IndexView& index, int64_t table, int64_t bucket_count);

}  // namespace dynemb::cpu
