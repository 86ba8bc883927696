// A step's copies of variables that are at home on the host (variable_home.h). make_home_ops.cc has the ops that make
// homes.
//
//   ReadHome   copies a variable to a new tensor on the device
//   LoadHome   starts such a copy, for which an Await (swap_ops.cc) waits
//   StoreHome  starts the copy of a new value to a new buffer on the host
//   AwaitStore waits for that copy
//   CommitHome waits for that copy and gives the variable that buffer
//   Rows       some rows of a tensor, in its buffer
//
// A range of rows can be read alone. A new value can be stored in slices: the first StoreHome makes the buffer, the
// others fill it too, and CommitHome comes after all of them.
//
// The copies of LoadHome and StoreHome overlap with kernels. Others read the old value or the new one, never a part of
// each, since a new value has a buffer of its own.
//
// On disk, copies read and write the file. All others access its mapping.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "copy_wait.h"
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

absl::Status RowsShape(tensorflow::shape_inference::InferenceContext* c) {
  int64_t rows;
  TF_RETURN_IF_ERROR(c->GetAttr("rows", &rows));
  tensorflow::shape_inference::ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &shape));
  TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->MakeDim(rows), &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

REGISTER_OP("Tfswap>ReadHome")
    .Input("resource: resource")
    .Output("value: dtype")
    .Attr("dtype: type")
    .Attr("shape: shape = {unknown_rank: true}")
    .Attr("begin: int = 0")
    .Attr("rows: int = -1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ExplicitShape)
    .Doc(R"doc(
Copies the value of a variable to a new tensor on the device. The variable keeps its buffer.

shape: For shape inference only.
begin: The first row that is read.
rows: The number of rows that are read, or -1 for the whole value.
)doc");

REGISTER_OP("Tfswap>LoadHome")
    .Input("resource: resource")
    .Output("value: dtype")
    .Output("ticket: variant")
    .Attr("dtype: type")
    .Attr("shape: shape = {unknown_rank: true}")
    .Attr("begin: int = 0")
    .Attr("rows: int = -1")
    .Attr("owner: int = 0")
    .SetIsStateful()
    .SetShapeFn(LoadHomeShape)
    .Doc(R"doc(
Allocates a tensor, starts the copy of a variable's value into it and returns immediately.

`value` has no values yet: read it only through Await. The variable may be assigned once that has ended.
shape: For shape inference only.
begin, rows: As of ReadHome.
owner: The number of the step's owner, as in SwapOut; 0 for none.
)doc");

REGISTER_OP("Tfswap>StoreHome")
    .Input("value: T")
    .Input("before: N * variant")
    .Output("stored: variant")
    .Attr("T: type")
    .Attr("N: int >= 0 = 0")
    .Attr("begin: int = 0")
    .Attr("rows: int = -1")
    .Attr("disk: bool = false")
    .Attr("spill_dir: string = ''")
    .Attr("owner: int = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Starts the copy of a tensor to a new home for it on the host and returns immediately. Fails with ResourceExhausted where
neither host memory nor the disk has room.

before: The StoreHome that has stored another slice of the same new value. Its home is filled, and none is made.
begin: The first row of the home that the tensor is copied to.
rows: The number of rows of the home, or -1 where the tensor is all of it.
disk: Whether the home is on disk, or, without room there, in host memory. Otherwise it is on disk only without room in
  host memory.
spill_dir: The folder for homes on disk; '' for none.
owner: As of LoadHome.
)doc");

REGISTER_OP("Tfswap>AwaitStore")
    .Input("value: T")
    .Input("stored: variant")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Waits for the copy that StoreHome started.

value: The tensor that is copied, which this node keeps until the copy has ended.
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

REGISTER_OP("Tfswap>Rows")
    .Input("tensor: T")
    .Output("output: T")
    .Attr("T: type")
    .Attr("begin: int >= 0")
    .Attr("rows: int >= 0")
    .SetShapeFn(RowsShape)
    .Doc(R"doc(
Some rows of a tensor, in its buffer. Fails where they are not aligned as kernels need it.

begin: The first row.
rows: The number of rows.
)doc");

// A range of rows, of which -1 are all. It is a part of a tensor whose first dimension is that of rows.
struct Rows {
  int64_t begin;
  int64_t rows;

  static absl::Status Get(OpKernelConstruction* ctx, Rows* found) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("begin", &found->begin));
    return ctx->GetAttr("rows", &found->rows);
  }
};

