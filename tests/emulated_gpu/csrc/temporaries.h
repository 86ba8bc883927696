// What TensorFlow's GPU kernels allocate besides their results, which the CPU's kernels that run here do not: taken from the
// arena while a kernel runs, and not touched but for the race detector.
//
// Follows TensorFlow's sources, where each function says. Not here: cub's scratch for reductions, and recurrent cells'.

#ifndef TESTS_EMULATED_GPU_CSRC_TEMPORARIES_H_
#define TESTS_EMULATED_GPU_CSRC_TEMPORARIES_H_

#include <string>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace emulated_gpu {

// Whether the op's kernels of both devices have their requests in common: what the CPU's takes, the GPU's takes too.
bool SharesTemporaries(const std::string& op);

// Allocates them for a kernel whose results are there. Fails the kernel where there is no memory, but for cuDNN's workspace,
// without which it chooses another algorithm.
std::vector<tensorflow::Tensor> AllocateTemporaries(tensorflow::OpKernel* kernel, tensorflow::OpKernelContext* ctx);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_TEMPORARIES_H_
