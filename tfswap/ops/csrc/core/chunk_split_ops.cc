// Chunks of exactly the requested size.
//
// The arena does not split a free chunk of less than twice the requested bytes (bfc_allocator.cc, FindChunkPtr). The
// excess bytes count as in use until the chunk is freed. So before a kernel with large requests SplitChunk splits each
// chunk that the kernel would get in two, of which one has the requested size. A separator, a small chunk in use, keeps
// the two parts from merging. FreeRest frees the separators once the kernel has run:
//
//   SplitChunk -> kernel -> FreeRest
//
// If values decide the requests of a step, the chunks are not known in advance. ExactChunks sets the arena to split
// each chunk that is larger than the request, until FreeRest (exact_chunks.h).

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "arena.h"
#include "bfc_members.h"
#include "chunk_splitter.h"
#include "exact_chunks.h"
#include "export.h"
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
Splits the chunks that the next requests would get, if they are larger than requested.

nbytes: The bytes of the requests, in order, which are held at the same time. One negative
  number: the request of this many bytes gets the end of the largest free chunk.
rest: Owns the separators until FreeRest.
)doc");

REGISTER_OP("Tfswap>ExactChunks")
    .Output("rest: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Sets the arena to give each request a chunk of exactly its size.

rest: FreeRest, or the end of this tensor's life, undoes the setting.
)doc");

REGISTER_OP("Tfswap>FreeRest")
    .Input("rest: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Frees the separators of a SplitChunk, or undoes the setting of an ExactChunks.
)doc");

// TensorFlow's allocator with the interface that ChunkSplitter requires.
class RealArena {
 public:
  explicit RealArena(BFCAllocator* allocator) : allocator_(allocator) {}

  uint64_t Allocate(size_t nbytes) {
    tensorflow::AllocationAttributes no_retry;
    no_retry.retry_on_failure = false;
    return reinterpret_cast<uint64_t>(
        allocator_->AllocateRaw(tensorflow::Allocator::kAllocatorAlignment, nbytes, no_retry));
  }

  void Free(uint64_t address) { allocator_->DeallocateRaw(reinterpret_cast<void*>(address)); }

  // Read from private members: the allocator's public list of chunks is a protobuf, which takes 0.1 ms for the thousands
  // of chunks of a large step.
  std::vector<size_t> FreeBytes() const {
    std::vector<size_t> found;
    absl::MutexLock lock(&(allocator_->*MemberOf(MutexMember())));
    for (const auto& chunk : allocator_->*MemberOf(ChunksMember())) {
      // A free entry without a bin is an unused place of the vector.
      if (!chunk.in_use() && chunk.bin_num >= 0) found.push_back(chunk.size);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  BFCAllocator* const allocator_;
};

// The effect of SplitChunk or ExactChunks. It ends at FreeRest, or when the step has failed.
class Effect {
 public:
  Effect() = default;
  Effect(const Effect&) = delete;
  Effect& operator=(const Effect&) = delete;
  virtual ~Effect() = default;
  virtual void End() = 0;
};

// Chunks in use that keep the parts of split chunks from merging.
class Separators : public Effect {
 public:
  explicit Separators(BFCAllocator* arena) : arena_(arena) {}
  ~Separators() override { End(); }

  void Split(const std::vector<int64_t>& sizes) { chunks_ = ChunkSplitter<RealArena>(&arena_).Split(sizes); }

  void End() final {
    for (const uint64_t chunk : chunks_) {
      if (chunk != 0) arena_.Free(chunk);
    }
    chunks_.clear();
  }

 private:
  RealArena arena_;
  std::vector<uint64_t> chunks_;
};

// An arena splits each chunk that is larger than the request while one of these objects exists for it.
class ExactChunks : public Effect {
 public:
  explicit ExactChunks(BFCAllocator* arena) : arena_(arena) { ExactArenas::Get().Request(arena_, 1); }
  ~ExactChunks() override { End(); }

  void End() final {
    if (!ended_.exchange(true)) ExactArenas::Get().Request(arena_, -1);
  }

 private:
  BFCAllocator* const arena_;
  std::atomic<bool> ended_ = false;
};

struct Rest : ProcessLocal {
  static constexpr char kMaker[] = "SplitChunk or ExactChunks";
  std::shared_ptr<Effect> effect;  // null if there is no arena
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
                      "SplitChunk's nbytes must be positive; a single one may be negative, for this "
                      "number of bytes at the end of the largest chunk."));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    Rest rest;
    if (auto* const arena = FindArena(ctx); arena != nullptr) {
      auto separators = std::make_shared<Separators>(arena);
      separators->Split(nbytes_);
      rest.effect = std::move(separators);
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
    if (auto* const arena = FindArena(ctx); arena != nullptr) rest.effect = std::make_shared<ExactChunks>(arena);
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
    if (rest->effect != nullptr) rest->effect->End();
  }

  bool IsExpensive() override { return false; }
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>SplitChunk").Device(tensorflow::DEVICE_CPU), SplitChunkOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ExactChunks").Device(tensorflow::DEVICE_CPU), ExactChunksOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>FreeRest").Device(tensorflow::DEVICE_CPU), FreeRestOp);
// The variants are not registered as HostMemory, for the reason given in swap_kernels.cc.
REGISTER_KERNEL_BUILDER(Name("Tfswap>SplitChunk").Device(tensorflow::DEVICE_GPU), SplitChunkOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>ExactChunks").Device(tensorflow::DEVICE_GPU), ExactChunksOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>FreeRest").Device(tensorflow::DEVICE_GPU), FreeRestOp);

}  // namespace
}  // namespace tfswap

// From now on, between planned steps, an arena splits each chunk that is larger than the request.
//
// allocator: of ArenaMap; of any kind.
TFSWAP_C_API void tfswap_split_exactly_between_steps(uint64_t allocator) {
  auto* const arena = dynamic_cast<tensorflow::BFCAllocator*>(reinterpret_cast<tensorflow::Allocator*>(allocator));
  if (arena != nullptr) tfswap::ExactArenas::Get().RequestBetweenSteps(arena);
}
