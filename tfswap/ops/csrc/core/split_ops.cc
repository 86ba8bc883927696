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

// What parts chunks in two, in use so that they stay apart.
class Between {
 public:
  explicit Between(BFCAllocator* arena) : arena_(arena) {}
  Between(const Between&) = delete;
  Between& operator=(const Between&) = delete;
  ~Between() { GiveBack(); }

  // Parts the chunks that requests of `sizes` would be given. `Arena.split` in
  // planner/allocator.py has the same, step by step, and the reasons.
  void Part(const std::vector<int64_t>& sizes) {
    if (sizes.size() == 1 && sizes[0] < 0) {
      PartEnd(Rounded(static_cast<size_t>(-sizes[0])));
      return;
    }
    std::vector<void*> pieces;
    std::vector<size_t> free = FreeBytes();
    size_t later_bytes = 0;
    for (const int64_t size : sizes) later_bytes += Rounded(size);
    for (const int64_t size : sizes) {
      later_bytes -= Rounded(size);
      Part(static_cast<size_t>(size), later_bytes, &free);
      if (later_bytes > 0) pieces.push_back(Allocate(static_cast<size_t>(size)));
    }
    Free(pieces);
  }

  void GiveBack() {
    Free(between_);
    between_.clear();
  }

 private:
  static constexpr size_t kGranularity = 256;       // BFCAllocator::kMinAllocationSize
  static constexpr size_t kMostWasted = 128 << 20;  // SPLIT_SLACK_BYTES in planner/allocator.py
  static constexpr size_t kMostMissed = 8;          // MOST_MISSED there
  static constexpr size_t kMostBetween = 64;        // MOST_BETWEEN there

  // Parts the chunk that a request of `nbytes` would be given, if it is too large, so that one
  // part fits. Never more is in use on the way than with that chunk handed out.
  //
  // later_bytes: of the requests that come after it.
  // free: the free chunks' sizes, the smallest first; then as they are once the request is made.
  //   To look at all of the arena for each request would take its time.
  void Part(size_t nbytes, size_t later_bytes, std::vector<size_t>* free) {
    const size_t needed = Rounded(nbytes);
    auto whole = std::lower_bound(free->begin(), free->end(), needed);
    if (whole == free->end()) {  // the arena grows
      void* const chunk = Allocate(nbytes);
      if (chunk == nullptr) return;
      arena_->DeallocateRaw(chunk);
      *free = FreeBytes();
      whole = std::lower_bound(free->begin(), free->end(), needed);
      if (whole == free->end()) return;
    }
    const size_t rest_bytes = *whole - needed;
    const bool splits_itself = rest_bytes >= std::min(needed, kMostWasted);
    std::vector<size_t> missed;
    size_t between_bytes = 0;
    if (rest_bytes > 0 && (!splits_itself || later_bytes > 0)) {
      const size_t first_bytes = splits_itself ? needed : rest_bytes;
      size_t missed_bytes = 0;
      auto smaller = whole;
      const auto largest = [&] { return smaller == free->begin() ? 0 : *(smaller - 1); };
      while (largest() > 0 && missed.size() < kMostMissed &&
             missed_bytes + largest() + first_bytes <=
                 later_bytes + needed + std::min(largest(), rest_bytes)) {
        missed.push_back(largest());
        missed_bytes += largest();
        --smaller;
      }
      between_bytes = largest() + kGranularity;
      const bool too_large = splits_itself && between_bytes * kMostBetween > needed;
      if (largest() >= rest_bytes || too_large) {
        between_bytes = 0;
      } else if (2 * between_bytes > rest_bytes) {
        between_bytes = rest_bytes;
      }
    }
    if (between_bytes > 0) {
      std::vector<void*> held;
      for (const size_t size : missed) held.push_back(Allocate(size));
      if (splits_itself) {
        held.push_back(Allocate(needed));
      } else if (rest_bytes > between_bytes) {
        held.push_back(Allocate(rest_bytes - between_bytes));
      }
      between_.push_back(Allocate(between_bytes));
      Free(held);
    }
    free->erase(whole);
    if (splits_itself || between_bytes > 0) {
      const size_t left_bytes = rest_bytes - between_bytes;
      const auto place = std::lower_bound(free->begin(), free->end(), left_bytes);
      if (left_bytes > 0) free->insert(place, left_bytes);
    }
  }

  // Parts the end of the largest free chunk, for a request of `needed` bytes, from what lies
  // before it.
  void PartEnd(size_t needed) {
    std::vector<size_t> free = FreeBytes();
    if (free.empty() || free.back() < needed) return;
    size_t before = free.back() - needed;
    free.pop_back();
    const size_t count = std::min(free.size(), kMostMissed);
    const size_t between_bytes =
        kGranularity + (free.size() > count ? free[free.size() - count - 1] : 0);
    if (before < between_bytes || 2 * between_bytes > needed) return;
    std::vector<void*> held;
    for (size_t i = 0; i < count; ++i) held.push_back(Allocate(free[free.size() - 1 - i]));
    while (true) {
      const size_t half = (before + needed) / 2 / kGranularity * kGranularity;
      const size_t piece = std::min(half, before - between_bytes);
      if (piece < between_bytes) break;
      held.push_back(Allocate(piece));
      before -= piece;
    }
    between_.push_back(Allocate(before));
    Free(held);
  }

  static size_t Rounded(size_t nbytes) {
    return (nbytes + kGranularity - 1) / kGranularity * kGranularity;
  }

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

  void Free(const std::vector<void*>& chunks) {
    for (void* const chunk : chunks) {
      if (chunk != nullptr) arena_->DeallocateRaw(chunk);
    }
  }

  BFCAllocator* const arena_;
  std::vector<void*> between_;
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
