// Errors of the file system.
#pragma once

#include <string>

namespace dynemb::cpu {

// Raises RuntimeError with the operation, the file and the system's message for an errno.
[[noreturn]] void raise_file_error(const char* what, const std::string& file, int error);

}  // namespace dynemb::cpu
