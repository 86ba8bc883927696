// Runs tasks one after the other: what has an order needs no other thread for each.

#ifndef TFSWAP_LANE_H_
#define TFSWAP_LANE_H_

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace tfswap {

using Task = std::function<void()>;
using Runner = std::function<void(Task)>;

// On a thread of another runner, as long as there are any.
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

  // Whether kernels are to stay on the lane's thread. Where they are small, to wake another thread takes longer.
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

// The runner that has other threads: what a lane, or lanes in lanes, run on.
inline const Runner& Behind(const Runner& runner) {
  const OnLane* const on = runner.target<OnLane>();
  return on == nullptr ? runner : Behind(on->lane->runner());
}

}  // namespace tfswap

#endif  // TFSWAP_LANE_H_
