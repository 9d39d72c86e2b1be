// insert_and_read: find_or_insert_ and embedding_forward in one call, for eager training.
//
// A call with few ids takes as long as its arguments take to convert. The tensors of a group are 18
// of them, and the same in every call: bind_lookup stores them, and returns a number for them.
#include <torch/csrc/stable/library.h>

#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/index/insert.h"
#include "cpu/rows/args.h"
#include "cpu/rows/lookup.h"

namespace dynemb::cpu {
namespace {

struct BoundTensors {
  Tensor buckets, scores, tables, slabs, free_rows, sketch, evicted, meta, policy, clock;
  std::vector<Tensor> weights, generations;
  Tensor row_clock, init_data;
};

// Numbers are not given out twice, so that one of freed tables leads to no others.
class BoundLookups {
 public:
  int64_t add(BoundTensors tensors) {
    const std::lock_guard<std::mutex> lock(mutex_);
    bound_.emplace(++last_, std::make_shared<const BoundTensors>(std::move(tensors)));
    return last_;
  }
  std::shared_ptr<const BoundTensors> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = bound_.find(number);
    return found == bound_.end() ? nullptr : found->second;
  }
  void remove(int64_t number) {
    std::shared_ptr<const BoundTensors> removed;  // freed without the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = bound_.find(number);
    if (found == bound_.end()) return;
    removed = std::move(found->second);
    bound_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const BoundTensors>> bound_;
  int64_t last_ = 0;
};

// Never destroyed: tables may be freed at the end of the process.
BoundLookups& bound_lookups() {
  static auto* const bound = new BoundLookups;
  return *bound;
}

int64_t bind_lookup(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows,
                    Tensor sketch, Tensor evicted, Tensor meta, Tensor policy, Tensor clock,
                    std::vector<Tensor> weights, std::vector<Tensor> generations, Tensor row_clock,
                    Tensor init_data) {
  const char* op = "bind_lookup";
  group_rows(op, weights, generations, meta, init_data);
  update_count(op, row_clock, meta);
  const Tensor none = empty_cpu({0}, ScalarType::Long);
  const bool has_policies = policy.dim() == 2 && policy.size(0) > 0;
  const auto policies = has_policies ? std::vector<int64_t>{0} : std::vector<int64_t>{};
  // for its checks: it has no ids
  insert_handles(op, buckets, scores, tables, slabs, free_rows, sketch, evicted, meta, policy,
                 clock, none, none, std::nullopt, {0}, policies);
  return bound_lookups().add({buckets, scores, tables, slabs, free_rows, sketch, evicted, meta,
                              policy, clock, weights, generations, row_clock, init_data});
}

void release_lookup(int64_t lookup) { bound_lookups().remove(lookup); }

std::tuple<Tensor, Tensor, Tensor> insert_and_read(int64_t lookup, Tensor ids, Tensor offsets,
                                                   std::optional<Tensor> per_sample_weights,
                                                   std::vector<int64_t> feature_tables,
                                                   std::vector<int64_t> feature_dims,
                                                   int64_t pooling,
                                                   std::vector<int64_t> feature_policies) {
  const char* op = "insert_and_read";
  const std::shared_ptr<const BoundTensors> bound = bound_lookups().find(lookup);
  DYNEMB_CHECK(bound != nullptr, "dynemb::", op, ": lookup is ", lookup,
               ", which bind_lookup has not returned, or which has been released");
  const BoundTensors& group = *bound;
  // before ids are inserted, which stay after an error
  const auto rows = group_rows(op, group.weights, group.generations, group.meta, group.init_data);
  LookupArgs call = lookup_before_handles(op, rows, ids, offsets, per_sample_weights,
                                          feature_tables, feature_dims, pooling);
  const Tensor updates = update_count(op, group.row_clock, group.meta);
  const Tensor handles =
      insert_handles(op, group.buckets, group.scores, group.tables, group.slabs, group.free_rows,
                     group.sketch, group.evicted, group.meta, group.policy, group.clock, ids,
                     offsets, std::nullopt, feature_tables, feature_policies);
  set_handles(op, rows, handles, &call);
  return {run_lookup(call, rows), handles, updates};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("bind_lookup", TORCH_BOX(&dynemb::cpu::bind_lookup));
  m.impl("insert_and_read", TORCH_BOX(&dynemb::cpu::insert_and_read));
}
// Numbers name no device.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CompositeExplicitAutograd, m) {
  m.impl("release_lookup", TORCH_BOX(&dynemb::cpu::release_lookup));
}
