// Homes of variables on the host (variable_home.h). home_ops.cc has the copies of a step.
//
//   MoveHome   moves a variable's value to the host, or back to the device's arena
//   MakeHome   makes a home, for a variable that is assigned it
//   FillHome   copies some elements of a tensor on the device to a home

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "arena.h"
#include "device_copier.h"
#include "device_copy.h"
#include "disk_home.h"
#include "op_support.h"
#include "runtime.h"
#include "swapped.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "variable_access.h"
#include "variable_home.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

REGISTER_OP("Tfswap>MoveHome")
    .Input("resource: resource")
    .Attr("host: bool")
    .Attr("limit: int = 0")
    .Attr("disk: bool = false")
    .Attr("spill_dir: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Moves the value of a variable to a buffer on the host that nothing else holds, or in the device's arena. Turns the
variable's copy-on-read mode off.

host: Whether to move it to the host. Fails with ResourceExhausted where neither host memory nor the disk has room.
limit: Of a saved step: fails with ResourceExhausted where more than these bytes are in use in the arena, until once no
  more are. 0 for no such check.
disk, spill_dir: As of StoreHome. What is to be on disk does not go to host memory instead.
)doc");

REGISTER_OP("Tfswap>MakeHome")
    .Input("shape: int64")
    .Output("home: dtype")
    .Attr("dtype: type")
    .Attr("disk: bool = false")
    .Attr("spill_dir: string = ''")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(0, &shape));
      c->set_output(0, shape);
      return absl::OkStatus();
    })
    .Doc(R"doc(
A tensor on the host, without values. A variable that is assigned it is at home. Fails with ResourceExhausted where
neither host memory nor the disk has room.

disk, spill_dir: As of StoreHome.
)doc");

REGISTER_OP("Tfswap>FillHome")
    .Input("home: T")
    .Input("value: T")
    .Input("begin: int64")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Copies a tensor to a part of a home that MakeHome has made.

begin: The first element of the home that is written, in row-major order.
)doc");

template <typename CopierFactory>
class MoveHomeOp : public OpKernel {
 public:
  explicit MoveHomeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("host", &host_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("limit", &limit_bytes_));
    OP_REQUIRES_OK(ctx, tier_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    if (limit_bytes_ > 0 && !begun_.load()) OP_REQUIRES_OK(ctx, CheckBegin(ctx));
    begun_.store(true);
    OP_REQUIRES_OK(ctx, Move(ctx));
  }

