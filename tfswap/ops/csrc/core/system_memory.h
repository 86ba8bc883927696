// The memory that is available to this process.
//
// Linux grants more memory than it has, and kills a process when that memory is used. So the available memory is read
// before large allocations.
//
// The system's swap space does not count: the system would copy a swapped tensor to disk.
//
// Not handled: memory that other processes take between the reading and the use.

#ifndef TFSWAP_OPS_CSRC_CORE_SYSTEM_MEMORY_H_
#define TFSWAP_OPS_CSRC_CORE_SYSTEM_MEMORY_H_

#include <cstdint>
#include <string>

namespace tfswap {

// The available bytes: the least of the machine's and of those of each control group of this process (a container's, a
// batch job's). Caches of files count as free. UINT64_MAX if unknown. `root` is the folder of /proc and /sys, which a
// test can replace.
uint64_t AvailableMemory(const std::string& root = "");

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_SYSTEM_MEMORY_H_
