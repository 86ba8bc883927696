// A kernel that runs concurrently with the kernels after it, in a step whose memory is known beforehand.
//
// A planned order runs kernel after kernel, and a kernel that is shared among threads leaves them idle at its ends and
// takes more of them than on one core. Of a kernel that is in two parts, what the allocator is asked for, and when what
// it gave comes back, does not depend on how long it takes:
//
//   Start   ends when the kernel has made all of its allocations; the kernel goes on, on its own core;
//   Finish  ends when the kernel has; only then it gives up what it read, and its temporaries.
//
// No thread waits: the thread of a kernel that Finish waits for goes on with what follows.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "concurrent_kernel.h"
#include "inner_kernels.h"
#include "op_support.h"
#include "serial_executor.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataType;
using tensorflow::NodeProperties;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeAndType;
using tensorflow::shape_inference::ShapeHandle;

template <typename Context>
absl::Status ParseStarted(const Context& ctx, std::shared_ptr<const NodeProperties>* kernel) {
  std::vector<std::string> serialized;
  TF_RETURN_IF_ERROR(ctx.GetAttr("kernels", &serialized));
  if (serialized.size() != 1) return absl::InvalidArgumentError("Tfswap>Start: one kernel is needed.");
  TF_RETURN_IF_ERROR(ParseKernel(serialized[0], kernel));
  std::vector<DataType> given;
  TF_RETURN_IF_ERROR(ctx.GetAttr("Tin", &given));
  if (given != std::vector<DataType>((*kernel)->input_types.begin(), (*kernel)->input_types.end())) {
    return absl::InvalidArgumentError("Tfswap>Start: Tin is not what the kernel takes.");
  }
  return absl::OkStatus();
}

absl::Status StartShape(InferenceContext* ctx) {
  std::shared_ptr<const NodeProperties> kernel;
  TF_RETURN_IF_ERROR(ParseStarted(*ctx, &kernel));
  std::vector<ShapeHandle> made;
  TF_RETURN_IF_ERROR(InferKernelShapes(ctx, *kernel, 0, &made));
  std::vector<ShapeAndType> told;
  for (size_t i = 0; i < made.size(); ++i) told.emplace_back(made[i], kernel->output_types[i]);
  ctx->set_output(0, ctx->Scalar());
  ctx->set_output_handle_shapes_and_types(0, told);  // for Finish in the same graph
  return absl::OkStatus();
}

absl::Status FinishShape(InferenceContext* ctx) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(ctx->WithRank(ctx->input(0), 0, &unused));
  const std::vector<ShapeAndType>* told = ctx->input_handle_shapes_and_types(0);
  const bool is_told = told != nullptr && static_cast<int>(told->size()) == ctx->num_outputs();
  for (int i = 0; i < ctx->num_outputs(); ++i) ctx->set_output(i, is_told ? (*told)[i].shape : ctx->UnknownShape());
  return absl::OkStatus();
}

REGISTER_OP("Tfswap>Start")
    .Input("inputs: Tin")
    .Output("started: variant")
    .Attr("Tin: list(type) >= 1")
    .Attr("kernels: list(string) >= 1")
    .Attr("allocations: int >= 1")
    .SetIsStateful()
    .SetShapeFn(StartShape)
    .Doc(R"doc(
Starts one of TensorFlow's kernels, and ends when that has made its allocations.

inputs: What the kernel reads.
started: For Finish.
kernels: The node, as a serialized NodeDef.
allocations: How many the kernel makes.
)doc");

