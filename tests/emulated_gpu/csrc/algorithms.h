// cuDNN's algorithms of a convolution: TensorFlow tries all of them at the first run of each convolution, and uses the
// fastest that worked in later ones. What both take of the arena.
//
// Follows autotune_conv_impl.h, conv_ops_gpu.h (DnnScratchAllocator, AllocateScratchOrFallback), gpu_utils.cc and XLA's
// redzone_allocator.cc. Which algorithm is the fastest is a setting, and no time is measured.

#ifndef TESTS_EMULATED_GPU_CSRC_ALGORITHMS_H_
#define TESTS_EMULATED_GPU_CSRC_ALGORITHMS_H_

#include <cstdint>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace emulated_gpu {

// The workspace with which a convolution runs: of the fastest algorithm for which there is memory, or none.
// `result_bytes`: of what it computes.
std::vector<tensorflow::Tensor> AllocateWorkspace(const tensorflow::OpKernel& kernel, tensorflow::OpKernelContext* ctx,
                                                  int64_t result_bytes);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_ALGORITHMS_H_
