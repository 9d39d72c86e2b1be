// Live tables for ops of the CPU.
#pragma once

#include <vector>

#include "arguments/serving.h"
#include "cpu/rows/args.h"
#include "cpu/serving/live_table.h"

namespace dynemb::cpu {

LiveTable live_table(const LiveTensors& live, int64_t table);

// The part of a table that initial_row.h needs: initializers of missing ids. It has no rows.
TableRows live_initial_rows(const LiveTensors& live, int64_t table, const double* init_data);

}  // namespace dynemb::cpu
