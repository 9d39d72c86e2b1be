// Knowledge of the host about the policies of a group (core/policy/decisions.h): bounds of the ids
// of tables, and counter tables.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/policy/decisions.h"

namespace dynemb::cuda {

class PolicyBounds {
 public:
  PolicyBounds() = default;  // no table has a policy
  // `rows`: the values of the policy tensor.
  PolicyBounds(std::vector<int64_t> rows, size_t tables) : rows_(std::move(rows)) {
    counts_.assign(tables, false);
    for (size_t p = 0; p < rows_.size() / kPolicyColumns; ++p) {
      const int64_t counters = counter_table(static_cast<int64_t>(p));
      if (counters >= 0) counts_[static_cast<size_t>(counters)] = true;
    }
  }

  // The counter table of a policy; -1: none.
  int64_t counter_table(int64_t policy) const {
    const int64_t* row = rows_.data() + policy * kPolicyColumns;
    return row[kPolicyAdmission] == kAdmitFrequent ? row[kPolicyCounterTable] : -1;
  }
  // Whether it is a counter table: its ids take no rows.
  bool counts(size_t table) const { return !counts_.empty() && counts_[table]; }
  // Whether calls leave tombstones in the table.
  bool replaces(size_t table) const {
    return counts(table) || (!rows_.empty() && row(table)[kPolicyOnFull] == kFullEvict);
  }
  // Whether the table has a capacity of its own and replaces ids beyond it.
  bool is_bounded(size_t table) const {
    return !rows_.empty() && !counts(table) && row(table)[kPolicyOnFull] == kFullEvict &&
           row(table)[kPolicyCapacity] > 0;
  }
  // Upper bound of the ids of a table of `size` ids after `incoming` more.
  int64_t size_bound(size_t table, int64_t size, int64_t incoming) const {
    int64_t most = size + incoming;
    if (rows_.empty() || counts(table)) return most;
    const int64_t* policy = row(table);
    if (policy[kPolicyCapacity] > 0 && policy[kPolicyOnFull] != kFullGrow) {
      most = std::min(most, policy[kPolicyCapacity]);
    }
    if (policy[kPolicyBudget] > 0) {
      const int64_t ids = policy[kPolicyBudget] / policy[kPolicyIdBytes];
      most = std::min(most, std::max(ids, policy[kPolicyReservedIds]));
    }
    return std::max(most, size);
  }
  // The tables that a call changes.
  std::vector<bool> touched(size_t tables, const std::vector<int64_t>& feature_tables,
                            const std::vector<int64_t>& feature_policies) const {
    std::vector<bool> result(tables, false);
    for (const int64_t t : feature_tables) result[static_cast<size_t>(t)] = true;
    if (rows_.empty()) return result;
    for (const int64_t p : feature_policies) {
      const int64_t counters = counter_table(p);
      if (counters >= 0) result[static_cast<size_t>(counters)] = true;
    }
    return result;
  }

 private:
  const int64_t* row(size_t table) const { return rows_.data() + table * kPolicyColumns; }

  std::vector<int64_t> rows_;
  std::vector<bool> counts_;  // by table
};

}  // namespace dynemb::cuda
