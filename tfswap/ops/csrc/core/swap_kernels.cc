// Kernels of the swap ops (swap_ops.cc), for the device types of device_copier.h.

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "copy_wait.h"
#include "device_copier.h"
#include "host_pool.h"
#include "lent_blocks.h"
#include "op_support.h"
#include "runtime.h"
#include "step_memory.h"
#include "swapped.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/kernels/tensor_list.h"
#include "transfer.h"

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorList;

absl::Status CheckType(const OpKernelConstruction* ctx, DataType type) {
  return CheckSwapType(type, absl::StrCat(" (node '", ctx->def().name(), "')"));
}

template <typename CopierFactory>
class SwapOutOp : public OpKernel {
 public:
  explicit SwapOutOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckType(ctx, ctx->input_type(0)));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("owner", &owner_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("disk", &disk_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("saved_on_disk", &saved_on_disk_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("lent_block", &lent_block_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("lent_place", &lent_place_));
    if (owner_ == 0) return;
    client_ = Runtime::Get().client(owner_);
    OP_REQUIRES_OK(ctx, step_.Reserve(ctx, owner_, CopierFactory::Pool(ctx->device())));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES(ctx, !Runtime::Get().is_late_child(),
                absl::FailedPreconditionError(Runtime::kLateChild));
    const Tensor& tensor = ctx->input(0);
    const auto copier = CopierFactory::Make(ctx);
    Place place;
    if (tensor.TotalBytes() > 0) OP_REQUIRES_OK(ctx, FindPlace(copier->pool(), tensor, &place));
    auto swapped = std::make_shared<Swapped>(tensor, std::move(place), Account(client_));
    SetVariantOutput(ctx, 0, Handle{{}, swapped});
    if (tensor.TotalBytes() == 0) {
      swapped->copied()->End(absl::OkStatus());
      return;
    }
    Swapped* const copying = swapped.get();
    copying->CopyOut(copier, [swapped = std::move(swapped)](const Copied& ended) mutable {
      const auto copied = swapped->copied();
      // Buffers are released before the end is signalled, since the waiting kernels rely on that.
      swapped.reset();
      copied->End(ended.status);
    });
  }

 private:
  // A place in the tensor's tier, or, without room there, in another tier.
  absl::Status FindPlace(HostPool* pool, const Tensor& tensor, Place* place) const {
    const size_t bytes = tensor.TotalBytes();
    if (lent_block_ != 0) place->lent = LentBlocks::Get().Take(lent_block_, lent_place_, bytes);
    if (place->is_lent()) return absl::OkStatus();
    SpillFile* const file = client_ == nullptr ? nullptr : client_->spill.load();
    HostPool::Failure no_memory, no_disk = HostPool::Failure::kNone;
    const bool saved_there = file != nullptr && saved_on_disk_ > 0 &&
                             client_->IsAmongFirstSaved(bytes, static_cast<uint64_t>(saved_on_disk_));
    const bool to_disk = disk_ || saved_there;
    if (file != nullptr && to_disk) place->slot = file->Allocate(bytes, &no_disk);
    if (place->slot != nullptr) return absl::OkStatus();
    void* const memory = pool->Allocate(bytes, &no_memory);
    if (memory != nullptr) {
      place->memory = HostBuffer(pool, memory);
      return absl::OkStatus();
    }
    if (file == nullptr) return NoHostMemory(no_memory, name(), bytes, tensor);
    if (!to_disk) place->slot = file->Allocate(bytes, &no_disk);
    if (place->slot != nullptr) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat(file->WhyNoRoom(no_disk, name(), bytes, Described(tensor)), " Nor has host memory any."));
  }

  int64_t owner_ = 0;
  bool disk_ = false;
  int64_t saved_on_disk_ = 0;
  int64_t lent_block_ = 0;
  int64_t lent_place_ = 0;
  StepMemory step_;
  std::shared_ptr<Client> client_;
};

class ReleaseOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Handle* handle;
    OP_REQUIRES_OK_ASYNC(ctx, GetVariantInput(ctx, 0, &handle), done);
    auto swapped = handle->swapped;
    auto copied = swapped->copied();
    Account account = swapped->account();
    CopyWait::Start(ctx, std::move(done), std::move(copied), Stall::kRelease, std::move(account),
                [swapped = std::move(swapped)](const absl::Status& status) {
                  // Also when the copy failed: the step fails, and its memory must be freed.
                  swapped->DropDeviceTensor();
                  return status;
                });
  }
};

