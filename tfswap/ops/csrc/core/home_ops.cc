// Variables at home on the host (variable_home.h).
//
//   ReadHome   copies a variable to a new tensor on the device
//   WriteHome  copies a tensor to the variable's own buffer (AssignInPlace's kernel, in variable_ops.cc)
//   MoveHome   moves a variable's value to host memory, or back to the device's arena
//
// The copies of ReadHome and WriteHome are in order with the device's kernels.

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "device_copier.h"
#include "device_copy.h"
#include "op_support.h"
#include "swapped.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "variable_access.h"
#include "variable_home.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

REGISTER_OP("Tfswap>ReadHome")
    .Input("resource: resource")
    .Output("value: dtype")
    .Attr("dtype: type")
    .Attr("shape: shape = {unknown_rank: true}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ExplicitShape)
    .Doc(R"doc(
Copies the value of a variable to a new tensor on the device. The variable keeps its buffer.

shape: For shape inference only.
)doc");

REGISTER_OP("Tfswap>MoveHome")
    .Input("resource: resource")
    .Attr("host: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Moves the value of a variable to a buffer in host memory that nothing else holds, or in the device's arena. Turns the
variable's copy-on-read mode off.

host: Whether to move it to host memory. Fails with ResourceExhausted where that is at its limit.
)doc");

class ReadHomeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, GetVariable(ctx, 0, &variable));
    tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& held = *variable->tensor();
    OP_REQUIRES(ctx, variable->is_initialized && held.dtype() == output_type(0),
                absl::FailedPreconditionError(
                    absl::StrCat("'", name(), "' reads a variable without a value of type ",
                                 tensorflow::DataTypeString(output_type(0)), ".")));
    Tensor* value;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, held.shape(), &value));
    if (value->TotalBytes() > 0) CopyOnDevice(ctx, held, value);
  }
};

template <typename CopierFactory>
class MoveHomeOp : public OpKernel {
 public:
  explicit MoveHomeOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, ctx->GetAttr("host", &host_)); }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, GetVariable(ctx, 0, &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    variable->copy_on_read_mode.store(false);
    const bool is_own = variable->tensor()->RefCountIsOne();
    const Tensor held = *variable->tensor();
    if (!variable->is_initialized || held.TotalBytes() == 0) return;
    if (IsAtHome(held) == host_ && (is_own || !host_)) return;
    OP_REQUIRES_OK(ctx, CheckSwapType(held.dtype(), absl::StrCat(" (node '", name(), "')")));
    Tensor moved;
    if (host_) {
      OP_REQUIRES_OK(ctx, MakeHome(CopierFactory::Pool(ctx->device()), held, name(), &moved));
    } else {
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(held.dtype(), held.shape(), &moved));
    }
    CopyOnDevice(ctx, held, &moved);
    *variable->tensor() = moved;
  }

 private:
  bool host_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>ReadHome").Device(tensorflow::DEVICE_CPU), ReadHomeOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ReadHome").Device(tensorflow::DEVICE_GPU).HostMemory("resource"), ReadHomeOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>MoveHome").Device(tensorflow::DEVICE_CPU), MoveHomeOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>MoveHome").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
                        MoveHomeOp<GpuCopierFactory>);

}  // namespace
}  // namespace tfswap