// Sets `part` to `rows` rows of a tensor from `begin` on, in its buffer.
absl::Status GetRows(const Tensor& tensor, int64_t begin, int64_t rows, const std::string& node, Tensor* part) {
  const int64_t all = tensor.dims() > 0 ? tensor.dim_size(0) : 0;
  if (begin < 0 || rows < 0 || begin > all - rows) {
    return absl::InvalidArgumentError(absl::StrCat("'", node, "' accesses ", rows, " rows from row ", begin,
                                                   " on of a variable of shape ", tensor.shape().DebugString(), "."));
  }
  *part = tensor.dims() > 0 ? tensor.Slice(begin, begin + rows) : tensor;
  return absl::OkStatus();
}

// The value of the variable in input 0. The caller holds the variable's lock.
absl::Status GetValue(const OpKernelContext* ctx, Var* variable, const Tensor** value) {
  *value = variable->tensor();
  const tensorflow::DataType type = ctx->op_kernel().output_type(0);
  if (variable->is_initialized && (*value)->dtype() == type) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("'", ctx->op_kernel().name(),
                                                    "' reads a variable without a value of type ",
                                                    tensorflow::DataTypeString(type), "."));
}

// A tensor that an op fills from a home: a new one on the device, and the values to copy.
struct Filled {
  Tensor* value;
  Tensor held;    // refers to the variable's buffer
  Tensor source;  // the rows of it that are copied
};

absl::Status AllocateFilled(OpKernelContext* ctx, const Rows& range, Var* variable, Filled* filled) {
  const Tensor* held;
  TF_RETURN_IF_ERROR(GetValue(ctx, variable, &held));
  filled->held = filled->source = *held;
  if (range.rows >= 0) {
    TF_RETURN_IF_ERROR(GetRows(*held, range.begin, range.rows, ctx->op_kernel().name(), &filled->source));
  }
  return ctx->allocate_output(0, filled->source.shape(), &filled->value);
}

class ReadHomeOp : public OpKernel {
 public:
  explicit ReadHomeOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, Rows::Get(ctx, &range_)); }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, GetVariable(ctx, 0, &variable));
    tensorflow::tf_shared_lock lock(*variable->mu());
    Filled filled;
    OP_REQUIRES_OK(ctx, AllocateFilled(ctx, range_, variable.get(), &filled));
    if (filled.value->TotalBytes() == 0) return;
    DiskHome* disk;
    IsAtHome(filled.held, &disk);
    if (disk == nullptr) return CopyOnDevice(ctx, filled.source, filled.value);
    OP_REQUIRES_OK(ctx, ReadFromDisk(disk, static_cast<const char*>(filled.source.data()), filled.value->data(),
                                     filled.value->TotalBytes()));
  }

 private:
  Rows range_;
};

// Sets `client` to the one that `owner` names, whose step counts the copies of a kernel.
absl::Status GetClient(OpKernelConstruction* ctx, std::shared_ptr<Client>* client) {
  int64_t owner;
  TF_RETURN_IF_ERROR(ctx->GetAttr("owner", &owner));
  if (owner != 0) *client = Runtime::Get().client(owner);
  return absl::OkStatus();
}

// The objects that a copy from a home, or to one, needs until it has ended. Only the copy holds them.
struct HomeCopy {
  Account account;
  Tensor home;
  Tensor tensor;  // on the device: a copy of the home, or of some of its rows
  std::shared_ptr<Transfer> copied;

