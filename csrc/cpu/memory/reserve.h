// Reserved virtual memory: address space without pages. A table's tensors are reserved once, larger
// than any machine's memory, so growth neither moves rows nor changes a tensor's shape or address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynemb::cpu {

// Whether `bytes` more bytes are available. Sizes below 16 MiB are not checked, because asking the
// system takes microseconds.
bool has_available_memory(int64_t bytes);

// Raises unless `bytes` more bytes are available: with overcommit, running out would end the
// process. Sizes below 16 MiB are not checked.
void check_available_memory(const char* op, int64_t bytes);

// The same for the result of an op, where argument `name` has set one of the sizes to `value`.
// `bytes`: of result_bytes.
void check_result_memory(const char* op, const char* name, int64_t value, int64_t bytes);

// Asks for huge pages if the memory lies in a reserved range; otherwise does nothing.
void prefer_huge_pages(void* data, size_t bytes);

}  // namespace dynemb::cpu
