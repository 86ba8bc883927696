// Two kernels side by side in a step whose memory is known beforehand.
//
// A kernel that one core is enough for leaves the others idle, so a planned order may let
// a second kernel run beside it. What the allocator is asked for must keep its order all
// the same:
//
//   CountAllocations   before both: how many allocations the arena has made
//   AwaitAllocation    before the second: the first has made all of its own
//   Hold               after both: what the first reads is let go here, and not while the
//                      second may not have made its allocations yet
//
//   CountAllocations -> first  ------------------> Hold
//                    -> AwaitAllocation -> second -^
//
// Where there is no arena nothing is counted, and nobody waits.

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "arena.h"
#include "op_support.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/env.h"

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::BFCAllocator;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("Tfswap>CountAllocations")
    .Output("count: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
How many allocations the device's arena has made so far.
)doc");

REGISTER_OP("Tfswap>AwaitAllocation")
    .Input("count: variant")
    .Attr("allocations: int >= 1 = 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Waits until the device's arena has made so many allocations since CountAllocations.
)doc");

REGISTER_OP("Tfswap>Hold")
    .Input("tensors: T")
    .Attr("T: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Keeps tensors in memory until it runs, which it does for control edges' sake alone.
)doc");

struct Count : ProcessLocal {
  static constexpr char kMaker[] = "CountAllocations";
  int64_t allocations = 0;
  std::string TypeName() const { return "tfswap::Count"; }
};

int64_t Allocations(BFCAllocator* arena) {
  return arena == nullptr ? 0 : arena->GetStats()->num_allocs;
}

class CountAllocationsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    SetVariantOutput(ctx, 0, Count{{}, Allocations(FindArena(ctx))});
  }
};

class AwaitAllocationOp : public AsyncOpKernel {
 public:
  explicit AwaitAllocationOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("allocations", &allocations_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Count* count;
    OP_REQUIRES_OK_ASYNC(ctx, GetVariantInput(ctx, 0, &count), done);
    auto* const arena = FindArena(ctx);
    const Waiting waiting{ctx, arena, count->allocations, allocations_, Clock::now() + kPatience};
    // The first kernel starts as soon as a thread takes it up: microseconds as a rule.
    const auto spun = Clock::now() + kSpin;
    do {
      if (Ended(waiting)) {
        done();
        return;
      }
      std::this_thread::yield();
    } while (Clock::now() < spun);
    // Not on this thread any longer, which may be the one that the first kernel needs.
    LookAgain(waiting, std::move(done));
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kSpin = std::chrono::microseconds(200);
  static constexpr int64_t kLookAgainMicros = 50;
  // So late the first kernel will make no more allocations: their order is lost, the step is
  // not.
  static constexpr auto kPatience = std::chrono::seconds(2);

  struct Waiting {
    OpKernelContext* ctx;
    BFCAllocator* arena;
    int64_t counted;
    int64_t allocations;
    Clock::time_point give_up;
  };

  // Whether the wait is over. The context may be gone once it is.
  static bool Ended(const Waiting& waiting) {
    if (waiting.arena == nullptr) return true;
    if (Allocations(waiting.arena) - waiting.counted >= waiting.allocations) return true;
    auto* const cancellation = waiting.ctx->cancellation_manager();
    if (cancellation != nullptr && cancellation->IsCancelled()) {
      waiting.ctx->SetStatus(absl::CancelledError(
          absl::StrCat("The step was cancelled while '", waiting.ctx->op_kernel().name(),
                       "' waited for an allocation.")));
      return true;
    }
    return Clock::now() >= waiting.give_up;
  }

  static void LookAgain(const Waiting& waiting, DoneCallback done) {
    tensorflow::Env::Default()->SchedClosureAfter(
        kLookAgainMicros, [waiting, done = std::move(done)]() mutable {
          if (Ended(waiting)) {
            // Never on this thread: TensorFlow may run the rest of the step inside done().
            (*waiting.ctx->runner())(std::move(done));
          } else {
            LookAgain(waiting, std::move(done));
          }
        });
  }

  int64_t allocations_;
};

class HoldOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext*) override {}
};

// On a CPU alone: a GPU's kernels run one after another on its stream.
REGISTER_KERNEL_BUILDER(Name("Tfswap>CountAllocations").Device(tensorflow::DEVICE_CPU),
                        CountAllocationsOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>AwaitAllocation").Device(tensorflow::DEVICE_CPU),
                        AwaitAllocationOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>Hold").Device(tensorflow::DEVICE_CPU), HoldOp);

}  // namespace
}  // namespace tfswap
