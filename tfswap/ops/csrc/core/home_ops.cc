// Variables at home on the host (variable_home.h).
//
//   ReadHome   copies a variable to a new tensor on the device
//   LoadHome   starts such a copy, for which an Await (swap_ops.cc) waits
//   StoreHome  starts the copy of a new value to a new buffer in host memory
//   CommitHome waits for that copy and gives the variable that buffer
//   MoveHome   moves a variable's value to host memory, or back to the device's arena
//
// The copies of LoadHome and StoreHome overlap with kernels. Others read the old value or the new one, never a part of
// each, since a new value has a buffer of its own.

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "copy_wait.h"
#include "device_copier.h"
#include "device_copy.h"
#include "op_support.h"
#include "runtime.h"
#include "swapped.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "transfer.h"
#include "variable_access.h"
#include "variable_home.h"

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

absl::Status LoadHomeShape(tensorflow::shape_inference::InferenceContext* c) {
  tensorflow::PartialTensorShape attr;
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &attr));
  tensorflow::shape_inference::ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(attr, &shape));
  c->set_output(0, shape);
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

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

REGISTER_OP("Tfswap>LoadHome")
    .Input("resource: resource")
    .Output("value: dtype")
    .Output("ticket: variant")
    .Attr("dtype: type")
    .Attr("shape: shape = {unknown_rank: true}")
    .SetIsStateful()
    .SetShapeFn(LoadHomeShape)
    .Doc(R"doc(
Allocates a tensor, starts the copy of a variable's value into it and returns immediately.

`value` has no values yet: read it only through Await. The variable may be assigned once that has ended.
shape: For shape inference only.
)doc");

REGISTER_OP("Tfswap>StoreHome")
    .Input("value: T")
    .Output("stored: variant")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Starts the copy of a tensor to a new home for it in host memory and returns immediately. Fails with ResourceExhausted
where host memory is at its limit.
)doc");

REGISTER_OP("Tfswap>CommitHome")
    .Input("resource: resource")
    .Input("value: T")
    .Input("stored: variant")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Waits for the copy that StoreHome started and assigns it to a variable.

value: The tensor that is copied, which this node keeps until the copy has ended.
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

// The value of the variable in input 0. The caller holds the variable's lock.
absl::Status GetValue(const OpKernelContext* ctx, Var* variable, const Tensor** value) {
  *value = variable->tensor();
  const tensorflow::DataType type = ctx->op_kernel().output_type(0);
  if (variable->is_initialized && (*value)->dtype() == type) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("'", ctx->op_kernel().name(),
                                                    "' reads a variable without a value of type ",
                                                    tensorflow::DataTypeString(type), "."));
}

class ReadHomeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, GetVariable(ctx, 0, &variable));
    tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor* held;
    OP_REQUIRES_OK(ctx, GetValue(ctx, variable.get(), &held));
    Tensor* value;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, held->shape(), &value));
    if (value->TotalBytes() > 0) CopyOnDevice(ctx, *held, value);
  }
};

// The objects that a copy from a home, or to one, needs until it has ended. Only the copy holds them.
struct HomeCopy {
  Tensor home;
  Tensor tensor;  // on the device
  std::shared_ptr<Transfer> copied;

  // Buffers are released before the end is announced: an op after Await may then be the tensor's only owner, and the
  // variable that of its home. They are dropped explicitly because TensorFlow may hold another copy of the callback.
  void End(Direction direction, const Copied& ended) {
    Account().Add(direction, Tier::kHost, home.TotalBytes(), ended);
    const auto transfer = std::move(copied);
    home = Tensor();
    tensor = Tensor();
    transfer->End(ended.status);
  }
};

