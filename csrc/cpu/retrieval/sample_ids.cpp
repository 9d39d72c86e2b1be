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

constexpr int64_t kBlock = 64;  // samples with their lines in flight at once

struct SampleJob {
  const TableView* table;
  int64_t seed;
  int64_t* ids;
  char* by_rank;  // 1: no try of the sample has found an id
};

// Samples [begin, end), at most kBlock. All lines of a round of tries are fetched before the first
// is used.
void sample_block(const SampleJob& job, int64_t begin, int64_t end) {
  const TableView& table = *job.table;
  const int64_t slots = table.bucket_count * kBucketWidth;
  int64_t open[kBlock];
  int64_t slot[kBlock];
  int64_t count = end - begin;
  for (int64_t k = 0; k < count; ++k) open[k] = begin + k;
  for (int attempt = 0; attempt < kSampleTries && count > 0; ++attempt) {
    for (int64_t k = 0; k < count; ++k) {
      slot[k] = sampled_slot(job.seed, open[k], attempt, slots);
      prefetch_line_of(table.line(slot[k] / kBucketWidth));
    }
    int64_t left = 0;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t* line = table.line(slot[k] / kBucketWidth);
      const int64_t place = slot[k] % kBucketWidth;
      if (line[kBucketWidth + place] != 0) {
        job.ids[open[k]] = line[place];
      } else {
        open[left++] = open[k];
      }
    }
    count = left;
  }
  for (int64_t k = 0; k < count; ++k) job.by_rank[open[k]] = 1;
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
  const int64_t blocks = (samples + kBlock - 1) / kBlock;
  parallel_units(blocks, samples, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      sample_block(job, block * kBlock, std::min((block + 1) * kBlock, samples));
    }
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
