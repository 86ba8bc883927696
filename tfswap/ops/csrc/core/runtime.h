// The one pool of this process, a pair of lanes for each of its devices, the counters, and who uses them.
//
// Knows nothing of TensorFlow. Everything here is made at first use and never
// destroyed: copy threads may still run while the process exits.

#ifndef TFSWAP_OPS_CSRC_CORE_RUNTIME_H_
#define TFSWAP_OPS_CSRC_CORE_RUNTIME_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "copy_engine.h"
#include "export.h"
#include "host_pool.h"
#include "spill_file.h"
#include "copy_stats.h"

namespace tfswap {

// One who swaps: an optimized function, or the steps of one file. Kernels know theirs by its number.
struct Client {
  Traffic traffic;  // of its latest step, which its gate begins
  // Whether `bytes`, which a loop saves now, are among the first `first_bytes` that loops of its latest step have saved.
  TFSWAP_EXPORT bool IsAmongFirstSaved(uint64_t bytes, uint64_t first_bytes);
  std::atomic<SpillFile*> spill{nullptr};
  int registrations = 0;  // guarded by Runtime::mu_, as what follows
  bool forgotten = false;

 private:
  std::mutex saved_mu_;
  uint64_t saved_step_ = 0;
  uint64_t saved_bytes_ = 0;  // in that step
};

class Runtime {
 public:
  TFSWAP_EXPORT static Runtime& Get();

  HostBudget& budget() { return budget_; }
  HostPool& pool() { return pool_; }
  // Of that CPU device, by number; made at first use, as the first device's are set. A device waits for its own copies.
  TFSWAP_EXPORT CopyLane& lane(Direction direction, int device = 0);
  // Of all devices, those to come too.
  TFSWAP_EXPORT void SetThreads(int threads_per_direction);
  TFSWAP_EXPORT void SetThrottle(const CopyLane::Throttle& throttle);
  // Of the process, which has one step only.
  Traffic& traffic() { return traffic_; }

  // The client of that number, made at first use.
  TFSWAP_EXPORT std::shared_ptr<Client> client(int64_t owner);
  // Drops its figures.
  void Forget(int64_t owner);

  // What a client may take: of host memory, of which `pool` gives the buffers on the way to the disk, and on disk where
  // `folder` is not "". It may be repeated, and ends when as many have ended. Says what is wrong, or "".
  std::string Register(int64_t owner, uint64_t host_limit, const std::string& folder, uint64_t spill_limit,
                    HostPool* pool);
  void Unregister(int64_t owner);

  // Whether this process is the child of one that had begun to copy, or had files: the threads are not here, and no copy
  // would end; the files are the parent's. A child leaves all of it as it is.
  bool is_late_child() const { return is_late_child_; }
  static constexpr char kLateChild[] =
      "This process was forked when tfswap's copies had begun, and has none of their threads. Start processes that train "
      "before the first step, or by multiprocessing's \"spawn\".";
  // Why the pool has no `bytes` for `tensor`, as text, at that node, and what to do.
  TFSWAP_EXPORT std::string WhyNoRoom(HostPool::Failure failure, const std::string& node,
                                      size_t bytes, const std::string& tensor) const;
  // Bytes that sparse encodings had no room for and put into the pool.
  std::atomic<uint64_t>& spilled_bytes() { return spilled_bytes_; }
  // How often gates have kept what their step was made from.
  std::atomic<uint64_t>& executed() { return executed_; }

 private:
  Runtime();

  using Lanes = std::array<CopyLane*, 2>;  // by direction

  Lanes& LanesLocked(int device);
  std::shared_ptr<Client> ClientLocked(int64_t owner);
  void EndRegistration(int64_t owner, Client* registered);

  HostBudget budget_;
  MmapBlockSource mmap_;
  HostPool pool_;
  Traffic traffic_;
  std::mutex mu_;
  std::map<int, Lanes> lanes_;
  std::map<int64_t, std::shared_ptr<Client>> clients_;
  std::atomic<bool> is_late_child_{false};
  std::atomic<uint64_t> spilled_bytes_{0};
  std::atomic<uint64_t> executed_{0};
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_RUNTIME_H_
