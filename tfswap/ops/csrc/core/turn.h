// The turn: planned steps of a process share an arena, so one of them runs at a time.
//
// The turn belongs to a thread, which reads the arena and then runs a step, or to a step, by TensorFlow's number, where
// no such thread called it: inside another tf.function. It passes to waiters in the order of their requests, and its
// owner may request it again. A step whose kernels may wait for other steps (`waits`: collectives, Python functions,
// queues) may wait for the very step that waits for its turn. So a waiter that has waited kPatience for such a step is
// started concurrently.
//
// This file does not depend on TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_TURN_H_
#define TFSWAP_OPS_CSRC_CORE_TURN_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace tfswap {

class Turn {
 public:
  using Clock = std::chrono::steady_clock;
  using Start = std::function<void()>;
  using Token = std::pair<bool, uint64_t>;  // whether the owner is a thread; its number

  static constexpr std::chrono::seconds kPatience{10};
  static constexpr std::chrono::seconds kLook{1};

  // A thread or step that requests the turn. `start` is called, without a lock, if it had to wait.
  struct Turner {
    Turner(Token token, bool waits) : token(token), waits(waits) {}

    const Token token;
    const bool waits;
    Start start;
    // Guarded by Turn::mu_:
    Clock::time_point since;
    bool has_started = false;
    bool has_turn = false;  // false if it was started concurrently with the owner
  };
  using Waiter = std::shared_ptr<Turner>;

  static Turn& Get() {
    static Turn* const turn = new Turn;
    return *turn;
  }

  // Starts the waiter if the turn is free, and queues it otherwise. Returns whether it was started.
  bool Enter(const Waiter& waiter) {
    std::lock_guard<std::mutex> lock(mu_);
    if (count_ == 0 || owner_ == waiter->token) {
      TakeLocked(*waiter);
      return true;
    }
    waiter->since = Clock::now();
    queue_.push_back(waiter);
    if (!is_watched_) {
      is_watched_ = true;
      std::thread([this] { WatchQueue(); }).detach();
    }
    return false;
  }

  // Ends the waiter's turn, or removes it from the queue.
  void Leave(const Waiter& waiter) {
    std::vector<Start> starts;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!waiter->has_started) {
        queue_.remove(waiter);
      } else if (waiter->has_turn && --count_ == 0) {
        if (!queue_.empty()) {
          const Token next = queue_.front()->token;
          StartLocked([&](const Turner& each) { return each.token == next; }, /*takes=*/true, &starts);
        } else if (changed_) {
          changed_(false);
        }
      }
    }
    Notify(starts);
  }

  // Starts the waiter concurrently with the owner of the turn, if the owner may wait for it.
  void Admit(const Waiter& waiter) {
    std::vector<Start> starts;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (waits_) StartLocked([&](const Turner& each) { return &each == waiter.get(); }, /*takes=*/false, &starts);
    }
    Notify(starts);
  }

  // Waits for `time` at most. Returns whether the waiter has been started.
  bool Wait(const Waiter& waiter, std::chrono::microseconds time) {
    std::unique_lock<std::mutex> lock(mu_);
    return started_.wait_for(lock, time, [&] { return waiter->has_started; });
  }

  // Whether the waiter has the turn; false if it was started concurrently with the owner.
  bool HasTurn(const Waiter& waiter) {
    std::lock_guard<std::mutex> lock(mu_);
    return waiter->has_turn;
  }

  // `changed` is called, under a lock, when the turn is taken (true) and when it is free again. For the process's life.
  void Watch(std::function<void(bool)> changed) {
    std::lock_guard<std::mutex> lock(mu_);
    changed_ = std::move(changed);
    changed_(count_ > 0);
  }

  // The number of waiters that were started concurrently with an owner so far.
  uint64_t admitted() {
    std::lock_guard<std::mutex> lock(mu_);
    return admitted_;
  }

 private:
  void TakeLocked(Turner& waiter) {
    if (count_++ == 0) {
      waits_ = false;
      if (changed_) changed_(true);
    }
    owner_ = waiter.token;
    waits_ |= waiter.waits;
    waiter.has_started = waiter.has_turn = true;
  }

  // Starts the `chosen` waiters of the queue: with the turn if `takes`, otherwise concurrently with its owner.
  template <typename Chosen>
  void StartLocked(Chosen chosen, bool takes, std::vector<Start>* starts) {
    queue_.remove_if([&](const Waiter& each) {
      if (!chosen(*each)) return false;
      if (takes) {
        TakeLocked(*each);
      } else {
        each->has_started = true;
        ++admitted_;
      }
      if (each->start) starts->push_back(std::exchange(each->start, nullptr));
      return true;
    });
  }

  void Notify(const std::vector<Start>& starts) {
    started_.notify_all();
    for (const Start& start : starts) start();
  }

  // Runs on a thread of its own while the queue has waiters.
  void WatchQueue() {
    while (true) {
      std::this_thread::sleep_for(kLook);
      std::vector<Start> starts;
      {
        std::lock_guard<std::mutex> lock(mu_);
        if (queue_.empty()) {
          is_watched_ = false;
          return;
        }
        const Clock::time_point latest = Clock::now() - kPatience;
        if (waits_) StartLocked([&](const Turner& each) { return each.since < latest; }, /*takes=*/false, &starts);
      }
      Notify(starts);
    }
  }

  std::mutex mu_;
  std::condition_variable started_;
  std::list<Waiter> queue_;
  Token owner_;
  int count_ = 0;       // the number of turns that the owner has
  bool waits_ = false;  // whether the owner may wait for other steps
  bool is_watched_ = false;
  std::function<void(bool)> changed_;
  uint64_t admitted_ = 0;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_TURN_H_
