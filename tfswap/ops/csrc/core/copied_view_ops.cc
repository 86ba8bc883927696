// Slices and similar ops whose outputs never share the input's buffer.
//
// The outputs of TensorFlow's kernels are views of the input where values allow it (alignment, strides, no repetition),
// and copies otherwise. If these values are not known in advance, the live interval of the input is not known either.
// The kernel in this file runs TensorFlow's kernel, and copies an output that shares an input's buffer. Planned steps
// use it by its label (KERNEL in ir/custom_ops.py; passes/prepare/copied_views.py).
//
// Outputs of types that cannot be copied bytewise stay as they are; these are not in the arena.

#include <cstring>
#include <memory>

#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class CopiedViewOp : public OpKernel {
 public:
  explicit CopiedViewOp(OpKernelConstruction* ctx) : OpKernel(ctx), other_(MakeUnlabelled(ctx)) {}

  void Compute(OpKernelContext* ctx) override {
    other_->Compute(ctx);
    if (!ctx->status().ok()) return;
    for (int o = 0; o < num_outputs(); ++o) {
      Tensor* const made = ctx->mutable_output(o);
      if (made == nullptr || !tensorflow::DataTypeCanUseMemcpy(made->dtype()) || !Shares(ctx, *made)) continue;
      Tensor own;
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(made->dtype(), made->shape(), &own));
      std::memcpy(own.data(), made->data(), made->TotalBytes());
      *made = own;
    }
  }

 private:
  static bool Shares(OpKernelContext* ctx, const Tensor& made) {
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      if (ctx->input(i).SharesBufferWith(made)) return true;
    }
    return false;
  }

  std::unique_ptr<OpKernel> other_;
};

// The ops of may_share_by_value in ir/op_traits.py.
REGISTER_KERNEL_BUILDER(Name("BroadcastTo").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("Slice").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("SparseFillEmptyRows").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("StridedSlice").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("Tile").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("Unpack").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);

}  // namespace
}  // namespace tfswap
