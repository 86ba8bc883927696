// The end of one asynchronous copy, as an event that happens once.

#ifndef TFSWAP_OPS_CSRC_CORE_TRANSFER_H_
#define TFSWAP_OPS_CSRC_CORE_TRANSFER_H_

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace tfswap {

class Transfer {
 public:
  using Callback = std::function<void(const absl::Status&)>;

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
    {
      std::lock_guard<std::mutex> lock(mu_);
      ended_ = true;
      status_ = std::move(status);
      callbacks.swap(callbacks_);
    }
    for (Callback& callback : callbacks) callback(status_);
  }

 private:
  mutable std::mutex mu_;
  bool ended_ = false;
  absl::Status status_;
  std::vector<Callback> callbacks_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_TRANSFER_H_
