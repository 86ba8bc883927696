// Asynchronous memory copies on their own threads, one lane per direction.
//
// A lane is a first-in first-out queue, like one direction of a PCIe link. Copies start in the order of their
// submission. With one thread (the default) they also end in this order. Large copies are made in pieces, so that
// several threads may share one copy and a throttle may pace it.
//
// The throttle makes a lane a serial link of a given bandwidth and latency, so that a plan for a slow link can be
// tested on a fast one.
//
// A small copy on an idle lane is made by the submitting thread, since to pass it to another thread would take longer.
// If the system has no thread for a lane, the submitting thread makes each copy.
//
// Invariant: `done` of each submitted copy is called exactly once, by a copy thread or in Submit, after the last byte
// was written or the copy failed. An exception thrown by a copy makes it fail.
//
// Not handled: cancelling a copy that no kernel waits for any more; fork() after the first copy. Threads start at the
// first copy, so an earlier fork() is allowed. After a later one the child has no threads, and Runtime reports an error
// there (see `started`).
//
// This file and copy_engine.cc do not depend on TensorFlow.

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

// memcpy whose stores bypass the caches where the copy is large: no kernel reads the bytes soon.
void StreamCopy(void* to, const void* from, size_t bytes);

class CopyLane {
 public:
  using Clock = std::chrono::steady_clock;
  struct Throttle {
    double bandwidth_bytes_per_s = 0;  // 0: unlimited
    double latency_us = 0;             // per copy
  };

  // The result of a copy.
  struct Ended {
    double busy_s = 0;     // from its start to its end
    bool is_inline = false;  // made by the submitting thread
    size_t carried_bytes = 0;
    std::string error;     // "" for none
  };
  using Done = std::function<void(const Ended&)>;

  // The result of moving a piece. The bytes on the link are fewer than the piece's if it was compressed.
  struct Moved {
    size_t carried_bytes = 0;
    std::string error;  // "" for none
  };
  // Moves `bytes` of a copy, from its byte `begin` on, on the lane's thread of number `thread`. Several pieces of one
  // copy may be moved at the same time.
  using Move = std::function<Moved(size_t begin, size_t bytes, int thread)>;

  // Small enough that two threads share a typical feature map evenly and that a throttled lane reads new settings in
  // time. Large enough that one lock per piece costs under 0.1% of its time.
  static constexpr size_t kChunkBytes = size_t{2} << 20;

  // Copies are made in pieces of `chunk_bytes`.
  explicit CopyLane(size_t chunk_bytes = kChunkBytes, int threads = 1)
      : chunk_bytes_(chunk_bytes), wanted_threads_(threads) {}
  // Lanes live as long as the process: their threads are detached.
  ~CopyLane() = delete;

  // Copies memory. `from` and `to` must stay valid until `done` runs, which should be short.
  void Submit(void* to, const void* from, size_t bytes, Done done);

  // Makes a copy of any kind by `move`, which is destroyed before `done` runs. `bytes` > 0.
  void Submit(size_t bytes, Move move, Done done);

  // Both take effect immediately, for running copies too. With 0 threads the submitting threads make the copies, one at
  // a time.
  void SetThreads(int threads);
  void SetThrottle(const Throttle& throttle);

  int threads() const;
  Throttle throttle() const;
  // Whether the lane has ever had a thread.
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

  bool MayCopyInline(size_t bytes) const;
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
  std::deque<std::shared_ptr<Copy>> queue_;  // copies with pieces that no thread has taken
  int under_way_ = 0;                        // copies whose `done` has not been called
  int wanted_threads_;
  bool caller_moves_ = false;  // there is no thread, and a submitting thread makes the copies
  int running_threads_ = 0;    // threads 0 .. running_threads_ - 1 exist
  Throttle throttle_;
  uint64_t throttle_version_ = 0;
  Clock::time_point link_free_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_COPY_ENGINE_H_