REGISTER_OP("Tfswap>Finish")
    .Input("started: variant")
    .Output("outputs: Tout")
    .Attr("Tout: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn(FinishShape)
    .Doc(R"doc(
Waits for the kernel that Start has started. Once for each of those.

outputs: What the kernel makes.
)doc");

// A kernel between Start and Finish.
class StartedKernel : public std::enable_shared_from_this<StartedKernel> {
 public:
  // Args:
  //   kernel: outlives the step that it runs in, should that fail before Finish.
  StartedKernel(OpKernelContext* ctx, std::shared_ptr<OpKernel> kernel, int64_t allocations,
                std::shared_ptr<const OneCore> one_core, AsyncOpKernel::DoneCallback done)
      : kernel_(std::move(kernel)),
        one_core_(std::move(one_core)),
        runner_(Behind(*ctx->runner())),
        done_(std::move(done)),
        allocator_(new Deferring(ctx->device()->GetAllocator({}), allocations, [this] { OfferNext(); })),
        device_(ctx->device(), allocator_, one_core_.get()),
        run_(std::make_unique<KernelRun>(ctx, kernel_.get(), &device_, 0)) {}
  StartedKernel(const StartedKernel&) = delete;
  StartedKernel& operator=(const StartedKernel&) = delete;
  ~StartedKernel() { GiveBack(); }

  void Run() {
    run_->Run();
    if (done_) std::exchange(done_, nullptr)();  // it has made fewer allocations, or failed
    std::function<void()> then;
    {
      std::lock_guard<std::mutex> lock(mu_);
      has_ended_ = true;
      then = std::move(then_);
    }
    if (then) then();
  }

  // Calls `then` once the kernel has ended. False where another one waits.
  bool OnEnd(std::function<void()> then) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (then_) return false;
      if (!has_ended_) {
        then_ = std::move(then);
        return true;
      }
    }
    then();
    return true;
  }

  // After the end: to the outputs of Finish, or its status.
  void HandOver(OpKernelContext* ctx) {
    if (run_ == nullptr) {
      return ctx->SetStatus(absl::InvalidArgumentError("Tfswap>Finish: the kernel has been finished already."));
    }
    const auto made = kernel_->output_types(), said = ctx->op_kernel().output_types();
    if (!std::equal(made.begin(), made.end(), said.begin(), said.end())) {
      return ctx->SetStatus(absl::InvalidArgumentError("Tfswap>Finish: Tout is not what the kernel makes."));
    }
    run_->HandOver(ctx, 0);
    GiveBack();
  }

 private:
  // Within an allocation of the kernel's, on whose thread it goes on.
  void OfferNext() { runner_(std::exchange(done_, nullptr)); }

  void GiveBack() {
    if (run_ == nullptr) return;
    run_.reset();
    allocator_->Close();
  }

  const std::shared_ptr<OpKernel> kernel_;
  const std::shared_ptr<const OneCore> one_core_;
  const Runner runner_;
  AsyncOpKernel::DoneCallback done_;  // of Start
  Deferring* const allocator_;        // its own, once closed
  InnerDevice device_;
  std::unique_ptr<KernelRun> run_;  // until it is handed over
  std::mutex mu_;
  bool has_ended_ = false;
  std::function<void()> then_;
};

struct Started : ProcessLocal {
  static constexpr char kMaker[] = "Start";
  std::shared_ptr<StartedKernel> kernel;
  std::string TypeName() const { return "tfswap::Started"; }
};

class StartOp : public AsyncOpKernel {
 public:
  explicit StartOp(OpKernelConstruction* ctx)
      : AsyncOpKernel(ctx), one_core_(std::make_shared<const OneCore>(*ctx->device())) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("allocations", &allocations_));
    std::shared_ptr<const NodeProperties> node;
    OP_REQUIRES_OK(ctx, ParseStarted(*ctx, &node));
    std::unique_ptr<OpKernel> kernel;
    OP_REQUIRES_OK(ctx, MakeKernel(ctx, node, &kernel));
    kernel_ = std::move(kernel);
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto started = std::make_shared<StartedKernel>(ctx, kernel_, allocations_, one_core_, std::move(done));
    SetVariantOutput(ctx, 0, Started{{}, started});
    started->Run();
  }

 private:
  int64_t allocations_;
  std::shared_ptr<OpKernel> kernel_;
  std::shared_ptr<const OneCore> one_core_;
};

class FinishOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Started* started;
    OP_REQUIRES_OK_ASYNC(ctx, GetVariantInput(ctx, 0, &started), done);
    const std::shared_ptr<StartedKernel> kernel = started->kernel;
    const bool waits = kernel->OnEnd([ctx, done, kernel = kernel.get()] {  // the input holds it
      kernel->HandOver(ctx);
      done();
    });
    OP_REQUIRES_ASYNC(ctx, waits, absl::InvalidArgumentError("Tfswap>Finish: another one waits for this kernel."),
                      done);
  }
};

// On a CPU alone: a GPU's kernels run one after another on its stream.
REGISTER_KERNEL_BUILDER(Name("Tfswap>Start").Device(tensorflow::DEVICE_CPU), StartOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Finish").Device(tensorflow::DEVICE_CPU), FinishOp);

}  // namespace
}  // namespace tfswap
