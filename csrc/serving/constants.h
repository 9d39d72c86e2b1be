// The tensors of a serving package, in aligned memory of huge pages.

#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "serving/json.h"
#include "serving/manifest.h"
#include "serving/ops.h"
#include "serving/safetensors.h"

namespace dynemb::serving {

namespace detail {

// Anonymous memory, freed at the end.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(bytes + kHugePage) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) too_large(bytes, "the system has no memory");
    const int64_t free = call("dynemb::available_memory").toInt();
    if (static_cast<int64_t>(bytes) > free) {  // pages are taken when they are touched
      munmap(data_, bytes_);
      too_large(bytes, std::to_string(free) + " bytes of memory are free");
    }
    if (bytes >= kHugePage / 2) madvise(data_, bytes_, MADV_HUGEPAGE);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { munmap(data_, bytes_); }

  char* first() const {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(data_) + kHugePage - 1) /
                                   kHugePage * kHugePage);
  }
  bool has(const void* address) const { return address >= data_ && address < last(); }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  [[noreturn]] static void too_large(size_t bytes, const std::string& why) {
    throw std::runtime_error(
        "Model: the constants take " + std::to_string(bytes) + " bytes, but " + why +
        ": close other models, serve on a machine with more memory, or export with "
        "less headroom");
  }
  const void* last() const { return static_cast<const char*>(data_) + bytes_; }

  void* data_;
  size_t bytes_;
};

// A file of a package, read once from front to back in blocks with checksums.
class ChecksummedFile {
 public:
  ChecksummedFile(std::string path, const Json& sums) : path_(std::move(path)), sums_(sums) {
    file_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (file_ < 0) damaged(path_, errno == ENOENT ? "the file is missing" : std::strerror(errno));
    struct stat status{};
    fstat(file_, &status);
    if (status.st_size != sums_.at("bytes").integer()) {
      close(file_);
      damaged(path_, "the file has " + std::to_string(status.st_size) + " bytes, expected " +
                         std::to_string(sums_.at("bytes").integer()) +
                         ": it was cut off or written to");
    }
  }
  ChecksummedFile(const ChecksummedFile&) = delete;
  ChecksummedFile& operator=(const ChecksummedFile&) = delete;
  ~ChecksummedFile() { close(file_); }

  size_t bytes() const { return static_cast<size_t>(sums_.at("bytes").integer()); }
  const std::string& path() const { return path_; }

  // Reads bytes without a check.
  void read(size_t begin, size_t size, char* out) const {
    while (size > 0) {
      const ssize_t count = pread(file_, out, size, static_cast<off_t>(begin));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) damaged(path_, count < 0 ? std::strerror(errno) : "the file is too short");
      begin += static_cast<size_t>(count), out += count, size -= static_cast<size_t>(count);
    }
  }

  // Passes all bytes on, block by block, each after its checksum was compared.
  void each_block(const std::function<void(size_t begin, const char* data, size_t size)>& take) {
    constexpr int64_t kLargestBlock = int64_t{1} << 30;
    const int64_t block_bytes = sums_.at("block_bytes").integer();
    if (block_bytes < 1 || block_bytes > kLargestBlock) {
      damaged(path_, "the manifest has checksums of blocks of " + std::to_string(block_bytes) +
                         " bytes, expected 1 to " + std::to_string(kLargestBlock));
    }
    const auto block = static_cast<size_t>(block_bytes);
    const Json::Array& sums = sums_.at("sums").array();
    std::vector<char> data(std::min(block, bytes()));
    for (size_t number = 0; number * block < bytes(); ++number) {
      const size_t size = std::min(block, bytes() - number * block);
      read(number * block, size, data.data());
      if (number >= sums.size() || crc32c(data.data(), size) != sums[number].integer()) {
        damaged(path_, "block " + std::to_string(number) +
                           " has a wrong checksum: the file was damaged after it was written");
      }
      take(number * block, data.data(), size);
    }
  }

 private:
  std::string path_;
  const Json& sums_;
  int file_;
};

// A tensor of a file, and its place in memory.
struct PlacedSection : Section {
  size_t place = 0, room = 0;  // space in memory, also for rows that the file lacks
};

// The tensors of a safetensors file.
inline std::vector<PlacedSection> sections_of(const ChecksummedFile& file) {
  std::vector<PlacedSection> result;
  try {
    char first[sizeof(uint64_t)] = {};
    file.read(0, std::min(sizeof first, file.bytes()), first);
    const size_t header = header_bytes(first, file.bytes());
    std::string text(header - sizeof first, '\0');
    file.read(sizeof first, text.size(), text.data());
    for (Section& section : sections_in(text, header, file.bytes())) {
      const size_t bytes = section.bytes;
      result.push_back({std::move(section), 0, bytes});
    }
  } catch (const std::exception& error) {
    damaged(file.path(), std::string("its header cannot be read: ") + error.what());
  }
  return result;
}

// The number of rows in memory of tensors, by name, if it exceeds that of the file.
inline std::unordered_map<std::string, int64_t> rows_of_slabs(const Json& manifest) {
  std::unordered_map<std::string, int64_t> result;
  if (!manifest.has("live")) return result;
  for (const auto& [path, part] : manifest.at("live").object()) {
    int64_t slab = 0;
    for (const Json& rows : part.at("rows").array()) {
      result[path + ".rows" + std::to_string(slab++)] = rows.integer();
    }
  }
  return result;
}

