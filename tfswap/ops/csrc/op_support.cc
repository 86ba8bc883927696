#include "op_support.h"

#include "runtime.h"
#include "tensorflow/core/framework/types.h"

namespace tfswap {

absl::Status NoHostMemory(HostPool::Failure failure, const std::string& node, size_t bytes,
                          const tensorflow::Tensor& tensor) {
  const HostBudget::Usage usage = Runtime::Get().budget().usage();
  const std::string asked =
      absl::StrCat("tfswap has no host memory for node '", node, "': it asks for ",
                   HostPool::RoundUp(bytes), " bytes (",
                   tensorflow::DataTypeString(tensor.dtype()), " ",
                   tensor.shape().DebugString(), ") while ", usage.in_use_bytes,
                   " bytes are in use, ", usage.reserved_bytes, " reserved");
  if (failure == HostPool::Failure::kSystem) {
    return absl::ResourceExhaustedError(absl::StrCat(
        asked, ", and the system gave no more. Free memory on this machine, or swap less "
        "(a higher memory_limit=, or tactics= without \"swap\")."));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(asked, ", of a limit of ", usage.limit_bytes,
                   ". Raise host_memory_limit= (memory is taken in multiples of ",
                   HostPool::kBlockMultiple, " bytes), or swap less (a higher "
                   "memory_limit=)."));
}

}  // namespace tfswap
