// Shared host code of insertion and erasure: a call's ids, the plan made for them on the device,
// and the dedupe table, in one piece of scratch memory.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "cuda/index/args.h"
#include "cuda/index/plan.cuh"

namespace dynemb::cuda {

class PlannedCall {
 public:
  // Checks the tensors. Add further parts of the op to `scratch`.
  PlannedCall(const Call& call, const IndexArgs& index, const Tensor& slabs,
              const Tensor& free_rows, const Tensor& ids, const Tensor& offsets,
              const std::vector<int64_t>& feature_tables,
              const std::vector<int64_t>& feature_policies = {})
      : features(feature_args(call, ids, offsets, feature_tables, index.table_count, nullptr)),
        blocks(std::max<int64_t>((features.count + kRankBlock - 1) / kRankBlock, 1)),
        tables_(index.table_count),
        feature_words_(feature_tables) {
    slabs_ = allocation_tensors(call, slabs, free_rows).slab_count;
    feature_words_.insert(feature_words_.end(), feature_policies.begin(), feature_policies.end());
    if (!feature_policies.empty() && table_has_two(feature_tables)) {
      order_begin_ = static_cast<int64_t>(feature_words_.size());
      for (const int64_t f : ordered_by_table(feature_tables)) feature_words_.push_back(f);
    }
    feature_part_ = scratch.add<int64_t>(static_cast<int64_t>(feature_words_.size()));
    plan_part_ = scratch.add<int64_t>(plan_words(features.features, tables_, slabs_));
    slot_part_ = scratch.add<int32_t>(dedupe_slots(features.count));
    count_part_ = scratch.add<int32_t>(blocks);
  }

  // Allocates the scratch memory and initializes plan and dedupe table.
  void start(const Call& call) {
    scratch.allocate(call);
    features.table = scratch.get(feature_part_);
    feature_policy = features.table + features.features;
    feature_order = order_begin_ > 0 ? features.table + order_begin_ : nullptr;
    plan = make_plan(scratch.get(plan_part_), features.features, tables_, slabs_);
    dedupe = empty_dedupe_table(call, scratch.get(slot_part_), dedupe_slots(features.count));
    block_counts = scratch.get(count_part_);
    upload_words(call, feature_words_, scratch.get(feature_part_));
    call.fill(plan.head, 0, plan_words(features.features, tables_, slabs_) * 8);
  }

  FeatureArgs features;
  const int64_t* feature_policy = nullptr;  // on the device, if policies were given
  // On the device, if policies were given and some table has several features: features by table,
  // those of one table in order.
  const int64_t* feature_order = nullptr;
  int64_t blocks;  // of kRankBlock ids
  Scratch scratch;
  Plan plan{};
  DedupeTable dedupe{};
  int32_t* block_counts = nullptr;

 private:
  static std::vector<int64_t> ordered_by_table(const std::vector<int64_t>& feature_tables) {
    std::vector<int64_t> order(feature_tables.size());
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return feature_tables[static_cast<size_t>(a)] < feature_tables[static_cast<size_t>(b)];
    });
    return order;
  }
  bool table_has_two(const std::vector<int64_t>& feature_tables) const {
    std::vector<bool> seen(static_cast<size_t>(tables_), false);
    for (const int64_t t : feature_tables) {
      if (seen[static_cast<size_t>(t)]) return true;
      seen[static_cast<size_t>(t)] = true;
    }
    return false;
  }

  int64_t order_begin_ = 0;  // in feature_words_
  int64_t tables_;
  int64_t slabs_ = 0;
  std::vector<int64_t> feature_words_;  // tables, then policies
  Scratch::Part<int64_t> feature_part_;
  Scratch::Part<int64_t> plan_part_;
  Scratch::Part<int32_t> slot_part_;
  Scratch::Part<int32_t> count_part_;
};

// Counts the distinct ids of a call that the plan is about, by block and by feature. `work` is that
// of is_first().
void count_distinct(const Call& call, const PlannedCall& planned, const int64_t* work);

}  // namespace dynemb::cuda
