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

std::string Runtime::WhyNoRoom(HostPool::Failure failure, const std::string& node,
                               size_t bytes, const std::string& tensor) const {
  const HostBudget::Usage usage = budget_.usage();
  const std::string asked =
      "tfswap has no host memory for node '" + node + "': it asks for " +
      std::to_string(HostPool::RoundUp(bytes)) + " bytes (" + tensor + ") while " +
      std::to_string(usage.in_use_bytes) + " bytes are in use, " +
      std::to_string(usage.reserved_bytes) + " reserved";
  if (failure == HostPool::Failure::kSystem) {
    return asked +
           ", and the system gave no more. Free memory on this machine, or swap less "
           "(a higher memory_limit=, or tactics= without \"swap\").";
  }
  return asked + ", of a limit of " + std::to_string(usage.limit_bytes) +
         ". Raise host_memory_limit=, or swap less (a higher memory_limit=).";
}

Runtime::Runtime()
    : pool_(&mmap_, &budget_), out_(new CopyLane), in_(new CopyLane) {}

}  // namespace tfswap
