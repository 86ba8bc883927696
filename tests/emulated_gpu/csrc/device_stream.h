// From TensorFlow's devices to the plug-in's streams.
//
// TensorFlow numbers the devices that a program has made visible, and may make several of one (LogicalDeviceConfiguration):
// its numbers are not the plug-in's.

#ifndef TESTS_EMULATED_GPU_CSRC_DEVICE_STREAM_H_
#define TESTS_EMULATED_GPU_CSRC_DEVICE_STREAM_H_

#include "streams.h"
#include "tensorflow/core/framework/device_base.h"

namespace emulated_gpu {

// The one that TensorFlow gives the device's kernels.
SP_Stream_st* ComputeStream(const tensorflow::DeviceBase& device);

// TensorFlow's own object for that stream has from now on the handle that one of CUDA has, for which plug-ins have no place.
void GiveHandle(const tensorflow::DeviceContext& context);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_DEVICE_STREAM_H_
