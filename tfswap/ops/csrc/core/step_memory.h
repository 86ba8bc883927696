// The host memory and disk space that one step takes: registered and reserved by the kernel of the one node that has the
// step's figures (passes/memory_reservation.py), and freed with it.

#ifndef TFSWAP_OPS_CSRC_CORE_STEP_MEMORY_H_
#define TFSWAP_OPS_CSRC_CORE_STEP_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "host_pool.h"
#include "runtime.h"
#include "spill_file.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {

class StepMemory {
 public:
  StepMemory() = default;
  StepMemory(const StepMemory&) = delete;
  StepMemory& operator=(const StepMemory&) = delete;
  ~StepMemory() {
    if (owner_ != 0) Runtime::Get().Unregister(owner_);
  }

  // Reserves what the attributes of the kernel's node say, in `pool` and on disk; nothing where they are not set.
  absl::Status Reserve(tensorflow::OpKernelConstruction* ctx, int64_t owner, HostPool* pool) {
    int64_t step_bytes, limit, spill_limit = -1, spill_bytes = 0;
    std::string folder;
    TF_RETURN_IF_ERROR(ctx->GetAttr("step_bytes", &step_bytes));
    if (step_bytes < 0) return absl::OkStatus();
    TF_RETURN_IF_ERROR(ctx->GetAttr("step_limit", &limit));
    if (ctx->HasAttr("spill_dir")) {
      TF_RETURN_IF_ERROR(ctx->GetAttr("spill_dir", &folder));
      TF_RETURN_IF_ERROR(ctx->GetAttr("spill_bytes", &spill_bytes));
      TF_RETURN_IF_ERROR(ctx->GetAttr("spill_limit", &spill_limit));
    }
    Runtime& runtime = Runtime::Get();
    const std::string why = runtime.Register(owner, Limit(limit), folder, Limit(spill_limit), pool);
    if (!why.empty()) return absl::ResourceExhaustedError(why);
    owner_ = owner;
    constexpr char kAll[] = "all that its step swaps, and passes between devices";
    const std::string& name = ctx->def().name();
    HostPool::Failure failure = HostPool::Failure::kNone;
    if (step_bytes > 0) failure = pool->Reserve(static_cast<size_t>(step_bytes));
    if (failure != HostPool::Failure::kNone) {
      return absl::ResourceExhaustedError(runtime.WhyNoRoom(failure, name, step_bytes, kAll));
    }
    if (spill_bytes <= 0 || folder.empty()) return absl::OkStatus();
    SpillFile* const file = runtime.client(owner)->spill;
    failure = file->Reserve(static_cast<size_t>(spill_bytes));
    if (failure == HostPool::Failure::kNone) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        file->WhyNoRoom(failure, name, static_cast<size_t>(spill_bytes), kAll));
  }

 private:
  static uint64_t Limit(int64_t attr) {
    return attr < 0 ? HostBudget::kUnlimited : static_cast<uint64_t>(attr);
  }

  int64_t owner_ = 0;  // 0 for nothing registered
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_STEP_MEMORY_H_
