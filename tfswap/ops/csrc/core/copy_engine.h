// Asynchronous memory copies on threads of their own, one lane per direction.
//
// A lane is a first-in first-out queue, as a direction of a PCIe link is: copies
// start in the order in which they were submitted, and with one thread (the
// default) they also end in it. Large copies go in chunks, so that several
// threads may share one copy and a throttle may pace it.
//
// The throttle makes each lane a serial link of a given bandwidth and latency, so
// that a plan made for a slow link can be tried, and tested, on a fast one.
//
// A small copy that has nothing before it is made at once, by who submits it: handing it
// to a thread and hearing of its end would take longer.
//
// Invariant: every submitted copy calls its `done` exactly once, on a copy thread or, a
// small one, in Submit, after its last byte was written.
//
// Not handled: dropping a copy that nobody waits for any more, and fork() after
// the first copy (threads start at the first copy, so forking before it is fine;
// TensorFlow itself does not survive a fork after its first op).
//
// This file and copy_engine.cc know nothing of TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_COPY_ENGINE_H_
#define TFSWAP_OPS_CSRC_CORE_COPY_ENGINE_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace tfswap {

// memcpy, but a large copy's stores bypass the caches: nobody reads what went out
// before it comes back, and what comes in is read a good while later.
void StreamCopy(void* to, const void* from, size_t bytes);

class CopyLane {
 public:
  using Clock = std::chrono::steady_clock;
  struct Throttle {
    double bandwidth_bytes_per_s = 0;  // 0: unlimited
    double latency_us = 0;             // per copy
  };

  struct Stats {
    uint64_t bytes = 0;
    uint64_t copies = 0;
    double busy_s = 0;  // from a copy's start to its end, summed over copies
  };

  CopyLane() = default;
  // Lanes live as long as the process: their threads are detached.
  ~CopyLane() = delete;

  // `from` and `to` must stay valid until `done` runs, which should be short.
  void Submit(void* to, const void* from, size_t bytes, std::function<void()> done);

  // Both take effect at once, on copies under way too.
  void SetThreads(int threads);
  void SetThrottle(const Throttle& throttle);

  int threads() const;
  Throttle throttle() const;
  Stats stats() const;
  void ResetStats();

 private:
  struct Copy {
    char* to;
    const char* from;
    size_t bytes;
    size_t claimed_bytes;  // handed to a thread so far
    size_t ended_bytes;
    Clock::time_point start;
    std::function<void()> done;
  };

  bool CopiedAtOnce(void* to, const void* from, size_t bytes);
  void StartThreadsLocked();
  void Work(int index);
  Clock::time_point LinkEndLocked(size_t bytes, bool first_chunk);
  void WaitForLinkLocked(std::unique_lock<std::mutex>& lock, Clock::time_point end,
                         uint64_t throttle_version);

  mutable std::mutex mu_;
  std::condition_variable work_or_settings_;
  std::deque<std::shared_ptr<Copy>> queue_;  // copies with unclaimed chunks
  int under_way_ = 0;                        // copies whose `done` has not been called
  int wanted_threads_ = 1;
  int running_threads_ = 0;  // threads 0 .. running_threads_ - 1 exist
  Throttle throttle_;
  uint64_t throttle_version_ = 0;
  Clock::time_point link_free_;
  Stats stats_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_COPY_ENGINE_H_