// The objects that a copy to the device needs until it has ended. Only the copy holds them.
struct Filling {
  std::shared_ptr<Swapped> swapped;
  Loading loading;
};

// Drops the references before the end is announced: an op after Await may then be the
// tensor's only owner and work in place, and the host buffer is back in its pool. They are
// dropped explicitly because TensorFlow may hold another copy of the callback.
void EndCopy(const std::shared_ptr<Filling>& filling, const absl::Status& status) {
  const auto copied = std::move(filling->loading.copied);
  filling->loading.tensor = Tensor();
  filling->swapped.reset();
  copied->End(status);
}

void StartCopy(const std::shared_ptr<DeviceCopier>& copier, std::shared_ptr<Filling> filling) {
  Swapped* const from = filling->swapped.get();
  Tensor* const to = &filling->loading.tensor;
  from->CopyIn(copier, to, [filling = std::move(filling)](const Copied& copied) {
    EndCopy(filling, copied.status);
  });
}

// Starts the copy into a new tensor.
template <typename CopierFactory>
Loading Load(OpKernelContext* ctx, const std::shared_ptr<Swapped>& swapped, Tensor tensor) {
  Loading loading{std::move(tensor), std::make_shared<Transfer>()};
  if (loading.tensor.TotalBytes() == 0) {
    loading.copied->End(absl::OkStatus());
    return loading;
  }
  auto filling = std::make_shared<Filling>(Filling{swapped, loading});
  // After the copy to the host, if that is still running.
  swapped->copied()->OnEnd(
      [copier = CopierFactory::Make(ctx),
       filling = std::move(filling)](const absl::Status& status) mutable {
        if (status.ok()) {
          StartCopy(copier, std::move(filling));
        } else {
          EndCopy(filling, status);
        }
      });
  return loading;
}

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
    Loading loading = swapped->TakePrefetched();
    if (loading.copied != nullptr) {
      ctx->set_output(0, loading.tensor);
    } else {
      Tensor* tensor = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(0, swapped->shape(), &tensor));
      loading = Load<CopierFactory>(ctx, swapped, *tensor);
    }
    SetVariantOutput(ctx, 1, Ticket{{}, loading.copied, loading.tensor.data(), swapped->account()});
  }
};

template <typename CopierFactory>
class PrefetchOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const auto* const list = Held<TensorList>(ctx->input(0));
    OP_REQUIRES(ctx, list != nullptr, IsNoList());
    ctx->set_output(0, ctx->input(0));
    if (list->tensors().empty()) return;
    const auto* const handle = Held<Handle>(list->tensors().back());
    OP_REQUIRES(ctx, handle != nullptr, IsNoList());
    const auto& swapped = handle->swapped;
    if (swapped->IsPrefetched()) return;
    Tensor tensor;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(swapped->dtype(), swapped->shape(), &tensor));
    swapped->KeepPrefetched(Load<CopierFactory>(ctx, swapped, std::move(tensor)));
  }

 private:
  template <typename Value>
  static const Value* Held(const Tensor& tensor) {
    const bool is_scalar = tensor.dtype() == tensorflow::DT_VARIANT && tensor.NumElements() == 1;
    return is_scalar ? tensor.flat<tensorflow::Variant>()(0).get<Value>() : nullptr;
  }

  absl::Status IsNoList() const {
    return absl::InvalidArgumentError(
        absl::StrCat("The input of Prefetch node '", name(), "' must be a list of what SwapOut returned."));
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
    CopyWait::Start(ctx, std::move(done), ticket->copied, Stall::kAwait, ticket->account,
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
REGISTER_KERNEL_BUILDER(Name("Tfswap>Prefetch").Device(tensorflow::DEVICE_CPU),
                        PrefetchOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Await").Device(tensorflow::DEVICE_CPU), AwaitOp);

// On a GPU, handles and tickets are not registered as HostMemory, although they are there. TensorFlow's kernels of
// lists do not register their variants so either, and TensorFlow would insert a copy between two nodes that differ in
// this.
REGISTER_KERNEL_BUILDER(Name("Tfswap>SwapOut").Device(tensorflow::DEVICE_GPU),
                        SwapOutOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Release").Device(tensorflow::DEVICE_GPU), ReleaseOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>SwapIn").Device(tensorflow::DEVICE_GPU),
                        SwapInOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Prefetch").Device(tensorflow::DEVICE_GPU),
                        PrefetchOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Await").Device(tensorflow::DEVICE_GPU), AwaitOp);

}  // namespace
}  // namespace tfswap
