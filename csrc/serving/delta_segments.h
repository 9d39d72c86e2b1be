// The files of one rank of a delta log; see torch_dynemb/delta_log/segment.py.

#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serving/delta_batch.h"

namespace dynemb::serving::detail {

// Position of a batch in a file.
struct Place {
  BatchHead head;
  std::string text;  // of the head
  size_t begin;
  size_t end() const { return begin + head.bytes; }
};

// A file of batches. A batch with a valid commit must be whole, otherwise it is damaged. Bytes
// after the last whole batch are a tail that was never committed: it ends too early, or lacks
// sectors that were never written, which then are zeros. Anything else is damage.
class Segment {
 public:
  // `last`: whether it is the last segment; only the last one may have a torn tail.
  Segment(std::string path, bool last) : path_(std::move(path)), last_(last) {
    file_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (file_ < 0 && errno != ENOENT) fail();
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() {
    if (file_ >= 0) close(file_);
  }

  // Whether the file exists: the writer of the log may have dropped it.
  bool exists() const { return file_ >= 0; }

  // The batch at `begin`; none: it is missing, or was not written to its end.
  std::optional<Place> place_at(size_t begin) const {
    const std::string text = bytes(begin, kHeadBytes);
    if (text.size() < kHeadBytes) {
      if (!text.empty()) torn(begin);
      return {};
    }
    std::optional<BatchHead> head;
    try {
      head = head_of(text.data());
    } catch (const std::runtime_error& error) {
      damaged(begin, error.what());
    }
    if (!head) {
      if (last_ && lacks_sectors(text, begin) && !has_head(begin + 1)) return {};
      damaged(begin, "the head of a batch is missing");
    }
    if (size() - begin < head->bytes) {
      torn(begin);
      return {};
    }
    return Place{*head, text, begin};
  }

  // The chain in the commit of a batch; none: it was not committed, or is damaged.
  std::optional<uint32_t> chain_of(const Place& place) const {
    const std::string commit = bytes(place.end() - kCommitBytes, kCommitBytes);
    return commit.size() < kCommitBytes ? std::nullopt : committed_chain(commit.data(), place.head);
  }

  // Whether a batch that was read earlier still exists.
  bool holds(const Place& place) const { return bytes(place.begin, kHeadBytes) == place.text; }

  // Reads a batch; none: it was not committed.
  std::optional<Batch> read(const Place& place) const {
    std::string text = bytes(place.begin, place.head.bytes);
    const bool whole = text.size() == place.head.bytes;
    const size_t commit = place.end() - kCommitBytes;
    const bool written = whole && !lacks_sectors(text.substr(text.size() - kCommitBytes), commit);
    try {
      return decoded(std::move(text));
    } catch (const BrokenBatch& broken) {
      if (last_ && place.end() >= size() && !broken.commit && !written) return {};
      damaged(place.begin, broken.reason);
    }
  }

 private:
  static constexpr size_t kSector = 512;  // unit of a disk's atomic writes

  [[noreturn]] void fail() const { throw std::runtime_error(path_ + ": " + std::strerror(errno)); }
  [[noreturn]] void damaged(size_t begin, const std::string& why) const {
    throw DamagedLog(path_ + ": byte " + std::to_string(begin) + ": " + why +
                     ": the delta log is damaged. Export the model again, or take the damaged "
                     "batch away with DeltaLog.rollback() to a sequence number before");
  }
  void torn(size_t begin) const {
    if (!last_) damaged(begin, "it ends in a batch, and another segment follows");
  }

  size_t size() const {
    struct stat status{};
    if (fstat(file_, &status) != 0) fail();
    return static_cast<size_t>(status.st_size);
  }

  // Bytes of the file; fewer at its end.
  std::string bytes(size_t begin, size_t count) const {
    const size_t whole = size();
    std::string data(begin < whole ? std::min(count, whole - begin) : 0, '\0');
    size_t done = 0;
    while (done < data.size()) {
      const ssize_t read =
          pread(file_, data.data() + done, data.size() - done, static_cast<off_t>(begin + done));
      if (read < 0 && errno == EINTR) continue;
      if (read < 0) fail();
      if (read == 0) break;
      done += static_cast<size_t>(read);
    }
    data.resize(done);
    return data;
  }

  // Whether a sector of the bytes is all zeros.
  static bool lacks_sectors(const std::string& data, size_t begin) {
    for (size_t at = 0; at < data.size();) {
      const size_t next = std::min(data.size(), at + kSector - (begin + at) % kSector);
      if (std::all_of(data.begin() + static_cast<ptrdiff_t>(at),
                      data.begin() + static_cast<ptrdiff_t>(next), [](char c) { return c == 0; })) {
        return true;
      }
      at = next;
    }
    return false;
  }

  // Whether a batch begins after `begin`: then everything before it had been committed.
  bool has_head(size_t begin) const {
    constexpr size_t kSearchedAtOnce = size_t{1} << 20;
    const std::string magic(kBatchMagic, kMagicBytes);
    for (; begin + kHeadBytes <= size(); begin += kSearchedAtOnce) {
      const std::string some = bytes(begin, kSearchedAtOnce + kHeadBytes - 1);
      for (size_t at = some.find(magic); at != std::string::npos; at = some.find(magic, at + 1)) {
        try {
          if (some.size() - at >= kHeadBytes && head_of(some.data() + at)) return true;
        } catch (const std::runtime_error&) {  // the head of another version
          return true;
        }
      }
    }
    return false;
  }

  std::string path_;
  bool last_;
  int file_;
};

// The batches of one rank: files of a directory, named after their first batch.
class RankLog {
 public:
  explicit RankLog(std::string folder) : folder_(std::move(folder)) {}

