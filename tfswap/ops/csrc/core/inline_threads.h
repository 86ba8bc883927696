// Eigen's threads for a kernel that stays on its own: it divides its work into the same parts, so that sums have the same
// bits.

#ifndef TFSWAP_OPS_CSRC_CORE_INLINE_THREADS_H_
#define TFSWAP_OPS_CSRC_CORE_INLINE_THREADS_H_

#include <deque>
#include <functional>
#include <utility>

#include "tensorflow/core/platform/threadpool_interface.h"

namespace tfswap {

// Runs all parts of what a kernel shares out on the kernel's own thread.
//
// A part that shares out further parts is finished before they run, in the order in which they came, as by a pool's one
// thread. Eigen's contractions count on that: where a part ran inside of another one, a convolution over several slices
// of its inner dimension came out wrong.
class InlineThreads : public tensorflow::thread::ThreadPoolInterface {
 public:
  // Args:
  //   parts: into how many threads' parts kernels divide their work.
  explicit InlineThreads(int parts) : parts_(parts) {}

  void Schedule(std::function<void()> part) override {
    thread_local std::deque<std::function<void()>>* waiting = nullptr;  // parts of the one that runs on this thread
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
