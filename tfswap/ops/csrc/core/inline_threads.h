// Eigen's threads for a kernel that stays on its own: it divides its work into the same parts, so that sums have the same
// bits.

#ifndef TFSWAP_OPS_CSRC_CORE_INLINE_THREADS_H_
#define TFSWAP_OPS_CSRC_CORE_INLINE_THREADS_H_

#include <functional>

#include "tensorflow/core/platform/threadpool_interface.h"

namespace tfswap {

// Runs all parts of what a kernel shares out on the kernel's own thread.
class InlineThreads : public tensorflow::thread::ThreadPoolInterface {
 public:
  // Args:
  //   parts: into how many threads' parts kernels divide their work.
  explicit InlineThreads(int parts) : parts_(parts) {}

  void Schedule(std::function<void()> part) override { part(); }
  int NumThreads() const override { return parts_; }
  int CurrentThreadId() const override { return -1; }

 private:
  const int parts_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_INLINE_THREADS_H_
