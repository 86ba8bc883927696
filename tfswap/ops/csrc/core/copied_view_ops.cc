// Slices and the like that never share their input's buffer.
//
// TensorFlow's kernels hand on a part of the input's buffer where values allow it (alignment, strides, nothing to
// repeat), and copy otherwise. Where these values are not known before the step runs, its plan can't know how long the
// input stays. Here TensorFlow's own kernel runs, and an output that shares an input's buffer is then copied.
// Planned steps ask for these kernels by their label (KERNEL in ir/custom_ops.py; passes/prepare/copied_views.py).
//
// Left as it is: what can't be copied byte by byte, which is not in the arena.

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

// One for each op that may_share_by_value of ir/op_traits.py knows.
REGISTER_KERNEL_BUILDER(Name("BroadcastTo").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("Slice").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("SparseFillEmptyRows").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("StridedSlice").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("Tile").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);
REGISTER_KERNEL_BUILDER(Name("Unpack").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), CopiedViewOp);

}  // namespace
}  // namespace tfswap
