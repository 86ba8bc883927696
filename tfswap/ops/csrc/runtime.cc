#include "runtime.h"

namespace tfswap {

void DeviceCopyStats::Add(uint64_t bytes, double seconds) {
  std::lock_guard<std::mutex> lock(mu_);
  stats_.bytes += bytes;
  stats_.copies += 1;
  stats_.busy_s += seconds;
}

CopyLane::Stats DeviceCopyStats::stats() const {
  std::lock_guard<std::mutex> lock(mu_);
  return stats_;
}

void DeviceCopyStats::Reset() {
  std::lock_guard<std::mutex> lock(mu_);
  stats_ = CopyLane::Stats();
}

void StallStats::Add(double seconds) {
  std::lock_guard<std::mutex> lock(mu_);
  seconds_ += seconds;
}

double StallStats::seconds() const {
  std::lock_guard<std::mutex> lock(mu_);
  return seconds_;
}

void StallStats::Reset() {
  std::lock_guard<std::mutex> lock(mu_);
  seconds_ = 0;
}

Runtime& Runtime::Get() {
  static Runtime* const runtime = new Runtime;
  return *runtime;
}

Runtime::Runtime()
    : pool_(&mmap_, &budget_), out_(new CopyLane), in_(new CopyLane) {}

}  // namespace tfswap
