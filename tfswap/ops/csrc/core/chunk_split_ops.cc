// Giving a request a chunk of its own size.
//
// The arena gives a free chunk of less than twice the bytes asked for whole (bfc_allocator.cc,
// FindChunkPtr), and what is too much of it counts as used for as long as it is held. So before
// a kernel with large requests SplitChunk parts each chunk that it would get in two, of which
// one fits, by a little that it keeps between them, and FreeRest gives that back once the kernel
// has run:
//
//   SplitChunk -> kernel -> FreeRest
//
// Where the step decides what is asked for, which chunks these are is not known before. ExactChunks has the arena split
// every chunk that is larger than the request, from there until FreeRest: what it does for GPUs by the session option
// internal_fragmentation_fraction. Then no more is in use than what is live.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "arena.h"
#include "chunk_splitter.h"
#include "op_support.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {
namespace {

using tensorflow::BFCAllocator;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("Tfswap>SplitChunk")
    .Output("rest: variant")
    .Attr("nbytes: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Where the next requests would be given chunks whole that are larger than they need, parts the
rest of these chunks from what they need.

nbytes: What is requested, and held together, in order. Negative, and alone, the bytes of a
  request that is to lie at the end of the largest free chunk.
rest: Holds what is between the two until FreeRest.
)doc");

REGISTER_OP("Tfswap>ExactChunks")
    .Output("rest: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
From now on each request gets a chunk of its own size.

rest: Ends that, by FreeRest or when it is gone.
)doc");

REGISTER_OP("Tfswap>FreeRest")
    .Input("rest: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Gives back what SplitChunk holds, or ends what ExactChunks has begun.
)doc");

// The allocator lists its chunks in a protobuf of all of them, which takes a tenth of a millisecond for the
// thousands that a large step has. Its members are private; an explicit instantiation may name them.
struct MutexMember {
  friend constexpr auto MemberOf(MutexMember);
};
struct ChunksMember {
  friend constexpr auto MemberOf(ChunksMember);
};
struct OptionsMember {
  friend constexpr auto MemberOf(OptionsMember);
};
struct MemoryLimitMember {
  friend constexpr auto MemberOf(MemoryLimitMember);
};
template <typename Name, auto kMember>
struct Named {
  friend constexpr auto MemberOf(Name) { return kMember; }
};
template struct Named<MutexMember, &BFCAllocator::mutex_>;
template struct Named<ChunksMember, &BFCAllocator::chunks_>;
template struct Named<OptionsMember, &BFCAllocator::opts_>;
template struct Named<MemoryLimitMember, &BFCAllocator::memory_limit_>;

// TensorFlow's allocator, as ChunkSplitter takes it.
class RealArena {
 public:
  explicit RealArena(BFCAllocator* allocator) : allocator_(allocator) {}

  uint64_t Allocate(size_t nbytes) {
    tensorflow::AllocationAttributes at_once;
    at_once.retry_on_failure = false;
    return reinterpret_cast<uint64_t>(
        allocator_->AllocateRaw(tensorflow::Allocator::kAllocatorAlignment, nbytes, at_once));
  }

  void Free(uint64_t address) { allocator_->DeallocateRaw(reinterpret_cast<void*>(address)); }

