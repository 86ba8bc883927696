// The swap ops: signatures, shape inference, and kernels for every device type that
// device_copier.h knows.
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
//
// Who holds what:
//   handle (Variant) -> Swapped: the device tensor until Release, the host buffer
//                       until the last handle and copy are gone
//   copy under way   -> Swapped, and the tensor that it fills
//   ticket (Variant) -> the copy's end, no tensor
// so a step that fails or is cancelled may drop its handles and tickets at any
// time: buffers that a copy still touches stay until that copy has ended.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "device_copier.h"
#include "host_pool.h"
#include "op_support.h"
#include "runtime.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/env.h"
#include "transfer.h"

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeAndType;
using tensorflow::shape_inference::ShapeHandle;

// `where` says which node it is; TensorFlow itself adds that to what a shape function says.
absl::Status CheckType(DataType type, const std::string& where) {
  if (tensorflow::DataTypeCanUseMemcpy(type)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "tfswap can't swap tensors of type ", tensorflow::DataTypeString(type), where,
      ": only types whose elements are plain bytes of a fixed size can be copied to the host."));
}

absl::Status CheckType(const OpKernelConstruction* ctx, DataType type) {
  return CheckType(type, absl::StrCat(" (node '", ctx->def().name(), "')"));
}

absl::Status CheckType(InferenceContext* c, DataType* type) {
  TF_RETURN_IF_ERROR(c->GetAttr("T", type));
  return CheckType(*type, "");
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
    .Attr("step_bytes: int = 0")
    .Attr("step_limit: int = -1")
    .Attr("owner: int = 0")
    .SetIsStateful()
    .SetShapeFn(SwapOutShape)
    .Doc(R"doc(
Starts a copy of `tensor` into host memory and returns at once.

The handle keeps `tensor` in device memory until Release. Fails with
ResourceExhausted when host memory is at its limit.
step_bytes: Of one node per step: the host memory that the step's tensors take together,
  which is reserved when the kernel is made. 0 for all others.
step_limit: Where step_bytes is given, what the step may take; -1 for no limit.
owner: Of that limit, by number. Steps that share it have the same owner.
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

// A tensor that was swapped out.
class Swapped {
 public:
  Swapped(const Tensor& tensor, HostBuffer host)
      : dtype_(tensor.dtype()),
        shape_(tensor.shape()),
        host_(std::move(host)),
        copied_(std::make_shared<Transfer>()),
        device_(tensor) {}

  DataType dtype() const { return dtype_; }
  const TensorShape& shape() const { return shape_; }
  void* host() const { return host_.data(); }

  // The end of the copy to the host. Shared, so that it can be told after the
  // last reference to the buffers is gone.
  const std::shared_ptr<Transfer>& copied() const { return copied_; }

  // Valid until DropDeviceTensor, which comes after the copy.
  const Tensor* device() const { return &device_; }

  void DropDeviceTensor() {
    Tensor dropped;
    std::lock_guard<std::mutex> lock(mu_);
    std::swap(dropped, device_);
  }

 private:
  const DataType dtype_;
  const TensorShape shape_;
  const HostBuffer host_;
  const std::shared_ptr<Transfer> copied_;
  std::mutex mu_;
  Tensor device_;
};

struct Handle : ProcessLocal {
  static constexpr char kMaker[] = "SwapOut";
  std::shared_ptr<Swapped> swapped;
  std::string TypeName() const { return "tfswap::Handle"; }
};

struct Ticket : ProcessLocal {
  static constexpr char kMaker[] = "SwapIn";
  std::shared_ptr<Transfer> copied;
  const void* tensor_data = nullptr;
  std::string TypeName() const { return "tfswap::Ticket"; }
};

// One async kernel's wait for a copy: ends when the copy ends or the step is
// cancelled, whichever comes first. `finish` runs only in the first case and holds
// what the kernel still needs; it is destroyed before the step goes on.
class Wait : public std::enable_shared_from_this<Wait> {
 public:
  using Finish = std::function<absl::Status(const absl::Status& copy_status)>;

  static void Start(OpKernelContext* ctx, AsyncOpKernel::DoneCallback done,
                    std::shared_ptr<Transfer> transfer, Stall stall, Finish finish) {
    if (transfer->ended()) {
      const absl::Status status = finish(transfer->status());
      finish = nullptr;
      if (!status.ok()) ctx->SetStatus(status);
      done();
      return;
    }
    auto wait = std::make_shared<Wait>(ctx, std::move(done), stall, std::move(finish));
    if (!wait->WatchCancellation()) return;
    // From here on the step may end at any moment: no use of ctx, nor of anything that
    // its inputs own.
    transfer->OnEnd([wait](const absl::Status& status) { wait->CopyEnded(status); });
  }

  Wait(OpKernelContext* ctx, AsyncOpKernel::DoneCallback done, Stall stall, Finish finish)
      : ctx_(ctx), done_(std::move(done)), stall_(stall), finish_(std::move(finish)) {
    if (ctx->runner() != nullptr) runner_ = *ctx->runner();
  }

 private:
  using Clock = std::chrono::steady_clock;

  // False: the step is cancelled already, and the wait is over.
  bool WatchCancellation() {
    cancellation_ = ctx_->cancellation_manager();
    if (cancellation_ == nullptr) return true;
    token_ = cancellation_->get_cancellation_token();
    const bool watching =
        cancellation_->RegisterCallback(token_, [wait = shared_from_this()] {
          wait->Cancelled();
        });
    if (!watching) Cancelled();
    return watching;
  }

  void CopyEnded(const absl::Status& copy_status) {
    if (claimed_.exchange(true)) return;
    Runtime::Get().stall(stall_).Add(
        std::chrono::duration<double>(Clock::now() - start_).count());
    // Not DeregisterCallback: it would wait for every callback of a cancellation
    // under way. When this returns false, ours will find the wait claimed.
    if (cancellation_ != nullptr) cancellation_->TryDeregisterCallback(token_);
    const absl::Status status = finish_(copy_status);
    End(status);
  }

  void Cancelled() {
    if (claimed_.exchange(true)) return;
    End(absl::CancelledError(
        absl::StrCat("The step was cancelled while '", ctx_->op_kernel().name(),
                     "' waited for a copy.")));
  }

  void End(const absl::Status& status) {
    finish_ = nullptr;
    if (!status.ok()) ctx_->SetStatus(status);
    // Never on this thread: it is a copy thread, and TensorFlow may run the rest of
    // the step inside done(). By copies, since done() may destroy what holds them.
    auto runner = std::move(runner_);
    auto done = std::move(done_);
    if (runner) {
      runner(std::move(done));
    } else {
      tensorflow::Env::Default()->SchedClosure(std::move(done));
    }
  }

  OpKernelContext* const ctx_;
  AsyncOpKernel::DoneCallback done_;
  const Stall stall_;
  Finish finish_;
  const Clock::time_point start_ = Clock::now();
  std::function<void(std::function<void()>)> runner_;
  tensorflow::CancellationManager* cancellation_ = nullptr;
  tensorflow::CancellationToken token_ = tensorflow::CancellationManager::kInvalidToken;
  std::atomic<bool> claimed_{false};
};

template <typename CopierFactory>
class SwapOutOp : public OpKernel {
 public:
  explicit SwapOutOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckType(ctx, ctx->input_type(0)));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("step_bytes", &step_bytes_));
    if (step_bytes_ <= 0) return;
    int64_t limit;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("step_limit", &limit));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("owner", &owner_));
    Runtime::Get().budget().Claim(
        owner_, limit < 0 ? HostBudget::kUnlimited : static_cast<uint64_t>(limit));
    const size_t bytes = static_cast<size_t>(step_bytes_);
    const HostPool::Failure failure = CopierFactory::Pool(ctx->device())->Reserve(bytes);
    OP_REQUIRES(ctx, failure == HostPool::Failure::kNone,
                absl::ResourceExhaustedError(
                    Runtime::Get().WhyNoRoom(failure, name(), bytes, "all that its step swaps")));
  }

  ~SwapOutOp() override {
    if (step_bytes_ > 0) Runtime::Get().budget().Drop(owner_);
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& tensor = ctx->input(0);
    const auto copier = CopierFactory::Make(ctx);
    const size_t bytes = tensor.TotalBytes();
    HostBuffer host;
    if (bytes > 0) {
      HostPool::Failure failure;
      host = HostBuffer(copier->pool(), copier->pool()->Allocate(bytes, &failure));
      OP_REQUIRES(ctx, failure == HostPool::Failure::kNone,
                  NoHostMemory(failure, name(), bytes, tensor));
    }
    auto swapped = std::make_shared<Swapped>(tensor, std::move(host));
    SetVariantOutput(ctx, 0, Handle{{}, swapped});
    if (bytes == 0) {
      swapped->copied()->End(absl::OkStatus());
      return;
    }
    const Tensor* const from = swapped->device();
    void* const to = swapped->host();
    copier->CopyOut(from, to,
                    [swapped = std::move(swapped)](absl::Status status) mutable {
                      const auto copied = swapped->copied();
                      // Buffers first: who hears of the end may count on them.
                      swapped.reset();
                      copied->End(std::move(status));
                    });
  }

 private:
  int64_t step_bytes_ = 0;
  int64_t owner_ = 0;
};

class ReleaseOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Handle* handle;
    OP_REQUIRES_OK_ASYNC(ctx, GetVariantInput(ctx, 0, &handle), done);
    auto swapped = handle->swapped;
    auto copied = swapped->copied();
    Wait::Start(ctx, std::move(done), std::move(copied), Stall::kRelease,
                [swapped = std::move(swapped)](const absl::Status& status) {
                  // Also when the copy failed: the step is lost, the memory is not.
                  swapped->DropDeviceTensor();
                  return status;
                });
  }
};

template <typename CopierFactory>
class SwapInOp : public OpKernel {
 public:
  explicit SwapInOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckType(ctx, ctx->output_type(0)));
  }

  void Compute(OpKernelContext* ctx) override {
    const Handle* handle;
    OP_REQUIRES_OK(ctx, GetVariantInput(ctx, 0, &handle));
    const auto swapped = handle->swapped;
    OP_REQUIRES(ctx, swapped->dtype() == ctx->expected_output_dtype(0),
                absl::InvalidArgumentError(absl::StrCat(
                    "SwapIn node '", name(), "' has T=",
                    tensorflow::DataTypeString(ctx->expected_output_dtype(0)),
                    ", but its handle holds a tensor of type ",
                    tensorflow::DataTypeString(swapped->dtype()), ".")));
    Tensor* tensor = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, swapped->shape(), &tensor));
    const auto copied = std::make_shared<Transfer>();
    SetVariantOutput(ctx, 1, Ticket{{}, copied, tensor->data()});
    if (tensor->TotalBytes() == 0) {
      copied->End(absl::OkStatus());
      return;
    }
    auto filling = std::make_shared<Filling>(Filling{swapped, *tensor, copied});
    // Behind the copy to the host, if that one is still under way.
    swapped->copied()->OnEnd(
        [copier = CopierFactory::Make(ctx),
         filling = std::move(filling)](const absl::Status& status) mutable {
          if (status.ok()) {
            StartCopy(copier.get(), std::move(filling));
          } else {
            EndCopy(std::move(filling), status);
          }
        });
  }

 private:
  // What a copy to the device needs until it has ended. Held by the copy alone.
  struct Filling {
    std::shared_ptr<Swapped> swapped;
    Tensor tensor;
    std::shared_ptr<Transfer> copied;
  };

  static void StartCopy(DeviceCopier* copier, std::shared_ptr<Filling> filling) {
    const void* const from = filling->swapped->host();
    Tensor* const to = &filling->tensor;
    copier->CopyIn(from, to,
                   [filling = std::move(filling)](const absl::Status& status) mutable {
                     EndCopy(std::move(filling), status);
                   });
  }

  // The references go before anybody hears of the end: an op after Await may then
  // be the tensor's only owner and work in place, and the host buffer is back in
  // its pool.
  static void EndCopy(std::shared_ptr<Filling> filling, const absl::Status& status) {
    const auto copied = std::move(filling->copied);
    filling.reset();
    copied->End(status);
  }
};

