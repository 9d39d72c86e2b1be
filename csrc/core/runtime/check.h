// Errors for callers: the message, then the place in the source that raised it.
//
//   dynemb::serve_lookup: the last offset is 18, expected the number of ids, 16
//   (csrc/cpu/index/args.cpp:44)
//
// An exception of an op becomes a RuntimeError in Python, with the text of std::exception::what.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace dynemb {

// The path of a source file from the root of the repository on, wherever the file is compiled.
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

// Throws std::runtime_error with the concatenated parts of the message, unless `condition`.
#define DYNEMB_CHECK(condition, ...)                          \
  if (__builtin_expect(static_cast<bool>(!(condition)), 0)) { \
    ::dynemb::fail_check(__FILE__, __LINE__, __VA_ARGS__);    \
  }
