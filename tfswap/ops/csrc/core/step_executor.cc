// The executor of planned steps. It is TensorFlow's own, with three additions: one planned step runs at a time (turn.h),
// a thread that only instantiates runs no kernels, and a step that fails, or is cancelled, ends when its copies have: they
// own memory of devices and of pools, all of which the next step counts on.
//
// TensorFlow makes a function's executors, with their kernels and folded constants, when the function is first called,
// and there is no other way to make them. A call between tfswap_instantiate_only(true) and (false) ends without an
// error before the first kernel of any device, and its results are dead tensors, which the runtime permits for eager
// calls. All executors of a call are made, and started, on the calling thread (process_function_library_runtime.cc).
// With asynchronous eager execution that is another thread, so Python turns it off meanwhile.
//
// A step that is called by the thread with the turn runs in that turn. Other steps wait for a turn of their own,
// without a thread if possible: the kernels of the running step may need all threads of the pool.
//
// Calls name this executor: ir/custom_ops.py, EXECUTOR.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "export.h"
#include "runtime.h"
#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/common_runtime/executor_factory.h"
#include "tensorflow/core/common_runtime/local_executor_params.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/platform/env.h"
#include "thread_turns.h"
#include "transfer.h"
#include "turn.h"

namespace tfswap {
namespace {

using tensorflow::Executor;

thread_local bool instantiates_only = false;

class StepExecutor : public Executor {
 public:
  StepExecutor(std::unique_ptr<Executor> executor, bool waits) : executor_(std::move(executor)), waits_(waits) {}

 private:
  void RunAsyncInternal(const Args& args, DoneCallback done) override {
    if (instantiates_only) return done(absl::OkStatus());
    if (ThreadHasTurn()) return Finish(args, std::move(done));
    const Turn::Waiter waiter = WaiterOf(args);
    const auto run = [this, waiter, args, done = std::move(done)] {
      Finish(args, [waiter, done](const absl::Status& status) {
        Turn::Get().Leave(waiter);
        done(status);
      });
    };
    waiter->start = [run] { tensorflow::Env::Default()->SchedClosure(run); };
    if (Turn::Get().Enter(waiter)) {
      waiter->start = nullptr;
      run();
    }
  }

  // Runs the kernels, and, where one fails, waits for the copies.
  void Finish(const Args& args, DoneCallback done) {
    executor_->RunAsync(args, [done = std::move(done)](const absl::Status& status) {
      if (status.ok() || Runtime::Get().is_late_child()) return done(status);
      // Not on this thread: it may be a copy thread, and TensorFlow may run what follows inside `done`.
      Transfer::AfterAll([done, status] {
        tensorflow::Env::Default()->SchedClosure([done, status] { done(status); });
      });
    });
  }

  // All executors of a step share its number.
  Turn::Waiter WaiterOf(const Args& args) const {
    return std::make_shared<Turn::Turner>(Turn::Token(false, static_cast<uint64_t>(args.step_id)), waits_);
  }

  const std::unique_ptr<Executor> executor_;
  const bool waits_;
};

class StepExecutorFactory : public tensorflow::ExecutorFactory {
 public:
  absl::Status NewExecutor(const tensorflow::LocalExecutorParams& params, const tensorflow::Graph& graph,
                           std::unique_ptr<Executor>* made) override {
    std::unique_ptr<Executor> executor;
    TF_RETURN_IF_ERROR(tensorflow::NewExecutor("", params, graph, &executor));
    bool waits = false;
    for (const tensorflow::Node* const node : graph.op_nodes()) {
      if (node->type_string() == "Tfswap>Gate") TF_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node->attrs(), "waits", &waits));
    }
    *made = std::make_unique<StepExecutor>(std::move(executor), waits);
    return absl::OkStatus();
  }
};

[[maybe_unused]] const bool registered = [] {
  tensorflow::ExecutorFactory::Register("TFSWAP", new StepExecutorFactory);
  return true;
}();

}  // namespace
}  // namespace tfswap

// Whether calls of planned steps on this thread make their executors and run no kernels.
TFSWAP_C_API void tfswap_instantiate_only(bool only) { tfswap::instantiates_only = only; }

// The number of turns that this thread has requested and not ended.
TFSWAP_C_API uint64_t tfswap_turns() { return tfswap::turns_of_thread.size(); }

// Requests a turn. Returns whether it begins immediately. `waits`: whether the step may wait for other steps.
TFSWAP_C_API bool tfswap_begin_turn(bool waits) {
  using tfswap::Turn;
  std::vector<Turn::Waiter>& turns = tfswap::turns_of_thread;
  if (!turns.empty()) {
    turns.push_back(nullptr);
    return true;
  }
  const Turn::Token own(true, reinterpret_cast<uintptr_t>(&turns));
  turns.push_back(std::make_shared<Turn::Turner>(tfswap::employer.value_or(own), waits));
  return Turn::Get().Enter(turns.back());
}

// Waits for the turn, for `microseconds` at most. Returns whether it has begun.
TFSWAP_C_API bool tfswap_await_turn(int64_t microseconds) {
  return tfswap::Turn::Get().Wait(tfswap::turns_of_thread.front(), std::chrono::microseconds(microseconds));
}

// Whether this thread has the turn; false if it was started concurrently with the owner.
TFSWAP_C_API bool tfswap_has_turn() {
  const auto& turns = tfswap::turns_of_thread;
  return !turns.empty() && tfswap::Turn::Get().HasTurn(turns.front());
}

// Starts this thread's turn concurrently with the owner's, if the owner may wait for other steps.
TFSWAP_C_API void tfswap_admit_turn() { tfswap::Turn::Get().Admit(tfswap::turns_of_thread.front()); }

// Ends turns of this thread, begun or not, until `left` remain.
TFSWAP_C_API void tfswap_end_turns(uint64_t left) {
  std::vector<tfswap::Turn::Waiter>& turns = tfswap::turns_of_thread;
  while (turns.size() > left) {
    const tfswap::Turn::Waiter last = turns.back();
    turns.pop_back();
    if (last != nullptr) tfswap::Turn::Get().Leave(last);
  }
}

// The number of turns, of all threads and steps, that were started concurrently with another so far.
TFSWAP_C_API uint64_t tfswap_admitted_turns() { return tfswap::Turn::Get().admitted(); }
