// Physical memory of the machine that can still be taken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace dynemb {

// A number in a one-line file, or -1 ("max" or no such file).
inline int64_t read_number(const char* path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

inline int64_t control_group_left() {
  const struct {
    const char* limit;
    const char* usage;
  } groups[] = {
      {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes",
       "/sys/fs/cgroup/memory/memory.usage_in_bytes"},
  };
  for (const auto& group : groups) {
    const int64_t limit = read_number(group.limit);
    const int64_t usage = read_number(group.usage);
    if (limit >= 0 && usage >= 0) return std::max<int64_t>(limit - usage, 0);
  }
  return std::numeric_limits<int64_t>::max();
}

// Physical memory that can still be taken without swapping, in bytes: the smaller of MemAvailable
// and the remainder of the control group's limit.
inline int64_t available_memory() {
  int64_t available = std::numeric_limits<int64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    if (line.compare(0, 13, "MemAvailable:") == 0) {
      std::istringstream(line.substr(13)) >> available;
      available *= 1024;
      break;
    }
  }
  return std::min(available, control_group_left());
}

}  // namespace dynemb
