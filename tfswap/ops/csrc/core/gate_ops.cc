// The gate: the first node of a planned step.
//
//   executed  it keeps the functions of the step as TensorFlow gave them to the executor: after all of its passes,
//             partitioned by device. They are kept once for each time that TensorFlow makes the step, for any caller
//   limit     of a saved step, which runs in another process than planned, and of a session's: it checks whether the
//             arena there keeps the limit (limit_check.h)
//   begun     it starts the counts of the step's copies (copy_stats.h)
//
// Python names a gate by a number, and calls the functions at the end of this file.

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "export.h"
#include "limit_check.h"
#include "runtime.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("Tfswap>Gate")
    .Input("arguments: T")
    .Attr("T: list(type) >= 0 = []")
    .Attr("gate: int")
    .Attr("owner: int = 0")
    .Attr("waits: bool = false")
    .Attr("limit: int = 0")
    .Attr("requests: list(string) = []")
    .Attr("exact: bool = false")
    .Attr("sizes: list(shape) = []")
    .Attr("origin: list(func) = []")
    .Attr("request: string = ''")
    .Attr("plan: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Runs before all kernels with effects in a step, and keeps the functions that TensorFlow made
the step from (tfswap_take_executed).

owner: The number of the step's owner, as in SwapOut; 0 for none.
waits: Whether kernels of the step may wait for other steps (step_executor.cc).
limit: Of a saved step: its limit in bytes; 0 if the limit is not checked (limit_check.h).
requests: The step's requests to the allocator, for each extreme of the sizes that are known by
  bounds only (passes/tactics/limit_check.py).
exact: Whether `sizes` has all arguments whose sizes the requests depend on.
arguments: The step's arguments that may be smaller than planned. Only their shapes are read.
sizes: The planned shapes of `arguments`.
origin: Of a saved decorated step: the function that it was made from. No kernel reads this or
  the attributes below.
request, plan: The request and the plan of the step (compiler/origin.py).
)doc");

class Gates {
 public:
  static Gates& Get() {
    static Gates* const gates = new Gates;
    return *gates;
  }

  void Watch(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    executed_[gate];
  }

  // Ends Watch.
  void Forget(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    executed_.erase(gate);
    peaks_.erase(gate);
  }

  // Keeps the peak that the step which begins reaches; 0 where it is not known.
  void SetPeak(int64_t gate, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mu_);
    peaks_[gate] = bytes;
  }

  uint64_t Peak(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = peaks_.find(gate);
    return found == peaks_.end() ? 0 : found->second;
  }

  bool IsWatched(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    return executed_.count(gate) > 0;
  }

  // Keeps the functions of a new step, a serialized FunctionDefLibrary.
  void SetExecuted(int64_t gate, std::string functions) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = executed_.find(gate);
    if (found == executed_.end()) return;
    found->second = std::move(functions);
    ++Runtime::Get().executed();
  }

  // Writes the functions to `to` and discards them, if they need no more than `room` bytes. Returns their size.
  uint64_t TakeExecuted(int64_t gate, char* to, uint64_t room) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = executed_.find(gate);
    if (found == executed_.end()) return 0;
    std::string& functions = found->second;
    const uint64_t size = functions.size();
    if (size > 0 && size <= room) {
      std::memcpy(to, functions.data(), size);
      std::string().swap(functions);
    }
    return size;
  }

 private:
  std::mutex mu_;
  std::unordered_map<int64_t, std::string> executed_;  // by watched gate
  std::unordered_map<int64_t, uint64_t> peaks_;        // by gate with a limit
};

class GateOp : public OpKernel {
 public:
  explicit GateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gate", &gate_));
    int64_t owner;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("owner", &owner));
    if (owner != 0) client_ = Runtime::Get().client(owner);
    OP_REQUIRES_OK(ctx, limit_.Read(ctx));
    // The library that a step's kernels see is the step's own: the function of each device
    // (process_function_library_runtime.cc) and what these call. A session's graph is no function.
    if (ctx->function_library() != nullptr && Gates::Get().IsWatched(gate_)) {
      const auto* const library = ctx->function_library()->GetFunctionLibraryDefinition();
      Gates::Get().SetExecuted(gate_, library->ToProto().SerializeAsString());
    }
  }

  void Compute(OpKernelContext* ctx) override {
    uint64_t peak_bytes;
    const bool fails = !Gates::Get().IsWatched(gate_);
    OP_REQUIRES_OK(ctx, limit_.Check(ctx, fails, /*strictly=*/gate_ != 0, &peak_bytes));
    if (gate_ != 0 && limit_.checks()) Gates::Get().SetPeak(gate_, peak_bytes);
    if (client_ != nullptr) client_->copy_stats.Begin();
  }

 private:
  int64_t gate_;
  std::shared_ptr<Client> client_;
  LimitCheck limit_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>Gate").Device(tensorflow::DEVICE_CPU), GateOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Gate").Device(tensorflow::DEVICE_GPU), GateOp);

}  // namespace
}  // namespace tfswap

// Starts to keep the functions of the gate's step, for tfswap_take_executed.
TFSWAP_C_API void tfswap_watch_gate(int64_t gate) { tfswap::Gates::Get().Watch(gate); }

TFSWAP_C_API void tfswap_forget_gate(int64_t gate) { tfswap::Gates::Get().Forget(gate); }

// The peak that the latest step behind the gate was to reach; 0 if that was not known exactly.
TFSWAP_C_API uint64_t tfswap_peak_at_gate(int64_t gate) { return tfswap::Gates::Get().Peak(gate); }

// Writes a serialized FunctionDefLibrary to `to` and discards it, if it is no larger than `room` bytes. Returns its
// size; 0 if TensorFlow has made no step since the last call.
TFSWAP_C_API uint64_t tfswap_take_executed(int64_t gate, char* to, uint64_t room) {
  return tfswap::Gates::Get().TakeExecuted(gate, to, room);
}
