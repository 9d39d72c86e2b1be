#include "arguments/clocks.h"

#include "core/columns.h"
#include "core/index/bucket.h"
#include "core/policy/decisions.h"

namespace dynemb {

int64_t* row_clock_extra(const CallContext& call, const Tensor& row_clock, int64_t table_count) {
  check_tensor(call, "row_clock", row_clock, ScalarType::Long);
  check_length(call.op, "row_clock", row_clock, table_count + kRowClockExtra);
  return static_cast<int64_t*>(row_clock.data_ptr()) + table_count;
}

int64_t* row_clock_extra(const CallContext& call, const Tensor& row_clock) {
  check_tensor(call, "row_clock", row_clock, ScalarType::Long);
  DYNEMB_CHECK(row_clock.dim() == 1 && row_clock.size(0) > kRowClockExtra, "dynemb::", call.op,
               ": row_clock has ", row_clock.numel(), " elements, expected more than ",
               kRowClockExtra + 0);
  return static_cast<int64_t*>(row_clock.data_ptr()) + row_clock.size(0) - kRowClockExtra;
}

void check_row_clock(const char* op, const int64_t* words, int64_t count) {
  constexpr int64_t kMostSteps = INT64_MAX - (int64_t{1} << 32);
  DYNEMB_CHECK(words[count - kRowClockExtra + kRowClockUpdates] != kTablesReplaced, "dynemb::", op,
               ": set_optimizer(), add_table() or to() has replaced the tables since this "
               "lookup's forward, so its gradients would be lost: call backward before");
  for (int64_t i = 0; i < count; ++i) {
    DYNEMB_CHECK(words[i] >= 0 && words[i] <= kMostSteps, "dynemb::", op, ": row_clock[", i,
                 "] is ", words[i], ", expected a count from 0 to ", kMostSteps + 0);
  }
}

void check_step(const char* op, int64_t step) {
  constexpr int64_t kMostSteps = int64_t{1} << 62;
  DYNEMB_CHECK(step >= 0 && step <= kMostSteps, "dynemb::", op, ": clock[0] is ", step,
               ", expected a step from 0 to ", kMostSteps + 0);
}

const int64_t* seen_updates(const CallContext& call, const Tensor& updates) {
  check_tensor(call, "updates", updates, ScalarType::Long);
  check_length(call.op, "updates", updates, 1);
  return static_cast<const int64_t*>(updates.data_ptr());
}

void check_counts(const CallContext& call, const Tensor& buckets, const Tensor& tables,
                  const Tensor& row_clock) {
  check_tensor(call, "buckets", buckets, ScalarType::Long);
  check_size(call.op, "buckets", buckets, 1, kBucketWords);
  check_tensor(call, "tables", tables, ScalarType::Long);
  check_size(call.op, "tables", tables, 1, kTableColumns);
  check_tensor(call, "row_clock", row_clock, ScalarType::Long);
  DYNEMB_CHECK(row_clock.dim() == 1, "dynemb::", call.op, ": row_clock has ", row_clock.dim(),
               " dimensions, expected 1");
}

ClockTensors clock_tensors(const CallContext& call, const Tensor& buckets, const Tensor& tables,
                           const Tensor& row_clock, const std::optional<Tensor>& clock,
                           const std::optional<int64_t>& now) {
  check_counts(call, buckets, tables, row_clock);
  int64_t* extra = row_clock_extra(call, row_clock);
  if (!clock.has_value()) {
    DYNEMB_CHECK(!now.has_value(), "dynemb::", call.op, ": now is ", *now,
                 " without a clock, which would have it: give both");
    return {nullptr, extra};
  }
  check_tensor(call, "clock", *clock, ScalarType::Long);
  check_length(call.op, "clock", *clock, kClockHead + tables.size(0));
  return {static_cast<int64_t*>(clock->data_ptr()), extra};
}

}  // namespace dynemb
