// The swap ops: signatures, shape inference, and kernels for every device type that
// device_copier.h knows.
//
// A planned step runs in one known order, so a swap is four ops, each of which
// allocates or frees at a known place in that order:
//
//   SwapOut  starts the copy to the host    (nothing freed yet)
//   Release  the copy has ended: the device buffer is freed
//   SwapIn   allocates the tensor again, and starts the copy back
//   Await    the copy has ended: the tensor may be read
//
// A backward loop pops a handle in each iteration.
// There a fifth op does SwapIn's part for the next iteration, while this one runs:
//
//   Prefetch  allocates the tensor of the handle that is popped next, and starts the
//             copy back; its SwapIn then passes that tensor on
//
// All are stateful, so that common-subexpression elimination, constant folding and
// pruning leave them alone. Release has no output: only control edges keep it in a
// function's graph, and the rewriter adds them.
//
// Who holds what:
//   handle (Variant) -> Swapped: the device tensor until Release, its place in host
//                       memory or on disk until the last handle and copy are gone;
//                       a tensor that Prefetch has allocated, until SwapIn takes it
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
#include "tensorflow/core/kernels/tensor_list.h"
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
using tensorflow::TensorList;
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
    .Attr("step_bytes: int = -1")
    .Attr("step_limit: int = -1")
    .Attr("spill_dir: string = ''")
    .Attr("spill_bytes: int = 0")
    .Attr("spill_limit: int = -1")
    .SetIsStateful()
    .SetShapeFn(SwapOutShape)
    .Doc(R"doc(
Starts a copy of `tensor` into host memory, or to disk, and returns immediately.

The handle keeps `tensor` in device memory until Release. Fails with
ResourceExhausted when host memory is at its limit, and there is no room on disk either.
owner: Who swaps, by number. Steps that share limits have the same owner.
disk: Whether the tensor goes to disk; if there is no room, to host memory. One that does not goes to disk only where
  host memory has no room.
saved_on_disk: Of what a loop saves for its backward loop: how many bytes of what all such nodes save in a
  step go to disk, the first ones, which are needed last.
step_bytes: Of one node per step, which registers for all of them when its kernel is made: the host memory that the
  step's tensors take together, and that is reserved then. -1 for all others.
step_limit: There, what the step may take; -1 for no limit.
spill_dir: There, the folder of what goes to disk; '' where nothing may.
spill_bytes: There, what the step's tensors take on disk.
spill_limit: There, what they may take on disk; -1 for no limit.
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

`tensor` holds no values yet: read it only through Await. May run any number of
times on one handle, each time for a tensor of its own. Of a handle that Prefetch
has seen the first time takes what that has allocated.
shape: For shape inference only; the tensor has the shape of the one swapped out.
)doc");

