// The swap ops: signatures and shape inference. Their kernels are in swap_kernels.cc.
//
// A planned step runs in one fixed order. A swap is four ops, each of which allocates or
// frees at a fixed place in that order:
//
//   SwapOut  starts the copy to the host    (nothing freed yet)
//   Release  waits for that copy, and frees the device buffer
//   SwapIn   allocates the tensor again, and starts the copy back
//   Await    waits for that copy; then the tensor may be read
//
// A backward loop pops a handle in each iteration. A fifth op does SwapIn's work for the
// next iteration during the current one:
//
//   Prefetch  allocates the tensor of the handle that is popped next, and starts the
//             copy back; the SwapIn of that handle passes this tensor on
//
// All are stateful, so that common-subexpression elimination, constant folding and
// pruning leave them alone. Release has no output: only control edges keep it in a
// function's graph, and tfswap's passes add them.

#include <vector>

#include "absl/status/status.h"
#include "swapped.h"
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
  return CheckSwapType(*type, "");
}

absl::Status SwapOutShape(InferenceContext* c) {
  DataType type;
  TF_RETURN_IF_ERROR(CheckType(c, &type));
  c->set_output(0, c->Scalar());
  // Lets a SwapIn in the same graph know its shape from the handle.
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

absl::Status PrefetchShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
  c->set_output(0, c->Scalar());
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
    .Attr("owner: int = 0")
    .Attr("disk: bool = false")
    .Attr("saved_on_disk: int = 0")
    .Attr("lent_block: int = 0")
    .Attr("lent_place: int = 0")
    .Attr("step_bytes: int = -1")
    .Attr("step_limit: int = -1")
    .Attr("spill_dir: string = ''")
    .Attr("spill_bytes: int = 0")
    .Attr("spill_limit: int = -1")
    .SetIsStateful()
    .SetShapeFn(SwapOutShape)
    .Doc(R"doc(
Starts a copy of `tensor` into host memory, to disk, or to another device, and returns immediately.

The handle keeps `tensor` in device memory until Release. Fails with
ResourceExhausted when host memory is at its limit, and there is no room on disk either.
owner: The owner's number. Steps that share limits have the same owner.
disk: Whether the tensor goes to disk, or, without room there, to host memory. Otherwise it goes to disk only without
  room in host memory.
saved_on_disk: For tensors that loops save: the bytes that all such nodes of a step save on disk. These are the first
  ones of the step, which are needed last.
lent_block: The number of the memory that another device lends (LendBlock); 0 for none. Where it was freed, the tensor
  goes to host memory.
lent_place: Where the copy is in it, in bytes from its start.
step_bytes: For one node per step, which registers the step when its kernel is constructed: the host memory of the
  step's tensors together, which is reserved then. -1 for all other nodes.
step_limit: For that node, the limit of the step's host memory; -1 for no limit.
spill_dir: For that node, the folder for tensors on disk; '' for none.
spill_bytes: For that node, the bytes of the step's tensors on disk.
spill_limit: For that node, the limit of these bytes; -1 for no limit.
)doc");

REGISTER_OP("Tfswap>Release")
    .Input("handle: variant")
    .SetIsStateful()
    .SetShapeFn(ReleaseShape)
    .Doc(R"doc(
Waits for the copy to the host, then releases the tensor's device memory.
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
Allocates a tensor, starts the copy from host memory into it and returns immediately.

`tensor` has no values yet: read it only through Await. May run any number of times on
one handle, each time for a new tensor. After Prefetch, the first run on a handle passes
on the tensor that Prefetch has allocated.
shape: For shape inference only; the tensor has the shape of the one swapped out.
)doc");

REGISTER_OP("Tfswap>Prefetch")
    .Input("list: variant")
    .Output("output: variant")
    .Attr("nbytes: int = 0")
    .SetIsStateful()
    .SetShapeFn(PrefetchShape)
    .Doc(R"doc(
Allocates the tensor of the last handle of a list, starts its copy back, and keeps it in the handle.

Returns immediately, and passes the list on. Does nothing for an empty list.
nbytes: The tensor's bytes, for plans only. The kernel uses the size of the swapped tensor.
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
