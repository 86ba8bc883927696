#include "system_memory.h"

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <sstream>

namespace tfswap {
namespace {

constexpr uint64_t kUnknown = UINT64_MAX;

// The number after the first of `names` that begins a line, or kUnknown.
uint64_t Figure(const std::string& path, std::initializer_list<const char*> names) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    uint64_t figure;
    if (!(words >> name >> figure)) continue;
    if (std::find(names.begin(), names.end(), name) != names.end()) return figure;
  }
  return kUnknown;
}

// The only number in a file. kUnknown if there is no file, or for "max".
uint64_t Figure(const std::string& path) {
  std::ifstream file(path);
  uint64_t figure;
  return file >> figure ? figure : kUnknown;
}

uint64_t Left(uint64_t limit, uint64_t used, uint64_t cached) {
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  if (cached != kUnknown) used -= std::min(used, cached);
  return limit - std::min(limit, used);
}

uint64_t LeftInGroup(const std::string& folder, bool is_unified) {
  const std::string name = folder + (is_unified ? "/memory.max" : "/memory.limit_in_bytes");
  const std::string used = folder + (is_unified ? "/memory.current" : "/memory.usage_in_bytes");
  const uint64_t cached =
      Figure(folder + "/memory.stat", {is_unified ? "inactive_file" : "total_inactive_file"});
  return Left(Figure(name), Figure(used), cached);
}

}  // namespace

uint64_t AvailableMemory(const std::string& root) {
  uint64_t available = Figure(root + "/proc/meminfo", {"MemAvailable:"});
  if (available != kUnknown) available *= 1024;
  std::ifstream groups(root + "/proc/self/cgroup");
  // "0::/path" of version 2, "4:memory:/path" of version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers != "memory") continue;
    const std::string mounted = root + "/sys/fs/cgroup" + (controllers.empty() ? "" : "/memory");
    // Each group is within the one above. In a container the path may be the host's, and the top is the container's.
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      available = std::min(available, LeftInGroup(mounted + path, controllers.empty()));
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return available;
}

}  // namespace tfswap
