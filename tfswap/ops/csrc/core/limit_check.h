// Checks, before a step runs, whether it keeps its limit in an arena that it was not planned for.
//
// The gate of a saved step has the step's requests to the allocator. They are replayed in the arena's chunks as they
// are when the step begins. The peak is exact for arguments of the planned sizes, or a bound if kernels or branches are
// known by bounds only. For smaller arguments it usually is a bound. Each layout is checked once. If the step does not
// fit, but would with one more region, and the arena may grow, the arena gets that region.
//
//   the step keeps the limit                  it runs
//   arguments are larger than planned         it fails before its first kernel: its requests are not known
//   it may pass the limit, planned arguments  it fails before its first kernel
//   it may pass the limit, smaller arguments  a warning, once; it runs
//
// A session's step (frontends/unmodified/session_steps.py) fails in the last case too, and is planned for these arguments.
// In the process that planned the step, a caller may have kept the rewritten function, or the step is inside of another
// function where Python can't run it (inside_ops.cc). There a warning replaces the failure, as for all steps that pass
// their limit.

#ifndef TFSWAP_OPS_CSRC_CORE_LIMIT_CHECK_H_
#define TFSWAP_OPS_CSRC_CORE_LIMIT_CHECK_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "arena_replay.h"
#include "tensorflow/core/common_runtime/bfc_allocator.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/protobuf/bfc_memory_map.pb.h"

namespace tfswap {

class LimitCheck {
 public:
  // Reads the attributes of a gate.
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  // Checks the arena of the kernel's device. Does nothing without an arena or a limit.
  //
  // fails: whether the step fails if it certainly passes its limit.
  // strictly: whether it then also fails if it may pass its limit.
  // peak_bytes: where the step keeps its limit, the peak that it reaches, if that is known exactly; else 0.
  absl::Status Check(tensorflow::OpKernelContext* ctx, bool fails, bool strictly, uint64_t* peak_bytes);

  // Whether there is a limit.
  bool checks() const { return limit_bytes_ != 0; }

 private:
  enum class Verdict { kKept, kUncertain, kPassed };

  struct Found {
    Verdict verdict;
    uint64_t peak_bytes;  // the most that the step may reach
    bool certain;         // whether it reaches that in any case
  };

  // region_bytes: of a region that is added before the step; 0 for none.
  Found Judge(const tensorflow::MemoryDump& map, uint64_t limit_bytes, uint64_t arena_bytes, bool as_planned,
              uint64_t region_bytes) const;
  bool MakeOneRegion(tensorflow::BFCAllocator* arena, const tensorflow::MemoryDump& map, uint64_t limit_bytes,
                     uint64_t arena_bytes) const;
  // The first argument that is larger than planned in some dimension; -1 for none.
  int LargerArgument(tensorflow::OpKernelContext* ctx) const;
  bool AsPlanned(tensorflow::OpKernelContext* ctx) const;
  absl::Status Say(const std::string& message, bool fails);

  static constexpr size_t kMostLayouts = 1024;  // MAX_LAYOUTS in runtime/step.py

  uint64_t limit_bytes_ = 0;  // 0 for none
  bool exact_ = false;
  bool collects_ = false;
  std::vector<RecordedRequests> extremes_;
  std::vector<tensorflow::PartialTensorShape> sizes_;
  std::mutex mu_;
  std::unordered_map<uint64_t, Found> found_;  // by layout of the arena, and whether sizes are as planned
  bool warned_ = false;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_LIMIT_CHECK_H_
