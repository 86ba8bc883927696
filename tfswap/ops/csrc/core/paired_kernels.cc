// Two kernels side by side in a step whose memory is known beforehand.
//
// A kernel that one core is enough for leaves the others idle, so a planned order may let a second one run beside it.
// What the allocator is asked for, and when what it gave comes back, must not depend on which of the two is faster. So
// one op runs both of TensorFlow's kernels:
//
//   - the second starts when the first has made all of its allocations, on another thread where one is free by the time
//     that the first ends;
//   - what the first lets go of meanwhile, its temporaries, goes back to the allocator when both have ended;
//   - and what either reads is held until then.
// Each shares its work with the device's threads, or stays on its core, whichever is faster as the step runs: 64 products
// of 128 x 128 x 128 take 1.6 ms on one core, and 4.1 ms where each is shared by two threads. Parts, and bits, are the same.
// In the bodies of loops, more than two run at a time (group_ops.cc).

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "concurrent_kernel.h"
#include "inner_kernels.h"
#include "online_choice.h"
#include "serial_executor.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.pb.h"

namespace tfswap {
namespace {

using tensorflow::Allocator;
using tensorflow::AsyncOpKernel;
using tensorflow::DeviceBase;
using tensorflow::NodeProperties;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpRegistry;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

template <typename Context>
absl::Status ParseKernels(const Context& ctx, std::vector<std::shared_ptr<const NodeProperties>>* kernels) {
  std::vector<std::string> serialized;
  TF_RETURN_IF_ERROR(ctx.GetAttr("kernels", &serialized));
  if (serialized.size() != 2) return absl::InvalidArgumentError("Tfswap>Beside: two kernels are needed.");
  kernels->resize(2);
  for (int i = 0; i < 2; ++i) TF_RETURN_IF_ERROR(ParseKernel(serialized[i], &(*kernels)[i]));
  std::vector<tensorflow::DataType> given, taken, made, makes;
  TF_RETURN_IF_ERROR(ctx.GetAttr("Tin", &given));
  TF_RETURN_IF_ERROR(ctx.GetAttr("Tout", &made));
  for (const auto& kernel : *kernels) {
    taken.insert(taken.end(), kernel->input_types.begin(), kernel->input_types.end());
    makes.insert(makes.end(), kernel->output_types.begin(), kernel->output_types.end());
  }
  if (given != taken || made != makes) {
    return absl::InvalidArgumentError("Tfswap>Beside: Tin and Tout are not what the two kernels take and make.");
  }
  return absl::OkStatus();
}

// As the kernels' own ops infer them.
absl::Status InferShapes(InferenceContext* ctx) {
  std::vector<std::shared_ptr<const NodeProperties>> kernels;
  TF_RETURN_IF_ERROR(ParseKernels(*ctx, &kernels));
  int input = 0, output = 0;
  for (const auto& kernel : kernels) {
    std::vector<ShapeHandle> made;
    TF_RETURN_IF_ERROR(InferKernelShapes(ctx, *kernel, input, &made));
    for (const ShapeHandle& shape : made) ctx->set_output(output++, shape);
    input += kernel->input_types.size();
  }
  return absl::OkStatus();
}

REGISTER_OP("Tfswap>Beside")
    .Input("inputs: Tin")
    .Output("outputs: Tout")
    .Attr("Tin: list(type) >= 2")
    .Attr("Tout: list(type) >= 2")
    .Attr("kernels: list(string) >= 2")
    .Attr("allocations: int >= 1")
    .SetIsStateful()
    .SetShapeFn(InferShapes)
    .Doc(R"doc(
Runs two of TensorFlow's kernels side by side.

inputs: What the first reads, and then what the second reads.
outputs: What the first makes, and then what the second makes.
kernels: The two nodes, as serialized NodeDefs.
allocations: How many the first makes. The second starts after them.
)doc");

// One run of both.
class Pair : public std::enable_shared_from_this<Pair> {
 public:
  // Args:
  //   one_core: threads for kernels that stay on their core; null where they share the device's.
  Pair(OpKernelContext* ctx, OpKernel* first, OpKernel* second, int64_t allocations, const OneCore* one_core,
       AsyncOpKernel::DoneCallback done)
      : ctx_(ctx),
        allocator_(new Deferring(ctx->device()->GetAllocator({}), allocations, [this] { OfferSecond(); })),
        first_device_(ctx->device(), allocator_, one_core),
        second_device_(ctx->device(), ctx->device()->GetAllocator({}), one_core),
        first_(std::make_unique<KernelRun>(ctx, first, &first_device_, 0)),
        second_(std::make_unique<KernelRun>(ctx, second, &second_device_, first->num_inputs())),
        done_(std::move(done)) {}

  void Run() {
    first_->Run();
    RunSecond();  // no thread was free so far, or the first has made fewer allocations, or failed
    End();
  }

 private:
  // Within an allocation of the first's. Whoever comes to it later finds it taken.
  void OfferSecond() {
    Behind(*ctx_->runner())([pair = shared_from_this()] { pair->RunSecond(); });
  }

  void RunSecond() {
    if (is_taken_.exchange(true)) return;
    second_->Run();
    End();
  }

  // Of one of the two; of both the second time.
  void End() {
    if (--running_ > 0) return;
    first_->HandOver(ctx_, 0);
    second_->HandOver(ctx_, first_->num_outputs());
    first_.reset();
    second_.reset();
    allocator_->Close();
    const AsyncOpKernel::DoneCallback done = std::move(done_);
    done();
  }

  OpKernelContext* const ctx_;
  Deferring* const allocator_;  // its own, once closed
  InnerDevice first_device_, second_device_;
  std::unique_ptr<KernelRun> first_, second_;
  std::atomic<bool> is_taken_{false};
  std::atomic<int> running_{2};
  AsyncOpKernel::DoneCallback done_;
};

class BesideOp : public AsyncOpKernel {
 public:
  explicit BesideOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx), one_core_(*ctx->device()) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("allocations", &allocations_));
    std::vector<std::shared_ptr<const NodeProperties>> kernels;
    OP_REQUIRES_OK(ctx, ParseKernels(*ctx, &kernels));
    for (int i = 0; i < 2; ++i) OP_REQUIRES_OK(ctx, MakeKernel(ctx, kernels[i], &kernels_[i]));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const int way = faster_.Next();
    const auto began = std::chrono::steady_clock::now();
    auto ended = [this, way, began, done = std::move(done)] {
      faster_.Took(way, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
      done();
    };
    const OneCore* const one_core = way == kOneCore ? &one_core_ : nullptr;
    std::make_shared<Pair>(ctx, kernels_[0].get(), kernels_[1].get(), allocations_, one_core, std::move(ended))->Run();
  }

 private:
  enum Way { kOneCore, kShared };

  OneCore one_core_;
  FasterWay faster_;
  int64_t allocations_;
  std::unique_ptr<OpKernel> kernels_[2];
};

// On a CPU alone: a GPU's kernels run one after another on its stream.
REGISTER_KERNEL_BUILDER(Name("Tfswap>Beside").Device(tensorflow::DEVICE_CPU), BesideOp);

}  // namespace
}  // namespace tfswap
