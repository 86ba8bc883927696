// The swap ops as TensorFlow sees them: signatures and shape inference.
//
// A planned step runs in one known order, so a swap is four ops, each of which
// allocates or frees at a known place in that order:
//
//   SwapOut  starts the copy to the host    (nothing freed yet)
//   Release  the copy has ended: the device buffer goes back to the arena
//   SwapIn   allocates the tensor again, and starts the copy back
//   Await    the copy has ended: the tensor may be read
//
// All are stateful, so that common-subexpression elimination, constant folding and
// pruning leave them alone. Release has no output: only control edges keep it in a
// function's graph, and the rewriter adds them.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace tfswap {
namespace {

using tensorflow::DataType;
using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeAndType;
using tensorflow::shape_inference::ShapeHandle;

absl::Status CheckType(InferenceContext* c, DataType* type) {
  TF_RETURN_IF_ERROR(c->GetAttr("T", type));
  if (tensorflow::DataTypeCanUseMemcpy(*type)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "tfswap can't swap tensors of type ", tensorflow::DataTypeString(*type),
      ": only types whose elements are plain bytes of a fixed size can be copied to "
      "the host"));
}

absl::Status SwapOutShape(InferenceContext* c) {
  DataType type;
  TF_RETURN_IF_ERROR(CheckType(c, &type));
  c->set_output(0, c->Scalar());
  // Lets a SwapIn in the same graph know its shape without being told.
  c->set_output_handle_shapes_and_types(
      0, std::vector<ShapeAndType>{{c->input(0), type}});
  return absl::OkStatus();
}

absl::Status ReleaseShape(InferenceContext* c) {
  ShapeHandle unused;
  return c->WithRank(c->input(0), 0, &unused);
}

absl::Status SwapInShape(InferenceContext* c) {
  DataType type;
  TF_RETURN_IF_ERROR(CheckType(c, &type));
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
  PartialTensorShape attr;
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &attr));
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(attr, &shape));
  const std::vector<ShapeAndType>* swapped = c->input_handle_shapes_and_types(0);
  if (swapped != nullptr && swapped->size() == 1) {
    TF_RETURN_IF_ERROR(c->Merge(shape, (*swapped)[0].shape, &shape));
  }
  c->set_output(0, shape);
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

absl::Status AwaitShape(InferenceContext* c) {
  DataType type;
  TF_RETURN_IF_ERROR(CheckType(c, &type));
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

REGISTER_OP("Tfswap>SwapOut")
    .Input("tensor: T")
    .Output("handle: variant")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(SwapOutShape)
    .Doc(R"doc(
Starts a copy of `tensor` into host memory and returns at once.

The handle keeps `tensor` in device memory until Release. Fails with
ResourceExhausted when host memory is at its limit.
)doc");

REGISTER_OP("Tfswap>Release")
    .Input("handle: variant")
    .SetIsStateful()
    .SetShapeFn(ReleaseShape)
    .Doc(R"doc(
Waits for the copy to the host, then lets go of the tensor's device memory.
)doc");

REGISTER_OP("Tfswap>SwapIn")
    .Input("handle: variant")
    .Output("tensor: T")
    .Output("ticket: variant")
    .Attr("T: type")
    .Attr("shape: shape = {unknown_rank: true}")
    .SetIsStateful()
    .SetShapeFn(SwapInShape)
    .Doc(R"doc(
Allocates a tensor, starts the copy from host memory into it and returns at once.

`tensor` holds no values yet: read it only through Await. May run any number of
times on one handle, each time for a tensor of its own.
shape: For shape inference only; the tensor has the shape of the one swapped out.
)doc");

REGISTER_OP("Tfswap>Await")
    .Input("tensor: T")
    .Input("ticket: variant")
    .Output("output: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(AwaitShape)
    .Doc(R"doc(
Waits for the copy that SwapIn started; passes the same buffer on.
)doc");

}  // namespace
}  // namespace tfswap
