#include "cpu/storage/store_format.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/storage/file_errors.h"

namespace dynemb::cpu {
namespace {

std::string format_name(const std::string& path) { return path + "/FORMAT"; }

std::string format_text(const StoreFormat& format) {
  std::ostringstream text;
  text << "{\n  \"version\": " << kStoreVersion
       << ",\n  \"segment_bytes\": " << format.segment_bytes << ",\n  \"record_bytes\": {";
  const char* separator = "\n";
  for (const SlabFormat& slab : format.slabs) {
    if (slab.record_bytes == 0) continue;
    text << separator << "    \"" << slab.name << "\": " << slab.record_bytes;
    separator = ",\n";
  }
  text << "\n  }\n}\n";
  return text.str();
}

// Empty if the file is missing.
std::string read_text(const std::string& name) {
  errno = 0;
  std::ifstream file(name, std::ios::binary);
  if (!file && errno != ENOENT) raise_file_error("opening", name, errno);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

// Every `"name": number` of the text. Names of slabs need no escapes in JSON, and come last, so a
// slab may have the name of another field.
std::map<std::string, int64_t> numbers_of(const std::string& text) {
  std::map<std::string, int64_t> numbers;
  for (size_t at = text.find('"'); at != std::string::npos; at = text.find('"', at)) {
    const size_t end = text.find('"', at + 1);
    if (end == std::string::npos) break;
    const std::string key = text.substr(at + 1, end - at - 1);
    at = end + 1;
    const size_t colon = text.find_first_not_of(" \t\r\n", at);
    if (colon == std::string::npos || text[colon] != ':') continue;
    char* stop = nullptr;
    const int64_t value = std::strtoll(text.c_str() + colon + 1, &stop, 10);
    if (stop != text.c_str() + colon + 1) numbers[key] = value;
  }
  return numbers;
}

// The content of a directory; empty if it is missing.
std::filesystem::directory_iterator entries_of(const std::string& directory) {
  std::error_code error;
  std::filesystem::directory_iterator entries(directory, error);
  if (!error) return entries;
  const bool none = error.value() == ENOENT || error.value() == ENOTDIR;
  if (!none) raise_file_error("listing", directory, error.value());
  return {};
}

bool has_segments(const std::string& directory) {
  return entries_of(directory) != std::filesystem::directory_iterator();
}

constexpr const char* kOtherPath =
    ". Give the tables another path, or delete this directory if nothing in it is needed";

}  // namespace

void check_format(const std::string& path, const StoreFormat& format) {
  const std::string text = read_text(format_name(path));
  bool any = false;
  for (const auto& slab : entries_of(path + "/rows")) {
    any = any || has_segments(slab.path().string());
  }
  const size_t slabs_begin = text.find("\"record_bytes\"");
  const auto head = numbers_of(text.substr(0, slabs_begin));
  DYNEMB_CHECK(any || text.empty() || slabs_begin != std::string::npos,
               "dynemb: ", format_name(path),
               " is not a file of a store: nothing has changed. Give the tables another path");
  if (!any) return;
  DYNEMB_CHECK(slabs_begin != std::string::npos && head.count("version") == 1 &&
                   head.count("segment_bytes") == 1,
               "dynemb: ", format_name(path),
               " is missing or damaged, but segments exist beside it", kOtherPath,
               kDamagedStoreError);
  DYNEMB_CHECK(head.at("version") == kStoreVersion, "dynemb: path ", path, " has version ",
               head.at("version"), " of the format, expected ", kStoreVersion, kOtherPath,
               kUnsupportedFormatError);
  DYNEMB_CHECK(head.at("segment_bytes") == format.segment_bytes, "dynemb: path ", path,
               " has segments of ", head.at("segment_bytes"), " bytes, expected ",
               format.segment_bytes, " (segment_bytes)", kOtherPath);
  std::map<std::string, int64_t> wanted;
  for (const SlabFormat& slab : format.slabs) {
    if (slab.record_bytes > 0) wanted[slab.name] = slab.record_bytes;
  }
  for (const auto& [name, bytes] : numbers_of(text.substr(slabs_begin))) {
    if (!has_segments(path + "/rows/" + name)) continue;
    DYNEMB_CHECK(wanted.count(name) == 1, "dynemb: path ", path, " has rows of slab ", name,
                 ", which the tables do not have", kOtherPath);
    DYNEMB_CHECK(wanted[name] == bytes, "dynemb: path ", path, " has records of ", bytes,
                 " bytes of slab ", name, ", expected ", wanted[name],
                 ": dim, dtype or optimizer differs", kOtherPath);
  }
}

void write_format(const std::string& path, const StoreFormat& format) {
  const std::string text = format_text(format);
  const std::string name = format_name(path);
  if (read_text(name) == text) return;
  const std::string draft = name + ".tmp";
  const int file = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) raise_file_error("making", draft, errno);
  const bool written = ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int error = written && fsync(file) == 0 ? 0 : errno;
  close(file);
  if (error != 0 || !written) raise_file_error("writing", draft, error != 0 ? error : EIO);
  if (std::rename(draft.c_str(), name.c_str()) != 0) raise_file_error("renaming", draft, errno);
}

}  // namespace dynemb::cpu
