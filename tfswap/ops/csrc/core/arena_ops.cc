// Ops that make a step's memory known before it runs, and equal in each run.
//
//   ArenaMap       reports the layout of the device's arena, for which a plan is made
//   HandOver       copies a small result to a reserved slot, since the caller may keep it for any time
//   Defer          keeps TensorFlow from folding a large constant when it makes the step: each step computes it
//
// At the end of this file is the function that Python calls before and after each step.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "arena.h"
#include "device_copy.h"
#include "export.h"
#include "runtime.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
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

REGISTER_OP("Tfswap>ArenaMap")
    .Output("chunks: int64")
    .Output("limit: int64")
    .Output("allocator: uint64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Matrix(c->UnknownDim(), 3));
      c->set_output(1, c->Scalar());
      c->set_output(2, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The chunks of the arena of the device that this op is placed on.

chunks: For each chunk its address, its size in bytes, and whether it is in use. Empty if
  the device has no BFC allocator.
limit: The largest total size of the arena's regions, in bytes.
allocator: The device's allocator, of any kind, for tfswap_read_arena.
)doc");

REGISTER_OP("Tfswap>HandOver")
    .Input("result: T")
    .Output("output: T")
    .Attr("T: type")
    .Attr("elements: int >= 1")
    .Attr("slots: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Copies a result into a slot that was reserved when the step was made.

A slot is free when its last result has no holder. If none is free, or the result
is larger than a slot, the output is the input.

elements: The largest number of elements of the result.
slots: The number of slots that are reserved first.
)doc");

absl::Status DeferShape(tensorflow::shape_inference::InferenceContext* c) {
  tensorflow::PartialTensorShape attr;
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &attr));
  if (attr.unknown_rank()) return tensorflow::shape_inference::UnchangedShape(c);
  tensorflow::shape_inference::ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(attr, &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

REGISTER_OP("Tfswap>Defer")
    .Input("tensor: T")
    .Output("output: T")
    .Attr("T: type")
    .Attr("shape: shape = { unknown_rank: true }")
    .SetIsStateful()  // TensorFlow folds no stateful op, and none that reads one
    .SetShapeFn(DeferShape)
    .Doc(R"doc(
Returns its input, in the same buffer, when the step runs.

shape: The tensor's shape, if known, for shape inference only: an op's shape function can be wrong.
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
    Tensor chunks = Outside<int64_t>({map.chunk_size(), 3});
    auto rows = chunks.matrix<int64_t>();
    for (int i = 0; i < map.chunk_size(); ++i) {
      rows(i, 0) = static_cast<int64_t>(map.chunk(i).address());
      rows(i, 1) = map.chunk(i).size();
      rows(i, 2) = map.chunk(i).in_use() ? 1 : 0;
    }
    ctx->set_output(0, chunks);
    Tensor limit = Outside<int64_t>({});
    limit.scalar<int64_t>()() = limit_bytes;
    ctx->set_output(1, limit);
    Tensor allocator = Outside<uint64_t>({});
    allocator.scalar<uint64_t>()() = reinterpret_cast<uint64_t>(DeviceAllocator(ctx));
    ctx->set_output(2, allocator);
  }

 private:
  // A tensor outside of the arena, which must not change while it is read.
  template <typename T>
  static Tensor Outside(const TensorShape& shape) {
    return Tensor(tensorflow::cpu_allocator_base(), tensorflow::DataTypeToEnum<T>::value, shape);
  }
};

class HandOverOp : public OpKernel {
 public:
  explicit HandOverOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("elements", &elements_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slots", &slots_at_first_));
    OP_REQUIRES(ctx, tensorflow::DataTypeCanUseMemcpy(dtype_),
                absl::InvalidArgumentError("HandOver takes numbers and booleans only."));
    const int64_t size = tensorflow::DataTypeSize(dtype_);
    OP_REQUIRES(ctx,
                elements_ <= kMostBytes / size &&
                    slots_at_first_ <= kMostBytes / std::max<int64_t>(elements_ * size, kGranularity),
                absl::InvalidArgumentError(absl::StrCat(
                    "'", name(), "' sets aside ", slots_at_first_, " slots of ", elements_,
                    " elements: more than ", kMostBytes, " bytes, which no step's small results take.")));
    tensorflow::AllocatorAttributes where;
    where.set_on_host(OnHost());
    allocator_ = ctx->device()->GetAllocator(where);
    OP_REQUIRES(ctx, Add(slots_at_first_),
                absl::ResourceExhaustedError("No memory for the results of a step."));
    All::Get().Join(this);
  }

