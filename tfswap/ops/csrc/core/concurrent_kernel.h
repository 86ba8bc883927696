// What ops share that run one of TensorFlow's kernels beside others: its memory, its shapes, and a run of it.

#ifndef TFSWAP_OPS_CSRC_CORE_CONCURRENT_KERNEL_H_
#define TFSWAP_OPS_CSRC_CORE_CONCURRENT_KERNEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "inner_kernels.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.pb.h"

namespace tfswap {

// The shapes of what a kernel makes, as its own op infers them.
//
// Args:
//   input: of the op that runs the kernel, the first that is the kernel's.
inline absl::Status InferKernelShapes(tensorflow::shape_inference::InferenceContext* ctx,
                                      const tensorflow::NodeProperties& kernel, int input,
                                      std::vector<tensorflow::shape_inference::ShapeHandle>* made) {
  const tensorflow::OpRegistrationData* op = nullptr;
  TF_RETURN_IF_ERROR(tensorflow::OpRegistry::Global()->LookUp(kernel.node_def.op(), &op));
  const int inputs = kernel.input_types.size();
  std::vector<tensorflow::PartialTensorShape> shapes(inputs);
  std::vector<const tensorflow::Tensor*> tensors(inputs);
  for (int i = 0; i < inputs; ++i) {
    tensorflow::TensorShapeProto shape;
    ctx->ShapeHandleToProto(ctx->input(input + i), &shape);
    shapes[i] = tensorflow::PartialTensorShape(shape);
    tensors[i] = ctx->input_tensor(input + i);
  }
  const std::vector<
      std::unique_ptr<std::vector<std::pair<tensorflow::PartialTensorShape, tensorflow::DataType>>>>
      resources(inputs);
  tensorflow::shape_inference::InferenceContext inner(ctx->graph_def_version(),
                                                      tensorflow::AttrSlice(kernel.node_def), op->op_def, shapes,
                                                      tensors, {}, resources);
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

// The device's allocator, as a kernel sees it that runs concurrently with others: buffers that are freed are kept until
// it is closed. It exists as long as any of its buffers, since a tensor frees its buffer through it.
class Deferring : public tensorflow::Allocator {
 public:
  // Calls `all_made` once, when it has made so many allocations.
  Deferring(tensorflow::Allocator* allocator, int64_t allocations, std::function<void()> all_made)
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
    // Once this is counted, another thread may be the last, and delete it.
    tensorflow::Allocator* const allocator = allocator_;
    bool last;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (is_open_) return kept_.push_back(ptr);
      last = --alive_ == 0;
    }
    allocator->DeallocateRaw(ptr);
    if (last) delete this;
  }

  // The kernels have ended.
  void Close() {
    tensorflow::Allocator* const allocator = allocator_;
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
  tensorflow::Allocator* const allocator_;
  const int64_t allocations_;
  const std::function<void()> all_made_;
  std::mutex mu_;
  int64_t made_ = 0, alive_ = 0;
  bool is_open_ = true;
  std::vector<void*> kept_;
};

// One run of a kernel that others run beside.
class KernelRun {
 public:
  // Args:
  //   input: of the op that runs the kernel, the first that is the kernel's.
  KernelRun(tensorflow::OpKernelContext* ctx, tensorflow::OpKernel* kernel, tensorflow::DeviceBase* device, int input) {
    // Held twice, so that the kernel takes none of them over: another may read it.
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

  // To an op's outputs, from `output` on, or its status, with the kernel's own name.
  void HandOver(tensorflow::OpKernelContext* ctx, int output) {
    if (!run_.ctx->status().ok()) {
      return ctx->SetStatus(tensorflow::AttachDef(run_.ctx->status(), run_.params.op_kernel->def()));
    }
    for (int i = 0; i < run_.ctx->num_outputs(); ++i) {
      const std::unique_ptr<tensorflow::Tensor> made(run_.ctx->release_output(i).tensor);
      ctx->set_output(output + i, *made);
    }
  }

 private:
  InnerRun run_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_CONCURRENT_KERNEL_H_
