#include "cpu/index/policy_args.h"

#include "arguments/clocks.h"
#include "arguments/policies.h"
#include "core/policy/waiting.h"

namespace dynemb::cpu {
namespace {

// Upper bound of a time, a step or a count: sums of two do not overflow.
constexpr int64_t kMostNumber = int64_t{1} << 62;

void check_policy(const IndexArgs& index, const int64_t* policy, int64_t number, int64_t cells) {
  const auto check = [&](bool holds, const char* what) {
    DYNEMB_CHECK(holds, "dynemb::", index.op, ": policy ", number, ": ", what);
  };
  const int64_t words = index.scores == nullptr ? 0 : index.score_words;
  constexpr int kWords[] = {kPolicyTimestampWord, kPolicyFrequencyWord, kPolicyCustomWord,
                            kPolicyExpiryWord,    kPolicyEvictionWord,  kPolicyDecayedWord,
                            kPolicyCombinedWord};
  for (const int word : kWords) {
    check(policy[word] >= 0 && (policy[word] == 0 || policy[word] < words),
          "a score word is not one that the index keeps");
  }
  const int64_t admission = policy[kPolicyAdmission];
  check(admission >= kAdmitAll && admission <= kAdmitNone, "admission is unknown");
  const int64_t counters = policy[kPolicyCounterTable];
  check(admission != kAdmitFrequent || (counters >= 0 && counters < index.table_count),
        "its counter table does not exist");
  check(admission != kAdmitFrequentSketch ||
            (policy[kPolicySketchBegin] >= 0 && policy[kPolicySketchWidth] > 0 &&
             policy[kPolicySketchBegin] <= cells &&
             policy[kPolicySketchWidth] <= (cells - policy[kPolicySketchBegin]) / kSketchRows),
        "its cells lie outside the sketch");
  check(policy[kPolicyOnFull] >= kFullGrow && policy[kPolicyOnFull] <= kFullError,
        "on_full is unknown");
  check(policy[kPolicyOnFull] != kFullEvict || words > 0, "eviction needs scores");
  check(policy[kPolicyBudget] == 0 || policy[kPolicyIdBytes] > 0, "an id takes no bytes");
  check(policy[kPolicyTtl] >= 0, "ttl is negative");  // any other value: kMostNumber means never
  const struct {
    PolicyColumn column;
    const char* what;
  } counts[] = {
      {kPolicyCapacity, "capacity is negative or too large"},
      {kPolicyProtectedSteps, "protected_steps is negative or too large"},
      {kPolicyBudget, "budget is negative or too large"},
      {kPolicyIdBytes, "an id takes a negative number of bytes, or too many"},
      {kPolicyReservedIds, "reserved ids are negative or too many"},
  };
  for (const auto& of : counts) {
    check(policy[of.column] >= 0 && policy[of.column] <= kMostNumber, of.what);
  }
}

}  // namespace

PolicyArgs policy_args(const IndexArgs& index, const FeatureArgs& features, const Tensor& policy,
                       const Tensor& clock, const Tensor& sketch,
                       const std::vector<int64_t>& feature_policies) {
  const PolicyTensors given = policy_tensors(index.op, index.table_count, policy, clock, sketch,
                                             features.table.size(), feature_policies);
  check_step(index.op, given.clock[kClockStep]);
  for (const int64_t t : features.table) {
    DYNEMB_CHECK(index.meta_row(t)[kMetaUnscored] == 0, "dynemb::", index.op, ": meta[", t,
                 ", UNSCORED] is ", index.meta_row(t)[kMetaUnscored],
                 ": counted ids are in that table, which have neither rows nor scores");
  }
  PolicyArgs policies{given.rows, given.clock, feature_policies, {}};
  if (policies.empty()) return policies;
  for (int64_t p = 0; p < given.count; ++p) {
    const int64_t* row = policies.row(p);
    check_policy(index, row, p, given.cells);
    const int64_t time = waiting_time(row, given.clock);
    policies.waiting.push_back({time, least_admitted(row, time, row[kPolicyThreshold])});
  }
  return policies;
}

}  // namespace dynemb::cpu
