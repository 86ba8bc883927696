// What Python calls through ctypes. Plain C types only, so that it needs neither
// TensorFlow's headers nor Python's. load.py mirrors these declarations.

#include <cstdint>
#include <string>
#include <type_traits>

#include "export.h"
#include "byte_planes.h"
#include "runtime.h"
#include "variable_home.h"

namespace {

using tfswap::Direction;
using tfswap::Figures;
using tfswap::HomeBuffers;
using tfswap::HostBudget;
using tfswap::HostPool;
using tfswap::Runtime;
using tfswap::SpillFile;
using tfswap::Stall;
using tfswap::Tier;

// As much of `text` as there is room for.
void Write(const std::string& text, char* to, uint64_t room) {
  if (room > 0) to[text.copy(to, room - 1)] = '\0';
}

}  // namespace

// Field for field the ctypes structure in load.py, where each of the copies is three fields: bytes, copies, busy_s.
struct TfswapStats {
  Figures::Copies out;
  Figures::Copies in;
  Figures::Copies disk_out;
  Figures::Copies disk_in;
  double release_stall_s;
  double await_stall_s;
  double inline_copy_s;
  uint64_t pool_in_use_bytes;
  uint64_t pool_reserved_bytes;
  uint64_t pool_peak_bytes;
  uint64_t pool_limit_bytes;
  uint64_t home_bytes;
  uint64_t disk_in_use_bytes;
  uint64_t disk_reserved_bytes;
  uint64_t disk_peak_bytes;
  uint64_t spilled_bytes;
  uint64_t disk_written_bytes;
  uint64_t disk_read_bytes;
  Figures::Copies lent_out;
  Figures::Copies lent_in;
  uint64_t lent_peak_bytes;
};
static_assert(std::is_standard_layout_v<TfswapStats> && sizeof(Figures::Copies) == 3 * 8 &&
                  sizeof(TfswapStats) == 33 * 8,
              "load.py has 33 fields of eight bytes each");

namespace {

TfswapStats Filled(const Figures& figures) {
  TfswapStats stats = {};
  stats.out = figures.of(Direction::kOut, Tier::kHost);
  stats.in = figures.of(Direction::kIn, Tier::kHost);
  stats.disk_out = figures.of(Direction::kOut, Tier::kDisk);
  stats.disk_in = figures.of(Direction::kIn, Tier::kDisk);
  stats.release_stall_s = figures.of(Stall::kRelease);
  stats.await_stall_s = figures.of(Stall::kAwait);
  stats.inline_copy_s = figures.of(Stall::kInlineCopy);
  stats.pool_in_use_bytes = figures.of(Tier::kHost).bytes;
  stats.pool_peak_bytes = figures.of(Tier::kHost).peak_bytes;
  stats.disk_in_use_bytes = figures.of(Tier::kDisk).bytes;
  stats.disk_peak_bytes = figures.of(Tier::kDisk).peak_bytes;
  stats.disk_written_bytes = figures.in_files(Direction::kOut);
  stats.disk_read_bytes = figures.in_files(Direction::kIn);
  stats.lent_out = figures.of(Direction::kOut, Tier::kLent);
  stats.lent_in = figures.of(Direction::kIn, Tier::kLent);
  stats.lent_peak_bytes = figures.of(Tier::kLent).peak_bytes;
  return stats;
}

}  // namespace

// UINT64_MAX: no limit. Blocks that hold nothing are given back when they are more
// than the new limit allows.
TFSWAP_C_API void tfswap_set_host_limit(uint64_t bytes) { Runtime::Get().budget().SetLimit(bytes); }

TFSWAP_C_API uint64_t tfswap_host_limit() { return Runtime::Get().budget().set_limit(); }

// As Runtime::Register and Unregister, for the CPU's pool. Writes the error to `why`, "" for none.
TFSWAP_C_API void tfswap_register(int64_t owner, uint64_t host_limit, const char* folder,
                               uint64_t spill_limit, char* why, uint64_t room) {
  Runtime& runtime = Runtime::Get();
  Write(runtime.Register(owner, host_limit, folder, spill_limit, &runtime.pool()), why, room);
}

TFSWAP_C_API void tfswap_unregister(int64_t owner) { Runtime::Get().Unregister(owner); }

