// Properties of this processor that TensorFlow's kernels read, by the functions that they call.

#include <cstdint>

#include "Eigen/Core"
#include "export.h"
#include "tensorflow/core/framework/types.pb.h"
#include "tensorflow/core/util/util.h"

// The cache by whose size kernels choose their buffers. In a virtual machine it may be the whole host's.
TFSWAP_C_API int64_t tfswap_l3_cache_bytes() { return Eigen::l3CacheSize(); }

// The first or second cache, by whose sizes Eigen cuts products into blocks. 0 where it has kernels of another processor.
TFSWAP_C_API int64_t tfswap_inner_cache_bytes(int32_t level) {
#if EIGEN_ARCH_x86_64
  return level == 1 ? Eigen::l1CacheSize() : Eigen::l2CacheSize();
#else
  return 0;
#endif
}

// Whether oneDNN has kernels for elements of `type`, a tensorflow::DataType, on this processor. For other types
// oneDNN's graph pass keeps TensorFlow's kernels (mkl_graph_util.h).
TFSWAP_C_API bool tfswap_onednn_takes(int32_t type) {
  return tensorflow::IsDataTypeSupportedByOneDNNOnThisCPU(static_cast<tensorflow::DataType>(type));
}
