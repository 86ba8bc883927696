// What memory there is for this process to take.
//
// Linux gives out more than it has, and ends a process when it is asked to keep its word: who
// means to use what he asks for has to look first.
//
// Swap space does not count: what is swapped out of a step would only be swapped out again.
//
// Not handled: what others take between the look and the use.

#ifndef TFSWAP_OPS_CSRC_CORE_SYSTEM_MEMORY_H_
#define TFSWAP_OPS_CSRC_CORE_SYSTEM_MEMORY_H_

#include <cstdint>
#include <string>

namespace tfswap {

// Bytes that can be had without anybody having to go: of the machine, and of each control group that this process is in
// (a container's, a batch job's), in which what caches files counts as free. UINT64_MAX where nothing says.
// `root` has the files of /proc and /sys, so that a test can be another machine.
uint64_t AvailableMemory(const std::string& root = "");

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_SYSTEM_MEMORY_H_
