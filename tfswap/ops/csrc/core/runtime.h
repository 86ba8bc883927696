// The pool of this process, two copy lanes for each of its devices, the counters, and the clients.
//
// This file does not depend on TensorFlow. Everything here is made at first use and never destroyed: copy threads may
// still run while the process exits.

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

// A client: an optimized function, or the steps of one file. Kernels name it by its number.
struct Client {
  CopyStats copy_stats;  // of its latest step, which its gate begins
  // Counts `bytes` that a loop saves. Returns whether they are among the first `first_bytes` of the latest step.
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
  // The lanes of a CPU device, by number; made at first use, with the settings of the first device's. A device waits
  // for its own copies only.
  TFSWAP_EXPORT CopyLane& lane(Direction direction, int device = 0);
  // Of all devices, those to come too.
  TFSWAP_EXPORT void SetThreads(int threads_per_direction);
  TFSWAP_EXPORT void SetThrottle(const CopyLane::Throttle& throttle);
  // Of the process, which has one step only.
  CopyStats& copy_stats() { return copy_stats_; }

  // The client with that number, made at first use.
  TFSWAP_EXPORT std::shared_ptr<Client> client(int64_t owner);
  // Drops its figures.
  void Forget(int64_t owner);

  // Registers a client's limits: of host memory, where `pool` has the buffers for copies to the disk, and of the disk
  // if `folder` is not "". Registrations are counted, and end one by one. Returns an error, or "".
  std::string Register(int64_t owner, uint64_t host_limit, const std::string& folder, uint64_t spill_limit,
                    HostPool* pool);
  void Unregister(int64_t owner);

  // Whether this process was forked from one that had begun to copy, or had files. A child has no copy threads, so no
  // copy would end, and the files are the parent's. It changes none of it.
  bool is_late_child() const { return is_late_child_; }
  static constexpr char kLateChild[] =
      "This process was forked when tfswap's copies had begun, and has none of their threads. Start processes that train "
      "before the first step, or by multiprocessing's \"spawn\".";
  // The error that the pool has no `bytes` for `tensor` at a node, with its reason and a remedy.
  TFSWAP_EXPORT std::string WhyNoRoom(HostPool::Failure failure, const std::string& node,
                                      size_t bytes, const std::string& tensor) const;
  // Bytes of sparse encodings that did not fit their tensors and are in the pool.
  std::atomic<uint64_t>& spilled_bytes() { return spilled_bytes_; }
  // How often gates have kept the functions of their steps.
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
  CopyStats copy_stats_;
  std::mutex mu_;
  std::map<int, Lanes> lanes_;
  std::map<int64_t, std::shared_ptr<Client>> clients_;
  std::atomic<bool> is_late_child_{false};
  std::atomic<uint64_t> spilled_bytes_{0};
  std::atomic<uint64_t> executed_{0};
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_RUNTIME_H_
