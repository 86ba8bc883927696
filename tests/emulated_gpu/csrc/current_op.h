// Which op this thread runs on an emulated device, for reports; and where TensorFlow frees device memory.

#ifndef TESTS_EMULATED_GPU_CSRC_CURRENT_OP_H_
#define TESTS_EMULATED_GPU_CSRC_CURRENT_OP_H_

#include <string>

#include "streams.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace emulated_gpu {

// "MatMul 'dense/MatMul'", or "" outside of all ops.
std::string CurrentOp();
// `what`, by the current op.
std::string ByCurrentOp(const std::string& what);

// "dense/MatMul:MatMul", as profiles have it; "" outside of all ops.
std::string TracedOp();

// What the current op is run with; null outside of all ops.
tensorflow::OpKernelContext* CurrentContext();

// The compute stream of the device that this thread copies a constant to; null at other times. TensorFlow's devices of
// plug-ins let such a copy begin before kernels have ended that still use its memory (pluggable_device.cc,
// `sync_dst_compute`), as its own GPUs do not.
SP_Stream_st* StreamOfConstant();

// From now on ops of devices, and what their allocators free, are seen: of those that TensorFlow makes from now on.
void WatchDevices();

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_CURRENT_OP_H_