// Space for a plan's tensors, in the file that the owner is registered for. As tfswap_register.
TFSWAP_C_API void tfswap_reserve_disk(int64_t owner, uint64_t bytes, const char* step, char* why,
                                      uint64_t room) {
  SpillFile* const file = Runtime::Get().client(owner)->spill;
  if (file == nullptr) return Write("no folder is registered", why, room);
  const HostPool::Failure failure = file->Reserve(bytes);
  Write(failure == HostPool::Failure::kNone
           ? ""
           : file->WhyNoRoom(failure, step, bytes, "all that its step swaps"),
       why, room);
}

// 0: done. 1: the host limit forbids it. 2: the system has no more memory.
//
// more: in addition to what is in use.
TFSWAP_C_API int tfswap_reserve(uint64_t bytes, bool more) {
  HostPool& pool = Runtime::Get().pool();
  switch (more ? pool.ReserveMore(bytes) : pool.Reserve(bytes)) {
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
  Runtime::Get().SetThreads(threads_per_direction);
}

TFSWAP_C_API int tfswap_copy_threads() {
  return Runtime::Get().lane(Direction::kOut).threads();
}

// 0 and 0: no throttle. Holds for each direction of each device.
TFSWAP_C_API void tfswap_set_throttle(double bandwidth_bytes_per_s, double latency_us) {
  Runtime::Get().SetThrottle({bandwidth_bytes_per_s, latency_us});
}

TFSWAP_C_API double tfswap_bandwidth() {
  return Runtime::Get().lane(Direction::kOut).throttle().bandwidth_bytes_per_s;
}

TFSWAP_C_API double tfswap_latency_us() {
  return Runtime::Get().lane(Direction::kOut).throttle().latency_us;
}

// As tfswap_set_throttle, for what goes to disk.
TFSWAP_C_API void tfswap_set_disk_throttle(double bandwidth_bytes_per_s, double latency_us) {
  SpillFile::SetThrottle({bandwidth_bytes_per_s, latency_us});
}

TFSWAP_C_API double tfswap_disk_bandwidth() { return SpillFile::throttle().bandwidth_bytes_per_s; }

TFSWAP_C_API double tfswap_disk_latency_us() { return SpillFile::throttle().latency_us; }

// Sets whether tensors on disk are compressed. Returns false if that is requested and zstd is not available.
TFSWAP_C_API bool tfswap_set_disk_compression(bool wanted) {
  if (wanted && !tfswap::planes::IsAvailable()) return false;
  SpillFile::SetCompression(wanted);
  return true;
}

TFSWAP_C_API bool tfswap_disk_compression() { return SpillFile::compression(); }

// Host memory that every owner with a folder needs besides.
TFSWAP_C_API uint64_t tfswap_staging_bytes() { return tfswap::Staging::kBytes; }

// Of the owner's latest step. What pools hold is what this owner has in them, and what they may take is not filled in.
TFSWAP_C_API void tfswap_step_stats(int64_t owner, TfswapStats* stats) {
  *stats = Filled(Runtime::Get().client(owner)->copy_stats.figures());
}

// Drops what is kept for an owner that will run no more.
TFSWAP_C_API void tfswap_forget_owner(int64_t owner) { Runtime::Get().Forget(owner); }

TFSWAP_C_API void tfswap_stats(TfswapStats* stats) {
  Runtime& runtime = Runtime::Get();
  *stats = Filled(runtime.copy_stats().figures());
  const HostBudget::Usage usage = runtime.budget().usage();
  stats->pool_in_use_bytes = usage.in_use_bytes;
  stats->pool_reserved_bytes = usage.reserved_bytes;
  stats->pool_peak_bytes = usage.peak_bytes;
  stats->pool_limit_bytes = usage.limit_bytes;
  stats->home_bytes = HomeBuffers::Get().bytes();
  const HostBudget::Usage disk = SpillFile::usage();
  stats->disk_in_use_bytes = disk.in_use_bytes;
  stats->disk_reserved_bytes = disk.reserved_bytes;
  stats->disk_peak_bytes = disk.peak_bytes;
  stats->spilled_bytes = runtime.spilled_bytes();
}

TFSWAP_C_API void tfswap_reset_stats() {
  Runtime& runtime = Runtime::Get();
  runtime.copy_stats().Begin();
  runtime.budget().ResetPeak();
  SpillFile::ResetPeaks();
  runtime.spilled_bytes() = 0;
}

// The TensorFlow that the library was compiled against, as build.py passed it.
TFSWAP_C_API const char* tfswap_built_for() { return TFSWAP_BUILT_FOR; }
