// Kernels of 16-bit floats that the CPU does not have: run in float32, and their results rounded, as cuDNN computes them.

#ifndef TESTS_EMULATED_GPU_CSRC_HALVES_H_
#define TESTS_EMULATED_GPU_CSRC_HALVES_H_

#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/tensor.h"

namespace emulated_gpu {

// Makes the node one of float32; false where the CPU has a kernel of its type.
bool ToFloats(tensorflow::NodeDef* node);

bool IsHalf(const tensorflow::Tensor& tensor);

// In host memory.
tensorflow::Tensor HalfToFloat(const tensorflow::Tensor& tensor);
tensorflow::Tensor FloatToHalf(const tensorflow::Tensor& tensor, tensorflow::DataType type);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_HALVES_H_
