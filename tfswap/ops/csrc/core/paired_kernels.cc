// Two concurrent kernels in a step whose memory is known before it runs.
//
// A kernel that uses one core leaves the others idle, so a plan may run a second kernel concurrently. The allocator's
// requests and frees must not depend on which of the two is faster. So one op runs both of TensorFlow's kernels:
//
//   - the second starts when the first has made all of its allocations, on another thread if one is free before the
//     first ends;
//   - the temporaries that the first releases meanwhile are freed when both have ended;
//   - the inputs of both are held until then.
//
// Each shares its work with the device's threads, or stays on its core, whichever is measured to be faster: 64 products
// of 128 x 128 x 128 take 1.6 ms on one core, and 4.1 ms if each is shared by two threads. A kernel's work has the same
// parts, and its result the same bits, either way. In groups more than two kernels run at a time (group_ops.cc).

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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
  if (serialized.size() != 2) return absl::InvalidArgumentError("Tfswap>Pair: two kernels are needed.");
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
    return absl::InvalidArgumentError("Tfswap>Pair: Tin and Tout are not what the two kernels take and make.");
  }
  return absl::OkStatus();
}

// The shapes of a kernel's outputs, by the shape function of its op.
//
// Args:
//   input: the number of the kernel's first input among those of the op that runs it.
absl::Status InferKernelShapes(InferenceContext* ctx, const NodeProperties& kernel, int input,
                               std::vector<ShapeHandle>* made) {
  const tensorflow::OpRegistrationData* op = nullptr;
  TF_RETURN_IF_ERROR(OpRegistry::Global()->LookUp(kernel.node_def.op(), &op));
  const int inputs = kernel.input_types.size();
  std::vector<tensorflow::PartialTensorShape> shapes(inputs);
  std::vector<const Tensor*> tensors(inputs);
  for (int i = 0; i < inputs; ++i) {
    tensorflow::TensorShapeProto shape;
    ctx->ShapeHandleToProto(ctx->input(input + i), &shape);
    shapes[i] = tensorflow::PartialTensorShape(shape);
    tensors[i] = ctx->input_tensor(input + i);
  }
  const std::vector<std::unique_ptr<std::vector<std::pair<tensorflow::PartialTensorShape, tensorflow::DataType>>>>
      resources(inputs);
  InferenceContext inner(ctx->graph_def_version(), tensorflow::AttrSlice(kernel.node_def), op->op_def, shapes, tensors,
                         {}, resources);
  TF_RETURN_IF_ERROR(inner.construction_status());
  if (op->shape_inference_fn) TF_RETURN_IF_ERROR(inner.Run(op->shape_inference_fn));
  for (int i = 0; i < inner.num_outputs(); ++i) {
    tensorflow::TensorShapeProto shape;
    if (op->shape_inference_fn) {
      inner.ShapeHandleToProto(inner.output(i), &shape);
    } else {
      shape.set_unknown_rank(true);
    }
    made->emplace_back();
    TF_RETURN_IF_ERROR(ctx->MakeShapeFromShapeProto(shape, &made->back()));
  }
  return absl::OkStatus();
}

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

REGISTER_OP("Tfswap>Pair")
    .Input("inputs: Tin")
    .Output("outputs: Tout")
    .Attr("Tin: list(type) >= 2")
    .Attr("Tout: list(type) >= 2")
    .Attr("kernels: list(string) >= 2")
    .Attr("allocations: int >= 1")
    .SetIsStateful()
    .SetShapeFn(InferShapes)
    .Doc(R"doc(
Runs two of TensorFlow's kernels concurrently.

inputs: The inputs of the first kernel, then those of the second.
outputs: The outputs of the first kernel, then those of the second.
kernels: The two nodes, as serialized NodeDefs.
allocations: The number of the first kernel's allocations. The second starts after them.
)doc");

// The device's allocator for a kernel that runs concurrently with another: freed buffers are kept until it is closed.
// It deletes itself after its last buffer, since a tensor frees its buffer through it.
class Deferring : public Allocator {
 public:
  // Calls `all_made` once, when it has made this number of allocations.
  Deferring(Allocator* allocator, int64_t allocations, std::function<void()> all_made)
      : allocator_(allocator), allocations_(allocations), all_made_(std::move(all_made)) {}

  std::string Name() override { return allocator_->Name(); }

  void* AllocateRaw(size_t alignment, size_t num_bytes) override {
    return AllocateRaw(alignment, num_bytes, tensorflow::AllocationAttributes());
  }
  void* AllocateRaw(size_t alignment, size_t num_bytes,
                    const tensorflow::AllocationAttributes& attributes) override {
    void* const made = allocator_->AllocateRaw(alignment, num_bytes, attributes);
    if (made == nullptr) return nullptr;
    bool all_made;
    {
      std::lock_guard<std::mutex> lock(mu_);
      ++alive_;
      all_made = ++made_ == allocations_;
    }
    if (all_made) all_made_();
    return made;
  }

