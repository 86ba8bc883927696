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
// A small copy that has nothing before it is made immediately, by who submits it: handing it
// to a thread and hearing of its end would take longer. Where the system has no thread for
// a lane, who submits a copy makes it, whatever its size.
//
// Invariant: every submitted copy calls its `done` exactly once, on a copy thread or in
// Submit, after its last byte was written or the copy failed. What a copy throws is its
// failure.
//
// Not handled: dropping a copy that no kernel waits for any more, and fork() after
// the first copy (threads start at the first copy, so forking before it is fine; `started`
// reports, and Runtime refuses to go on in a child that has no threads).
//
// This file and copy_engine.cc know nothing of TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_COPY_ENGINE_H_
#define TFSWAP_OPS_CSRC_CORE_COPY_ENGINE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace tfswap {

// memcpy, but a large copy's stores bypass the caches: no kernel reads what went out
// before it comes back, and what comes in is read a good while later.
void StreamCopy(void* to, const void* from, size_t bytes);

class CopyLane {
 public:
  using Clock = std::chrono::steady_clock;
  struct Throttle {
    double bandwidth_bytes_per_s = 0;  // 0: unlimited
    double latency_us = 0;             // per copy
  };

  // How a copy went.
  struct Ended {
    double busy_s = 0;     // from its start to its end
    bool at_once = false;  // made by who submitted it
    size_t carried_bytes = 0;
    std::string error;     // "" for none
  };
  using Done = std::function<void(const Ended&)>;

  // How a piece went: how many bytes the link had to carry, which may be others than those that were moved, and what
  // went wrong, or "".
  struct Moved {
    size_t carried_bytes = 0;
    std::string error;
  };
  // Moves `bytes` of a copy, from its byte `begin` on; `thread` identifies the lane's threads.
  // Several pieces of one copy may move at the same time.
  using Move = std::function<Moved(size_t begin, size_t bytes, int thread)>;

  static constexpr size_t kChunkBytes = size_t{2} << 20;

  // Copies go in pieces of `chunk_bytes`.
  explicit CopyLane(size_t chunk_bytes = kChunkBytes, int threads = 1)
      : chunk_bytes_(chunk_bytes), wanted_threads_(threads) {}
  // Lanes live as long as the process: their threads are detached.
  ~CopyLane() = delete;

  // In memory. `from` and `to` must stay valid until `done` runs, which should be short.
  void Submit(void* to, const void* from, size_t bytes, Done done);

  // Of any kind. `move` is gone when `done` runs. `bytes` > 0.
  void Submit(size_t bytes, Move move, Done done);

  // Both take effect immediately, on copies under way too. With no threads, who submits a copy makes it, one at a time.
  void SetThreads(int threads);
  void SetThrottle(const Throttle& throttle);

  int threads() const;
  Throttle throttle() const;
  // Whether it has ever had a thread.
  bool started() const { return started_; }

 private:
  struct Copy {
    size_t bytes;
    Move move;
    Done done;
    size_t handed_bytes = 0;  // handed to a thread so far
    size_t ended_bytes = 0;
    size_t carried_bytes = 0;
    Clock::time_point start;
    std::string error;
  };

  bool MayCopyAtOnce(size_t bytes) const;
  void StartThreadsLocked();
  void Work(int index);
  void MovePiece(std::unique_lock<std::mutex>& lock, int thread);
  Clock::time_point LinkEndLocked(Clock::time_point begun, size_t bytes, bool first_chunk);
  void WaitForLinkLocked(std::unique_lock<std::mutex>& lock, Clock::time_point end,
                         uint64_t throttle_version);

  const size_t chunk_bytes_;
  std::atomic<bool> started_{false};
  mutable std::mutex mu_;
  std::condition_variable work_or_settings_;
  std::deque<std::shared_ptr<Copy>> queue_;  // copies with chunks that no thread has
  int under_way_ = 0;                        // copies whose `done` has not been called
  int wanted_threads_;
  bool caller_moves_ = false;  // there is no thread, and who submitted copies does the work
  int running_threads_ = 0;    // threads 0 .. running_threads_ - 1 exist
  Throttle throttle_;
  uint64_t throttle_version_ = 0;
  Clock::time_point link_free_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_COPY_ENGINE_H_
