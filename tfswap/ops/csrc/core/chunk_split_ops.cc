// Giving a request a chunk of its own size.
//
// The arena gives a free chunk of less than twice the bytes asked for whole (bfc_allocator.cc,
// FindChunkPtr), and what is too much of it counts as used for as long as it is held. So before
// a kernel with large requests SplitChunk parts each chunk that it would get in two, of which
// one fits, by a little that it keeps between them, and FreeRest gives that back once the kernel
// has run:
//
//   SplitChunk -> kernel -> FreeRest

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
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

REGISTER_OP("Tfswap>FreeRest")
    .Input("rest: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Gives back what SplitChunk holds.
)doc");

// The allocator tells of its chunks by a protobuf of all of them, which takes a tenth of a millisecond for the
// thousands that a large step has. Its members are private; an explicit instantiation may name them.
struct Mutex {
  friend constexpr auto MemberOf(Mutex);
};
struct ChunksOfArena {
  friend constexpr auto MemberOf(ChunksOfArena);
};
template <typename Name, auto kMember>
struct Named {
  friend constexpr auto MemberOf(Name) { return kMember; }
};
template struct Named<Mutex, &BFCAllocator::mutex_>;
template struct Named<ChunksOfArena, &BFCAllocator::chunks_>;

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
    absl::MutexLock lock(&(allocator_->*MemberOf(Mutex())));
    for (const auto& chunk : allocator_->*MemberOf(ChunksOfArena())) {
      // One that is in no bin is no chunk: its place waits for another.
      if (!chunk.in_use() && chunk.bin_num >= 0) found.push_back(chunk.size);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  BFCAllocator* const allocator_;
};

// What parts chunks in two, in use so that they stay apart.
class Between {
 public:
  explicit Between(BFCAllocator* arena) : arena_(arena) {}
  Between(const Between&) = delete;
  Between& operator=(const Between&) = delete;
  ~Between() { GiveBack(); }

  void Part(const std::vector<int64_t>& sizes) { between_ = ChunkSplitter<RealArena>(&arena_).Split(sizes); }

  void GiveBack() {
    for (const uint64_t chunk : between_) {
      if (chunk != 0) arena_.Free(chunk);
    }
    between_.clear();
  }

 private:
  RealArena arena_;
  std::vector<uint64_t> between_;
};

struct Rest : ProcessLocal {
  static constexpr char kMaker[] = "SplitChunk";
  std::shared_ptr<Between> between;  // none where there is no arena
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
      rest.between = std::make_shared<Between>(arena);
      rest.between->Part(nbytes_);
    }
    SetVariantOutput(ctx, 0, std::move(rest));
  }

  bool IsExpensive() override { return false; }

 private:
  std::vector<int64_t> nbytes_;
};

class FreeRestOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Rest* rest;
    OP_REQUIRES_OK(ctx, GetVariantInput(ctx, 0, &rest));
    if (rest->between != nullptr) rest->between->GiveBack();
  }

  bool IsExpensive() override { return false; }
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>SplitChunk").Device(tensorflow::DEVICE_CPU), SplitChunkOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>FreeRest").Device(tensorflow::DEVICE_CPU), FreeRestOp);
// As with the handles of copies (swap_kernels.cc), the variant is not said to be in host memory.
REGISTER_KERNEL_BUILDER(Name("Tfswap>SplitChunk").Device(tensorflow::DEVICE_GPU), SplitChunkOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>FreeRest").Device(tensorflow::DEVICE_GPU), FreeRestOp);

}  // namespace
}  // namespace tfswap