  std::vector<size_t> FreeBytes() const {
    std::vector<size_t> found;
    absl::MutexLock lock(&(allocator_->*MemberOf(MutexMember())));
    for (const auto& chunk : allocator_->*MemberOf(ChunksMember())) {
      // One that is in no bin is no chunk: its place waits for another.
      if (!chunk.in_use() && chunk.bin_num >= 0) found.push_back(chunk.size);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  BFCAllocator* const allocator_;
};

// What lasts from one of these ops until FreeRest, or until the step has failed.
class Parting {
 public:
  Parting() = default;
  Parting(const Parting&) = delete;
  Parting& operator=(const Parting&) = delete;
  virtual ~Parting() = default;
  virtual void GiveBack() = 0;
};

// What parts chunks in two, in use so that they stay apart.
class Between : public Parting {
 public:
  explicit Between(BFCAllocator* arena) : arena_(arena) {}
  ~Between() override { GiveBack(); }

  void Part(const std::vector<int64_t>& sizes) { between_ = ChunkSplitter<RealArena>(&arena_).Split(sizes); }

  void GiveBack() final {
    for (const uint64_t chunk : between_) {
      if (chunk != 0) arena_.Free(chunk);
    }
    between_.clear();
  }

 private:
  RealArena arena_;
  std::vector<uint64_t> between_;
};

// Has an arena split every chunk that is larger than the request, while there is one of these.
class ExactChunks : public Parting {
 public:
  explicit ExactChunks(BFCAllocator* arena) : arena_(arena) { Count(1); }
  ~ExactChunks() override { GiveBack(); }

  void GiveBack() final {
    if (!ended_.exchange(true)) Count(-1);
  }

 private:
  struct Setting {
    int users = 0;
    double before = 0;
  };

  // The allocator reads this option at each request, under its mutex.
  void Count(int more) {
    static std::mutex mutex;
    static auto* const settings = new std::map<BFCAllocator*, Setting>;
    const std::lock_guard<std::mutex> lock(mutex);
    Setting& setting = (*settings)[arena_];
    const bool was_on = setting.users > 0;
    setting.users += more;
    if (was_on == (setting.users > 0)) return;
    absl::MutexLock arena_lock(&(arena_->*MemberOf(MutexMember())));
    const double& fraction = (arena_->*MemberOf(OptionsMember())).fragmentation_fraction;
    if (was_on) {
      Replace(fraction, setting.before);
    } else {
      setting.before = fraction;
      Replace(fraction, kGranularity / static_cast<double>(arena_->*MemberOf(MemoryLimitMember())));
    }
  }

  // Writing to a const member is undefined, but a new one may take its place, which its name then refers to: the
  // allocator itself is not const ([basic.life] in C++20).
  static void Replace(const double& member, double value) {
    ::new (const_cast<double*>(&member)) const double(value);
  }

  static constexpr double kGranularity = 256;  // BFCAllocator::kMinAllocationSize

  BFCAllocator* const arena_;
  std::atomic<bool> ended_ = false;
};

struct Rest : ProcessLocal {
  static constexpr char kMaker[] = "SplitChunk or ExactChunks";
  std::shared_ptr<Parting> parting;  // none where there is no arena
  std::string TypeName() const { return "tfswap::Rest"; }
};

class SplitChunkOp : public OpKernel {
 public:
  explicit SplitChunkOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nbytes", &nbytes_));
    for (const int64_t nbytes : nbytes_) {
      const bool at_end = nbytes_.size() == 1 && nbytes < 0;
      OP_REQUIRES(ctx, nbytes >= 1 || (at_end && nbytes > std::numeric_limits<int64_t>::min()),
                  absl::InvalidArgumentError(
                      "SplitChunk's requests ask for a byte at least; one alone may be negative, for "
                      "that many bytes at the end of the largest chunk."));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    Rest rest;
    if (auto* const arena = FindArena(ctx); arena != nullptr) {
      auto between = std::make_shared<Between>(arena);
      between->Part(nbytes_);
      rest.parting = std::move(between);
    }
    SetVariantOutput(ctx, 0, std::move(rest));
  }

  bool IsExpensive() override { return false; }

 private:
  std::vector<int64_t> nbytes_;
};

class ExactChunksOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Rest rest;
    if (auto* const arena = FindArena(ctx); arena != nullptr) rest.parting = std::make_shared<ExactChunks>(arena);
    SetVariantOutput(ctx, 0, std::move(rest));
  }

  bool IsExpensive() override { return false; }
};

class FreeRestOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Rest* rest;
    OP_REQUIRES_OK(ctx, GetVariantInput(ctx, 0, &rest));
    if (rest->parting != nullptr) rest->parting->GiveBack();
  }

  bool IsExpensive() override { return false; }
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>SplitChunk").Device(tensorflow::DEVICE_CPU), SplitChunkOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ExactChunks").Device(tensorflow::DEVICE_CPU), ExactChunksOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>FreeRest").Device(tensorflow::DEVICE_CPU), FreeRestOp);
// As with the handles of copies (swap_kernels.cc), the variant is not registered as in host memory.
REGISTER_KERNEL_BUILDER(Name("Tfswap>SplitChunk").Device(tensorflow::DEVICE_GPU), SplitChunkOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ExactChunks").Device(tensorflow::DEVICE_GPU), ExactChunksOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>FreeRest").Device(tensorflow::DEVICE_GPU), FreeRestOp);

}  // namespace
}  // namespace tfswap
