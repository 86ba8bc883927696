// Runs tasks one after another on one thread: ordered tasks need no thread each.

#ifndef TFSWAP_OPS_CSRC_CORE_SERIAL_EXECUTOR_H_
#define TFSWAP_OPS_CSRC_CORE_SERIAL_EXECUTOR_H_

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace tfswap {

using Task = std::function<void()>;
using Runner = std::function<void(Task)>;

// A queue of tasks. It uses a thread of another runner while it has tasks.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  explicit Lane(Runner runner) : runner_(std::move(runner)) {}

  void Push(Task task) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      tasks_.push_back(std::move(task));
      if (is_busy_) return;
      is_busy_ = true;
    }
    runner_([lane = shared_from_this()] { lane->Drain(); });
  }

  const Runner& runner() const { return runner_; }

  // Whether kernels stay on the lane's thread: to wake another thread takes longer than a small kernel.
  bool is_alone() const { return is_alone_; }
  void set_alone(bool alone) { is_alone_ = alone; }

 private:
  void Drain() {
    for (;;) {
      Task task;
      {
        std::lock_guard<std::mutex> lock(mu_);
        is_busy_ = !tasks_.empty();
        if (!is_busy_) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  const Runner runner_;
  std::mutex mu_;
  std::deque<Task> tasks_;
  bool is_busy_ = false;
  std::atomic<bool> is_alone_{false};
};

// A runner whose tasks run on a lane.
struct OnLane {
  std::shared_ptr<Lane> lane;
  void operator()(Task task) const { lane->Push(std::move(task)); }
};

// The runner with several threads that a lane, or a lane on a lane, runs on.
inline const Runner& Behind(const Runner& runner) {
  const OnLane* const on = runner.target<OnLane>();
  return on == nullptr ? runner : Behind(on->lane->runner());
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_SERIAL_EXECUTOR_H_
