// The executor of planned steps: TensorFlow's own, which runs one of them at a time (turn.h), and which runs nothing on
// a thread that only instantiates.
//
// TensorFlow makes a function's executors, with their kernels and folded constants, when the function is first called,
// and there is no other way to have them made. A call between tfswap_instantiate_only(true) and (false) ends without an
// error before the first kernel of any device, and its results are dead: the runtime lets eager calls have such ones.
// All executors of a call are made, and begin, on the thread that calls (process_function_library_runtime.cc); where
// eager execution is asynchronous that is another one, so Python turns that off meanwhile.
//
// A step that is called by a thread which has the turn runs in that. Others wait for theirs without a thread where they
// can: the kernels of the step that has the turn may need all threads that there are.
//
// Calls ask for it by name: ir/custom_ops.py, EXECUTOR.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "export.h"
#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/common_runtime/executor_factory.h"
#include "tensorflow/core/common_runtime/local_executor_params.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/platform/env.h"
#include "thread_turns.h"
#include "turn.h"

namespace tfswap {
namespace {

using tensorflow::Executor;

thread_local bool instantiates_only = false;

class StepExecutor : public Executor {
 public:
  StepExecutor(std::unique_ptr<Executor> executor, bool waits) : executor_(std::move(executor)), waits_(waits) {}

  absl::Status Run(const Args& args) override {
    if (instantiates_only) return absl::OkStatus();
    if (ThreadHasTurn()) return executor_->Run(args);
    const Turn::Waiter waiter = WaiterOf(args);
    if (!Turn::Get().Enter(waiter)) {
      while (!Turn::Get().Wait(waiter, Turn::kLook)) {
      }
    }
    const absl::Status status = executor_->Run(args);
    Turn::Get().Leave(waiter);
    return status;
  }

 private:
  void RunAsyncInternal(const Args& args, DoneCallback done) override {
    if (instantiates_only) return done(absl::OkStatus());
    if (ThreadHasTurn()) return executor_->RunAsync(args, std::move(done));
    const Turn::Waiter waiter = WaiterOf(args);
    const auto run = [this, waiter, args, done = std::move(done)] {
      executor_->RunAsync(args, [waiter, done](const absl::Status& status) {
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

// From now on calls of planned steps on this thread make what they need and run nothing; or run again.
TFSWAP_C_API void tfswap_instantiate_only(bool only) { tfswap::instantiates_only = only; }

// How many turns this thread has asked for and not ended.
TFSWAP_C_API uint64_t tfswap_turns() { return tfswap::turns_of_thread.size(); }

// Asks for one more; whether it begins now. `waits`: whether what runs in it may wait for others.
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

// Waits for that long at most; whether the turn has begun.
TFSWAP_C_API bool tfswap_await_turn(int64_t microseconds) {
  return tfswap::Turn::Get().Wait(tfswap::turns_of_thread.front(), std::chrono::microseconds(microseconds));
}

// Whether this thread's turn is its own, and not concurrent with another's.
TFSWAP_C_API bool tfswap_has_turn() {
  const auto& turns = tfswap::turns_of_thread;
  return !turns.empty() && tfswap::Turn::Get().HasTurn(turns.front());
}

// Begins concurrently with the step that has the turn, if that may wait for others.
TFSWAP_C_API void tfswap_admit_turn() { tfswap::Turn::Get().Admit(tfswap::turns_of_thread.front()); }

// Ends turns, those that have not begun too, until this many have ended.
TFSWAP_C_API void tfswap_end_turns(uint64_t left) {
  std::vector<tfswap::Turn::Waiter>& turns = tfswap::turns_of_thread;
  while (turns.size() > left) {
    const tfswap::Turn::Waiter last = turns.back();
    turns.pop_back();
    if (last != nullptr) tfswap::Turn::Get().Leave(last);
  }
}

// How many turns, of all threads and steps, have begun concurrently with another so far.
TFSWAP_C_API uint64_t tfswap_admitted_turns() { return tfswap::Turn::Get().admitted(); }
