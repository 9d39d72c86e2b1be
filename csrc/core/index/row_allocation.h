// Commitment of a slab's rows: available memory is checked in steps, not at every row.
#pragma once

#include "core/host_device.h"

namespace dynemb {

constexpr int64_t kCommitStepBytes = int64_t{64} << 20;

// Rows to commit if `needed` exceeds the committed rows.
DYNEMB_HD int64_t commit_target(int64_t needed, int64_t row_bytes, int64_t max_rows) {
  const int64_t step = kCommitStepBytes / (row_bytes > 1 ? row_bytes : 1);
  const int64_t target = needed + step;
  return target < max_rows ? target : max_rows;
}

// Committed rows after `next_row` .. `end` - 1 have been given out one after another.
DYNEMB_HD int64_t committed_after(int64_t committed, int64_t next_row, int64_t end,
                                  int64_t row_bytes, int64_t max_rows) {
  while (committed < end) {
    const int64_t row = next_row > committed ? next_row : committed;
    committed = commit_target(row + 1, row_bytes, max_rows);
  }
  return committed;
}

}  // namespace dynemb
