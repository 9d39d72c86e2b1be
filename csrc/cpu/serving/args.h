// Live tables as ops of the CPU see them.
#pragma once

#include <vector>

#include "arguments/serving.h"
#include "cpu/rows/args.h"
#include "cpu/serving/live_table.h"

namespace dynemb::cpu {

LiveTable live_table(const LiveTensors& live, int64_t table);

// What initial_row.h takes of a table: how the rows of ids begin that are not there. It has none.
TableRows live_initial_rows(const LiveTensors& live, int64_t table, const double* init_data);

}  // namespace dynemb::cpu