  // Buffers are released before the end is announced: an op after Await may then be the tensor's only owner, and the
  // variable that of its home. They are dropped explicitly because TensorFlow may hold another copy of the callback.
  void End(Direction direction, const Copied& ended) {
    DiskHome* disk;
    IsAtHome(home, &disk);
    account.Add(direction, disk == nullptr ? Tier::kHost : Tier::kDisk, tensor.TotalBytes(), ended);
    const auto transfer = std::move(copied);
    home = Tensor();
    tensor = Tensor();
    transfer->End(ended.status);
  }
};

template <typename CopierFactory>
class LoadHomeOp : public OpKernel {
 public:
  explicit LoadHomeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, Rows::Get(ctx, &range_));
    OP_REQUIRES_OK(ctx, GetClient(ctx, &client_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES(ctx, !Runtime::Get().is_late_child(), absl::FailedPreconditionError(Runtime::kLateChild));
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, GetVariable(ctx, 0, &variable));
    tensorflow::tf_shared_lock lock(*variable->mu());
    Filled filled;
    OP_REQUIRES_OK(ctx, AllocateFilled(ctx, range_, variable.get(), &filled));
    auto copied = std::make_shared<Transfer>();
    const Account account(client_);
    SetVariantOutput(ctx, 1, Ticket{{}, copied, filled.value->data(), account});
    if (filled.value->TotalBytes() == 0) {
      copied->End(absl::OkStatus());
    } else if (IsAtHome(filled.held)) {
      Start(ctx, filled.source.data(), HomeCopy{account, filled.held, *filled.value, std::move(copied)});
    } else {
      CopyOnDevice(ctx, filled.source, filled.value);
      copied->End(absl::OkStatus());
    }
  }

 private:
  static void Start(OpKernelContext* ctx, const void* from, HomeCopy started) {
    auto copying = std::make_shared<HomeCopy>(std::move(started));
    Tensor* const to = &copying->tensor;
    const auto copier = CopierFactory::Make(ctx);
    DiskHome* disk;
    IsAtHome(copying->home, &disk);
    if (disk != nullptr) {
      disk->Read(
          static_cast<const char*>(from) - disk->data(), to->TotalBytes(),
          [copier, to](size_t begin, size_t bytes, char* staging) {
            return copier->WritePiece(staging, begin, bytes, to);
          },
          [copying](const CopyLane::Ended& ended) { copying->End(Direction::kIn, AsCopied(ended)); });
      return;
    }
    copier->CopyIn(from, to, [copying = std::move(copying)](const Copied& ended) {
      copying->End(Direction::kIn, ended);
    });
  }

  Rows range_;
  std::shared_ptr<Client> client_;
};

// A value, or the latest slice of one, on its way to its home.
struct Stored : ProcessLocal {
  static constexpr char kMaker[] = "StoreHome";
  Tensor home;
  std::shared_ptr<Transfer> copied;
  Account account;
  std::string TypeName() const { return "tfswap::Stored"; }
};

