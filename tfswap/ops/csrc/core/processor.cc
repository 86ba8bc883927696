// What TensorFlow's kernels go by on this processor, asked of the code that they ask.

#include <cstdint>

#include "Eigen/Core"
#include "export.h"
#include "tensorflow/core/framework/types.pb.h"
#include "tensorflow/core/util/util.h"

// As kernels take it that size their buffers by it: of a virtual machine it may be the
// whole host's.
TFSWAP_C_API int64_t tfswap_l3_cache_bytes() { return Eigen::l3CacheSize(); }

// Whether oneDNN's kernels take elements of `type`, a tensorflow::DataType, where they are
// on at all: oneDNN's graph pass leaves others to TensorFlow's own (mkl_graph_util.h).
TFSWAP_C_API bool tfswap_onednn_takes(int32_t type) {
  return tensorflow::IsDataTypeSupportedByOneDNNOnThisCPU(static_cast<tensorflow::DataType>(type));
}
