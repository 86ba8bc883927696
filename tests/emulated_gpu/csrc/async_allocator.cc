#include "async_allocator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "absl/strings/str_cat.h"
#include "memory.h"
#include "settings.h"

namespace emulated_gpu {
namespace {

constexpr uint64_t kAddresses = 16;   // times the device's memory
constexpr uint64_t kAlignment = 512;  // the driver's

class AsyncAllocator : public tensorflow::Allocator {
 public:
  explicit AsyncAllocator(int device)
      : name_(absl::StrCat("gpu_async_", device)), begin_(ReserveAddresses(device, End())) {
    stats_.bytes_limit = static_cast<int64_t>(Settings::Get().memory_bytes);
  }

  std::string Name() override { return name_; }

  // The first gap that is large enough.
  void* AllocateRaw(size_t, size_t bytes) override {
    std::lock_guard<std::mutex> lock(mu_);
    const auto in_use = static_cast<uint64_t>(stats_.bytes_in_use) + Settings::Get().others_bytes;
    if (in_use + bytes > Settings::Get().memory_bytes) return nullptr;
    uint64_t at = 0;
    for (const auto& [begin, size] : sizes_) {
      if (begin - at >= Rounded(bytes)) break;
      at = begin + Rounded(size);
    }
    if (at + Rounded(bytes) > End()) return nullptr;
    sizes_[at] = bytes;
    ++stats_.num_allocs;
    stats_.bytes_in_use += static_cast<int64_t>(bytes);
    stats_.peak_bytes_in_use = std::max(stats_.peak_bytes_in_use, stats_.bytes_in_use);
    stats_.largest_alloc_size = std::max(stats_.largest_alloc_size, static_cast<int64_t>(bytes));
    return begin_ + at;
  }

  void DeallocateRaw(void* memory) override {
    if (memory == nullptr) return;
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = sizes_.find(OffsetOf(memory));
    stats_.bytes_in_use -= static_cast<int64_t>(found->second);
    sizes_.erase(found);
  }

  bool TracksAllocationSizes() const override { return true; }
  size_t RequestedSize(const void* memory) const override {
    std::lock_guard<std::mutex> lock(mu_);
    return sizes_.at(OffsetOf(memory));
  }

  std::optional<tensorflow::AllocatorStats> GetStats() override {
    std::lock_guard<std::mutex> lock(mu_);
    return stats_;
  }

  bool ClearStats() override {
    std::lock_guard<std::mutex> lock(mu_);
    stats_.num_allocs = 0;
    stats_.peak_bytes_in_use = stats_.bytes_in_use;
    stats_.largest_alloc_size = 0;
    return true;
  }

  tensorflow::AllocatorMemoryType GetMemoryType() const override { return tensorflow::AllocatorMemoryType::kDevice; }

 private:
  static uint64_t End() { return kAddresses * Settings::Get().memory_bytes; }
  static uint64_t Rounded(uint64_t bytes) {
    return (std::max<uint64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  }
  uint64_t OffsetOf(const void* memory) const { return static_cast<uint64_t>(static_cast<const char*>(memory) - begin_); }

  const std::string name_;
  char* const begin_;
  mutable std::mutex mu_;
  std::map<uint64_t, uint64_t> sizes_;  // by offset
  tensorflow::AllocatorStats stats_;
};

}  // namespace

bool UsesAsyncAllocator() {
  const char* const kind = std::getenv("TF_GPU_ALLOCATOR");
  return kind != nullptr && std::strcmp(kind, "cuda_malloc_async") == 0;
}

tensorflow::Allocator* MakeAsyncAllocator(int device) { return new AsyncAllocator(device); }

}  // namespace emulated_gpu