  // Passes on the existing batches from a number on, as long as `take` asks for the next one.
  void each(uint64_t from, const std::function<bool(Batch)>& take) {
    each_place(from, [&](const std::string& path, const Segment& segment, const Place& place) {
      auto batch = segment.read(place);
      if (!batch) return false;
      met_ = {path, place};
      return take(std::move(*batch));
    });
  }

  // The chain after the batch of a number; none: the batch does not exist. Reads only both ends of
  // the batch.
  std::optional<uint32_t> chain_after(uint64_t number) {
    std::optional<uint32_t> chain;
    each_place(number, [&](const std::string&, const Segment& segment, const Place& place) {
      if (place.head.sequence == number) chain = segment.chain_of(place);
      return false;
    });
    return chain;
  }

 private:
  using TakePlace = std::function<bool(const std::string&, const Segment&, const Place&)>;

  // Passes on the places of batches from a number on, as long as `take` asks for the next one.
  void each_place(uint64_t from, const TakePlace& take) const {
    const auto segments = files();
    size_t number = 0;
    while (number + 1 < segments.size() && segments[number + 1].first <= from) ++number;
    for (; number < segments.size(); ++number) {
      const std::string& path = segments[number].second;
      const Segment segment(path, number + 1 == segments.size());
      // dropped meanwhile: the caller finds a later batch, but no earlier one
      if (!segment.exists()) return;
      size_t begin = 0;
      if (met_ && met_->first == path && met_->second.head.sequence <= from &&
          segment.holds(met_->second)) {
        begin = met_->second.begin;
      }
      while (const auto place = segment.place_at(begin)) {
        begin = place->end();
        if (place->head.sequence < from) continue;
        if (!take(path, segment, *place)) return;
      }
    }
  }

  // Number of the first batch, and path, of every file; ascending.
  std::vector<std::pair<uint64_t, std::string>> files() const {
    constexpr size_t kDigits = 20;
    constexpr std::string_view kExtension = ".delta";
    std::vector<std::pair<uint64_t, std::string>> result;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
      const std::string name = entry.path().filename().string();
      if (name.size() != kDigits + kExtension.size() || name.substr(kDigits) != kExtension ||
          name.find_first_not_of("0123456789") != kDigits) {
        continue;
      }
      uint64_t first = 0;
      const auto read = std::from_chars(name.data(), name.data() + kDigits, first);
      if (read.ec != std::errc() || first > kLargest) {
        throw DamagedLog(entry.path().string() +
                         ": no batch has the number in its name: remove it");
      }
      result.emplace_back(first, entry.path().string());
    }
    if (error && error != std::errc::no_such_file_or_directory) {
      throw std::runtime_error(folder_ + ": " + error.message());
    }
    std::sort(result.begin(), result.end());
    return result;
  }

  std::string folder_;
  std::optional<std::pair<std::string, Place>> met_;  // the last batch that was read
};

}  // namespace dynemb::serving::detail