  ~HandOverOp() override { All::Get().Leave(this); }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& result = ctx->input(0);
    Tensor handed;
    if (!Take(result.shape(), &handed)) {
      ctx->set_output(0, result);
      return;
    }
    if (OnHost()) {
      std::memcpy(handed.data(), result.data(), result.TotalBytes());
    } else {
      CopyOnDevice(ctx, result, &handed);
    }
    ctx->set_output(0, handed);
  }

  // Twice the slots, where callers hold more results than leave room for the next ones. Slots added later are
  // removed when they are empty. Between steps only, whose plans are for a known arena.
  void MakeRoom() {
    std::lock_guard<std::mutex> lock(mu_);
    bool full = true, later = false;
    for (size_t i = 0; i < slots_.size(); ++i) {
      const bool taken = !slots_[i].RefCountIsOne();
      full = full && taken;
      later = later || (taken && i >= static_cast<size_t>(slots_at_first_));
    }
    if (full) {
      Add(slots_.size());
    } else if (!later) {
      slots_.resize(slots_at_first_);
    }
  }

  // All kernels of this op in the process.
  class All {
   public:
    static All& Get() {
      static All* const all = new All;
      return *all;
    }

    void Join(HandOverOp* kernel) {
      std::lock_guard<std::mutex> lock(mu_);
      kernels_.insert(kernel);
    }

    void Leave(HandOverOp* kernel) {
      std::lock_guard<std::mutex> lock(mu_);
      kernels_.erase(kernel);
    }

    void MakeRoom() {
      std::lock_guard<std::mutex> lock(mu_);
      for (HandOverOp* const kernel : kernels_) kernel->MakeRoom();
    }

   private:
    std::mutex mu_;
    std::set<HandOverOp*> kernels_;
  };

 private:
  static constexpr int64_t kMostBytes = 1 << 20;
  static constexpr int64_t kGranularity = 256;  // BFCAllocator::kMinAllocationSize

  bool OnHost() const { return output_memory_types()[0] == tensorflow::HOST_MEMORY; }

  // Reserves `count` slots. Returns false if memory does not suffice for all.
  bool Add(size_t count) {
    tensorflow::AllocationAttributes no_retry;
    no_retry.retry_on_failure = false;
    for (; count > 0; --count) {
      Tensor slot(allocator_, dtype_, TensorShape({elements_}), no_retry);
      if (!slot.IsInitialized()) return false;
      slots_.push_back(slot);
    }
    return true;
  }

  bool Take(const TensorShape& shape, Tensor* handed) {
    if (shape.num_elements() < 1 || shape.num_elements() > elements_) return false;
    std::lock_guard<std::mutex> lock(mu_);
    for (const Tensor& slot : slots_) {
      if (slot.RefCountIsOne()) return handed->CopyFrom(slot.Slice(0, shape.num_elements()), shape);
    }
    return false;
  }

  tensorflow::DataType dtype_;
  int64_t elements_;
  int64_t slots_at_first_;
  tensorflow::Allocator* allocator_;
  std::mutex mu_;
  std::vector<Tensor> slots_;
};

class DeferOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(0)); }

  bool IsExpensive() override { return false; }
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>ArenaMap").Device(tensorflow::DEVICE_CPU), ArenaMapOp);
REGISTER_KERNEL_BUILDER(
    Name("Tfswap>ArenaMap")
        .Device(tensorflow::DEVICE_GPU)
        .HostMemory("chunks")
        .HostMemory("limit")
        .HostMemory("allocator"),
    ArenaMapOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>HandOver").Device(tensorflow::DEVICE_CPU), HandOverOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>HandOver")
                            .Device(tensorflow::DEVICE_GPU)
                            .TypeConstraint<int32_t>("T")  // which TensorFlow keeps there
                            .HostMemory("result")
                            .HostMemory("output"),
                        HandOverOp);

REGISTER_KERNEL_BUILDER(Name("Tfswap>Defer").Device(tensorflow::DEVICE_CPU), DeferOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Defer")
                            .Device(tensorflow::DEVICE_GPU)
                            .TypeConstraint<int32_t>("T")
                            .HostMemory("tensor")
                            .HostMemory("output"),
                        DeferOp);

#define REGISTER_ON_GPU(type)                                                            \
  REGISTER_KERNEL_BUILDER(                                                               \
      Name("Tfswap>HandOver").Device(tensorflow::DEVICE_GPU).TypeConstraint<type>("T"), \
      HandOverOp);                                                                       \
  REGISTER_KERNEL_BUILDER(                                                               \
      Name("Tfswap>Defer").Device(tensorflow::DEVICE_GPU).TypeConstraint<type>("T"),    \
      DeferOp)
REGISTER_ON_GPU(Eigen::half);
REGISTER_ON_GPU(Eigen::bfloat16);
REGISTER_ON_GPU(float);
REGISTER_ON_GPU(double);
REGISTER_ON_GPU(int64_t);
REGISTER_ON_GPU(bool);
#undef REGISTER_ON_GPU

}  // namespace
}  // namespace tfswap

// Has the fields of the ctypes structure in load.py.
struct TfswapArenaReading {
  uint64_t layout;  // a hash of the arena's layout; 0 without an arena
  uint64_t current_bytes;
  uint64_t peak_bytes;
  uint64_t executed;  // of Runtime
};

// The facts that a call reads before and after each step, in one structure, since each call of a step reads them twice.
//
// allocator: of ArenaMap; 0 for none.
// before: whether the step comes next. The arena has the reported layout when it begins.
TFSWAP_C_API TfswapArenaReading tfswap_read_arena(uint64_t allocator, bool before) {
  TfswapArenaReading reading = {};
  reading.executed = tfswap::Runtime::Get().executed();
  auto* const read = reinterpret_cast<tensorflow::Allocator*>(allocator);
  if (read == nullptr) return reading;
  if (before) tfswap::HandOverOp::All::Get().MakeRoom();
  if (auto* const arena = before ? dynamic_cast<tensorflow::BFCAllocator*>(read) : nullptr) {
    const tensorflow::MemoryDump map = arena->RecordMemoryMap();
    reading.layout = tfswap::LayoutOf(map);
    reading.current_bytes = map.stats().bytes_in_use();
    reading.peak_bytes = map.stats().peak_bytes_in_use();
  } else if (const auto stats = read->GetStats()) {
    reading.current_bytes = stats->bytes_in_use;
    reading.peak_bytes = stats->peak_bytes_in_use;
  }
  return reading;
}
