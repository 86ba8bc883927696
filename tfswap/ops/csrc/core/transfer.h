// The end of one asynchronous copy, as an event that happens once.

#ifndef TFSWAP_OPS_CSRC_CORE_TRANSFER_H_
#define TFSWAP_OPS_CSRC_CORE_TRANSFER_H_

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace tfswap {

class Transfer {
 public:
  using Callback = std::function<void(const absl::Status&)>;

  // Runs `callback` when all copies of this process that have begun have ended: immediately, or on the thread that ends
  // the last one.
  static void AfterAll(std::function<void()> callback) {
    auto era = std::make_shared<Era>();  // dropped without the lock
    std::lock_guard<std::mutex> lock(era_mu_);
    era_.swap(era);
    era->next = era_;
    era->ended = std::move(callback);
  }

  Transfer() {
    std::lock_guard<std::mutex> lock(era_mu_);
    begun_in_ = era_;
  }

  bool ended() const {
    std::lock_guard<std::mutex> lock(mu_);
    return ended_;
  }

  // Meaningful once ended() is true.
  absl::Status status() const {
    std::lock_guard<std::mutex> lock(mu_);
    return status_;
  }

  // Runs `callback` immediately if the copy has ended, otherwise on the thread that ends it.
  void OnEnd(Callback callback) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!ended_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback(status_);
  }

  // Called once.
  void End(absl::Status status) {
    std::vector<Callback> callbacks;
    std::shared_ptr<Era> begun_in;  // dropped after the callbacks
    {
      std::lock_guard<std::mutex> lock(mu_);
      ended_ = true;
      status_ = std::move(status);
      callbacks.swap(callbacks_);
      begun_in.swap(begun_in_);
    }
    for (Callback& callback : callbacks) callback(status_);
  }

 private:
  // The time between two calls of AfterAll. The copies that began in it own it until they end, and it owns the next one:
  // so it is over when these copies, and all that began before, have ended.
  struct Era {
    std::shared_ptr<Era> next;
    std::function<void()> ended;
    ~Era() {
      if (ended) ended();
    }
  };
  static inline std::mutex& era_mu_ = *new std::mutex;  // never destroyed, as what runs copies
  static inline std::shared_ptr<Era>& era_ = *new std::shared_ptr<Era>(std::make_shared<Era>());

  mutable std::mutex mu_;
  std::shared_ptr<Era> begun_in_;
  bool ended_ = false;
  absl::Status status_;
  std::vector<Callback> callbacks_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_TRANSFER_H_
