// The allocator that TensorFlow's GPUs have under TF_GPU_ALLOCATOR=cuda_malloc_async, of which devices of plug-ins know
// nothing: no chunks, statistics of the bytes that were requested, and a pool of the driver's behind it
// (gpu_cudamallocasync_allocator.cc).
//
// The driver maps pages where they are needed, so its pool has room for a request where enough bytes are free. Here it has
// many times the device's addresses.

#ifndef TESTS_EMULATED_GPU_CSRC_ASYNC_ALLOCATOR_H_
#define TESTS_EMULATED_GPU_CSRC_ASYNC_ALLOCATOR_H_

#include "tensorflow/core/framework/allocator.h"

namespace emulated_gpu {

// Whether the program's environment requests it.
bool UsesAsyncAllocator();

// A device's; it lives as long as the process.
tensorflow::Allocator* MakeAsyncAllocator(int device);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_ASYNC_ALLOCATOR_H_
