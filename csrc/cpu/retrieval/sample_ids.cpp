// sample_ids: live ids of a table, each with the same probability, with replacement.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "arguments/retrieval.h"
#include "core/retrieval/sampling.h"
#include "cpu/index/args.h"
#include "cpu/runtime/prefetch.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kInFlight = 64;  // tries with their lines in flight at once
constexpr int64_t kRange = 4096;   // samples of a thread, at least

struct SampleJob {
  const TableView* table;
  int64_t seed;
  int64_t* ids;
  char* by_rank;  // 1: no try of the sample has found an id
};

struct Tries {
  int64_t sample[kInFlight];
  int64_t slot[kInFlight];
  int attempt[kInFlight];
};

// Samples [begin, end). The lines of all tries have been fetched before the first is used. A sample
// that finds an empty slot tries again in the same place, others make room for the next sample: so
// as many lines as before are in flight.
void sample_range(const SampleJob& job, int64_t begin, int64_t end) {
  // copies: ids that are written could be the words of the job
  const int64_t* const lines = job.table->lines;
  const int64_t slots = job.table->bucket_count * kBucketWidth;
  const int64_t seed = job.seed;
  int64_t* const ids = job.ids;
  Tries tries;
  const auto line_of_slot = [&](int64_t slot) {
    return lines + slot / kBucketWidth * kBucketWords;
  };
  const auto start = [&](int64_t k, int64_t sample, int attempt) {
    const int64_t slot = sampled_slot(seed, sample, attempt, slots);
    prefetch_line_of(line_of_slot(slot));
    tries.sample[k] = sample;
    tries.attempt[k] = attempt;
    tries.slot[k] = slot;
  };
  // Writes the id of the slot; false if the slot is empty.
  const auto take = [&](int64_t k) {
    const int64_t* line = line_of_slot(tries.slot[k]);
    const int64_t place = tries.slot[k] % kBucketWidth;
    ids[tries.sample[k]] = line[place];
    return line[kBucketWidth + place] != 0;
  };
  int64_t next = begin, count = 0, k = 0;
  while (count < kInFlight && next < end) start(count++, next++, 0);
  while (next < end) {
    const bool found = take(k);
    // no branch, which would be mispredicted at every third try
    const bool again = !found & (tries.attempt[k] + 1 < kSampleTries);
    if (!found & !again) job.by_rank[tries.sample[k]] = 1;
    start(k, again ? tries.sample[k] : next, again ? tries.attempt[k] + 1 : 0);
    next += again ? 0 : 1;
    k = k + 1 == kInFlight ? 0 : k + 1;
  }
  while (count > 0) {
    int64_t left = 0;  // samples that try again
    for (k = 0; k < count; ++k) {
      if (take(k)) continue;
      if (tries.attempt[k] + 1 < kSampleTries) {
        start(left++, tries.sample[k], tries.attempt[k] + 1);
      } else {
        job.by_rank[tries.sample[k]] = 1;
      }
    }
    count = left;
  }
}

std::vector<int64_t> live_ids(const TableView& table) {
  std::vector<int64_t> ids;
  for (int64_t bucket = 0; bucket < table.bucket_count; ++bucket) {
    const int64_t* line = table.line(bucket);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      if (line[kBucketWidth + slot] != 0) ids.push_back(line[slot]);
    }
  }
  return ids;
}

Tensor sample_ids(Tensor buckets, Tensor tables, Tensor meta, int64_t table, Tensor seed,
                  int64_t samples) {
  const char* op = "sample_ids";
  const IndexArgs index = index_args(op, buckets, nullptr, tables, meta);
  check_table_number(op, table, index.table_count);
  const int64_t* word = sample_seed(op, seed, samples);
  Tensor result = empty_cpu({samples}, ScalarType::Long);
  if (samples == 0) return result;
  DYNEMB_CHECK(index.table_row(table)[kTableSize] > 0, "dynemb::", op, ": table ", table,
               " is empty, but samples need an id: train it first");
  const TableView view = index.table(table);
  std::vector<char> by_rank(static_cast<size_t>(samples), 0);
  const SampleJob job{&view, *word, static_cast<int64_t*>(result.data_ptr()), by_rank.data()};
  parallel_units((samples + kRange - 1) / kRange, samples, [&](int64_t begin, int64_t end) {
    sample_range(job, begin * kRange, std::min(end * kRange, samples));
  });
  if (std::find(by_rank.begin(), by_rank.end(), 1) == by_rank.end()) return result;
  const std::vector<int64_t> live = live_ids(view);
  DYNEMB_CHECK(!live.empty(), "dynemb::", op, ": tables[", table, ", SIZE] is ",
               index.table_row(table)[kTableSize], ", but buckets has none of its ids");
  for (int64_t i = 0; i < samples; ++i) {
    if (by_rank[i] == 0) continue;
    job.ids[i] = live[sampled_rank(job.seed, i, static_cast<int64_t>(live.size()))];
  }
  return result;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("sample_ids", TORCH_BOX(&dynemb::cpu::sample_ids));
}