  void DeallocateRaw(void* ptr) override {
    // Below, another thread may free the last buffer and delete this.
    Allocator* const allocator = allocator_;
    bool last;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (is_open_) return kept_.push_back(ptr);
      last = --alive_ == 0;
    }
    allocator->DeallocateRaw(ptr);
    if (last) delete this;
  }

  // Both kernels have ended: frees the kept buffers.
  void Close() {
    Allocator* const allocator = allocator_;
    std::vector<void*> kept;
    bool last;
    {
      std::lock_guard<std::mutex> lock(mu_);
      is_open_ = false;
      kept = std::move(kept_);
      alive_ -= kept.size();
      last = alive_ == 0;
    }
    for (void* ptr : kept) allocator->DeallocateRaw(ptr);
    if (last) delete this;
  }

  bool TracksAllocationSizes() const override { return allocator_->TracksAllocationSizes(); }
  size_t RequestedSize(const void* ptr) const override { return allocator_->RequestedSize(ptr); }
  size_t AllocatedSize(const void* ptr) const override { return allocator_->AllocatedSize(ptr); }
  int64_t AllocationId(const void* ptr) const override { return allocator_->AllocationId(ptr); }
  std::optional<tensorflow::AllocatorStats> GetStats() override { return allocator_->GetStats(); }
  tensorflow::AllocatorMemoryType GetMemoryType() const override { return allocator_->GetMemoryType(); }

 private:
  Allocator* const allocator_;
  const int64_t allocations_;
  const std::function<void()> all_made_;
  std::mutex mu_;
  int64_t made_ = 0, alive_ = 0;
  bool is_open_ = true;
  std::vector<void*> kept_;
};

// One run of one of the two kernels.
class KernelRun {
 public:
  // Args:
  //   input: the number of the kernel's first input among those of the op that runs it.
  KernelRun(OpKernelContext* ctx, OpKernel* kernel, DeviceBase* device, int input) {
    // A second reference keeps the kernel from forwarding a buffer that the other one may read.
    for (int i = 0; i < kernel->num_inputs(); ++i) run_.held.push_back(ctx->input(input + i));
    for (int i = 0; i < kernel->num_inputs(); ++i) {
      run_.inputs.emplace_back(&run_.held[i]);
      run_.input_attributes.push_back(ctx->input_alloc_attr(input + i));
    }
    run_.output_attributes.resize(kernel->num_outputs());
    run_.MakeContext(ctx, kernel, device);
  }

  void Run() { run_.params.op_kernel->Compute(run_.ctx.get()); }

  int num_outputs() const { return run_.ctx->num_outputs(); }

  // Sets the op's outputs from `output` on, or its status, with the kernel's name.
  void HandOver(OpKernelContext* ctx, int output) {
    if (!run_.ctx->status().ok()) {
      return ctx->SetStatus(tensorflow::AttachDef(run_.ctx->status(), run_.params.op_kernel->def()));
    }
    for (int i = 0; i < run_.ctx->num_outputs(); ++i) {
      const std::unique_ptr<Tensor> made(run_.ctx->release_output(i).tensor);
      ctx->set_output(output + i, *made);
    }
  }

 private:
  InnerRun run_;
};

// One run of both kernels.
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
    RunSecond();  // if no thread has begun it, or the first made fewer allocations, or failed
    End();
  }

 private:
  // Called within the first kernel's last allocation. A thread that starts too late finds the second kernel taken.
  void OfferSecond() {
    Behind(*ctx_->runner())([pair = shared_from_this()] { pair->RunSecond(); });
  }

  void RunSecond() {
    if (is_taken_.exchange(true)) return;
    second_->Run();
    End();
  }

  // Called when a kernel has ended; the second call ends the run.
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
  Deferring* const allocator_;  // deletes itself after Close()
  InnerDevice first_device_, second_device_;
  std::unique_ptr<KernelRun> first_, second_;
  std::atomic<bool> is_taken_{false};
  std::atomic<int> running_{2};
  AsyncOpKernel::DoneCallback done_;
};

class PairOp : public AsyncOpKernel {
 public:
  explicit PairOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx), one_core_(*ctx->device()) {
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
REGISTER_KERNEL_BUILDER(Name("Tfswap>Pair").Device(tensorflow::DEVICE_CPU), PairOp);

}  // namespace
}  // namespace tfswap
