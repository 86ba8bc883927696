// A planned step inside another tf.function, where no Python code reads the arena before the step runs.
//
// The op Inside calls Python: the step then runs as if it were called alone, planned for the arena that it finds, and
// watched. It waits for the turn (turn.h) without a thread, and Python runs in that turn. If this process has no Python
// object of the step, because it loaded a file, the op runs the function of a plan, whose gate reads the arena
// (limit_check.h).
//
// Python runs on a thread of its own, since the step's kernels may need all threads of TensorFlow's pool.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "export.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "thread_turns.h"
#include "turn.h"

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::NodeDef;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// Arguments and results have the names of StatefulPartitionedCall's, since its kernel reads them by name.
REGISTER_OP("Tfswap>Inside")
    .Input("args: Tin")
    .Output("output: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 0")
    .Attr("f: func")
    .Attr("config_proto: string = ''")
    .Attr("executor_type: string = ''")
    .Attr("step: int")
    .Attr("waits: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Runs a planned step inside another function.

f, config_proto, executor_type: As of StatefulPartitionedCall: a function that carries out a plan.
step: What Python runs in its place, by number, in the process that has it (tfswap_set_step).
waits: Whether the step may wait for others (turn.h).
)doc");

// Python's functions, by number, as script_ops.py names them.
class Steps {
 public:
  static Steps& Get() {
    static Steps* const steps = new Steps;
    return *steps;
  }

  void Set(int64_t step, std::string token) {
    std::lock_guard<std::mutex> lock(mu_);
    if (token.empty()) {
      tokens_.erase(step);
    } else {
      tokens_[step] = std::move(token);
    }
  }

  std::string TokenOf(int64_t step) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = tokens_.find(step);
    return found == tokens_.end() ? "" : found->second;
  }

 private:
  std::mutex mu_;
  std::unordered_map<int64_t, std::string> tokens_;
};

// Threads that are kept, since to start one takes as long as a small step. There are as many as concurrent steps so
// far.
class Threads {
 public:
  static Threads& Get() {
    static Threads* const threads = new Threads;
    return *threads;
  }

  void Run(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (idle_ > 0) {
        --idle_;
        waiting_.push_back(std::move(work));
        return changed_.notify_one();
      }
    }
    std::thread([this, work = std::move(work)]() mutable { Serve(std::move(work)); }).detach();
  }

 private:
  void Serve(std::function<void()> work) {
    while (true) {
      work();
      work = nullptr;  // and what it holds
      std::unique_lock<std::mutex> lock(mu_);
      ++idle_;
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      work = std::move(waiting_.front());
      waiting_.pop_front();
    }
  }

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;  // for idle threads
  int idle_ = 0;
};

// Whether the called function has the node's arguments and results: TensorFlow's kernel aborts on further results.
absl::Status FitsFunction(OpKernelConstruction* ctx) {
  tensorflow::NameAttrList called;
  TF_RETURN_IF_ERROR(ctx->GetAttr("f", &called));
  const tensorflow::FunctionLibraryRuntime* const library = ctx->function_library();
  const tensorflow::FunctionDef* const def =
      library == nullptr ? nullptr : library->GetFunctionLibraryDefinition()->Find(called.name());
  if (def == nullptr) return absl::NotFoundError(absl::StrCat("there is no function ", called.name()));
  const tensorflow::OpDef& signature = def->signature();
  const auto fits = [](const auto& declared, tensorflow::DataTypeSlice types) {
    if (declared.size() != static_cast<int>(types.size())) return false;
    for (int i = 0; i < declared.size(); ++i) {
      if (declared[i].type() != tensorflow::DT_INVALID && declared[i].type() != types[i]) return false;
    }
    return true;
  };
  if (fits(signature.input_arg(), ctx->input_types()) && fits(signature.output_arg(), ctx->output_types())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("function ", called.name(), " has other arguments or results"));
}

class InsideOp : public AsyncOpKernel {
 public:
  explicit InsideOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    int64_t step;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("step", &step));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("waits", &waits_));
    const std::string token = Steps::Get().TokenOf(step);
    if (token.empty()) OP_REQUIRES_OK(ctx, FitsFunction(ctx));
    NodeDef call = ctx->def();
    call.mutable_attr()->erase("step");
    call.mutable_attr()->erase("waits");
    call.set_op(token.empty() ? "StatefulPartitionedCall" : "EagerPyFunc");
    if (!token.empty()) {
      for (const char* const unused : {"f", "config_proto", "executor_type"}) call.mutable_attr()->erase(unused);
      tensorflow::AddNodeAttr("token", token, &call);
    }
    const tensorflow::OpDef* op = nullptr;
    OP_REQUIRES_OK(ctx, tensorflow::OpRegistry::Global()->LookUpOpDef(call.op(), &op));
    tensorflow::AddDefaultsToNodeDef(*op, &call);
    std::shared_ptr<const tensorflow::NodeProperties> node;
    OP_REQUIRES_OK(ctx, tensorflow::NodeProperties::CreateFromNodeDef(std::move(call),
                                                                      tensorflow::OpRegistry::Global(), &node));
    OpKernel* made = nullptr;
    OP_REQUIRES_OK(ctx, tensorflow::CreateOpKernel(ctx->device_type(), ctx->device(), ctx->device()->GetAllocator({}),
                                                   ctx->function_library(), node, ctx->graph_def_version(), &made));
    kernel_.reset(made);
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    if (AsyncOpKernel* const call = kernel_->AsAsync()) return call->ComputeAsync(ctx, std::move(done));
    const auto waiter = std::make_shared<Turn::Turner>(Turn::Token(false, static_cast<uint64_t>(ctx->step_id())), waits_);
    const auto run = [this, ctx, waiter, done = std::move(done)] {
      {
        Employed employed(waiter->token);
        kernel_->Compute(ctx);
      }
      Turn::Get().Leave(waiter);
      done();
    };
    waiter->start = [run] { Threads::Get().Run(run); };
    if (Turn::Get().Enter(waiter)) std::exchange(waiter->start, nullptr)();
  }

 private:
  bool waits_;
  std::unique_ptr<OpKernel> kernel_;  // of Python's function, or of the function that carries out a plan
};

// On a CPU alone: on a GPU the caller has small integers in host memory, and the step has them on the device.
REGISTER_KERNEL_BUILDER(Name("Tfswap>Inside").Device(tensorflow::DEVICE_CPU), InsideOp);

}  // namespace
}  // namespace tfswap

// Sets the Python function of a step, by its token; "" removes it.
TFSWAP_C_API void tfswap_set_step(int64_t step, const char* token) { tfswap::Steps::Get().Set(step, token); }