class AwaitOp : public AsyncOpKernel {
 public:
  explicit AwaitOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckType(ctx, ctx->input_type(0)));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Ticket* ticket;
    OP_REQUIRES_OK_ASYNC(ctx, GetVariantInput(ctx, 1, &ticket), done);
    OP_REQUIRES_ASYNC(
        ctx, ticket->tensor_data == ctx->input(0).data(),
        absl::InvalidArgumentError(absl::StrCat(
            "Await node '", name(), "' got a tensor that is not the one of its ticket. "
            "Nothing that copies may stand between SwapIn and Await.")),
        done);
    Wait::Start(ctx, std::move(done), ticket->copied, Stall::kAwait,
                [ctx](const absl::Status& status) {
                  if (status.ok()) ctx->set_output(0, ctx->input(0));
                  return status;
                });
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>SwapOut").Device(tensorflow::DEVICE_CPU),
                        SwapOutOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Release").Device(tensorflow::DEVICE_CPU), ReleaseOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>SwapIn").Device(tensorflow::DEVICE_CPU),
                        SwapInOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Await").Device(tensorflow::DEVICE_CPU), AwaitOp);

// On a GPU, handles and tickets are not said to be in host memory, where they are: TensorFlow's
// kernels for lists don't say so of the variants that they take and give either, and between
// two that differ in it TensorFlow would put a copy.
REGISTER_KERNEL_BUILDER(Name("Tfswap>SwapOut").Device(tensorflow::DEVICE_GPU),
                        SwapOutOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Release").Device(tensorflow::DEVICE_GPU), ReleaseOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>SwapIn").Device(tensorflow::DEVICE_GPU),
                        SwapInOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Await").Device(tensorflow::DEVICE_GPU), AwaitOp);

}  // namespace
}  // namespace tfswap
