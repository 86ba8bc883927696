// Streams and events: what is enqueued ends in order, each after the time that it takes, on a thread of the stream.
//
// The work itself is done when it is enqueued, not when its time has passed: TensorFlow's host code enqueues in an order
// that all waits agree with, so every value is what it is on a device that runs as it is told. Its time passes later,
// and only then do events, callbacks and the host's memory show it. Whether code relies on work that need not have been
// done is the race detector's question.

#ifndef TESTS_EMULATED_GPU_CSRC_STREAMS_H_
#define TESTS_EMULATED_GPU_CSRC_STREAMS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "race_detector.h"
#include "settings.h"

struct SP_Event_st {
  std::mutex mu;
  std::condition_variable changed;
  uint64_t recorded = 0, ended = 0;
  bool early = false;            // a fault: it seems to have ended
  emulated_gpu::Clock clock;     // of what it is recorded after
};

struct SP_Stream_st {
  SP_Stream_st(int device, int number);
  ~SP_Stream_st();

  // `shown` runs when the work's time has passed, and all that was enqueued before has ended.
  void Push(double microseconds, std::function<void()> shown);
  // Whether work that takes so long would have ended by now, so that there is nothing to push.
  bool EndsNow(double microseconds);
  // Nothing that is enqueued from now on begins before that has ended.
  void WaitFor(SP_Stream_st* other);
  uint64_t pushed();
  void AwaitEnd(uint64_t count);

  emulated_gpu::Role role() const { return role_; }
  int id() const { return id_; }  // the race detector's

 private:
  struct Task {
    double microseconds;
    std::function<void()> shown;
  };

  void Work();
  double Drawn(double microseconds);

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

// The device's compute stream; null before TensorFlow has made it.
SP_Stream_st* ComputeStream(int device);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_STREAMS_H_
