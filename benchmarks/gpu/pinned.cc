// An op whose result lies in pinned host memory, though TensorFlow takes it for a tensor on the GPU: what a variable
// that is kept in host memory is to the kernels that read and write it. For benchmarks/gpu_proof.py.

#include <cstdint>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TfswapProofPinned")
    .Input("x: float")
    .Output("y: float")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

class PinnedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::AllocatorAttributes pinned;
    pinned.set_on_host(true);
    pinned.set_gpu_compatible(true);
    const Tensor& from = ctx->input(0);
    Tensor* to = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, from.shape(), &to, pinned));
    auto* const device = static_cast<tensorflow::Device*>(ctx->device());
    OP_REQUIRES_OK(ctx, ctx->op_device_context()->CopyDeviceTensorToCPUSync(&from, "pinned", device, to));
  }
};

REGISTER_KERNEL_BUILDER(Name("TfswapProofPinned").Device(tensorflow::DEVICE_GPU), PinnedOp);

}  // namespace
