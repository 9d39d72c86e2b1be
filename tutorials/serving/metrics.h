// Metrics of a server in the text format of Prometheus; metrics.py has those of the Python server,
// of the same names.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>

#include "serving/json.h"

// Counts and latencies of requests, by what they call: infer, run or rows.
class Metrics {
 public:
  void answered(const std::string& call, int status, double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++requests_[{call, status}];
    Latencies& latencies = latencies_[call];
    latencies.sum += seconds;
    ++latencies.counts[static_cast<size_t>(
        std::lower_bound(kBuckets.begin(), kBuckets.end(), seconds) - kBuckets.begin())];
  }

  void print(std::ostream& out) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    head(out, "dynemb_requests_total", "counter", "Answered requests");
    for (const auto& [labels, count] : requests_) {
      out << "dynemb_requests_total{call=\"" << labels.first << "\",status=\"" << labels.second
          << "\"} " << count << '\n';
    }
    head(out, "dynemb_request_seconds", "histogram", "Time from a request to its answer");
    for (const auto& [call, latencies] : latencies_) {
      const std::string label = "{call=\"" + call + '"';
      uint64_t count = 0;
      for (size_t bucket = 0; bucket < latencies.counts.size(); ++bucket) {
        count += latencies.counts[bucket];
        out << "dynemb_request_seconds_bucket" << label << ",le=\"";
        bucket < kBuckets.size() ? out << kBuckets[bucket] : out << "+Inf";
        out << "\"} " << count << '\n';
      }
      out << "dynemb_request_seconds_sum" << label << "} " << latencies.sum << '\n';
      out << "dynemb_request_seconds_count" << label << "} " << count << '\n';
    }
  }

  // The lines before a metric.
  static void head(std::ostream& out, const std::string& name, const std::string& kind,
                   const std::string& help) {
    out << "# HELP " << name << ' ' << help << "\n# TYPE " << name << ' ' << kind << '\n';
  }

  // A metric with one value for each table.
  static void by_table(std::ostream& out, const std::string& name, const std::string& kind,
                       const std::string& help, const std::map<std::string, int64_t>& values) {
    head(out, name, kind, help);
    for (const auto& [table, value] : values) {  // escapes of JSON are those of labels, too
      out << name << "{table=" << dynemb::serving::quoted(table) << "} " << value << '\n';
    }
  }

 private:
  static constexpr std::array<double, 13> kBuckets = {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
                                                      0.1,    0.2,   0.5,   1.0,   2.0,  5.0};
  struct Latencies {
    double sum = 0;
    std::array<uint64_t, kBuckets.size() + 1> counts{};
  };

  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, uint64_t> requests_;
  std::map<std::string, Latencies> latencies_;
};
