#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "platform.h"
#include "settings.h"

namespace emulated_gpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Of device memory, by first byte. Whole huge pages: few entries change when rights do.
std::mutex regions_mu;
struct Region {
  size_t bytes;
  uint64_t asked;
  int device;
};
std::map<uintptr_t, Region> regions;
int accesses = 0;

std::mutex pinned_mu;
std::map<uintptr_t, size_t> pinned;
uint64_t pinned_bytes = 0;

void ProtectLocked(int rights) {
  for (const auto& [begin, region] : regions) mprotect(reinterpret_cast<void*>(begin), region.bytes, rights);
}

bool IsLeftLocked(uint64_t bytes, int device) {
  const Settings& settings = Settings::Get();
  uint64_t taken = settings.others_bytes;
  for (const auto& [begin, region] : regions) taken += region.device == device ? region.asked : 0;
  return taken + bytes <= settings.memory_bytes;
}

// `taken` bytes of it count as the device's.
char* AddRegion(uint64_t bytes, uint64_t taken, int device) {
  const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const raw = mmap(nullptr, rounded + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t begin = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (begin > start) munmap(raw, begin - start);
  munmap(reinterpret_cast<void*>(begin + rounded), start + kHugePage - begin);
  void* const at = reinterpret_cast<void*>(begin);
  madvise(at, rounded, MADV_HUGEPAGE);
  std::lock_guard<std::mutex> lock(regions_mu);
  if (accesses > 0 || !Settings::Get().protects) mprotect(at, rounded, PROT_READ | PROT_WRITE);
  regions[begin] = {rounded, taken, device};
  return static_cast<char*>(at);
}

}  // namespace

Access::Access() {
  if (!Settings::Get().protects) return;
  std::lock_guard<std::mutex> lock(regions_mu);
  if (accesses++ == 0) ProtectLocked(PROT_READ | PROT_WRITE);
}

Access::~Access() {
  if (!Settings::Get().protects) return;
  std::lock_guard<std::mutex> lock(regions_mu);
  if (--accesses == 0) ProtectLocked(PROT_NONE);
}

int DeviceOf(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(regions_mu);
  const auto after = regions.upper_bound(at);
  if (after == regions.begin()) return -1;
  const auto& [begin, region] = *std::prev(after);
  return at < begin + region.bytes ? region.device : -1;
}

bool IsPinned(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(pinned_mu);
  const auto after = pinned.upper_bound(at);
  return after != pinned.begin() && at < std::prev(after)->first + std::prev(after)->second;
}

uint64_t PinnedBytes() {
  std::lock_guard<std::mutex> lock(pinned_mu);
  return pinned_bytes;
}

char* ReserveAddresses(int device, uint64_t bytes) { return AddRegion(bytes, 0, device); }

void Allocate(const SP_Device* device, uint64_t bytes, int64_t, SP_DeviceMemoryBase* memory) {
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = nullptr;
  memory->size = 0;
  {
    std::lock_guard<std::mutex> lock(regions_mu);
    if (!IsLeftLocked(bytes, device->ordinal)) return;
  }
  memory->opaque = AddRegion(bytes, bytes, device->ordinal);
  memory->size = memory->opaque == nullptr ? 0 : bytes;
}

void Deallocate(const SP_Device*, SP_DeviceMemoryBase* memory) {
  if (memory->opaque == nullptr) return;
  std::lock_guard<std::mutex> lock(regions_mu);
  const auto region = regions.find(reinterpret_cast<uintptr_t>(memory->opaque));
  RaceDetector::Get().Forget({region->first, region->first + region->second.bytes});
  munmap(memory->opaque, region->second.bytes);
  regions.erase(region);
}

void* AllocatePinned(const SP_Device*, uint64_t bytes) {
  void* at = nullptr;
  if (posix_memalign(&at, 4096, std::max<uint64_t>(bytes, 1)) != 0) return nullptr;
  std::lock_guard<std::mutex> lock(pinned_mu);
  pinned[reinterpret_cast<uintptr_t>(at)] = bytes;
  pinned_bytes += bytes;
  return at;
}

void DeallocatePinned(const SP_Device*, void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mu);
  const auto block = pinned.find(reinterpret_cast<uintptr_t>(memory));
  RaceDetector::Get().Forget({block->first, block->first + block->second});
  pinned_bytes -= block->second;
  pinned.erase(block);
  std::free(memory);
}

// TensorFlow leaves a part to the system: 255 MiB, and where there are 2 GiB or more the larger of 300 MiB and 6%
// (pluggable_device_factory.cc). What it takes should be what was asked for.
TF_Bool DeviceMemoryUsage(const SP_Device*, int64_t* free, int64_t* total) {
  const auto wanted = static_cast<int64_t>(Settings::Get().memory_bytes);
  *total = wanted + (int64_t{255} << 20);
  if (*total >= int64_t{1} << 31) {
    *total = std::max(static_cast<int64_t>(static_cast<double>(wanted) / 0.94), wanted + (int64_t{300} << 20));
  }
  *free = *total - static_cast<int64_t>(Settings::Get().others_bytes);
  return true;
}

}  // namespace emulated_gpu
