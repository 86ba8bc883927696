// Ops that pass tensors and order between a device and host memory.
//
//   ToDevice  copies a tensor from host memory to the device on the stream of the kernels
//   ToHost    copies a tensor of the device to host memory, and frees it before the next kernel runs
//   Signal    gives a number in host memory, which a node of another device waits for
//   Text      is a constant of text for kernels of a GPU's step that read it on the host

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "device_copier.h"
#include "device_copy.h"
#include "host_pool.h"
#include "op_support.h"
#include "pooled_tensor.h"
#include "step_memory.h"
#include "swapped.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "xla/stream_executor/stream.h"

#if __has_include("xla/stream_executor/device_address.h")
#include "xla/stream_executor/device_address.h"
using DeviceAddress = stream_executor::DeviceAddressBase;
#else  // TensorFlow before 2.21
#include "xla/stream_executor/device_memory.h"
using DeviceAddress = stream_executor::DeviceMemoryBase;
#endif

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

REGISTER_OP("Tfswap>ToDevice")
    .Input("tensor: T")
    .Output("output: T")
    .Attr("T: type")
    .SetIsStateful()  // otherwise TensorFlow folds it on the host
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Copies a tensor in host memory to the device's, on the stream of its kernels.
)doc");

REGISTER_OP("Tfswap>Signal")
    .Output("signal: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Runs after what it waits for. A node of another device that reads its result, in host memory, runs
later. For a control edge between devices TensorFlow would copy a tensor from one arena to the other.
)doc");

REGISTER_OP("Tfswap>ToHost")
    .Input("tensor: T")
    .Output("output: T")
    .Attr("T: type")
    .Attr("pooled: bool = false")
    .Attr("owner: int = 0")
    .Attr("step_bytes: int = -1")
    .Attr("step_limit: int = -1")
    .SetIsStateful()  // as ToDevice
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Copies a tensor in the device's memory to host memory. It ends when the copy has ended.

pooled: Whether the host memory is that of tfswap's pool, and counts in its limit. Otherwise it is
  of no arena, and of no limit.
owner, step_bytes, step_limit: As of SwapOut.
)doc");

REGISTER_OP("Tfswap>Text")
    .Output("output: dtype")
    .Attr("value: tensor")
    .Attr("dtype: {string}")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      const tensorflow::TensorProto* value = nullptr;
      TF_RETURN_IF_ERROR(c->GetAttr("value", &value));
      tensorflow::shape_inference::ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->MakeShapeFromShapeProto(value->tensor_shape(), &shape));
      c->set_output(0, shape);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns a constant of text, in host memory.
)doc");

absl::Status CheckCopied(OpKernelConstruction* ctx) {
  return CheckSwapType(ctx->input_type(0), absl::StrCat(" (node '", ctx->def().name(), "')"));
}

// The output of a copy to host memory: of the device's pool, or allocated outside of all arenas, the CPU's too.
template <typename CopierFactory>
class CopyOnHost {
 public:
  absl::Status Make(OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(CheckCopied(ctx));
    TF_RETURN_IF_ERROR(ctx->GetAttr("pooled", &pooled_));
    int64_t owner;
    TF_RETURN_IF_ERROR(ctx->GetAttr("owner", &owner));
    return owner == 0 ? absl::OkStatus() : step_.Reserve(ctx, owner, CopierFactory::Pool(ctx->device()));
  }

  // Makes output 0, of the shape of input 0.
  absl::Status Set(OpKernelContext* ctx) const {
    const Tensor& source = ctx->input(0);
    Tensor made;
    if (pooled_ && source.TotalBytes() > 0) {
      const std::string& name = ctx->op_kernel().name();
      TF_RETURN_IF_ERROR(
          MakePooled<PooledBuffer>(CopierFactory::Pool(ctx->device()), source, source.shape(), name, &made));
    } else {
      made = Tensor(tensorflow::cpu_allocator_base(), source.dtype(), source.shape());
      if (!made.IsInitialized()) return NoHostMemory(HostPool::Failure::kSystem, ctx->op_kernel().name(), source.TotalBytes(), source);
    }
    ctx->set_output(0, made);
    return absl::OkStatus();
  }

