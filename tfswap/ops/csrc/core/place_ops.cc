// Whether the variables of a saved step are on the devices that it was planned for (passes/variable_devices.py).

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("Tfswap>RequirePlace")
    .Input("variables: N * resource")
    .Attr("N: int >= 1")
    .Attr("place: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Fails where a variable is on another device.

place: The device within its worker, as "GPU:1".
)doc");

// TensorFlow moves this op itself to where the variables are.
class RequirePlaceOp : public OpKernel {
 public:
  explicit RequirePlaceOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("place", &place_));
  }

  void Compute(OpKernelContext* ctx) override {
    const std::string ending = absl::StrCat("/device:", place_);
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const tensorflow::Tensor& handle = ctx->input(i);
      OP_REQUIRES(ctx, tensorflow::TensorShapeUtils::IsScalar(handle.shape()),
                  absl::InvalidArgumentError("A variable's handle is a scalar."));
      const auto& variable = handle.scalar<tensorflow::ResourceHandle>()();
      OP_REQUIRES(ctx, absl::EndsWith(variable.device(), ending),
                  absl::FailedPreconditionError(absl::StrCat(
                      "tfswap: this step was planned with the variable '", variable.name(), "' on ", place_,
                      ", and it is on ", variable.device(), ". Load the model with tfswap.load, or with options="
                      "tf.saved_model.LoadOptions(experimental_variable_policy='save_variable_devices').")));
    }
  }

 private:
  std::string place_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>RequirePlace").Device(tensorflow::DEVICE_CPU), RequirePlaceOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>RequirePlace").Device(tensorflow::DEVICE_GPU).HostMemory("variables"),
                        RequirePlaceOp);

}  // namespace
}  // namespace tfswap
