// Whose turn it is: planned steps of a process share an arena, and run one at a time.
//
// A turn is a thread's, which looks at the arena and then runs a step in it, or a step's, by TensorFlow's number, where
// no such thread has called it: inside another tf.function. It is handed over in the order in which it was asked for.
// Who has it may ask again. A step whose kernels may wait for others (`waits`: collectives, Python functions, queues)
// may wait for just the step that waits for it: who has waited kPatience for such a step goes ahead concurrently.
//
// Knows nothing of TensorFlow.

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
  using Token = std::pair<bool, uint64_t>;  // whether a thread's; its number

  static constexpr std::chrono::seconds kPatience{10};
  static constexpr std::chrono::seconds kLook{1};

  // One that asks for the turn. `start` is called, without a lock, where it had to wait.
  struct Turner {
    Turner(Token token, bool waits) : token(token), waits(waits) {}

    const Token token;
    const bool waits;
    Start start;
    // Guarded by Turn::mu_:
    Clock::time_point since;
    bool has_started = false;
    bool has_turn = false;  // and is not concurrent with the owner
  };
  using Waiter = std::shared_ptr<Turner>;

  static Turn& Get() {
    static Turn* const turn = new Turn;
    return *turn;
  }

  // Whether it has been started. If not, it is queued.
  bool Enter(const Waiter& waiter) {
    std::lock_guard<std::mutex> lock(mu_);
    if (count_ == 0 || holder_ == waiter->token) {
      TakeLocked(*waiter);
      return true;
    }
    waiter->since = Clock::now();
    queue_.push_back(waiter);
    if (!is_watched_) {
      is_watched_ = true;
      std::thread([this] { Watch(); }).detach();
    }
    return false;
  }

  // Ends what was started, or does not wait any more.
  void Leave(const Waiter& waiter) {
    std::vector<Start> starts;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!waiter->has_started) {
        queue_.remove(waiter);
      } else if (waiter->has_turn && --count_ == 0 && !queue_.empty()) {
        const Token next = queue_.front()->token;
        StartLocked([&](const Turner& each) { return each.token == next; }, /*takes=*/true, &starts);
      }
    }
    Notify(starts);
  }

  // Lets it go ahead concurrently with the owner of the turn, if that one may wait for it.
  void Admit(const Waiter& waiter) {
    std::vector<Start> starts;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (waits_) StartLocked([&](const Turner& each) { return &each == waiter.get(); }, /*takes=*/false, &starts);
    }
    Notify(starts);
  }

  // Whether it has been started by the end of that time.
  bool Wait(const Waiter& waiter, std::chrono::microseconds time) {
    std::unique_lock<std::mutex> lock(mu_);
    return started_.wait_for(lock, time, [&] { return waiter->has_started; });
  }

  // Whether it is its turn, and it has not gone ahead concurrently with another.
  bool HasTurn(const Waiter& waiter) {
    std::lock_guard<std::mutex> lock(mu_);
    return waiter->has_turn;
  }

  // How many have gone ahead concurrently with others so far.
  uint64_t admitted() {
    std::lock_guard<std::mutex> lock(mu_);
    return admitted_;
  }

 private:
  void TakeLocked(Turner& waiter) {
    if (count_++ == 0) waits_ = false;
    holder_ = waiter.token;
    waits_ |= waiter.waits;
    waiter.has_started = waiter.has_turn = true;
  }

  // Starts those in the queue that are `chosen`: with the turn, or concurrently with its owner.
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

  // As long as anybody waits.
  void Watch() {
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
  Token holder_;
  int count_ = 0;       // how often the holder has it
  bool waits_ = false;  // whether the holder may wait for others
  bool is_watched_ = false;
  uint64_t admitted_ = 0;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_TURN_H_
