#include "cpu/index/policy_view.h"

namespace dynemb::cpu {
namespace {

// Of a time, a step or a count: sums of two do not overflow.
constexpr int64_t kMostNumber = int64_t{1} << 62;

void check_policy(const IndexView& index, const int64_t* policy, int64_t number, int64_t cells) {
  const auto check = [&](bool holds, const char* what) {
    STD_TORCH_CHECK(holds, "dynemb::", index.op, ": policy ", number, ": ", what);
  };
  const int64_t words = index.scores == nullptr ? 0 : index.score_words;
  for (int word = kPolicyTimestampWord; word <= kPolicyEvictionWord; ++word) {
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
  check(policy[kPolicyTtl] >= 0, "ttl is negative");  // any other: what never expires is in range
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

PolicyView policy_view(const IndexView& index, const FeatureIds& features, const Tensor& policy,
                       const Tensor& clock, const Tensor& sketch,
                       const std::vector<int64_t>& feature_policies) {
  check_tensor(index.op, "clock", clock, ScalarType::Long);
  check_length(index.op, "clock", clock, kClockHead + index.table_count);
  const int64_t step = static_cast<const int64_t*>(clock.data_ptr())[kClockStep];
  STD_TORCH_CHECK(step >= 0 && step <= kMostNumber, "dynemb::", index.op, ": clock[0] is ", step,
                  ", expected a step from 0 to ", kMostNumber + 0);
  check_tensor(index.op, "policy", policy, ScalarType::Long);
  check_size(index.op, "policy", policy, 1, kPolicyColumns);
  check_tensor(index.op, "sketch", sketch, ScalarType::Int);
  STD_TORCH_CHECK(sketch.dim() == 1, "dynemb::", index.op, ": sketch has ", sketch.dim(),
                  " dimensions, expected 1");
  for (const int64_t t : features.table) {
    STD_TORCH_CHECK(index.meta_row(t)[kMetaUnscored] == 0, "dynemb::", index.op, ": meta[", t,
                    ", UNSCORED] is ", index.meta_row(t)[kMetaUnscored],
                    ": counted ids are in that table, which have neither rows nor scores");
  }
  PolicyView view;
  view.clock = static_cast<const int64_t*>(clock.data_ptr());
  const int64_t count = policy.size(0);
  STD_TORCH_CHECK(count == 0 || count >= index.table_count, "dynemb::", index.op, ": policy has ",
                  count, " rows, expected none or at least one per table, ", index.table_count);
  const size_t expected = count == 0 ? 0 : features.table.size();
  STD_TORCH_CHECK(feature_policies.size() == expected, "dynemb::", index.op,
                  ": feature_policies has ", feature_policies.size(), " elements, expected ",
                  expected);
  if (count == 0) return view;
  view.rows = static_cast<const int64_t*>(policy.data_ptr());
  view.of_feature = feature_policies;
  for (int64_t p = 0; p < count; ++p) check_policy(index, view.row(p), p, sketch.numel());
  for (size_t f = 0; f < feature_policies.size(); ++f) {
    STD_TORCH_CHECK(feature_policies[f] >= 0 && feature_policies[f] < count, "dynemb::", index.op,
                    ": feature_policies[", f, "] is ", feature_policies[f], ", expected 0 to ",
                    count - 1);
  }
  return view;
}

}  // namespace dynemb::cpu
