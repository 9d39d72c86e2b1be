// Reserved virtual memory: address space without pages. A table's tensors are reserved once at a
// size no machine can fill, so growth neither moves rows nor changes a tensor's shape or address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynemb::cpu {

// Physical memory that can still be taken without swapping, in bytes: the smaller of MemAvailable
// and what the control group has left.
int64_t available_memory();

// Whether `bytes` more bytes can be had. Sizes below 16 MiB are not checked, because asking the
// system takes microseconds.
bool has_available_memory(int64_t bytes);

// Raises if `bytes` more bytes cannot be had: with overcommit, running out would end the process
// instead. Sizes below 16 MiB are not checked.
void check_available_memory(const char* op, int64_t bytes);

// The same for the result of an op, one of whose sizes argument `name` has set to `value`. `bytes`
// are those of result_bytes.
void check_result_memory(const char* op, const char* name, int64_t value, int64_t bytes);

// Asks for huge pages for what lies in a reserved range; does nothing for other memory.
void prefer_huge_pages(void* data, size_t bytes);

}  // namespace dynemb::cpu