 private:
  absl::Status CheckBegin(OpKernelContext* ctx) const {
    const auto stats = DeviceAllocator(ctx)->GetStats();
    if (!stats || stats->bytes_in_use <= limit_bytes_) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat(
        "The step begins with ", stats->bytes_in_use, " bytes in use on the device, above its limit of ", limit_bytes_,
        ": its variables are there. Load the model in `with tfswap.scope():`, which puts variables in host memory as "
        "soon as they have their values."));
  }

  absl::Status Move(OpKernelContext* ctx) const {
    tensorflow::core::RefCountPtr<Var> variable;
    TF_RETURN_IF_ERROR(GetVariable(ctx, 0, &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    variable->copy_on_read_mode.store(false);
    const bool is_own = variable->tensor()->RefCountIsOne();
    const Tensor held = *variable->tensor();
    if (!variable->is_initialized || held.TotalBytes() == 0) return absl::OkStatus();
    DiskHome* disk;
    const bool is_home = IsAtHome(held, &disk);
    const bool is_there = is_home == host_ && (!host_ || (disk != nullptr) == tier_.is_disk());
    if (is_there && (is_own || !host_)) return absl::OkStatus();
    TF_RETURN_IF_ERROR(CheckSwapType(held.dtype(), absl::StrCat(" (node '", name(), "')")));
    Tensor moved;
    if (host_) {
      HostPool* const pool = CopierFactory::Pool(ctx->device());
      TF_RETURN_IF_ERROR(tier_.Make(pool, held, held.shape(), name(), &moved, /*strict=*/true));
    } else {
      TF_RETURN_IF_ERROR(ctx->allocate_temp(held.dtype(), held.shape(), &moved));
    }
    DiskHome* target;
    IsAtHome(moved, &target);
    auto* const to = static_cast<char*>(moved.data());
    if (target != nullptr) {
      TF_RETURN_IF_ERROR(WriteToDisk(target, to, held.data(), held.TotalBytes()));
    } else if (disk != nullptr) {
      TF_RETURN_IF_ERROR(ReadFromDisk(disk, disk->data(), to, held.TotalBytes()));
    } else {
      CopyOnDevice(ctx, held, &moved);
    }
    *variable->tensor() = moved;
    return absl::OkStatus();
  }

  bool host_;
  int64_t limit_bytes_;
  HomeTier tier_;
  std::atomic<bool> begun_{false};  // the limit has been checked
};

template <typename CopierFactory>
class MakeHomeOp : public OpKernel {
 public:
  explicit MakeHomeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckSwapType(ctx->output_type(0), absl::StrCat(" (node '", ctx->def().name(), "')")));
    OP_REQUIRES_OK(ctx, tier_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES(ctx, !Runtime::Get().is_late_child(), absl::FailedPreconditionError(Runtime::kLateChild));
    OP_REQUIRES(ctx, ctx->input(0).dims() == 1, absl::InvalidArgumentError("The shape of a home is a vector."));
    tensorflow::TensorShape shape;
    OP_REQUIRES_OK(ctx, tensorflow::TensorShape::BuildTensorShape(ctx->input(0).vec<int64_t>(), &shape));
    Tensor home;
    HostPool* const pool = CopierFactory::Pool(ctx->device());
    OP_REQUIRES_OK(ctx, tier_.Make(pool, Tensor(ctx->expected_output_dtype(0)), shape, name(), &home));
    ctx->set_output(0, home);
  }

 private:
  HomeTier tier_;
};

class FillHomeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& home = ctx->input(0);
    const Tensor& value = ctx->input(1);
    OP_REQUIRES(ctx, ctx->input(2).dims() == 0, absl::InvalidArgumentError("The first element is no scalar."));
    const int64_t begin = ctx->input(2).scalar<int64_t>()();
    const int64_t count = value.NumElements();
    DiskHome* disk;
    OP_REQUIRES(ctx, IsAtHome(home, &disk), absl::InvalidArgumentError(absl::StrCat("'", name(), "' fills no home.")));
    OP_REQUIRES(ctx, begin >= 0 && begin <= home.NumElements() - count,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' fills ", count, " elements from element ", begin,
                                                        " on of a home of shape ", home.shape().DebugString(), ".")));
    if (count == 0) return;
    Tensor all(home.dtype()), elements(value.dtype());
    OP_REQUIRES(ctx, all.CopyFrom(home, {home.NumElements()}) && elements.CopyFrom(value, {count}),
                absl::InternalError("A tensor has another number of elements than its shape."));
    Tensor filled = all.Slice(begin, begin + count);
    if (disk != nullptr) {
      OP_REQUIRES_OK(
          ctx, WriteToDisk(disk, static_cast<const char*>(filled.data()), elements.data(), elements.TotalBytes()));
      return;
    }
    CopyOnDevice(ctx, elements, &filled);
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>MakeHome").Device(tensorflow::DEVICE_CPU), MakeHomeOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>MakeHome").Device(tensorflow::DEVICE_GPU).HostMemory("shape"),
                        MakeHomeOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>FillHome").Device(tensorflow::DEVICE_CPU), FillHomeOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>FillHome").Device(tensorflow::DEVICE_GPU).HostMemory("begin"), FillHomeOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>MoveHome").Device(tensorflow::DEVICE_CPU), MoveHomeOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>MoveHome").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
                        MoveHomeOp<GpuCopierFactory>);

}  // namespace
}  // namespace tfswap
