// The one pool, pair of lanes and set of counters of this process.
//
// Knows nothing of TensorFlow. Everything here is made at first use and never
// destroyed: copy threads may still run while the process exits.

#ifndef TFSWAP_OPS_CSRC_CORE_RUNTIME_H_
#define TFSWAP_OPS_CSRC_CORE_RUNTIME_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "copy_engine.h"
#include "export.h"
#include "host_pool.h"

namespace tfswap {

enum class Direction { kOut, kIn };

// Which op a step was held up in.
enum class Stall { kRelease, kAwait };

// What copies did that ran on a device's own copy engines, beside our lanes.
class DeviceCopyStats {
 public:
  void Add(uint64_t bytes, double seconds);
  CopyLane::Stats stats() const;
  void Reset();

 private:
  mutable std::mutex mu_;
  CopyLane::Stats stats_;
};

class StallStats {
 public:
  void Add(double seconds);
  double seconds() const;
  void Reset();

 private:
  mutable std::mutex mu_;
  double seconds_ = 0;
};

class Runtime {
 public:
  TFSWAP_EXPORT static Runtime& Get();

  HostBudget& budget() { return budget_; }
  HostPool& pool() { return pool_; }
  CopyLane& lane(Direction d) { return d == Direction::kOut ? *out_ : *in_; }
  DeviceCopyStats& device_copies(Direction d) {
    return d == Direction::kOut ? device_out_ : device_in_;
  }
  // Why the pool has no `bytes` for `tensor`, as text, at that node, and what to do.
  TFSWAP_EXPORT std::string WhyNoRoom(HostPool::Failure failure, const std::string& node,
                                      size_t bytes, const std::string& tensor) const;
  // Bytes that sparse encodings had no room for and put into the pool.
  std::atomic<uint64_t>& spilled_bytes() { return spilled_bytes_; }
  StallStats& stall(Stall s) { return s == Stall::kRelease ? release_ : await_; }

 private:
  Runtime();

  HostBudget budget_;
  MmapBlockSource mmap_;
  HostPool pool_;
  CopyLane* const out_;
  CopyLane* const in_;
  DeviceCopyStats device_out_;
  DeviceCopyStats device_in_;
  StallStats release_;
  StallStats await_;
  std::atomic<uint64_t> spilled_bytes_{0};
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_RUNTIME_H_