 private:
  bool pooled_ = false;
  StepMemory step_;
};

// The copy is on the stream of the kernels: it ends before the next kernel begins, and the host does not wait for it,
// as it does for TensorFlow's _Recv. The tensor in host memory, which may be pinned, is held until the copy has ended.
class ToDeviceOp : public OpKernel {
 public:
  explicit ToDeviceOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, CheckCopied(ctx)); }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& source = ctx->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, source.shape(), &output));
    if (source.TotalBytes() == 0) return;
    stream_executor::Stream* const stream = ctx->op_device_context()->stream();
    DeviceAddress to(output->data(), output->TotalBytes());
    OP_REQUIRES_OK(ctx, stream->Memcpy(&to, source.data(), source.TotalBytes()));
    OP_REQUIRES_OK(ctx, stream->DoHostCallbackWithStatus([held = source] { return absl::OkStatus(); }));
  }
};

// The executor drops its reference to the input when `done` is called, and then runs what follows. TensorFlow's
// _Send and _Recv hold theirs until a thread that polls for events has returned from what follows.
class ToHostOp : public AsyncOpKernel {
 public:
  explicit ToHostOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) { OP_REQUIRES_OK(ctx, output_.Make(ctx)); }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Tensor& source = ctx->input(0);
    OP_REQUIRES_OK_ASYNC(ctx, output_.Set(ctx), done);
    if (source.TotalBytes() == 0) {
      done();
      return;
    }
    ctx->op_device_context()->CopyDeviceTensorToCPU(
        &source, "tfswap", static_cast<tensorflow::Device*>(ctx->device()), ctx->mutable_output(0),
        [ctx, done = std::move(done)](const absl::Status& status) {
          ctx->SetStatus(status);
          done();
        });
  }

 private:
  CopyOnHost<GpuCopierFactory> output_;
};

// The same for a part of a step on the CPU that has a limit of its own: the tensor leaves the CPU's arena.
class LeaveArenaOp : public OpKernel {
 public:
  explicit LeaveArenaOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, output_.Make(ctx)); }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& source = ctx->input(0);
    OP_REQUIRES_OK(ctx, output_.Set(ctx));
    if (source.TotalBytes() > 0) CopyOnDevice(ctx, source, ctx->mutable_output(0));
  }

 private:
  CopyOnHost<CpuCopierFactory> output_;
};

class EnterArenaOp : public OpKernel {
 public:
  explicit EnterArenaOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, CheckCopied(ctx)); }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& source = ctx->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, source.shape(), &output));
    if (source.TotalBytes() > 0) CopyOnDevice(ctx, source, output);
  }
};

// The number is outside of all arenas: other devices run at any time.
class SignalOp : public OpKernel {
 public:
  explicit SignalOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), signal_(tensorflow::cpu_allocator_base(), tensorflow::DT_INT32, TensorShape({})) {
    signal_.scalar<int32_t>()() = 0;
  }

  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, signal_); }
  bool IsExpensive() override { return false; }

 private:
  Tensor signal_;
};

class TextOp : public OpKernel {
 public:
  explicit TextOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    const tensorflow::TensorProto* value = nullptr;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("value", &value));
    OP_REQUIRES(ctx, text_.FromProto(*value),
                absl::InvalidArgumentError(absl::StrCat(name(), " has no tensor as its value.")));
  }

  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, text_); }
  bool IsExpensive() override { return false; }

 private:
  Tensor text_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>Text").Device(tensorflow::DEVICE_GPU).HostMemory("output"), TextOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Signal").Device(tensorflow::DEVICE_CPU), SignalOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Signal").Device(tensorflow::DEVICE_GPU).HostMemory("signal"), SignalOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ToHost").Device(tensorflow::DEVICE_CPU), LeaveArenaOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ToDevice").Device(tensorflow::DEVICE_CPU), EnterArenaOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ToHost").Device(tensorflow::DEVICE_GPU).HostMemory("output"), ToHostOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ToDevice").Device(tensorflow::DEVICE_GPU).HostMemory("tensor"), ToDeviceOp);

}  // namespace
}  // namespace tfswap
