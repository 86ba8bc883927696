// The buffers of the variables that a step writes, so that its requests repeat from step to step.
//
//   AssignInPlace    AssignVariableOp that keeps the variable's buffer. TensorFlow's kernel adopts the value's buffer
//                    instead: the address of a variable then changes in each step, and so does the fragmentation of
//                    the arena.
//   WatchVariables   keeps weak references to the variables that a step writes
//   OwnBuffer        gives a variable a buffer that nothing else holds
//
// An update, by AssignInPlace or by TensorFlow's kernels, writes in place if nothing else holds the variable's buffer.
// Otherwise it requests a new buffer. So before each step tfswap reads which variables share their buffer with a
// tensor, or have NumPy's memory, which TensorFlow adopts if it is aligned: tfswap_variable_buffers, at the end of this
// file.
//
// Not handled: variables of types that can not be copied bytewise (strings). These adopt the value's buffer.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "device_copier.h"
#include "device_copy.h"
#include "export.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/refcount.h"
#include "variable_access.h"
#include "variable_home.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

REGISTER_OP("Tfswap>AssignInPlace")
    .Input("resource: resource")
    .Input("value: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Assigns to a variable as AssignVariableOp does, by a copy into the variable's buffer.

If something else holds that buffer (a read of the variable, a tensor that was assigned), it
copies into a new one. A variable that is not initialized, or has another shape, adopts the
value's buffer.
)doc");

REGISTER_OP("Tfswap>WatchVariables")
    .Input("resources: N * resource")
    .Attr("N: int >= 1")
    .Attr("step: int")
    .Attr("begin: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Keeps weak references to variables, in their order, for tfswap_variable_buffers.

step: The number of the step that writes them.
begin: The number of the step's variables before these. Each device has a node.
)doc");

REGISTER_OP("Tfswap>OwnBuffer")
    .Input("resource: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Gives a variable a buffer that nothing else holds, with the same content, and turns its
copy-on-read mode off.
)doc");

// The state of a variable's buffer, as in device/variable_buffers.py.
enum BufferState : uint8_t {
  kOwn = 0,      // only the variable holds it
  kShared = 1,   // a tensor holds it too
  kForeign = 2,  // it is not an allocator's
  kCopied = 3,   // copy-on-read mode: each read and update copies it, so nothing shares it
  // It is in host memory (variable_home.h), and only the variable holds it, in copy-on-read mode or not; or a tensor
  // holds it too.
  kAtHome = 4,
  kSharedHome = 5,
  kCopiedHome = 6,
};

// Added to the state of a variable at home on the host that is on disk.
constexpr uint8_t kOnDisk = 8;

// The caller holds the variable's lock.
uint8_t StateOf(Var* variable) {
  const Tensor& held = *variable->tensor();
  const bool copied = variable->copy_on_read_mode.load();
  DiskHome* disk;
  if (variable->is_initialized && IsAtHome(held, &disk)) {
    const BufferState state = !held.RefCountIsOne() ? kSharedHome : copied ? kCopiedHome : kAtHome;
    return disk == nullptr ? state : state | kOnDisk;
  }
  if (copied) return kCopied;
  if (!variable->is_initialized || held.RefCountIsOne() || !tensorflow::DataTypeCanUseMemcpy(held.dtype())) {
    return kOwn;
  }
  const tensorflow::TensorBuffer* const buffer = tensorflow::DMAHelper::buffer(&held);
  if (buffer == nullptr) return kOwn;
  return buffer->OwnsMemory() ? kShared : kForeign;
}

absl::Status CopyToOwn(OpKernelContext* ctx, const Tensor& from, Tensor* held) {
  Tensor own;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(from.dtype(), from.shape(), &own));
  CopyOnDevice(ctx, from, &own);
  *held = own;
  return absl::OkStatus();
}

template <typename CopierFactory>
class AssignInPlaceOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& value = ctx->input(1);
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, GetAssignedVariable(ctx, 0, value.dtype(), &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    OP_REQUIRES_OK(ctx, CheckAssigned(name(), value.dtype(), variable.get()));
    Tensor* const held = variable->tensor();
    const bool keeps_size = variable->is_initialized && held->shape() == value.shape() &&
                            !held->SharesBufferWith(value) &&
                            tensorflow::DataTypeCanUseMemcpy(value.dtype());
    variable->is_initialized = true;
    if (!keeps_size) {
      *held = value;
    } else if (held->RefCountIsOne()) {
      CopyOnDevice(ctx, value, held);
    } else if (DiskHome* disk; IsAtHome(*held, &disk)) {
      Tensor renewed;
      HostPool* const pool = CopierFactory::Pool(ctx->device());
      OP_REQUIRES_OK(ctx, disk == nullptr
                              ? MakeHome(pool, value, value.shape(), name(), &renewed)
                              : MakeHomeOnDisk(disk->file(), pool, value, value.shape(), name(), &renewed));
      CopyOnDevice(ctx, value, &renewed);
      *held = renewed;
    } else {
      OP_REQUIRES_OK(ctx, CopyToOwn(ctx, value, held));
    }
  }
};

class OwnBufferOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<Var> variable;
    OP_REQUIRES_OK(ctx, GetVariable(ctx, 0, &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    variable->copy_on_read_mode.store(false);
    if (StateOf(variable.get()) == kOwn) return;
    const Tensor shared = *variable->tensor();
    OP_REQUIRES_OK(ctx, CopyToOwn(ctx, shared, variable->tensor()));
  }
};

// The variables that each step writes.
class Watched {
 public:
  using Variables = std::vector<tensorflow::core::WeakPtr<Var>>;

  static Watched& Get() {
    static Watched* const all = new Watched;
    return *all;
  }

  void Set(int64_t step, size_t begin, Variables variables) {
    std::lock_guard<std::mutex> lock(mu_);
    Variables& all = steps_[step];
    all.resize(begin);
    std::move(variables.begin(), variables.end(), std::back_inserter(all));
  }

  void ReadPlaces(int64_t step, uint64_t* addresses, uint64_t* bytes, uint64_t room) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = steps_.find(step);
    if (found == steps_.end()) return;
    for (uint64_t i = 0; i < found->second.size() && i < room; ++i) {
      const tensorflow::core::RefCountPtr<Var> variable = found->second[i].GetNewRef();
      addresses[i] = bytes[i] = 0;
      if (variable == nullptr) continue;
      tensorflow::tf_shared_lock variable_lock(*variable->mu());
      if (!variable->is_initialized) continue;
      bytes[i] = variable->tensor()->TotalBytes();
      if (IsAtHome(*variable->tensor())) continue;
      addresses[i] = reinterpret_cast<uint64_t>(tensorflow::DMAHelper::base(variable->tensor()));
    }
  }

  void Forget(int64_t step) {
    std::lock_guard<std::mutex> lock(mu_);
    steps_.erase(step);
  }

  uint64_t ReadStates(int64_t step, uint8_t* states, uint64_t room) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = steps_.find(step);
    if (found == steps_.end()) return 0;
    uint64_t not_own = 0;
    for (uint64_t i = 0; i < found->second.size() && i < room; ++i) {
      const tensorflow::core::RefCountPtr<Var> variable = found->second[i].GetNewRef();
      states[i] = kOwn;
      if (variable == nullptr) continue;
      tensorflow::tf_shared_lock variable_lock(*variable->mu());
      states[i] = StateOf(variable.get());
      not_own += states[i] != kOwn;
    }
    return not_own;
  }

 private:
  std::mutex mu_;
  std::map<int64_t, Variables> steps_;
};

class WatchVariablesOp : public OpKernel {
 public:
  explicit WatchVariablesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("step", &step_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("begin", &begin_));
    OP_REQUIRES(ctx, begin_ <= kMostVariables,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' begins after ", begin_, " variables.")));
  }

  void Compute(OpKernelContext* ctx) override {
    Watched::Variables variables;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      tensorflow::core::RefCountPtr<Var> variable;
      OP_REQUIRES_OK(ctx, GetVariable(ctx, i, &variable));
      variables.emplace_back(variable.get());
    }
    Watched::Get().Set(step_, static_cast<size_t>(begin_), std::move(variables));
  }

 private:
  static constexpr int64_t kMostVariables = 1 << 20;

  int64_t step_, begin_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>AssignInPlace").Device(tensorflow::DEVICE_CPU),
                        AssignInPlaceOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>AssignInPlace").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
                        AssignInPlaceOp<GpuCopierFactory>);

REGISTER_KERNEL_BUILDER(Name("Tfswap>WatchVariables").Device(tensorflow::DEVICE_CPU), WatchVariablesOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfswap>WatchVariables").Device(tensorflow::DEVICE_GPU).HostMemory("resources"),
    WatchVariablesOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>OwnBuffer").Device(tensorflow::DEVICE_CPU), OwnBufferOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfswap>OwnBuffer").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
    OwnBufferOp);

}  // namespace
}  // namespace tfswap

// Writes the BufferState of each variable that a step writes to `states`, with kOnDisk, in the order of WatchVariables.
// Called before each call of each step.
//
// room: the length of `states`.
//
// Returns the number of states that are not kOwn.
TFSWAP_C_API uint64_t tfswap_variable_buffers(int64_t step, uint8_t* states, uint64_t room) {
  return tfswap::Watched::Get().ReadStates(step, states, room);
}

// Writes the address and the bytes of each of these variables' values, in the same order. The address of a variable at
// home on the host is 0; both are 0 for one without a value.
TFSWAP_C_API void tfswap_variable_places(int64_t step, uint64_t* addresses, uint64_t* bytes, uint64_t room) {
  tfswap::Watched::Get().ReadPlaces(step, addresses, bytes, room);
}

// Drops the references to this step's variables.
TFSWAP_C_API void tfswap_forget_variables(int64_t step) { tfswap::Watched::Get().Forget(step); }
