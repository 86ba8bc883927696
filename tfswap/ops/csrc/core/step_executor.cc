// The executor of planned steps: TensorFlow's own, which on a thread that only instantiates runs nothing.
//
// TensorFlow makes a function's executors, with their kernels and folded constants, when the function is first called,
// and there is no other way to have them made. A call between tfswap_instantiate_only(true) and (false) ends without an
// error before the first kernel of any device, and its results are dead: the runtime lets eager calls have such ones.
// All executors of a call are made, and begin, on the thread that calls (process_function_library_runtime.cc); where
// eager execution is asynchronous that is another one, so Python turns that off meanwhile.
//
// Calls ask for it by name: oplib/names.py, EXECUTOR.

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "export.h"
#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/common_runtime/executor_factory.h"
#include "tensorflow/core/common_runtime/local_executor_params.h"

namespace tfswap {
namespace {

using tensorflow::Executor;

thread_local bool instantiates_only = false;

class StepExecutor : public Executor {
 public:
  explicit StepExecutor(std::unique_ptr<Executor> executor) : executor_(std::move(executor)) {}

  absl::Status Run(const Args& args) override {
    return instantiates_only ? absl::OkStatus() : executor_->Run(args);
  }

 private:
  void RunAsyncInternal(const Args& args, DoneCallback done) override {
    if (instantiates_only) {
      done(absl::OkStatus());
    } else {
      executor_->RunAsync(args, std::move(done));
    }
  }

  const std::unique_ptr<Executor> executor_;
};

class StepExecutorFactory : public tensorflow::ExecutorFactory {
 public:
  absl::Status NewExecutor(const tensorflow::LocalExecutorParams& params, const tensorflow::Graph& graph,
                           std::unique_ptr<Executor>* made) override {
    std::unique_ptr<Executor> executor;
    TF_RETURN_IF_ERROR(tensorflow::NewExecutor("", params, graph, &executor));
    *made = std::make_unique<StepExecutor>(std::move(executor));
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
