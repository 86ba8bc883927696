// What the parts of a step on several devices give each other, in host memory (passes/device_parts.py).
//
// Between nodes of the step itself Send and Receive are there only while one part is planned: an edge takes their place
// when the parts are joined. A branch of a conditional runs on each device in a function of its own, which no edge leads
// into. There the tensor goes through the rendezvous of the step, by the name of its channel. Where a step fails,
// TensorFlow aborts the rendezvous, and with it all that waits.

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "op_support.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/rendezvous.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Rendezvous;
using tensorflow::Tensor;

REGISTER_OP("Tfswap>Send")
    .Input("tensor: T")
    .Attr("T: type")
    .Attr("channel: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Passes a tensor in host memory to the Receive of its channel, on another device.

channel: Name of the channel. Without one the op represents other devices while one part of the
  step is planned, and can't run.
)doc");

REGISTER_OP("Tfswap>Receive")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("shape: shape")
    .Attr("channel: string = ''")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ExplicitShape)
    .Doc(R"doc(
Waits for the tensor in host memory that the Send of its channel passes.

channel: As of Send.
)doc");

absl::Status ReadChannel(OpKernelConstruction* ctx, std::string* channel) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("channel", channel));
  if (channel->empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", ctx->def().name(), "' has no channel: it is for planning alone."));
  }
  return absl::OkStatus();
}

// The key of a channel of the step that runs. Both ends are on the host of this process.
absl::Status KeyOf(OpKernelContext* ctx, const std::string& channel, Rendezvous::ParsedKey* key) {
  if (ctx->rendezvous() == nullptr) {
    return absl::FailedPreconditionError("a channel is used outside of a step");
  }
  const std::string& device = ctx->device()->name();
  const std::string host = absl::StrCat(absl::string_view(device).substr(0, device.find("/device:")), "/device:CPU:0");
  return Rendezvous::ParseKey(
      Rendezvous::CreateKey(host, 1, host, absl::StrCat("tfswap/", channel), tensorflow::FrameAndIter(0, 0)), key);
}

Rendezvous::Args OnHost(OpKernelContext* ctx) {
  Rendezvous::Args args;
  args.alloc_attrs.set_on_host(true);
  args.cancellation_manager = ctx->cancellation_manager();
  return args;
}

class SendOp : public OpKernel {
 public:
  explicit SendOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, ReadChannel(ctx, &channel_)); }

  void Compute(OpKernelContext* ctx) override {
    Rendezvous::ParsedKey key;
    OP_REQUIRES_OK(ctx, KeyOf(ctx, channel_, &key));
    OP_REQUIRES_OK(ctx, ctx->rendezvous()->Send(key, OnHost(ctx), ctx->input(0), /*is_dead=*/false));
  }

  bool IsExpensive() override { return false; }

 private:
  std::string channel_;
};

class ReceiveOp : public AsyncOpKernel {
 public:
  explicit ReceiveOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadChannel(ctx, &channel_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    Rendezvous::ParsedKey key;
    OP_REQUIRES_OK_ASYNC(ctx, KeyOf(ctx, channel_, &key), done);
    ctx->rendezvous()->RecvAsync(
        key, OnHost(ctx),
        [ctx, done = std::move(done)](const absl::Status& status, const Rendezvous::Args&, const Rendezvous::Args&,
                                      const Tensor& tensor, bool) {
          if (status.ok()) ctx->set_output(0, tensor);
          ctx->SetStatus(status);
          // The thread of a Send does not go on with the kernels of the device that receives.
          (*ctx->runner())(done);
        });
  }

 private:
  std::string channel_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>Send").Device(tensorflow::DEVICE_CPU), SendOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Receive").Device(tensorflow::DEVICE_CPU), ReceiveOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Send").Device(tensorflow::DEVICE_GPU).HostMemory("tensor"), SendOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Receive").Device(tensorflow::DEVICE_GPU).HostMemory("tensor"), ReceiveOp);

}  // namespace
}  // namespace tfswap
