// Giving a request a chunk of its own size.
//
// The arena gives a free chunk of less than twice the bytes asked for whole (bfc_allocator.cc,
// FindChunkPtr), and what is too much of it counts as used for as long as it is held. So before
// a kernel with a large request SplitChunk parts the chunk that it would get in two, of which
// one fits, by a little that it keeps between them, and FreeRest gives that back once the kernel
// has run:
//
//   SplitChunk -> kernel -> FreeRest

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arena.h"
#include "op_support.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/protobuf/bfc_memory_map.pb.h"

namespace tfswap {
namespace {

using tensorflow::BFCAllocator;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("Tfswap>SplitChunk")
    .Output("rest: variant")
    .Attr("nbytes: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Where the next request would be given a chunk whole that is larger than it needs, parts the
rest of that chunk from what it needs.

nbytes: What is requested.
rest: Holds what is between the two until FreeRest.
)doc");

REGISTER_OP("Tfswap>FreeRest")
    .Input("rest: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Gives back what SplitChunk holds.
)doc");

// What parts a chunk in two, in use so that they stay apart.
class Between {
 public:
  explicit Between(BFCAllocator* arena) : arena_(arena) {}
  Between(const Between&) = delete;
  Between& operator=(const Between&) = delete;
  ~Between() { GiveBack(); }

  // Parts the chunk that a request of `nbytes` would be given, if it is too large, so that one
  // part fits. Never more is in use on the way than with that chunk handed out. `Arena.split` in
  // planner/allocator.py has the same, step by step, and the reasons.
  void Part(size_t nbytes) {
    const size_t needed = (nbytes + kGranularity - 1) / kGranularity * kGranularity;
    std::vector<size_t> free = FreeBytes();
    auto whole = std::lower_bound(free.begin(), free.end(), needed);
    if (whole == free.end()) {  // the arena grows
      void* const chunk = Allocate(nbytes);
      if (chunk == nullptr) return;
      arena_->DeallocateRaw(chunk);
      free = FreeBytes();
      whole = std::lower_bound(free.begin(), free.end(), needed);
      if (whole == free.end()) return;
    }
    const size_t rest_bytes = *whole - needed;
    if (rest_bytes == 0 || rest_bytes >= std::min(needed, kMostWasted)) return;
    std::vector<size_t> missed;
    size_t missed_bytes = 0;
    auto smaller = whole;
    const auto largest = [&] { return smaller == free.begin() ? 0 : *(smaller - 1); };
    while (largest() * kLeastMissed > rest_bytes && missed.size() < kMostMissed &&
           missed_bytes + largest() + rest_bytes <= (largest() < rest_bytes ? needed : *whole)) {
      missed.push_back(largest());
      missed_bytes += largest();
      --smaller;
    }
    if (largest() >= rest_bytes) return;
    size_t between_bytes = largest() + kGranularity;
    if (2 * between_bytes > rest_bytes) between_bytes = rest_bytes;
    std::vector<void*> held;
    for (const size_t size : missed) held.push_back(Allocate(size));
    if (rest_bytes > between_bytes) held.push_back(Allocate(rest_bytes - between_bytes));
    between_ = Allocate(between_bytes);
    for (void* const chunk : held) {
      if (chunk != nullptr) arena_->DeallocateRaw(chunk);
    }
  }

  void GiveBack() {
    if (between_ != nullptr) arena_->DeallocateRaw(between_);
    between_ = nullptr;
  }

 private:
  static constexpr size_t kGranularity = 256;       // BFCAllocator::kMinAllocationSize
  static constexpr size_t kMostWasted = 128 << 20;  // SPLIT_SLACK_BYTES in planner/allocator.py
  static constexpr size_t kMostMissed = 8;          // MOST_MISSED there
  static constexpr size_t kLeastMissed = 64;        // LEAST_MISSED there

  // The free chunks' sizes, the smallest first.
  std::vector<size_t> FreeBytes() const {
    const tensorflow::MemoryDump map = arena_->RecordMemoryMap();
    std::vector<size_t> found;
    for (const auto& chunk : map.chunk()) {
      if (!chunk.in_use()) found.push_back(static_cast<size_t>(chunk.size()));
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  void* Allocate(size_t nbytes) {
    tensorflow::AllocationAttributes at_once;
    at_once.retry_on_failure = false;
    return arena_->AllocateRaw(tensorflow::Allocator::kAllocatorAlignment, nbytes, at_once);
  }

  BFCAllocator* const arena_;
  void* between_ = nullptr;
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
  }

  void Compute(OpKernelContext* ctx) override {
    Rest rest;
    if (auto* const arena = FindArena(ctx); arena != nullptr) {
      rest.between = std::make_shared<Between>(arena);
      rest.between->Part(static_cast<size_t>(nbytes_));
    }
    SetVariantOutput(ctx, 0, std::move(rest));
  }

  bool IsExpensive() override { return false; }

 private:
  int64_t nbytes_;
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
