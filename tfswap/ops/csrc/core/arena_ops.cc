// Ops that make a step's memory known beforehand, and repeat from run to run.
//
//   ArenaMap       tells the layout of the device's arena, so that a plan is made for
//                  the arena that there is
//   AssignInPlace  AssignVariableOp that keeps the variable's buffer where it is.
//                  TensorFlow's own adopts the value's buffer: variables then wander
//                  through the arena from step to step, and fragment it differently
//                  each time.
//   OwnBuffer      a variable that shares its buffer (with a cached zero, say) gets one of
//                  its own, so that AssignInPlace finds it so

#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "arena.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/protobuf/bfc_memory_map.pb.h"
#include "tensorflow/core/common_runtime/device.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;

REGISTER_OP("Tfswap>ArenaMap")
    .Output("chunks: int64")
    .Output("limit: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Matrix(c->UnknownDim(), 3));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The chunks of the arena of the device that this op is placed on.

chunks: Per chunk its address, its size in bytes, and whether it is in use; no rows
  where the device's memory does not come from a BFC allocator.
limit: The bytes that the arena's regions may have together.
)doc");

REGISTER_OP("Tfswap>OwnBuffer")
    .Input("resource: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Gives a variable a buffer that nothing else holds, with the same content.
)doc");

REGISTER_OP("Tfswap>AssignInPlace")
    .Input("resource: resource")
    .Input("value: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Assigns to a variable as AssignVariableOp does, copying into the buffer that it has.

Where that can't be done (another shape, not initialized, or a read of the variable is
still alive) the variable adopts the value's buffer.
)doc");

class ArenaMapOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    auto* const arena = FindArena(ctx);
    tensorflow::MemoryDump map;
    int64_t limit_bytes = 0;
    if (arena != nullptr) {
      map = arena->RecordMemoryMap();
      limit_bytes = arena->GetStats()->bytes_limit.value_or(0);
    }
    // Outside the arena, which is not to change while it is looked at.
    Tensor chunks(tensorflow::cpu_allocator_base(), tensorflow::DT_INT64,
                  TensorShape({map.chunk_size(), 3}));
    auto rows = chunks.matrix<int64_t>();
    for (int i = 0; i < map.chunk_size(); ++i) {
      rows(i, 0) = static_cast<int64_t>(map.chunk(i).address());
      rows(i, 1) = map.chunk(i).size();
      rows(i, 2) = map.chunk(i).in_use() ? 1 : 0;
    }
    ctx->set_output(0, chunks);
    Tensor limit(tensorflow::cpu_allocator_base(), tensorflow::DT_INT64, TensorShape({}));
    limit.scalar<int64_t>()() = limit_bytes;
    ctx->set_output(1, limit);
  }
};

// Copies `from` into `to`, an allocated tensor of the same type and shape, in the order of
// the device's own kernels.
void CopyOnDevice(OpKernelContext* ctx, const Tensor& from, Tensor* to) {
  auto* const device = ctx->op_device_context();
  if (device == nullptr) {
    std::memcpy(to->data(), from.data(), from.TotalBytes());
    return;
  }
  device->CopyTensorInSameDevice(&from, static_cast<tensorflow::Device*>(ctx->device()), to,
                                 [](const absl::Status&) {});
}

class OwnBufferOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, tensorflow::LookupResource<Var>(
                            ctx, tensorflow::HandleFromInput(ctx, 0), &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    Tensor* const held = variable->tensor();
    if (!variable->is_initialized || held->RefCountIsOne() ||
        !tensorflow::DataTypeCanUseMemcpy(held->dtype())) {
      return;
    }
    Tensor own;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(held->dtype(), held->shape(), &own));
    CopyOnDevice(ctx, *held, &own);
    *held = own;
  }
};

class AssignInPlaceOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& value = ctx->input(1);
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, tensorflow::LookupOrCreateResource<Var>(
                            ctx, tensorflow::HandleFromInput(ctx, 0), &variable,
                            [&value](Var** created) {
                              *created = new Var(value.dtype());
                              return absl::OkStatus();
                            }));
    tensorflow::mutex_lock lock(*variable->mu());
    OP_REQUIRES(
        ctx, variable->tensor()->dtype() == value.dtype(),
        absl::InvalidArgumentError(absl::StrCat(
            "'", name(), "' assigns ", tensorflow::DataTypeString(value.dtype()),
            " to a variable of type ",
            tensorflow::DataTypeString(variable->tensor()->dtype()), ".")));
    Tensor* const held = variable->tensor();
    const bool in_place = variable->is_initialized && held->RefCountIsOne() &&
                          held->shape() == value.shape() &&
                          !held->SharesBufferWith(value) &&
                          tensorflow::DataTypeCanUseMemcpy(value.dtype());
    variable->is_initialized = true;
    if (!in_place) {
      *held = value;
      return;
    }
    CopyOnDevice(ctx, value, held);
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>ArenaMap").Device(tensorflow::DEVICE_CPU), ArenaMapOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfswap>ArenaMap").Device(tensorflow::DEVICE_GPU).HostMemory("chunks").HostMemory("limit"),
    ArenaMapOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>AssignInPlace").Device(tensorflow::DEVICE_CPU),
                        AssignInPlaceOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfswap>AssignInPlace").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
    AssignInPlaceOp);

REGISTER_KERNEL_BUILDER(Name("Tfswap>OwnBuffer").Device(tensorflow::DEVICE_CPU), OwnBufferOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfswap>OwnBuffer").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
    OwnBufferOp);

}  // namespace
}  // namespace tfswap