// Makes space for so many rows.
inline void extend(const ChecksummedFile& file, PlacedSection& section, int64_t rows) {
  if (section.shape.size() != 2 || section.shape[0] > rows) {
    damaged(file.path(), section.name + " has more rows than the manifest says");
  }
  section.shape[0] = rows;
  const auto room = bytes_of(section.shape, c10::elementSize(section.dtype));
  if (!room) damaged(file.path(), section.name + " exceeds the address space");
  section.room = *room;
}

}  // namespace detail

// All tensors of a package. They do not own their memory, which belongs to this object: a compiled
// model keeps references to its constants forever.
class Constants {
 public:
  static constexpr size_t kAlignment = 64;  // a bucket of an index is one line of the cache

  Constants(const std::string& folder, const Json& manifest) {
    const Json& sums = manifest.at("files");
    constexpr size_t kDense = 1;
    const char* names[] = {"tables.safetensors", "dense.safetensors"};
    std::vector<std::unique_ptr<detail::ChecksummedFile>> files;
    std::vector<std::vector<detail::PlacedSection>> sections;
    const auto rows = detail::rows_of_slabs(manifest);
    size_t bytes = 0;
    constexpr size_t kMostBytes = size_t{1} << 62;
    for (const char* name : names) {
      files.push_back(
          std::make_unique<detail::ChecksummedFile>(folder + "/" + name, sums.at(name)));
      sections.push_back(detail::sections_of(*files.back()));
      for (detail::PlacedSection& section : sections.back()) {
        const auto extended = rows.find(section.name);
        if (extended != rows.end()) detail::extend(*files.back(), section, extended->second);
        section.place = bytes;
        bytes += (section.room + kAlignment - 1) / kAlignment * kAlignment;
        if (bytes > kMostBytes) {
          detail::damaged(files.back()->path(), "its tensors exceed the address space");
        }
      }
    }
    pages_ = std::make_unique<detail::Pages>(bytes);
    char* const first = pages_->first();
    for (size_t number = 0; number < files.size(); ++number) {
      files[number]->each_block([&](size_t begin, const char* data, size_t size) {
        for (const detail::PlacedSection& section : sections[number]) {
          const size_t from = std::max(begin, section.begin);
          const size_t to = std::min(begin + size, section.begin + section.bytes);
          if (from >= to) continue;
          std::memcpy(first + section.place + (from - section.begin), data + (from - begin),
                      to - from);
        }
      });
      for (const detail::PlacedSection& section : sections[number]) {
        tensors_.emplace(section.name, at::from_blob(first + section.place, section.shape,
                                                     at::TensorOptions(section.dtype)));
        if (number == kDense) dense_.insert(section.name);
      }
    }
    open_row_files(folder, manifest);
  }
  ~Constants() { close_row_files(); }

  const std::unordered_map<std::string, at::Tensor>& tensors() const { return tensors_; }
  // Names of the tensors of the dense state.
  const std::set<std::string>& dense() const { return dense_; }
  // Whether the values of a tensor lie here.
  bool has(const at::Tensor& tensor) const { return pages_->has(tensor.const_data_ptr()); }

 private:
  // Puts the places of files with rows into the tensors that name them, and opens the files.
  void open_row_files(const std::string& folder, const Json& manifest) {
    if (!manifest.has("row_files")) return;
    constexpr int64_t kPathBytes = 5, kInstance = 6, kPath = 7;  // as cpu/serving/row_files.h
    for (const auto& [name, place] : manifest.at("row_files").object()) {
      const std::string path = std::filesystem::absolute(folder + "/" + place.at("file").text());
      const auto found = tensors_.find(name);
      if (found == tensors_.end() || found->second.scalar_type() != at::kLong ||
          (found->second.numel() - kPath) * 8 < static_cast<int64_t>(path.size())) {
        detail::damaged(path, "the package has no tensor " + name + " for it");
      }
      auto* words = found->second.mutable_data_ptr<int64_t>();
      words[kPathBytes] = static_cast<int64_t>(path.size());
      std::memset(words + kPath, 0, static_cast<size_t>(found->second.numel() - kPath) * 8);
      std::memcpy(words + kPath, path.data(), path.size());
      try {
        open_row_file(manifest, name, found->second, words[kInstance]);
      } catch (...) {
        close_row_files();
        throw;
      }
      row_files_.push_back(found->second);
    }
  }
  // Tables with headroom get changes of their own, which no other instance has.
  void open_row_file(const Json& manifest, const std::string& name, const at::Tensor& file,
                     int64_t& instance) {
    const std::string owner = name.substr(0, name.rfind('.'));
    instance = 0;
    if (manifest.has("live") && manifest.at("live").has(owner)) {
      const Json& part = manifest.at("live").at(owner);
      const auto meta = tensors_.find(owner + ".meta");
      if (part.has("headroom") && !part.at("headroom").is_null() && meta != tensors_.end()) {
        std::vector<int64_t> headroom;
        for (const Json& ids : part.at("headroom").array()) headroom.push_back(ids.integer());
        std::random_device random;
        instance = (static_cast<int64_t>(random()) << 31 | static_cast<int64_t>(random())) | 1;
        detail::call_all("dynemb::file_make_live", file, meta->second, headroom);
        return;
      }
    }
    detail::call_all("dynemb::file_open", file);
  }
  void close_row_files() {
    for (const at::Tensor& file : row_files_) detail::call_all("dynemb::file_close", file);
    row_files_.clear();
  }

  std::unique_ptr<detail::Pages> pages_;
  std::vector<at::Tensor> row_files_;  // name open files
  std::unordered_map<std::string, at::Tensor> tensors_;
  std::set<std::string> dense_;
};

}  // namespace dynemb::serving
