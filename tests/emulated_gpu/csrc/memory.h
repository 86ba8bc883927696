// The devices' memory, and pinned memory of the host.
//
// Device memory can be touched only while an Access exists, in kernels and copies: at other times host code that reads or
// writes it faults. The right is the process's, not a thread's: host code that runs while a kernel does is not caught.

#ifndef TESTS_EMULATED_GPU_CSRC_MEMORY_H_
#define TESTS_EMULATED_GPU_CSRC_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "race_detector.h"

namespace emulated_gpu {

class Access {
 public:
  Access();
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};

// Addresses that are a device's. The caller counts what is in use of them. Null where there are none.
char* ReserveAddresses(int device, uint64_t bytes);

// The device whose memory that is; -1 for the host's.
int DeviceOf(const void* address);
inline bool IsOnDevice(const void* address) { return DeviceOf(address) >= 0; }
// Whether pages are locked: the pageable are copied at another rate.
bool IsPinned(const void* address);
uint64_t PinnedBytes();

inline Range RangeOf(const void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  return {begin, begin + bytes};
}

// What memory holds that was freed: not a number, in each floating-point type.
constexpr int kPoison = 0xff;

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_MEMORY_H_
