// Runs a CPU's kernel in the place of a GPU's: on the device's tensors, with results in its arena, and with what else the
// kernel takes in the host's memory, since the kernel that it stands for would not take that. What that one takes is
// temporaries.h's.
//
// Temporaries of kernels that write variables are the exception: they become variables' values.

#ifndef TESTS_EMULATED_GPU_CSRC_KERNEL_RUN_H_
#define TESTS_EMULATED_GPU_CSRC_KERNEL_RUN_H_

#include "nchw.h"
#include "streams.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace emulated_gpu {

// How the CPU's kernel differs from the GPU's.
struct Adapted {
  const Images* images;  // which it must have with channels last; null for none
  bool in_floats;        // it computes in float32 what the GPU's has in 16 bits
};

// Args:
//   outer: the GPU's kernel, which TensorFlow runs with `ctx`.
//   inner: the CPU's.
//   stream: the device's compute stream.
void RunOnDevice(tensorflow::OpKernel* outer, tensorflow::OpKernel* inner, const Adapted& adapted, SP_Stream_st* stream,
                 tensorflow::OpKernelContext* ctx);

// Whether kernels of that op pass tensors on, or read nothing but their shapes: nothing runs on the device.
bool TouchesNoMemory(const std::string& op);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_KERNEL_RUN_H_
