// Eigen's thread pool for a kernel that stays on one thread. The kernel divides its work into the same parts as with
// other threads, so that sums have the same bits.

#ifndef TFSWAP_OPS_CSRC_CORE_INLINE_THREADS_H_
#define TFSWAP_OPS_CSRC_CORE_INLINE_THREADS_H_

#include <deque>
#include <functional>
#include <utility>

#include "tensorflow/core/platform/threadpool_interface.h"

namespace tfswap {

// Runs all parts of a kernel's work on the kernel's own thread.
//
// A part that schedules further parts ends before they run, in the order in which they were scheduled, as on a pool
// with one thread. Eigen's contractions rely on that: with nested parts, a convolution over several slices of its inner
// dimension was wrong.
class InlineThreads : public tensorflow::thread::ThreadPoolInterface {
 public:
  // Args:
  //   parts: the number of threads by which kernels divide their work.
  explicit InlineThreads(int parts) : parts_(parts) {}

  void Schedule(std::function<void()> part) override {
    thread_local std::deque<std::function<void()>>* waiting = nullptr;  // of the part that runs here
    if (waiting != nullptr) {
      waiting->push_back(std::move(part));
      return;
    }
    std::deque<std::function<void()>> parts;
    waiting = &parts;
    for (parts.push_back(std::move(part)); !parts.empty(); parts.pop_front()) parts.front()();
    waiting = nullptr;
  }
  int NumThreads() const override { return parts_; }
  int CurrentThreadId() const override { return -1; }

 private:
  const int parts_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_INLINE_THREADS_H_
