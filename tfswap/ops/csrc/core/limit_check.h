// Whether a step that was planned for an unknown arena keeps its limit in the one that it finds, checked before it
// runs.
//
// The gate of a saved step has with it what the step asks of the allocator. That is replayed in the arena's chunks, as
// they lie when the step begins: exact for arguments of the sizes that were planned for, or a bound where kernels or
// branches are known by bounds only; a bound as a rule for smaller ones. Each layout is checked one time.
// Where the step does not fit, but would with one more region, and the arena may grow, the arena gets that region.
//
//   it keeps the limit                        the step runs
//   arguments larger than planned             the step fails before any of its kernels has run: nothing is known of it
//   it may pass it: arguments as planned      the step fails in the same way
//   it may pass it: smaller arguments         a warning, once; the step runs
//
// In the process that planned the step it is called by a caller who has taken the rewritten function, or inside of
// another function where Python can't run it (inside_ops.cc): there a warning stands for the failure, as of all steps that pass their limit.

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

  // Looks at the arena of the kernel's device. Does nothing where there is none, or no limit.
  //
  // fails: whether the step fails where its limit is certain to be passed.
  absl::Status Check(tensorflow::OpKernelContext* ctx, bool fails);

 private:
  enum class Verdict { kKept, kUncertain, kPassed };

  struct Found {
    Verdict verdict;
    uint64_t peak_bytes;  // the most that the step may reach
    bool certain;         // that it reaches that
  };

  // region_bytes: of a region that is added before the step; 0 for none.
  Found Judge(const tensorflow::MemoryDump& map, uint64_t limit_bytes, uint64_t arena_bytes, bool as_planned,
              uint64_t region_bytes) const;
  bool MakeOneRegion(tensorflow::BFCAllocator* arena, const tensorflow::MemoryDump& map, uint64_t limit_bytes,
                     uint64_t arena_bytes) const;
  // The first argument that is larger than planned for in some dimension; -1 where none is.
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
