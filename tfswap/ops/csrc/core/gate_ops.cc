// The first node of a planned step, and what it finds out about the step behind it.
//
//   closed    while its gate is closed the step fails before any kernel has run: TensorFlow has then made the
//             step's kernels and constants, and the arena can be looked at as the step will find it
//   executed  the functions that this step was made from, as TensorFlow gave them to the executor: after all of its
//             passes, partitioned by device. Told once for each time that TensorFlow makes the step, whoever calls it
//   begun     what the step's copies do is counted from here on (traffic.h)
//
// Python names a gate by a number, and calls the functions at the end of this file.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "export.h"
#include "runtime.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {
namespace {

using tensorflow::FunctionLibraryRuntime;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("Tfswap>Gate")
    .Attr("gate: int")
    .Attr("owner: int = 0")
    .Attr("bodies: list(func) = []")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Fails with Aborted while the gate of that number is closed (tfswap_close_gate), which it is
in the process that plans the step. Where a saved function is loaded it is open.

owner: Whose step begins here, by number, as SwapOut has it; 0 for nobody's.
bodies: What loops and conditionals of the same graph run. TensorFlow would make the kernels
  and constants of these functions when they first run; here they are made with the gate, and
  go with it.
)doc");

class Gates {
 public:
  static Gates& Get() {
    static Gates* const gates = new Gates;
    return *gates;
  }

  void Watch(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    gates_[gate].watched = true;
  }

  void Close(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    gates_[gate].closed = true;
  }

  void Open(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    gates_[gate].closed = false;
  }

  // Nobody will ask any more. A gate that is closed stays so.
  void Forget(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = gates_.find(gate);
    if (found == gates_.end()) return;
    if (found->second.closed) {
      found->second.watched = false;
      found->second.executed.clear();
    } else {
      gates_.erase(found);
    }
  }

  // Another process's gate is open.
  bool IsOpen(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = gates_.find(gate);
    return found == gates_.end() || !found->second.closed;
  }

  bool IsWatched(int64_t gate) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = gates_.find(gate);
    return found != gates_.end() && found->second.watched;
  }

  // Functions of a step that has just been made, as a FunctionDefLibrary.
  void SetExecuted(int64_t gate, std::string functions) {
    std::lock_guard<std::mutex> lock(mu_);
    gates_[gate].executed = std::move(functions);
    ++Runtime::Get().executed();
  }

  // Writes them to `to`, where there is room, and forgets them. Returns their size.
  uint64_t TakeExecuted(int64_t gate, char* to, uint64_t room) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = gates_.find(gate);
    if (found == gates_.end()) return 0;
    std::string& functions = found->second.executed;
    const uint64_t size = functions.size();
    if (size > 0 && size <= room) {
      std::memcpy(to, functions.data(), size);
      std::string().swap(functions);
    }
    return size;
  }

 private:
  struct Gate {
    bool closed = false;
    bool watched = false;
    std::string executed;
  };

  std::mutex mu_;
  std::unordered_map<int64_t, Gate> gates_;
};

// Functions that are instantiated for one executor, by one of its kernels, and released with it.
//
// A runtime counts who has instantiated a function, and frees it with the last (function.cc). Kernels that run functions
// instantiate them under the same key when they first run, and release their own count when they are destroyed
// (IfOp, CaseOp, PartitionedCallOp of TensorFlow 2.18 to 2.21; loop_ops.cc). A runtime that is being destroyed
// ignores releases.
class ExecutorFunctions {
 public:
  explicit ExecutorFunctions(FunctionLibraryRuntime* runtime) : runtime_(runtime) {}

  ~ExecutorFunctions() {
    for (const Handle function : functions_) runtime_->ReleaseHandle(function).IgnoreError();
  }

  ExecutorFunctions(const ExecutorFunctions&) = delete;
  ExecutorFunctions& operator=(const ExecutorFunctions&) = delete;

  // Makes the functions as the kernels that run them do, so that those find them made.
  absl::Status Make(const std::vector<tensorflow::NameAttrList>& functions) {
    FunctionLibraryRuntime::InstantiateOptions options;
    options.create_kernels_eagerly = true;
    for (const tensorflow::NameAttrList& function : functions) {
      Handle handle;
      TF_RETURN_IF_ERROR(
          runtime_->Instantiate(function.name(), tensorflow::AttrSlice(&function.attr()), options, &handle));
      functions_.push_back(handle);
    }
    return absl::OkStatus();
  }

 private:
  using Handle = FunctionLibraryRuntime::Handle;

  FunctionLibraryRuntime* const runtime_;  // outlives its executors' kernels
  std::vector<Handle> functions_;
};

class GateOp : public OpKernel {
 public:
  explicit GateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gate", &gate_));
    int64_t owner;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("owner", &owner));
    if (owner != 0) client_ = Runtime::Get().client(owner);
    std::vector<tensorflow::NameAttrList> bodies;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bodies", &bodies));
    if (bodies.empty()) return;
    bodies_ = std::make_unique<ExecutorFunctions>(ctx->function_library());
    OP_REQUIRES_OK(ctx, bodies_->Make(bodies));
  }

  void Compute(OpKernelContext* ctx) override {
    if (client_ != nullptr) client_->traffic.Begin();
    // Once open it stays so: no lock from then on.
    if (open_) return;
    if (!told_.exchange(true) && Gates::Get().IsWatched(gate_)) Tell(ctx);
    open_ = Gates::Get().IsOpen(gate_);
    OP_REQUIRES(ctx, open_,
                absl::AbortedError(absl::StrCat("tfswap: gate ", gate_, " is closed")));
  }

 private:
  // The library that a step's kernels see is the step's own: the function of each device
  // (process_function_library_runtime.cc) and what these call.
  void Tell(OpKernelContext* ctx) const {
    if (ctx->function_library() == nullptr) return;  // a session's graph is no function
    const auto* const library = ctx->function_library()->GetFunctionLibraryDefinition();
    Gates::Get().SetExecuted(gate_, library->ToProto().SerializeAsString());
  }

  int64_t gate_;
  std::shared_ptr<Client> client_;
  std::unique_ptr<ExecutorFunctions> bodies_;
  std::atomic<bool> open_{false};
  std::atomic<bool> told_{false};
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>Gate").Device(tensorflow::DEVICE_CPU), GateOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Gate").Device(tensorflow::DEVICE_GPU), GateOp);

}  // namespace
}  // namespace tfswap

// From now on what is executed behind the gate is kept, for tfswap_take_executed.
TFSWAP_C_API void tfswap_watch_gate(int64_t gate) { tfswap::Gates::Get().Watch(gate); }

TFSWAP_C_API void tfswap_close_gate(int64_t gate) { tfswap::Gates::Get().Close(gate); }

TFSWAP_C_API void tfswap_open_gate(int64_t gate) { tfswap::Gates::Get().Open(gate); }

TFSWAP_C_API void tfswap_forget_gate(int64_t gate) { tfswap::Gates::Get().Forget(gate); }

// A serialized FunctionDefLibrary, which is written to `to` and forgotten where it is no larger than `room`. Returns
// its size; 0 when nothing has been executed since the last call.
TFSWAP_C_API uint64_t tfswap_take_executed(int64_t gate, char* to, uint64_t room) {
  return tfswap::Gates::Get().TakeExecuted(gate, to, room);
}