REGISTER_OP("Tfswap>Prefetch")
    .Input("list: variant")
    .Output("output: variant")
    .Attr("nbytes: int = 0")
    .SetIsStateful()
    .SetShapeFn(PrefetchShape)
    .Doc(R"doc(
Does what SwapIn does for the last handle of a tensor list, and keeps the tensor in it.

Returns immediately; passes the list on. Does nothing where the list is empty.
nbytes: For plans only: what the tensor takes; it has the size of the one swapped out.
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

// Where the copies of one tensor are counted: with the process, and with the step of the client whose it is.
class Account {
 public:
  Account() = default;
  explicit Account(std::shared_ptr<Client> client)
      : client_(std::move(client)), step_(client_ == nullptr ? 0 : client_->traffic.step()) {}

  void Add(Direction direction, Tier tier, size_t bytes, const Copied& copied) const {
    if (!copied.status.ok()) return;
    ForBoth([&](Traffic& traffic, uint64_t step) {
      traffic.Copied(step, direction, tier, bytes, copied.carried_bytes, copied.busy_s);
      if (copied.at_once) traffic.Stalled(step, Stall::kAtOnce, copied.busy_s);
    });
  }

  void Add(Stall stall, double seconds) const {
    ForBoth([&](Traffic& traffic, uint64_t step) { traffic.Stalled(step, stall, seconds); });
  }

  void Hold(Tier tier, int64_t bytes) const {
    if (client_ != nullptr) client_->traffic.Hold(tier, bytes);  // the process's pools count for themselves
  }

 private:
  template <typename Visit>
  void ForBoth(Visit visit) const {
    Traffic& all = Runtime::Get().traffic();
    visit(all, all.step());
    if (client_ != nullptr) visit(client_->traffic, step_);
  }

  std::shared_ptr<Client> client_;
  uint64_t step_ = 0;
};

// Where a tensor's bytes are while it is away: in memory of a pool, or in a file; nowhere for an empty tensor.
struct Place {
  HostBuffer memory;
  std::unique_ptr<SpillSlot> slot;

  Tier tier() const { return slot == nullptr ? Tier::kHost : Tier::kDisk; }
};

// How many bytes belong together: those of a number.
size_t ValueBytes(DataType type) {
  const auto bytes = static_cast<size_t>(tensorflow::DataTypeSize(type));
  return tensorflow::DataTypeIsComplex(type) ? bytes / 2 : bytes;
}

// A tensor of the device, and the end of the copy that fills it.
struct Loading {
  Tensor tensor;
  std::shared_ptr<Transfer> copied;
};

// A tensor that was swapped out.
class Swapped {
 public:
  Swapped(const Tensor& tensor, Place place, Account account)
      : dtype_(tensor.dtype()),
        shape_(tensor.shape()),
        bytes_(tensor.TotalBytes()),
        place_(std::move(place)),
        account_(std::move(account)),
        copied_(std::make_shared<Transfer>()),
        device_(tensor) {
    account_.Hold(place_.tier(), static_cast<int64_t>(bytes_));
  }
  ~Swapped() { account_.Hold(place_.tier(), -static_cast<int64_t>(bytes_)); }
  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

  DataType dtype() const { return dtype_; }
  const TensorShape& shape() const { return shape_; }
  const Account& account() const { return account_; }

  // Start a copy of the whole tensor; `done` as DeviceCopier's, who does not hold this by itself.
  void CopyOut(const std::shared_ptr<DeviceCopier>& copier, DeviceCopier::Done done) {
    const Tensor* const from = &device_;
    done = Counted(Direction::kOut, std::move(done));
    if (place_.slot == nullptr) {
      copier->CopyOut(from, place_.memory.data(), std::move(done));
      return;
    }
    place_.slot->Write(
        ValueBytes(dtype_),
        [copier, from](size_t begin, size_t bytes, char* staging) {
          return copier->ReadPiece(*from, begin, bytes, staging);
        },
        [done = std::move(done)](const CopyLane::Ended& ended) { done(AsCopied(ended)); });
  }

  void CopyIn(const std::shared_ptr<DeviceCopier>& copier, Tensor* to, DeviceCopier::Done done) {
    done = Counted(Direction::kIn, std::move(done));
    if (place_.slot == nullptr) {
      copier->CopyIn(place_.memory.data(), to, std::move(done));
      return;
    }
    place_.slot->Read(
        [copier, to](size_t begin, size_t bytes, char* staging) {
          return copier->WritePiece(staging, begin, bytes, to);
        },
        [done = std::move(done)](const CopyLane::Ended& ended) { done(AsCopied(ended)); });
  }

  // The end of the copy to the host. Shared, so that it can be signalled after the
  // last reference to the buffers is gone.
  const std::shared_ptr<Transfer>& copied() const { return copied_; }

  void DropDeviceTensor() {
    Tensor dropped;
    std::lock_guard<std::mutex> lock(mu_);
    std::swap(dropped, device_);
  }

  bool IsPrefetched() {
    std::lock_guard<std::mutex> lock(mu_);
    return prefetched_.copied != nullptr;
  }

  void KeepPrefetched(Loading loading) {
    std::lock_guard<std::mutex> lock(mu_);
    prefetched_ = std::move(loading);
  }

  // Without a copy where there is none.
  Loading TakePrefetched() {
    std::lock_guard<std::mutex> lock(mu_);
    return std::exchange(prefetched_, Loading());
  }

 private:
  DeviceCopier::Done Counted(Direction direction, DeviceCopier::Done done) const {
    return [account = account_, direction, tier = place_.tier(), bytes = bytes_,
            done = std::move(done)](const Copied& copied) {
      account.Add(direction, tier, bytes, copied);
      done(copied);
    };
  }

  const DataType dtype_;
  const TensorShape shape_;
  const size_t bytes_;
  const Place place_;
  const Account account_;
  const std::shared_ptr<Transfer> copied_;
  std::mutex mu_;
  Tensor device_;  // until DropDeviceTensor, which comes after the copy out
  Loading prefetched_;
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
  Account account;
  std::string TypeName() const { return "tfswap::Ticket"; }
};

// One async kernel's wait for a copy: ends when the copy ends or the step is
// cancelled, whichever comes first. `finish` runs only in the first case and holds
// what the kernel still needs; it is destroyed before the step goes on.
class Wait : public std::enable_shared_from_this<Wait> {
 public:
  using Finish = std::function<absl::Status(const absl::Status& copy_status)>;

  static void Start(OpKernelContext* ctx, AsyncOpKernel::DoneCallback done,
                    std::shared_ptr<Transfer> transfer, Stall stall, Account account,
                    Finish finish) {
    if (transfer->ended()) {
      const absl::Status status = finish(transfer->status());
      finish = nullptr;
      if (!status.ok()) ctx->SetStatus(status);
      done();
      return;
    }
    auto wait = std::make_shared<Wait>(ctx, std::move(done), stall, std::move(account),
                                       std::move(finish));
    if (!wait->WatchCancellation()) return;
    // From here on the step may end at any moment: no use of ctx, nor of anything that
    // its inputs own.
    transfer->OnEnd([wait](const absl::Status& status) { wait->CopyEnded(status); });
  }

  Wait(OpKernelContext* ctx, AsyncOpKernel::DoneCallback done, Stall stall, Account account,
       Finish finish)
      : ctx_(ctx),
        done_(std::move(done)),
        stall_(stall),
        account_(std::move(account)),
        finish_(std::move(finish)) {
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
    if (taken_.exchange(true)) return;
    account_.Add(stall_, std::chrono::duration<double>(Clock::now() - start_).count());
    // Not DeregisterCallback: it would wait for every callback of a cancellation
    // under way. When this returns false, ours will find the wait taken.
    if (cancellation_ != nullptr) cancellation_->TryDeregisterCallback(token_);
    const absl::Status status = finish_(copy_status);
    End(status);
  }

  void Cancelled() {
    if (taken_.exchange(true)) return;
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
  const Account account_;
  Finish finish_;
  const Clock::time_point start_ = Clock::now();
  std::function<void(std::function<void()>)> runner_;
  tensorflow::CancellationManager* cancellation_ = nullptr;
  tensorflow::CancellationToken token_ = tensorflow::CancellationManager::kInvalidToken;
  std::atomic<bool> taken_{false};
};

template <typename CopierFactory>
class SwapOutOp : public OpKernel {
 public:
  explicit SwapOutOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckType(ctx, ctx->input_type(0)));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("owner", &owner_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("disk", &disk_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("saved_on_disk", &saved_on_disk_));
    if (owner_ == 0) return;
    client_ = Runtime::Get().client(owner_);
    int64_t step_bytes;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("step_bytes", &step_bytes));
    if (step_bytes >= 0) RegisterStep(ctx, static_cast<size_t>(step_bytes));
  }

  ~SwapOutOp() override {
    if (registered_) Runtime::Get().Unregister(owner_);
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
      // Buffers first: who hears of the end may count on them.
      swapped.reset();
      copied->End(ended.status);
    });
  }

 private:
  static uint64_t Limit(int64_t attr) {
    return attr < 0 ? HostBudget::kUnlimited : static_cast<uint64_t>(attr);
  }

  void RegisterStep(OpKernelConstruction* ctx, size_t step_bytes) {
    int64_t limit, spill_limit, spill_bytes;
    std::string folder;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("step_limit", &limit));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spill_dir", &folder));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spill_bytes", &spill_bytes));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spill_limit", &spill_limit));
    Runtime& runtime = Runtime::Get();
    HostPool* const pool = CopierFactory::Pool(ctx->device());
    const std::string why = runtime.Register(owner_, Limit(limit), folder, Limit(spill_limit), pool);
    OP_REQUIRES(ctx, why.empty(), absl::ResourceExhaustedError(why));
    registered_ = true;
    constexpr char kAll[] = "all that its step swaps";
    HostPool::Failure failure = HostPool::Failure::kNone;
    if (step_bytes > 0) failure = pool->Reserve(step_bytes);
    OP_REQUIRES(ctx, failure == HostPool::Failure::kNone,
                absl::ResourceExhaustedError(runtime.WhyNoRoom(failure, name(), step_bytes, kAll)));
    if (spill_bytes <= 0 || folder.empty()) return;
    SpillFile* const file = client_->spill;
    failure = file->Reserve(static_cast<size_t>(spill_bytes));
    OP_REQUIRES(ctx, failure == HostPool::Failure::kNone,
                absl::ResourceExhaustedError(
                    file->WhyNoRoom(failure, name(), static_cast<size_t>(spill_bytes), kAll)));
  }

  // Where the tensor is to go if there is room, else in the other tier.
  absl::Status FindPlace(HostPool* pool, const Tensor& tensor, Place* place) const {
    const size_t bytes = tensor.TotalBytes();
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
  bool registered_ = false;
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
    Wait::Start(ctx, std::move(done), std::move(copied), Stall::kRelease, std::move(account),
                [swapped = std::move(swapped)](const absl::Status& status) {
                  // Also when the copy failed: the step is lost, the memory is not.
                  swapped->DropDeviceTensor();
                  return status;
                });
  }
};

// What a copy to the device needs until it has ended. Held by the copy alone.
struct Filling {
  std::shared_ptr<Swapped> swapped;
  Loading loading;
};

// The references go before anybody hears of the end: an op after Await may then
// be the tensor's only owner and work in place, and the host buffer is back in
// its pool. They go by name: TensorFlow may hold another copy of the callback.
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
  // Behind the copy to the host, if that one is still under way.
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
    Wait::Start(ctx, std::move(done), ticket->copied, Stall::kAwait, ticket->account,
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

// On a GPU, handles and tickets are not said to be in host memory, where they are: TensorFlow's
// kernels for lists don't say so of the variants that they take and give either, and between
// two that differ in it TensorFlow would put a copy.
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
