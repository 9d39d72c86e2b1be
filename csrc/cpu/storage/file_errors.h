// What is said of a call of the file system that has failed.
#pragma once

#include <string>

namespace dynemb::cpu {

// Raises RuntimeError: what was done, to which file, and what the system says (an errno).
[[noreturn]] void raise_file_error(const char* what, const std::string& file, int error);

}  // namespace dynemb::cpu
