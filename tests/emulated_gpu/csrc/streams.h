// Streams and events: what is enqueued ends in order, each after the time that it takes, on a thread of the stream.
//
// The work itself is done when it is enqueued, not when its time has passed: TensorFlow's host code enqueues in an order
// that all waits agree with, so every value is what it is on a device that runs in program order. Its time passes
// later, and only then do events, callbacks and the host's memory show it. Whether code relies on work that need not
// have been done is the race detector's question.
//
// A stream has a clock of its own: work begins when what precedes it on the stream, and what it waits for, has ended by
// these clocks, and not before it is enqueued. Threads that wake late make nothing longer, and nothing ends early.

#ifndef TESTS_EMULATED_GPU_CSRC_STREAMS_H_
#define TESTS_EMULATED_GPU_CSRC_STREAMS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "profiler.h"
#include "race_detector.h"
#include "settings.h"

struct SP_Event_st {
  void End(uint64_t ticket, emulated_gpu::Moment at);
  // When that recording ended; waits until it has.
  emulated_gpu::Moment AwaitEnd(uint64_t ticket);

  std::shared_ptr<SP_Event_st> self{this};  // until TensorFlow destroys it; streams may wait for it longer
  std::mutex mu;
  std::condition_variable changed;
  uint64_t recorded = 0, ended = 0;
  emulated_gpu::Moment ended_at;
  bool early = false;            // a fault: it seems to have ended
  emulated_gpu::Clock clock;     // of what it is recorded after
};

struct SP_Stream_st {
  SP_Stream_st(int device, int number);
  ~SP_Stream_st();

  // `shown` runs when the work's time has passed, and all that was enqueued before has ended.
  void Push(double microseconds, std::function<void()> shown, emulated_gpu::Label label = {});
  // `event` ends with all that was enqueued before.
  void PushRecord(std::shared_ptr<SP_Event_st> event, uint64_t ticket);
  // Nothing that is enqueued from now on begins before that has ended.
  void PushWait(std::shared_ptr<SP_Event_st> event, uint64_t ticket);
  // Whether work that takes so long has ended by now, so that there is nothing to push.
  bool EndsNow(double microseconds, const emulated_gpu::Label& label = {});
  // Nothing that is enqueued from now on begins before that has ended.
  void WaitFor(SP_Stream_st* other);
  uint64_t pushed();
  void AwaitEnd(uint64_t count);

  int device() const { return device_; }  // the plug-in's number
  emulated_gpu::Role role() const { return role_; }
  int id() const { return id_; }  // the race detector's

 private:
  struct Task {
    // By when it can begin, if not by when it is enqueued; may wait. Null for no such moment.
    std::function<emulated_gpu::Moment()> awaited;
    double microseconds;
    std::function<void(emulated_gpu::Moment)> shown;
    emulated_gpu::Label label = {};
    emulated_gpu::Moment enqueued = std::chrono::steady_clock::now();
  };

  void Push(Task task);
  void Work();
  double Drawn(double microseconds);
  void Trace(const emulated_gpu::Label& label, emulated_gpu::Moment begin, emulated_gpu::Moment end);

  const int device_, number_;
  const emulated_gpu::Role role_;
  const int id_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t pushed_ = 0, ended_ = 0;
  bool leaves_ = false;
  std::minstd_rand draws_;
  std::thread thread_;
};

namespace emulated_gpu {

// Whether `ends_late` may let something end: nothing else runs in this process.
void AwaitIdleProcess();
// The thread that calls this one only asks whether events have ended, and is left out of that.
void IsPoller();

bool IsStreamOf(int device, const SP_Stream_st* stream);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_STREAMS_H_
