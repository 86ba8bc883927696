// Which op this thread runs on an emulated device, for reports; and where TensorFlow frees device memory.

#ifndef TESTS_EMULATED_GPU_CSRC_CURRENT_OP_H_
#define TESTS_EMULATED_GPU_CSRC_CURRENT_OP_H_

#include <string>

#include "tensorflow/core/framework/device_base.h"

namespace emulated_gpu {

// "MatMul 'dense/MatMul'", or "" outside of all ops.
std::string CurrentOp();
// `what`, by the current op.
std::string ByCurrentOp(const std::string& what);

// Whether this thread copies a constant to a device. TensorFlow's devices of plug-ins let such a copy begin before kernels
// have ended that still use its memory (pluggable_device.cc, `sync_dst_compute`), as its own GPUs do not.
bool CopiesConstant();

// From now on ops of this device and what its allocator frees are seen. Once for each device.
void Watch(tensorflow::DeviceBase* device, int ordinal);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_CURRENT_OP_H_