template <typename CopierFactory>
class LoadHomeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES(ctx, !Runtime::Get().is_late_child(), absl::FailedPreconditionError(Runtime::kLateChild));
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, GetVariable(ctx, 0, &variable));
    tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor* held;
    OP_REQUIRES_OK(ctx, GetValue(ctx, variable.get(), &held));
    Tensor* value;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, held->shape(), &value));
    auto copied = std::make_shared<Transfer>();
    SetVariantOutput(ctx, 1, Ticket{{}, copied, value->data(), Account()});
    if (IsAtHome(*held)) {
      Start(ctx, HomeCopy{*held, *value, std::move(copied)});
      return;
    }
    if (value->TotalBytes() > 0) CopyOnDevice(ctx, *held, value);
    copied->End(absl::OkStatus());
  }

 private:
  static void Start(OpKernelContext* ctx, HomeCopy started) {
    auto copying = std::make_shared<HomeCopy>(std::move(started));
    const void* const from = copying->home.data();
    Tensor* const to = &copying->tensor;
    CopierFactory::Make(ctx)->CopyIn(from, to, [copying = std::move(copying)](const Copied& ended) {
      copying->End(Direction::kIn, ended);
    });
  }
};

// A value on its way to its home.
struct Stored : ProcessLocal {
  static constexpr char kMaker[] = "StoreHome";
  Tensor home;
  std::shared_ptr<Transfer> copied;
  std::string TypeName() const { return "tfswap::Stored"; }
};

template <typename CopierFactory>
class StoreHomeOp : public OpKernel {
 public:
  explicit StoreHomeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckSwapType(ctx->input_type(0), absl::StrCat(" (node '", ctx->def().name(), "')")));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES(ctx, !Runtime::Get().is_late_child(), absl::FailedPreconditionError(Runtime::kLateChild));
    auto copying = std::make_shared<HomeCopy>(HomeCopy{{}, ctx->input(0), std::make_shared<Transfer>()});
    OP_REQUIRES_OK(ctx, MakeHome(CopierFactory::Pool(ctx->device()), copying->tensor, name(), &copying->home));
    SetVariantOutput(ctx, 0, Stored{{}, copying->home, copying->copied});
    if (copying->tensor.TotalBytes() == 0) {
      copying->copied->End(absl::OkStatus());
      return;
    }
    const Tensor* const from = &copying->tensor;
    void* const to = copying->home.data();
    CopierFactory::Make(ctx)->CopyOut(from, to, [copying = std::move(copying)](const Copied& ended) {
      copying->End(Direction::kOut, ended);
    });
  }
};

class CommitHomeOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Stored* stored;
    OP_REQUIRES_OK_ASYNC(ctx, GetVariantInput(ctx, 2, &stored), done);
    tensorflow::core::RefCountPtr<Var> found;
    OP_REQUIRES_OK_ASYNC(ctx, GetAssignedVariable(ctx, 0, stored->home.dtype(), &found), done);
    std::shared_ptr<Var> variable(found.release(), [](Var* held) { held->Unref(); });
    CopyWait::Start(ctx, std::move(done), stored->copied, Stall::kRelease, Account(),
                    [node = name(), variable = std::move(variable), home = stored->home](const absl::Status& status) {
                      if (!status.ok()) return status;
                      tensorflow::mutex_lock lock(*variable->mu());
                      TF_RETURN_IF_ERROR(CheckAssigned(node, home.dtype(), variable.get()));
                      *variable->tensor() = home;
                      variable->is_initialized = true;
                      return absl::OkStatus();
                    });
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
REGISTER_KERNEL_BUILDER(Name("Tfswap>LoadHome").Device(tensorflow::DEVICE_CPU), LoadHomeOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>LoadHome").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
                        LoadHomeOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>StoreHome").Device(tensorflow::DEVICE_CPU), StoreHomeOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>StoreHome").Device(tensorflow::DEVICE_GPU), StoreHomeOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>CommitHome").Device(tensorflow::DEVICE_CPU), CommitHomeOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>CommitHome").Device(tensorflow::DEVICE_GPU).HostMemory("resource"), CommitHomeOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>MoveHome").Device(tensorflow::DEVICE_CPU), MoveHomeOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>MoveHome").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
                        MoveHomeOp<GpuCopierFactory>);

}  // namespace
}  // namespace tfswap
