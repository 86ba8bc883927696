// The wait of an async kernel for a copy.

#ifndef TFSWAP_OPS_CSRC_CORE_COPY_WAIT_H_
#define TFSWAP_OPS_CSRC_CORE_COPY_WAIT_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "swapped.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/env.h"
#include "transfer.h"

namespace tfswap {

// The wait of one async kernel for a copy. It ends when the copy ends or the step is cancelled, whichever is first.
// `finish` runs only if the copy ended first. It owns what the kernel still needs, and is destroyed before the step
// continues.
class CopyWait : public std::enable_shared_from_this<CopyWait> {
 public:
  using Finish = std::function<absl::Status(const absl::Status& copy_status)>;

  static void Start(tensorflow::OpKernelContext* ctx, tensorflow::AsyncOpKernel::DoneCallback done,
                    std::shared_ptr<Transfer> transfer, Stall stall, Account account,
                    Finish finish) {
    if (transfer->ended()) {
      const absl::Status status = finish(transfer->status());
      finish = nullptr;
      if (!status.ok()) ctx->SetStatus(status);
      done();
      return;
    }
    auto wait = std::make_shared<CopyWait>(ctx, std::move(done), stall, std::move(account),
                                       std::move(finish));
    if (!wait->WatchCancellation()) return;
    // From here on the step may end at any time: ctx, and objects that its inputs own, must not be used.
    transfer->OnEnd([wait](const absl::Status& status) { wait->CopyEnded(status); });
  }

  CopyWait(tensorflow::OpKernelContext* ctx, tensorflow::AsyncOpKernel::DoneCallback done, Stall stall, Account account,
       Finish finish)
      : ctx_(ctx),
        done_(std::move(done)),
        stall_(stall),
        account_(std::move(account)),
        finish_(std::move(finish)) {
    if (ctx->runner() != nullptr) runner_ = *ctx->runner();
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Returns false if the step is cancelled already, which has ended the wait.
  bool WatchCancellation() {
    cancellation_ = ctx_->cancellation_manager();
    if (cancellation_ == nullptr) return true;
    token_ = cancellation_->get_cancellation_token();
    const bool watching =
        cancellation_->RegisterCallback(token_, [wait = shared_from_this()] {
          wait->Cancelled();
        });
    if (!watching) Cancelled();
    return watching;
  }

  void CopyEnded(const absl::Status& copy_status) {
    if (taken_.exchange(true)) return;
    account_.Add(stall_, std::chrono::duration<double>(Clock::now() - start_).count());
    // Not DeregisterCallback, which would wait for all callbacks of a running cancellation. If this call returns false,
    // our callback runs later and finds `taken_` set.
    if (cancellation_ != nullptr) cancellation_->TryDeregisterCallback(token_);
    const absl::Status status = finish_(copy_status);
    End(status);
  }

  void Cancelled() {
    if (taken_.exchange(true)) return;
    End(absl::CancelledError(
        absl::StrCat("The step was cancelled while '", ctx_->op_kernel().name(),
                     "' waited for a copy.")));
  }

  void End(const absl::Status& status) {
    finish_ = nullptr;
    if (!status.ok()) ctx_->SetStatus(status);
    // Not on this thread: it is a copy thread, and TensorFlow may run the rest of the step inside done(). Both are
    // moved out first, since done() may destroy this object.
    auto runner = std::move(runner_);
    auto done = std::move(done_);
    if (runner) {
      runner(std::move(done));
    } else {
      tensorflow::Env::Default()->SchedClosure(std::move(done));
    }
  }

  tensorflow::OpKernelContext* const ctx_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  const Stall stall_;
  const Account account_;
  Finish finish_;
  const Clock::time_point start_ = Clock::now();
  std::function<void(std::function<void()>)> runner_;
  tensorflow::CancellationManager* cancellation_ = nullptr;
  tensorflow::CancellationToken token_ = tensorflow::CancellationManager::kInvalidToken;
  std::atomic<bool> taken_{false};
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_COPY_WAIT_H_
