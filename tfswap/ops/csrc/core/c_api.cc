// What Python calls through ctypes. Plain C types only, so that it needs neither
// TensorFlow's headers nor Python's. load.py mirrors these declarations.

#include <cstdint>

#include "Eigen/Core"
#include "export.h"
#include "runtime.h"

namespace {

using tfswap::CopyLane;
using tfswap::Direction;
using tfswap::HostBudget;
using tfswap::HostPool;
using tfswap::Runtime;
using tfswap::Stall;

CopyLane::Stats LaneStats(Direction direction) {
  Runtime& runtime = Runtime::Get();
  CopyLane::Stats total = runtime.lane(direction).stats();
  const CopyLane::Stats device = runtime.device_copies(direction).stats();
  total.bytes += device.bytes;
  total.copies += device.copies;
  total.busy_s += device.busy_s;
  return total;
}

}  // namespace

// Field for field the ctypes structure in load.py.
struct TfswapStats {
  uint64_t out_bytes;
  uint64_t in_bytes;
  uint64_t out_copies;
  uint64_t in_copies;
  double out_busy_s;
  double in_busy_s;
  double release_stall_s;
  double await_stall_s;
  uint64_t pool_in_use_bytes;
  uint64_t pool_reserved_bytes;
  uint64_t pool_peak_bytes;
  uint64_t pool_limit_bytes;
  uint64_t spilled_bytes;
};

// As TensorFlow's kernels take it, which size their buffers by it: of a virtual machine it
// may be the whole host's.
TFSWAP_C_API int64_t tfswap_l3_cache_bytes() { return Eigen::l3CacheSize(); }

// UINT64_MAX: no limit. Blocks that hold nothing are given back when they are more
// than the new limit allows.
TFSWAP_C_API void tfswap_set_host_limit(uint64_t bytes) { Runtime::Get().budget().SetLimit(bytes); }

TFSWAP_C_API uint64_t tfswap_host_limit() { return Runtime::Get().budget().set_limit(); }

// As HostBudget::Claim and Drop.
TFSWAP_C_API void tfswap_claim_host(int64_t owner, uint64_t bytes) {
  Runtime::Get().budget().Claim(owner, bytes);
}

TFSWAP_C_API void tfswap_drop_host(int64_t owner) { Runtime::Get().budget().Drop(owner); }

// 0: done. 1: the host limit forbids it. 2: the system has no more memory.
TFSWAP_C_API int tfswap_reserve(uint64_t bytes) {
  switch (Runtime::Get().pool().Reserve(bytes)) {
    case HostPool::Failure::kNone:
      return 0;
    case HostPool::Failure::kLimit:
      return 1;
    case HostPool::Failure::kSystem:
      return 2;
  }
  return 2;
}

TFSWAP_C_API void tfswap_set_copy_threads(int threads_per_direction) {
  Runtime::Get().lane(Direction::kOut).SetThreads(threads_per_direction);
  Runtime::Get().lane(Direction::kIn).SetThreads(threads_per_direction);
}

TFSWAP_C_API int tfswap_copy_threads() {
  return Runtime::Get().lane(Direction::kOut).threads();
}

// 0 and 0: no throttle. Holds for each direction.
TFSWAP_C_API void tfswap_set_throttle(double bandwidth_bytes_per_s, double latency_us) {
  const CopyLane::Throttle throttle{bandwidth_bytes_per_s, latency_us};
  Runtime::Get().lane(Direction::kOut).SetThrottle(throttle);
  Runtime::Get().lane(Direction::kIn).SetThrottle(throttle);
}

TFSWAP_C_API double tfswap_bandwidth() {
  return Runtime::Get().lane(Direction::kOut).throttle().bandwidth_bytes_per_s;
}

TFSWAP_C_API double tfswap_latency_us() {
  return Runtime::Get().lane(Direction::kOut).throttle().latency_us;
}

TFSWAP_C_API void tfswap_stats(TfswapStats* stats) {
  Runtime& runtime = Runtime::Get();
  const CopyLane::Stats out = LaneStats(Direction::kOut);
  const CopyLane::Stats in = LaneStats(Direction::kIn);
  const HostBudget::Usage usage = runtime.budget().usage();
  stats->out_bytes = out.bytes;
  stats->in_bytes = in.bytes;
  stats->out_copies = out.copies;
  stats->in_copies = in.copies;
  stats->out_busy_s = out.busy_s;
  stats->in_busy_s = in.busy_s;
  stats->release_stall_s = runtime.stall(Stall::kRelease).seconds();
  stats->await_stall_s = runtime.stall(Stall::kAwait).seconds();
  stats->pool_in_use_bytes = usage.in_use_bytes;
  stats->pool_reserved_bytes = usage.reserved_bytes;
  stats->pool_peak_bytes = usage.peak_bytes;
  stats->pool_limit_bytes = usage.limit_bytes;
  stats->spilled_bytes = runtime.spilled_bytes();
}

TFSWAP_C_API void tfswap_reset_stats() {
  Runtime& runtime = Runtime::Get();
  for (const Direction direction : {Direction::kOut, Direction::kIn}) {
    runtime.lane(direction).ResetStats();
    runtime.device_copies(direction).Reset();
  }
  runtime.stall(Stall::kRelease).Reset();
  runtime.stall(Stall::kAwait).Reset();
  runtime.budget().ResetPeak();
  runtime.spilled_bytes() = 0;
}

// The TensorFlow that the library was compiled against, as build.py passed it.
TFSWAP_C_API const char* tfswap_built_for() { return TFSWAP_BUILT_FOR; }
