// Reader of the commits of a delta log: those that all ranks have written, in order, without gaps;
// see torch_dynemb/delta_log/reader.py.

#pragma once

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "serving/delta_commit.h"
#include "serving/delta_segments.h"

namespace dynemb::serving {

// A delta log does not continue at its reader's position: it was dropped up to a later commit, or
// rolled back, or begins with another checkpoint. Applied commits stay in service.
class NewBaseNeeded : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Position of a package in a delta log. For one thread; any may call sequence().
class LogReader {
 public:
  // `folder`: of the log, which may not exist yet. `base`: of the manifest of the package.
  LogReader(std::string folder, const Json& base)
      : folder_(std::move(folder)), base_(base.at("uuid").text()) {
    if (base.at("sequence").is_null()) return;
    sequence_ = base.at("sequence").integer();
    chains_[static_cast<size_t>(base.at("rank").integer())] =
        static_cast<uint32_t>(base.at("chain").integer());
  }

  // Number of the last commit that was taken, or that the package was made of; none: no commit has
  // been published since its base.
  std::optional<int64_t> sequence() const {
    const int64_t sequence = sequence_;
    return sequence < 0 ? std::nullopt : std::optional(sequence);
  }

  // The next commit; none: not all ranks have written it. Throws NewBaseNeeded, DamagedLog, and
  // std::runtime_error if the disk fails.
  std::optional<Commit> next() {
    if (ranks_.empty()) find_ranks();
    if (ranks_.empty()) return {};
    if (sequence_ < 0) start();
    if (sequence_ < 0) return {};
    std::vector<detail::Batch> batches;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const size_t before = batches.size();
      ranks_[rank].each(static_cast<uint64_t>(sequence_ + 1), [&](detail::Batch batch) {
        batches.push_back(std::move(batch));
        return false;
      });
      if (batches.size() == before) {
        check_end();
        return {};
      }
      check(rank, batches.back().head);
    }
    found_.clear();
    for (size_t rank = 0; rank < batches.size(); ++rank) found_[rank] = batches[rank].chain;
    return detail::commit_of(batches);
  }

  // Confirms that the commit returned by next() was taken.
  void taken() {
    chains_ = std::move(found_);
    ++sequence_;
  }

 private:
  // The directories of all ranks, by rank: rRRR-of-NNN.
  void find_ranks() {
    constexpr size_t kMostRanks = size_t{1} << 16;
    std::set<size_t> counts;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
      unsigned rank = 0, count = 0;
      int length = 0;
      const std::string name = entry.path().filename().string();
      if (std::sscanf(name.c_str(), "r%u-of-%u%n", &rank, &count, &length) == 2 &&
          static_cast<size_t>(length) == name.size()) {
        counts.insert(count);
      }
    }
    if (error && error != std::errc::no_such_file_or_directory) {
      throw std::runtime_error(folder_ + ": " + error.message());
    }
    if (!counts.empty() && *counts.rbegin() > kMostRanks) {
      throw std::runtime_error("delta log: " + folder_ + " has a folder of a log of " +
                               std::to_string(*counts.rbegin()) +
                               " ranks, and there are at most 65536: remove it");
    }
    if (counts.size() > 1) {
      throw std::runtime_error("delta log: " + folder_ +
                               " has logs of different numbers of ranks: publish to a new "
                               "directory when the number of ranks changes");
    }
    std::vector<std::string> folders;
    for (size_t rank = 0; !counts.empty() && rank < *counts.begin(); ++rank) {
      char name[64];
      std::snprintf(name, sizeof name, "/r%03zu-of-%03zu", rank, *counts.begin());
      folders.push_back(folder_ + name);
    }
    const auto there = [](const std::string& path) { return std::filesystem::is_directory(path); };
    if (!std::all_of(folders.begin(), folders.end(), there)) return;
    for (std::string& folder : folders) ranks_.emplace_back(std::move(folder));
  }

  // Finds the commit with the content of the base, unless the log is empty.
  void start() {
    std::string seen;
    ranks_[0].each(0, [&](const detail::Batch& batch) {
      if (batch.head.base == base_) {
        sequence_ = static_cast<int64_t>(batch.head.base_sequence);
        return false;
      }
      if (seen.find(batch.head.base) == std::string::npos) {
        seen += (seen.empty() ? "" : ", ") + batch.head.base;
      }
      return true;
    });
    if (sequence_ < 0 && !seen.empty()) {
      throw NewBaseNeeded("delta log: it has changes since the checkpoints " + seen +
                          ", and not since " + base_ +
                          ", the base of the package: export a package of one of these");
    }
  }

  // Whether a batch is the next one of a rank.
  void check(size_t rank, const detail::BatchHead& head) const {
    const std::string number = std::to_string(head.sequence);
    const std::string last = std::to_string(sequence_);
    if (head.rank != rank || head.ranks != ranks_.size()) {
      throw NewBaseNeeded("delta log: rank " + std::to_string(rank) + " of " +
                          std::to_string(ranks_.size()) + " has a batch that rank " +
                          std::to_string(head.rank) + " of " + std::to_string(head.ranks) +
                          " has written: files of different logs were mixed");
    }
    if (head.sequence != static_cast<uint64_t>(sequence_ + 1)) {
      throw NewBaseNeeded("delta log: commit " + last +
                          " was read last, but the next one that is there is " + number +
                          ": those between were dropped or are lost. Export a new package");
    }
    const auto chain = chains_.find(rank);
    if (chain != chains_.end() && head.previous != chain->second) {
      throw NewBaseNeeded("delta log: commit " + number + " does not follow commit " + last +
                          " as it was read: the log was rolled back and went on otherwise, or it "
                          "is another log. Export a new package");
    }
  }

  // If no batch follows the last one read, that must still exist: otherwise the log was rolled
  // back.
  void check_end() {
    if (sequence_ == 0) return;  // nothing was read, and a base without commits cannot be checked
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const auto there = ranks_[rank].chain_after(static_cast<uint64_t>(sequence_.load()));
      const auto chain = chains_.find(rank);
      if (there && (chain == chains_.end() || chain->second == *there)) continue;
      throw NewBaseNeeded("delta log: commit " + std::to_string(sequence_) +
                          " was read last, and it is there no longer, or is another one: the log "
                          "was rolled back. Export a new package");
    }
  }

  std::string folder_, base_;
  std::atomic<int64_t> sequence_{-1};
  std::map<size_t, uint32_t> chains_;  // after the last commit, by rank, as far as known
  std::map<size_t, uint32_t> found_;   // after the commit returned by next()
  std::vector<detail::RankLog> ranks_;
};

}  // namespace dynemb::serving