template <typename CopierFactory>
class StoreHomeOp : public OpKernel {
 public:
  explicit StoreHomeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckSwapType(ctx->input_type(0), absl::StrCat(" (node '", ctx->def().name(), "')")));
    OP_REQUIRES_OK(ctx, Rows::Get(ctx, &home_));
    OP_REQUIRES_OK(ctx, tier_.Init(ctx));
    OP_REQUIRES_OK(ctx, GetClient(ctx, &client_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES(ctx, !Runtime::Get().is_late_child(), absl::FailedPreconditionError(Runtime::kLateChild));
    const Account account(client_);
    auto copying = std::make_shared<HomeCopy>(HomeCopy{account, {}, ctx->input(0), std::make_shared<Transfer>()});
    Tensor part;
    OP_REQUIRES_OK(ctx, GetHome(ctx, copying->tensor, &copying->home, &part));
    SetVariantOutput(ctx, 0, Stored{{}, copying->home, copying->copied, account});
    if (copying->tensor.TotalBytes() == 0) {
      copying->copied->End(absl::OkStatus());
      return;
    }
    const Tensor* const from = &copying->tensor;
    const auto copier = CopierFactory::Make(ctx);
    DiskHome* disk;
    IsAtHome(copying->home, &disk);
    if (disk != nullptr) {
      disk->Write(
          static_cast<const char*>(part.data()) - disk->data(), from->TotalBytes(),
          [copier, from](size_t begin, size_t bytes, char* staging) {
            return copier->ReadPiece(*from, begin, bytes, staging);
          },
          [copying](const CopyLane::Ended& ended) { copying->End(Direction::kOut, AsCopied(ended)); });
      return;
    }
    copier->CopyOut(from, part.data(), [copying = std::move(copying)](const Copied& ended) {
      copying->End(Direction::kOut, ended);
    });
  }

 private:
  // The home, which is made where no other slice has one, and the part of it that `value` is copied to.
  absl::Status GetHome(OpKernelContext* ctx, const Tensor& value, Tensor* home, Tensor* part) {
    HostPool* const pool = CopierFactory::Pool(ctx->device());
    if (home_.rows < 0) {
      TF_RETURN_IF_ERROR(tier_.Make(pool, value, value.shape(), name(), home));
      *part = *home;
      return absl::OkStatus();
    }
    tensorflow::TensorShape shape = value.shape();
    if (shape.dims() == 0) return absl::InvalidArgumentError(absl::StrCat("'", name(), "' stores rows of a scalar."));
    TF_RETURN_IF_ERROR(shape.SetDimWithStatus(0, home_.rows));
    if (ctx->num_inputs() > 1) {
      const Stored* before;
      TF_RETURN_IF_ERROR(GetVariantInput(ctx, 1, &before));
      if (before->home.dtype() != value.dtype() || before->home.shape() != shape) {
        return absl::InvalidArgumentError(absl::StrCat("'", name(), "' and the StoreHome before it store slices of "
                                                       "different values."));
      }
      *home = before->home;
    } else {
      TF_RETURN_IF_ERROR(tier_.Make(pool, value, shape, name(), home));
    }
    return GetRows(*home, home_.begin, value.dim_size(0), name(), part);
  }

  Rows home_;  // the first row that is stored, and the number of all rows
  HomeTier tier_;
  std::shared_ptr<Client> client_;
};

class AwaitStoreOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Stored* stored;
    OP_REQUIRES_OK_ASYNC(ctx, GetVariantInput(ctx, 1, &stored), done);
    CopyWait::Start(ctx, std::move(done), stored->copied, Stall::kRelease, stored->account,
                    [](const absl::Status& status) { return status; });
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
    CopyWait::Start(ctx, std::move(done), stored->copied, Stall::kRelease, stored->account,
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

class RowsOp : public OpKernel {
 public:
  explicit RowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, Rows::Get(ctx, &range_)); }

  void Compute(OpKernelContext* ctx) override {
    Tensor made;
    OP_REQUIRES_OK(ctx, GetRows(ctx->input(0), range_.begin, range_.rows, name(), &made));
    OP_REQUIRES(ctx, made.IsAligned(),
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' takes rows that are not aligned, from row ",
                                                        range_.begin, " on.")));
    ctx->set_output(0, made);
  }

  bool IsExpensive() override { return false; }

 private:
  Rows range_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>Rows").Device(tensorflow::DEVICE_CPU), RowsOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Rows").Device(tensorflow::DEVICE_GPU), RowsOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ReadHome").Device(tensorflow::DEVICE_CPU), ReadHomeOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ReadHome").Device(tensorflow::DEVICE_GPU).HostMemory("resource"), ReadHomeOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>LoadHome").Device(tensorflow::DEVICE_CPU), LoadHomeOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>LoadHome").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
                        LoadHomeOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>StoreHome").Device(tensorflow::DEVICE_CPU), StoreHomeOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>StoreHome").Device(tensorflow::DEVICE_GPU), StoreHomeOp<GpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>AwaitStore").Device(tensorflow::DEVICE_CPU), AwaitStoreOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>AwaitStore").Device(tensorflow::DEVICE_GPU), AwaitStoreOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>CommitHome").Device(tensorflow::DEVICE_CPU), CommitHomeOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>CommitHome").Device(tensorflow::DEVICE_GPU).HostMemory("resource"), CommitHomeOp);

}  // namespace
}  // namespace tfswap
