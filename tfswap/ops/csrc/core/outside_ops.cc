// A step in two calls: a forward pass, any work of the caller, and the backward pass.
//
// Both passes are planned as one graph, in which the op Outside stands for the caller's work. Two functions run,
// forward and backward. A tensor that the second reads is passed to it in a carrier:
//
//   Carry    puts a tensor into a carrier, a variant outside of the arena
//   Deliver  removes the tensor from its carrier: it is then freed after its last reader, as any tensor of the step
//
// The first function's results are no substitute: the caller of the second holds its arguments until it ends.

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "op_support.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant_op_registry.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TypeIndex;
using tensorflow::UnaryVariantOpRegistry;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfswap>Outside")
    .Input("results: T")
    .Output("gradients: T")
    .Attr("T: list(type) >= 1")
    .Attr("room: int = 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Stands, while a step is planned, for what its caller does between its forward and its backward
pass. No graph that runs has one, and there is no kernel.

results: What the caller gets.
gradients: What he gives, of each result.
room: Number of further tensors of each result's size that the caller may hold.
)doc");

REGISTER_OP("Tfswap>Carry")
    .Input("tensor: T")
    .Output("carrier: variant")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Puts a tensor into a carrier, for Deliver.
)doc");

REGISTER_OP("Tfswap>Deliver")
    .Input("carrier: variant")
    .Output("tensor: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Takes a tensor out of the carrier that Carry put it into. That can be done once.
)doc");

struct Carrier : ProcessLocal {
  struct Content {
    std::mutex mu;
    Tensor tensor;
    bool delivered = false;
  };

  static constexpr char kMaker[] = "Carry";
  std::shared_ptr<Content> content;  // shared by copies of the carrier
  std::string TypeName() const { return "tfswap::Carrier"; }
};

// Functions return variants on their default device. A carrier goes there as it is, and its tensor stays where it is.
absl::Status PassCarrier(const Carrier& from, Carrier* to, const UnaryVariantOpRegistry::AsyncTensorDeviceCopyFn&) {
  *to = from;
  return absl::OkStatus();
}

namespace variant_op_registry_fn_registration = tensorflow::variant_op_registry_fn_registration;  // for the macro

#define PASS_CARRIERS(direction)                                                            \
  INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(Carrier, direction, PassCarrier)
PASS_CARRIERS(tensorflow::VariantDeviceCopyDirection::HOST_TO_DEVICE);
PASS_CARRIERS(tensorflow::VariantDeviceCopyDirection::DEVICE_TO_HOST);
PASS_CARRIERS(tensorflow::VariantDeviceCopyDirection::DEVICE_TO_DEVICE);
#undef PASS_CARRIERS

class CarryOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Carrier carrier;
    carrier.content = std::make_shared<Carrier::Content>();
    carrier.content->tensor = ctx->input(0);
    SetVariantOutput(ctx, 0, std::move(carrier));
  }

  bool IsExpensive() override { return false; }
};

class DeliverOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Carrier* carrier;
    OP_REQUIRES_OK(ctx, GetVariantInput(ctx, 0, &carrier));
    Tensor tensor;
    {
      std::lock_guard<std::mutex> lock(carrier->content->mu);
      OP_REQUIRES(ctx, !carrier->content->delivered,
                  absl::FailedPreconditionError(absl::StrCat(
                      "'", name(), "' delivers what has been delivered before.")));
      carrier->content->delivered = true;
      tensor = std::move(carrier->content->tensor);
      carrier->content->tensor = Tensor();
    }
    OP_REQUIRES(ctx, tensor.dtype() == output_type(0),
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' got ", Described(tensor), ".")));
    ctx->set_output(0, std::move(tensor));
  }

  bool IsExpensive() override { return false; }
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>Carry").Device(tensorflow::DEVICE_CPU), CarryOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Deliver").Device(tensorflow::DEVICE_CPU), DeliverOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Carry")
                            .Device(tensorflow::DEVICE_GPU)
                            .TypeConstraint<int32_t>("T")  // which TensorFlow keeps in host memory
                            .HostMemory("tensor"),
                        CarryOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Deliver")
                            .Device(tensorflow::DEVICE_GPU)
                            .TypeConstraint<int32_t>("T")
                            .HostMemory("tensor"),
                        DeliverOp);

#define REGISTER_ON_GPU(type)                                                                              \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>Carry").Device(tensorflow::DEVICE_GPU).TypeConstraint<type>("T"),   \
                          CarryOp);                                                                        \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>Deliver").Device(tensorflow::DEVICE_GPU).TypeConstraint<type>("T"), \
                          DeliverOp)
REGISTER_ON_GPU(Eigen::half);
REGISTER_ON_GPU(Eigen::bfloat16);
REGISTER_ON_GPU(float);
REGISTER_ON_GPU(double);
REGISTER_ON_GPU(tensorflow::complex64);
REGISTER_ON_GPU(tensorflow::complex128);
REGISTER_ON_GPU(uint8_t);
REGISTER_ON_GPU(int8_t);
REGISTER_ON_GPU(int64_t);
REGISTER_ON_GPU(bool);
REGISTER_ON_GPU(tensorflow::Variant);
#undef REGISTER_ON_GPU

}  // namespace
}  // namespace tfswap
