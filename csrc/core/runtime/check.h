// Errors that callers see: the message, then where in the source it was raised.
//
//   dynemb::serve_lookup: the last offset is 18, expected the number of ids, 16
//   (csrc/cpu/index/args.cpp:44)
//
// An op that throws is a RuntimeError in Python: torch passes on what any std::exception says.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace dynemb {

// The path of a source file from the root of the repository on, wherever it is compiled.
inline std::string_view source_path(std::string_view file) {
  const size_t begin = file.rfind("csrc/");
  return begin == std::string_view::npos ? file : file.substr(begin);
}

// Throws std::runtime_error. Not inlined, so that a check costs its caller a comparison.
template <typename... Parts>
[[noreturn]] __attribute__((noinline, cold)) void fail_check(const char* file, int line,
                                                             const Parts&... parts) {
  std::ostringstream says;
  (says << ... << parts);
  says << " (" << source_path(file) << ':' << line << ')';
  throw std::runtime_error(says.str());
}

}  // namespace dynemb

// Throws std::runtime_error with the parts of the message, one after another, unless `condition`.
#define DYNEMB_CHECK(condition, ...)                          \
  if (__builtin_expect(static_cast<bool>(!(condition)), 0)) { \
    ::dynemb::fail_check(__FILE__, __LINE__, __VA_ARGS__);    \
  }
